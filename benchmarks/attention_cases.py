"""What the attention benchmark runs on each rank: decode steps, prefills, peak memory, and measured speeds."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from attention.cost import AttentionShape, Batch, PathName, Rates, choose_path
from attention.entries import EntryFormat, KeyValue, Latent, PagedCache
from attention.exchange import Ending, gather
from attention.kernels import attend_dense
from attention.keys import plan_keys
from attention.merge import Partial, accumulate
from attention.prefill import Path as AttentionPath
from attention.prefill import Planner
from attention.projection import project_heads_of_group
from attention.queries import plan_queries
from attention.step import Step, plan_step
from benchmarks.attention_ranks import time_interleaved
from layouts import Interleave

BLOCK_TOKENS = 64

DECODE = AttentionShape(query_heads=16, kv_heads=1, key_size=128, value_size=128, entry_size=256, element_bytes=4)
DECODE_REQUESTS = 8
HIDDEN_SIZE = 2048

PREFILL = AttentionShape(query_heads=4, kv_heads=1, key_size=64, value_size=64, entry_size=128, element_bytes=4)
PREFILL_WORKSPACE = 8192

LATENT_SIZE, ROTARY_SIZE, MLA_HEADS = 512, 64, 16

Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Load:
    """A step on one rank with random queries, entries and cache. `run(path)` is one layer of it."""

    step: Step
    query: torch.Tensor
    entries: torch.Tensor
    cache: PagedCache
    block_table: torch.Tensor
    slots: torch.Tensor

    def run(self, path: AttentionPath, query: torch.Tensor | None = None) -> Partial:
        scale = float(self.query.shape[-1] ** -0.5)
        queries = self.query if query is None else query
        return path.attend(queries, self.entries, self.cache, self.block_table, self.slots, scale)


def make_load(step: Step, num_heads: int, key_size: int, entry_size: int, format: EntryFormat) -> Load:
    """Blocks of the cache in random order, as after some time of service."""
    totals = [context + new for context, new in zip(step.contexts, step.query_lens, strict=True)]
    num_blocks = [step.interleave.num_virtual_blocks(total) for total in totals]
    order = np.random.default_rng(0).permutation(sum(num_blocks))
    tables = np.split(order, np.cumsum(num_blocks)[:-1])
    padded = np.stack([np.pad(table, (0, max(num_blocks) - len(table))) for table in tables])
    slots = [
        step.interleave.slot_mapping(positions, table, step.shard)
        for positions, table in zip(step.positions, tables, strict=True)
    ]
    num_rows = sum(len(rows) for rows in step.own)
    return Load(
        step=step,
        query=torch.randn(num_rows, num_heads, key_size),
        entries=torch.randn(num_rows, 1, entry_size),
        cache=PagedCache(torch.randn(len(order), 1, step.interleave.block_tokens, entry_size), format),
        block_table=torch.from_numpy(padded),
        slots=torch.from_numpy(np.concatenate(slots)),
    )


def interleave(num_shards: int) -> Interleave:
    return Interleave(num_shards, BLOCK_TOKENS, BLOCK_TOKENS)


def time_decode(rank: int, group: dist.ProcessGroup, context: int, repetitions: int) -> Times:
    """A decode step of one layer, query projection included: one rank with all heads, and all ranks with their share of
    heads and tokens, with both endings, with and without TPA."""
    num_ranks = dist.get_world_size(group)
    lengths, contexts = [1] * DECODE_REQUESTS, [context] * DECODE_REQUESTS
    format = KeyValue(DECODE.key_size, DECODE.value_size)
    hidden = torch.randn(DECODE_REQUESTS, HIDDEN_SIZE)
    weight = torch.randn(DECODE.query_heads * DECODE.key_size, HIDDEN_SIZE) / HIDDEN_SIZE**0.5
    parts = {False: weight.tensor_split(num_ranks)[rank]}
    parts[True] = project_heads_of_group(weight, tp=num_ranks, dcp=num_ranks, tp_rank=rank)

    def projected(load: Load, path: AttentionPath, part: torch.Tensor) -> Partial:
        return load.run(path, (hidden @ part.T).unflatten(1, (-1, DECODE.key_size)))

    alone: Callable[[], object] | None = None
    sizes = (DECODE.query_heads, DECODE.key_size, DECODE.entry_size, format)
    if rank == 0:
        step = plan_step(lengths, contexts, interleave(1))
        alone = partial(projected, make_load(step, *sizes), plan_queries(step), weight)
    step = plan_step(lengths, contexts, interleave(num_ranks), shards=group)
    load = make_load(step, *sizes)
    together = {
        f"{ending}{', TPA' if tpa else ''}": partial(
            projected, load, plan_queries(step, ending, has_all_heads=tpa), parts[tpa]
        )
        for ending in Ending
        for tpa in (False, True)
    }
    return time_interleaved(alone, together, group, repetitions)


def choose_prefill(new: int, context: int, num_ranks: int, rates: Rates) -> PathName:
    """The path for one prompt on PCP ranks over which the cache is sharded too."""
    return choose_path(PREFILL, Batch((new,), (context,), num_ranks, num_ranks, PREFILL_WORKSPACE), rates)


def time_prefill(rank: int, group: dist.ProcessGroup, new: int, context: int, repetitions: int) -> Times:
    """A prefill of one layer, attention alone: one rank with all rows, and all ranks with theirs on each path, over a
    cache that is sharded over the same ranks."""
    format = KeyValue(PREFILL.key_size, PREFILL.value_size)
    sizes = (PREFILL.query_heads, PREFILL.key_size, PREFILL.entry_size, format)
    alone: Callable[[], object] | None = None
    if rank == 0:
        step = plan_step([new], [context], interleave(1))
        alone = partial(make_load(step, *sizes).run, plan_queries(step))
    step = plan_step([new], [context], interleave(dist.get_world_size(group)), rows=group, shards=group)
    load = make_load(step, *sizes)
    paths = Planner(PREFILL, Rates(), PREFILL_WORKSPACE)
    together = {str(name): partial(load.run, paths.plan_path(name, step)) for name in PathName}
    return time_interleaved(alone, together, group, repetitions)


def measure_memory(rank: int, group: dist.ProcessGroup, context: int, workspace_tokens: int) -> dict[str, int]:
    """Peak extra bytes of an absorbed MLA decode step whose latents are gathered through the workspace."""
    entry_size = LATENT_SIZE + ROTARY_SIZE

    def prepare(num_tokens: int) -> Callable[[], Partial]:
        step = plan_step([1], [num_tokens], interleave(dist.get_world_size(group)), shards=group)
        load = make_load(step, MLA_HEADS, entry_size, entry_size, Latent(LATENT_SIZE))
        return partial(load.run, plan_keys(step, workspace_tokens))

    _return_freed_memory()
    prepare(workspace_tokens)()  # what is loaded and set up once does not count
    run = prepare(context)
    dist.barrier(group)
    return {
        "context": context,
        "peak_bytes": _peak_bytes(run),
        "workspace_bytes": workspace_tokens * entry_size * torch.float32.itemsize,
        "cache_bytes": context * entry_size * torch.float32.itemsize // dist.get_world_size(group),
    }


def _return_freed_memory() -> None:
    """Makes glibc give freed tensors back to the system, and not keep them as resident memory for later use."""
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 16)


def _peak_bytes(run: Callable[[], object]) -> int:
    """How far the resident memory of this process rises above where it was (Linux); scratch of kernels and of the
    process group included."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the present size
    before = _peak_resident_bytes()
    run()
    return _peak_resident_bytes() - before


def _peak_resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure_rates(rank: int, group: dist.ProcessGroup, repetitions: int) -> Rates:
    """What this machine does, for the cost function; medians. Nothing overlaps: links are copies by the same cores."""
    query, key = torch.randn(PREFILL.query_heads, 2048, PREFILL.key_size), torch.randn(1, 4096, PREFILL.key_size)
    flops = 4 * query.shape[0] * query.shape[1] * key.shape[1] * PREFILL.key_size
    results = Partial(torch.zeros(8192, 4, 64), torch.zeros(8192, 4))
    block = torch.zeros(4 << 20, dtype=torch.uint8)
    seconds = {
        name: _median_s(run, group, repetitions)
        for name, run in {
            "attention": lambda: attend_dense(query, key, key, 0.1),
            "merge": lambda: accumulate(results, results),
            "exchange": lambda: gather(block[:64], group),
            "gather": lambda: gather(block, group),
        }.items()
    }
    received = block.nbytes * (dist.get_world_size(group) - 1)
    return Rates(
        flops_per_s=flops / seconds["attention"],
        link_bytes_per_s=received / max(seconds["gather"] - seconds["exchange"], 1e-9),
        memory_bytes_per_s=3 * (results.out.nbytes + results.lse.nbytes) / seconds["merge"],
        exchange_s=seconds["exchange"],
        overlap=0.0,
    )


def _median_s(run: Callable[[], object], group: dist.ProcessGroup, repetitions: int) -> float:
    run()
    times = []
    for _ in range(repetitions):
        dist.barrier(group)
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return float(np.median(times))

"""Processes that form a torch process group on this machine (gloo), and timings of what they do together."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


def run_ranks(
    num_ranks: int,
    function: Callable[..., Result],
    *arguments: Any,
    preload: Sequence[str] = ("attention.prefill",),
    timeout_s: float = 3600,
) -> list[Result]:
    """Calls `function(rank, group, *arguments)` in a process per rank, each on one thread; returns their results.

    An exception on any rank is raised here. The modules in `preload` are imported once for all ranks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessPoolExecutor(num_ranks, mp_context=context) as pool,
    ):
        store = str(Path(directory) / "store")
        futures = [pool.submit(_run_rank, rank, num_ranks, store, function, arguments) for rank in range(num_ranks)]
        return [future.result(timeout=timeout_s) for future in futures]


def _run_rank(rank: int, num_ranks: int, store: str, function: Callable[..., Result], arguments: Any) -> Result:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        return function(rank, dist.group.WORLD, *arguments)
    finally:
        dist.destroy_process_group()


def time_interleaved(
    alone: Callable[[], object] | None,
    together: Mapping[str, Callable[[], object]],
    group: dist.ProcessGroup,
    repetitions: int,
) -> dict[str, list[float]]:
    """Seconds of each repetition, by name; "one rank" is `alone`, which rank 0 runs while the others wait.

    Each repetition runs everything once, so that other work on the machine meets all alike. What ranks do together
    takes as long as the slowest of them. The first repetition warms up and does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in ("one rank", *together)}
    for repetition in range(repetitions + 1):
        for name, run in (("one rank", alone), *together.items()):
            dist.barrier(group)
            began = time.perf_counter()
            if run is not None:
                run()
            elapsed = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=group)
            if repetition:
                times[name].append(float(elapsed))
    return times

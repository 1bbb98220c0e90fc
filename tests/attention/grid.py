"""The grid of context-parallel attention: every path on real gloo groups against dense attention in float64."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from attention.exchange import Ending
from attention.keys import plan_keys
from attention.local import PADDING
from attention.prefill import Path
from attention.queries import plan_queries
from attention.ring import plan_ring
from attention.step import Step, plan_step
from layouts import Interleave
from tests.attention.workload import SCALE, Kind, Request, answer, format_of, heads_of, make_workload

PATHS = ("keys", "queries", "queries, reduce-scatter", "ring")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
HEADS_PER_RANK = 2
"""Query heads of one rank and KV head."""


@dataclass(frozen=True)
class Ranks:
    """tp * pcp ranks; rank = tp * PCP + pcp, which is also the order of shards. The cache has `num_shards` shards: 1,
    PCP or all ranks."""

    tp: int
    pcp: int
    num_shards: int

    @property
    def num_head_ranks(self) -> int:
        return self.tp if self.num_shards > self.pcp else 1


@dataclass(frozen=True)
class Case:
    """One batch on one path."""

    ranks: Ranks
    path: str
    kind: Kind
    num_kv_heads: int
    interleave_tokens: int
    block_tokens: int
    requests: tuple[Request, ...]
    dtype: torch.dtype = torch.float32
    workspace_blocks: int = 1
    decodes: bool = False

    def __str__(self) -> str:
        ranks, requests = self.ranks, " ".join(f"{each.num_context}+{each.num_new}" for each in self.requests)
        return (
            f"{self.path}, TP {ranks.tp} PCP {ranks.pcp} W {ranks.num_shards}, {self.kind}, "
            f"{self.num_kv_heads} KV heads, I {self.interleave_tokens}, B {self.block_tokens}, {self.dtype}, "
            f"requests {requests}"
        )


def shapes(num_ranks: int) -> Iterator[Ranks]:
    """DCP alone, PCP with a whole and with a sharded cache, and both kinds of ranks."""
    yield Ranks(num_ranks, 1, num_ranks)
    yield Ranks(1, num_ranks, 1)
    yield Ranks(1, num_ranks, num_ranks)
    for tp in range(2, num_ranks):
        if num_ranks % tp == 0:
            yield Ranks(tp, num_ranks // tp, num_ranks)


def edges(ranks: Ranks, interleave_tokens: int, block_tokens: int, *, all_of_them: bool) -> tuple[Request, ...]:
    """Requests of new tokens and contexts around every boundary: chunks, turns, blocks, virtual blocks."""
    turn, virtual = ranks.num_shards * interleave_tokens, ranks.num_shards * block_tokens
    chunks = 2 * ranks.pcp
    new = {1, 2, chunks - 1, chunks, chunks + 1, virtual - 1, virtual + 1, 2 * chunks + 3}
    contexts = {0, 1, interleave_tokens, turn - 1, turn, block_tokens + 1, virtual - 1, virtual, 2 * virtual + turn + 1}
    sizes = sorted(new - {0}), sorted(contexts - {-1})
    if all_of_them:
        return tuple(Request(context, length) for length, context in itertools.product(*sizes))
    longer, shorter = sorted(sizes, key=len, reverse=True)
    pairs = zip(longer, itertools.cycle(shorter), strict=False)
    return tuple(Request(*((b, a) if longer is sizes[0] else (a, b))) for a, b in pairs)


DRAFTS = (Request(126, 4), Request(127, 2), Request(300, 4))
"""Decodes with draft tokens; with W = 2 and I = 128 rows of the first see no, no, one and two keys of shard 1."""
DECODES = (Request(0, 1), Request(9, 1), Request(40, 1))


ONE_OF = {2: 7, 3: 11, 4: 13, 6: 29, 8: 31}
"""How many products of the grid there are to one that is selected; prime to the size of every dimension."""


def grid(num_ranks: int, *, whole: bool) -> Iterator[Case]:
    """Cases of a rank set: a selection in which each value of each dimension occurs, or all."""
    kinds: list[tuple[Kind, int]] = [("gqa", 1), ("gqa", 2), ("gqa", 4), ("latent", 1), ("expanded", 1)]
    interleaves = [(1, 4), (2, 4), (4, 4)]
    products = itertools.product(shapes(num_ranks), PATHS, kinds, interleaves, TOLERANCES)
    for index, (ranks, path, (kind, num_kv_heads), (tokens, block), dtype) in enumerate(products):
        if is_possible(ranks, path, kind) and (whole or index % ONE_OF[num_ranks] == 0):
            requests = edges(ranks, tokens, block, all_of_them=whole)
            yield Case(ranks, path, kind, num_kv_heads, tokens, block, requests, dtype, workspace_blocks=1 + index % 3)
    if whole or num_ranks == 2:
        for ranks, path, kind in itertools.product(shapes(num_ranks), PATHS, ("gqa", "latent")):
            yield Case(ranks, path, kind, 1, 128, 128, DRAFTS, decodes=True)
            yield Case(ranks, path, kind, 1, 4, 4, DECODES)


def is_possible(ranks: Ranks, path: str, kind: Kind) -> bool:
    """Another rank's query heads have other expanded keys: to travel, queries must be absorbed."""
    return not (kind == "expanded" and path.startswith("queries") and ranks.num_head_ranks > 1)


def run_grid(rank: int, world: dist.ProcessGroup, cases: Iterable[Case]) -> list[Case]:
    """The cases that were wrong on this rank."""
    groups = Groups(rank)
    return [case for case in cases if not is_exact(case, groups)]


def count_requests(cases: Iterable[Case]) -> Counter[str]:
    """Requests of cases, by path."""
    counts: Counter[str] = Counter()
    for case in cases:
        counts[case.path] += len(case.requests)
    return counts


class Groups:
    """The process groups of each way to arrange the ranks, made when first asked for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._of: dict[tuple[int, int], dist.ProcessGroup] = {}

    def rows(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """The ranks of this rank's PCP group."""
        if ranks.pcp == 1:
            return None
        key = (ranks.tp, ranks.pcp)
        if key not in self._of:
            members = [list(range(tp * ranks.pcp, (tp + 1) * ranks.pcp)) for tp in range(ranks.tp)]
            self._of[key], _ = dist.new_subgroups_by_enumeration(members)
        return self._of[key]

    def shards(self, ranks: Ranks) -> dist.ProcessGroup | None:
        if ranks.num_shards == 1:
            return None
        return dist.group.WORLD if ranks.num_shards == ranks.tp * ranks.pcp else self.rows(ranks)


def plan(case: Case, step: Step) -> Path:
    workspace_tokens = case.workspace_blocks * step.interleave.virtual_block_tokens
    if case.path == "keys":
        return plan_keys(step, workspace_tokens)
    if case.path == "ring":
        return plan_ring(step, workspace_tokens)
    return plan_queries(step, Ending.ALL_TO_ALL if case.path == "queries" else Ending.REDUCE_SCATTER)


def is_exact(case: Case, groups: Groups) -> bool:
    """Runs one case; whether this rank's results and pages are right."""
    ranks = case.ranks
    head_rank, num_head_ranks = groups.rank // ranks.pcp, ranks.tp
    num_heads = case.num_kv_heads * HEADS_PER_RANK * num_head_ranks
    workload = make_workload(
        case.requests, num_heads=num_heads, num_kv_heads=case.num_kv_heads, kind=case.kind, dtype=case.dtype
    )
    interleave = Interleave(ranks.num_shards, case.interleave_tokens, case.block_tokens)
    rows, shards = groups.rows(ranks), groups.shards(ranks)
    step = plan_step(
        workload.query_lens,
        workload.contexts,
        interleave,
        rows=rows,
        shards=shards,
        decodes=[case.decodes] * len(case.requests),
    )
    cache, table = workload.cache(interleave, step.shard, with_new=False)
    query = heads_of(workload.query, case.num_kv_heads, head_rank, num_head_ranks)
    mine = type(cache)(cache.pages, format_of(workload.format, head_rank, num_head_ranks))
    part = plan(case, step).attend(
        query if step.split is None else step.split.select(query),
        workload.new_entries if step.split is None else step.split.select(workload.new_entries),
        mine,
        table,
        workload.slots(interleave, step.shard, table),
        SCALE,
    )
    expected = answer((case.requests, num_heads, case.num_kv_heads, case.kind, case.dtype))
    return agrees(case, step, part, expected, head_rank) and same_pages(
        cache.pages, workload.cache(interleave, step.shard)[0].pages
    )


def agrees(case: Case, step: Step, part: Any, expected: Any, head_rank: int) -> bool:
    """Whether own rows have the expected results, and padding nothing that would spread as NaN."""
    tolerance = TOLERANCES[case.dtype]
    is_token = torch.from_numpy(np.concatenate(step.own) != PADDING)
    for got, want in zip(part, expected, strict=True):
        want = heads_of(want, case.num_kv_heads, head_rank, case.ranks.tp)
        want = want if step.split is None else step.split.select(want)
        if not torch.allclose(got[is_token], want[is_token], rtol=tolerance, atol=tolerance):
            return False
    return bool(part.out.isfinite().all())


def same_pages(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))

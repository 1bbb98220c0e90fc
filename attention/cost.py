"""What each path costs in time and memory, and which one a batch should take. Standard library only: no tensor.

Every rank computes an equal share on every path, so what differs is what travels, what is expanded and merged, and
what of it hides behind computation. Times are of one layer on one rank; a model of first order, meant to rank paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from layouts.errors import config_error, require_at_least

_RESULT_BYTES = 4
"""Partial results and lse are float32."""


class PathName(StrEnum):
    """The ways for rows to reach the keys of other ranks."""

    KEYS = "all-gather KV"
    QUERIES = "all-gather Q"
    RING = "ring"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one layer on one rank.

    Args:
        query_heads, kv_heads: of this rank.
        key_size, value_size: columns of a query, and of a result.
        entry_size: elements of one token of one KV head in the cache.
        element_bytes: of queries and entries.
        expand_flops: floating-point operations that turn one token's entries into keys and values (MLA, not absorbed).
    """

    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    entry_size: int
    element_bytes: int = 2
    expand_flops: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, **{name: getattr(self, name) for name in self.__slots__ if name != "expand_flops"})
        require_at_least(0, expand_flops=self.expand_flops)

    @property
    def entry_bytes(self) -> int:
        """One token in the cache of one rank."""
        return self.kv_heads * self.entry_size * self.element_bytes

    @property
    def query_bytes(self) -> int:
        """One row of queries."""
        return self.query_heads * self.key_size * self.element_bytes

    @property
    def result_bytes(self) -> int:
        """One row of partial results with its lse."""
        return self.query_heads * (self.value_size + 1) * _RESULT_BYTES


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of one rank. The defaults are of the order of a current accelerator with a fast link; measure yours.

    Args:
        flops_per_s: floating-point operations in attention.
        link_bytes_per_s: what a rank receives in an exchange.
        memory_bytes_per_s: what merging results and reordering entries read and write.
        exchange_s: the time of an exchange of next to nothing.
        overlap: share of a ring's travel that hides behind computation, 0 to 1.
        reduces_in_network: whether a reduce-scatter sends each rank its sum alone.
    """

    flops_per_s: float = 4e14
    link_bytes_per_s: float = 3e11
    memory_bytes_per_s: float = 2e12
    exchange_s: float = 2e-5
    overlap: float = 0.8
    reduces_in_network: bool = False

    def __post_init__(self) -> None:
        positive = (self.flops_per_s, self.link_bytes_per_s, self.memory_bytes_per_s)
        if min(positive) <= 0 or self.exchange_s < 0 or not 0 <= self.overlap <= 1:
            raise config_error(
                "rates",
                got=self,
                allowed="speeds above 0, exchange_s of 0 or more, overlap from 0 to 1",
                remedy="Measure them with python -m benchmarks.attention.",
            )


@dataclass(frozen=True, slots=True)
class Batch:
    """A step in numbers: new tokens and context of each request, PCP ranks, shards of the cache (1, or a multiple of
    PCP), and the tokens of context that are exchanged at a time."""

    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    pcp: int
    num_shards: int
    workspace_tokens: int = 4096

    def __post_init__(self) -> None:
        require_at_least(1, pcp=self.pcp, num_shards=self.num_shards, workspace_tokens=self.workspace_tokens)

    @property
    def num_new(self) -> int:
        return sum(self.query_lens)

    @property
    def num_own(self) -> int:
        """Rows that one rank computes."""
        return ceil(self.num_new / self.pcp)

    @property
    def num_context(self) -> int:
        return sum(self.contexts)

    @property
    def num_pairs(self) -> int:
        """Pairs of a new token and a token it sees."""
        return sum(n * c + n * (n + 1) // 2 for n, c in zip(self.query_lens, self.contexts, strict=True))

    @property
    def num_pieces(self) -> int:
        """Exchanges of context from all shards."""
        return ceil(self.num_context / self.workspace_tokens) if self.num_shards > 1 else 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds and peak extra bytes of one path."""

    compute_s: float
    merge_s: float
    travel_s: float
    peak_bytes: int

    @property
    def total_s(self) -> float:
        return self.compute_s + self.merge_s + self.travel_s


def path_costs(shape: AttentionShape, batch: Batch, rates: Rates) -> dict[PathName, Cost]:
    """The cost of every path, as a table over paths."""
    return {
        PathName.KEYS: _keys(shape, batch, rates),
        PathName.QUERIES: _queries(shape, batch, rates),
        PathName.RING: _ring(shape, batch, rates),
    }


def choose_path(
    shape: AttentionShape,
    batch: Batch,
    rates: Rates,
    paths: Sequence[PathName] = tuple(PathName),
    free_bytes: int | None = None,
) -> PathName:
    """The fastest of `paths` whose peak fits `free_bytes` (None: any); where none fits, the smallest."""
    costs = path_costs(shape, batch, rates)
    fitting = [path for path in paths if free_bytes is None or costs[path].peak_bytes <= free_bytes]
    if not fitting:
        return min(paths, key=lambda path: costs[path].peak_bytes)
    return min(fitting, key=lambda path: costs[path].total_s)


def reduces(num_rows: int, shape: AttentionShape, num_ranks: int, rates: Rates) -> bool:
    """Whether results should come together by all-gather of lse and reduce-scatter, not by one all-to-all.

    num_rows: rows whose results a rank gets. One exchange of (out, lse) against two, of which the second is small only
    where the network adds up.
    """
    row_bytes, lse_bytes = shape.result_bytes, shape.query_heads * _RESULT_BYTES
    others = num_ranks - 1
    all_to_all_s = rates.exchange_s + others * num_rows * row_bytes / rates.link_bytes_per_s
    sums = num_rows * (row_bytes - lse_bytes) * (1 if rates.reduces_in_network else others)
    lses = others * num_ranks * num_rows * lse_bytes
    return 2 * rates.exchange_s + (sums + lses) / rates.link_bytes_per_s < all_to_all_s


def _compute_s(shape: AttentionShape, batch: Batch, num_expanded: float, rates: Rates) -> float:
    pair_flops = 2 * shape.query_heads * (shape.key_size + shape.value_size)
    return (batch.num_pairs / batch.pcp * pair_flops + num_expanded * shape.expand_flops) / rates.flops_per_s


def _received(num_bytes: float, num_ranks: int) -> float:
    """What a rank receives of `num_bytes` that are spread evenly over the ranks."""
    return num_bytes * (num_ranks - 1) / num_ranks


def _new_keys(shape: AttentionShape, batch: Batch) -> float:
    return _received(batch.num_new * shape.entry_bytes, batch.pcp)


def _context(shape: AttentionShape, batch: Batch) -> float:
    return _received(batch.num_context * shape.entry_bytes, batch.num_shards)


def _merged(shape: AttentionShape, num_rows: float, num_parts: float, rates: Rates) -> float:
    """Reading two and writing one result for every part."""
    return 3 * num_parts * num_rows * shape.result_bytes / rates.memory_bytes_per_s


def _reordered_s(shape: AttentionShape, batch: Batch, rates: Rates) -> float:
    """Bringing gathered entries from the order of ranks into that of positions: reading and writing each once."""
    num_tokens = (batch.num_new if batch.pcp > 1 else 0) + (batch.num_context if batch.num_shards > 1 else 0)
    return 2 * num_tokens * shape.entry_bytes / rates.memory_bytes_per_s


def _workspace_bytes(shape: AttentionShape, batch: Batch) -> int:
    return batch.workspace_tokens * shape.entry_bytes if batch.num_shards > 1 else 0


def _keys(shape: AttentionShape, batch: Batch, rates: Rates) -> Cost:
    """New keys and the context come to the own rows."""
    num_bytes = _new_keys(shape, batch) + _context(shape, batch)
    return Cost(
        compute_s=_compute_s(shape, batch, batch.num_new + batch.num_context, rates),
        merge_s=_merged(shape, batch.num_own, 1 + batch.num_pieces, rates) + _reordered_s(shape, batch, rates),
        travel_s=(1 + batch.num_pieces) * rates.exchange_s + num_bytes / rates.link_bytes_per_s,
        peak_bytes=batch.num_new * shape.entry_bytes
        + 2 * _workspace_bytes(shape, batch)
        + 2 * batch.num_own * shape.result_bytes,
    )


def _queries(shape: AttentionShape, batch: Batch, rates: Rates) -> Cost:
    """New keys to be stored; queries of all ranks come, their results go back."""
    num_ranks = max(batch.num_shards, batch.pcp)
    row_bytes = shape.query_bytes + shape.result_bytes
    num_bytes = _new_keys(shape, batch) + (num_ranks - 1) * batch.num_own * row_bytes
    return Cost(
        compute_s=_compute_s(shape, batch, (batch.num_new + batch.num_context) / num_ranks, rates),
        merge_s=_merged(shape, batch.num_own, 2 * num_ranks, rates),
        travel_s=3 * rates.exchange_s + num_bytes / rates.link_bytes_per_s,
        peak_bytes=batch.num_new * shape.entry_bytes
        + num_ranks * batch.num_own * (shape.query_bytes + 3 * shape.result_bytes),
    )


def _ring(shape: AttentionShape, batch: Batch, rates: Rates) -> Cost:
    """New keys and the context visit the own rows, one rank at a time."""
    num_visits = batch.pcp - 1 + batch.num_pieces * (batch.num_shards - 1)
    num_bytes = _new_keys(shape, batch) + _context(shape, batch)
    compute_s = _compute_s(shape, batch, batch.num_new + batch.num_context, rates)
    travel_s = num_visits * rates.exchange_s + num_bytes / rates.link_bytes_per_s
    return Cost(
        compute_s=compute_s,
        merge_s=_merged(shape, batch.num_own, batch.pcp + batch.num_pieces * batch.num_shards, rates),
        travel_s=travel_s - min(rates.overlap * travel_s, compute_s),
        peak_bytes=2 * batch.num_own * shape.entry_bytes
        + ceil(2 * _workspace_bytes(shape, batch) / batch.num_shards)
        + 2 * batch.num_own * shape.result_bytes,
    )

"""Batches with a cache for the attention tests, and slow single-rank answers for them in float64."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch

from attention.entries import EntryFormat, ExpandedLatent, KeyValue, Latent, PagedCache
from attention.merge import Partial
from layouts import Interleave

SCALE = 0.25
LATENT, ROTARY, NOPE, VALUE = 24, 4, 12, 8
HEAD_SIZE = 16
TILE_TOKENS = 8
"""Far fewer than the formats' own, so that short sequences have several tiles."""

Kind = Literal["gqa", "latent", "expanded"]


@dataclass(frozen=True, slots=True)
class Request:
    """`num_context` tokens are in the cache already, `num_new` are this step's."""

    num_context: int
    num_new: int

    @property
    def num_tokens(self) -> int:
        return self.num_context + self.num_new


MIXED = (Request(5, 1), Request(0, 1), Request(0, 9), Request(7, 6), Request(0, 16), Request(30, 1), Request(21, 3))
"""Decodes, first prefills, chunked prefills; some shorter than one turn of the shards."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Queries [rows, Hq, K] of all requests, and the cache entries [tokens, Hkv, E] of each."""

    requests: tuple[Request, ...]
    query: torch.Tensor
    entries: tuple[torch.Tensor, ...]
    format: EntryFormat

    @property
    def query_lens(self) -> list[int]:
        return [request.num_new for request in self.requests]

    @property
    def contexts(self) -> list[int]:
        return [request.num_context for request in self.requests]

    @property
    def positions(self) -> list[np.ndarray]:
        """Positions of each request's rows."""
        return [np.arange(request.num_context, request.num_tokens) for request in self.requests]

    @property
    def new_entries(self) -> torch.Tensor:
        """The entries of this step's tokens [rows, Hkv, E]."""
        pairs = zip(self.requests, self.entries, strict=True)
        return torch.cat([entries[request.num_context :] for request, entries in pairs])

    def answer(self) -> Partial:
        """All rows by softmax over the whole sequence, in float64: out [rows, Hq, V], lse [rows, Hq]."""
        outs, lses, row = [], [], 0
        for request, entries in zip(self.requests, self.entries, strict=True):
            key, value = in_float64(self.format).read(entries.double())
            query = self.query[row : row + request.num_new].double()
            group = query.shape[1] // len(key)
            scores = torch.einsum("qhd,hkd->hqk", query, key.repeat_interleave(group, 0)) * SCALE
            visible = torch.arange(request.num_context, request.num_tokens) + 1
            scores.masked_fill_(torch.arange(request.num_tokens) >= visible[:, None], -torch.inf)
            value = value[..., : self.format.value_size].repeat_interleave(group, 0)
            outs.append(torch.einsum("hqk,hkd->qhd", scores.softmax(-1), value))
            lses.append(scores.logsumexp(-1).T)
            row += request.num_new
        return Partial(torch.cat(outs).float(), torch.cat(lses).float())

    def cache(self, interleave: Interleave, shard: int, *, with_new: bool = True) -> tuple[PagedCache, torch.Tensor]:
        """Pages of one shard with the tokens written, and the block table; pages start as NaN.

        Blocks come in falling order, as a free list hands them out.
        """
        num_blocks = [interleave.num_virtual_blocks(request.num_tokens) for request in self.requests]
        table = torch.zeros(len(self.requests), max(num_blocks), dtype=torch.int32)
        num_heads, size = self.entries[0].shape[1:]
        pages = torch.full((sum(num_blocks) + 1, num_heads, interleave.block_tokens, size), torch.nan)
        cached = PagedCache(pages.to(self.query.dtype), self.format)
        free = list(range(sum(num_blocks) + 1))
        for index, (request, entries) in enumerate(zip(self.requests, self.entries, strict=True)):
            ids = [free.pop() for _ in range(num_blocks[index])]
            table[index, : len(ids)] = torch.tensor(ids)
            num_tokens = request.num_tokens if with_new else request.num_context
            slots = interleave.slot_mapping(np.arange(num_tokens), ids, shard)
            cached.write(torch.from_numpy(slots), entries[:num_tokens])
        return cached, table

    def slots(self, interleave: Interleave, shard: int, table: torch.Tensor) -> torch.Tensor:
        """Flat slots of this step's tokens on a shard."""
        pairs = zip(self.positions, table.numpy(), strict=True)
        return torch.from_numpy(np.concatenate([interleave.slot_mapping(rows, ids, shard) for rows, ids in pairs]))


def in_float64(format: EntryFormat) -> EntryFormat:
    if isinstance(format, ExpandedLatent):
        return replace(format, up_key=format.up_key.double(), up_value=format.up_value.double())
    return format


@cache
def make_workload(
    requests: tuple[Request, ...] = MIXED,
    *,
    num_heads: int = 8,
    num_kv_heads: int = 1,
    kind: Kind = "gqa",
    dtype: torch.dtype = torch.float32,
) -> Workload:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    entry_size = 2 * HEAD_SIZE if kind == "gqa" else LATENT + ROTARY
    entries = tuple(normal(request.num_tokens, num_kv_heads, entry_size) for request in requests)
    formats: dict[str, Any] = {
        "gqa": (HEAD_SIZE, lambda: KeyValue(HEAD_SIZE, HEAD_SIZE, TILE_TOKENS)),
        "latent": (LATENT + ROTARY, lambda: Latent(LATENT, TILE_TOKENS)),
        "expanded": (
            NOPE + ROTARY,
            lambda: ExpandedLatent(
                normal(num_heads, NOPE, LATENT) / 4, normal(num_heads, LATENT, VALUE) / 4, TILE_TOKENS
            ),
        ),
    }
    query_size, make_format = formats[kind]
    query = normal(sum(request.num_new for request in requests), num_heads, query_size)
    return Workload(requests, query, entries, make_format())


@cache
def answer(workload_key: tuple[Any, ...]) -> Partial:
    """The answer of `make_workload` with these arguments, computed once."""
    requests, num_heads, num_kv_heads, kind, dtype = workload_key
    return make_workload(requests, num_heads=num_heads, num_kv_heads=num_kv_heads, kind=kind, dtype=dtype).answer()


def heads_of(rows: torch.Tensor, num_kv_heads: int, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's query heads: its share of those of each KV head. rows [T, Hq, ...]."""
    return rows.unflatten(1, (num_kv_heads, num_ranks, -1))[:, :, rank].flatten(1, 2)


def format_of(format: EntryFormat, rank: int, num_ranks: int) -> EntryFormat:
    """A format for a rank's query heads."""
    if not isinstance(format, ExpandedLatent):
        return format
    up_key, up_value = (each.tensor_split(num_ranks)[rank] for each in (format.up_key, format.up_value))
    return replace(format, up_key=up_key, up_value=up_value)

"""Batches with a cache for the attention tests, and slow single-rank answers for them."""

from dataclasses import dataclass

import numpy as np
import torch

from attention.local import write_tokens
from layouts import Interleave

HEAD_SIZE = 16
SCALE = 0.25


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
    """Queries [rows, Hq, D] of all requests, keys and values [tokens, Hkv, D] per request."""

    requests: tuple[Request, ...]
    query: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @property
    def query_lens(self) -> list[int]:
        return [request.num_new for request in self.requests]

    @property
    def positions(self) -> list[np.ndarray]:
        """Positions of each request's rows."""
        return [np.arange(request.num_context, request.num_tokens) for request in self.requests]

    def answer(self) -> torch.Tensor:
        """The attention output of all rows [rows, Hq, D], by softmax over the whole sequence in float64."""
        outs, row = [], 0
        for request, key, value in zip(self.requests, self.keys, self.values, strict=True):
            query = self.query[row : row + request.num_new].double()
            group = query.shape[1] // key.shape[1]
            scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1).double()) * SCALE
            visible = torch.arange(request.num_context, request.num_tokens) + 1
            scores.masked_fill_(torch.arange(request.num_tokens) >= visible[:, None], -torch.inf)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(group, 1).double()))
            row += request.num_new
        return torch.cat(outs).float()

    def cache(self, interleave: Interleave, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of one shard with all tokens written, and the block table; pages start as NaN.

        Blocks come in falling order, as a free list hands them out.
        """
        num_blocks = [interleave.num_virtual_blocks(request.num_tokens) for request in self.requests]
        table = torch.zeros(len(self.requests), max(num_blocks), dtype=torch.int32)
        num_heads = self.keys[0].shape[1]
        pages = torch.full(
            (sum(num_blocks) + 1, num_heads, interleave.block_tokens, 2 * HEAD_SIZE), torch.nan, dtype=torch.float32
        )
        free = list(range(sum(num_blocks) + 1))
        for index, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            ids = [free.pop() for _ in range(num_blocks[index])]
            table[index, : len(ids)] = torch.tensor(ids)
            slots = interleave.slot_mapping(np.arange(len(key)), ids, shard)
            write_tokens(pages, torch.from_numpy(slots), key, value)
        return pages, table


def make_workload(
    requests: tuple[Request, ...] = MIXED, *, num_heads: int = 8, num_kv_heads: int = 1, seed: int = 0
) -> Workload:
    generator = torch.Generator().manual_seed(seed)

    def normal(num_rows: int, heads: int) -> torch.Tensor:
        return torch.randn(num_rows, heads, HEAD_SIZE, generator=generator)

    return Workload(
        requests,
        normal(sum(request.num_new for request in requests), num_heads),
        tuple(normal(request.num_tokens, num_kv_heads) for request in requests),
        tuple(normal(request.num_tokens, num_kv_heads) for request in requests),
    )

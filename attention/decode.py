"""Grouped-query attention over a KV cache that is sharded inside a tensor-parallel group (DCP).

All ranks of the group share their KV heads and hold different tokens. Each row needs all tokens, so queries travel:
gather them over heads, attend to the own shard, send each rank its heads' partial results, merge. New tokens are in
the cache before attention starts, so prefills, decodes and speculative rows are the same case.
"""

import torch
import torch.distributed as dist

from attention.exchange import combine, gather
from attention.local import LocalBatch, attend_local
from attention.merge import Partial


def gather_heads(query: torch.Tensor, num_kv_heads: int, group: dist.ProcessGroup) -> torch.Tensor:
    """query [T, Hq, D] of every rank -> [T, W Hq, D], ordered so that each KV head's queries are adjacent."""
    grouped = gather(query.unflatten(1, (num_kv_heads, -1)), group)  # [W, T, Hkv, Hq / Hkv, D]
    return grouped.permute(1, 2, 0, 3, 4).flatten(1, 3)


def combine_heads(part: Partial, num_kv_heads: int, group: dist.ProcessGroup) -> Partial:
    """The inverse of `gather_heads` for results: each rank gets its own heads, merged over all shards."""
    num_ranks = dist.get_world_size(group)
    out = part.out.unflatten(1, (num_kv_heads, num_ranks, -1)).permute(2, 0, 1, 3, 4)
    lse = part.lse.unflatten(1, (num_kv_heads, num_ranks, -1)).permute(2, 0, 1, 3)
    mine = combine(out, lse, group)
    return Partial(mine.out.flatten(1, 2), mine.lse.flatten(1, 2))


def attend_over_heads(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    batch: LocalBatch,
    scale: float,
    group: dist.ProcessGroup,
) -> Partial:
    """As `local.attend_local`, over the tokens of all shards. `batch` is planned with this rank's shard."""
    num_kv_heads = pages.shape[1]
    gathered = gather_heads(query, num_kv_heads, group)
    return combine_heads(attend_local(gathered, pages, block_table, batch, scale), num_kv_heads, group)

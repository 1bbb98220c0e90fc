"""The two collectives the attention paths need, on any torch process group and device."""

import torch
import torch.distributed as dist

from attention.merge import Partial, merge


def gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' `tensor` (equal shapes), stacked by rank: [num_ranks, ...]."""
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    dist.all_gather_single(gathered.flatten(0, 1), tensor.contiguous(), group=group)
    return gathered


def combine(out: torch.Tensor, lse: torch.Tensor, group: dist.ProcessGroup) -> Partial:
    """Every rank holds partial results for all ranks and gets its own share, merged over all shards.

    out [num_ranks, ..., D] and lse [num_ranks, ...] float32: entry r goes to rank r. One all-to-all carries both.
    """
    packed = torch.cat([out, lse.unsqueeze(-1)], dim=-1).contiguous()
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    return merge(received[..., :-1], received[..., -1])

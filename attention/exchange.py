"""The exchanges the attention paths need, on any torch process group and device. Knows nothing of heads and rows."""

from collections.abc import Iterator
from enum import StrEnum

import torch
import torch.distributed as dist

from attention.merge import Partial, merge, share


class Ending(StrEnum):
    """How partial results come together at the ranks that own their rows."""

    ALL_TO_ALL = "all-to-all"
    """One exchange of (out, lse); each rank merges what it gets."""
    REDUCE_SCATTER = "reduce-scatter"
    """All-gather the lse, weigh the own results with them, and sum while scattering."""


def gather(tensor: torch.Tensor, group: dist.ProcessGroup, into: torch.Tensor | None = None) -> torch.Tensor:
    """All ranks' `tensor` [n, ...] (equal shapes), stacked by rank: [num_ranks, n, ...]; at the start of `into`
    [>= num_ranks * n, ...] where that is given."""
    num_ranks = dist.get_world_size(group)
    num_rows = num_ranks * len(tensor)
    gathered = tensor.new_empty((num_rows, *tensor.shape[1:])) if into is None else into[:num_rows]
    by_rank = gathered.unflatten(0, (num_ranks, len(tensor)))
    if tensor.device.type == "cpu":
        _gather_pairwise(by_rank, tensor.contiguous(), group)
    else:
        dist.all_gather_single(gathered, tensor.contiguous(), group=group)
    return by_rank


def _gather_pairwise(by_rank: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank sends to every other. Gloo's own all-gather allocates the whole result a second time and copies it."""
    rank = dist.get_rank(group)
    by_rank[rank] = tensor
    others = [peer for peer in range(len(by_rank)) if peer != rank]
    sends = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer in others]
    receives = [dist.P2POp(dist.irecv, by_rank[peer], group=group, group_peer=peer) for peer in others]
    for work in dist.batch_isend_irecv(sends + receives) if others else ():
        work.wait()


def combine(part: Partial, group: dist.ProcessGroup, ending: Ending) -> Partial:
    """Every rank holds partial results for all ranks and gets its own share, merged over all of them.

    part: out [num_ranks, ..., D] and lse [num_ranks, ...] float32, of which entry r goes to rank r.
    """
    return _exchange(part, group) if ending == Ending.ALL_TO_ALL else _reduce(part, group)


def _exchange(part: Partial, group: dist.ProcessGroup) -> Partial:
    packed = torch.cat([part.out, part.lse.unsqueeze(-1)], dim=-1)
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    return merge(received[..., :-1], received[..., -1])


def _reduce(part: Partial, group: dist.ProcessGroup) -> Partial:
    total = gather(part.lse, group).logsumexp(dim=0)
    weighed = part.out * share(part.lse, total).unsqueeze(-1)
    out = weighed.new_empty(weighed.shape[1:])
    dist.reduce_scatter_single(out.flatten(), weighed.flatten(), group=group)
    return Partial(out, total[dist.get_rank(group)])


def combine_copies(part: Partial, group: dist.ProcessGroup) -> Partial:
    """Every rank holds partial results of the same rows, and gets all of them merged."""
    packed = gather(torch.cat([part.out, part.lse.unsqueeze(-1)], dim=-1), group)
    return merge(packed[..., :-1], packed[..., -1])


def rotate(tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, its tensor) for all ranks of the group, the own first: each hands on what it has to the next rank.

    The next tensor travels while the caller works with this one. Shapes are equal on all ranks.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    following, preceding = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    visiting = tensor.contiguous()
    for step in range(num_ranks):
        works, coming = [], visiting
        if step + 1 < num_ranks:
            coming = torch.empty_like(visiting)
            sends = dist.P2POp(dist.isend, visiting, group=group, group_peer=following)
            receives = dist.P2POp(dist.irecv, coming, group=group, group_peer=preceding)
            works = dist.batch_isend_irecv([sends, receives])
        yield (rank - step) % num_ranks, visiting
        for work in works:
            work.wait()
        visiting = coming

"""Merging of partial attention results by their log-sum-exp. Pure tensor arithmetic: knows no group and no cache."""

from typing import NamedTuple

import torch


class Partial(NamedTuple):
    """Attention over some of the keys: `out` [..., D] (softmax over those keys only), `lse` [...] float32, natural log.

    Without any key: out 0 and lse -inf, the neutral element of `merge`.
    """

    out: torch.Tensor
    lse: torch.Tensor


def empty_partial(shape: tuple[int, ...], value_size: int, device: torch.device | None = None) -> Partial:
    """The result of attending to nothing, for `shape` rows and heads."""
    out = torch.zeros((*shape, value_size), dtype=torch.float32, device=device)
    return Partial(out, torch.full(shape, -torch.inf, dtype=torch.float32, device=device))


def merge(out: torch.Tensor, lse: torch.Tensor) -> Partial:
    """Merges `n` partial results: out [n, ..., D], lse [n, ...] -> Partial, in float32.

    lse = log sum exp lse_i, out = sum exp(lse_i - lse) out_i (Rabe and Staats 2021; Dao 2022). A row that has no key
    in any part stays out 0, lse -inf.
    """
    lse = lse.float()
    total = torch.logsumexp(lse, dim=0)
    return Partial((share(lse, total).unsqueeze(-1) * out.float()).sum(dim=0), total)


def share(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """exp(lse - total): the weight of a part in the whole; 0 where both are -inf, whose difference would be NaN."""
    return torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))


def accumulate(whole: Partial, part: Partial) -> None:
    """Merges `part` into `whole` in place; both float32 and of equal shape."""
    total = torch.logaddexp(whole.lse, part.lse)
    whole.out.lerp_(part.out, share(part.lse, total).unsqueeze(-1))
    whole.lse.copy_(total)


def merge_all(parts: list[Partial]) -> Partial:
    """Merges partial results of equal shape; one alone is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return merge(torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts]))

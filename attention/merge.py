"""Merging of partial attention results by their log-sum-exp. Pure tensor arithmetic: knows no group and no cache."""

from typing import NamedTuple

import torch


class Partial(NamedTuple):
    """Attention over some of the keys: `out` [..., D] (softmax over those keys only), `lse` [...] float32, natural log.

    Without any key: out 0 and lse -inf, the neutral element of `merge`.
    """

    out: torch.Tensor
    lse: torch.Tensor


def empty_partial(shape: tuple[int, ...], head_size: int, device: torch.device | None = None) -> Partial:
    """The result of attending to nothing, for `shape` rows and heads."""
    out = torch.zeros((*shape, head_size), dtype=torch.float32, device=device)
    return Partial(out, torch.full(shape, -torch.inf, dtype=torch.float32, device=device))


def merge(out: torch.Tensor, lse: torch.Tensor) -> Partial:
    """Merges `n` partial results: out [n, ..., D], lse [n, ...] -> Partial, in float32.

    lse = log sum exp lse_i, out = sum exp(lse_i - lse) out_i (Rabe and Staats 2021; Dao 2022). A row that has no key
    in any part stays out 0, lse -inf.
    """
    lse = lse.float()
    peak = lse.amax(dim=0)
    peak = torch.where(peak == -torch.inf, 0.0, peak)  # (-inf) - (-inf) would be NaN
    weight = torch.exp(lse - peak)
    total = weight.sum(dim=0)
    share = weight / torch.where(total == 0.0, 1.0, total)
    return Partial((share.unsqueeze(-1) * out.float()).sum(dim=0), total.log() + peak)


def merge_all(parts: list[Partial]) -> Partial:
    """Merges partial results of equal shape; one alone is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return merge(torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts]))

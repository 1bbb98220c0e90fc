"""Mistakes in context-parallel attention, each as a context in which the paths make it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from attention import kernels, local, ring
from attention.merge import Partial
from attention.step import RowSplit, own_positions
from layouts import ChunkSwap


def blind_mask() -> AbstractContextManager[Any]:
    """Rows see as many keys as the last row of their request: no causal mask."""

    def accumulate(whole: Partial, query: Any, read: Any, visible: np.ndarray, scale: float, tile: int) -> None:
        kernels.accumulate_prefix(whole, query, read, np.full_like(visible, visible[-1]), scale, tile)

    return patch.object(local, "accumulate_prefix", accumulate)


@contextmanager
def leaking_drafts() -> Iterator[None]:
    """Rows that see no key of a shard see all that later rows see there: a mask row without a key means no mask."""
    plan_rows = local.plan_rows

    def plan(positions: Any, count_visible: Callable[[int, np.ndarray], np.ndarray]) -> local.LocalBatch:
        def count(request: int, rows: np.ndarray) -> np.ndarray:
            visible = np.asarray(count_visible(request, rows))
            return visible if not len(visible) else np.where(visible == 0, visible.max(), visible)

        return plan_rows(positions, count)

    def accumulate(whole: Partial, query: Any, read: Any, visible: np.ndarray, scale: float, tile: int) -> None:
        for row in range(len(visible)):  # such rows do not rise
            rows = slice(row, row + 1)
            part = Partial(whole.out[rows], whole.lse[rows])
            kernels.accumulate_prefix(part, query[rows], read, visible[rows], scale, tile)

    names = ("attention.local.plan_rows", "attention.keys.plan_rows", "attention.ring.plan_rows")
    with (
        patch(names[0], plan),
        patch(names[1], plan),
        patch(names[2], plan),
        patch.object(local, "accumulate_prefix", accumulate),
    ):
        yield


@contextmanager
def swapped_chunks() -> Iterator[None]:
    """Two chunks of a prompt change places when rows come together."""
    gather, original = RowSplit.gather, own_positions

    def swapped(split: RowSplit, local_rows: torch.Tensor) -> torch.Tensor:
        rows = gather(split, local_rows).clone()
        longest = int(np.argmax(split.swap.query_lens))
        start = sum(split.swap.query_lens[:longest])
        half = split.swap.local_lens[longest] // 2
        first, second = slice(start, start + half), slice(start + half, start + 2 * half)
        rows[first], rows[second] = rows[second].clone(), rows[first].clone()
        return rows

    def other(swap: ChunkSwap, rank: int) -> Any:
        return original(swap, swap.pcp - 1 - rank)

    with patch.object(RowSplit, "gather", swapped), patch.object(ring, "own_positions", other):
        yield


@contextmanager
def dropped_lse() -> Iterator[None]:
    """Partial results count alike, whatever their lse."""

    def merge(out: torch.Tensor, lse: torch.Tensor) -> Partial:
        weight = (lse > -torch.inf).float()
        weight = weight / weight.sum(dim=0).clamp(min=1)
        return Partial((weight.unsqueeze(-1) * out).sum(dim=0), lse.logsumexp(dim=0))

    def accumulate(whole: Partial, part: Partial) -> None:
        merged = merge(torch.stack([whole.out, part.out]), torch.stack([whole.lse, part.lse]))
        whole.out.copy_(merged.out)
        whole.lse.copy_(merged.lse)

    def share(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.full_like(lse, 1 / len(lse))

    with (
        patch("attention.exchange.merge", merge),
        patch("attention.exchange.share", share),
        patch.object(kernels, "accumulate", accumulate),
    ):
        yield


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "no causal mask": blind_mask,
    "leaking drafts": leaking_drafts,
    "swapped chunks": swapped_chunks,
    "dropped lse": dropped_lse,
}

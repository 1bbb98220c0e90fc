"""Attention with log-sum-exp over contiguous keys, on torch's fused kernels. Knows no pages, positions and groups."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from attention.merge import Partial, accumulate, empty_partial

IntArray = npt.NDArray[np.int64]
Read = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""(start, stop) -> keys [Hkv, stop - start, K] and values [Hkv, stop - start, V] of a sequence."""

TILE_ROWS = 256
"""Rows per tile where a mask is needed: bounds the mask and the share of masked keys that is computed in vain."""
FLASH_HEAD_SIZE = 256
"""The largest head size of the CUDA flash kernel."""


def accumulate_prefix(
    whole: Partial, query: torch.Tensor, read: Read, visible: IntArray, scale: float, tile_tokens: int
) -> None:
    """Merges into `whole` the attention of one sequence in which row i sees the first `visible[i]` keys.

    whole: out [L, Hq, V'], lse [L, Hq], changed in place. query [L, Hq, K]; visible [L] never falls. Keys are read
    `tile_tokens` at a time, which bounds the memory; of wider values the first V' columns count.
    """
    rows = query.transpose(0, 1).contiguous()
    num_keys = int(visible[-1]) if len(visible) else 0
    for start in range(0, num_keys, tile_tokens):
        stop = min(start + tile_tokens, num_keys)
        _accumulate_tile(whole, rows, *read(start, stop), np.clip(visible - start, 0, stop - start), scale)


def _accumulate_tile(
    whole: Partial, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: IntArray, scale: float
) -> None:
    """rows [Hq, L, K] over one tile of keys."""
    for first, last in _alike(visible, key.shape[1]):
        part = _attend_run(rows[:, first:last], key, value, visible[first:last], scale)
        out = part.out.transpose(0, 1)[..., : whole.out.shape[-1]]
        accumulate(Partial(whole.out[first:last], whole.lse[first:last]), Partial(out, part.lse.transpose(0, 1)))


def _alike(visible: IntArray, num_keys: int) -> list[tuple[int, int]]:
    """The rows that see any key, cut where what they see jumps and where it becomes everything."""
    if visible[0] == visible[-1]:
        return [(0, len(visible))] if visible[0] else []
    first, full = np.searchsorted(visible, [1, num_keys])
    jumps = first + 1 + np.flatnonzero(np.diff(visible[first:full]) > 1)
    cuts = [first, *jumps, full, len(visible)]
    return [(int(low), int(high)) for low, high in pairwise(cuts) if low < high]


def _attend_run(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: IntArray, scale: float) -> Partial:
    """rows [Hq, L, K] of which row i sees the first visible[i] > 0 keys."""
    first, last = int(visible[0]), int(visible[-1])
    if first == last:
        return attend_dense(rows, key[:, :last], value[:, :last], scale)
    if last - first == len(visible) - 1:
        return _attend_causal(rows, key, value, first, scale)
    tiles = [
        _attend_masked(rows[:, low : low + TILE_ROWS], key, value, visible[low : low + TILE_ROWS], scale)
        for low in range(0, len(visible), TILE_ROWS)
    ]
    return Partial(torch.cat([tile.out for tile in tiles], dim=1), torch.cat([tile.lse for tile in tiles], dim=1))


def _attend_causal(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int, scale: float) -> Partial:
    """Row i sees first + i keys: everything before the diagonal without a mask, the square on it causally."""
    start, stop = first - 1, first - 1 + rows.shape[1]
    part = attend_dense(rows, key[:, start:stop], value[:, start:stop], scale, causal=True)
    if start:
        accumulate(part, attend_dense(rows, key[:, :start], value[:, :start], scale))
    return part


def _attend_masked(
    rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: IntArray, scale: float
) -> Partial:
    """Keys that all rows see without a mask, the few others with one."""
    first, last = int(visible[0]), int(visible[-1])
    part = attend_dense(rows, key[:, :first], value[:, :first], scale)
    if last > first:
        allowed = torch.from_numpy(np.arange(first, last) < visible[:, np.newaxis]).to(rows.device)
        accumulate(part, attend_dense(rows, key[:, first:last], value[:, first:last], scale, allowed=allowed))
    return part


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    allowed: torch.Tensor | None = None,
) -> Partial:
    """Attention of one sequence: query [Hq, L, K], key [Hkv, S, K], value [Hkv, S, V]; Hkv divides Hq, V <= K.

    `allowed` (bool, [L, S]) marks the keys a row may see; `causal` needs L = S. Rows that may see no key give out 0,
    lse -inf. Returns out [Hq, L, V] float32 and lse [Hq, L].
    """
    num_heads, num_rows, _ = query.shape
    if key.shape[1] == 0 or num_rows == 0:  # the CPU kernel divides by the number of keys: SIGFPE
        return empty_partial((num_heads, num_rows), value.shape[-1], query.device)
    if causal:
        return _fused(query, key, value, scale, True, None)
    # Heads that share keys are rows like any other: one call for all of them reads the keys once.
    group_size = num_heads // key.shape[0]
    rows = query.unflatten(0, (-1, group_size)).flatten(1, 2)
    mask = None if allowed is None else allowed.repeat(group_size, 1)
    part = _fused(rows, key, value, scale, False, mask)
    if mask is not None:  # of a row without keys the kernels say out 0 or NaN and lse 0
        sees_none = ~mask.any(dim=-1)
        part.out.masked_fill_(sees_none.unsqueeze(-1), 0.0)
        part.lse.masked_fill_(sees_none, -torch.inf)
    return Partial(*(each.unflatten(1, (group_size, num_rows)).flatten(0, 1) for each in part))


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None,
) -> Partial:
    """The fastest kernel that returns the lse. On CUDA none of these takes a mask; their shapes were checked on torch's
    meta device, their results not."""
    batch = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    if query.device.type == "cpu":
        out, lse = _flash_cpu(*batch, scale, causal, mask)
    elif mask is not None:
        return attend_plain(query, key, value, scale, causal=causal, allowed=mask)
    elif query.dtype != torch.float32 and query.shape[-1] <= FLASH_HEAD_SIZE:
        out, lse = _flash(*batch, scale, causal)
    else:
        out, lse = _efficient(*batch, scale, causal)
    return Partial(out[0, ..., : value.shape[-1]].float(), lse[0])


def _flash_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    bias = None
    if mask is not None:  # an additive mask of the query's type is the only one it takes
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)[None, None]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, _widen(value, key), 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(query, key, _widen(value, key), 0.0, causal, scale=scale)
    return out, lse


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wants as many KV heads as query heads and pads the rows of the lse."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = kernel(query, key, value, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : query.shape[2]]


def _widen(value: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Values as wide as keys: flash kernels know one head size."""
    missing = key.shape[-1] - value.shape[-1]
    return F.pad(value, (0, missing)) if missing else value


def attend_plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    allowed: torch.Tensor | None = None,
) -> Partial:
    """`attend_dense` in plain torch operations, float32: the reference for the kernels."""
    group_size = query.shape[0] // key.shape[0]
    key, value = (tensor.repeat_interleave(group_size, dim=0).float() for tensor in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * scale
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return Partial(weights @ value, lse)

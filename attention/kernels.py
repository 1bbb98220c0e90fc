"""Dense attention with log-sum-exp over contiguous keys. Knows neither pages nor positions nor groups."""

import torch

from attention.merge import Partial, empty_partial, merge_all

TILE_ROWS = 256
"""Rows per tile where a mask is needed: bounds the mask and the share of masked keys that is computed in vain."""


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    allowed: torch.Tensor | None = None,
) -> Partial:
    """One batched attention: query [B, Hq, L, D], key and value [B, Hkv, S, D] with Hkv dividing Hq.

    `allowed` (bool, [B or 1, L, S]) marks the keys a row may see; `causal` needs L = S. Rows that may see no key give
    out 0, lse -inf. Returns out [B, Hq, L, D] float32 and lse [B, Hq, L].
    """
    batch, num_heads, num_rows, head_size = query.shape
    if key.shape[2] == 0:  # the flash kernel divides by the number of keys: SIGFPE
        return empty_partial((batch, num_heads, num_rows), head_size, query.device)
    if query.device.type == "cpu":
        out, lse = _flash(query, key, value, scale, causal, allowed)
    else:
        out, lse = _softmax(query, key, value, scale, causal, allowed)
    if allowed is not None:  # the flash kernel says lse 0 for a row without keys
        sees_none = ~allowed.any(dim=-1).unsqueeze(1)
        out = out.masked_fill(sees_none.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(sees_none, -torch.inf)
    return Partial(out.float(), lse)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    allowed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = None
    if allowed is not None:  # an additive mask of the query's type is the only one it takes
        mask = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill_(~allowed, -torch.inf).unsqueeze(1)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def _softmax(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    allowed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    group_size = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group_size, dim=1).float()
    value = value.repeat_interleave(group_size, dim=1).float()
    scores = query.float() @ key.transpose(-1, -2) * scale
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril().unsqueeze(0)
    if allowed is not None:
        scores = scores.masked_fill(~allowed.unsqueeze(1), -torch.inf)
    return torch.softmax(scores, dim=-1) @ value, torch.logsumexp(scores, dim=-1)


def attend_prefix(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> Partial:
    """Attention of one sequence in which row i sees the first `visible[i]` keys (non-decreasing).

    query [L, Hq, D], key and value [Hkv, S, D], visible [L] int64 with visible[-1] <= S. Returns out [L, Hq, D],
    lse [L, Hq]. Masks are built only where rows of one tile see different keys.
    """
    rows = query.transpose(0, 1).unsqueeze(0)
    key, value = key.unsqueeze(0), value.unsqueeze(0)
    first, last = int(visible[0]), int(visible[-1])
    if first == last:
        part = attend_dense(rows, key[:, :, :last], value[:, :, :last], scale)
    elif first > 0 and last - first == len(visible) - 1:
        part = _attend_causal(rows, key, value, first, scale)
    else:
        part = _attend_tiled(rows, key, value, visible, scale)
    return Partial(part.out[0].transpose(0, 1), part.lse[0].transpose(0, 1))


def _attend_causal(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int, scale: float) -> Partial:
    """Row i sees first + i keys: everything before the diagonal without a mask, the square on it causally."""
    start, stop = first - 1, first - 1 + rows.shape[2]
    parts = [attend_dense(rows, key[:, :, start:stop], value[:, :, start:stop], scale, causal=True)]
    if start:
        parts.append(attend_dense(rows, key[:, :, :start], value[:, :, :start], scale))
    return merge_all(parts)


def _attend_tiled(
    rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> Partial:
    tiles = [
        _attend_tile(rows[:, :, start : start + TILE_ROWS], key, value, visible[start : start + TILE_ROWS], scale)
        for start in range(0, len(visible), TILE_ROWS)
    ]
    return Partial(torch.cat([tile.out for tile in tiles], dim=2), torch.cat([tile.lse for tile in tiles], dim=2))


def _attend_tile(
    rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> Partial:
    first, last = int(visible[0]), int(visible[-1])
    allowed = torch.arange(first, last, device=visible.device) < visible.unsqueeze(-1)
    parts = [attend_dense(rows, key[:, :, first:last], value[:, :, first:last], scale, allowed=allowed.unsqueeze(0))]
    if first:
        parts.append(attend_dense(rows, key[:, :, :first], value[:, :, :first], scale))
    return merge_all(parts)

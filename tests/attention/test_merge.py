"""Laws of merging partial results, and of dense attention with few or no keys."""

import pytest
import torch

from attention.kernels import attend_dense, attend_prefix
from attention.merge import empty_partial, merge, merge_all


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


def test_two_empty_parts_merge_to_an_empty_part() -> None:
    merged = merge(torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf))
    assert torch.equal(merged.out, torch.zeros(3, 4))
    assert torch.equal(merged.lse, torch.full((3,), -torch.inf))


def test_empty_part_is_neutral() -> None:
    out, lse = torch.randn(5, 4), torch.randn(5) * 50
    nothing = empty_partial((5,), 4)
    merged = merge(torch.stack([nothing.out, out]), torch.stack([nothing.lse, lse]))
    assert torch.equal(merged.out, out)
    assert torch.equal(merged.lse, lse)


@pytest.mark.parametrize("peak", [0.0, 300.0, -300.0])
def test_merge_is_softmax_over_the_union(peak: float) -> None:
    scores, values = torch.randn(7, 12) * 3 + peak, torch.randn(12, 4)
    pieces = [slice(0, 5), slice(5, 6), slice(6, 12)]
    out = torch.stack([scores[:, piece].softmax(-1) @ values[piece] for piece in pieces])
    lse = torch.stack([scores[:, piece].logsumexp(-1) for piece in pieces])
    merged = merge(out, lse)
    torch.testing.assert_close(merged.out, scores.softmax(-1) @ values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged.lse, scores.logsumexp(-1))


def test_low_precision_parts_are_merged_in_float32() -> None:
    merged = merge(torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3))
    assert merged.out.dtype == merged.lse.dtype == torch.float32


def test_no_keys_give_the_empty_part() -> None:
    query, key = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 0, 16)
    part = attend_dense(query, key, key, 1.0)
    assert torch.equal(part.out, torch.zeros(1, 2, 3, 16))
    assert torch.equal(part.lse, torch.full((1, 2, 3), -torch.inf))


def test_row_without_visible_key_gives_minus_infinity() -> None:
    query, key, value = torch.randn(1, 2, 2, 16), torch.randn(1, 1, 3, 16), torch.randn(1, 1, 3, 16)
    allowed = torch.tensor([[[False, False, False], [True, True, False]]])
    part = attend_dense(query, key, value, 1.0, allowed=allowed)
    assert torch.equal(part.lse[0, :, 0], torch.full((2,), -torch.inf))
    assert torch.equal(part.out[0, :, 0], torch.zeros(2, 16))
    torch.testing.assert_close(
        part.out[:, :, 1:], attend_dense(query[:, :, 1:], key[:, :, :2], value[:, :, :2], 1.0).out
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "visible",
    [
        [3] * 5,
        [1, 2, 3, 4],
        [7, 8, 9],
        [0, 0, 0],
        [0, 1, 2],
        [0, 0, 1, 1, 2, 2],
        list(range(0, 300, 1)),
        [9] * 2 + [10] * 300,
    ],
    ids=["equal", "causal", "context", "nothing", "from nothing", "every other", "long causal", "two tiles"],
)
def test_prefixes_equal_masked_softmax(visible: list[int], dtype: torch.dtype) -> None:
    num_keys = max(visible) + 2
    query = torch.randn(len(visible), 4, 16, dtype=dtype)
    key, value = torch.randn(2, num_keys, 16, dtype=dtype), torch.randn(2, num_keys, 16, dtype=dtype)
    part = attend_prefix(query, key, value, torch.tensor(visible), 0.3)
    scores = torch.einsum("qhd,hkd->qhk", query.float(), key.repeat_interleave(2, 0).float()) * 0.3
    scores.masked_fill_(torch.arange(num_keys) >= torch.tensor(visible)[:, None, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    expected = torch.einsum("qhk,hkd->qhd", weights, value.repeat_interleave(2, 0).float())
    torch.testing.assert_close(part.out, expected, **tolerance)
    torch.testing.assert_close(part.lse, scores.logsumexp(-1), **tolerance)


def test_other_devices_compute_the_same() -> None:
    from attention.kernels import _softmax

    query, key, value = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    for causal in (False, True):
        expected = attend_dense(query, key, value, 0.3, causal=causal)
        out, lse = _softmax(query, key, value, 0.3, causal, None)
        torch.testing.assert_close(out, expected.out)
        torch.testing.assert_close(lse, expected.lse)


def test_one_part_alone_is_not_touched() -> None:
    part = empty_partial((2,), 4)
    assert merge_all([part]) is part

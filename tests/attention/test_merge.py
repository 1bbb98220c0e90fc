"""Laws of merging partial results, and of attention with few or no keys."""

import numpy as np
import pytest
import torch

from attention import kernels
from attention.kernels import accumulate_prefix, attend_dense, attend_plain
from attention.merge import Partial, accumulate, empty_partial, merge, merge_all


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


def test_accumulating_is_merging_in_place() -> None:
    parts = [Partial(torch.randn(6, 4), torch.randn(6) * 9) for _ in range(3)] + [empty_partial((6,), 4)]
    parts[1].lse[2] = -torch.inf
    whole = empty_partial((6,), 4)
    for part in parts:
        accumulate(whole, part)
    torch.testing.assert_close(whole, merge_all(parts))
    nothing = empty_partial((6,), 4)
    accumulate(nothing, empty_partial((6,), 4))
    assert torch.equal(nothing.out, torch.zeros(6, 4))
    assert torch.equal(nothing.lse, torch.full((6,), -torch.inf))


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


def test_one_part_alone_is_not_touched() -> None:
    part = empty_partial((2,), 4)
    assert merge_all([part]) is part


def test_no_keys_give_the_empty_part() -> None:
    query, key = torch.randn(2, 3, 16), torch.randn(1, 0, 16)
    part = attend_dense(query, key, key, 1.0)
    assert torch.equal(part.out, torch.zeros(2, 3, 16))
    assert torch.equal(part.lse, torch.full((2, 3), -torch.inf))


def test_row_without_visible_key_gives_minus_infinity() -> None:
    query, key, value = torch.randn(2, 2, 16), torch.randn(1, 3, 16), torch.randn(1, 3, 16)
    allowed = torch.tensor([[False, False, False], [True, True, False]])
    part = attend_dense(query, key, value, 1.0, allowed=allowed)
    assert torch.equal(part.lse[:, 0], torch.full((2,), -torch.inf))
    assert torch.equal(part.out[:, 0], torch.zeros(2, 16))
    torch.testing.assert_close(part.out[:, 1:], attend_dense(query[:, 1:], key[:, :2], value[:, :2], 1.0).out)


@pytest.mark.parametrize("value_size", [16, 10])
@pytest.mark.parametrize("case", ["all", "causal", "masked"])
def test_fused_kernel_equals_plain_attention(case: str, value_size: int) -> None:
    query, key, value = torch.randn(4, 5, 16), torch.randn(2, 5, 16), torch.randn(2, 5, value_size)
    allowed = torch.rand(5, 5) > 0.6 if case == "masked" else None
    arguments = {"causal": case == "causal", "allowed": allowed}
    torch.testing.assert_close(
        attend_dense(query, key, value, 0.3, **arguments), attend_plain(query, key, value, 0.3, **arguments)
    )


@pytest.mark.parametrize("tile_tokens", [7, 4096])
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
        [1, 2, 3, 11, 12, 13],
        [0, 4, 4, 20],
        list(range(0, 300, 1)),
        [9] * 2 + [10] * 300,
        [i - i % 3 for i in range(600)],
    ],
    ids=[
        *("equal", "causal", "context", "nothing", "from nothing", "every other", "two chunks", "jumps"),
        *("long causal", "two tiles", "staircase"),
    ],
)
def test_prefixes_equal_masked_softmax(visible: list[int], dtype: torch.dtype, tile_tokens: int) -> None:
    num_keys = max(visible) + 2
    query = torch.randn(len(visible), 4, 16, dtype=dtype)
    key, value = torch.randn(2, num_keys, 16, dtype=dtype), torch.randn(2, num_keys, 16, dtype=dtype)
    part = empty_partial((len(visible), 4), 16)

    def read(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert stop - start <= tile_tokens
        return key[:, start:stop], value[:, start:stop]

    accumulate_prefix(part, query, read, np.array(visible), 0.3, tile_tokens)
    allowed = torch.arange(num_keys) < torch.tensor(visible)[:, None]
    expected = attend_plain(query.transpose(0, 1), key, value, 0.3, allowed=allowed)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(part.out, expected.out.transpose(0, 1), **tolerance)
    torch.testing.assert_close(part.lse, expected.lse.transpose(0, 1), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key_size", "value_size"), [(128, 128), (192, 128), (576, 512)])
@pytest.mark.parametrize("causal", [False, True])
def test_shapes_of_cuda_kernels(dtype: torch.dtype, key_size: int, value_size: int, causal: bool) -> None:
    """On torch's meta device, which runs the shape rules of the kernels that CUDA has."""
    query = torch.empty(8, 33, key_size, dtype=dtype, device="meta")
    key = torch.empty(2, 33, key_size, dtype=dtype, device="meta")
    value = torch.empty(2, 33, value_size, dtype=dtype, device="meta")
    part = attend_dense(query, key, value, 0.1, causal=causal)
    assert part.out.shape == (8, 33, value_size)
    assert part.out.dtype == part.lse.dtype == torch.float32
    assert part.lse.shape == (8, 33)
    assert kernels.FLASH_HEAD_SIZE < 576  # one of the cases takes the other kernel

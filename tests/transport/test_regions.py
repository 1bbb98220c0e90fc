"""Regions: what they say about a tensor is where its elements are."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from layouts import ConfigError, Span
from transport import Memory, Region, memory_of, region_of
from transport.regions import PLAIN

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
SIZES = {"L": 3, "B": 4, "H": 2, "N": 4, "C": 5}


def make_cache(layout: str, sizes: dict[str, int] = SIZES) -> list[torch.Tensor]:
    """Return the logical views [B, H, N, C] of all layers in one allocation ordered as `layout` says."""
    whole = torch.arange(torch.tensor(list(sizes.values())).prod().item(), dtype=torch.int16)
    whole = whole.reshape([sizes[axis] for axis in layout])
    logical = whole.permute([layout.index(axis) for axis in "LBHNC"])
    return list(logical)


def token_at(region: Region, block: int, head: int, slot: int) -> bytes:
    """Read one token of one global head straight from memory."""
    page, slot_in_page = divmod(slot, region.page_tokens)
    address = (
        region.base
        + (block * region.pages_per_block + page) * region.page_stride
        + (head - region.heads.start) * region.head_stride
        + slot_in_page * region.token_stride
    )
    return ctypes.string_at(address, region.token_bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pages", [1, 2])
def test_region_finds_every_token(layout: str, pages: int) -> None:
    for layer, view in enumerate(make_cache(layout)):
        region = region_of(view, layer=layer, heads=Span(6, 8), block_tokens=4 * pages)
        assert (region.num_blocks, region.pages_per_block) == (4 // pages, pages)
        for block, head, slot in itertools.product(range(4 // pages), range(2), range(4 * pages)):
            wanted = view[block * pages + slot // 4, head, slot % 4].contiguous().numpy().tobytes()
            assert token_at(region, block, 6 + head, slot) == wanted
        storage = view.untyped_storage()
        assert region.base + region.num_bytes <= storage.data_ptr() + storage.nbytes()


def test_all_layers_are_one_memory() -> None:
    views = make_cache("BLHNC")
    storage = views[0].untyped_storage()
    assert memory_of(views) == [Memory(storage.data_ptr(), storage.nbytes(), "cpu")]


def test_separate_and_empty_storages() -> None:
    a, b, empty = torch.zeros(100), torch.zeros(200), torch.zeros(0)
    memory = memory_of([b, a, a[10:], empty])
    assert sorted(stretch.num_bytes for stretch in memory) == [400, 800]
    assert memory == sorted(memory, key=lambda stretch: stretch.address)


def test_overlapping_storages_are_merged() -> None:
    buffer = torch.zeros(100, dtype=torch.uint8)
    whole = buffer.numpy()
    first, second = torch.from_numpy(whole[:60]), torch.from_numpy(whole[40:])
    assert memory_of([second, first]) == [Memory(buffer.data_ptr(), 100, "cpu")]


@pytest.mark.parametrize(
    ("tensor", "options", "says"),
    [
        (torch.zeros(4, 4, 8), {}, "4-D"),
        (torch.zeros(4, 2, 4, 8).transpose(2, 3), {}, "adjacent"),
        (torch.zeros(4, 3, 4, 8), {}, "heads"),
        (torch.zeros(4, 2, 4, 8), {"block_tokens": 6}, "whole ones"),
        (torch.zeros(3, 2, 4, 8), {"block_tokens": 8}, "whole ones"),
        (torch.zeros(4, 4, 2, 8).transpose(1, 2), {"page": "cpu_attn_vec"}, "one piece"),
    ],
)
def test_unusable_tensors_are_refused(tensor: torch.Tensor, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        region_of(tensor, layer=0, heads=Span(0, 2), **options)


def test_axes_of_one_may_have_any_stride() -> None:
    view = torch.zeros(4, 1, 1, 8).as_strided((4, 1, 1, 8), (8, 999, 777, 1))
    region = region_of(view, layer=0, heads=Span(0, 1))
    assert region.token_stride == region.token_bytes == 32
    assert region.num_bytes == 4 * 32


@pytest.mark.parametrize("field", ["base", "num_blocks", "block_stride", "block_tokens", "token_bytes"])
def test_negative_numbers_are_refused(field: str) -> None:
    numbers = {"base": 0, "num_blocks": 1, "block_tokens": 1, "block_stride": 8, "head_stride": 8}
    numbers |= {"token_stride": 8, "token_bytes": 8, field: -1}
    with pytest.raises(ConfigError, match=field):
        Region(layer=0, heads=Span(0, 1), page=PLAIN, device="cpu", **numbers)

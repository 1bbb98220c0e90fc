"""Attention over the pages of one rank; shards merged by hand must give the whole."""

import numpy as np
import pytest
import torch

from attention.entries import ExpandedLatent, KeyValue, Latent, PagedCache
from attention.local import PADDING, attend_local, plan_local
from attention.merge import merge_all
from attention.mla import absorb, project_values
from layouts import Interleave
from tests.attention.workload import LATENT, SCALE, Kind, Request, make_workload


@pytest.mark.parametrize(("kind", "num_kv_heads"), [("gqa", 1), ("gqa", 2), ("latent", 1), ("expanded", 1)])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("interleave_tokens", [1, 2, 8])
def test_merged_shards_equal_one_rank(num_shards: int, interleave_tokens: int, kind: Kind, num_kv_heads: int) -> None:
    workload = make_workload(num_kv_heads=num_kv_heads, kind=kind)
    interleave = Interleave(num_shards, interleave_tokens, 8)
    parts = []
    for shard in range(num_shards):
        cache, table = workload.cache(interleave, shard)
        batch = plan_local(workload.positions, interleave, shard)
        parts.append(attend_local(workload.query, cache, table, batch, SCALE))
    torch.testing.assert_close(merge_all(parts), workload.answer(), rtol=1e-5, atol=1e-5)


def test_absorbed_queries_give_what_expanded_keys_give() -> None:
    workload = make_workload(kind="expanded")
    interleave = Interleave(1, 1, 8)
    cache, table = workload.cache(interleave, 0)
    batch = plan_local(workload.positions, interleave, 0)
    weights = workload.format
    assert isinstance(weights, ExpandedLatent)
    query = absorb(workload.query, weights.up_key)
    latents = PagedCache(cache.pages, Latent(LATENT))
    part = project_values(attend_local(query, latents, table, batch, SCALE), weights.up_value)
    torch.testing.assert_close(part, workload.answer(), rtol=1e-5, atol=1e-5)


def test_shard_without_tokens_gives_minus_infinity() -> None:
    workload = make_workload((Request(3, 1), Request(0, 4)))
    interleave = Interleave(2, 8, 8)
    cache, table = workload.cache(interleave, 1)
    part = attend_local(workload.query, cache, table, plan_local(workload.positions, interleave, 1), SCALE)
    assert torch.equal(part.lse, torch.full_like(part.lse, -torch.inf))
    assert torch.equal(part.out, torch.zeros_like(part.out))


def test_draft_rows_see_no_later_draft() -> None:
    """W=2, I=128, history 126, 4 query tokens: rows 0 and 1 see no key of shard 1, rows 2 and 3 one and two."""
    batch = plan_local([np.arange(126, 130)], Interleave(2, 128, 128), 1)
    assert batch.segments[0].visible.tolist() == [0, 0, 1, 2]
    assert batch.num_pairs == 3


def test_rows_without_token_give_the_empty_part() -> None:
    workload = make_workload((Request(0, 4),))
    interleave = Interleave(1, 1, 4)
    cache, table = workload.cache(interleave, 0)
    batch = plan_local([np.array([0, 1, PADDING, PADDING])], interleave, 0)
    part = attend_local(workload.query, cache, table, batch, SCALE)
    torch.testing.assert_close(part.out[:2], workload.answer().out[:2])
    assert torch.equal(part.lse[2:], torch.full_like(part.lse[2:], -torch.inf))


def test_empty_batch() -> None:
    cache = PagedCache(torch.empty(3, 1, 4, 32), KeyValue(16, 16))
    batch = plan_local([np.arange(0)], Interleave(1, 1, 4), 0)
    part = attend_local(torch.empty(0, 8, 16), cache, torch.zeros(1, 2), batch, SCALE)
    assert part.out.shape == (0, 8, 16)


def test_tokens_of_other_ranks_are_not_written() -> None:
    cache = PagedCache(torch.zeros(3, 2, 4, 8), KeyValue(4, 4))
    cache.write(torch.tensor([-1, 9, -1]), torch.arange(1.0, 49.0).reshape(3, 2, 8))
    assert torch.equal(cache.pages[2, :, 1], torch.arange(17.0, 33.0).reshape(2, 8))
    assert cache.pages.count_nonzero() == 16


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (4, 9), (3, 4), (5, 11)])
def test_tokens_are_read_from_any_place(start: int, stop: int) -> None:
    workload = make_workload((Request(11, 1),), num_kv_heads=2)
    cache, table = workload.cache(Interleave(1, 1, 4), 0)
    assert torch.equal(cache.entries(table[0], start, stop), workload.entries[0][start:stop])


@pytest.mark.parametrize("num_layers", [1, 4], ids=["a layer alone", "all layers of a block adjacent"])
def test_reading_a_few_blocks_does_not_copy_the_others(num_layers: int) -> None:
    pages = torch.empty(1 << 14, num_layers, 2, 16, 128)[:, 0]  # 256 MiB in this layer, hardly any of it touched
    cache, blocks = PagedCache(pages, KeyValue(64, 64)), torch.arange(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        entries = cache.entries(blocks, 5, 50)
    assert entries.shape == (45, 2, 128)
    assert max(event.cpu_memory_usage for event in profile.key_averages()) < 4 << 20

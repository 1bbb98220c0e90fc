"""Splitting rows, cutting contexts into pieces, TPA and the choice of a path."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from attention.cost import AttentionShape, PathName, Rates
from attention.exchange import Ending
from attention.keys import GatheredKeyPath, WholeKeyPath
from attention.local import PADDING
from attention.pieces import plan_pieces
from attention.prefill import Planner
from attention.projection import project_heads_of_group
from attention.queries import QueryPath, plan_queries
from attention.ring import RingPath
from attention.step import Step, plan_step, split_rows
from benchmarks.attention_ranks import run_ranks
from layouts import ConfigError, Interleave
from tests.attention.workload import HEAD_SIZE, SCALE, heads_of, make_workload


def split_and_gather(rank: int, group: dist.ProcessGroup) -> None:
    split, positions = split_rows([1, 5, 8], group)
    assert split is not None
    rows = torch.arange(14)
    assert torch.equal(split.gather(split.select(rows)), rows)
    assert [len(of_request) for of_request in positions] == [1, 4, 4]
    assert positions[1].tolist() == ([0, 1, PADDING, PADDING] if rank == 0 else [2, 3, 4, PADDING])
    assert split_rows([1, 3], group)[0] is None
    assert split_rows([9, 9], group, decodes=[True, True])[0] is None


def project_own_queries(rank: int, group: dist.ProcessGroup) -> None:
    """With TPA each rank computes the queries of all heads of its DCP group; the results are the same."""
    num_ranks = dist.get_world_size(group)
    workload = make_workload(num_heads=2 * num_ranks)
    hidden = torch.randn(len(workload.query), 6, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(2 * num_ranks * HEAD_SIZE, 6, generator=torch.Generator().manual_seed(2))
    interleave = Interleave(num_ranks, 2, 4)
    step = plan_step(workload.query_lens, workload.contexts, interleave, shards=group)
    cache, table = workload.cache(interleave, rank)
    arguments = (workload.new_entries, cache, table, workload.slots(interleave, rank, table), SCALE)

    def queries(part: torch.Tensor) -> torch.Tensor:
        return (hidden @ part.T).unflatten(1, (-1, HEAD_SIZE))

    for ending in Ending:
        gathered = plan_queries(step, ending).attend(heads_of(queries(weight), 1, rank, num_ranks), *arguments)
        part = project_heads_of_group(weight, tp=num_ranks, dcp=num_ranks, tp_rank=rank)
        computed = plan_queries(step, ending, has_all_heads=True).attend(queries(part), *arguments)
        torch.testing.assert_close(computed, gathered)


def plan_steps(rank: int, group: dist.ProcessGroup) -> None:
    """The planner plans what is cheapest, and counts; rows that every rank has stay."""
    shape = AttentionShape(query_heads=8, kv_heads=1, key_size=64, value_size=64, entry_size=128)
    planner = Planner(shape, Rates(overlap=0.0), workspace_tokens=256)
    interleave = Interleave(2, 16, 16)

    def step(new: int, context: int) -> Step:
        return plan_step([new], [context], interleave, rows=group, shards=group)

    assert isinstance(planner.plan(step(512, 0)), GatheredKeyPath)
    assert isinstance(planner.plan(step(64, 8192)), QueryPath)
    assert isinstance(planner.plan(step(1, 64)), QueryPath)
    assert planner.counts == Counter({PathName.QUERIES: 2, PathName.KEYS: 1})
    overlapping = Planner(shape, Rates(overlap=1.0, exchange_s=0.0, memory_bytes_per_s=1e18), workspace_tokens=256)
    assert isinstance(overlapping.plan(step(512, 0)), RingPath)
    whole = plan_step([512], [0], Interleave(1, 1, 16), rows=group)
    assert isinstance(planner.plan(whole), WholeKeyPath)


def everything(rank: int, group: dist.ProcessGroup) -> None:
    split_and_gather(rank, group)
    project_own_queries(rank, group)
    plan_steps(rank, group)


def test_on_two_ranks() -> None:
    run_ranks(2, everything)


def sharded_step(contexts: list[int], interleave: Interleave) -> Step:
    """Three new tokens of each request on one of the ranks; needs no process group."""
    own = tuple(np.arange(3) for _ in contexts)
    return Step((3,) * len(contexts), tuple(contexts), interleave, 0, None, None, 1, own)


@pytest.mark.parametrize("contexts", [[0, 0], [1], [31, 0, 5, 64, 100], [1000], [16] * 9])
@pytest.mark.parametrize(("num_shards", "tokens"), [(2, 1), (2, 8), (3, 4), (4, 8)])
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_pieces_cover_contexts_in_order(contexts: list[int], num_shards: int, tokens: int, num_blocks: int) -> None:
    interleave = Interleave(num_shards, tokens, 8)
    workspace_tokens = num_blocks * interleave.virtual_block_tokens
    found: dict[int, list[int]] = {request: [] for request in range(len(contexts))}
    for piece in plan_pieces(sharded_step(contexts, interleave), workspace_tokens):
        assert 0 < num_shards * piece.padded_tokens <= workspace_tokens
        gathered: dict[int, tuple[int, int]] = {}  # place -> (request, position)
        for span, shard in itertools.product(piece.spans, range(num_shards)):
            for token in range(span.num_tokens[shard]):
                block, slot = divmod(int(span.first_token[shard]) + token, interleave.block_tokens)
                place = shard * piece.padded_tokens + int(span.offsets[shard]) + token
                assert place not in gathered
                gathered[place] = (span.segment.request, interleave.position(shard, block, slot))
        for span in piece.spans:
            for place in span.index.tolist():
                request, position = gathered[place]
                assert request == span.segment.request
                found[request].append(position)
    assert found == {request: list(range(context)) for request, context in enumerate(contexts)}


def test_workspace_of_less_than_a_block_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"workspace_tokens with 2 shards and blocks of 8: got 15; allowed: 16 or more"
    ):
        plan_pieces(sharded_step([5], Interleave(2, 1, 8)), 15)


def test_queries_of_a_group_are_rows_in_order() -> None:
    weight = torch.arange(16).reshape(16, 1)
    assert project_heads_of_group(weight, tp=4, dcp=2, tp_rank=2).flatten().tolist() == list(range(8, 16))
    assert project_heads_of_group(weight, tp=4, dcp=2, tp_rank=1).flatten().tolist() == list(range(8))
    with pytest.raises(ConfigError, match="TP 4; allowed: a multiple of DCP"):
        project_heads_of_group(weight, tp=4, dcp=3, tp_rank=0)

"""Plans, shared ones too, prove themselves: change any one field of a valid one, and it does not construct."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from layouts import (
    ConfigError,
    Holding,
    Interleave,
    ParallelLayout,
    Placement,
    PlanError,
    SharedPlan,
    Span,
    TransferPlan,
    plan_transfer,
    share_replicas,
)
from layouts.runs import RUN_FIELDS

FAR = (-1, 0, 1, 1 << 40)


def plans() -> dict[str, TransferPlan]:
    """Replicas on both sides, whole and split readers, one period of runs and many, a start and a stop inside runs."""
    sharded = ParallelLayout(tp=8, dcp=2, num_kv_heads=2, num_layers=3, interleave_tokens=2, block_tokens=4)
    plain = replace(sharded, tp=2, dcp=1, pp=2, block_tokens=8)
    return {
        "many periods": plan_transfer(sharded, plain, 8, 117),
        "the other way": plan_transfer(plain, sharded, 3, 150),
        "one period": plan_transfer(sharded, replace(sharded, block_tokens=6), 0, 13, salt=3),
        "split readers": plan_transfer(replace(sharded, dcp=1), plain, 0, 70),
    }


@pytest.fixture(params=plans().items(), ids=lambda named: named[0])
def plan(request: pytest.FixtureRequest) -> TransferPlan:
    made: TransferPlan = request.param[1]
    return made


def variants(value: Any) -> Iterator[Any]:
    """Other values of a field: small steps and far ones for numbers, one part changed for what has parts."""
    if isinstance(value, np.ndarray):
        yield from run_variants(value)
    elif isinstance(value, int):
        yield from {value - 1, value + 1, 2 * value + 2} - {value}
    elif isinstance(value, Span):
        yield from (Span(*pair) for pair in ((value.start - 1, value.stop), (value.start, value.stop + 1)))
        yield from (Span(*pair) for pair in ((value.start + 1, value.stop), (value.start, value.stop - 1)))
        yield Span(value.start + 1, value.stop + 1)
    elif isinstance(value, tuple):
        yield from (value[1:], value[:-1], (*value, value[0]), value[::-1])
        for index, part in enumerate(value):
            yield from ((*value[:index], other, *value[index + 1 :]) for other in variants(part))
    else:
        for field in fields(value):
            for other in variants(getattr(value, field.name)):
                with contextlib.suppress(ConfigError):
                    yield replace(value, **{field.name: other})


def run_variants(runs: Any) -> Iterator[Any]:
    yield from (runs[:0], runs[1:], runs[:-1], runs[::-1], np.concatenate((runs, runs)))
    for index in sorted({0, len(runs) // 2, len(runs) - 1}):
        for name in RUN_FIELDS:
            for other in {*variants(int(runs[name][index])), *FAR} - {int(runs[name][index])}:
                changed = runs.copy()
                changed[name][index] = other
                yield changed


@pytest.mark.parametrize("name", [field.name for field in fields(TransferPlan)])
def test_no_field_can_change(plan: TransferPlan, name: str) -> None:
    num_refused = 0
    for other in variants(getattr(plan, name)):
        if is_same(plan, name, other):
            continue
        with pytest.raises(PlanError):
            replace(plan, **{name: other})
        num_refused += 1
    assert num_refused >= 3 or name == "salt"


def shared_plans() -> dict[str, SharedPlan]:
    """Replicas on both sides, over several shards, heads and stages, a start and a stop inside runs."""
    sharded = ParallelLayout(tp=8, dcp=2, num_kv_heads=2, num_layers=3, interleave_tokens=2, block_tokens=4)
    return {
        "shards and stages": share_replicas(plan_transfer(replace(sharded, tp=2, dcp=1, pp=2), sharded, 8, 117)),
        "replicated heads": share_replicas(plan_transfer(sharded, replace(sharded, dcp=1, block_tokens=8), 3, 70, 5)),
    }


@pytest.mark.parametrize("name", ["reads", "exchanges"])
@pytest.mark.parametrize("shared", shared_plans().values(), ids=shared_plans())
def test_no_route_of_a_shared_plan_can_change(shared: SharedPlan, name: str) -> None:
    routes = getattr(shared, name)
    num_refused = 0
    for other in variants(routes[:3]):
        with pytest.raises(PlanError):
            replace(shared, **{name: (*other, *routes[3:])})
        num_refused += 1
    assert num_refused > 300


@pytest.mark.parametrize("shared", shared_plans().values(), ids=shared_plans())
def test_a_shared_plan_is_of_one_plan(shared: SharedPlan) -> None:
    plan = shared.plan
    source, target = plan.source, plan.target
    twice = replace(target.interleave, block_tokens=2 * target.interleave.block_tokens)
    others = [
        plan_transfer(source, target, plan.start, plan.stop - 1, plan.salt),
        plan_transfer(source, target, plan.start, plan.stop + 1, plan.salt),
        plan_transfer(source, target, plan.start - 1, plan.stop, plan.salt),
        plan_transfer(source, target, plan.start + 1, plan.stop, plan.salt),
        plan_transfer(source, target, plan.start, plan.stop, plan.salt + 1),
        plan_transfer(target, source, plan.start, plan.stop, plan.salt),
        plan_transfer(source, replace(target, interleave=twice), plan.start, plan.stop, plan.salt),
    ]
    for other in others:
        with pytest.raises(PlanError):
            replace(shared, plan=other)


def test_messages_about_shared_plans() -> None:
    layout = ParallelLayout(tp=4, dcp=2, mla=True)
    shared = share_replicas(plan_transfer(layout, layout, 0, 128))
    first, *others = shared.exchanges
    assert (first.source_rank, first.target_rank) == (2, 0)
    with pytest.raises(PlanError, match="target rank 2 does not give rank 0 exactly what it has read"):
        replace(shared, exchanges=others)
    with pytest.raises(PlanError, match="from source rank 2 to target rank 1: no replicas"):
        replace(shared, exchanges=(replace(first, target_rank=1), *others))
    with pytest.raises(PlanError, match=r"target ranks with Holding\(shard=0, .* read 32 of 64 entries"):
        replace(shared, reads=shared.reads[1:])
    with pytest.raises(PlanError, match="a second copy"):
        replace(shared, reads=(*shared.reads[:2], replace(shared.reads[2], runs=shared.reads[0].runs), shared.reads[3]))
    unread = replace(first, runs=shared.exchanges[2].runs)
    with pytest.raises(PlanError, match="does not give rank 0 exactly"):
        replace(shared, exchanges=(unread, *others))
    with pytest.raises(PlanError, match="the other end chooses"):
        replace(shared, exchanges=(*others, first))


def is_same(plan: TransferPlan, name: str, other: Any) -> bool:
    """Whether another value means the same: salts that begin with the same replica; I where nothing is interleaved."""
    if name == "salt":
        replicas = {plan.source.holdings.count(holding) for holding in plan.source.holdings}
        return all(other % number == plan.salt % number for number in replicas)
    if name in ("source", "target"):
        same: Placement = getattr(plan, name)
        return same.interleave.num_shards == 1 and other == replace(
            same, interleave=replace(same.interleave, interleave_tokens=other.interleave.interleave_tokens)
        )
    return False


def test_any_replica_but_the_chosen_one_is_refused() -> None:
    plan = plan_transfer(ParallelLayout(tp=4, mla=True), ParallelLayout(), 0, 16)
    (route,) = plan.routes
    for rank in {0, 1, 2, 3} - {route.source_rank}:
        with pytest.raises(PlanError, match="the other end chooses"):
            replace(plan, routes=(replace(route, source_rank=rank),))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source_rank": 9}, "no such rank"),
        ({"heads": Span(0, 2)}, "heads; heads 0..2"),
        ({"layers": Span(1, 1)}, "layers"),
        ({"runs": []}, "an empty run"),
        ({"position": 3}, "overlapping runs"),
        ({"num_tokens": 0}, "an empty run"),
        ({"num_tokens": 3}, "source positions"),
        ({"source_slot": -1}, "source slots"),
        ({"target_slot": 4}, "target slots"),
        ({"source_block": 1}, "source positions"),
        ({"target_block": 1}, "target positions"),
        ({"position": -1}, "positions"),
    ],
    ids=str,
)
def test_the_message_says_what_does_not_hold(changes: dict[str, Any], words: str) -> None:
    holdings = tuple(Holding(shard, Span(0, 1), Span(0, 2)) for shard in (0, 1))
    placement = Placement(Interleave(2, 2, 4), holdings, num_kv_heads=1, num_layers=2)
    plan = plan_transfer(placement, placement, 0, 16)
    route, *others = plan.routes
    runs = route.runs.copy()
    for name in set(changes) & set(RUN_FIELDS):
        runs[name][0] = changes[name]
    runs = runs[:0] if "runs" in changes else runs
    changed = replace(route, runs=runs, **{name: changes[name] for name in set(changes) - {*RUN_FIELDS, "runs"}})
    with pytest.raises(PlanError, match=f"source rank .* to target rank 0: {words}"):
        replace(plan, routes=(changed, *others))


def test_messages_about_the_whole_plan() -> None:
    plan = plan_transfer(ParallelLayout(tp=2, mla=True), ParallelLayout(), 0, 40)
    with pytest.raises(PlanError, match="target rank 0 gets 16 of 40"):
        replace(plan, routes=plan.routes[:1])
    with pytest.raises(PlanError, match=r"positions 41 \.\. 40 are not a range"):
        replace(plan, start=41)
    halves = plan_transfer(ParallelLayout(tp=2, mla=True), ParallelLayout(), 0, 64).routes
    with pytest.raises(PlanError, match="from source rank 1 to target rank 0: a second copy"):
        replace(plan, stop=64, routes=(halves[0], replace(halves[1], runs=halves[0].runs)))
    again = replace(plan.routes[0], runs=plan.routes[1].runs[:1])
    assert len(plan.routes[1].runs) == 2
    with pytest.raises(PlanError, match="target rank 0 gets"):
        replace(plan, routes=(*plan.routes, again))

"""Every context-parallel path on gloo groups against dense attention in float64, and that mistakes are noticed."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from benchmarks.attention_ranks import run_ranks
from tests.attention.grid import DRAFTS, PATHS, Case, Groups, Ranks, count_requests, grid, is_exact, run_grid
from tests.attention.mutations import MUTATIONS
from tests.attention.workload import MIXED

PRELOAD = ("attention.prefill", "tests.attention.grid", "tests.attention.mutations")
Count = Callable[..., None]


def check(num_ranks: int, count: Count, *, whole: bool) -> None:
    cases = list(grid(num_ranks, whole=whole))
    for path, number in count_requests(cases).items():
        count(f"requests of attention by {path}", number)
    wrong = run_ranks(num_ranks, run_grid, cases, preload=PRELOAD)
    assert [f"rank {rank}: {case}" for rank, of_rank in enumerate(wrong) for case in of_rank] == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8])
def test_paths_equal_dense_attention(num_ranks: int, count: Count) -> None:
    check(num_ranks, count, whole=False)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8])
def test_paths_equal_dense_attention_everywhere(num_ranks: int, count: Count) -> None:
    check(num_ranks, count, whole=True)


def run_mutations(rank: int, world: dist.ProcessGroup) -> dict[str, set[str]]:
    """By mutation, the paths of which a case was wrong on this rank."""
    groups = Groups(rank)
    cases = [Case(Ranks(1, 2, 2), path, "gqa", 2, 2, 4, MIXED) for path in PATHS]
    cases += [Case(Ranks(2, 1, 2), path, "latent", 1, 128, 128, DRAFTS, decodes=True) for path in PATHS]
    noticed = {}
    for name, mutation in MUTATIONS.items():
        with mutation():
            noticed[name] = {case.path for case in cases if not is_exact(case, groups)}
    return noticed


@pytest.mark.timeout(900)
def test_mistakes_are_noticed_on_every_path() -> None:
    by_rank = run_ranks(2, run_mutations, preload=PRELOAD)
    for name in MUTATIONS:
        noticed = set.union(*(of_rank[name] for of_rank in by_rank))
        # Where keys are gathered a row sees its own token in any case.
        expected = {"none": set(), "leaking drafts": set(PATHS) - {"keys"}}.get(name, set(PATHS))
        assert noticed == expected, name

"""Prefill context parallelism: ranks compute different rows of one batch (chunk swap), on the cheapest of three paths.

Also serves decode context parallelism alone, where every rank has all rows: the paths know both.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import torch

from attention.cost import AttentionShape, Batch, PathName, Rates, choose_path, reduces
from attention.entries import PagedCache
from attention.exchange import Ending
from attention.keys import plan_keys
from attention.merge import Partial
from attention.queries import plan_queries
from attention.ring import plan_ring
from attention.step import Step


class Path(Protocol):
    """A way for a rank's rows to reach all tokens of their requests. Planned once per step, run in every layer."""

    def attend(
        self,
        query: torch.Tensor,
        entries: torch.Tensor,
        cache: PagedCache,
        block_table: torch.Tensor,
        slots: torch.Tensor,
        scale: float,
    ) -> Partial:
        """Writes the step's new tokens to the pages of this rank and attends to these and all before.

        Args:
            query: this rank's rows [own rows, Hq, K].
            entries: their cache entries [own rows, Hkv, E].
            block_table: [requests, blocks] int.
            slots: flat slots of all rows of the flat batch on this rank, negative where it does not own the token.

        Returns:
            This rank's rows: out [own rows, Hq, V] float32, lse [own rows, Hq]; of padding, something finite in out.
        """


@dataclass(frozen=True, slots=True)
class Planner:
    """Chooses the path of each step by its cost, and counts the choices. All ranks choose alike: the cost depends on
    nothing that differs between them.

    `workspace_tokens` of a sharded context are exchanged at a time. `paths` are those that the cache format allows:
    queries can only be gathered over heads when they are absorbed. `free_bytes` bounds what a path may allocate.
    """

    shape: AttentionShape
    rates: Rates
    workspace_tokens: int
    paths: tuple[PathName, ...] = tuple(PathName)
    free_bytes: int | None = None
    counts: Counter[PathName] = field(default_factory=Counter)

    def plan(self, step: Step, device: torch.device | str = "cpu") -> Path:
        """The cheapest path for a step.

        Raises:
            ConfigError: the workspace does not hold one virtual block.
        """
        name = self.choose(step)
        self.counts[name] += 1
        return self.plan_path(name, step, device)

    def choose(self, step: Step) -> PathName:
        """The name of the cheapest path. Where every rank has all rows, these need no gather: queries stay."""
        if step.split is None and step.num_head_ranks == 1 and PathName.QUERIES in self.paths:
            return PathName.QUERIES
        batch = Batch(
            query_lens=step.query_lens,
            contexts=step.contexts,
            pcp=1 if step.split is None else step.num_row_ranks,
            num_shards=step.interleave.num_shards,
            workspace_tokens=self.workspace_tokens,
        )
        return choose_path(self.shape, batch, self.rates, self.paths, self.free_bytes)

    def plan_path(self, name: PathName, step: Step, device: torch.device | str = "cpu") -> Path:
        """A path by name."""
        match name:
            case PathName.KEYS:
                return plan_keys(step, self.workspace_tokens, device)
            case PathName.RING:
                return plan_ring(step, self.workspace_tokens, device)
            case PathName.QUERIES:
                return plan_queries(step, self._ending(step))

    def _ending(self, step: Step) -> Ending:
        num_rows = sum(len(rows) for rows in step.own)
        num_ranks = max(step.interleave.num_shards, step.num_row_ranks)
        return Ending.REDUCE_SCATTER if reduces(num_rows, self.shape, num_ranks, self.rates) else Ending.ALL_TO_ALL

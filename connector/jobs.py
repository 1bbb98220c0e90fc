"""What the scheduler side tells the worker side each step. Travels inside vLLM from the engine to its own workers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from transport.control.messages import Manifest


@dataclass(frozen=True, slots=True)
class SourceId:
    """One life of one prefill engine, as seen from here: where it answered, and as what.

    Both count: what answers at one address can claim any incarnation, but not another's address.
    """

    address: tuple[str, int]
    incarnation: str


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's KV to fetch: positions [start, stop), which blocks hold them there and which are to hold them here.

    The same object goes to every rank; each rank takes its own part from the transfer plan.
    """

    request_id: str
    load: str
    capability: str
    source: SourceId
    start: int
    stop: int
    source_block_ids: npt.NDArray[np.int64]
    target_block_ids: npt.NDArray[np.int64]

    @property
    def salt(self) -> int:
        """The same number on every rank, another for every load: spreads short prompts over source replicas."""
        return int(self.load[:8], 16)


@dataclass(slots=True)
class StepWork:
    """Everything new since the last step."""

    jobs: list[LoadJob] = field(default_factory=list)
    manifests: list[tuple[SourceId, Manifest]] = field(default_factory=list)
    """Sources the workers have not met yet."""
    lost: list[str] = field(default_factory=list)
    """Requests whose lease is gone, or whose prefill node is silent."""
    released: list[str] = field(default_factory=list)
    """Requests of this node whose lease ended: report them as sent."""

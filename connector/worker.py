"""The worker side of one rank: registers its cache, runs its loads, reports what ended. Does not import vllm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from connector.jobs import StepWork
from connector.runner import LoadRunner
from connector.stats import Counters
from layouts import Placement
from transport.control.client import ControlClient
from transport.control.messages import RankInfo, RegionInfo
from transport.data_plane import DataPlane
from transport.regions import Memory, Region


class Worker:
    """One rank's memory and data plane. A rank of a prefill node only serves; one of a decode node also reads."""

    def __init__(
        self, rank: int, placement: Placement, plane: DataPlane, client: ControlClient, counters: Counters
    ) -> None:
        self.rank, self.placement, self.counters = rank, placement, counters
        self._plane, self._client = plane, client
        self._regions: dict[int, Region] = {}
        self._runner: LoadRunner | None = None
        self._sent: set[str] = set()

    def register(self, regions: Mapping[int, Region], memory: Iterable[Memory]) -> None:
        """Take over the cache: its regions by global layer, and the memory they lie in."""
        self._regions = dict(regions)
        self._plane.start(list(memory))

    def serve(self) -> RankInfo:
        """Make the cache readable by peers; returns what they need to read it."""
        infos = [RegionInfo.from_region(region) for region in self._regions.values()]
        return RankInfo(rank=self.rank, endpoint=self._plane.serve(), regions=infos)

    def start_reading(self, read_timeout_s: float) -> None:
        """Hand the data plane to an I/O thread that runs this rank's loads."""
        self._runner = LoadRunner(
            rank=self.rank,
            placement=self.placement,
            regions=self._regions,
            plane=self._plane,
            client=self._client,
            read_timeout_s=read_timeout_s,
            counters=self.counters,
        )
        self._runner.start()

    def begin(self, work: StepWork) -> None:
        """Take over what the scheduler side sent with this step."""
        self._sent.update(work.released)
        if self._runner is not None:
            for source, manifest in work.manifests:
                self._runner.meet(source, manifest)
            for job in work.jobs:
                self._runner.submit(job)
            for request_id in work.lost:
                self._runner.lose(request_id)

    def take_results(self, finished_request_ids: Iterable[str]) -> tuple[set[str], set[str], set[str]]:
        """(sent, received, failed among the received) since the last call, each request exactly once.

        `finished_request_ids` are requests vLLM is done with: an aborted load is cut short here.
        """
        sent, self._sent = self._sent, set()
        if self._runner is None:
            return sent, set(), set()
        for request_id in finished_request_ids:
            self._runner.abort(request_id)
        results = self._runner.take_finished()
        return (
            sent,
            {result.request_id for result in results},
            {result.request_id for result in results if not result.succeeded},
        )

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._plane.close()

"""What a decode node knows of its prefill nodes: whether they answer, and the layout of their present life.

Kept by address: whoever answers at one address can claim any incarnation, but cannot speak for another address.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from connector.jobs import SourceId
from connector.stats import Counters
from layouts import Interleave
from transport.control.messages import Manifest
from transport.errors import ProtocolError

MAX_STRANGERS = 1024
"""Peers that never told their layout, remembered at most: clients may name any address."""

Address = tuple[str, int]


class Standing(enum.Enum):
    """KNOWN: answered when last asked. SUSPECT: has to be asked again. SILENT: was given up, until it answers."""

    KNOWN = "known"
    SUSPECT = "suspect"
    SILENT = "silent"


@dataclass(slots=True)
class _Peer:
    standing: Standing
    incarnation: str = ""
    interleave: Interleave | None = None
    """Of the present incarnation; None while its manifest has not been seen."""


class PeerTable:
    """All prefill nodes of one decode node. Counts them by standing in the gauge `peers`."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._peers: dict[Address, _Peer] = {}

    def has_met(self, source: SourceId) -> bool:
        """Whether this life of this peer has told its layout."""
        peer = self._peers.get(source.address)
        return peer is not None and peer.interleave is not None and peer.incarnation == source.incarnation

    def meet(self, source: SourceId, manifest: Manifest | None) -> None:
        """Take note of a life's layout; what an earlier one told is forgotten. Raises ProtocolError when the manifest
        is missing, impossible, or of another life."""
        if manifest is None or manifest.incarnation != source.incarnation:
            raise ProtocolError("the answer holds no manifest of its own incarnation")
        interleave = manifest.placement.to_placement().interleave
        peer = self._at(source.address)
        peer.incarnation, peer.interleave = source.incarnation, interleave

    def interleave(self, source: SourceId) -> Interleave:
        """The interleave of a life that `has_met`."""
        interleave = self._peers[source.address].interleave
        assert interleave is not None and self.has_met(source)
        return interleave

    def heard(self, address: Address) -> None:
        """It has answered."""
        self._stand(self._at(address), Standing.KNOWN)

    def missed(self, address: Address) -> None:
        """It has to be asked again."""
        peer = self._at(address)
        if peer.standing is Standing.KNOWN:
            self._stand(peer, Standing.SUSPECT)

    def gave_up(self, address: Address) -> None:
        """It did not answer in the time it had."""
        self._stand(self._at(address), Standing.SILENT)

    def count(self, standing: Standing) -> int:
        return sum(peer.standing is standing for peer in self._peers.values())

    def _stand(self, peer: _Peer, standing: Standing) -> None:
        self._counters.add("peers", -1, state=peer.standing.value)
        self._counters.add("peers", 1, state=standing.value)
        peer.standing = standing

    def _at(self, address: Address) -> _Peer:
        if address not in self._peers:
            self._forget_a_stranger()
            self._peers[address] = _Peer(Standing.SUSPECT)
            self._counters.add("peers", 1, state=Standing.SUSPECT.value)
        return self._peers[address]

    def _forget_a_stranger(self) -> None:
        strangers = [address for address, peer in self._peers.items() if peer.interleave is None]
        if len(strangers) >= MAX_STRANGERS:
            self._counters.add("peers", -1, state=self._peers.pop(strangers[0]).standing.value)

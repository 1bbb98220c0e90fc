"""Why a node refuses to serve a transfer. Each cause becomes a `Refused` frame or a counted outcome."""

from __future__ import annotations


class LeaseUnknown(RuntimeError):
    """The capability was never granted by this node, or so long ago that it is forgotten."""


class LeaseExpired(RuntimeError):
    """The lease has ended: done, released, or its time was over. Its blocks may hold another request by now."""


class LeaseBusy(RuntimeError):
    """More loads share the lease than this node keeps track of; one of them may end soon."""


class PromptMismatch(RuntimeError):
    """The reader's prompt is not the one whose KV the capability stands for."""

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        super().__init__(f"{field}: this node has {ours}, the reader has {theirs}")
        self.field, self.ours, self.theirs = field, ours, theirs


class BadParams(ValueError):
    """`kv_transfer_params` of a request do not have the form a kvweave prefill node hands out."""


class ForgedParams(ValueError):
    """`kv_transfer_params` that no node with the shared secret made, or that were changed on their way."""

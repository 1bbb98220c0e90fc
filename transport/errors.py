"""Errors of the transport: what went wrong between two engines, as opposed to a wrong setting.

Wrong settings raise `layouts.ConfigError`. Nothing here knows sockets, agents or vLLM.
"""


class TransportError(RuntimeError):
    """Base of the errors that a peer, a network or a transfer caused."""


class TransferFailed(TransportError):
    """A one-sided read did not bring its bytes, or cannot be started."""


class PeerSilent(TransportError):
    """A peer gave no answer in time, or the channel was closed before it could."""


class ProtocolError(TransportError):
    """A peer sent something that this version of the protocol does not allow."""

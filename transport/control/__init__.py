"""Control channel: typed questions and answers between engines, over ZeroMQ."""

from transport.control.client import ControlClient
from transport.control.server import ControlServer

__all__ = ["ControlClient", "ControlServer"]

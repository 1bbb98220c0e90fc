"""UCX as this package uses it, through UCXX: a worker that reaches others by their address and moves tagged messages.

A worker is reached through the network interface of one host address; no port is opened on any other one. Bytes move
only while `progress` runs. Knows addresses and devices; knows nothing of what the messages mean. UCXX is imported when
the first worker starts.

Endpoints ask UCX to handle the death of their peer, which it does over networks. Its shared memory is left out: there
UCX can overlook a death, and with that handling copies through a queue, seen to be no faster than loopback TCP.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from layouts.errors import config_error, listed
from transport.regions import Memory

DEFAULTS = {
    "KEEPALIVE_INTERVAL": "1s",  # how soon a machine that is gone is noticed; UCX: 20 s
    "RNDV_THRESH": "8K",  # larger messages are sent once they are expected, so an end can be cut off cleanly
    "TCP_TX_SEG_SIZE": "64K",  # three times as fast as UCX's 8 KiB over loopback
    "TCP_RX_SEG_SIZE": "256K",
}
"""UCX settings, without `UCX_`, for those that the environment does not give."""

_SIOCGIFADDR = 0x8915
_INTERFACE_NAME_BYTES = 16

Endpoint = Any  # ucxx._lib.libucxx.UCXEndpoint
Request = Any  # ucxx._lib.libucxx.UCXRequest


class Worker:
    """One UCX worker in a context of its own; used by one thread at a time.

    ConfigError when UCXX is missing, `host` is no address of this machine, or UCX cannot start with the settings that
    the environment gives.
    """

    def __init__(self, host: str) -> None:
        self._ucxx = _load_ucxx()
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self.error: type[Exception] = self._ucxx.UCXError
        features = (self._ucxx.Feature.TAG, self._ucxx.Feature.WAKEUP)
        settings = DEFAULTS | {"NET_DEVICES": ",".join(_devices_of(host))}
        given = {name: value for name, value in settings.items() if f"UCX_{name}" not in os.environ}
        try:
            self._worker = self._ucxx.UCXWorker(self._ucxx.UCXContext(given, features))
            self._worker.init_blocking_progress_mode()
            self.address = bytes(self._worker.address)
        except self.error as error:
            raise config_error(
                "transport 'ucx'",
                got=f"{error} when UCX starts with UCX_TLS={os.environ.get('UCX_TLS', 'all')}",
                allowed="UCX_TLS with a transport that this machine has, and self",
                remedy="Unset UCX_TLS, or use for example UCX_TLS=tcp,self,sm.",
            ) from error
        self._poll = select.poll()
        self._poll.register(self._worker.epoll_file_descriptor, select.POLLIN)

    def wake_on(self, file_descriptor: int) -> None:
        """Let `wait` end also when that is readable."""
        self._poll.register(file_descriptor, select.POLLIN)

    def connect(self, address: bytes) -> Endpoint:
        """Return an endpoint to the worker of that address; `error` when none of its ways is one of ours."""
        remote = self._ucxx.UCXAddress.create_from_buffer(address)
        return self._worker.create_endpoint_from_worker_address(remote, True)

    def close(self, endpoint: Endpoint) -> None:
        """Cut a connection, once: its requests complete in one of the next calls of `progress`.

        One that UCX has given up already is left alone: UCXX counts it as closed, and closing it beside UCXX brought
        the process down.
        """
        if endpoint.alive:
            endpoint.close_blocking()

    def send(self, endpoint: Endpoint, memory: Memory, tag: int) -> Request:
        """Start to send memory, which must stay as it is until the request has completed."""
        return endpoint.tag_send(self._buffer(memory), self._ucxx.UCXXTag(tag))

    def receive(self, memory: Memory, tag: int, endpoint: Endpoint | None = None) -> Request:
        """Start to receive one message into memory; closing `endpoint`, if given, ends the request."""
        return (endpoint or self._worker).tag_recv(self._buffer(memory), self._ucxx.UCXXTag(tag))

    def progress(self) -> None:
        """Move what can be moved without waiting."""
        self._worker.progress()

    def wait(self, timeout_s: float) -> None:
        """Return when there may be something to progress, or after `timeout_s`."""
        if self._worker.arm():
            self._poll.poll(timeout_s * 1000)

    def progress_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Progress until `condition` holds; return whether it does."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.progress()
            if condition():
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self.wait(min(left_s, 0.01))

    def _buffer(self, memory: Memory) -> Any:
        if memory.device == "cpu":
            return self._array((ctypes.c_uint8 * memory.num_bytes).from_address(memory.address))
        interface = {"data": (memory.address, False), "shape": (memory.num_bytes,), "typestr": "|u1", "version": 3}
        return self._array(SimpleNamespace(__cuda_array_interface__=interface))


class Mailbox:
    """Receives short messages of a tag into buffers that wait for them."""

    def __init__(self, worker: Worker, tag: int, num_bytes: int, num_buffers: int) -> None:
        self._worker = worker
        self._tag = tag
        self._buffers = [ctypes.create_string_buffer(num_bytes) for _ in range(num_buffers)]
        self._requests = [self._post(buffer) for buffer in self._buffers]

    def take(self) -> list[bytes]:
        """Return the buffers that a message has come into since the last time; what follows its end is old."""
        taken = []
        for index, buffer in enumerate(self._buffers):
            if self._requests[index].completed:
                if self._requests[index].status == 0:
                    taken.append(buffer.raw)
                self._requests[index] = self._post(buffer)
        return taken

    def _post(self, buffer: ctypes.Array[ctypes.c_char]) -> Request:
        return self._worker.receive(Memory(ctypes.addressof(buffer), len(buffer)), self._tag)


class Outbox:
    """Sends short messages and keeps them until they are gone."""

    def __init__(self, worker: Worker, tag: int) -> None:
        self._worker = worker
        self._tag = tag
        self._sending: list[tuple[Request, ctypes.Array[ctypes.c_char]]] = []

    def send(self, endpoint: Endpoint, message: bytes) -> None:
        """Start to send; an endpoint that fails drops it, which shows as `endpoint.alive`."""
        self._sending = [item for item in self._sending if not item[0].completed]
        buffer = ctypes.create_string_buffer(message, len(message))
        with suppress(self._worker.error):
            memory = Memory(ctypes.addressof(buffer), len(buffer))
            self._sending.append((self._worker.send(endpoint, memory, self._tag), buffer))

    @property
    def is_empty(self) -> bool:
        """Whether all is sent or dropped."""
        return all(request.completed for request, _ in self._sending)


@cache
def _load_ucxx() -> ModuleType:
    """Import UCXX without the environment variables that it sets, which NIXL's UCX would see as well."""
    before = dict(os.environ)
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise config_error(
            "transport 'ucx'",
            got=f"no UCXX library ({error})",
            allowed="an installed one",
            remedy="Run `pip install ucxx-cu12` (ucxx-cu13 for CUDA 13), or choose transport 'nixl'.",
        ) from error
    finally:
        for name in os.environ.keys() - before.keys():
            if name.startswith("UCX_"):
                del os.environ[name]


def _devices_of(host: str) -> list[str]:
    """UCX's names of the network devices that serve `host`: its interface, and RDMA unless that is the loopback."""
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise _host_error(host) from error
    names = [name for name, of_it in _interface_addresses().items() if of_it == address]
    if not names and not str(address).startswith("127."):
        raise _host_error(host)
    if str(address).startswith("127."):
        return ["lo"]
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    return names + [f"{port.parts[-3]}:{port.name}" for port in ports]


def _host_error(host: str) -> Exception:
    return config_error(
        "transport 'ucx' host",
        got=repr(host),
        allowed=f"an IPv4 address of this machine ({listed(sorted(_interface_addresses().values()))})",
        remedy="Name the one that peers reach this node by.",
    )


def _interface_addresses() -> dict[str, str]:
    """The first IPv4 address of each interface that has one (man 7 netdevice)."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_INTERFACE_NAME_BYTES}s24x", name.encode())
            with suppress(OSError):
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses

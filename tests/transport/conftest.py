"""The ends of packed reads, as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transport.packing_ends import Source, Target
from transport.control import ControlClient


@pytest.fixture
def client() -> Iterator[ControlClient]:
    client = ControlClient()
    client.start()
    yield client
    client.close()


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.close()


@pytest.fixture
def target(client: ControlClient) -> Iterator[Target]:
    target = Target(client)
    yield target
    target.close()

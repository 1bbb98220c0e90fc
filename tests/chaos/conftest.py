"""The nodes of one module, with small pools so that a freed block is wanted at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes.conftest import Farm


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    farm = Farm(tmp_path_factory.mktemp("chaos"))
    try:
        yield farm
    finally:
        farm.close()

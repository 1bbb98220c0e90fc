"""Bad input to a control port for a few seconds; `python -m tests.transport.fuzz` goes on for longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.fuzz import MAX_GROWTH_MIB, attack, attacked_server
from tests.transport.samples import MESSAGES
from transport import ProtocolError
from transport.control.messages import PROTOCOL_VERSION, Message, decode_request


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
def test_a_control_port_survives(tmp_path: Path, curve: bool) -> None:
    with attacked_server(tmp_path, curve) as target:
        report = attack(target, num_frames=5_000, seed=1)
    assert report.num_opens_served == 22
    assert report.answers.total() == 5_000
    assert report.answers["malformed"] > 3_000 and report.answers["version"] > 100
    assert report.growth_mib < MAX_GROWTH_MIB
    assert report.end.num_threads == report.warm.num_threads
    assert report.end.num_descriptors <= report.warm.num_descriptors + 2


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_other_values_is_read_or_refused(message: Message, data: st.DataObject) -> None:
    """Whatever stands in the fields: a request with just these values, or ProtocolError."""
    fields = msgspec.to_builtins(message)
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), unique=True)):
        fields[name] = data.draw(VALUES, label=name)
    frame = bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode(fields)
    try:
        request = decode_request(frame)
    except ProtocolError:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request)).items() <= fields.items()

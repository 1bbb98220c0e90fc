"""Wire messages: their bytes are fixed, and what is not exactly right is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts import ParallelLayout, Span
from tests.transport.samples import CACHE, MESSAGES, PLACEMENT, REGION
from transport import ProtocolError, Region
from transport.control import messages as m

GOLDEN = {
    "Open": (
        "0189a474797065a44f70656eaa6361706162696c697479a3636170a46c6f6164a46c6f6164a5636163686588"
        "a56d6f64656ca474696e79a56474797065a7666c6f61743332a86b765f6474797065a46175746faa6e756d5f"
        "6c617965727302ac6e756d5f6b765f686561647304aa686561645f627974657340a36d6c61c2a470616765a5"
        "706c61696ea9706c6163656d656e7486aa6e756d5f73686172647302b1696e7465726c656176655f746f6b65"
        "6e7301ac626c6f636b5f746f6b656e7310ac6e756d5f6b765f686561647304aa6e756d5f6c617965727302a8"
        "686f6c64696e677392950000040002950100040002aa6e756d5f746f6b656e7325ad70726f6d70745f646967"
        "657374c406646967657374b16b6e6f776e5f696e6361726e6174696f6ea3696e63aa7472616e73706f727473"
        "92a3636d61a46e69786c"
    ),
    "Renew": "0183a474797065a552656e6577aa6361706162696c697479a3636170a46c6f6164a46c6f6164",
    "Done": (
        "0185a474797065a4446f6e65aa6361706162696c697479a3636170a46c6f6164a46c6f6164a6726561646572"
        "01ab6e756d5f7265616465727302"
    ),
    "Release": "0183a474797065a752656c65617365aa6361706162696c697479a3636170a46c6f6164a46c6f6164",
    "Opened": (
        "0186a474797065a64f70656e6564ab696e6361726e6174696f6ea3696e63aa6e756d5f746f6b656e7325a962"
        "6c6f636b5f6964739193030201a76c656173655f73cb403e000000000000a86d616e696665737484ab696e63"
        "61726e6174696f6ea3696e63a5636163686588a56d6f64656ca474696e79a56474797065a7666c6f61743332"
        "a86b765f6474797065a46175746faa6e756d5f6c617965727302ac6e756d5f6b765f686561647304aa686561"
        "645f627974657340a36d6c61c2a470616765a5706c61696ea9706c6163656d656e7486aa6e756d5f73686172"
        "647302b1696e7465726c656176655f746f6b656e7301ac626c6f636b5f746f6b656e7310ac6e756d5f6b765f"
        "686561647304aa6e756d5f6c617965727302a8686f6c64696e677392950000040002950100040002a572616e"
        "6b739183a472616e6b00a8656e64706f696e74c408656e64706f696e74a7726567696f6e73919d010004cd10"
        "00081010cd1000cd04004040a5706c61696ea3637075"
    ),
    "Ok": "0182a474797065a24f6ba76c656173655f73cb4029000000000000",
    "Refused": (
        "0186a474797065a752656675736564a56361757365ac696e636f6d70617469626c65a56669656c64a5647479"
        "7065a46f757273a7666c6f61743332a6746865697273a862666c6f61743136a664657461696ca0"
    ),
    "Describe": "0181a474797065a84465736372696265",
    "Description": (
        "0187a474797065ab4465736372697074696f6ea776657273696f6ea5302e312e30ab696e6361726e617469"
        "6f6ea3696e63aa7472616e73706f72747392a3636d61a46e69786ca5636163686588a56d6f64656ca47469"
        "6e79a56474797065a7666c6f61743332a86b765f6474797065a46175746faa6e756d5f6c617965727302ac"
        "6e756d5f6b765f686561647304aa686561645f627974657340a36d6c61c2a470616765a5706c61696ea970"
        "6c6163656d656e7486aa6e756d5f73686172647302b1696e7465726c656176655f746f6b656e7301ac626c"
        "6f636b5f746f6b656e7310ac6e756d5f6b765f686561647304aa6e756d5f6c617965727302a8686f6c6469"
        "6e677392950000040002950100040002af6e756d5f6f70656e5f6c656173657303"
    ),
    "Gather": (
        "0186a474797065a6476174686572a6616363657373a36b6579a6726561646572a6726561646572a9616464"
        "726573736573c4080000000000000000a76c656e67746873c4080000000000000000a9676976655f626163"
        "6b9101"
    ),
    "Gathered": ("0184a474797065a84761746865726564a8736c6963655f696402a761646472657373cd1000a96e756d5f627974657340"),
    "GiveBack": (
        "0185a474797065a8476976654261636ba6616363657373a36b6579a6726561646572a6726561646572a673"
        "6c696365739102a76c656176696e67c2"
    ),
}


def _decode(message: object, frame: bytes) -> object:
    is_request = isinstance(message, m.Request)
    return m.decode_request(frame) if is_request else m.decode_reply(frame)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: object) -> None:
    assert _decode(message, m.encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_golden_bytes(message: object) -> None:
    assert m.encode(message).hex() == GOLDEN[type(message).__name__]


def test_a_description_gives_no_access() -> None:
    """Neither bytes (endpoints are) nor addresses, and no type that has them."""
    seen = set()
    waiting = [msgspec.inspect.type_info(m.Description)]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, msgspec.inspect.StructType):
            seen.add(kind.cls.__name__)
            waiting += [field.type for field in kind.fields]
        elif isinstance(kind, msgspec.inspect.ListType):
            waiting.append(kind.item_type)
        else:
            assert isinstance(kind, (msgspec.inspect.StrType, msgspec.inspect.IntType, msgspec.inspect.BoolType))
            assert getattr(kind, "le", None) is None or kind.le <= 1 << 31, "this could be an address"
    assert seen == {"Description", "CacheFormat", "PlacementInfo", "HoldingInfo"}


def test_requests_are_no_replies() -> None:
    with pytest.raises(ProtocolError):
        m.decode_request(m.encode(m.Ok()))
    with pytest.raises(ProtocolError):
        m.decode_reply(m.encode(m.Renew("cap", "load")))


def test_version_comes_first() -> None:
    with pytest.raises(m.WrongVersion, match="version 2"):
        m.decode_request(b"\x02anything")


def _frame(**fields: object) -> bytes:
    return bytes((m.PROTOCOL_VERSION,)) + msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01",
        b"\x01\xc1",
        m.encode(m.Renew("cap", "load"))[:-1],
        m.encode(m.Renew("cap", "load")) + b"x",
        _frame(type="Renew", capability="cap"),
        _frame(type="Renew", capability="cap", load="load", more=1),
        _frame(type="Renew", capability=7, load="load"),
        _frame(type="Renew", capability="c" * 65, load="load"),
        _frame(type="Renew", capability="", load="load"),
        _frame(type="Done", capability="cap", load="load", reader="1", num_readers=2),
        _frame(type="Done", capability="cap", load="load", reader=-1, num_readers=2),
        _frame(type="Done", capability="cap", load="load", reader=1 << 63, num_readers=2),
        _frame(type="Nothing"),
        b"\x01" + b"\x91" * 100_000,
        b"\x01" + bytes(m.MAX_REQUEST_BYTES),
    ],
)
def test_bad_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode_request(frame)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode_request(b"\x01" + data)


def test_mismatch_names_field_and_values() -> None:
    other = msgspec.structs.replace(CACHE, dtype="bfloat16", head_bytes=32)
    assert m.find_mismatch(CACHE, CACHE) is None
    assert m.find_mismatch(CACHE, other) == ("dtype", "float32", "bfloat16")


def test_placement_survives_the_wire() -> None:
    placement = ParallelLayout(tp=4, pcp=2, dcp=8, num_kv_heads=1, mla=True, num_layers=3).placement
    info = m.PlacementInfo.from_placement(placement)
    assert info.to_placement() == placement


def test_impossible_placement_and_region_are_protocol_errors() -> None:
    with pytest.raises(ProtocolError, match="placement"):
        msgspec.structs.replace(PLACEMENT, interleave_tokens=3).to_placement()
    with pytest.raises(ProtocolError, match="region"):
        msgspec.structs.replace(REGION, block_tokens=17).to_region()
    with pytest.raises(ProtocolError, match="address space"):
        msgspec.structs.replace(REGION, num_blocks=1 << 30, block_stride=1 << 47).to_region()


def test_region_survives_the_wire() -> None:
    region = Region(3, Span(2, 4), 1 << 46, 8, 32, 8192, 1024, 64, 64, "plain", "cuda:1", 16)
    assert m.RegionInfo.from_region(region).to_region() == region


def test_a_message_beyond_the_frame_limit_is_not_sent() -> None:
    huge = m.Manifest("inc", CACHE, PLACEMENT, [m.RankInfo(0, bytes(m.MAX_FRAME_BYTES), [])])
    with pytest.raises(ValueError, match="allowed are"):
        m.encode(m.Opened("inc", 1, [], 1.0, huge))


def test_long_block_tables_are_quick_enough() -> None:
    opened = m.Opened("inc", 1 << 24, [list(range(1 << 20))], 30.0)
    assert m.decode_reply(m.encode(opened)) == opened

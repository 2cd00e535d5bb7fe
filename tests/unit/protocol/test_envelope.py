"""The one frame that everybody reads: right, or refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified.bus.calls.remote_errors import rebuild
from unified.errors import ProtocolError, VersionMismatchError
from unified.protocol.envelope import (
    BUS_VERSION,
    Envelope,
    Kind,
    Undelivered,
    decode_envelope,
    decode_hello,
    decode_undelivered,
    encode_envelope,
    encode_record,
)
from unified.protocol.records import Inbox

CALL = Envelope(BUS_VERSION, Kind.CALL, 7, "from", "worker_1-0_1-0", "to", "method", 1.5, "trace")


def test_golden_bytes() -> None:
    assert encode_envelope(CALL).hex() == (
        "9e050107a466726f6dae776f726b65725f312d305f312d30a2746fa66d6574686f64cb3ff8000000000000a5747261636590a0c000c0"
    )


def test_comes_back() -> None:
    assert decode_envelope(encode_envelope(CALL)) == CALL
    assert decode_envelope(memoryview(encode_envelope(CALL))) == CALL
    inbox = Inbox(inbox_id="i", routes=["tcp://h:1"], host_id="h")
    assert decode_hello(encode_record(inbox)) == inbox
    lost = Undelivered(kind=Kind.CALL, target="t", code="overloaded")
    assert decode_undelivered(encode_record(lost)) == lost


@pytest.mark.parametrize("frame", [[9, 1, 7], [9, 99, "what", {}], [9, 1, 7, "a", "b", "c", "d", None, ""]], ids=str)
def test_other_version_is_named_even_when_the_rest_is_strange(frame: list[object]) -> None:
    with pytest.raises(VersionMismatchError, match=r"version 9, this side speaks 5: install the same release"):
        decode_envelope(msgspec.msgpack.encode(frame))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x93\x04\x01\x07",  # too short
        b"\x96\x04\x63\x07\xa1a\xa1b\xa1c",  # no such kind
        b"\x96\x04\x01\x07\xa1\xff\xa1b\xa1c",  # a name that is not UTF-8
        b"\x93\x04\xa1\xff\xc0",
        b"\x91" * 5000,  # nested for ever
        b"x" * 10_000,
        b"\xdd\xff\xff\xff\xff",
    ],
    ids=lambda frame: repr(frame[:12]),
)
def test_rubbish_is_a_protocol_error(frame: bytes) -> None:
    for read in (decode_envelope, decode_hello, decode_undelivered):
        with pytest.raises(ProtocolError):
            read(frame)
    with pytest.raises(ProtocolError):
        rebuild(frame, "the call")


@given(st.binary(max_size=80), st.integers(0, 30))
def test_no_bytes_do_anything_but_decode_or_fail(noise: bytes, at: int) -> None:
    good = encode_envelope(CALL)
    for frame in (noise, good[:at] + noise, good[:at] + noise + good[at + len(noise) :]):
        try:
            found: Envelope | None = decode_envelope(frame)
        except ProtocolError:
            found = None
        assert found is None or isinstance(found, Envelope)

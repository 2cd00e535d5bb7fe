"""Control messages from bytes: whatever arrives is a message or a ProtocolError, never another exception."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified.errors import ProtocolError, VersionMismatchError
from unified.protocol.agent_master import AgentHeartbeat, agent_to_master
from unified.protocol.client_master import ListJobs, client_to_master
from unified.protocol.framing import MAX_STREAM_MESSAGE, PROTOCOL_VERSION, StreamBuffer, encode_stream


def test_a_message_comes_back_with_its_request_id() -> None:
    beat = AgentHeartbeat(node="n1", incarnation="a", generation=3)
    assert agent_to_master.decode(agent_to_master.encode(beat, 7)) == (7, beat)


def test_another_version_is_named_on_both_sides() -> None:
    frames = client_to_master.encode(ListJobs(), version=PROTOCOL_VERSION + 1)
    with pytest.raises(VersionMismatchError, match=rf"version {PROTOCOL_VERSION + 1}, this side speaks"):
        client_to_master.decode(frames)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"\x81\xa4type\xa1\xff",  # text that is not UTF-8
        b"\x91" * 100_000,  # nested without end
        msgspec.msgpack.encode({"type": "no-such-message"}),
        msgspec.msgpack.encode({"type": "get-job"}),  # a field is missing
        msgspec.msgpack.encode({"type": "get-job", "job": 3}),
    ],
)
def test_a_body_that_is_no_message_is_a_protocol_error(body: bytes) -> None:
    header = client_to_master.encode(ListJobs())[0]
    with pytest.raises(ProtocolError):
        client_to_master.decode([header, body])


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_rubbish_is_a_message_or_a_protocol_error(frames: list[bytes]) -> None:
    with contextlib.suppress(ProtocolError):
        assert client_to_master.decode(frames).message


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(min_value=1, max_value=17))
def test_a_stream_is_cut_at_its_messages_however_it_arrives(messages: list[bytes], step: int) -> None:
    stream = b"".join(encode_stream(message) for message in messages)
    buffer, bodies = StreamBuffer(), list[bytes]()
    for start in range(0, len(stream), step):
        bodies += buffer.feed(stream[start : start + step])
    assert [msgspec.msgpack.decode(body, type=bytes) for body in bodies] == messages


def test_a_length_that_no_message_has_is_refused() -> None:
    with pytest.raises(ProtocolError, match="refused"):
        StreamBuffer().feed((MAX_STREAM_MESSAGE + 1).to_bytes(4, "little"))

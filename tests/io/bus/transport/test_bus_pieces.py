"""Buffers over tcp that are longer than a piece: they come whole or not at all, and their memory is used again."""

import contextlib
import gc
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.bus import World, call
from unified.bus.buffers import Buffer
from unified.bus.shm.reader import PayloadGoneError
from unified.bus.transport.framing import RemoteMessage
from unified.bus.transport.pieces import PieceJoiner, split
from unified.errors import ProtocolError
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, PieceRange, decode_envelope, encode_record
from unified.security.frames import PIECE_BYTES, cut

ENVELOPE = Envelope(BUS_VERSION, Kind.CALL, 7, "sender", "a", "b", "method", job="job-1")
DATA = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 5)


@pytest.mark.parametrize("nbytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_all_pieces_of_a_control_message_but_the_last_are_full(nbytes: int) -> None:
    data = np.arange(nbytes, dtype=np.uint32).astype(np.uint8).data
    pieces = [memoryview(piece) for piece in cut(data)]
    assert [piece.nbytes for piece in pieces[:-1]] == [PIECE_BYTES] * (nbytes // PIECE_BYTES)
    assert pieces[-1].nbytes == nbytes % PIECE_BYTES
    assert b"".join(pieces) == data


def series(*buffers: Buffer) -> list[RemoteMessage]:
    """Return what a receiver gets of a message with these buffers."""
    messages = split(ENVELOPE, b"body", buffers)
    assert all(memoryview(frame).nbytes <= PIECE_BYTES for frames in messages for frame in frames)
    return [RemoteMessage(bytes(head), bytes(body), rest, False) for head, body, *rest in messages]


def take(joiner: PieceJoiner, messages: Sequence[RemoteMessage]) -> list[Buffer]:
    """Return the buffers of the message that is the last of these."""
    *pieces, last = messages
    for each in pieces:
        joiner.lay(decode_envelope(each.envelope), each)
    return joiner.collect(decode_envelope(last.envelope), last)


def test_small_buffers_go_with_their_message() -> None:
    (message,) = series(b"x" * (PIECE_BYTES - 1), b"")
    assert decode_envelope(message.envelope) == ENVELOPE
    assert take(PieceJoiner(), [message]) == [b"x" * (PIECE_BYTES - 1), b""]


def test_buffers_are_laid_together_in_memory_that_comes_back() -> None:
    joiner = PieceJoiner()

    def lay() -> int:
        long, short, exact = take(joiner, series(DATA, b"short", DATA[:PIECE_BYTES]))
        assert (bytes(long), bytes(short), bytes(exact)) == (DATA, b"short", DATA[:PIECE_BYTES])
        return np.frombuffer(long, np.uint8).ctypes.data

    first = lay()
    gc.collect()
    assert lay() == first
    assert joiner.trim(time.monotonic())
    assert not joiner.trim(time.monotonic() + 3600), "nothing is kept for ever"


def test_a_sender_that_met_a_full_queue_begins_anew() -> None:
    messages = series(DATA, DATA)
    (first, second) = take(PieceJoiner(), [*messages[:4], *messages])
    assert (bytes(first), bytes(second)) == (DATA, DATA)


@pytest.mark.parametrize("lost", [0, 1, 2, slice(0, 3), slice(3, 6), slice(0, 6)])
def test_a_message_without_all_of_its_pieces_is_refused(lost: int | slice) -> None:
    messages = series(DATA, DATA)
    del messages[lost]
    joiner, (*pieces, last) = PieceJoiner(), messages
    for each in pieces:
        with contextlib.suppress(ProtocolError):
            joiner.lay(decode_envelope(each.envelope), each)
    with pytest.raises(PayloadGoneError, match="lost on the way"):
        joiner.collect(decode_envelope(last.envelope), last)


def test_a_newer_series_takes_the_place_of_one_that_broke_off() -> None:
    old, new = series(DATA), series(DATA[::-1])
    joiner = PieceJoiner()
    for each in old[:1] + new[:2]:
        joiner.lay(decode_envelope(each.envelope), each)
    with pytest.raises(ProtocolError, match="behind a newer series"):
        joiner.lay(decode_envelope(old[1].envelope), old[1])
    (whole,) = take(joiner, new[2:])
    assert bytes(whole) == DATA[::-1]


def deposit(joiner: PieceJoiner, data: bytes) -> RemoteMessage:
    """Lay down what comes beside ZeroMQ; return the message that follows."""
    last = series(data)[-1]
    found = decode_envelope(last.envelope).series
    assert found is not None
    view = joiner.take(len(data))
    view[:] = data
    joiner.deposit("sender", found.number, {0: view})
    return last


def test_buffers_beside_zeromq_may_be_there_before_the_messages_before_them() -> None:
    """A busy receiver reads a message later than the buffers of the next one have come on their own connection."""
    joiner = PieceJoiner()
    messages = [deposit(joiner, DATA), deposit(joiner, DATA[::-1])]
    found = [joiner.collect(decode_envelope(each.envelope), each) for each in messages]
    assert [bytes(whole) for (whole,) in found] == [DATA, DATA[::-1]]
    for each in messages:
        with pytest.raises(PayloadGoneError):
            joiner.collect(decode_envelope(each.envelope), each)


def test_buffers_that_came_on_both_ways_are_kept_once() -> None:
    joiner = PieceJoiner()
    (*pieces, last) = series(DATA)
    number = decode_envelope(last.envelope).series
    assert number is not None
    joiner.deposit(
        "sender", number.number, {0: joiner.take(len(DATA))}
    )  # its answer was lost, so its sender tries again
    (whole,) = take(joiner, [*pieces, last])
    assert bytes(whole) == DATA
    del whole
    gc.collect()
    assert not joiner.trim(time.monotonic() + 3600), "their memory is kept"


def test_the_pieces_of_the_dead_and_of_the_silent_are_dropped() -> None:
    joiner = PieceJoiner()
    for end in (lambda: joiner.forget("sender"), lambda: joiner.trim(time.monotonic() + 3600)):
        last = deposit(joiner, DATA)
        end()
        with pytest.raises(PayloadGoneError):
            joiner.collect(decode_envelope(last.envelope), last)
    for end in (lambda: joiner.forget("sender"), lambda: joiner.trim(time.monotonic() + 3600)):
        piece, *_, last = series(DATA)
        joiner.lay(decode_envelope(piece.envelope), piece)
        end()
        with pytest.raises(PayloadGoneError):
            joiner.collect(decode_envelope(last.envelope), last)
    gc.collect()
    assert not joiner.trim(time.monotonic() + 3600), "their memory is kept"


def test_a_claimed_size_for_which_there_is_no_memory_is_refused() -> None:
    piece, *_ = series(DATA)
    huge = encode_record(PieceRange(index=0, start=0, nbytes=1 << 60))
    with pytest.raises(ProtocolError, match="there is no memory"):
        PieceJoiner().lay(decode_envelope(piece.envelope), piece._replace(body=huge))


@pytest.mark.parametrize("route", ["tcp", "relay"])
def test_arrays_of_any_size_come_as_they_were(tmp_path: Path, relay: str, route: str) -> None:
    with contextlib.closing(World(tmp_path, route, relay)) as world:
        a, _ = world.pair({"echo": lambda *values: values})
        arrays = [np.random.default_rng(size).bytes(size) for size in (1, PIECE_BYTES, 2 * PIECE_BYTES + 1, 100_000)]
        assert list(call(a, "echo", *arrays)) == arrays

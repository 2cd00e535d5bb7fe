"""Records on a socket: they come as they were sent, and nothing of one that somebody touched."""

import os
import random
import socket
from collections.abc import Iterator, Sequence

import pytest

from unified.errors import ProtocolError
from unified.security.sealing import KEY_BYTES, MAX_RECORD_BYTES, TAG_BYTES, RecordSocket

KEY = bytes(range(KEY_BYTES))
RECORDS = [random.Random(number).randbytes(100 + number) for number in range(4)]
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def sealed(records: Sequence[bytes], key: bytes = KEY, *, is_maker: bool = True) -> list[bytes]:
    """Return what one side would send."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = RecordSocket(ours, key, is_maker=is_maker)
        for record in records:
            sender.send(record)
        return [theirs.recv(len(record) + TAG_BYTES, socket.MSG_WAITALL) for record in records]


def opened(ends: Ends, data: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends[0].sendall(data)
    ends[0].shutdown(socket.SHUT_WR)
    receiver, found = RecordSocket(ends[1], KEY, is_maker=False), []
    for size in sizes:
        record = bytearray(size)
        receiver.receive(record)
        found.append(bytes(record))
    return found


SIZES = [len(record) for record in RECORDS]


def test_both_directions_of_one_key(ends: Ends) -> None:
    maker, other = RecordSocket(ends[0], KEY, is_maker=True), RecordSocket(ends[1], KEY, is_maker=False)
    for record in (*RECORDS, b"", os.urandom(50_000)):
        for one, another in ((maker, other), (other, maker)):
            one.send(record)
            came = bytearray(len(record))
            another.receive(came)
            assert came == record
    assert maker.num_sent == other.num_sent == len(RECORDS) + 2
    assert len(maker._sealed) == MAX_RECORD_BYTES + TAG_BYTES


@pytest.mark.parametrize("bit", range(0, 8 * (SIZES[0] + TAG_BYTES), 97))
def test_a_changed_bit_is_refused(ends: Ends, bit: int) -> None:
    data = bytearray(sealed(RECORDS)[0])
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match="was changed, lost, repeated or moved"):
        opened(ends, bytes(data), SIZES[:1])


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2], [0, 1, 1], [0, 1, 3], [0, 1, 2, 0]])
def test_records_that_are_lost_repeated_or_moved_are_refused(ends: Ends, order: list[int]) -> None:
    same_size = [record[:100] for record in RECORDS]
    records = sealed(same_size)
    with pytest.raises(ProtocolError):
        opened(ends, b"".join(records[number] for number in order), [100] * len(order))


def test_a_record_that_breaks_off_is_none(ends: Ends) -> None:
    with pytest.raises(ConnectionResetError):
        opened(ends, sealed(RECORDS)[0][:-1], SIZES[:1])


def test_a_record_that_does_not_come_is_not_waited_for(ends: Ends) -> None:
    with pytest.raises(TimeoutError):
        RecordSocket(ends[1], KEY, is_maker=False).receive(bytearray(1), 0.01)


@pytest.mark.parametrize(
    ("key", "is_maker"), [(bytes(KEY_BYTES), True), (KEY, False)], ids=["another key", "reflected"]
)
def test_what_the_other_side_did_not_seal_is_refused(ends: Ends, key: bytes, is_maker: bool) -> None:
    with pytest.raises(ProtocolError):
        opened(ends, sealed(RECORDS, key, is_maker=is_maker)[0], SIZES[:1])


def test_equal_records_never_look_the_same() -> None:
    there, back = sealed([RECORDS[0]] * 50), sealed([RECORDS[0]] * 50, is_maker=False)
    assert len({*there, *back}) == 100

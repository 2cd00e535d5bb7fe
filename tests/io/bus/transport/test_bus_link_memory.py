"""What a link asks of memory for each message."""

import socket
import tracemalloc
from unittest.mock import Mock

from unified.bus.transport.framing import Frames, pack
from unified.bus.transport.unix_connection import RECEIVE_BYTES, UnixConnection


def test_a_small_message_takes_no_more_memory_than_it_needs() -> None:
    """Not even for a moment: the holes of what is cut off add up where messages are kept, as questions to a queue."""
    ours, theirs = socket.socketpair()
    kept: list[Frames] = []
    link = UnixConnection(ours, Mock(deliver=lambda _, frames: kept.append(frames)), Mock())
    [message] = pack(b"envelope", b"a question", [])
    with theirs:
        theirs.sendall(message)
        link.read()
        tracemalloc.start()
        try:
            for _ in range(10):
                theirs.sendall(message)
                link.read()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        link.close()
    assert [bytes(frames.body) for frames in kept] == [b"a question"] * 11
    assert peak < RECEIVE_BYTES // 4

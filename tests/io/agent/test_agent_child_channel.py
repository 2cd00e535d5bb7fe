"""Links to children, and the loop that waits for them."""

import contextlib
import os
import socket

import msgspec
import pytest

from unified.protocol.framing import StreamBuffer, encode_stream
from unified_agent import child_channel
from unified_agent.child_channel import ChildChannel
from unified_agent.poll_loop import PollLoop


def test_forgetting_a_closed_link_twice_does_not_touch_its_descriptors_next_owner() -> None:
    """A worker's end of file comes before its exit is told; another worker may be started in between."""
    sources = PollLoop()
    ours, theirs = socket.socketpair()
    old = ChildChannel(ours)
    sources.watch_channel(old, lambda: None)
    theirs.close()
    assert old.receive() == []
    sources.unwatch_channel(old)
    next_ours, next_theirs = socket.socketpair()
    number = os.dup2(next_ours.fileno(), old.descriptor) if next_ours.fileno() != old.descriptor else next_ours.detach()
    heard: list[bytes] = []
    with contextlib.closing(next_ours), contextlib.closing(next_theirs):
        new = ChildChannel(socket.socket(fileno=number))
        assert new.descriptor == old.descriptor
        sources.watch_channel(new, lambda: heard.extend(new.receive()))
        sources.unwatch_channel(old)
        next_theirs.sendall(encode_stream("hello"))
        sources.wait(100)
        assert len(heard) == 1
        new.close()


def test_a_message_larger_than_the_socket_takes_is_sent_as_it_is_read() -> None:
    sources = PollLoop()
    ours, theirs = socket.socketpair()
    with contextlib.closing(theirs):
        theirs.setblocking(False)
        link = ChildChannel(ours)
        sources.watch_channel(link, lambda: None)
        link.send(b"x" * 3_000_000)
        link.send("after")
        assert link.has_waiting
        buffer, bodies = StreamBuffer(), list[bytes]()
        while len(bodies) < 2:
            sources.wait(0)
            with contextlib.suppress(BlockingIOError):
                while data := theirs.recv(65536):
                    bodies += buffer.feed(data)
        assert not link.has_waiting
        assert len(bodies[0]) > 3_000_000
        link.close()


def test_a_message_to_many_children_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of thousands of workers goes to each of them, and its bytes wait for those that read slowly."""
    encoded: list[object] = []

    def encode(message: object) -> bytes:
        encoded.append(message)
        return encode_stream(message)

    monkeypatch.setattr(child_channel, "encode_stream", encode)
    news = ["entry"] * 1000
    pairs = [socket.socketpair() for _ in range(3)]
    for ours, theirs in pairs:
        channel = ChildChannel(ours)
        for message in (news, "other", news):
            channel.send(message)
        received = theirs.recv(1 << 20)
        assert StreamBuffer().feed(received) == [*map(msgspec.msgpack.encode, (news, "other", news))]
        channel.close()
        theirs.close()
    assert len(encoded) == 1 + 2 * len(pairs)

"""Calls that an endpoint takes for none of its own: those of another job, and those that came before."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from tests.support.bus import DEADLINE_S, World
from unified.bus.codec.codec import encode_arguments
from unified.bus.transport.framing import pack
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, encode_envelope, encode_record
from unified.protocol.records import Inbox
from unified.testing import eventually

STRANGER = Inbox(inbox_id="stranger", routes=[], host_id="elsewhere")
Send = Callable[[Envelope, bytes], None]


@contextmanager
def connected(world: World, inbox: Inbox) -> Iterator[Send]:
    """Sends messages to an inbox as they are given, on one connection that stays open meanwhile."""
    if world.route == "auto":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(inbox.routes[0].removeprefix("ipc://"))
            yield lambda envelope, body: connection.sendall(b"".join(pack(encode_envelope(envelope), body, [])))
        return
    context: zmq.Context[Any] = zmq.Context()
    sender = context.socket(zmq.DEALER if world.route == "relay" else zmq.PUSH)
    sender.identity = STRANGER.inbox_id.encode()
    sender.connect(world.relay if world.route == "relay" else inbox.routes[0])
    try:
        yield lambda envelope, body: sender.send_multipart([encode_envelope(envelope), body])
    finally:
        sender.close(0)
        context.term()


def test_calls_of_another_job_and_repeated_calls_are_not_run(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []
    a, b = world.pair({"note": ran.append})
    inbox = b._listeners.inbox
    hello = Envelope(BUS_VERSION, Kind.HELLO, 0, STRANGER.inbox_id, "x", inbox.inbox_id, job="job-1")
    first = replace(hello, kind=Kind.CALL, call_id=1, method="note", count=1)
    foreign = replace(first, job="job-2")

    def note(word: str) -> bytes:
        return encode_arguments((word,), {}).body

    a.call("b", "note", ("before",), {}).result(DEADLINE_S)  # now the relay knows it
    with connected(world, inbox) as send:
        send(hello, encode_record(STRANGER))
        for _ in range(3):
            send(foreign, note("of another job"))
        for word in ("first", "again", "and again"):
            send(first, note(word))
        send(replace(first, call_id=2, count=2), note("second"))
        eventually(lambda: b.num_rejected >= 5 and len(ran) >= 3)
        a.call("b", "note", ("afterwards",), {}).result(DEADLINE_S)
    assert sorted(ran) == ["afterwards", "before", "first", "second"]
    assert b.num_rejected == 5
    rejections = [each.getMessage() for each in caplog.records if "event=mail-rejected" in each.getMessage()]
    of_another_job, repeated = rejections
    assert "from worker x of job 'job-2', but this is 'job-1'" in of_another_job
    assert "call 1 of worker x came a second time" in repeated

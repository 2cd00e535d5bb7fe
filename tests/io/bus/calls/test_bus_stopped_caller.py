"""A caller that does not take its answers: memory stays bounded, others are served, and nothing is lost."""

import asyncio
import contextlib
import select
import socket
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.bus import DEADLINE_S, World, entry
from unified.bus.calls.registry import rpc
from unified.bus.codec.codec import encode
from unified.bus.endpoint import BusEndpoint
from unified.bus.transport.framing import FrameReader, pack
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, decode_envelope, encode_envelope, encode_record
from unified.protocol.records import Inbox
from unified.testing import eventually

LIMIT_BYTES = 1_000_000
ANSWER_BYTES = 100_000
NUM_CALLS = 300


class Stopped:
    """A caller that writes calls to a worker's socket, and reads only when asked to."""

    def __init__(self, target: Inbox) -> None:
        self._target = target.inbox_id
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(target.routes[0].removeprefix("ipc://"))
        self._write(Kind.HELLO, 0, "", encode_record(Inbox(inbox_id="stopped")))

    def call(self, call_id: int, method: str) -> None:
        self._write(Kind.CALL, call_id, method, encode([[call_id], {}]).body)

    def call_often(self, method: str) -> None:
        for i in range(1, NUM_CALLS + 1):
            self.call(i, method)

    def answers(self, number: int) -> list[int]:
        """The ids of the next so many calls that were answered."""
        reader = FrameReader()
        ids: list[int] = []
        self._socket.settimeout(DEADLINE_S)
        while len(ids) < number:
            wanted = reader.wanted
            if wanted is None:
                frames = reader.feed(self._socket.recv(65536))
            else:
                with wanted:
                    count = self._socket.recv_into(wanted)
                frames = reader.filled(count)
            for each in frames:
                envelope = decode_envelope(each.envelope)
                assert envelope.kind is Kind.RESULT
                ids.append(envelope.call_id)
        return ids

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever is inside it
        self._socket.close()

    def _write(self, kind: Kind, call_id: int, method: str, body: bytes) -> None:
        envelope = Envelope(
            BUS_VERSION, kind, call_id, "stopped", "s", self._target, method, job="job-1", count=call_id
        )
        for piece in pack(encode_envelope(envelope), body, ()):
            self._socket.sendall(piece)


@pytest.fixture
def world_of_links(world: World) -> World:
    if world.route != "auto":
        pytest.skip("ZeroMQ bounds what waits by itself")
    return world


def backlog(endpoint: BusEndpoint) -> int:
    return sum(link.backlog_bytes for link in endpoint._io.connections)


@pytest.mark.parametrize("method", ["plain", "coroutine", "one_by_one"])
def test_answers_that_are_not_taken(world_of_links: World, method: str) -> None:
    world = world_of_links
    began: list[int] = []

    def plain(i: int) -> bytes:
        began.append(i)
        return bytes(ANSWER_BYTES)

    async def coroutine(i: int) -> bytes:
        await asyncio.sleep(0)
        return plain(i)

    one_by_one = rpc(concurrency=1)(plain)
    b, inbox = world.endpoint(
        "b",
        {"plain": plain, "coroutine": coroutine, "one_by_one": one_by_one, "ping": lambda: 1},
        limit_bytes=LIMIT_BYTES,
    )
    a, _ = world.endpoint("a")
    a.update_directory([entry("b", inbox)])
    stopped = Stopped(inbox)
    writer = threading.Thread(target=stopped.call_often, args=(method,))
    writer.start()
    assert eventually(lambda: any(link.is_full for link in b._io.connections))
    assert not any(link.watched & select.EPOLLIN for link in b._io.connections if link.is_full)
    for _ in range(50):
        assert a.call("b", "ping", (), {}).result(DEADLINE_S) == 1
    if method != "coroutine":  # of those any number may be under way already
        assert len(began) < NUM_CALLS
        assert backlog(b) <= LIMIT_BYTES + 40 * ANSWER_BYTES
    ids = stopped.answers(NUM_CALLS)
    writer.join(DEADLINE_S)
    assert sorted(ids) == sorted(began) == list(range(1, NUM_CALLS + 1))
    assert eventually(lambda: not b._server._known)
    assert not b._server._parked
    stopped.close()


def test_caller_that_dies_while_its_answers_wait(world_of_links: World) -> None:
    b, inbox = world_of_links.endpoint("b", {"plain": lambda i: bytes(ANSWER_BYTES)}, limit_bytes=LIMIT_BYTES)
    stopped = Stopped(inbox)

    def write() -> None:
        with contextlib.suppress(OSError):  # what nobody reads any more may not all fit into the socket
            stopped.call_often("plain")

    writer = threading.Thread(target=write)
    writer.start()
    assert eventually(lambda: any(link.is_full for link in b._io.connections))
    stopped.close()
    writer.join(DEADLINE_S)
    assert eventually(lambda: not b._io.connections)
    assert eventually(lambda: not b._server._known)
    assert not b._server._parked


def test_last_answers_leave_before_the_bus_is_closed(world_of_links: World) -> None:
    b, inbox = world_of_links.endpoint("b", {"plain": lambda i: bytes(8 * ANSWER_BYTES)})
    caller = Stopped(inbox)
    for i in range(1, 6):
        caller.call(i, "plain")
    assert eventually(lambda: backlog(b) > 0 and len(b._server._known) == 0 and b._io.connections)
    answers: list[int] = []
    reader = threading.Timer(0.1, lambda: answers.extend(caller.answers(5)))
    reader.start()
    b.close()
    reader.join(DEADLINE_S)
    assert sorted(answers) == [1, 2, 3, 4, 5]
    caller.close()


def test_every_end_of_a_call_is_the_end_of_it(world: World) -> None:
    def fail() -> None:
        raise KeyError

    async def forever() -> None:
        await asyncio.Event().wait()

    release = threading.Event()
    later: list[Future[int]] = []

    def promise() -> Future[int]:
        later.append(Future())
        return later[-1]

    @rpc(concurrency=1)
    def alone() -> bool:
        return release.wait(DEADLINE_S)

    def count() -> Any:
        yield from range(100)

    async def count_async() -> Any:
        for i in range(100):
            yield i

    inline = rpc(inline=True)(lambda: 1)
    methods = {
        "fail": fail,
        "forever": forever,
        "promise": promise,
        "alone": alone,
        "count": count,
        "inline": inline,
        "count_async": count_async,
        "unsendable": threading.Lock,
        "ping": lambda: 1,
    }
    a, b = world.pair(methods)

    def start(method: str, timeout: float | None = None) -> Any:
        return a.call("b", method, (), {}, timeout=timeout)

    assert [start("ping").result(DEADLINE_S) for _ in range(20)] == [1] * 20
    assert start("inline").result(DEADLINE_S) == 1
    for method in ("fail", "unsendable", "missing"):
        assert start(method).exception(DEADLINE_S) is not None
    assert start("forever", 0.05).exception(DEADLINE_S) is not None
    cancelled = [start(each) for each in ("forever", "promise", "alone", "alone", "alone")]
    assert eventually(lambda: later and len(b._server._known) == 5)
    for each in cancelled:
        each.cancel()
    later[0].set_result(1)
    release.set()
    promised = start("promise")
    assert eventually(lambda: len(later) == 2)
    later[1].set_result(2)
    assert promised.result(DEADLINE_S) == 2
    for method in ("count", "count_async"):
        assert list(start(method).result(DEADLINE_S)) == list(range(100))
        start(method).result(DEADLINE_S).close()
        del cancelled[:]
        start(method).result(DEADLINE_S)  # dropped at once
    assert eventually(lambda: not b._server._known)
    assert eventually(lambda: not b._server._order._lines)
    assert all(not limit.running and not limit.waiting for limit in b._server._limits.values())
    assert eventually(lambda: not a._client._outbound)
    assert not a._client._flow_control._held

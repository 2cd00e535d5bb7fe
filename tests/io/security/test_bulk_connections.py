"""Large payloads between hosts under a key, and somebody on the way, or without the key.

It ends the same each time: the payload comes as it was sent, by CURVE; who disturbed is refused, counted and logged.
"""

import contextlib
import gc
import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.bus import World, call, entry
from tests.support.deadlines import met
from unified.bus.calls.inbound import InboundCall
from unified.bus.endpoint import BusEndpoint
from unified.bus.transport import bulk_receiver, bulk_sender
from unified.bus.transport.bulk_receiver import CHUNK_HEADER, ID_BYTES
from unified.bus.transport.routes import BULK
from unified.config.addresses import split_address
from unified.protocol.records import Inbox
from unified.security.bounds import MAX_PENDING
from unified.security.curve import new_key
from unified.security.sealing import MAX_RECORD_BYTES, TAG_BYTES
from unified.testing import eventually

KEY = new_key()
MARK = b"a secret that is easy to find. "
DATA = MARK * (6_000_000 // len(MARK))
RECORD_BYTES = MAX_RECORD_BYTES + TAG_BYTES
Mangle = Callable[[bytes, bytes], bytes]
DEADLINE_S = met(100.0)


class Proxy:
    """Sits between a sender and a receiver, and changes the first two chunks that pass.

    Args:
        mangle: makes of the two what is sent on; an empty result ends the connection after the first.
        answers: makes of the receiver's answers what is sent back.
    """

    def __init__(self, target: tuple[str, int], mangle: Mangle, answers: Callable[[bytes], bytes]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.passed = bytearray()
        self.num_connections = 0
        self._target = target
        self._mangle = mangle
        self._answers = answers
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.num_connections += 1
                with client, socket.create_connection(self._target) as server, contextlib.suppress(OSError):
                    back = threading.Thread(target=self._pass_back, args=(server, client), daemon=True)
                    back.start()
                    self._pass(client, server)
                    server.shutdown(socket.SHUT_WR)
                    back.join(DEADLINE_S)

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        self._send(server, client.recv(ID_BYTES + CHUNK_HEADER.size + TAG_BYTES, socket.MSG_WAITALL))
        chunks = [client.recv(RECORD_BYTES, socket.MSG_WAITALL) for _ in range(2)]
        if not (mangled := self._mangle(*chunks)):
            self._send(server, chunks[0])
            return
        self._send(server, mangled)
        while data := client.recv(1 << 20):
            self._send(server, data)

    def _send(self, server: socket.socket, data: bytes) -> None:
        self.passed += data
        server.sendall(data)

    def _pass_back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                client.sendall(self._answers(data))
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def unchanged(*parts: bytes) -> bytes:
    return b"".join(parts)


class Link:
    """A caller `a` and a callee `b` under a key, with somebody in between who sees what goes beside ZeroMQ."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder, "tcp", "", KEY)
        self.order: list[Any] = []
        self.proxies: list[Proxy] = []
        self.a, _ = self.world.endpoint("a")
        self.b, self.inbox = self.world.endpoint("b", {"digest": self._digest, "note": self.order.append})

    @property
    def port(self) -> int:
        return split_address(bulk_of(self.inbox), ("bulk",)).port or 0

    def join(self, mangle: Mangle = unchanged, answers: Callable[[bytes], bytes] = unchanged) -> Proxy:
        proxy = Proxy(("127.0.0.1", self.port), mangle, answers)
        self.proxies.append(proxy)
        self.lead_to(proxy.address)
        return proxy

    def lead_to(self, address: str) -> None:
        routes = [each for each in self.inbox.routes if not each.startswith(BULK)]
        inbox = msgspec.structs.replace(self.inbox, routes=[*routes, f"{BULK}{address}"])
        self.a.update_directory([entry("b", inbox)])

    def send(self, data: bytes = DATA) -> None:
        """Call with a large argument, which has to come as it was sent."""
        assert call(self.a, "digest", data) == hashlib.sha256(data).hexdigest()

    @property
    def num_refused(self) -> int:
        return self.b._gatekeeper.num_refused

    def _digest(self, data: bytes) -> str:
        self.order.append(len(data))
        return hashlib.sha256(data).hexdigest()

    def close(self) -> None:
        self.world.close()
        for proxy in self.proxies:
            proxy.close()


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    with contextlib.closing(Link(tmp_path)) as link:
        yield link
    eventually(lambda: not bulk_threads(), DEADLINE_S, message="a thread is left")


def bulk_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bus-bulk")]


def bulk_of(inbox: Inbox) -> str:
    (route,) = [each for each in inbox.routes if each.startswith(BULK)]
    return route


def connection_of(bus: BusEndpoint) -> bulk_sender.BulkSender:
    (connection,) = bus._connections._connections.values()
    sender: bulk_sender.BulkSender = connection._bulk  # type: ignore[union-attr]
    return sender


def test_it_goes_beside_zeromq_and_nothing_of_it_can_be_read(link: Link) -> None:
    proxy = link.join()
    link.send()
    link.send(DATA[::-1])
    assert proxy.num_connections == 1
    assert len(proxy.passed) > 2 * len(DATA)
    assert MARK not in proxy.passed
    assert MARK[::-1] not in proxy.passed
    assert link.num_refused == 0


def flip(first: bytes, second: bytes) -> bytes:
    middle = RECORD_BYTES // 2
    return first + second[:middle] + bytes([second[middle] ^ 0x10]) + second[middle + 1 :]


@pytest.mark.parametrize(
    "mangle",
    [
        flip,
        lambda first, second: first,
        lambda first, second: first + second[1:],
        lambda first, second: first + first,
        lambda first, second: first + first + second,
        lambda first, second: second + first,
        lambda first, second: bytes(2 * RECORD_BYTES),
    ],
    ids=["flipped", "dropped", "a byte dropped", "replaced", "replayed", "reordered", "overwritten"],
)
def test_who_changes_something_on_the_way_is_refused(
    link: Link, caplog: pytest.LogCaptureFixture, mangle: Mangle
) -> None:
    link.join(mangle)
    with caplog.at_level(logging.WARNING):
        link.send()
        eventually(lambda: link.num_refused == 1, DEADLINE_S, message="it was not counted")
        eventually(lambda: "event=key-refused" in caplog.text, DEADLINE_S, message="it was not logged")
    (refused,) = [each.getMessage() for each in caplog.records if "event=key-refused" in each.getMessage()]
    assert "peer=127.0.0.1 reason='a record" in refused
    assert "event=bulk-lost address=" in caplog.text
    link.send(DATA[1:])  # still by CURVE, and not in the open
    assert link.num_refused == 1


def test_a_connection_that_is_cut_loses_nothing(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    link.join(lambda first, second: b"")
    with caplog.at_level(logging.WARNING):
        link.send()
    assert "event=bulk-lost address=" in caplog.text


def test_a_forged_answer_is_not_believed(link: Link) -> None:
    proxy = link.join(answers=lambda data: bytes(len(data)))
    link.send()
    assert connection_of(link.a)._not_before > time.monotonic()
    assert proxy.num_connections == 1


def test_a_port_that_does_not_answer_is_done_without(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    link.lead_to(f"127.0.0.1:{port}")
    with caplog.at_level(logging.WARNING):
        link.send()
        link.send()
    assert caplog.text.count("event=bulk-lost") == 1


def test_a_recorded_connection_cannot_be_played_again(
    link: Link, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = link.join()
    link.send()
    monkeypatch.setattr(bulk_receiver, "HANDSHAKE_S", 0.1)  # of the next connection
    with caplog.at_level(logging.WARNING), socket.create_connection(("127.0.0.1", link.port)) as replayed:
        with contextlib.suppress(OSError):
            replayed.sendall(proxy.passed)
        eventually(lambda: "that no member announced" in caplog.text, DEADLINE_S, message="it was not logged")
    assert link.order == [len(DATA)]


@pytest.mark.parametrize("says", [b"", b"GET / HTTP", bytes(ID_BYTES), bytes(1000)])
def test_a_stranger_is_refused(
    link: Link, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    link.join()
    link.send()
    monkeypatch.setattr(bulk_receiver, "HANDSHAKE_S", 0.1)  # of the next connection
    with caplog.at_level(logging.WARNING), socket.create_connection(("127.0.0.1", link.port)) as stranger:
        stranger.sendall(says)
        eventually(lambda: link.num_refused == 1, DEADLINE_S, message="it was not counted")
        stranger.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "it was told something"
        eventually(lambda: "event=key-refused" in caplog.text, DEADLINE_S, message="it was not logged")
    link.send()


def test_many_strangers_keep_no_member_out(link: Link) -> None:
    link.join()
    link.send()
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_PENDING + 20):
            stack.enter_context(socket.create_connection(("127.0.0.1", link.port)))
        eventually(lambda: link.num_refused >= 20, DEADLINE_S, message="the oldest were not ended")
        assert len(link.b._dispatcher.bulk._open) <= MAX_PENDING + 1
        connection_of(link.a)._disconnect()
        link.send()
        assert connection_of(link.a)._socket is not None, "a member had to do without"


def test_what_follows_a_large_call_waits_for_it(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    server, arrived = link.b._server, list[int]()
    accept = server.accept

    def note(call: InboundCall) -> None:
        arrived.append(call.call_id)
        accept(call)

    monkeypatch.setattr(server, "accept", note)
    link.join()
    calls = []
    for number in range(3):
        calls.append(link.a.call("b", "digest", [DATA[number:]], {}))
        calls.extend(link.a.call("b", "note", [each], {}) for each in range(3))
    for each in calls:
        each.result(DEADLINE_S)
    assert arrived == sorted(arrived)
    assert len(arrived) == len(calls)


def test_an_idle_connection_is_closed_and_the_next_has_other_keys(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_sender, "IDLE_S", 0.05)
    proxy = link.join()
    link.send()
    eventually(lambda: "bus-bulk-send" not in bulk_threads(), DEADLINE_S, message="its thread stays")
    first, proxy.passed = proxy.passed, bytearray()
    link.send()
    eventually(lambda: proxy.num_connections == 2, DEADLINE_S)
    assert first[:ID_BYTES] != proxy.passed[:ID_BYTES]
    assert first[-RECORD_BYTES:] != proxy.passed[-RECORD_BYTES:], "the same bytes, sealed with the same key"


def test_memory_of_what_was_received_comes_back(link: Link) -> None:
    link.join()
    for _ in range(3):
        link.send()
    pieces = link.b._dispatcher.pieces
    eventually(lambda: gc.collect() + 1 and not pieces._used, DEADLINE_S, message="something refers to it")
    assert len(pieces._idle) <= 2, "it was not used again"


def test_the_connections_of_the_dead_are_closed(link: Link) -> None:
    link.join()
    link.send()
    connected = connection_of(link.a)._socket
    assert connected is not None
    link.b.peer_gone(link.a.inbox_id)
    connected.settimeout(DEADLINE_S)
    assert connected.recv(1) == b""


def test_without_a_key_there_is_no_such_port(tmp_path: Path) -> None:
    with contextlib.closing(World(tmp_path, "tcp", "")) as world:
        _, inbox = world.endpoint("b", {})
        assert [each.partition(":")[0] for each in inbox.routes] == ["tcp"]

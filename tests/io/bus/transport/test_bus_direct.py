"""Connections between hosts that do not come about, or break: calls take the relay, or end, and none hangs."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.bus import DEADLINE_S, Proxy, World, entry
from unified.bus.endpoint import BusEndpoint
from unified.bus.transport.failover import CONNECT_WITHIN_S, GIVE_UP_AFTER_S
from unified.bus.transport.zmq_connection import ZmqConnection
from unified.errors import RouteLostError
from unified.protocol.records import Inbox
from unified.testing import eventually
from unified_master.relay import BusRelay

MUCH_LATER_S = 1000.0


class Hosts:
    """`a` and `b`, of which each reaches the other through a proxy. What is not open cannot be connected to."""

    def __init__(self, run_dir: Path, relay: str) -> None:
        self.world = World(run_dir, "tcp", relay)
        self.notes: list[object] = []
        self.release = threading.Event()
        self.a, inbox_a = self.world.endpoint("a", {})
        self.b, inbox_b = self.world.endpoint(
            "b",
            {
                "ping": lambda: "pong",
                "note": self.notes.append,
                "wait": lambda: self.release.wait(DEADLINE_S),
                "count": self.count,
            },
        )
        self.to_a, self.to_b = Proxy(inbox_a.routes[0]), Proxy(inbox_b.routes[0])
        self.inbox_a, inbox_b = _through(self.to_a, inbox_a), _through(self.to_b, inbox_b)
        self.a._connections.inbox = self.inbox_a  # what it says in its HELLO
        self.a.update_directory([entry("b", inbox_b)])

    def count(self) -> Iterator[int]:
        for number in range(3):
            yield number
            assert self.release.wait(DEADLINE_S)

    def open(self) -> None:
        self.to_a.open()
        self.to_b.open()

    def ping(self) -> object:
        return self.a.call("b", "ping", (), {}).result(DEADLINE_S)

    def way(self, of: BusEndpoint, to: BusEndpoint) -> ZmqConnection:
        way = of._connections._connections[to.inbox_id]
        assert isinstance(way, ZmqConnection)
        return way

    def close(self) -> None:
        self.release.set()
        self.world.close()
        self.to_a.close()
        self.to_b.close()


@pytest.fixture
def hub() -> Iterator[BusRelay]:
    hub = BusRelay("tcp://127.0.0.1:0")
    yield hub
    hub.close()


@pytest.fixture
def hosts(tmp_path: Path, hub: BusRelay) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path, hub.start())
    yield hosts
    hosts.close()


def _through(proxy: Proxy, inbox: Inbox) -> Inbox:
    return msgspec.structs.replace(inbox, routes=[proxy.route])


def _later(endpoint: BusEndpoint, seconds: float = MUCH_LATER_S) -> None:
    endpoint._connections.look(time.monotonic() + seconds)


@pytest.mark.parametrize("answers", ["nobody", "nobody who speaks as we do"])
def test_calls_to_a_closed_port_go_through_the_relay(
    hosts: Hosts, caplog: pytest.LogCaptureFixture, answers: str
) -> None:
    if answers != "nobody":
        hosts.to_b.swallows = True
        hosts.to_b.open()
    hosts.to_a.open()
    large = b"x" * 1_000_000
    futures = [hosts.a.call("b", "note", (each,), {}) for each in (*range(50), large)]
    with caplog.at_level(logging.WARNING):
        _later(hosts.a, CONNECT_WITHIN_S)
        for future in futures:
            future.result(DEADLINE_S)
        assert hosts.notes == [*range(50), large]
        assert hosts.ping() == "pong"
        _later(hosts.a)
    assert caplog.text.count("event=tcp-blocked") == 1


def test_nobody_has_to_look_after_it(hosts: Hosts) -> None:
    """As above, with nothing but the time that passes."""
    assert hosts.ping() == "pong"


def test_an_answer_that_cannot_go_directly_goes_through_the_relay(hosts: Hosts) -> None:
    hosts.to_b.open()
    future = hosts.a.call("b", "ping", (), {})
    eventually(lambda: hosts.a.inbox_id in hosts.b._connections._connections)
    assert not future.done()
    _later(hosts.b, CONNECT_WITHIN_S)
    assert future.result(DEADLINE_S) == "pong"


def test_both_go_back_to_the_direct_way_when_there_is_one(hosts: Hosts, hub: BusRelay) -> None:
    hosts.b.update_directory([entry("a", hosts.inbox_a)])
    future = hosts.a.call("b", "ping", (), {})
    _later(hosts.a, CONNECT_WITHIN_S)
    assert future.result(DEADLINE_S) == "pong"
    assert hosts.way(hosts.b, hosts.a).state == "relayed", "who comes through the relay is answered there at once"
    hosts.open()
    for one, other in ((hosts.a, hosts.b), (hosts.b, hosts.a)):
        way = hosts.way(one, other)
        eventually(lambda one=one, way=way: _later(one) or way.state == "up")  # type: ignore[misc,func-returns-value]
    before = hub.num_forwarded
    assert hosts.ping() == "pong"
    assert hub.num_forwarded == before


def test_without_a_relay_a_call_to_a_closed_port_ends(tmp_path: Path) -> None:
    with contextlib.closing(Hosts(tmp_path, "")) as hosts:
        future = hosts.a.call("b", "ping", (), {})
        _later(hosts.a, CONNECT_WITHIN_S)
        assert hosts.way(hosts.a, hosts.b).state == "connecting"
        _later(hosts.a, GIVE_UP_AFTER_S)
        with pytest.raises(
            RouteLostError, match=r"no connection to tcp://.* came about in 15 s, and there is no relay"
        ):
            future.result(DEADLINE_S)
        hosts.open()
        assert hosts.ping() == "pong"


def test_without_a_relay_a_caller_is_told_of_its_lost_answer_once_it_can_be_reached(tmp_path: Path) -> None:
    with contextlib.closing(Hosts(tmp_path, "")) as hosts:
        hosts.to_b.open()
        future = hosts.a.call("b", "ping", (), {})
        eventually(lambda: hosts.a.inbox_id in hosts.b._connections._connections)
        _later(hosts.b)
        assert hosts.a.inbox_id not in hosts.b._connections._connections
        hosts.to_a.open()
        _later(hosts.b)
        with pytest.raises(RouteLostError, match="the answer to 'ping' may have been lost"):
            future.result(DEADLINE_S)


def test_a_connection_that_breaks_ends_the_calls_that_were_sent_on_it(hosts: Hosts) -> None:
    hosts.open()
    future = hosts.a.call("b", "wait", (), {})
    eventually(lambda: any(call.method == "wait" for call in hosts.b._server._known.values()))
    hosts.to_b.reset()
    with pytest.raises(RouteLostError, match=r"lost while 'wait' was open \(the connection to tcp://.* broke\)"):
        future.result(DEADLINE_S)
    assert hosts.ping() == "pong"  # on a new one


def test_a_call_that_was_lost_on_its_way_ends(hosts: Hosts) -> None:
    hosts.open()
    assert hosts.ping() == "pong"
    hosts.to_b.swallows = True
    future = hosts.a.call("b", "note", (1,), {})
    eventually(lambda: hosts.to_b.num_swallowed)
    hosts.to_b.reset()
    hosts.to_b.swallows = False
    with pytest.raises(RouteLostError):
        future.result(DEADLINE_S)
    assert hosts.notes == []


@pytest.mark.parametrize("method", ["ping", "count"])
def test_an_answer_that_was_lost_on_its_way_ends_its_call(hosts: Hosts, method: str) -> None:
    hosts.open()
    assert hosts.ping() == "pong"
    hosts.to_a.swallows = True
    future = hosts.a.call("b", method, (), {})
    way = hosts.way(hosts.b, hosts.a)
    known = hosts.b._server._known
    if method == "ping":
        eventually(lambda: len(hosts.b._server._recent_replies) == 2)
    else:
        eventually(lambda: any(call.stream is not None for call in known.values()))
    assert not future.done()
    hosts.to_a.reset()
    hosts.to_a.swallows = False
    eventually(lambda: way.state == "broken")
    _later(hosts.b)
    with pytest.raises(RouteLostError, match=f"the answer to '{method}' may have been lost"):
        future.result(DEADLINE_S)
    hosts.release.set()
    assert hosts.ping() == "pong"

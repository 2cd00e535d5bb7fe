"""Two hosts with a firewall between them that says nothing: a network namespace whose routing drops what comes in."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bus import DEADLINE_S, HOST_ID, Process, World, entry
from unified.bus.endpoint import BusEndpoint
from unified.bus.transport.failover import CONNECT_WITHIN_S
from unified.errors import RouteLostError
from unified.testing import eventually
from unified_master.relay import BusRelay

pytestmark = pytest.mark.netns


class TwoHosts:
    """The relay and `a` on this one, `b` on the other."""

    def __init__(self, run_dir: Path) -> None:
        self.name = f"ut{os.getpid()}"
        first = 4 * (os.getpid() >> 8 & 63)  # each process that tests has addresses of its own
        self.near, self.far = (f"10.78.{os.getpid() & 255}.{first + host}" for host in (1, 2))
        self._run_dir = run_dir
        self._link = f"v{self.name}"
        self._ip("netns", "add", self.name)
        self._ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        self._ip("address", "add", f"{self.near}/30", "dev", self._link)
        self._ip("link", "set", self._link, "up")
        self._far("address", "add", f"{self.far}/30", "dev", "eth0")
        for each in ("eth0", "lo"):
            self._far("link", "set", each, "up")
        self._far("rule", "add", "pref", "100", "lookup", "local")  # what is local is asked for last
        self._far("rule", "delete", "pref", "0")
        self.relay = BusRelay(f"tcp://{self.near}:0")
        self.address = self.relay.start()
        self.world = World(run_dir, "tcp", self.address)

    def open(self) -> BusEndpoint:
        """Start both workers; `a` knows `b`."""
        self.world.processes.append(
            process := Process(
                *("b", "0", str(self._run_dir), "tcp", self.address, HOST_ID, self.far),
                prefix=["nsenter", f"--net=/run/netns/{self.name}"],
            )
        )
        a, _ = self.world.endpoint("a", {}, address=self.near)
        a.update_directory([entry("b", process.inbox)])
        self.port_of_b = process.inbox.routes[0].rpartition(":")[2]
        return a

    def wall(self, *, lets_calls_in: bool = False) -> None:
        """From now on nothing reaches `b` but what comes from the relay, and, if told so, from who connects to it."""
        self._far("rule", "add", "pref", "30", *_tcp("sport", self.address.rpartition(":")[2]), "lookup", "local")
        if lets_calls_in:
            self._far("rule", "add", "pref", "31", *_tcp("dport", self.port_of_b), "lookup", "local")
        self._far("rule", "add", "pref", "40", "iif", "eth0", "blackhole")

    def close(self) -> None:
        self.world.close()
        self.relay.close()
        self._ip("link", "delete", self._link)
        self._ip("netns", "delete", self.name)

    def _far(self, *words: str) -> None:
        self._ip("-n", self.name, *words)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)


def _tcp(end: str, port: str) -> list[str]:
    return ["iif", "eth0", "ipproto", "tcp", end, port]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    hosts = TwoHosts(tmp_path)
    yield hosts
    hosts.close()


def test_calls_and_answers_take_the_relay(hosts: TwoHosts) -> None:
    a = hosts.open()
    hosts.wall()
    future = a.call("b", "echo", ([1, 2],), {})
    a._connections.look(time.monotonic() + CONNECT_WITHIN_S)
    assert future.result(DEADLINE_S) == [1, 2]
    assert a.call("b", "make", (1_000_000,), {}).result(DEADLINE_S).nbytes == 1_000_000
    eventually(lambda: hosts.relay.num_forwarded == 4)  # it counts when the message is on its way already


@pytest.mark.slow
def test_answers_take_the_relay_where_only_calls_go_directly(hosts: TwoHosts) -> None:
    a = hosts.open()
    hosts.wall(lets_calls_in=True)
    assert a.call("b", "echo", (1,), {}).result(DEADLINE_S) == 1
    eventually(lambda: hosts.relay.num_forwarded == 1)


@pytest.mark.slow
def test_a_call_ends_when_the_wall_goes_up_while_it_is_open(hosts: TwoHosts) -> None:
    """The connection does not break, it is silent: ZeroMQ's heartbeats tell of that after 15 to 20 s."""
    a = hosts.open()
    assert a.call("b", "echo", (1,), {}).result(DEADLINE_S) == 1
    future = a.call("b", "forever", (), {})
    hosts.wall()
    with pytest.raises(RouteLostError, match=f"the connection to tcp://{hosts.far}:.* broke"):
        future.result(2 * DEADLINE_S)
    assert a.call("b", "echo", (2,), {}).result(DEADLINE_S) == 2
    assert hosts.relay.num_forwarded > 0

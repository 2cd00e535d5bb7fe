"""A peer without the key at the tcp ports: neither memory nor descriptors without end, and members are served."""

import contextlib
import logging
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.support.bus import HOST_ID, Hub, call, entry
from unified.bus.calls.registry import MethodRegistry
from unified.bus.endpoint import BusEndpoint
from unified.bus.identity import BusIdentity, BusNetwork
from unified.security.bounds import MAX_PENDING
from unified.security.curve import new_key
from unified.security.frames import PIECE_BYTES
from unified.security.keys import ClusterKey
from unified.testing import eventually

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests/support/programs/stranger.py"
KEY = new_key()
GROWTH_BYTES = 32 << 20
ENDLESS = 8 << 30
AMOUNT = 512 << 20
WITHIN_S = 100.0


class Stranger:
    """The program of that name at work."""

    def __init__(self, address: str, key: ClusterKey | None, connections: int, claimed: int, sent: int) -> None:
        mechanism = "NULL" if key is None else "CURVE"
        numbers = map(str, (connections, claimed, sent))
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM, address, mechanism, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.is_done = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def num_left(self) -> int:
        """Return the number of connections that the server has not ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() == "done\n":
            self.is_done.set()


class Server:
    """A worker in this process, and the relay if that leads to it."""

    def __init__(self, folder: Path, route: str, key: ClusterKey | None) -> None:
        self._folder, self._route, self._key = str(folder), route, key
        self._stack = contextlib.ExitStack()
        self._hub = self._stack.enter_context(contextlib.closing(Hub(key=key))) if route == "relay" else None
        service = self._endpoint("service")
        self._stack.callback(service.close)
        self._inbox = service.start()
        service.open()
        self.address = self._hub.address if self._hub is not None else self._inbox.routes[0]
        self.close = self._stack.close

    def serves(self) -> bool:
        """Have a worker call that has no connection yet."""
        with contextlib.closing(self._endpoint("caller")) as caller:
            caller.start()
            caller.update_directory([entry("service", self._inbox)])
            return bool(call(caller, "ping", target="service") == "pong")

    def _endpoint(self, worker: str) -> BusEndpoint:
        return BusEndpoint(
            BusIdentity(job="job-1", worker=worker, incarnation=0, node="n1", host=HOST_ID),
            BusNetwork(
                run_dir=self._folder,
                address="127.0.0.1",
                relay=self._hub.address if self._hub is not None else "",
                route=self._route,
                key=self._key,
            ),
            registry=MethodRegistry({"ping": lambda: "pong"}),
        )


@pytest.fixture(params=["relay", "tcp"])
def route(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def memory_during(stranger: Stranger) -> int:
    """Return the bytes by which this process grows at most until the stranger has sent all, or given up."""
    me = psutil.Process()
    before = most = me.memory_info().rss
    while not stranger.is_done.wait(0.01):
        most = max(most, me.memory_info().rss)
    return most - before


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
def test_a_frame_of_8_gib_is_refused_before_it_costs_memory(tmp_path: Path, route: str, key: ClusterKey | None) -> None:
    with contextlib.closing(Server(tmp_path, route, key)) as server:
        assert server.serves()  # what a first call loads is there
        with contextlib.closing(Stranger(server.address, key, 1, ENDLESS, AMOUNT)) as stranger:
            grown = memory_during(stranger)
            assert server.serves()
            eventually(lambda: stranger.num_left() == 0, timeout=WITHIN_S)
    assert grown < GROWTH_BYTES, f"it grew by {grown >> 20} MiB"


def test_many_frames_that_are_as_long_as_allowed_are_cut_short(tmp_path: Path, route: str) -> None:
    num_connections = 2 * MAX_PENDING
    with contextlib.closing(Server(tmp_path, route, KEY)) as server:
        assert server.serves()
        with contextlib.closing(
            Stranger(server.address, KEY, num_connections, PIECE_BYTES, PIECE_BYTES - 1)
        ) as stranger:
            grown = memory_during(stranger)
            assert server.serves()
            eventually(lambda: stranger.num_left() == 0, timeout=WITHIN_S)
    assert grown < num_connections * PIECE_BYTES / 4, f"it grew by {grown >> 20} MiB"


def test_silent_connections_are_limited_logged_and_hold_up_nobody(
    tmp_path: Path, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "unified.security.curve"),
        contextlib.closing(Server(tmp_path, route, KEY)) as server,
    ):
        with contextlib.closing(Stranger(server.address, KEY, 4 * MAX_PENDING, 0, 0)) as stranger:
            assert server.serves()
            eventually(stranger.is_done.is_set, timeout=WITHIN_S)
            assert server.serves()
            eventually(lambda: stranger.num_left() <= MAX_PENDING, timeout=WITHIN_S)
        assert "connections had an unfinished handshake" in caplog.text

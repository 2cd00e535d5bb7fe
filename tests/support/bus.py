"""Workers on a bus: some in this process, some in processes of their own, and what lies between two hosts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.deadlines import met
from unified.bus.calls.registry import MethodRegistry
from unified.bus.endpoint import BusEndpoint
from unified.bus.identity import BusIdentity, BusNetwork
from unified.protocol.records import DirectoryEntry, Inbox, Reachability
from unified.security.curve import secure_client
from unified.security.keys import ClusterKey
from unified.testing import eventually
from unified_master.relay import BusRelay

DEADLINE_S = met(100.0)
HOST_ID = "host"
PEER = str(Path(__file__).parent / "programs/bus_peer.py")


def entry(
    worker: str, inbox: Inbox | None, incarnation: int = 0, state: Reachability = Reachability.ALIVE, reason: str = ""
) -> DirectoryEntry:
    return DirectoryEntry(worker=worker, incarnation=incarnation, state=state, inbox=inbox, node="n1", reason=reason)


def call(bus: BusEndpoint, method: str, *args: Any, target: str = "b", **kwargs: Any) -> Any:
    return bus.call(target, method, args, kwargs).result(DEADLINE_S)


def pass_deadlines(bus: BusEndpoint) -> None:
    """Have the deadlines of all open calls pass now, so that a test can await what has to be before them."""
    client = bus._client
    with client.lock:
        for call in client.table._open.values():
            if call.timeout_s is not None:
                client.table._timers.arm(("deadline", call.call_id), time.monotonic())
        client._mind_deadlines()


class Process:
    """A worker in a process of its own; `prefix` is a command that runs others."""

    def __init__(self, *arguments: str, prefix: Sequence[str] = (), program: Sequence[str] = (PEER,)) -> None:
        command = [*prefix, sys.executable, *program, *arguments]
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        assert self.popen.stdout is not None
        self.inbox = msgspec.json.decode(self.popen.stdout.readline(), type=Inbox)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.popen.pid, number)
        if number == signal.SIGKILL:
            self.popen.wait()
        elif number == signal.SIGSTOP:
            eventually(lambda: states(self.popen.pid) == {"T"}, DEADLINE_S)  # a thread on another core runs on a little

    def close(self) -> None:
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                stream.close()
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.wait(DEADLINE_S)


def states(pid: int) -> set[str]:
    found = Path(f"/proc/{pid}/task").glob("*/stat")
    return {file.read_text().rpartition(")")[2].split()[0] for file in found}


class World:
    """Makes endpoints that all take one route, and tells each of the others."""

    def __init__(self, run_dir: Path, route: str, relay: str, key: ClusterKey | None = None) -> None:
        self.run_dir = run_dir
        self.key = key
        self.route = route
        self.relay = relay
        self.endpoints: list[BusEndpoint] = []
        self.processes: list[Process] = []

    def endpoint(
        self,
        worker: str,
        methods: dict[str, Callable[..., Any]] | None = None,
        incarnation: int = 0,
        address: str = "127.0.0.1",
        **options: Any,
    ) -> tuple[BusEndpoint, Inbox]:
        endpoint = BusEndpoint(
            BusIdentity(job="job-1", worker=worker, incarnation=incarnation, node="n1", host=HOST_ID),
            BusNetwork(run_dir=str(self.run_dir), address=address, relay=self.relay, route=self.route, key=self.key),
            registry=MethodRegistry(methods or {}),
            **options,
        )
        self.endpoints.append(endpoint)
        inbox = endpoint.start()
        if methods is not None:
            endpoint.open()
        return endpoint, inbox

    def pair(self, methods: dict[str, Callable[..., Any]], **options: Any) -> tuple[BusEndpoint, BusEndpoint]:
        """`a`, which knows `b`, and `b`, which has the methods."""
        a, _ = self.endpoint("a", **options)
        b, inbox = self.endpoint("b", methods)
        self._await_relay()
        a.update_directory([entry("b", inbox)])
        return a, b

    def _await_relay(self) -> None:
        """Wait until the relay knows all: calls on their way while it learns of a callee may overtake the first ones,
        which it gives back."""
        if self.route == "relay":
            eventually(lambda: all(each._connections._is_known_to_relay for each in self.endpoints), DEADLINE_S)

    def cast(self, methods: Mapping[str, dict[str, Callable[..., Any]]]) -> dict[str, BusEndpoint]:
        """Workers that all know one another, with these methods."""
        made = {name: self.endpoint(name, each) for name, each in methods.items()}
        self._await_relay()
        for endpoint, _ in made.values():
            endpoint.update_directory([entry(name, inbox) for name, (_, inbox) in made.items()])
        return {name: endpoint for name, (endpoint, _) in made.items()}

    def pair_with_process(self) -> tuple[BusEndpoint, Process]:
        """`a`, which knows `b`, and `b`, a process of its own."""
        a, _ = self.endpoint("a")
        b = self.process("b")
        a.update_directory([entry("b", b.inbox)])
        return a, b

    def process(self, worker: str, incarnation: int = 0) -> Process:
        process = Process(worker, str(incarnation), str(self.run_dir), self.route, self.relay, HOST_ID)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.close()
            if process.popen.returncode == -signal.SIGKILL:  # it removes no socket itself; its agent sweeps
                for path in self.run_dir.glob(f"*{process.inbox.inbox_id}*"):
                    path.unlink()
        for endpoint in self.endpoints:
            endpoint.close()


@pytest.fixture(params=["auto", "tcp", "relay"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, relay: str) -> Iterator[World]:
    """Everything on the bus works the same on every route."""
    run_dir: Path = tmp_path_factory.mktemp("b")
    before = set(threading.enumerate())
    world = World(run_dir, request.param, relay)
    yield world
    world.close()
    assert not list(run_dir.iterdir()), "an inbox left its socket behind"
    assert eventually(lambda: not _new_since(before), message="a thread of the bus is left")


def _new_since(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("bus-")]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


class Proxy:
    """Refuses connections until `open`; then passes them on to `target`, a tcp port of this host.

    Attributes:
        route: the address of this proxy, as an inbox has it.
        swallows: what comes from either side is lost.
        num_swallowed: bytes.
    """

    def __init__(self, target: str) -> None:
        self._target = int(target.rpartition(":")[2])
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))  # so nobody else gets the port, and nobody can connect
        self.route = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.swallows = False
        self.num_swallowed = 0
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def open(self) -> Proxy:
        self._listener.listen()
        self._thread.start()
        return self

    def reset(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, {}
            for each in pairs:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.close()

    def close(self) -> None:
        self._is_closing = True
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        self.reset()

    def _run(self) -> None:
        while not self._is_closing:
            with self._lock:
                sources = [self._listener, *self._pairs]
            with contextlib.suppress(OSError, ValueError):  # reset meanwhile
                for source in select.select(sources, [], [], 0.02)[0]:
                    if source is self._listener:
                        self._accept()
                    else:
                        self._carry(source)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        with self._lock:
            self._pairs |= {near: far, far: near}

    def _carry(self, source: socket.socket) -> None:
        with self._lock:
            sink = self._pairs.get(source)
            if sink is None:
                return
            data = source.recv(1 << 16)
            if not data:
                for each in (source, sink):
                    del self._pairs[each]
                    each.close()
            elif self.swallows:
                self.num_swallowed += len(data)
            else:
                sink.sendall(data)


class Hub:
    def __init__(self, limit_bytes: int = 256 << 20, key: ClusterKey | None = None) -> None:
        self.relay = BusRelay("tcp://127.0.0.1:0", limit_bytes=limit_bytes, key=key)
        self.address = self.relay.start()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def socket(self, identity: str, key: ClusterKey | None = None, **options: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        self.sockets.append(socket)
        for option, value in options.items():
            socket.set(getattr(zmq, option), value)
        socket.set(zmq.IDENTITY, identity.encode())
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        secure_client(socket, key)
        socket.connect(self.address)
        return socket

    def close(self) -> None:
        self.context.destroy(0)
        self.relay.close()

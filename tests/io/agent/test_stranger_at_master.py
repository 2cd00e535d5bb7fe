"""A registered agent at whose master's address another program listens: its workers end with the lease."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.agents import DEADLINE_S, AgentProcess, PlayedMaster, a_job, a_worker, eventually
from tests.support.deadlines import missed
from unified import process, testing
from unified.config.addresses import split_address
from unified.protocol.agent_master import master_to_agent
from unified.protocol.client_master import Refused
from unified.protocol.framing import PROTOCOL_VERSION
from unified.protocol.records import WorkerState

pytestmark = pytest.mark.processes

LEASE_S = 1.5


@contextlib.contextmanager
def other_version(address: str) -> Iterator[None]:
    """A master of the next protocol version, which refuses each message in its own words."""
    master, is_over = PlayedMaster(), threading.Event()
    master.hang_up()
    master.listen(address)

    def refuse() -> None:
        while not is_over.is_set():
            if master._socket.poll(20):
                peer, *_ = master._socket.recv_multipart()
                refused = Refused(code="version", reason="the peer speaks another version.")
                frames = master_to_agent.encode(refused, 1, version=PROTOCOL_VERSION + 1)
                master._socket.send_multipart([peer, *frames])

    thread = threading.Thread(target=refuse)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        master.hang_up()


@contextlib.contextmanager
def http(address: str) -> Iterator[None]:
    found = split_address(address)
    handler = type("Quiet", (BaseHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer((found.host, found.port or 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def listener(address: str) -> socket.socket:
    found = split_address(address)
    return socket.create_server((found.host, found.port), backlog=1000)


@contextlib.contextmanager
def closes(address: str) -> Iterator[None]:
    """A proxy whose master is not there."""
    with listener(address) as server:

        def close() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=close)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def hangs(address: str) -> Iterator[None]:
    """A master that is stopped by a signal: the kernel takes its connections."""
    with listener(address):
        yield


@pytest.fixture
def place(tmp_path: Path, agents: list[AgentProcess]) -> Iterator[tuple[PlayedMaster, AgentProcess, int]]:
    """The address of a master that has gone, an agent that it had registered, and the pid of a worker."""
    master = PlayedMaster()
    agents.append(AgentProcess(tmp_path, master.address))
    master.welcome(lease_s=LEASE_S)
    master.desire(a_worker(), jobs=[a_job("finish")])
    pid = master.reaches("w-0#0", WorkerState.FINISHED).pid
    master.hang_up()
    yield master, agents[-1], pid
    master.hang_up()


@pytest.mark.parametrize("stranger", [other_version, http, closes])
def test_its_workers_end_with_the_lease_and_it_registers_anew_with_a_master(
    place: tuple[PlayedMaster, AgentProcess, int],
    stranger: Callable[[str], contextlib.AbstractContextManager[None]],
) -> None:
    master, agent, pid = place
    with stranger(master.address):
        assert eventually(lambda: not process.is_alive(pid)), agent.stderr
        assert eventually(lambda: "event=lease-lost" in agent.stderr), agent.stderr
    master.listen()
    assert "its lease ends" in master.welcome(lease_s=DEADLINE_S).cut_off


def test_its_workers_stay_while_a_master_hangs(place: tuple[PlayedMaster, AgentProcess, int]) -> None:
    master, agent, pid = place
    with hangs(master.address), pytest.raises(AssertionError, match="waited"):
        testing.eventually(lambda: not process.is_alive(pid), timeout=missed(4 * LEASE_S))
    assert "lease-lost" not in agent.stderr

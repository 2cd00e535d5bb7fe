"""Probes over a real socket: what is answered, to whom not, and that a hung loop cannot say that it is well."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.support.deadlines import missed
from tests.support.master_process import StartMaster
from tests.support.ports import unused_port
from tests.support.probes import ask, get, get_or_none
from unified import probes
from unified.config.addresses import HostPort
from unified.errors import ClusterError, UsageError
from unified.probes import Probes, parse_bind
from unified.testing import eventually

LOOPBACK = HostPort("127.0.0.1", 0)


@pytest.fixture
def own() -> Iterator[Probes]:
    made = Probes(LOOPBACK, "not yet")
    made.start()
    yield made
    made.close()


def test_healthy_and_not_ready_then_ready(own: Probes) -> None:
    assert get(own.port, "/healthz") == (200, "ok")
    assert get(own.port, "/readyz") == (503, "not yet")
    own.unready = ""
    assert get(own.port, "/readyz?verbose=1") == (200, "ok")


def test_a_loop_that_does_not_turn_is_neither_healthy_nor_ready(own: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    own.unready = ""
    monkeypatch.setattr(probes, "STALE_AFTER_S", 0.0)
    for path in ("/healthz", "/readyz"):
        assert get(own.port, path) == (503, "the loop has not turned for 0 s")
    monkeypatch.setattr(probes, "STALE_AFTER_S", 600.0)
    own.turned()
    assert get(own.port, "/readyz") == (200, "ok")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /healthz HTTP/1.1\r\n\r\n", 405),
        (b"HEAD /readyz HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /healthz/../etc HTTP/1.1\r\n\r\n", 404),
        (b"GET /healthz\n\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),  # TLS
        (b"\xff\x00\x00 \xfe \xfd\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nX:".ljust(probes.MAX_REQUEST_BYTES, b"y"), 400),
    ],
)
def test_what_is_refused(own: Probes, request_: bytes, status: int) -> None:
    answer = ask(own.port, request_)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"Allow: GET" in answer) == (status == 405)


def test_slow_and_silent_clients_are_let_go_and_hold_nobody_up(own: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ANSWER_WITHIN_S", missed(0.2))
    with socket.create_connection(("127.0.0.1", own.port), 60) as silent:
        silent.sendall(b"GET /he")
        assert get(own.port, "/healthz") == (200, "ok")
        assert silent.recv(1) == b"", "its time is over"


def test_more_connections_than_there_may_be_end_the_oldest(own: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ANSWER_WITHIN_S", 600.0)
    before = len(os.listdir("/proc/self/fd"))
    held = [socket.create_connection(("127.0.0.1", own.port), 60) for _ in range(3 * probes.MAX_CONNECTIONS)]
    try:
        assert get(own.port, "/healthz") == (200, "ok")
        assert held[0].recv(1) == b""
        assert len(os.listdir("/proc/self/fd")) <= before + len(held) + probes.MAX_CONNECTIONS
    finally:
        for each in held:
            each.close()


def test_floods_of_garbage_leave_nothing_behind(own: Probes) -> None:
    def flood(number: int) -> None:
        for _ in range(50):
            ask(own.port, os.urandom(64) + b"\r\n\r\n" if number % 2 else b"GET /healthz HTTP/1.0\r\n\r\n")

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert get(own.port, "/healthz") == (200, "ok")


def test_closing_ends_the_thread_and_frees_the_port() -> None:
    made = Probes(LOOPBACK, "")
    made.start()
    port = made.port
    made.close()
    with pytest.raises(OSError, match="refused"):
        ask(port, b"")
    Probes(HostPort("127.0.0.1", port), "").close()
    without = Probes(None, "")
    without.start()
    assert (without.port, without.longest_wait_s) == (0, 60.0)
    without.close()


def test_addresses() -> None:
    assert parse_bind(None) is None
    assert parse_bind("0.0.0.0:8081") == ("0.0.0.0", 8081)
    assert parse_bind("*:8081") == ("0.0.0.0", 8081)
    assert parse_bind("[::1]:0") == ("[::1]", 0)
    for text in ("8081", "host", "tcp://host:1", "host:99999", "a b:1", ""):
        with pytest.raises(UsageError, match=r"--health-bind .* is no address: write HOST:PORT"):
            parse_bind(text)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"cannot listen on 127.0.0.1:{port} for --health-bind: Address already"):
            Probes(HostPort("127.0.0.1", port), "")


def test_a_master_is_ready_once_it_takes_requests_and_ill_once_its_loop_hangs(start_master: StartMaster) -> None:
    port = unused_port()
    master = start_master("--health-bind", f"127.0.0.1:{port}", "--advertise", "localhost")
    assert master.address.startswith("tcp://localhost:")
    assert "relay=tcp://localhost:" in master.log.read_text()
    assert eventually(lambda: get_or_none(port, "/readyz") == (200, "ok"), timeout=100)
    assert get(port, "/healthz") == (200, "ok")
    master.process.send_signal(signal.SIGTERM)
    assert master.process.wait(100) == 0


@pytest.mark.parametrize("text", ["host:7077", "tcp://host", "*", "a b"])
def test_an_advertised_host_that_is_none_is_refused(start_master: StartMaster, text: str) -> None:
    master = start_master("--advertise", text)
    assert master.process.wait(100) == 2
    assert f"--advertise {text!r} is no host: write a name or an address, without a port" in master.log.read_text()


HUNG = """
import sys, time
from unified import probes
from unified.config.addresses import HostPort
probes.STALE_AFTER_S = 0.5
own = probes.Probes(HostPort("127.0.0.1", int(sys.argv[1])), "")
own.start()
for _ in range(5):
    own.turned()
    time.sleep(0.1)
print("hangs", flush=True)
time.sleep(600)
"""


def test_a_process_whose_loop_hangs_says_so_by_itself() -> None:
    port = unused_port()
    with subprocess.Popen([sys.executable, "-c", HUNG, str(port)], stdout=subprocess.PIPE, text=True) as hung:
        assert hung.stdout is not None
        assert hung.stdout.readline() == "hangs\n"
        assert eventually(lambda: get(port, "/healthz")[0] == 503, timeout=100)
        hung.kill()

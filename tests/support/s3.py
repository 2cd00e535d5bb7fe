"""An S3 store for tests: moto's HTTP server in a process of its own, with a relay before it that can break things, and
writers of one object that meet.
"""

import contextlib
import http.client
import itertools
import os
import re
import select
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from unified.errors import AlreadyExistsError
from unified.storage import StorageBackend

START_S = 50.0
"""moto imports a great deal."""
ACCESS_KEY = "AKIATESTTESTTESTTEST"
SECRET_KEY = "test-secret-which-no-log-may-hold"
SESSION_TOKEN = "test-session-token-which-no-log-may-hold"
_NUMBERS = itertools.count(1)
_CONDITIONS = {"if-none-match", "if-match"}


class S3Server(NamedTuple):
    url: str

    def make_bucket(self) -> str:
        name = f"bucket-{os.getpid()}-{next(_NUMBERS)}"
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"), timeout=100) as answer:
            assert answer.status == 200
        return name


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A store on a free port of the loopback device, for all tests that ask for it. Skips where moto is missing."""
    pytest.importorskip("moto", reason="the S3 store of the tests: pip install 'moto[server]'")
    pytest.importorskip("flask", reason="the S3 store of the tests: pip install 'moto[server]'")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=clean,
    ) as process:
        assert process.stdout is not None
        drain = None
        try:
            url = _address(process)
            # A full pipe would stop the server.
            drain = threading.Thread(target=process.stdout.read, name="moto-output")
            drain.start()
            yield S3Server(url)
        finally:
            process.kill()
            if drain is not None:
                drain.join()


def use_store(server: S3Server, monkeypatch: pytest.MonkeyPatch, folder: object) -> None:
    """Let this process, and those that it starts, find the store through their environment, and no other.

    Args:
        folder: where no AWS configuration is.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL_S3": server.url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_SESSION_TOKEN": SESSION_TOKEN,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": f"{folder}/none",
        "AWS_SHARED_CREDENTIALS_FILE": f"{folder}/none",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> S3Server:
    """The same store, found through the environment as users' programs find theirs: no argument is needed."""
    use_store(s3_server, monkeypatch, tmp_path)
    return s3_server


@pytest.fixture
def bucket(s3_environment: S3Server) -> str:
    return s3_environment.make_bucket()


class Asked(NamedTuple):
    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """By lower-case name."""


Fault = str | None
"""`busy`: answered 503; `deny`: 403; `full`: 507; `cut`: half of the answer's body, then the connection ends; `lost`:
the store does it, and the connection ends without an answer; None: passed on."""


@contextlib.contextmanager
def faulty(
    server: S3Server, decide: Callable[[Asked], Fault], after: Callable[[Asked], None] = lambda asked: None
) -> Iterator[str]:
    """The address of a relay to the store that does to each request what `decide` says.

    Args:
        after: called when the store has done it, before its answer is passed on.
    """
    one_at_a_time = threading.Lock()

    class Relay(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = Asked(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
            # moto looks at the object that is there and makes it in two steps, between which its other threads run.
            whole = one_at_a_time if _CONDITIONS & asked.headers.keys() else contextlib.nullcontext()
            fault = decide(asked)
            if fault in _REFUSALS:
                status, code = _REFUSALS[fault]
                said = b"" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode()
                self._answer(status, {}, said, len(said))
                return
            store = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=100)
            try:
                with whole:
                    store.request(self.command, self.path, body, dict(self.headers))
                    answer = store.getresponse()
                    payload = answer.read()
                after(asked)
            finally:
                store.close()
            self.close_connection = fault is not None
            if fault == "lost":
                return
            size = int(answer.headers.get("Content-Length", len(payload)))
            sent = payload[: len(payload) // 2] if fault == "cut" else payload
            self._answer(answer.status, dict(answer.headers), sent, size)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = relay

        def _answer(self, status: int, headers: dict[str, str], body: bytes, size: int) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = False
        connections: set[socket.socket] = set()

        def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
            self.connections.add(request)
            super().process_request(request, client_address)

        def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
            self.connections.discard(request)
            super().shutdown_request(request)

        def handle_error(self, *_: object) -> None:
            """A client that went away is no news."""

    relay = Server(("127.0.0.1", 0), Relay)
    thread = threading.Thread(target=relay.serve_forever, args=(0.01,), name="s3-relay")
    thread.start()
    try:
        yield f"http://127.0.0.1:{relay.server_address[1]}"
    finally:
        relay.shutdown()
        thread.join()
        for connection in [*relay.connections]:  # kept alive by the client, and its thread with it
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        relay.server_close()


_REFUSALS = {"busy": (503, "SlowDown"), "deny": (403, "AccessDenied"), "full": (507, "InsufficientStorage")}


def _address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    said = b""
    while select.select([process.stdout], [], [], START_S)[0]:
        piece = os.read(process.stdout.fileno(), 4096)
        said += piece
        if found := re.search(rb"Running on (http://127\.0\.0\.1:\d+)", said):
            return found[1].decode()
        if not piece:
            break
    raise AssertionError(f"moto's server did not start: {said.decode(errors='replace')}")


NUM_WRITERS = 4


def race(store: StorageBackend, nbytes: int) -> None:
    """Several write one object at the same time, none of them over another: one does, and it is that one's."""
    together = threading.Barrier(NUM_WRITERS)
    outcomes: list[str] = []

    def write(number: int) -> None:
        payload = bytes([number]) * nbytes

        def pieces() -> Iterator[bytes]:
            together.wait(100)  # after the first look whether it is there
            yield payload

        try:
            store.write("a", pieces(), if_absent=True)
            outcomes.append(f"made by {number}")
        except AlreadyExistsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(NUM_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = store.read("a")
    assert made == made[:1] * nbytes
    assert sorted(outcomes) == [f"made by {made[0]}"] + ["refused"] * (NUM_WRITERS - 1)

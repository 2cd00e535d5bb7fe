"""Probes of a daemon over HTTP: ``GET /healthz`` and ``GET /readyz``, answered by a thread from what the loop noted.

The thread reads two fields and touches nothing else. So a probe costs the loop no time, and a loop that hangs is not
reported as healthy. Large, many or slow requests are dropped, because the port may be open to a network.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from unified.config.addresses import HostPort, split_address
from unified.errors import ClusterError, UsageError, listed
from unified.threads import start_thread

HEALTH_FLAG = "--health-bind"
STALE_AFTER_S = 30.0
"""Time without a turn of the loop after which it counts as hung."""
IDLE_WAIT_S = 60.0
PROBED_WAIT_S = 5.0
"""Longest wait of a loop that is probed, well below the time after which it counts as hung."""
MAX_CONNECTIONS = 64
"""Connections that are open at once; one more ends the oldest."""
MAX_REQUEST_BYTES = 4096
ANSWER_WITHIN_S = 2.0
"""Time from a connection to the end of its request, after which it is closed."""
_PHRASES = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Probes:
    """Facts that a daemon's loop notes about itself and, if there is an address, the listener that reports them.

    Args:
        bind: address to listen on; None: do not listen.
        unready: why the daemon is not ready at first, such as ``not registered``.
        flag: option that gave the address, for errors.
        pages: other paths, with functions that return their text. They run on the listener's thread.

    Raises:
        ClusterError: the address cannot be listened on.
    """

    def __init__(
        self,
        bind: HostPort | None,
        unready: str,
        *,
        flag: str = HEALTH_FLAG,
        pages: Mapping[bytes, Callable[[], bytes]] | None = None,
    ) -> None:
        self.unready = unready
        """Reason why the daemon is not ready; empty: it is."""
        self._turned_at = time.monotonic()
        self._pages = pages or {}
        self._listener = None if bind is None else _Listener(_listen(bind, flag), self)

    @property
    def port(self) -> int:
        """Port of the listener; 0 if there is none."""
        return self._listener.port if self._listener else 0

    def start(self) -> None:
        """Begin to answer, on a thread. A process that forks must fork before this."""
        self.turned()
        if self._listener is not None:
            self._listener.start()

    def turned(self) -> None:
        self._turned_at = time.monotonic()

    @property
    def longest_wait_s(self) -> float:
        """Longest time that the loop may wait with nothing to do."""
        return IDLE_WAIT_S if self._listener is None else PROBED_WAIT_S

    def answer(self, request: bytes) -> bytes:
        """Return the response to a request, whatever its bytes are."""
        words = request.partition(b"\n")[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(400, "this is no request of HTTP/1.1")
        path = words[1].partition(b"?")[0]
        known = [b"/healthz", b"/readyz", *self._pages]
        if path not in known:
            return _response(404, f"there are {listed(each.decode() for each in known)}")
        if words[0] != b"GET":
            return _response(405, "only GET")
        if path in self._pages:
            return _response(200, self._pages[path]().decode().rstrip("\n"))
        still_s = time.monotonic() - self._turned_at
        if still_s > STALE_AFTER_S:
            return _response(503, f"the loop has not turned for {still_s:.0f} s")
        if path == b"/readyz" and self.unready:
            return _response(503, self.unready)
        return _response(200, "ok")

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()


def parse_bind(text: str | None, flag: str = HEALTH_FLAG) -> HostPort | None:
    """Return the address of ``FLAG HOST:PORT``, None for None; UsageError: it is no address."""
    if text is None:
        return None
    try:
        found = split_address(text, ())
    except ValueError:
        found = HostPort("", None)
    if found.port is None:
        raise UsageError(f"{flag} {text!r} is no address: write HOST:PORT, such as 0.0.0.0:8081.")
    return found._replace(host="0.0.0.0") if found.host == "*" else found


def _listen(bind: HostPort, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind.bare_host else socket.AF_INET
    try:
        return socket.create_server((bind.bare_host, bind.port or 0), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:  # gaierror, too
        text = f"cannot listen on {bind.host}:{bind.port} for {flag}: {error.strerror}. Choose another address."
        raise ClusterError(text) from None


def _response(status: int, text: str) -> bytes:
    body = f"{text}\n"
    head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    allow = "Allow: GET\r\n" if status == 405 else ""
    return f"{head}{allow}Content-Length: {len(body.encode())}\r\nConnection: close\r\n\r\n{body}".encode()


class _Listener:
    def __init__(self, listening: socket.socket, probes: Probes) -> None:
        self.port: int = listening.getsockname()[1]
        self._probes = probes
        self._listening = listening
        self._listening.setblocking(False)
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._open: dict[socket.socket, tuple[float, bytearray]] = {}
        """Deadline and first bytes of each connection, the oldest first."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_thread("probes", self._serve)

    def close(self) -> None:
        self._waker.close()
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        for each in (*self._open, self._listening, self._wake):
            each.close()

    def _serve(self) -> None:
        while True:
            oldest = next(iter(self._open.values()), None)
            ready = self._selector.select(None if oldest is None else max(0.0, oldest[0] - time.monotonic()))
            for source in [key.fileobj for key, _ in ready]:
                if source is self._wake:
                    return
                if source is self._listening:
                    self._accept()
                elif isinstance(source, socket.socket) and source in self._open:  # not ended earlier in this turn
                    self._read(source)
            now = time.monotonic()
            self._drop([each for each, (deadline, _) in self._open.items() if deadline <= now])

    def _accept(self) -> None:
        try:
            accepted = self._listening.accept()[0]
        except BlockingIOError:
            return
        except OSError:  # no descriptors are left: close the waiting connections to free theirs
            self._drop([*self._open])
            time.sleep(0.1)
            return
        accepted.setblocking(False)
        if len(self._open) >= MAX_CONNECTIONS:
            self._drop([next(iter(self._open))])
        self._open[accepted] = time.monotonic() + ANSWER_WITHIN_S, bytearray()
        self._selector.register(accepted, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        request = self._open[connection][1]
        with contextlib.suppress(OSError):  # the other end is gone
            data = connection.recv(MAX_REQUEST_BYTES)
            request += data
            is_whole = b"\r\n\r\n" in request or b"\n\n" in request
            if data and not is_whole and len(request) < MAX_REQUEST_BYTES:
                return
            if data:  # a short response fits into the buffer of a new connection
                connection.settimeout(ANSWER_WITHIN_S)
                connection.sendall(self._probes.answer(bytes(request) if is_whole else b""))
        self._drop([connection])

    def _drop(self, connections: Sequence[socket.socket]) -> None:
        for each in connections:
            del self._open[each]
            self._selector.unregister(each)
            each.close()

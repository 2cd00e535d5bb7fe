"""Clients of an HTTP server that cost little themselves: bare sockets, kept open, each with one question on its way."""

from __future__ import annotations

import re
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

DEADLINE_S = 10.0
WARM_UP = 200
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


class WrongAnswerError(Exception):
    """The answer was not 200, or had no length."""


class HttpClient:
    """One connection that asks the same again and again."""

    def __init__(self, port: int, path: str, token: str = "") -> None:
        shown = f"X-TRAINER-TOKEN: {token}\r\n" if token else ""
        self._request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{shown}\r\n".encode()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.body = b""

    def send(self) -> None:
        self.socket.sendall(self._request)

    def receive(self) -> bool:
        """Read what is there; whether that ends the answer."""
        self._received += self.socket.recv(65536)
        head, end, body = self._received.partition(b"\r\n\r\n")
        found = _LENGTH.search(head + b"\r\n") if end else None
        if not self._received or (end and (found is None or not head.startswith(b"HTTP/1.1 200 "))):
            raise WrongAnswerError(self._received[:500].decode(errors="replace"))
        if found is None or len(body) < int(found[1]):
            return False
        self._received, self.body = b"", body
        return True

    def ask(self) -> bytes:
        """Ask once and wait for the answer; its body."""
        self.send()
        while not self.receive():
            pass
        return self.body


@contextmanager
def connected(number: int, port: int, path: str, token: str = "") -> Iterator[list[HttpClient]]:
    """So many connections."""
    with ExitStack() as stack:
        clients = [HttpClient(port, path, token) for _ in range(number)]
        for each in clients:
            stack.enter_context(each.socket)
        yield clients


def rate(clients: list[HttpClient], seconds: float) -> float:
    """Answers a second, when each client asks again as soon as it is answered."""
    answered = 0
    with selectors.DefaultSelector() as selector:
        for each in clients:
            selector.register(each.socket, selectors.EVENT_READ, each)
            each.send()
        began = time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            ready = selector.select(DEADLINE_S)
            if not ready:
                raise TimeoutError(f"nobody was answered for {DEADLINE_S:g} s")
            for key, _ in ready:
                if key.data.receive():
                    answered += 1
                    key.data.send()
    for each in clients:  # what is on its way
        while not each.receive():
            pass
    return answered / (now - began)


def latencies(client: HttpClient, times: int) -> list[float]:
    """Seconds from a question to its answer, one at a time."""
    taken = []
    for _ in range(times + WARM_UP):
        began = time.perf_counter()
        client.ask()
        taken.append(time.perf_counter() - began)
    return taken[WARM_UP:]

"""A master of a few lines on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from unified.protocol.client_master import ClientToMaster, MasterAnswer, Refused, client_to_master, master_to_client
from unified.protocol.framing import Codec

A = TypeVar("A")
Respond = Callable[[ClientToMaster], MasterAnswer | list[bytes] | None]


class FakeMaster:
    """A ROUTER that answers requests as the test says: a record, raw frames, or None for silence."""

    def __init__(self, address: str = "tcp://127.0.0.1:*") -> None:
        self.respond: Respond = lambda message: Refused(code="bad-request", reason="the test says nothing of this")
        self.requests: list[Any] = []
        self.codec: Codec[Any] = client_to_master
        """Of what is asked here."""
        self.version = 1
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-master")

    def start(self) -> FakeMaster:
        self._thread.start()
        return self

    def requests_of(self, kind: type[A]) -> list[A]:
        return [request for request in self.requests if isinstance(request, kind)]

    def close(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._socket.close()
            self._context.term()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(10):
                continue
            sender, *frames = self._socket.recv_multipart()
            request_id, message = self.codec.decode(frames)
            self.requests.append(message)
            answer = self.respond(message)
            if isinstance(answer, msgspec.Struct):
                answer = master_to_client.encode(answer, request_id, version=self.version)
            if answer is not None:
                self._socket.send_multipart([sender, *answer])


@pytest.fixture
def fake_master() -> Iterator[FakeMaster]:
    master = FakeMaster().start()
    yield master
    master.close()

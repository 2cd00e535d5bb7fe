"""The socket of a connection to a master, and what its handshakes say of the cluster key."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Self

import zmq

from unified.errors import KeyRefusedError
from unified.security.curve import secure_client
from unified.security.handshakes import EVENTS, Handshakes
from unified.security.keys import ClusterKey


class Dealer:
    """A DEALER that connects again by itself, until the master refuses it. Belongs to one thread.

    Attributes:
        num_broken: handshakes that the master ended without a word, since the last that succeeded.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: ClusterKey | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.immediate = True  # nothing is queued for a master that is not there
        self.socket.ipv6 = "[" in address
        self.socket.reconnect_ivl = 50
        self.socket.reconnect_ivl_max = 1000
        self.socket.heartbeat_ivl = 2000  # notices a cut that TCP would not
        self.socket.heartbeat_timeout = 6000
        secure_client(self.socket, key)
        self.monitor = self.socket.get_monitor_socket(EVENTS)
        self._handshakes = Handshakes(address, key)
        self.socket.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()

    @property
    def num_broken(self) -> int:
        return self._handshakes.num_broken

    @property
    def refusal(self) -> KeyRefusedError | None:
        """Why no message will ever pass; libzmq does not always try again then."""
        reason = self._handshakes.refusal
        return None if reason is None else KeyRefusedError(reason)

    def watch(self) -> None:
        """Take in what the monitor has."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._handshakes.read(self.monitor)

"""Bounds on connections that have not shaken hands: their number, their time, and their bytes.

ZeroMQ does not say to which connection a handshake belongs; the kernel's counters show it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import Counter
from typing import NamedTuple

HANDSHAKE_S = 10.0
"""Time for a handshake, after which ZeroMQ ends the connection."""
MAX_PENDING = 128
"""Connections of one server that may be in the middle of their handshakes."""
MAX_HANDSHAKE_BYTES = 4096
"""Bytes that a peer may send before its handshake is done; ours send less than 1 KiB."""
LOOK_S = 0.005
"""Period of looks at connections that have not shaken hands."""
_WELCOME_BYTES = 64 + 170
"""Bytes that a server sends to a peer after a good HELLO: its greeting, and WELCOME."""
_ANSWER_BYTES = _WELCOME_BYTES + 16
"""Most bytes that a server sends before a handshake is done: these and an ERROR."""
_COUNTERS = struct.Struct("=QQ")
_COUNTERS_AT = 120
"""Place of `tcpi_bytes_acked` and `tcpi_bytes_received` in Linux's tcp_info."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that ends a connection by a reset, and keeps nothing of it in the kernel."""


class PendingHandshakes:
    """Connections of one server with a key that have not shaken hands, as far as the kernel's counters tell.

    A connection that sends more than a handshake has is ended. If there are too many, one of the host with most is
    ended: the oldest that has not shown that it knows the server's key, or else the oldest.
    """

    def __init__(self) -> None:
        self._connections: dict[int, _PendingConnection] = {}
        """Connections by ZeroMQ's descriptor, oldest first."""
        self._reasons: dict[int, str] = {}
        self._is_counted = False
        """True once the kernel has shown that it counts."""

    def __len__(self) -> int:
        return len(self._connections)

    def accepted(self, descriptor: int) -> str:
        """Take in a connection; return the host at its other end, empty if it is gone already."""
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return ""
        try:
            host = str(connection.getpeername()[0])
        except (OSError, IndexError):
            connection.close()
            return ""
        self._connections[descriptor] = _PendingConnection(connection, host, time.monotonic())
        if len(self) > MAX_PENDING:
            self.look()
        return host

    def ended(self, descriptor: int) -> str:
        """Forget a connection; return the reason if it was ended here, else an empty text."""
        self._forget(descriptor)
        return self._reasons.pop(descriptor, "")

    def look(self) -> None:
        """Forget the connections that have shaken hands, and end those that exceed a bound."""
        now = time.monotonic()
        for descriptor, each in list(self._connections.items()):
            acknowledged, received = _counters(each.own)
            self._is_counted = self._is_counted or acknowledged > 0
            if acknowledged > _ANSWER_BYTES or now - each.since > 2 * HANDSHAKE_S:
                self._forget(descriptor)
            elif received > MAX_HANDSHAKE_BYTES and self._is_counted:
                self._end(descriptor, "it sent more bytes than a handshake needs")
        while self._is_counted and len(self) > MAX_PENDING:
            ((most, _),) = Counter(each.host for each in self._connections.values()).most_common(1)
            theirs = [descriptor for descriptor, each in self._connections.items() if each.host == most]
            first = min(theirs, key=self._has_welcome)  # the oldest, of those in the same state
            self._end(first, f"more than {MAX_PENDING} connections had an unfinished handshake")

    def close(self) -> None:
        for descriptor in list(self._connections):
            self._forget(descriptor)

    def _has_welcome(self, descriptor: int) -> bool:
        """Return True if the peer can end its handshake, or has ended it: it acknowledges the last message late."""
        return _counters(self._connections[descriptor].own)[0] >= _WELCOME_BYTES

    def _end(self, descriptor: int, reason: str) -> None:
        self._reasons[descriptor] = reason
        own = self._connections[descriptor].own
        with contextlib.suppress(OSError):  # its peer ended it first
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # without it a full window hides the end
            own.shutdown(socket.SHUT_RDWR)
        self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        if (found := self._connections.pop(descriptor, None)) is not None:
            found.own.close()


class _PendingConnection(NamedTuple):
    own: socket.socket
    """A descriptor of our own, which means no other connection."""
    host: str
    since: float


def _counters(connection: socket.socket) -> tuple[int, int]:
    """Return the bytes that the peer has acknowledged, and the bytes that it sent."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS_AT + _COUNTERS.size)
        acknowledged, received = _COUNTERS.unpack_from(info, _COUNTERS_AT)
    except (OSError, struct.error):
        return 0, 0
    return acknowledged, received

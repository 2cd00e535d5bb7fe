"""Bounds on connections that have not shaken hands: their number, their time, and what they may send.

ZeroMQ tells of no handshake whose connection it was; the kernel's counters do.
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
"""Bytes that a server sends to who has sent a good HELLO: its greeting, and WELCOME."""
_ANSWER_BYTES = _WELCOME_BYTES + 16
"""Bytes that a server sends to whom it has not shaken hands with, at most: an ERROR besides."""
_COUNTERS = struct.Struct("=QQ")
_COUNTERS_AT = 120
"""Place of `tcpi_bytes_acked` and `tcpi_bytes_received` in Linux's tcp_info."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that ends a connection by a reset, and keeps nothing of it in the kernel."""


class PendingHandshakes:
    """Connections of one server with a key that have not shaken hands, as far as the kernel's counters tell.

    One that sends more than a handshake has is ended, and if there are too many one of the host with most: the oldest,
    of those that have not shown that they know the server's key if there are such.
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
        """Forget a connection; return the reason for which it was ended here, else nothing."""
        self._forget(descriptor)
        return self._reasons.pop(descriptor, "")

    def look(self) -> None:
        """Forget the connections that have shaken hands, and end those that cost too much."""
        now = time.monotonic()
        for descriptor, each in list(self._connections.items()):
            acknowledged, received = _counters(each.own)
            self._is_counted = self._is_counted or acknowledged > 0
            if acknowledged > _ANSWER_BYTES or now - each.since > 2 * HANDSHAKE_S:
                self._forget(descriptor)
            elif received > MAX_HANDSHAKE_BYTES and self._is_counted:
                self._end(descriptor, "it sent more than a handshake before it had shaken hands")
        while self._is_counted and len(self) > MAX_PENDING:
            ((most, _),) = Counter(each.host for each in self._connections.values()).most_common(1)
            theirs = [descriptor for descriptor, each in self._connections.items() if each.host == most]
            first = min(theirs, key=self._has_welcome)  # the oldest, of those in the same state
            self._end(first, f"{MAX_PENDING} other connections had not shaken hands either")

    def close(self) -> None:
        """Forget all."""
        for descriptor in list(self._connections):
            self._forget(descriptor)

    def _has_welcome(self, descriptor: int) -> bool:
        """Return True if the peer can end its handshake. It may have done so: it acknowledges the last word late."""
        return _counters(self._connections[descriptor].own)[0] >= _WELCOME_BYTES

    def _end(self, descriptor: int, reason: str) -> None:
        self._reasons[descriptor] = reason
        own = self._connections[descriptor].own
        with contextlib.suppress(OSError):  # its peer was quicker
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # else a full window would hide the end from it
            own.shutdown(socket.SHUT_RDWR)
        self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        if (found := self._connections.pop(descriptor, None)) is not None:
            found.own.close()


class _PendingConnection(NamedTuple):
    own: socket.socket
    """A descriptor of our own, so that nobody else can be meant."""
    host: str
    since: float


def _counters(connection: socket.socket) -> tuple[int, int]:
    """Return the bytes that the peer has acknowledged, and those that came from it."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS_AT + _COUNTERS.size)
        acknowledged, received = _COUNTERS.unpack_from(info, _COUNTERS_AT)
    except (OSError, struct.error):
        return 0, 0
    return acknowledged, received

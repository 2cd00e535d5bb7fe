"""Encrypted records on a TCP connection of their own: AES-256-GCM, for amounts of data for which CURVE is too slow.

The key is random, for one connection only, and is sent on a socket that CURVE encrypts (`unified.security.curve`). Only
members with the cluster key get it, and no stored secret opens recorded traffic later. The nonce of a record is its
side and its number: a record that was changed, left out, repeated or moved cannot be opened.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator

from unified.errors import ProtocolError
from unified.security.frames import Buffer

KEY_BYTES = 32
TAG_BYTES = 16
"""Bytes by which an encrypted record is longer than its content."""
MAX_RECORD_BYTES = 512 * 1024
"""Longest record: it stays in a core's cache between the cipher and the kernel's copy."""
MAX_RECORDS = 1 << 17
"""Number of records, of 64 GiB at most, after which a connection gets another key, far below GCM's bounds."""
STALLED_S = 30.0
"""Time for one record, after which the connection counts as broken."""


class RecordSocket:
    """A connected socket that carries records.

    Args:
        key: `KEY_BYTES` bytes that no other connection uses.
        is_maker: True if this side made the key.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, is_maker: bool) -> None:
        # These imports take 20 ms, and only workers with large buffers need them.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.num_sent = 0
        self._socket = connected
        self._cipher = AESGCM(key)
        self._invalid = InvalidTag
        self._ours, self._theirs = _nonces(is_maker), _nonces(not is_maker)
        self._sealed = memoryview(bytearray(MAX_RECORD_BYTES + TAG_BYTES))

    def send(self, record: Buffer) -> None:
        """Send a record of at most `MAX_RECORD_BYTES`; OSError: the connection broke."""
        sealed = self._sealed[: len(record) + TAG_BYTES]
        self._cipher.encrypt_into(next(self._ours), record, None, sealed)
        self.num_sent += 1
        self._socket.settimeout(STALLED_S)
        self._socket.sendall(sealed)

    def receive(self, record: memoryview | bytearray, within_s: float = STALLED_S) -> None:
        """Fill memory with the next record, of exactly this size. OSError: the connection broke; ProtocolError: it is
        not what the peer sent."""
        sealed = self._sealed[: len(record) + TAG_BYTES]
        fill(self._socket, sealed, within_s)
        try:
            self._cipher.decrypt_into(next(self._theirs), sealed, None, record)
        except self._invalid:
            raise ProtocolError(
                "a record of its connection for large payloads was changed, lost, repeated or moved in transit, or its "
                "sender does not have the key"
            ) from None


def fill(connected: socket.socket, memory: memoryview, within_s: float) -> None:
    """Fill all of this memory with received bytes; OSError: the connection ended first, or it took too long."""
    until = time.monotonic() + within_s
    while len(memory):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(memory))  # to wake up once, not for each packet
        connected.settimeout(max(0.001, until - time.monotonic()))
        count = connected.recv_into(memory)
        if not count:
            raise ConnectionResetError("the other side ended the connection")
        memory = memory[count:]


def _nonces(is_maker: bool) -> Iterator[bytes]:
    return (bytes([is_maker]) + number.to_bytes(11, "big") for number in itertools.count())

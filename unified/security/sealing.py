"""Sealed records on a TCP connection of their own: AES-256-GCM, for more bytes than CURVE would be quick enough for.

The key is random, for one connection alone, and is sent on a socket that CURVE encrypts (`unified.security.curve`).
Only who has the cluster key learns it, and no secret that is kept opens what was recorded. The nonce of a record is its
side and its number: one that was changed, left out, repeated or moved cannot be opened.
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
"""Bytes by which a sealed record is longer than what is in it."""
MAX_RECORD_BYTES = 512 * 1024
"""Longest record: it stays in a core's cache between the cipher and the kernel's copy."""
MAX_RECORDS = 1 << 17
"""Number of records, of 64 GiB at most, after which a connection should get another key: GCM's bounds are far away."""
STALLED_S = 30.0
"""Time for one record, after which the connection counts as broken."""


class RecordSocket:
    """A connected socket that carries records.

    Args:
        key: `KEY_BYTES` that no other connection uses.
        is_maker: this side made the key.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, is_maker: bool) -> None:
        # 20 ms, which workers do without that get no large buffers.
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
        """Fill memory with the next record, of just this size. OSError: the connection broke; ProtocolError: it is not
        what was sealed."""
        sealed = self._sealed[: len(record) + TAG_BYTES]
        fill(self._socket, sealed, within_s)
        try:
            self._cipher.decrypt_into(next(self._theirs), sealed, None, record)
        except self._invalid:
            raise ProtocolError(
                "a record of its connection for large payloads was changed, lost, repeated or moved on the way, or is "
                "of somebody who has not the key"
            ) from None


def fill(connected: socket.socket, memory: memoryview, within_s: float) -> None:
    """Receive into all of this memory; OSError: the connection ended before, or it took longer than that."""
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

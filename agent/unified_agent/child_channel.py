"""The channel of control messages to a child. It never blocks: bytes that the socket does not take now wait here."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from unified.protocol.framing import StreamBuffer, encode_stream

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Bytes that may wait for a peer before the peer is given up."""

_READS_A_CALL = 16
"""Reads per call, so that a busy peer does not hold up the loop; the buffer of a dead peer holds less."""


class ChannelOverflowError(ConnectionError):
    """Error: too many bytes wait for a peer that does not read."""


class ChildChannel:
    """One end of a socket pair with a child process."""

    _last: ClassVar[tuple[object, bytes]] = None, b""  # a message and its bytes, which thousands of workers may get

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self.descriptor = end.fileno()
        """Descriptor for pollers; still known when the channel has closed."""
        self._buffer = StreamBuffer()
        self._waiting: deque[tuple[bytes | memoryview, Sequence[int]]] = deque()
        self._num_waiting_bytes = 0
        self.is_open = True

    @property
    def has_waiting(self) -> bool:
        """True if bytes are to be sent when the socket can take them."""
        return self.is_open and bool(self._waiting)

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send, or keep for later; a closed channel drops the message. The channel owns and closes the descriptors.

        ChannelOverflowError: the peer does not read; the link is closed.
        """
        if not self.is_open:
            _close_all(descriptors)
            return
        if message is not self._last[0]:
            ChildChannel._last = message, encode_stream(message)
        data = self._last[1]
        # The first message may be of any size: it contains a job's configuration.
        if self._waiting and self._num_waiting_bytes + len(data) > MAX_WAITING_BYTES:
            self.close()
            raise ChannelOverflowError(f"{MAX_WAITING_BYTES >> 20} MiB of messages wait for a process that reads none.")
        self._waiting.append((data, descriptors))
        self._num_waiting_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        while self.has_waiting:
            data, descriptors = self._waiting[0]
            try:
                count = (
                    socket.send_fds(self._socket, [data], list(descriptors))
                    if descriptors
                    else self._socket.send(data, socket.MSG_NOSIGNAL)
                )
            except BlockingIOError:
                return
            except OSError:  # the peer is gone; its end is reported elsewhere
                self._drop_waiting()
                return
            _close_all(descriptors)
            self._num_waiting_bytes -= count
            if count == len(data):
                self._waiting.popleft()
            else:
                self._waiting[0] = (memoryview(data)[count:], ())  # a long message is sent in parts

    def receive(self) -> list[bytes]:
        """Return message bodies that have arrived, up to about 1 MiB a call. At end of file the channel closes.

        ProtocolError: what arrived is no stream of messages.
        """
        bodies: list[bytes] = []
        for _ in range(_READS_A_CALL):
            if not self.is_open:
                break
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
                break
            bodies += self._buffer.feed(data)
        return bodies

    def close(self) -> None:
        self.is_open = False
        self._drop_waiting()
        self._socket.close()

    def _drop_waiting(self) -> None:
        for _, descriptors in self._waiting:
            _close_all(descriptors)
        self._waiting.clear()
        self._num_waiting_bytes = 0


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

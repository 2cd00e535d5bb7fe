"""Sender of large buffers to one peer on another host where there is a key (`unified.bus.transport.bulk_receiver`).

Messages behind a large one wait until its buffers have arrived. If there is no connection, or it breaks, the buffers go
through ZeroMQ in pieces, encrypted too, but slower.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from unified.bus.buffers import Buffer
from unified.bus.transport.bulk_receiver import ACK, CHUNK_HEADER, ID_BYTES, IDLE_S
from unified.bus.transport.pieces import LargeMessage
from unified.bus.transport.routes import BULK
from unified.config.addresses import split_address
from unified.core.backoff import Backoff
from unified.errors import ProtocolError
from unified.security.sealing import KEY_BYTES, MAX_RECORD_BYTES, MAX_RECORDS, RecordSocket
from unified.threads import call_guarded, start_thread

logger = logging.getLogger(__name__)
CONNECT_WITHIN_S = 3.0
RETRY_S = 60.0
"""Time after a broken connection before the next attempt."""
_SEND_AGAIN = Backoff(first_s=0.0002, limit_s=0.005, num_free=0)
Messages = Sequence[Sequence[Buffer]]
"""A message, and before it the messages with the pieces of its large buffers (`unified.bus.transport.pieces`)."""


class BulkSender:
    """Queue of a peer's messages from a large one on, and its thread. If idle, it has neither thread nor connection.

    Args:
        address: ``bulk://HOST:PORT`` of the peer.
        lock: of the ZeroMQ connection to the peer; callers hold it.
        try_send: queues a message there, and returns False if there is no room; takes the lock.
        introduction: envelope of the message that announces a connection.
    """

    def __init__(
        self, address: str, lock: threading.RLock, try_send: Callable[[Messages], bool], introduction: bytes
    ) -> None:
        self._address = split_address(address, (BULK.partition(":")[0],))
        self._changed = threading.Condition(lock)
        self._try_send = try_send
        self._introduction = introduction
        self._queue: deque[Messages] = deque()
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._records: RecordSocket
        self._not_before = 0.0
        self._is_closed = False

    def takes(self, messages: Messages) -> bool:
        """Return True if a message must be queued here: it is large, or others are queued before it."""
        return bool(self._queue) or (isinstance(messages, LargeMessage) and time.monotonic() >= self._not_before)

    def add(self, messages: Messages, limit: int, limit_bytes: int) -> bool:
        """Queue a message; return False if `limit` messages, or `limit_bytes` of large ones, wait already."""
        nbytes = sum(each.nbytes for each in self._queue if isinstance(each, LargeMessage))
        if len(self._queue) >= limit or nbytes >= limit_bytes:
            return False
        if self._thread is None:
            self._thread = start_thread("bus-bulk-send", self._run)
        self._queue.append(messages)
        self._changed.notify_all()
        return True

    def close(self, linger_s: float) -> None:
        """Drop messages that have not left within `linger_s`, and end the connection and the thread."""
        self._changed.wait_for(lambda: not self._queue, linger_s)
        self._is_closed = True
        self._queue.clear()
        self._changed.notify_all()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is over already
                self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed, IDLE_S)
                if not self._queue:
                    self._thread = None
                    self._disconnect()
                    return
                messages = self._queue[0]
            call_guarded("bulk-send-failed", self._send, messages)
            with self._changed:
                if self._queue:  # else all was dropped
                    self._queue.popleft()
                self._changed.notify_all()

    def _send(self, messages: Messages) -> None:
        if isinstance(messages, LargeMessage) and time.monotonic() >= self._not_before:
            try:
                self._send_buffers(messages)
                messages = messages[-1:]
            except Exception as error:  # after any error ZeroMQ is left
                self._disconnect()
                self._not_before = time.monotonic() + RETRY_S
                if not self._is_closed:
                    logger.warning(
                        "event=bulk-lost address=%s:%s reason=%r: large payloads go through ZeroMQ for %g s, slower",
                        *self._address,
                        str(error),
                        RETRY_S,
                    )
        self._wait_to_send(messages)

    def _send_buffers(self, message: LargeMessage) -> None:
        """Send the large buffers of a message, and return when the peer has all. OSError, ProtocolError: it has not."""
        if self._socket is None or self._records.num_sent > MAX_RECORDS:
            self._disconnect()
            self._connect()
        last = max(message.large)
        for number, view in message.large.items():
            self._records.send(CHUNK_HEADER.pack(message.number, number, view.nbytes, number == last))
            for start in range(0, view.nbytes, MAX_RECORD_BYTES):
                self._records.send(view[start : start + MAX_RECORD_BYTES])
        answer = bytearray(ACK.size)
        self._records.receive(answer)
        if ACK.unpack(answer) != (message.number,):
            raise ProtocolError("the peer answered for another series")

    def _connect(self) -> None:
        connection_id, key = os.urandom(ID_BYTES), os.urandom(KEY_BYTES)
        self._wait_to_send([[self._introduction, connection_id + key]])
        connected = socket.create_connection((self._address.bare_host, self._address.port or 0), CONNECT_WITHIN_S)
        with self._changed:
            self._socket = connected
            if self._is_closed:
                raise ConnectionAbortedError("it is closed")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.sendall(connection_id)
        self._records = RecordSocket(connected, key, is_maker=True)

    def _disconnect(self) -> None:
        connected, self._socket = self._socket, None
        if connected is not None:
            connected.close()

    def _wait_to_send(self, messages: Messages) -> None:
        """Send through ZeroMQ once there is room, unless this is closed before."""
        num_tries = 0
        while not self._is_closed and not self._try_send(messages):
            time.sleep(_SEND_AGAIN.delay_s(num_tries))
            num_tries += 1

"""Receiver of large buffers from other hosts where there is a key: one port, and a thread for each connection.

A connection carries ``[id]``, then sealed records: ``[header][chunk…]…`` a buffer. Its sender announces id and key
before, encrypted, through ZeroMQ. When all buffers of a series are there, the receiver answers with the number of the
series, and the sender sends the message of these buffers: so messages keep their order.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter

from unified.bus.transport.pieces import PieceJoiner
from unified.errors import ProtocolError
from unified.security.bounds import HANDSHAKE_S, MAX_PENDING
from unified.security.curve import Gatekeeper
from unified.security.sealing import KEY_BYTES, MAX_RECORD_BYTES, RecordSocket, fill
from unified.threads import CLOSE_WITHIN_S, call_guarded, start_thread

ID_BYTES = 16
CHUNK_HEADER = struct.Struct("<QIQ?")
"""Number of the series, number of the buffer in its message, its size, and whether it is the last one of the series."""
ACK = struct.Struct("<Q")
IDLE_S = 10.0
"""Time without a large message after which the sender ends a connection; the receiver waits longer."""
_MAX_EXPECTED = 4096


class BulkReceiver:
    """Receives large buffers, and keeps them for their message.

    Args:
        gatekeeper: counts and logs refused peers.
    """

    def __init__(self, gatekeeper: Gatekeeper, pieces: PieceJoiner) -> None:
        self._gatekeeper = gatekeeper
        self._pieces = pieces
        self._listener: socket.socket | None = None
        self._changed = threading.Condition()
        self._expected: dict[bytes, tuple[str, bytes]] = {}
        """Senders and keys of expected connections, by id."""
        self._open: dict[socket.socket, tuple[str, str]] = {}
        """Hosts and senders of connections, oldest first; a sender is empty until it has proven that it has the key."""
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def listen(self, listener: socket.socket | None) -> None:
        """Take over this listening socket, to accept from once a key is expected; None: there is none."""
        self._listener = listener

    def expect(self, sender: str, id_and_key: bytes) -> None:
        """Expect a connection with this id and key from a sender; ProtocolError: they cannot be used."""
        if self._listener is None or len(id_and_key) != ID_BYTES + KEY_BYTES:
            raise ProtocolError("an invalid BULK, or no port for large payloads here")
        with self._changed:
            self._expected[id_and_key[:ID_BYTES]] = sender, id_and_key[ID_BYTES:]
            if len(self._expected) > _MAX_EXPECTED:  # senders may fail to connect
                del self._expected[next(iter(self._expected))]
            if self._thread is None and not self._is_closing:
                self._thread = start_thread("bus-bulk-accept", self._accept, self._listener)
            self._changed.notify_all()

    def forget(self, inbox_id: str) -> None:
        """End the connections of a process that is gone."""
        with self._changed:
            for each in [each for each, (_, sender) in self._open.items() if sender == inbox_id]:
                _end(each)

    def close(self) -> None:
        """End all connections and threads."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            for each in (*self._open, *filter(None, [self._listener])):
                _end(each)
        if self._thread is not None:
            self._thread.join(CLOSE_WITHIN_S)
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closing:
            try:
                connected, (host, *_) = listener.accept()
            except OSError:  # it is being closed, or no descriptor is left
                time.sleep(0.01)
                continue
            if not call_guarded("bulk-not-accepted", start_thread, "bus-bulk", self._serve, connected, host):
                connected.close()

    def _serve(self, connected: socket.socket, host: str) -> None:
        try:
            with connected:
                self._admit(connected, host)
                sender, records = self._identify(connected)
                within_s = HANDSHAKE_S
                while not self._is_closing:
                    self._receive_series(connected, sender, records, within_s)
                    within_s = 3 * IDLE_S
        except ProtocolError as error:
            self._gatekeeper.refused(host, str(error))
        except OSError as error:
            if not self._is_closing and not self._open.get(connected, ("", ""))[1]:
                self._gatekeeper.refused(host, f"it made a connection for large payloads and proved nothing: {error}")
        finally:
            with self._changed:
                self._open.pop(connected, None)

    def _admit(self, connected: socket.socket, host: str) -> None:
        """Add a connection; if too many have proven nothing, end the oldest one of the host with most of them."""
        with self._changed:
            self._open[connected] = host, ""
            pending = [(each, at) for each, (at, sender) in self._open.items() if not sender]
            if len(pending) > MAX_PENDING:
                ((most, _),) = Counter(at for _, at in pending).most_common(1)
                oldest = next(each for each, at in pending if at == most)
                del self._open[oldest]
                _end(oldest)

    def _identify(self, connected: socket.socket) -> tuple[str, RecordSocket]:
        found = bytearray(ID_BYTES)
        fill(connected, memoryview(found), HANDSHAKE_S)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or bytes(found) in self._expected, HANDSHAKE_S)
            sender, key = self._expected.pop(bytes(found), ("", b""))
        if not key:
            raise ProtocolError("it made a connection for large payloads that no member announced")
        return sender, RecordSocket(connected, key, is_maker=False)

    def _receive_series(self, connected: socket.socket, sender: str, records: RecordSocket, within_s: float) -> None:
        buffers: dict[int, memoryview] = {}
        header, is_last = bytearray(CHUNK_HEADER.size), False
        while not is_last:
            records.receive(header, within_s)
            if not self._open.get(connected, ("", sender))[1]:
                self._open[connected] = self._open[connected][0], sender
            series, number, nbytes, is_last = CHUNK_HEADER.unpack(header)
            view = buffers[number] = self._pieces.take(nbytes)
            for start in range(0, nbytes, MAX_RECORD_BYTES):
                records.receive(view[start : start + MAX_RECORD_BYTES])
        self._pieces.deposit(sender, series, buffers)
        records.send(ACK.pack(series))


def _end(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is over already
        connected.shutdown(socket.SHUT_RDWR)

"""What lies between two hosts: lets connections through, or swallows what they carry, or tears them apart."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading


class Proxy:
    """Refuses connections until `open`; then passes them on to `target`, a tcp port of this host.

    Attributes:
        route: the address of this proxy, as an inbox has it.
        swallows: what comes from either side is lost.
        num_swallowed: bytes.
    """

    def __init__(self, target: str) -> None:
        self._target = int(target.rpartition(":")[2])
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))  # so nobody else gets the port, and nobody can connect
        self.route = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.swallows = False
        self.num_swallowed = 0
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def open(self) -> Proxy:
        self._listener.listen()
        self._thread.start()
        return self

    def reset(self) -> None:
        """Tear all connections apart."""
        with self._lock:
            pairs, self._pairs = self._pairs, {}
            for each in pairs:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.close()

    def close(self) -> None:
        self._is_closing = True
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        self.reset()

    def _run(self) -> None:
        while not self._is_closing:
            with self._lock:
                sources = [self._listener, *self._pairs]
            with contextlib.suppress(OSError, ValueError):  # reset meanwhile
                for source in select.select(sources, [], [], 0.02)[0]:
                    if source is self._listener:
                        self._accept()
                    else:
                        self._carry(source)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        with self._lock:
            self._pairs |= {near: far, far: near}

    def _carry(self, source: socket.socket) -> None:
        with self._lock:
            sink = self._pairs.get(source)
            if sink is None:
                return
            data = source.recv(1 << 16)
            if not data:
                for each in (source, sink):
                    del self._pairs[each]
                    each.close()
            elif self.swallows:
                self.num_swallowed += len(data)
            else:
                sink.sendall(data)

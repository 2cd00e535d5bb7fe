"""Logs of a rank: its output, copied to a store while it runs, in objects of bounded size."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from unified.errors import StorageError, UnifiedError
from unified.storage import open_storage
from unified.threads import start_thread
from unified.training.stopping import TrainingStopped

INTERVAL_S = 10.0
CHUNK_NBYTES = 1 << 20
"""Size at which the next object begins: each upload sends a whole object again."""
MAX_WAITING = 16
"""Most complete objects that wait while the store does not answer; older ones are dropped."""
CLOSE_WITHIN_S = 20.0


class LogUploader:
    """Copies what is printed to stdout and stderr within its ``with`` block to ``<uri>/<name>.log``, and then to
    ``<name>.1.log``, ``<name>.2.log``, … An error that leaves the block is written there too.

    Training goes on when the store takes no logs: the first failure is printed, and each interval tries again. Output
    of libraries that does not go through Python's streams is not copied.

    Args:
        uri: folder of the logs.
        name: name of this rank's objects.
        interval_s: seconds between uploads.
    """

    def __init__(self, uri: str, name: str, interval_s: float = INTERVAL_S) -> None:
        self._backend, prefix = open_storage(uri)
        self._name = f"{prefix}/{name}" if prefix else name
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._chunk = bytearray()
        self._number = 0
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=MAX_WAITING)
        self._sent_nbytes = 0
        """Bytes of the chunk that the store has."""
        self._is_closed = threading.Event()
        self._has_complained = False
        self._streams: tuple[Any, Any] = (None, None)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LogUploader:
        self._streams = sys.stdout, sys.stderr
        sys.stdout = _CopiedStream(sys.stdout, self.write)
        sys.stderr = _CopiedStream(sys.stderr, self.write)
        self._thread = start_thread("unified-logs", self._serve)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        sys.stdout, sys.stderr = self._streams
        if error is not None:
            is_expected = isinstance(error, TrainingStopped | UnifiedError)
            self.write(f"unified-train: {error}\n" if is_expected else "".join(traceback.format_exception(error)))
        self._is_closed.set()
        assert self._thread is not None
        self._thread.join(CLOSE_WITHIN_S)
        self._backend.close()

    def write(self, text: str) -> None:
        with self._lock:
            self._chunk += text.encode("utf-8", "replace")
            if len(self._chunk) >= CHUNK_NBYTES:
                self._waiting.append((self._number, bytes(self._chunk)))
                self._chunk.clear()
                self._number += 1
                self._sent_nbytes = 0

    def _serve(self) -> None:
        while not self._is_closed.wait(self._interval_s):
            self._upload()
        self._upload()

    def _upload(self) -> None:
        try:
            while self._waiting:
                number, chunk = self._waiting[0]
                self._send(number, chunk)
                with self._lock:
                    if self._waiting and self._waiting[0][0] == number:
                        self._waiting.popleft()
            with self._lock:
                number, chunk = self._number, bytes(self._chunk)
            if len(chunk) > self._sent_nbytes:
                self._send(number, chunk)
                with self._lock:
                    if self._number == number:
                        self._sent_nbytes = len(chunk)
        except StorageError as error:
            if not self._has_complained:
                self._has_complained = True
                print(f"unified-train: logs are not uploaded now: {error}", file=self._streams[1], flush=True)

    def _send(self, number: int, chunk: bytes) -> None:
        self._backend.write(f"{self._name}{f'.{number}' if number else ''}.log", chunk)


class _CopiedStream:
    def __init__(self, stream: Any, copy: Callable[[str], None]) -> None:
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        count: int = self._stream.write(text)
        self._copy(text)
        return count

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

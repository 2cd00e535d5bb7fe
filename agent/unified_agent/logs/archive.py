"""Archive of whole logs in a folder or a bucket, which outlives the node: compressed parts of each growing stream.

A part is `JOB/WORKER/INCARNATION.STREAM/OFFSET.gz`, with the offset of its first byte in 20 digits; the parts of a
stream, in the order of their names, are one gzip file. `0.out.archived` beside the log says how far the log is
archived: an agent that was killed and started again on the same log folder goes on there. So a part may be written
twice; the second write contains all bytes of the first.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty

from unified.errors import StorageError
from unified.storage.location import open_storage
from unified.threads import start_thread
from unified_agent.logs.logfile import LogSlice

log = logging.getLogger("unified_agent")
PART_BYTES = 4 * 1024 * 1024
EVERY_S = 300.0
"""Age of the oldest byte at which even a small part is written."""
LOOK_S = 5.0
RETRY_S = 60.0
"""Time until a store that failed is tried again."""
CLOSE_S = 30.0
"""Time for the last parts when the agent leaves."""


class LogArchive:
    """The thread that archives.

    Args:
        address: folder, or ``s3://`` address.
        read: reads part of a stream on the thread that writes it, so never during a rotation.

    Raises:
        UsageError: there is no such kind of store.
    """

    def __init__(self, address: str, log_dir: Path, max_files: int, read: Callable[[Path, int, int], LogSlice]) -> None:
        self._store, self._prefix = open_storage(address, is_private=True)
        self._log_dir = log_dir
        self._max_files = max_files
        self._read = read
        self._due: dict[Path, float] = {}
        """Streams that are not archived to their end, with the times at which even a small part is due."""
        self._ended: set[Path] = set()
        self._closing = threading.Event()
        for path in [*log_dir.glob("*/*/*.out"), *log_dir.glob("*/*/*.err")]:  # of an earlier incarnation of this agent
            self._due[path] = 0.0
            self.end(path)
        self._thread = start_thread("log-archive", self._run)

    def begin(self, path: Path) -> None:
        """Archive a stream from now on, in the folder of its job."""
        with contextlib.suppress(OSError):
            _mark(path).write_text("0")
        self._due[path] = time.monotonic() + EVERY_S

    def end(self, path: Path) -> None:
        """Archive the rest of an ended stream soon."""
        self._ended.add(path)

    def close(self) -> None:
        """Archive what is left, for `CLOSE_S` at most; the next agent of this node archives the rest."""
        self._ended.update(self._due)
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._store.close()

    def _run(self) -> None:
        while self._due or not self._closing.is_set():
            is_last = self._closing.wait(LOOK_S)
            for path in list(self._due):
                try:
                    self._archive(path)
                except (StorageError, OSError, Empty) as error:
                    log.error("event=log-not-archived file=%s reason=%r", path, f"{error}; it is tried again")
                    self._due[path] = self._due.pop(path)  # behind the others, which need not wait for it
                    if is_last or self._closing.wait(RETRY_S):
                        return
                    break
            if is_last:
                return

    def _archive(self, path: Path) -> None:
        """Write the parts of a stream that are due."""
        is_ended = path in self._ended  # before the size is read: an ended stream's size is final
        sent = 0
        with contextlib.suppress(OSError, ValueError):
            sent = int(_mark(path).read_text())
        part = self._read(path, sent, 0)
        while (left := part.size - sent) >= PART_BYTES or (
            left > 0 and (is_ended or time.monotonic() >= self._due[path])
        ):
            part = self._read(path, sent, PART_BYTES)
            if not part.data:
                break
            stream = "/".join(filter(None, [self._prefix, *path.parts[-3:]]))
            self._store.write(f"{stream}/{part.offset:020}.gz", gzip.compress(part.data, mtime=0))
            sent = part.offset + len(part.data)
            _mark(path).write_text(str(sent))
            self._due[path] = time.monotonic() + EVERY_S
        if part.error and not part.is_missing:
            raise OSError(part.error)
        if is_ended:  # a file missing by now was removed, or could not be written
            self._ended.discard(path)
            self._due.pop(path)


def _mark(path: Path) -> Path:
    return path.with_name(f"{path.name}.archived")

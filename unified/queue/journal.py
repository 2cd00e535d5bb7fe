"""The journal of a durable queue: an SQLite file that the next life of the owner resumes from.

What the core decides is written before anybody is told of it, in the order of its steps: the answers to a step leave
when its records, and those of all steps before it, are committed. So whatever the owner has said is in the file when it
dies, and what is not in the file nobody has heard. Steps that come while a commit runs share the next one.

A commit is in the hands of the operating system (WAL, ``synchronous=NORMAL``): it outlives the process, and after a
power failure or a crash of the host the file is whole but may lack the last moments. With `fsync` every commit is on
disk first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from unified.errors import QueueJournalError, UsageError
from unified.queue import items as packed
from unified.queue.core.actions import Record
from unified.queue.journal_file import JournalFile

logger = logging.getLogger(__name__)


class Journal:
    """Commits in a thread of its own.

    Args:
        file: from now on this journal's.
        queue: whose it is, for the log.
        on_failure: called once, with the error, when the file can no longer be written. Nothing is written after that;
            those that wait are still told.
    """

    def __init__(self, file: JournalFile, queue: str, on_failure: Callable[[QueueJournalError], None]) -> None:
        self._file = file
        self._queue = queue
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._records: list[Record] = []
        self._told: list[Callable[[], None]] = []
        self._is_writing = False
        self._is_broken = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="queue-journal", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Everything that was given to `write` is committed."""
        return not (self._told or self._is_writing)

    def check(self, items: Iterable[tuple[packed.Packed, int]]) -> None:
        """See that the file can hold them, before they are in the queue: a commit that fails is the end of that.

        Raises:
            UsageError: it cannot hold one of them.
        """
        most = self._file.most_bytes
        for item, nbytes in items:
            if nbytes > most and (found := packed.nbytes_of_largest(item)) > most:
                raise UsageError(
                    f"an item with {found} bytes in one piece cannot be put into queue {self._queue!r}, which is "
                    f"durable: its journal holds {most} at most. Put it in several pieces, or into a file and put "
                    "the file's name."
                )

    def write(self, records: Sequence[Record], then: Callable[[], None]) -> None:
        """Commit these after all that came before, and call `then` afterwards, in the journal's thread. Never blocks.

        The order of calls is to be that of the steps: hold the core's lock.
        """
        with self._changed:
            self._records += records
            self._told.append(then)
            self._changed.notify()

    def close(self) -> None:
        """Commit what waits, and close the file."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._file.close()

    def _turn(self) -> bool:
        """Commit what has come; False when there will be no more."""
        with self._changed:
            while not self._told and not self._is_closing:
                self._changed.wait()
            records, self._records = self._records, []
            told, self._told = self._told, []
            self._is_writing = bool(told)
        if records and not self._is_broken:
            try:
                self._file.commit(records)
            except BaseException as error:
                self._is_broken = True
                self._tell(partial(self._on_failure, self._as_failure(error)))
        self._is_writing = False
        for then in told:
            self._tell(then)
        return bool(told)

    def _as_failure(self, error: BaseException) -> QueueJournalError:
        if isinstance(error, QueueJournalError):
            return error
        return QueueJournalError(
            f"the journal of queue {self._queue!r} cannot be written: {error!r}. What was acknowledged is in the file; "
            "what was put since then cannot be kept in it."
        )

    def _tell(self, then: Callable[[], None]) -> None:
        try:
            then()
        except BaseException:  # SystemExit too: of a callback of somebody who was told
            logger.exception("event=journal-answer-failed queue=%s: the others go on", self._queue)

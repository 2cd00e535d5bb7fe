"""The journal of a durable queue: an SQLite file from which the owner's next incarnation resumes.

The core's decisions are written in the order of its steps, before anybody hears of them: the answers of a step leave
when the records of this step and of all earlier steps are committed. So when the owner dies, the file has everything
that the owner told others. Steps that come while a commit runs share the next commit.

A commit is in the hands of the operating system (WAL, ``synchronous=NORMAL``), so it survives the end of the process.
After a power failure or a crash of the host the file is intact but may lack the last moments. With `fsync` every
commit is on disk first.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from unified.bus.buffers import Buffer
from unified.bus.codec.serialized import SerializedValue
from unified.errors import QueueJournalError, UsageError
from unified.queue import items as packed
from unified.queue.core import messages
from unified.queue.items import Packed
from unified.threads import call_guarded, start_thread

SCHEMA_VERSION = 1
BUSY_S = 5.0
"""Seconds to wait until a dying process releases the file."""
ROW_BYTES = 100
"""The most bytes that a row has in addition to its piece of an item."""
_SCHEMA = """
create table facts (name text primary key, value text not null) without rowid;
create table handles (handle integer primary key, worker text not null, incarnation integer not null);
create table puts (handle integer, number integer, num_in integer not null, outcome integer not null,
                   primary key (handle, number)) without rowid;
create table items (item_id integer primary key, nbytes integer not null, put_at real not null,
                    num_buffers integer not null, body blob not null);
create table buffers (item_id integer, place integer, data blob not null, primary key (item_id, place));
create table leases (item_id integer primary key, handle integer not null, consumer integer not null,
                     number integer not null, place integer not null);
"""


class JournalClocks(NamedTuple):
    """The clocks of one process: `monotonic` means nothing to the next incarnation, so wall clock times are kept."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class JournalFile:
    """The file of one queue, for this process alone. One thread at a time may use it.

    Args:
        path: the file; created, with its folders, if missing. A file in use, or of another queue, is refused.
        fsync: a commit is on disk when it returns.

    Attributes:
        journal_id: created with the file; tells a new queue from one that resumes.
        most_bytes: the most bytes that a piece of an item may have.
    """

    def __init__(self, path: Path, queue: str, *, fsync: bool = False, clocks: JournalClocks | None = None) -> None:
        self.path = path
        self._queue = queue
        self._clocks = clocks or JournalClocks()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                self.journal_id = self._open(fsync)
                self.most_bytes = self._database.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) - ROW_BYTES
            except BaseException:
                self._database.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise self._unusable("opened", error) from None

    def memory(self) -> messages.JournalState:
        """Return the state that the last incarnation left; `put_at` is on this process's monotonic clock."""
        try:
            return self._load()
        except sqlite3.Error as error:
            raise self._unusable("read", error) from None

    def commit(self, records: Iterable[messages.Record]) -> None:
        """Write the records in one transaction: all of them, or none."""
        try:
            with self._database as database:
                database.execute("begin immediate")
                for record in records:
                    self._apply(database, record)
        except sqlite3.Error as error:
            raise self._unusable("written", error) from None

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    def _open(self, fsync: bool) -> str:
        database = self._database
        # One process has the file for itself until it ends. So WAL needs no shared memory beside the file, and works
        # where processes cannot map such memory (some network file systems).
        database.execute("pragma locking_mode = exclusive")
        database.execute("pragma journal_mode = wal")
        database.execute(f"pragma synchronous = {'full' if fsync else 'normal'}")
        with database:
            database.execute("begin exclusive")
            (version,) = database.execute("pragma user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    database.execute(statement)
                facts = {"queue": self._queue, "id": secrets.token_hex(8)}
                database.executemany("insert into facts values (?, ?)", facts.items())
                database.execute(f"pragma user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise QueueJournalError(
                    f"the journal {self.path} of queue {self._queue!r} has format version {version}, but this release "
                    f"needs {SCHEMA_VERSION}: another version of unified wrote it. Give the queue another path."
                )
        facts = dict(database.execute("select name, value from facts"))
        if facts.get("queue") != self._queue:
            raise QueueJournalError(
                f"{self.path} is the journal of queue {facts.get('queue')!r}, not of {self._queue!r}: give each "
                "durable queue a path of its own."
            )
        return facts["id"]

    def _load(self) -> messages.JournalState:
        database = self._database
        offset = self._clocks.monotonic() - self._clocks.wall()
        buffers: dict[int, list[Buffer]] = {}
        for item_id, data in database.execute("select item_id, data from buffers order by item_id, place"):
            buffers.setdefault(item_id, []).append(data)
        items = [
            messages.Item(
                item_id,
                SerializedValue(body, buffers.get(item_id, [])) if num_buffers else body,
                nbytes,
                put_at + offset,
            )
            for item_id, nbytes, put_at, num_buffers, body in database.execute(
                "select item_id, nbytes, put_at, num_buffers, body from items order by item_id"
            )
        ]
        return messages.JournalState(
            handles=[
                messages.SaveHandle(handle=handle, worker=worker, incarnation=incarnation)
                for handle, worker, incarnation in database.execute("select * from handles")
            ],
            puts=[
                messages.SavePut(handle=handle, number=number, num_in=num_in, outcome=messages.Outcome(outcome))
                for handle, number, num_in, outcome in database.execute("select * from puts order by handle, number")
            ],
            items=items,
            leases=self._load_leases(),
            is_closed=bool(database.execute("select 1 from facts where name = 'closed'").fetchone()),
        )

    def _load_leases(self) -> list[messages.SaveLease]:
        takes: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        query = "select handle, consumer, number, item_id, place from leases order by place"
        for handle, consumer, number, item_id, place in self._database.execute(query):
            takes.setdefault((handle, consumer, number), []).append((item_id, place))
        return [
            messages.SaveLease(
                handle=handle,
                consumer=consumer,
                number=number,
                item_ids=[item_id for item_id, _ in items],
                num_done=items[0][1],
            )
            for (handle, consumer, number), items in takes.items()
        ]

    def _apply(self, database: sqlite3.Connection, record: messages.Record) -> None:
        match record:
            case messages.SaveItems(items=items):
                self._save_items(database, items)
            case messages.SavePut(handle=handle, number=number, num_in=num_in, outcome=outcome):
                database.execute("replace into puts values (?, ?, ?, ?)", (handle, number, num_in, int(outcome)))
            case messages.DropPuts(handle=handle, below=below):
                database.execute("delete from puts where handle = ? and number < ?", (handle, below))
            case messages.SaveLease(handle=handle, consumer=consumer, number=number, item_ids=item_ids):
                database.executemany(
                    "replace into leases values (?, ?, ?, ?, ?)",
                    [(item_id, handle, consumer, number, place) for place, item_id in enumerate(item_ids)],
                )
            case messages.DropItems(item_ids=item_ids):
                keys = [(item_id,) for item_id in item_ids]
                for table in ("items", "buffers", "leases"):
                    database.executemany(f"delete from {table} where item_id = ?", keys)
            case messages.DropLease(item_ids=item_ids):
                database.executemany("delete from leases where item_id = ?", [(item_id,) for item_id in item_ids])
            case messages.SaveHandle(handle=handle, worker=worker, incarnation=incarnation):
                database.execute("replace into handles values (?, ?, ?)", (handle, worker, incarnation))
            case messages.DropHandle(handle=handle):
                database.execute("delete from handles where handle = ?", (handle,))
                database.execute("delete from puts where handle = ?", (handle,))
            case messages.SaveClosed():
                database.execute("replace into facts values ('closed', '')")

    def _save_items(self, database: sqlite3.Connection, items: list[messages.Item]) -> None:
        offset = self._clocks.wall() - self._clocks.monotonic()
        rows, buffers = [], []
        for item in items:
            packed: Packed = item.payload
            body, parts = (packed.body, packed.buffers) if isinstance(packed, SerializedValue) else (packed, [])
            rows.append((item.item_id, item.nbytes, item.put_at + offset, len(parts), body))
            buffers += [(item.item_id, place, data) for place, data in enumerate(parts)]
        database.executemany("insert into items values (?, ?, ?, ?, ?)", rows)
        if buffers:
            database.executemany("insert into buffers values (?, ?, ?)", buffers)

    def _unusable(self, verb: str, error: Exception) -> QueueJournalError:
        return QueueJournalError(
            f"the journal {self.path} of queue {self._queue!r} cannot be {verb}: {error}. Make room, repair the disk, "
            "or end the process that uses it; what was acknowledged is in the file."
        )


class Journal:
    """The thread that commits records, and then calls the callbacks that wait for them.

    Args:
        file: owned and closed by the journal from now on.
        on_failure: called once, with the error, when the file can no longer be written. Nothing is written after that;
            callbacks are still called.
    """

    def __init__(self, file: JournalFile, queue: str, on_failure: Callable[[QueueJournalError], None]) -> None:
        self._file = file
        self._queue = queue
        self._on_failure = on_failure
        self._event = f"journal-answer-failed queue={queue}"
        self._changed = threading.Condition()
        self._records: list[messages.Record] = []
        self._callbacks: list[Callable[[], None]] = []
        self._is_writing = False
        self._is_broken = False
        self._is_closing = False
        self._thread = start_thread("queue-journal", self._run)

    @property
    def is_idle(self) -> bool:
        """True if everything that was given to `write` is committed."""
        return not (self._callbacks or self._is_writing)

    def check(self, items: Iterable[tuple[packed.Packed, int]]) -> None:
        """Check that the file can hold the items, before they enter the queue: a failed commit would end the queue."""
        most = self._file.most_bytes
        for item, nbytes in items:
            if nbytes > most and (found := packed.nbytes_of_largest(item)) > most:
                raise UsageError(
                    f"an item with {found} bytes in one piece cannot be put into queue {self._queue!r}, which is "
                    f"durable: its journal holds {most} at most. Put it in several pieces, or into a file and put "
                    "the file's name."
                )

    def write(self, records: Sequence[messages.Record], then: Callable[[], None]) -> None:
        """Commit these records after all earlier ones, then call `then` in the journal's thread. Never blocks.

        Calls must come in the order of the steps: hold the core's lock.
        """
        with self._changed:
            self._records += records
            self._callbacks.append(then)
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
        """Commit the records that have come; return False when there will be no more."""
        with self._changed:
            while not self._callbacks and not self._is_closing:
                self._changed.wait()
            records, self._records = self._records, []
            callbacks, self._callbacks = self._callbacks, []
            self._is_writing = bool(callbacks)
        if records and not self._is_broken:
            try:
                self._file.commit(records)
            except BaseException as error:
                self._is_broken = True
                call_guarded(self._event, self._on_failure, self._as_failure(error))
        self._is_writing = False
        for then in callbacks:
            call_guarded(self._event, then)
        return bool(callbacks)

    def _as_failure(self, error: BaseException) -> QueueJournalError:
        if isinstance(error, QueueJournalError):
            return error
        return QueueJournalError(
            f"the journal of queue {self._queue!r} cannot be written: {error!r}. What was acknowledged is in the file; "
            "what was put since then cannot be kept in it."
        )

"""The master's store: one SQLite file, one process, one transaction a step."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from unified.config import settings
from unified.config.mounts import network_file_system
from unified.errors import ClusterError
from unified.protocol.records import EventRecord
from unified_master.core.messages import ReportEvent, SaveRecord

logger = logging.getLogger("unified.master")
SCHEMA_VERSION = 2
MAX_EVENTS = 200_000
"""Number of lines of the event log that are kept."""
TRIM_EVERY = 10_000
"""Number of new lines after which the event log is cut to `MAX_EVENTS`."""
LEAST_FREE = 1 << 20
"""Free bytes of the disk below which a master begins nothing new: what runs still has to be recorded."""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_OF_THE_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_SCHEMA = """
create table records (kind text not null, key text not null, data blob not null, primary key (kind, key)) without rowid;
create table events (sequence integer primary key, job text not null, data blob not null);
"""


class StoreError(ClusterError):
    """The state directory cannot be used: another master has it, or its contents are not ours to read."""


class UnwritableStoreError(StoreError):
    """The disk is full or fails: a later write may succeed."""


class OtherStoreError(StoreError):
    """The state is damaged, or of another release or program: a restart of the master does not help."""


class Store:
    """The file ``master.sqlite`` of a state directory, which is made for this user only and locked for this process.
    In a directory that was there, which others may read, the files are for this user only.

    StoreError: another master uses it, or another version wrote it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "master.sqlite"
        self._witness = directory / "master.sqlite-commits"
        """Number of the last transaction that was acknowledged."""
        self._num_commits = 0
        try:
            settings.make_folder(directory)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(settings.unusable("the state directory", directory, error, "--state-dir")) from None
        self._take_lock()
        try:
            self._database = self._open()
            self._witness_file = os.open(self._witness, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError):
                where = Path(error.filename or self.directory)
                raise OtherStoreError(settings.unusable("the state", where, error, "--state-dir")) from None
            raise

    def commit(self, saves: Iterable[SaveRecord], reports: Iterable[ReportEvent]) -> None:
        """Write everything in one transaction; on return it is on disk. StoreError: nothing was written."""
        try:
            self._write(saves, reports, self._num_commits + 1)
        except sqlite3.Error as error:
            kind = UnwritableStoreError if error.sqlite_errorcode & 0xFF in _OF_THE_DISK else StoreError
            raise kind(
                f"{self.path} cannot be written: {error}. Make room, or repair the disk; workers run on meanwhile."
            ) from None
        self._num_commits += 1
        with contextlib.suppress(OSError):  # an older number is right, too, and finds less
            os.pwrite(self._witness_file, b"%019d\n" % self._num_commits, 0)

    def shortage(self) -> str:
        """Return the reason to begin nothing new, if too little of the disk is free; empty: there is enough."""
        try:
            found = os.statvfs(self.directory)
        except OSError:  # the next commit reports it
            return ""
        free = (found.f_bavail if os.getuid() else found.f_bfree) * found.f_frsize
        if free >= LEAST_FREE:
            return ""
        return f"the disk of its state is full: {self.directory} has {free >> 10} KiB left. Make room there."

    def _write(self, saves: Iterable[SaveRecord], reports: Iterable[ReportEvent], number: int) -> None:
        with self._database as database:  # commits, or rolls back
            database.execute("begin immediate")
            database.execute("replace into records values ('shell', 'commits', ?)", (b"%d" % number,))
            for save in saves:
                if save.data is None:
                    database.execute("delete from records where kind = ? and key = ?", (save.kind, save.key))
                else:
                    database.execute("replace into records values (?, ?, ?)", (save.kind, save.key, save.data))
            for report in reports:
                record = report.record
                data = msgspec.msgpack.encode(record)
                database.execute("replace into events values (?, ?, ?)", (record.sequence, record.job, data))
                if record.sequence % TRIM_EVERY == 0:
                    self._trim(database)

    def records(self) -> list[tuple[str, str, bytes]]:
        """Return everything that the core saved: kind, key, data."""
        query = "select kind, key, data from records where kind != 'shell' order by kind, key"
        return list(self._database.execute(query))

    def events(self) -> list[EventRecord]:
        """Return the event log, oldest first, after cutting it to `MAX_EVENTS`."""
        self._trim(self._database)
        rows = self._database.execute("select data from events order by sequence")
        try:
            return [msgspec.msgpack.decode(data, type=EventRecord) for (data,) in rows]
        except msgspec.DecodeError as error:
            raise OtherStoreError(
                f"the event log in {self.path} is damaged: {error}. Restore it from a copy."
            ) from None

    @staticmethod
    def _trim(database: sqlite3.Connection) -> None:
        database.execute("delete from events where sequence <= (select max(sequence) from events) - ?", (MAX_EVENTS,))

    def note(self, name: str) -> str:
        """Return the shell's note of this name; empty if there is none."""
        return _note(self._database, name)

    def write_note(self, name: str, text: str) -> None:
        """Keep a note of the shell beside the core's records, which never have the kind ``shell``."""
        self.commit([SaveRecord(kind="shell", key=name, data=text.encode())], [])

    def close(self) -> None:
        self._database.close()
        os.close(self._witness_file)
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise StoreError(
                f"the state directory {self.directory} is in use by another master (pid {owner}): "
                "stop that one, or give this one another --state-dir."
            ) from None
        except OSError as error:  # such as Lustre without its mount option `flock`
            os.close(self._lock)
            reason = f"the state directory {self.directory} is on a file system without locks ({error.strerror})"
            raise StoreError(f"{reason}: give another --state-dir, or have it mounted with locks.") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _open(self) -> sqlite3.Connection:
        try:
            is_new: bool | None = None
            if not self.path.exists() or not self.path.stat().st_size:
                self._compare(0)
            elif not os.access(self.path, os.W_OK):
                raise OtherStoreError(
                    f"{self.path} may not be written by this user: give the file, and those beside it, to the user of "
                    "the master, or give another --state-dir."
                )
            elif self.path.with_name("master.sqlite-wal").exists():
                # The last connection that may write moves the log into the file. A file that is refused stays as it is.
                with contextlib.closing(
                    sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)
                ) as reader:
                    is_new = self._check(reader)
            self._close_to_others()
            database = sqlite3.connect(self.path, isolation_level=None)
            try:
                self._prepare(database, self._check(database) if is_new is None else is_new)
            except BaseException:
                database.close()
                raise
        except sqlite3.Error as error:
            kind = OtherStoreError if error.sqlite_errorcode & 0xFF in _DAMAGED else StoreError
            raise kind(
                f"{self.path} cannot be read as the master's store: {error}. Restore a backup into a new "
                "--state-dir, or give an empty one (running workers will then be stopped)."
            ) from None
        return database

    def _close_to_others(self) -> None:
        """Make the file, and close those that were there: they have the environment of every job."""
        os.close(os.open(self.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for path in self.directory.glob(f"{self.path.name}*"):  # SQLite makes the files beside it with its mode
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)

    def _check(self, database: sqlite3.Connection) -> bool:
        """Return True if the file holds nothing yet. OtherStoreError: as in `_is_new` and `_compare`."""
        is_new = _is_new(database, self.path)
        self._num_commits = 0 if is_new else int(_note(database, "commits") or "0")
        self._compare(self._num_commits)
        return is_new

    def _compare(self, num_commits: int) -> None:
        """Raise OtherStoreError if transactions that were acknowledged are missing.

        SQLite itself takes a damaged log for one that ends there, and a missing one for an empty one.
        """
        with contextlib.suppress(OSError, ValueError):
            if (missing := int(self._witness.read_text()) - num_commits) > 0:
                raise OtherStoreError(
                    f"{self.path} lacks the last {missing} transactions of its master, because the file or the "
                    "write-ahead log beside it is damaged, missing or an older copy: restore a backup into a new "
                    f"--state-dir, or remove {self._witness} to go on with what is left (workers that it does not know "
                    "will then be stopped)."
                )

    def _prepare(self, database: sqlite3.Connection, is_new: bool) -> None:
        shared = network_file_system(self.directory)
        database.execute(f"pragma journal_mode = {'truncate' if shared else 'wal'}")
        if shared:
            logger.info("event=rollback-journal path=%s: no write-ahead log, as it is on %s", self.path, shared)
        # A decision must survive a power cut before it leaves the process.
        database.execute("pragma synchronous = full")
        if is_new:
            database.executescript(f"begin; {_SCHEMA} pragma user_version = {SCHEMA_VERSION}; commit;")


def back_up(directory: Path, target: Path) -> None:
    """Copy the store of a state directory to a new file, also while a master uses it.

    StoreError: there is no store, it is damaged, or the copy cannot be written; the target is never replaced.
    """
    path = directory / "master.sqlite"
    if target.exists():
        raise StoreError(f"{target} is there already, and a backup never replaces a file: give another name.")
    if not path.exists():
        raise StoreError(f"there is no master's store at {path}: give the --state-dir of the master.")
    part = target.with_name(f".{target.name}.part")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))  # it has all data of jobs
        with (
            contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as source,
            contextlib.closing(sqlite3.connect(part)) as copy,
        ):
            source.backup(copy)
            copy.execute("pragma journal_mode = delete")  # the copy is a single file
            _is_new(copy, path)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    except (sqlite3.Error, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"{path} could not be copied to {target}: {why}.") from None
    finally:
        part.unlink(missing_ok=True)


def _note(database: sqlite3.Connection, name: str) -> str:
    found = database.execute("select data from records where kind = 'shell' and key = ?", (name,)).fetchone()
    return bytes(found[0]).decode() if found else ""


def _is_new(database: sqlite3.Connection, path: Path) -> bool:
    """Return True if the file holds nothing yet. OtherStoreError: it is damaged, or not of this release or program."""
    (version,) = database.execute("pragma user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        raise OtherStoreError(
            f"{path} has schema version {version}, this release reads {SCHEMA_VERSION}: run the release that "
            "wrote it, or give another --state-dir."
        )
    (found,) = database.execute("pragma quick_check(1)").fetchone()
    if found != "ok":
        raise OtherStoreError(
            f"{path} is damaged ({found}): restore it from a backup (`unified-master --backup` makes them), or give "
            "another --state-dir to start with an empty one; workers that run will then be stopped."
        )
    tables = {name for (name,) in database.execute("select name from sqlite_schema")}
    if version == 0 and tables:
        raise OtherStoreError(f"{path} is a database of another program: give another --state-dir.")
    if version and (missing := {"records", "events"} - tables):
        raise OtherStoreError(
            f"{path} is damaged (it has no table {min(missing)}): restore a backup into a new --state-dir."
        )
    return bool(version == 0)

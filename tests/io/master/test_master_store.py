"""The master's file: what is committed is there again, and what cannot be used is refused in words."""

import os
import sqlite3
from pathlib import Path

import pytest

from unified.protocol.records import EventRecord
from unified_master.core.messages import ReportEvent, SaveRecord
from unified_master.store import SCHEMA_VERSION, Store, StoreError


def save(key: str, data: bytes | None) -> SaveRecord:
    return SaveRecord(kind="job", key=key, data=data)


def report(sequence: int) -> ReportEvent:
    return ReportEvent(record=EventRecord(at=1.5, event="job-placed", reason="fits", job="a-1", sequence=sequence))


def test_what_was_committed_is_there_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.commit([save("a", b"1"), save("b", b"2")], [report(1)])
    store.commit([save("a", b"3"), save("b", None)], [report(2)])
    store.close()
    again = Store(tmp_path / "state")
    assert again.records() == [("job", "a", b"3")]
    assert [event.sequence for event in again.events()] == [1, 2]
    assert again.events()[0] == report(1).record
    again.close()


def test_a_commit_is_all_or_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    bad = ReportEvent(record=EventRecord(at=0, event="x", reason="", sequence=2**70))
    with pytest.raises((StoreError, OverflowError)):
        store.commit([save("a", b"1")], [bad])
    assert store.records() == []
    store.commit([save("a", b"2")], [])
    assert store.records() == [("job", "a", b"2")]
    store.close()


def test_the_directory_belongs_to_one_master(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(StoreError, match=rf"in use by another master \(pid {os.getpid()}\)"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_the_directory_is_private(tmp_path: Path) -> None:
    Store(tmp_path / "state").close()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    database = sqlite3.connect(tmp_path / "master.sqlite")
    database.execute("pragma user_version = 99")
    database.close()
    with pytest.raises(StoreError, match=f"schema version 99, this release reads {SCHEMA_VERSION}"):
        Store(tmp_path)
    database = sqlite3.connect(tmp_path / "master.sqlite")
    database.execute(f"pragma user_version = {SCHEMA_VERSION}")
    database.close()
    Store(tmp_path).close()


def test_rubbish_in_place_of_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "master.sqlite").write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreError, match="cannot be read as the master's store"):
        Store(tmp_path)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "file" / "state")


def test_the_event_log_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_master.store.MAX_EVENTS", 10)
    monkeypatch.setattr("unified_master.store.TRIM_EVERY", 5)
    store = Store(tmp_path)
    for sequence in range(1, 43):
        store.commit([], [ReportEvent(record=EventRecord(at=0, event="e", reason="r", sequence=sequence))])
    store.close()
    database = sqlite3.connect(tmp_path / "master.sqlite")
    kept = [sequence for (sequence,) in database.execute("select sequence from events order by sequence")]
    database.close()
    assert kept == list(range(31, 43))

"""The master's file: what is committed is there again, and what cannot be used is refused in words."""

import os
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unified.protocol.records import EventRecord
from unified_master.core.messages import ReportEvent, SaveRecord
from unified_master.store import SCHEMA_VERSION, Store, StoreError, back_up


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


def test_a_store_is_copied_while_its_master_writes(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.commit([save("a", b"1")], [report(1)])
    back_up(tmp_path / "state", tmp_path / "copy.sqlite")
    assert (tmp_path / "copy.sqlite").stat().st_mode & 0o777 == 0o600
    store.commit([save("a", b"2"), save("b", b"3")], [report(2)])
    assert store.records() == [("job", "a", b"2"), ("job", "b", b"3")], "the master goes on"
    with pytest.raises(StoreError, match="a backup never replaces a file"):
        back_up(tmp_path / "state", tmp_path / "copy.sqlite")
    store.close()
    (tmp_path / "other").mkdir()
    (tmp_path / "copy.sqlite").rename(tmp_path / "other" / "master.sqlite")
    restored = Store(tmp_path / "other")
    assert restored.records() == [("job", "a", b"1")]
    assert [event.sequence for event in restored.events()] == [1]
    restored.close()
    with pytest.raises(StoreError, match="there is no master's store"):
        back_up(tmp_path / "nowhere", tmp_path / "copy.sqlite")
    assert not list(tmp_path.glob("*copy*"))


@pytest.mark.parametrize("damage", ["page", "version", "foreign"])
def test_a_file_that_is_refused_stays_as_it_is(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "master.sqlite"
    if damage == "foreign":
        with sqlite3.connect(path) as database:
            database.execute("create table recipes (name text)")
        database.close()
    else:
        store = Store(tmp_path)
        store.commit([save(f"job-{number}", bytes(3000)) for number in range(50)], [])
        store.close()
    if damage == "version":
        database = sqlite3.connect(path)
        database.execute("pragma journal_mode = delete")
        database.execute("pragma user_version = 99")
        database.close()
    if damage == "page":
        content = bytearray(path.read_bytes())
        content[8192:16384] = random.Random(1).randbytes(8192)
        path.write_bytes(content)
    before = path.read_bytes()
    said = {"page": "is damaged", "version": "schema version 99", "foreign": "a database of another program"}[damage]
    for _ in range(2):
        with pytest.raises(StoreError, match=said):
            Store(tmp_path)
    assert path.read_bytes() == before
    if damage == "page":
        with pytest.raises(StoreError, match=said):
            back_up(tmp_path, tmp_path / "copy.sqlite")


WRITER = """
import sys
from pathlib import Path
from unified_master.core.messages import SaveRecord
from unified_master.store import Store
store = Store(Path(sys.argv[1]))
known = dict((key, data) for _, key, data in store.records())
number = int(known.get("a", b"0"))
print(number, flush=True)
while True:
    number += 1
    store.commit([SaveRecord(kind="job", key=key, data=str(number).encode()) for key in "abc"], [])
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_transactions_and_all_that_it_told(tmp_path: Path) -> None:
    rng = random.Random(3)
    last = 0
    for _ in range(12):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert int(writer.stdout.readline()) >= last, "what was told is there again"
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        told = [line for line in writer.communicate()[0].splitlines(keepends=True) if line.endswith("\n")]
        last = max([last, *map(int, told)])
        store = Store(tmp_path)
        values = {int(data) for _, _, data in store.records()}
        store.close()
        assert len(values) <= 1, "half a transaction is there"
        assert max(values, default=0) >= last

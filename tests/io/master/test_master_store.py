"""The master's file: what is committed is there again, and what cannot be used is refused in words."""

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.deadlines import missed
from tests.support.master_process import StartMaster
from unified.client.connection import MasterConnection
from unified.errors import MasterUnreachableError
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.client_master import Accepted, JobList, ListJobs, SubmitJob
from unified.protocol.records import EventRecord
from unified_master.core.messages import ReportEvent, SaveRecord
from unified_master.store import SCHEMA_VERSION, OtherStoreError, Store, StoreError, back_up


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


def test_files_in_a_directory_that_others_may_read_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory was there before, and so was a store that an earlier release left open to all."""
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        store = Store(tmp_path)
        store.commit([save("a", b"1")], [])
        modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()}
        assert modes == dict.fromkeys(modes, 0)
        assert {"master.sqlite", "master.sqlite-wal", "master.sqlite-shm"} <= modes.keys()
        store.close()
        (tmp_path / "master.sqlite").chmod(0o644)
        Store(tmp_path).close()
        assert (tmp_path / "master.sqlite").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    (tmp_path / "master.sqlite").chmod(0o644)
    monkeypatch.setattr(Path, "chmod", lambda *_: os.chmod("/proc/self/none", 0))
    with pytest.raises(OtherStoreError, match="cannot be used"):  # nobody runs with a store that others can read
        Store(tmp_path)


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, 99])
def test_a_store_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path, version: int) -> None:
    Store(tmp_path).close()
    database = sqlite3.connect(tmp_path / "master.sqlite")
    database.execute(f"pragma user_version = {version}")
    database.close()
    before = (tmp_path / "master.sqlite").read_bytes()
    with pytest.raises(OtherStoreError, match=f"schema version {version}, this release reads {SCHEMA_VERSION}"):
        Store(tmp_path)
    assert (tmp_path / "master.sqlite").read_bytes() == before
    database = sqlite3.connect(tmp_path / "master.sqlite")
    database.execute(f"pragma user_version = {SCHEMA_VERSION}")
    database.close()
    Store(tmp_path).close()


def test_rubbish_in_place_of_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "master.sqlite").write_bytes(b"not a database" * 1000)
    with pytest.raises(OtherStoreError, match="cannot be read as the master's store"):
        Store(tmp_path)


def test_a_store_that_is_cut_off_is_refused_as_one_that_no_start_can_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.commit([SaveRecord(kind="k", key=str(number), data=bytes(1000)) for number in range(100)], [])
    store.close()
    path = tmp_path / "master.sqlite"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(OtherStoreError, match="cannot be read as the master's store"):
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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("master.sqlite-wal", flip),
        ("master.sqlite-wal", lambda path: os.truncate(path, path.stat().st_size // 2)),
        ("master.sqlite-wal", lambda path: os.truncate(path, 0)),
        ("master.sqlite-wal", Path.unlink),
        ("master.sqlite", lambda path: os.truncate(path, 0)),
        ("master.sqlite", Path.unlink),
    ],
    ids=["a bit", "half of the log", "an empty log", "no log", "an empty file", "no file"],
)
def test_transactions_that_were_acknowledged_and_are_not_there_are_noticed(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    store = Store(tmp_path / "state")
    for number in range(30):
        store.commit([save("a", b"%d" % number)], [report(number)])
    for copy in ("killed", "damaged"):  # the files as a master leaves them that is killed
        shutil.copytree(tmp_path / "state", tmp_path / copy)
    store.close()
    again = Store(tmp_path / "killed")
    assert again.records() == [("job", "a", b"29")]
    again.close()
    damage(tmp_path / "damaged" / file)
    kept = [path for path in (tmp_path / "damaged").glob("master.sqlite*") if not path.name.endswith("shm")]
    before = {path: path.read_bytes() for path in kept}
    for _ in range(2):
        with pytest.raises(OtherStoreError, match=r"lacks the last \d+ transactions of its master"):
            Store(tmp_path / "damaged")
    assert {path: path.read_bytes() for path in before} == before
    (tmp_path / "damaged" / "master.sqlite-commits").unlink()
    Store(tmp_path / "damaged").close()  # as the error says


def test_a_master_whose_log_is_damaged_ends_with_78_and_a_sentence(start_master: StartMaster, tmp_path: Path) -> None:
    role = RoleSpec(name="r", kind="simple", entry_point=EntryPoint(kind="module", target="x"), total=2)
    first = start_master()
    with MasterConnection(first.address, timeout_s=100) as connection:
        for name in "abc":
            connection.ask(SubmitJob(spec=JobSpec(name=name, roles=[role])), Accepted)
    first.kill()
    flip(tmp_path / "state/master.sqlite-wal")
    second = start_master()
    assert second.process.wait(100) == os.EX_CONFIG
    (line,) = [line for line in second.log.read_text().splitlines() if "lacks the last" in line]
    assert line.startswith("unified-master: ")


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


@pytest.mark.parametrize("shared", ["", pytest.param("nfs4", marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_leaves_whole_transactions_and_all_that_it_told(tmp_path: Path, shared: str) -> None:
    """Also where a write-ahead log cannot be: the list of mounts is a fake, since nothing here mounts NFS."""
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"22 1 0:2 / / rw - ext4 /dev/sda rw\n23 22 0:3 / {tmp_path}/state rw - {shared or 'ext4'} nas:/x rw\n"
    )
    writer_program = f"import pathlib, unified.config.mounts as m; m.MOUNTS = pathlib.Path({str(mounts)!r})\n{WRITER}"
    state = tmp_path / "state"
    rng = random.Random(3)
    last = 0
    for _ in range(50 if shared else 12):
        writer = subprocess.Popen([sys.executable, "-c", writer_program, str(state)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert int(writer.stdout.readline()) >= last, "what was told is there again"
        assert (state / "master.sqlite-wal").exists() == (not shared)
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        told = [line for line in writer.communicate()[0].splitlines(keepends=True) if line.endswith("\n")]
        last = max([last, *map(int, told)])
        with contextlib.closing(sqlite3.connect(state / "master.sqlite")) as database:  # in the mode that it has
            values = {int(data) for (data,) in database.execute("select data from records where kind = 'job'")}
        assert len(values) <= 1, "half a transaction is there"
        assert max(values, default=0) >= last


MASTER = """
import pathlib, sys
import unified.config.mounts
unified.config.mounts.MOUNTS = pathlib.Path({mounts!r})
from unified_master.cli import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_master_on_a_network_file_system_that_is_killed_loses_no_job_that_it_took(
    start_master: StartMaster, tmp_path: Path
) -> None:
    """The list of mounts is a fake, since nothing here mounts NFS."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"22 1 0:2 / / rw - ext4 /dev/sda rw\n23 22 0:3 / {tmp_path}/state rw - nfs4 nas:/x rw\n")
    program = ["-c", MASTER.format(mounts=str(mounts))]
    role = RoleSpec(name="r", kind="simple", entry_point=EntryPoint(kind="module", target="x"), total=2)
    rng = random.Random(5)
    taken: list[str] = []
    for _ in range(50):
        master = start_master(program=program)
        with MasterConnection(master.address, timeout_s=100) as connection:
            known = [job.job_id for job in connection.ask(ListJobs(), JobList).jobs]
            assert set(taken) <= set(known)
            killer = threading.Timer(rng.uniform(0, 0.15), master.process.kill)
            killer.start()
            with contextlib.suppress(MasterUnreachableError):
                while True:
                    spec = JobSpec(name=f"j{len(known)}-{len(taken)}", roles=[role])
                    taken.append(connection.ask(SubmitJob(spec=spec), Accepted, timeout_s=missed(1.0)).job_id)
            killer.join()
            master.kill()
    assert not list((tmp_path / "state").glob("*-wal"))
    assert "event=rollback-journal" in master.log.read_text()
    assert len(taken) > 10

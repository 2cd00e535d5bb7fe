"""The journal remembers what the queue decided: after any history, the same as a journal kept in plain dicts."""

import random
import sqlite3
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support.deadlines import met
from tests.support.queue_core import JournalModel, Story
from unified.bus.codec.serialized import SerializedValue
from unified.errors import QueueJournalError, UsageError
from unified.queue.core.messages import (
    Action,
    AnswerGet,
    AnswerPut,
    CloseAsked,
    ConsumerEnded,
    Event,
    HandleClosed,
    IncarnationEnded,
    Item,
    JournalState,
    Outcome,
    Record,
    SaveHandle,
    SaveItems,
    TakeReturned,
)
from unified.queue.items import pack, unpack
from unified.queue.journal import ROW_BYTES, Journal, JournalClocks, JournalFile
from unified.queue.server import QueueService
from unified.testing import eventually

DEADLINE_S = met(100.0)


class Written(Story):
    """A story whose records go to a file as well, a few at a time."""

    def __init__(self, file: JournalFile, size: int) -> None:
        super().__init__(size, is_durable=True)
        self.file = file
        self.waiting_records: list[Record] = []

    def tell(self, event: Event, after_s: float = 0.0) -> list[Action]:
        actions = super().tell(event, after_s)
        self.waiting_records += [each for each in actions if not isinstance(each, AnswerPut | AnswerGet)]
        return actions

    def commit(self) -> None:
        self.file.commit(self.waiting_records)
        self.waiting_records = []


def content(memory: JournalState) -> object:
    """Comparable: order by id wherever order says nothing."""
    return (
        sorted((each.handle, each.worker, each.incarnation) for each in memory.handles),
        sorted((each.handle, each.number, each.num_in, each.outcome) for each in memory.puts),
        [(each.item_id, each.payload, each.nbytes) for each in memory.items],
        sorted((each.handle, each.consumer, each.number, each.item_ids, each.num_done) for each in memory.leases),
        memory.is_closed,
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_history_is_remembered(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    clocks = JournalClocks(monotonic=lambda: 100.0, wall=lambda: 5000.0)
    tale = Written(JournalFile(tmp_path / "q.sqlite", "q", clocks=clocks), size=4)
    numbers = dict.fromkeys((11, 12, 21, 31), 0)
    for handle in (1, 2, 3):
        tale.attach(handle)
    for step in range(150):
        consumer = chance.choice(list(numbers))
        match chance.randrange(9):
            case 0 | 1 | 2:
                items = [f"{step}.{i}".encode() for i in range(chance.randint(1, 6))]
                tale.put(chance.randint(1, 3), step, *items, below=chance.randint(0, step))  # type: ignore[arg-type]
            case 3 | 4 | 5:
                numbers[consumer] += 1
                tale.get(consumer, numbers[consumer], chance.randint(1, 4), wait_s=0)
            case 6:
                tale.done(consumer, numbers[consumer], chance.choice([None, 1, 2]))
            case 7:
                number = numbers[consumer]
                tale.tell(TakeReturned(handle=consumer // 10, consumer=consumer, number=number, received=number - 1))
            case 8 if chance.random() < 0.2:
                handle = chance.randint(1, 3)
                ends: list[Event] = [
                    HandleClosed(handle=handle),
                    IncarnationEnded(worker=f"w{handle}", incarnation=step - 1),
                ]
                tale.tell(chance.choice(ends))
                tale.attach(handle, worker=f"w{handle}", incarnation=step)
            case 8:
                tale.tell(ConsumerEnded(handle=consumer // 10, consumer=consumer, received=numbers[consumer]))
        if chance.random() < 0.3:
            tale.commit()
    if seed % 3 == 0:
        tale.tell(CloseAsked())
    tale.commit()
    assert tale.journal.items or seed % 3 == 0
    tale.file.close()
    again = JournalFile(tmp_path / "q.sqlite", "q", clocks=clocks)
    assert content(again.memory()) == content(tale.journal.memory())
    assert again.journal_id == tale.file.journal_id
    again.close()


def test_large_items_come_back_whole_and_with_their_age(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    value = {"a": np.arange(40_000), "b": np.ones((300, 400), dtype=np.float32), "c": "text"}
    packed = pack(value)
    assert isinstance(packed, SerializedValue)
    file = JournalFile(path, "q", clocks=JournalClocks(monotonic=lambda: 10.0, wall=lambda: 1000.0))
    file.commit([SaveItems(items=[Item(3, packed, packed.nbytes, 7.0), Item(4, b"\x01", 1, 8.0)])])
    file.close()
    again = JournalFile(path, "q", clocks=JournalClocks(monotonic=lambda: 500.0, wall=lambda: 1060.0))
    first, second = again.memory().items
    again.close()
    assert (first.item_id, first.nbytes, first.put_at) == (3, packed.nbytes, 500 - 63)
    assert second.payload == b"\x01"
    found = unpack(first.payload, is_only=True)
    np.testing.assert_array_equal(found["a"], value["a"])
    np.testing.assert_array_equal(found["b"], value["b"])
    assert found["c"] == "text"


def test_a_file_has_one_owner_and_one_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified.queue.journal.BUSY_S", 0.05)
    path = tmp_path / "folder" / "q.sqlite"
    file = JournalFile(path, "q")
    with pytest.raises(QueueJournalError, match="locked"):
        JournalFile(path, "q")
    file.close()
    with pytest.raises(QueueJournalError, match="is the journal of queue 'q', not of 'other'"):
        JournalFile(path, "other")
    JournalFile(path, "q").close()


def test_a_file_that_is_none_or_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(QueueJournalError, match="not a database"):
        JournalFile(path, "q")
    path.unlink()
    JournalFile(path, "q").close()
    database = sqlite3.connect(path)
    database.execute("pragma user_version = 99")
    database.close()
    with pytest.raises(QueueJournalError, match="version 99"):
        JournalFile(path, "q")
    with pytest.raises(QueueJournalError, match="cannot be opened"):
        JournalFile(path / "below a file", "q")


def test_nobody_is_told_before_the_commit_and_everybody_after_it(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "q.sqlite", "q", fsync=True)
    journal = Journal(file, "q", on_failure=lambda error: None)
    seen: list[tuple[int, int]] = []
    done = threading.Event()
    commit, may_commit = file.commit, threading.Event()

    def slow(records: list[Record]) -> None:
        may_commit.wait(DEADLINE_S)
        commit(records)

    file.commit = slow  # type: ignore[method-assign,assignment]
    for number in range(50):
        record = SaveItems(items=[Item(number, b"x", 1, 0.0)])

        def then(number: int = number) -> None:
            (count,) = file._database.execute("select count(*) from items").fetchone()
            seen.append((number, count))
            if number == 49:
                done.set()

        journal.write([record], then)
    assert not journal.is_idle
    assert not seen
    may_commit.set()
    assert done.wait(DEADLINE_S)
    assert [number for number, _ in seen] == list(range(50))
    assert all(count > number for number, count in seen)
    journal.close()


def test_what_was_told_before_the_end_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    journal = Journal(JournalFile(path, "q"), "q", on_failure=lambda error: None)
    for number in range(20):
        journal.write([SaveItems(items=[Item(number, b"x", 1, 0.0)])], lambda: None)
    journal.close()
    journal.close()
    again = JournalFile(path, "q")
    assert len(again.memory().items) == 20
    again.close()


def test_a_failure_is_told_once_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "q.sqlite", "q")
    failures: list[QueueJournalError] = []
    journal = Journal(file, "q", on_failure=failures.append)
    file._database.execute("drop table puts")
    file._database.execute("drop table items")
    told = [threading.Event() for _ in range(3)]
    for each in told:
        journal.write([SaveItems(items=[Item(1, b"x", 1, 0.0)])], each.set)
    assert all(each.wait(DEADLINE_S) for each in told)
    journal.close()
    assert len(failures) == 1
    assert "cannot be written" in str(failures[0])


def test_what_the_file_cannot_hold_fails_the_queue_and_not_the_thread(tmp_path: Path) -> None:
    failures: list[QueueJournalError] = []
    journal = Journal(JournalFile(tmp_path / "q.sqlite", "q"), "q", on_failure=failures.append)
    told = [threading.Event() for _ in range(2)]
    journal.write([SaveHandle(handle=2**63, worker="w", incarnation=0)], told[0].set)  # no sqlite3.Error
    journal.write([SaveItems(items=[Item(1, b"x", 1, 0.0)])], told[1].set)
    assert all(each.wait(DEADLINE_S) for each in told)
    assert eventually(lambda: journal.is_idle)
    journal.close()
    [failure] = failures
    assert "queue 'q' cannot be written: OverflowError" in str(failure)


def test_a_callback_that_ends_its_thread_does_not_end_that_of_the_journal(tmp_path: Path) -> None:
    def end_thread(_: object = None) -> None:
        raise SystemExit

    told = threading.Event()
    journal = Journal(JournalFile(tmp_path / "q.sqlite", "q"), "q", on_failure=end_thread)
    journal.write([SaveItems(items=[Item(1, b"x", 1, 0.0)])], end_thread)
    journal.write([SaveItems(items=[Item(2, b"x", 1, 0.0)])], told.set)
    assert told.wait(DEADLINE_S)
    told.clear()
    journal.write([SaveItems(items=[Item(2, b"x", 1, 0.0)])], told.set)  # there is one with this id
    assert told.wait(DEADLINE_S)
    journal.close()
    again = JournalFile(tmp_path / "q.sqlite", "q")
    assert [item.item_id for item in again.memory().items] == [1, 2]
    again.close()


def test_whoever_is_told_first_keeps_nobody_from_being_told(tmp_path: Path) -> None:
    service = QueueService("q", size=1, journal=tmp_path / "q.sqlite")
    service.attach(1, "w", 0).result(DEADLINE_S)
    service.put(1, 0, 0, [b"0"], 0.0, False).result(DEADLINE_S)
    waiting = [service.put(1, number, 0, [b"x"], DEADLINE_S, False) for number in (1, 2)]
    waiting[0].add_done_callback(lambda _: sys.exit("of a user's"))
    service.close()  # answers both at once
    for each in waiting:
        assert each.result(DEADLINE_S) == [int(Outcome.CLOSED), 0]
    assert service.stats()["is_closed"]
    service.get(1, 11, 1, 0, 1, 0.0).result(DEADLINE_S)
    service.shut_down()


def test_an_item_that_is_too_large_for_a_row_does_not_come_into_the_queue(tmp_path: Path) -> None:
    service = QueueService("q", size=9, journal=tmp_path / "q.sqlite")
    assert service._journal is not None
    file = service._journal._file
    file._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)  # it takes 1 GB otherwise
    file.most_bytes = 100_000 - ROW_BYTES
    service.attach(1, "w", 0).result(DEADLINE_S)
    fits, does_not = ([np.zeros(size, "u1"), np.zeros(70_000, "u1")] for size in (file.most_bytes, file.most_bytes + 1))
    for too_large in (pack(does_not), bytes(100_000)):
        with pytest.raises(UsageError, match=r"cannot be put into queue 'q', .* its journal holds 99900"):
            service.put(1, 0, 0, [b"small", too_large], 0.0, False)
    service.put(1, 1, 0, [pack(fits)], 0.0, False).result(DEADLINE_S)
    assert service.stats()["depth"] == 1
    service.shut_down()


def test_model_and_file_agree_on_nothing(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "q.sqlite", "q")
    assert content(file.memory()) == content(JournalModel().memory())
    file.close()

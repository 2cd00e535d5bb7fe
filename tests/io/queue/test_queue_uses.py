"""The uses of queues that a worker reports: by thread, with the waits that last."""

import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.deadlines import missed
from tests.support.queue_members import DEADLINE_S, Member, begun
from unified.errors import QueueNotFoundError
from unified.protocol.records import Progress, QueueUse
from unified.protocol.worker_agent import Reported
from unified.queue import consumer as consumers
from unified.queue import producer as producers
from unified.queue.consumer import end_main_thread
from unified.testing import eventually
from unified.worker import progress
from unified.worker.progress import Reporter

SHORT_S = missed(0.1)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (consumers, producers):
        monkeypatch.setattr(module, "SLICE_S", SHORT_S)
    monkeypatch.setattr(progress, "QUEUES_S", SHORT_S)
    for uses in progress.QUEUE_USES.values():  # of earlier tests in this process
        uses.clear()
    progress.QUEUE_STATS.clear()


@pytest.fixture
def reported() -> Iterator[list[list[QueueUse]]]:
    """What the worker reports, one after the other."""
    found: list[list[QueueUse]] = []

    def take(word: Reported) -> None:
        assert word.progress == Progress(queues=word.progress.queues, load=word.progress.load)
        found.append(word.progress.queues)

    reporter = Reporter(take)
    reporter.watch_queues()
    yield found
    reporter._queue_timer.close()
    reporter._timer.close()


def newest(reported: list[list[QueueUse]], *uses: tuple[str, str, str, bool]) -> bool:
    return eventually(lambda: reported[-1:] == [[QueueUse(*use) for use in uses]], DEADLINE_S, f"{reported[-1:]}")  # type: ignore[arg-type]


def test_each_thread_with_its_long_waits(owner: Member, producer: Member, reported: list[list[QueueUse]]) -> None:
    ours, theirs = owner.queue(is_master=True, size=1), producer.queue()
    theirs.put(1)
    assert newest(reported, ("", "puts", "q", False))
    waiting = threading.Thread(target=theirs.put, args=[2], name="waiting")
    waiting.start()
    assert newest(reported, ("", "puts", "q", False), ("waiting", "puts", "q", True))
    assert ours.get() == [1]
    waiting.join()
    gets, puts = ("", "gets", "q", False), ("", "puts", "q", False)
    assert newest(reported, gets, puts)
    assert ours.get() == [2]
    empty = threading.Thread(target=theirs.get, name="empty")
    empty.start()
    assert newest(reported, gets, puts, ("empty", "gets", "q", True))
    ours.put_async(3).result(DEADLINE_S)
    empty.join()
    end_main_thread()
    assert newest(reported), "threads that have ended, and the main thread after its program, use no queue"


def test_an_owner_reports_what_is_in_its_queues(owner: Member, producer: Member) -> None:
    told: list[Reported] = []
    reporter = Reporter(told.append)
    ours = owner.queue(is_master=True, size=4)
    producer.queue().put(1, 2)
    reporter.watch_queues()
    try:
        eventually(lambda: told and told[-1].progress.load is not None, DEADLINE_S, "no load was reported")
        load = told[-1].progress.load
        assert load is not None
        assert (load.memory_mb > 1, load.cpu >= 0.0) == (True, True)
        depth, size, oldest_at = load.queues["q"]
        assert (depth, size) == (2, 4)
        assert abs(oldest_at - time.time()) < 1000
        ours.close()
        ours.get(2)
        eventually(lambda: not told[-1].progress.load.queues, DEADLINE_S, "a closed and empty queue is none")  # type: ignore[union-attr]
    finally:
        reporter._queue_timer.close()
        reporter._timer.close()


def test_a_wait_that_its_time_ends(owner: Member, producer: Member, reported: list[list[QueueUse]]) -> None:
    owner.queue(is_master=True)
    theirs = producer.queue()
    waiting = begun(theirs.get, timeout=20 * SHORT_S)
    eventually(lambda: any(use.waits for uses in reported for use in uses), DEADLINE_S)
    assert waiting.result(DEADLINE_S) == []
    assert newest(reported)


def test_a_wait_for_an_owner_is_none_at_a_queue(producer: Member, reported: list[list[QueueUse]]) -> None:
    theirs = producer.queue()
    for _ in range(2):
        assert begun(theirs.get, timeout=3 * SHORT_S).result(DEADLINE_S) == []
        with pytest.raises(QueueNotFoundError):
            begun(theirs.put, 1, timeout=3 * SHORT_S).result(DEADLINE_S)
    assert not any(use.waits for uses in reported for use in uses)

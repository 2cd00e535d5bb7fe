"""What becomes of a queue when those who use it, or its owner, die."""

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.deadlines import missed
from tests.support.queue_members import DEADLINE_S, Member, QueueWorld, begun
from unified.core.directory import IncarnationDied
from unified.errors import (
    QueueClosedError,
    QueueJournalError,
    QueueLostError,
    QueueNotFoundError,
    UsageError,
    WorkerDiedError,
)
from unified.protocol.records import Reachability
from unified.queue import owner_lookup
from unified.queue.server import host_of
from unified.testing import eventually


def journal_file(owner: Member) -> Any:
    service = host_of(owner.bus).find("q")
    assert service is not None
    assert service._journal is not None
    return service._journal._file


def test_owner_that_dies_takes_the_queue_with_it(
    world: QueueWorld, owner: Member, producer: Member, consumer: Member
) -> None:
    mine = owner.queue(is_master=True)
    theirs, theirs_too, ours = producer.queue(), producer.queue(), consumer.queue()
    theirs.put(1)
    assert ours.get(1) == [1]
    assert theirs_too.qsize() == 0
    waiting = begun(consumer.queue().get, 1)
    eventually(lambda: mine.stats().waiting_consumers == 1)
    owner.die("killed by SIGKILL")
    with pytest.raises(QueueLostError, match=r"incarnation 0 of its owner, worker a, ended \(killed by SIGKILL\)"):
        waiting.result(DEADLINE_S)
    for use in (lambda: theirs.put(4), lambda: theirs.put_async(5).result(DEADLINE_S), lambda: theirs_too.get(1)):
        with pytest.raises(WorkerDiedError, match="what was in it is gone"):
            use()
    again = world.worker("a", 1).queue(is_master=True)
    again.put(6)
    with pytest.raises(QueueLostError, match="Worker a has made the queue anew: a new DataQueue object uses that one"):
        ours.get(1)
    assert consumer.queue().get(1) == [6]


def test_blocked_puts_end_with_the_owner(owner: Member, producer: Member) -> None:
    mine = owner.queue(is_master=True, size=1)
    theirs = producer.queue()
    theirs.put(1)
    blocked = [theirs.put_async(number) for number in range(3)]
    waiting = begun(theirs.put, 4)
    eventually(lambda: mine.stats().waiting_producers == 4)
    owner.die()
    for future in [*blocked, waiting]:
        with pytest.raises(QueueLostError):
            future.result(DEADLINE_S)


def test_a_put_that_waits_dies_with_its_producer(owner: Member, producer: Member, other: Member) -> None:
    mine = owner.queue(is_master=True, size=1)
    theirs, ours = producer.queue(), other.queue()
    theirs.put(1)
    lost, behind = theirs.put_async(2), ours.put_async(3)
    eventually(lambda: mine.stats().waiting_producers == 2)
    producer.die()
    with pytest.raises(Exception, match="closed"):
        lost.result(DEADLINE_S)
    assert [mine.get(1), mine.get(1)] == [[1], [3]]
    behind.result(DEADLINE_S)


def test_an_incarnation_that_was_declared_dead_is_told(owner: Member, consumer: Member) -> None:
    mine = owner.queue(is_master=True)
    ours = consumer.queue()
    mine.put(1)
    assert ours.get(1) == [1]
    death = IncarnationDied(consumer.bus.worker, 0, "node n1 was lost", "n1", consumer.entry.inbox)
    host_of(owner.bus)._on_directory([death])  # the consumer itself goes on, cut off or stopped for a while
    assert mine.qsize() == 1
    with pytest.raises(QueueLostError, match="this worker's incarnation 0 was declared dead"):
        ours.get(1)
    assert mine.get(1) == [1]


@pytest.fixture
def durable(tmp_path: Path) -> dict[str, Any]:
    return {"is_master": True, "durable": True, "path": tmp_path / "q.sqlite"}


def test_durable_queue_goes_on_in_the_owners_next_incarnation(
    world: QueueWorld, owner: Member, producer: Member, consumer: Member, durable: dict[str, Any]
) -> None:
    owner.queue(size=4, **durable).put("mine", np.arange(50_000))
    theirs, ours = producer.queue(), consumer.queue()
    theirs.put("a", {"b": 1})
    blocked = [theirs.put_async(number) for number in range(3)]
    assert ours.get(1) == ["mine"]
    waiting = begun(theirs.put, 3, 4)
    owner.die()
    got = begun(ours.get, 2)  # done with "mine"
    again = world.worker("a", 1).queue(size=4, **durable)
    array, text = got.result(DEADLINE_S)
    np.testing.assert_array_equal(array, np.arange(50_000))
    assert text == "a"
    rest: list[Any] = []
    while len(rest) < 6:
        rest += ours.get(10)
    assert rest[0] == {"b": 1}
    assert sorted(rest[1:]) == [0, 1, 2, 3, 4]
    assert rest.index(0) < rest.index(1) < rest.index(2)
    for future in [*blocked, waiting]:
        assert future.result(DEADLINE_S) is None
    ours.task_done()
    eventually(lambda: again.stats().leased == 0)
    assert again.qsize() == 0


def test_leases_outlive_the_owner_of_a_durable_queue(
    world: QueueWorld, owner: Member, first: Member, second: Member, durable: dict[str, Any]
) -> None:
    mine = owner.queue(**durable)
    mine.put(*range(6))
    theirs, ours = first.queue(), second.queue()
    assert theirs.get(2) == [0, 1]
    assert ours.get(2) == [2, 3]
    assert mine.get(1) == [4]  # the owner's own take ends with its incarnation
    owner.die()
    second.die()
    again = world.worker("a", 1).queue(**durable)
    assert again.stats().leased == 2
    assert again.get(9) == [2, 3, 4, 5]
    theirs.task_done(1)
    theirs.give_back()
    assert again.get(9) == [1]


def test_deaths_while_there_was_no_owner_are_heard_of(
    world: QueueWorld, owner: Member, first: Member, second: Member, durable: dict[str, Any]
) -> None:
    owner.queue(**durable).put(1, 2)
    assert (first.queue().get(1), second.queue().get(1)) == ([1], [2])
    owner.die()
    again = world.worker("a", 1)
    second.die(is_final=True)
    first.die()
    world.worker("b", 1)
    assert again.queue(**durable).get(5) == [1, 2]


def test_durable_queue_that_was_closed_stays_closed(
    world: QueueWorld, owner: Member, consumer: Member, durable: dict[str, Any]
) -> None:
    owner.queue(**durable).put(1, 2)
    ours = consumer.queue()
    assert ours.get(1) == [1]
    ours.close()
    owner.die()
    again = world.worker("a", 1).queue(**durable)
    with pytest.raises(QueueClosedError):
        again.put(3)
    assert list(ours) == [2]


def test_a_journal_that_did_not_come_along_is_missed(
    world: QueueWorld, owner: Member, producer: Member, durable: dict[str, Any], tmp_path: Path
) -> None:
    owner.queue(**durable).put(1)
    theirs = producer.queue()
    theirs.put(2)
    owner.die()
    pending = theirs.put_async(3)
    elsewhere = {**durable, "path": tmp_path / "elsewhere.sqlite"}
    for incarnation in (1, 2):  # an incarnation that finds none leaves none for the next
        worker = world.worker("a", incarnation)
        with pytest.raises(
            QueueJournalError, match=rf"was {re.escape(str(durable['path']))} on node n1, and this worker"
        ):
            worker.queue(**elsewhere)
        worker.die()
    world.worker("a", 3).queue(**{**elsewhere, "durable": "anew"})
    with pytest.raises(QueueLostError, match="without its journal"):
        pending.result(DEADLINE_S)


def test_an_owner_that_ended_for_good_is_not_waited_for(
    owner: Member, producer: Member, consumer: Member, durable: dict[str, Any]
) -> None:
    owner.queue(**durable).put(1)
    theirs, ours = producer.queue(owner_timeout=missed(0.2)), consumer.queue(owner_timeout=missed(0.2))
    theirs.put(2)
    assert ours.get(1) == [1]
    owner.die("the job has no restarts left", is_final=True)
    with pytest.raises(QueueNotFoundError, match="no next one has made it again"):
        theirs.put(3)
    with pytest.raises(QueueNotFoundError):
        ours.get(1)


def test_default_place_of_a_journal_is_beside_the_logs(owner: Member) -> None:
    owner.queue("a/b c", is_master=True, durable=True).put(1)
    assert [file.name for file in Path(owner.log_file).parent.parent.glob("queues/*.sqlite")] == ["a%2Fb%20c.sqlite"]
    owner.log_file = ""
    with pytest.raises(UsageError, match="give it a path="):
        owner.queue("other", is_master=True, durable=True)


def test_a_queue_that_could_not_be_made_is_free_for_others(
    first: Member, second: Member, durable: dict[str, Any]
) -> None:
    durable["path"].mkdir()
    with pytest.raises(QueueJournalError, match="cannot be opened"):
        first.queue(**durable)
    eventually(lambda: second.names.holder("queue/q") is None)
    second.queue(is_master=True).put(1)
    assert first.queue().get(1) == [1]


def test_a_disk_that_fails_ends_the_queue_with_an_error(
    owner: Member, producer: Member, consumer: Member, durable: dict[str, Any]
) -> None:
    mine = owner.queue(**durable)
    theirs, ours = producer.queue(), consumer.queue()
    theirs.put(1)
    waiting = [begun(ours.get, 1), begun(consumer.queue().get, 1)]
    eventually(lambda: mine.stats().waiting_consumers == 1)
    eventually(lambda: any(each.done() for each in waiting))  # what is committed by then is answered
    journal_file(owner)._database.execute("drop table items")
    with pytest.raises(QueueJournalError, match="cannot be written: no such table"):
        theirs.put(2)
    ended = [each.exception(DEADLINE_S) or each.result() for each in waiting]
    assert sorted(type(each).__name__ for each in ended)[1] == "list"
    assert any(isinstance(each, QueueJournalError) for each in ended)
    with pytest.raises(QueueJournalError):
        mine.get_nowait()


def test_an_item_that_is_too_large_for_a_journal_is_refused_and_the_queue_goes_on(
    owner: Member, producer: Member, durable: dict[str, Any]
) -> None:
    mine, theirs = owner.queue(**durable), producer.queue()
    journal_file(owner).most_bytes = 1000
    for queue in (mine, theirs):
        for put in (queue.put, lambda item, queue=queue: queue.put_async(item).result(DEADLINE_S)):
            with pytest.raises(UsageError, match="bytes in one piece cannot be put into queue 'q'"):
                put(bytes(2000))
        queue.put(b"small")
    assert mine.get(9, DEADLINE_S) == [b"small", b"small"]


def test_a_disk_that_hangs_holds_nobody_longer_than_the_time_he_gave(
    owner: Member, producer: Member, durable: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, also_mine = owner.queue(owner_timeout=missed(0.1), **durable), owner.queue()
    theirs = producer.queue()
    theirs.put("a")
    assert also_mine.qsize() == 1
    file, hangs, goes_on = journal_file(owner), threading.Event(), threading.Event()
    commit = file.commit

    def hang(records: Any) -> None:
        hangs.set()
        goes_on.wait(DEADLINE_S)
        commit(records)

    file.commit = hang
    with monkeypatch.context() as while_it_hangs:
        while_it_hangs.setattr(owner_lookup, "GRACE_S", missed(0.2))
        for queue in (also_mine, mine, theirs):
            with pytest.raises(QueueNotFoundError, match=r"worker a, .* its journal's disk hangs"):
                begun(queue.put, "b", timeout=missed(0.1)).result(DEADLINE_S / 2)
        assert hangs.is_set()
        assert begun(mine.get, 1, missed(0.1)).result(DEADLINE_S / 2) == []
        with pytest.raises(QueueNotFoundError):
            begun(mine.close).result(DEADLINE_S / 2)
    goes_on.set()
    mine.put("c")
    assert theirs.get(9, DEADLINE_S) == ["a", "b", "b", "c"], "the owner never heard of one"


def test_what_is_put_while_the_death_gets_about_stays_behind_what_was_on_its_way(
    world: QueueWorld, owner: Member, producer: Member, durable: dict[str, Any]
) -> None:
    """The bus, which hears of it first, keeps what it is given from there on for the next incarnation."""
    is_about = threading.Event()
    owner.bus.registry["wait"] = lambda: is_about.wait(DEADLINE_S)
    first = producer.bus.call("a", "wait", (), {})
    first.add_done_callback(lambda _: is_about.wait(DEADLINE_S))  # holds up what all others are told
    mine = owner.queue(size=1, **durable)
    mine.put("full")
    theirs = producer.queue()
    futures = [theirs.put_async(number) for number in range(5)]
    eventually(lambda: mine.stats().waiting_producers == 5)
    producer.bus.update_directory([replace(owner.entry, state=Reachability.DEAD, reason="killed", inbox=None)])
    futures += [theirs.put_async(number) for number in range(5, 10)]
    owner.die()
    is_about.set()
    eventually(lambda: len(theirs._producer._parked) == 10)
    again = world.worker("a", 1).queue(size=99, **durable)
    for future in futures:
        future.result(DEADLINE_S)
    assert again.get(99) == ["full", *range(10)]


def test_many_deaths_of_a_durable_owner_lose_and_double_nothing(
    world: QueueWorld, owner: Member, producer: Member, consumer: Member, durable: dict[str, Any]
) -> None:
    owner.queue(size=5, **durable)
    theirs, ours = producer.queue(), consumer.queue()
    taken: list[int] = []

    thread = threading.Thread(target=lambda: taken.extend(ours))
    thread.start()
    futures = []
    for incarnation in range(1, 5):
        futures += [theirs.put_async(number) for number in range(100 * incarnation, 100 * incarnation + 20)]
        theirs.put(100 * incarnation + 20)
        owner.die()
        owner = world.worker("a", incarnation)
        owner.queue(size=5, **durable)
    for future in futures:
        future.result(DEADLINE_S)
    theirs.close()
    thread.join()
    assert taken == [100 * incarnation + number for incarnation in range(1, 5) for number in range(21)]

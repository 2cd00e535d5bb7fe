"""Queues between workers on real sockets: what is put is taken, in order, once, on every route."""

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.deadlines import missed
from tests.support.queue_members import DEADLINE_S, Member, begun
from unified.errors import (
    ProtocolError,
    QueueClosedError,
    QueueFullError,
    QueueNotFoundError,
    QueueTakenError,
    UsageError,
)
from unified.queue import consumer as consumer_module
from unified.queue.client import DataQueue
from unified.testing import eventually


def test_items_go_from_producers_to_a_consumer(owner: Member, producer: Member, consumer: Member) -> None:
    mine = owner.queue(is_master=True, size=10)
    theirs, ours = producer.queue(), consumer.queue()
    theirs.put("a", {"b": (1, 2)})
    mine.put(3)
    assert mine.qsize() == ours.qsize() == 3
    assert ours.get(10) == ["a", {"b": (1, 2)}, 3]
    assert ours.get_nowait() == []
    assert mine.qsize() == 0


def test_a_get_waits_for_an_item_and_a_put_for_room(owner: Member, producer: Member, consumer: Member) -> None:
    owner.queue(is_master=True, size=2)
    theirs, ours = producer.queue(), consumer.queue()
    got = begun(ours.get, 5)
    eventually(lambda: theirs.stats().waiting_consumers == 1)
    theirs.put(1)
    assert got.result(DEADLINE_S) == [1]
    put = begun(theirs.put, 2, 3, 4, 5, 6)
    eventually(lambda: ours.stats().waiting_producers == 1)
    assert ours.qsize() == 2
    assert [ours.get(5) for _ in range(3)] == [[2, 3], [4, 5], [6]]
    put.result(DEADLINE_S)


def test_a_get_whose_time_is_over_returns_nothing(owner: Member, consumer: Member) -> None:
    mine = owner.queue(is_master=True)
    ours = consumer.queue()
    assert ours.get(1, timeout=missed(0.05)) == []
    assert mine.get(1, timeout=missed(0.05)) == []
    mine.put(1)
    assert ours.get(1, timeout=DEADLINE_S) == [1]


def test_a_put_whose_time_is_over_says_how_much_went_in(owner: Member, producer: Member) -> None:
    mine = owner.queue(is_master=True, size=2)
    with pytest.raises(QueueFullError, match="2 of 3 items went in") as caught:
        producer.queue().put(1, 2, 3, timeout=missed(0.05))
    assert caught.value.num_put == 2
    assert mine.get(5) == [1, 2]


async def test_futures_of_puts_end_when_they_are_in(owner: Member, producer: Member) -> None:
    mine = owner.queue(is_master=True, size=2)
    theirs = producer.queue()
    futures = [theirs.put_async(number) for number in range(4)]
    assert [each.result(DEADLINE_S) for each in futures[:2]] == [None, None]
    assert not futures[2].done()
    assert [mine.get(1) for _ in range(4)] == [[0], [1], [2], [3]]
    assert [each.result(DEADLINE_S) for each in futures[2:]] == [None, None]
    assert theirs.put_async().done()
    await theirs.put_async(4)
    assert mine.get(1) == [4]


def test_the_owner_puts_and_takes_as_everybody_does(owner: Member) -> None:
    mine, also_mine = owner.queue(is_master=True, size=1), owner.queue()
    array = np.zeros(100_000)
    mine.put(array)
    array[0] = 1  # the queue has its own
    waiting = also_mine.put_async("next")
    (taken,) = also_mine.get(1)
    assert taken[0] == 0
    assert waiting.result(DEADLINE_S) is None
    assert mine.get(1) == ["next"]


@pytest.mark.parametrize("kilobytes", [1, 40, 2000])
def test_arrays_and_tensors_arrive_whole(owner: Member, producer: Member, consumer: Member, kilobytes: int) -> None:
    owner.queue(is_master=True)
    array = np.arange(kilobytes * 128, dtype=np.int64)
    item = {"array": array, "tensor": torch.from_numpy(array.copy()), "bytes": array.tobytes()}
    theirs = producer.queue()
    theirs.put(item, "small")
    array += 1  # it is in: what the producer does from here on is its own affair
    first, second = consumer.queue().get(2)
    assert second == "small"
    np.testing.assert_array_equal(first["array"], array - 1)
    np.testing.assert_array_equal(first["tensor"].numpy(), array - 1)
    assert first["bytes"] == (array - 1).tobytes()


def test_large_items_outlive_their_producer(owner: Member, producer: Member, consumer: Member) -> None:
    mine = owner.queue(is_master=True)
    producer.queue().put(*[np.full(500_000, number, dtype=np.uint8) for number in range(4)])
    ours = consumer.queue()
    assert ours.get(1)[0][0] == 0
    producer.die()
    assert [int(each[0]) for each in ours.get(2)] == [1, 2]
    (last,) = mine.get(1)
    assert last.min() == last.max() == 3


def test_a_closed_queue_is_drained_and_ends_iteration(owner: Member, producer: Member, consumer: Member) -> None:
    mine = owner.queue(is_master=True, size=3)
    theirs, ours = producer.queue(), consumer.queue()
    theirs.put(1, 2)
    late = begun(theirs.put, 3, 4, 5)
    eventually(lambda: mine.stats().waiting_producers == 1)
    ours.close()
    with pytest.raises(QueueClosedError, match="1 of 3 items went in") as caught:
        late.result(DEADLINE_S)
    assert caught.value.num_put == 1
    with pytest.raises(QueueClosedError):
        theirs.put_async(9).result(DEADLINE_S)
    assert list(ours) == [1, 2, 3]
    assert list(mine.batches(3)) == []
    with pytest.raises(QueueClosedError, match="nothing more will come"):
        ours.get_nowait()
    assert mine.stats().is_closed


def test_iteration_waits_for_what_another_consumer_has(owner: Member, producer: Member, consumer: Member) -> None:
    mine = owner.queue(is_master=True)
    mine.put(1, 2)
    theirs = producer.queue()
    assert theirs.get(1) == [1]
    mine.close()
    items = begun(list, consumer.queue())
    eventually(lambda: mine.stats().waiting_consumers == 1)
    producer.die()
    assert items.result(DEADLINE_S) == [2, 1]


def test_what_a_dead_consumer_had_goes_to_the_others(owner: Member, first: Member, second: Member) -> None:
    mine = owner.queue(is_master=True)
    mine.put(*range(6))
    theirs, ours = first.queue(), second.queue()
    assert theirs.get(2) == [0, 1]
    assert theirs.get(2) == [2, 3]  # done with 0 and 1
    theirs.task_done(1)
    assert ours.get(1) == [4]
    first.die()
    assert ours.get(5) == [3, 5]
    assert mine.stats().leased == 2


def test_task_done_and_give_back(owner: Member, consumer: Member) -> None:
    mine = owner.queue(is_master=True)
    mine.put(*range(5))
    ours = consumer.queue()
    ours.task_done()  # of nothing
    ours.give_back()
    assert ours.get(4) == [0, 1, 2, 3]
    ours.task_done(1)
    ours.task_done(1)
    with pytest.raises(UsageError, match="2 items of queue 'q' that are not done"):
        ours.task_done(3)
    ours.give_back()
    assert mine.qsize() == 3
    assert ours.get(5) == [2, 3, 4]
    ours.task_done()
    assert mine.stats().leased == 0


def test_threads_are_consumers_of_their_own_and_end_as_such(owner: Member, consumer: Member) -> None:
    mine = owner.queue(is_master=True)
    mine.put(*range(4))
    ours = consumer.queue()
    go_on = threading.Event()

    def take() -> None:
        ours.get(1)
        go_on.wait(DEADLINE_S)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    eventually(lambda: mine.stats().leased == 2)
    assert ours.get(1) == [2]
    assert ours.get(1) == [3]
    assert mine.stats().leased == 3  # 0 and 1 are with the threads still
    go_on.set()
    for thread in threads:
        thread.join()
    eventually(lambda: mine.stats().leased == 1)
    assert mine.qsize() == 0


def test_an_object_that_is_dropped_leaves_nothing_but_what_it_took(owner: Member, consumer: Member) -> None:
    mine = owner.queue(is_master=True)
    mine.put(1, 2)
    assert mine.stats().handles == 1
    thread = threading.Thread(target=lambda: consumer.queue().get(1))
    ours = consumer.queue()
    assert ours.get(1) == [1]
    ours.task_done()
    del ours
    eventually(lambda: gc.collect() * 0 + mine.stats().handles == 1)
    assert consumer.queue().get(1) == [2]
    gc.collect()
    assert mine.stats().leased == 1  # this thread may be at work on it
    mine.put(3)
    thread.start()
    thread.join()
    eventually(lambda: mine.stats().num_taken == 3 and mine.stats().leased == 1)


def test_the_end_of_the_entry_point_is_the_end_of_its_takes(
    owner: Member, consumer: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This one has consumers of tests before, whose owners ended.
    monkeypatch.setattr(consumer_module, "_thread", consumer_module._ThreadState())
    mine = owner.queue(is_master=True)
    mine.put(1)
    consumer.queue().get(1)
    consumer.finishers[0]()
    assert (mine.stats().leased, mine.qsize()) == (0, 0)


def test_with_statement_says_what_is_done(owner: Member, consumer: Member) -> None:
    with owner.queue(is_master=True) as mine:
        mine.put(1, 2)
        with consumer.queue() as ours:
            ours.get(1)
        assert mine.stats().leased == 0
        with pytest.raises(ZeroDivisionError), consumer.queue() as ours:
            1 / ours.get(1)[0] / 0
        assert mine.qsize() == 1
    assert consumer.queue().stats().is_closed


def test_producers_and_consumers_in_many_threads(owner: Member, producer: Member, consumer: Member) -> None:
    mine = owner.queue(is_master=True, size=7)
    queues = [mine, producer.queue(), consumer.queue()]
    taken: list[tuple[int, int]] = []

    def produce(which: int) -> None:
        for number in range(0, 120, 3):
            queues[which % 3].put(*[(which, number + offset) for offset in range(3)])

    def consume(which: int) -> None:
        for batch in queues[which % 3].batches(1 + which):
            taken.extend(batch)

    producers = [begun(produce, which) for which in range(6)]
    consumers = [begun(consume, which) for which in range(6)]
    for each in producers:
        each.result(DEADLINE_S)
    mine.close()
    for each in consumers:
        each.result(DEADLINE_S)
    assert sorted(taken) == [(which, number) for which in range(6) for number in range(120)]


def test_one_queue_has_one_owner(owner: Member, other: Member) -> None:
    mine = owner.queue(is_master=True)
    with pytest.raises(QueueTakenError, match="held by worker a"):
        other.queue(is_master=True)
    with pytest.raises(QueueTakenError, match="by this very worker"):
        owner.queue(is_master=True)
    other.queue("another", is_master=True).put(1)
    assert mine.qsize() == 0


def test_a_finished_queue_makes_way_for_a_new_one(owner: Member, other: Member) -> None:
    mine = owner.queue(is_master=True)
    theirs = other.queue()
    theirs.put(1)
    mine.close()
    assert list(mine) == [1]
    again = owner.queue(is_master=True)
    again.put(2)
    with pytest.raises(QueueClosedError, match="another one of that name"):
        theirs.put(3)
    assert other.queue().get(1) == [2]


def test_a_client_waits_for_its_owner(owner: Member, producer: Member, consumer: Member) -> None:
    theirs, ours = producer.queue(), consumer.queue()
    futures = [theirs.put_async(number) for number in range(3)]
    got = begun(ours.get, 3)
    assert ours.get_nowait() == []
    assert ours.get(1, timeout=missed(0.02)) == []
    owner.queue(is_master=True)
    for future in futures:
        future.result(DEADLINE_S)
    assert len(got.result(DEADLINE_S)) >= 1
    assert theirs.stats().num_put == 3


def test_a_queue_that_nobody_makes_is_missed(owner: Member) -> None:
    queue = owner.queue("absent", owner_timeout=missed(0.1))
    with pytest.raises(QueueNotFoundError, match="no worker of the job has made it"):
        queue.put(1)
    for timeout in (None, DEADLINE_S):
        with pytest.raises(QueueNotFoundError):
            queue.get(1, timeout=timeout)
    with pytest.raises(QueueNotFoundError):
        queue.put_async(1).result(DEADLINE_S)
    with pytest.raises(QueueNotFoundError):
        queue.qsize()
    assert queue._producer._open == {}


def test_an_item_that_cannot_be_sent_and_one_that_cannot_be_read(
    owner: Member, producer: Member, consumer: Member
) -> None:
    mine = owner.queue(is_master=True)
    theirs, ours = producer.queue(), consumer.queue()
    with pytest.raises(UsageError):
        theirs.put(1, threading.Lock())
    assert mine.qsize() == 0
    theirs.put(_Unreadable())
    theirs.put("next")
    for _ in range(2):  # nothing is lost by an error
        with pytest.raises(ProtocolError, match="no such class"):
            ours.get(1)
    ours.task_done()
    assert ours.get(5) == ["next"]


class _Unreadable:
    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise AttributeError("no such class")


def test_statistics_over_the_bus(owner: Member, consumer: Member) -> None:
    owner.queue(is_master=True, size=5, max_bytes=10_000).put("abc", "def")
    ours = consumer.queue()
    ours.get(1)
    stats = ours.stats()
    assert (stats.name, stats.size, stats.depth, stats.leased, stats.num_put, stats.num_taken) == ("q", 5, 1, 1, 2, 1)
    assert 0 < stats.nbytes < 100
    assert 0 < stats.oldest_age_s < DEADLINE_S
    assert stats.puts_per_s > 0 < stats.gets_per_s
    assert not stats.is_closed
    assert not stats.is_durable


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"name": ""}, "1 to 190 characters"),
        ({"size": 0}, "size=0"),
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"fsync": True}, "only a durable queue"),
        ({"path": "x"}, "only a durable queue"),
        ({"durable": True}, "its owner"),
    ],
)
def test_options_that_cannot_be(owner: Member, options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        owner.queue(**options)


def test_a_get_of_no_items(owner: Member) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        owner.queue().get(0)


def test_the_object_stays_in_its_process(owner: Member) -> None:
    queue: DataQueue[int] = owner.queue(is_master=True)
    with pytest.raises(UsageError, match="make a DataQueue"):
        queue.put(queue)  # type: ignore[arg-type]
    assert repr(queue) == "DataQueue('q', is_master=True)"


def test_a_forked_process_is_told_that_it_cannot(owner: Member) -> None:
    mine = owner.queue(is_master=True)
    mine.put(1)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            mine.put(2)
        except UsageError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert "was forked from it" in pipe.read()
    os.waitpid(pid, 0)
    assert mine.qsize() == 1

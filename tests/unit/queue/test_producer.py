"""Puts go in once and in their order, or not at all, whatever becomes of questions, answers and threads."""

import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from tests.support.queue_endpoints import (
    DEADLINE_S,
    DIED,
    LOST,
    UNKNOWN,
    WAITING,
    FakeEndpoint,
    FakeLookup,
    producer_of,
    put,
    puts,
)
from unified.errors import (
    QueueClosedError,
    QueueFullError,
    QueueJournalError,
    QueueLostError,
    QueueNotFoundError,
    RpcError,
    RpcTimeoutError,
)
from unified.queue import owner_lookup
from unified.queue.core.messages import Outcome
from unified.queue.owner_lookup import LARGE_BYTES, LARGE_SLICE_S, SLICE_S, OwnerLookup
from unified.queue.producer import QueueProducer
from unified.testing import eventually
from unified.worker.progress import QUEUE_USES


def test_all_is_well() -> None:
    endpoint = FakeEndpoint()
    ours = producer_of(endpoint)
    ours.put([b"a", b"b"], None)
    ours.put([b"c"], None)
    assert endpoint.asked == [(7, 0, 0, [b"a", b"b"], SLICE_S, False), (7, 1, 1, [b"c"], SLICE_S, False)]
    assert not ours._open


def test_what_is_open_is_what_the_owner_has_to_remember() -> None:
    endpoint = FakeEndpoint("later", "later")
    ours = producer_of(endpoint)
    first, second, third = puts(ours, 3)
    third.result(DEADLINE_S)
    endpoint.later[1].succeed(None)
    second.result(DEADLINE_S)
    ours.put([b"x"], None)
    endpoint.later[0].succeed(None)
    first.result(DEADLINE_S)
    ours.put([b"y"], None)
    assert [(number, below) for _, number, below, *_ in endpoint.asked] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 4)]


@pytest.mark.parametrize("how", ["put", "put_async"])
def test_a_full_queue_is_asked_again_without_the_items(how: str) -> None:
    endpoint = FakeEndpoint(WAITING, WAITING)
    put(how, producer_of(endpoint))
    assert [question[3] for question in endpoint.asked] == [[b"a"], None, None]
    assert endpoint.numbers == [0, 0, 0]


def test_a_large_put_waits_shortly_while_its_items_count_as_being_on_their_way() -> None:
    endpoint = FakeEndpoint(WAITING)
    producer_of(endpoint).put([bytes(LARGE_BYTES + 1)], None)
    assert [question[4] for question in endpoint.asked] == [LARGE_SLICE_S, SLICE_S]


def test_a_put_with_a_timeout_says_when_it_gives_up() -> None:
    endpoint = FakeEndpoint(WAITING, [int(Outcome.FULL), 1])
    ours = producer_of(endpoint)
    with pytest.raises(QueueFullError, match="1 of 2 items") as caught:
        ours.put([b"a", b"b"], SLICE_S + 0.5)
    assert caught.value.num_put == 1
    assert [question[5] for question in endpoint.asked] == [False, False]
    endpoint.script = [[int(Outcome.FULL), 0]]
    with pytest.raises(QueueFullError):
        ours.put([b"c"], 0.5)
    assert endpoint.asked[-1][5]
    assert not ours._open


@pytest.mark.parametrize("how", ["put", "put_async"])
def test_a_closed_queue(how: str) -> None:
    ours = producer_of(FakeEndpoint([int(Outcome.CLOSED), 0]))
    with pytest.raises(QueueClosedError, match="0 of 1 items"):
        put(how, ours)
    assert not ours._open


@pytest.mark.parametrize("trouble", [LOST, UNKNOWN])
@pytest.mark.parametrize("how", ["put", "put_async"])
def test_a_lost_answer_is_asked_for_again_under_the_same_number(trouble: Any, how: str) -> None:
    endpoint = FakeEndpoint(trouble, trouble)
    ours = producer_of(endpoint, endpoint, endpoint)
    put(how, ours)
    assert endpoint.numbers == [0, 0, 0]
    assert all(question[3] == [b"a"] for question in endpoint.asked)
    assert eventually(lambda: ours._helper is None)


def test_an_owner_that_forgot_is_given_the_items_again() -> None:
    endpoint = FakeEndpoint(WAITING, UNKNOWN)
    producer_of(endpoint, endpoint).put([b"a"], None)
    assert [question[3] for question in endpoint.asked] == [[b"a"], None, [b"a"]]


def test_puts_keep_their_order_over_the_owners_death() -> None:
    old, new = FakeEndpoint(*["later"] * 4, is_durable=True), FakeEndpoint(is_durable=True)
    ours = producer_of(old, new)
    futures = puts(ours, 4)
    for call in old.later:  # a death ends calls in the order in which they were made
        call.fail(DIED)
    for future in futures:
        future.result(DEADLINE_S)
    ours.put([b"next"], None)
    assert new.numbers == [0, 1, 2, 3, 4]
    assert not ours._open


def test_what_is_put_meanwhile_stays_behind_what_waits() -> None:
    old, new = FakeEndpoint("later", is_durable=True), FakeEndpoint("later", is_durable=True)
    lookup = FakeLookup(old, new)
    ours = QueueProducer(cast(OwnerLookup, lookup))
    first = ours.put_async([b"0"])
    arrived: list[Future[None]] = []
    lookup.before_attach = lambda: arrived.append(ours.put_async([b"1"]))
    old.later[0].fail(DIED)
    eventually(lambda: new.numbers == [0, 1])
    assert not first.done()
    new.later[0].succeed(None)
    first.result(DEADLINE_S)
    arrived[0].result(DEADLINE_S)


def test_a_queue_that_is_lost_ends_all_of_its_puts() -> None:
    endpoint = FakeEndpoint("later", "later", "later")
    ours = producer_of(endpoint)
    futures = puts(ours, 3)
    for call in endpoint.later:
        call.fail(DIED)
    for future in futures:
        with pytest.raises(QueueLostError):
            future.result(DEADLINE_S)
    assert not ours._open


def test_no_owner_in_time_ends_all_that_have_waited() -> None:
    ours = producer_of(None)
    for future in puts(ours, 5):
        with pytest.raises(QueueNotFoundError):
            future.result(DEADLINE_S)
    with pytest.raises(QueueNotFoundError):
        ours.put([b"a"], 0.5)
    assert not ours._open


@pytest.mark.parametrize("before", [[], [LOST]], ids=["straight", "asked again"])
def test_a_put_to_a_silent_owner_ends_with_its_time(before: list[Any]) -> None:
    endpoint = FakeEndpoint(*before, RpcTimeoutError("no answer"))
    lookup: Any = FakeLookup(endpoint)
    lookup.pause = lambda num_failed, until: time.sleep(max(until - time.monotonic(), 0.0))
    ours = QueueProducer(cast(OwnerLookup, lookup))
    with pytest.raises(QueueNotFoundError, match=r"a is silent\. The items may be in the queue, or may still go in"):
        ours.put([b"a"], 0.05 if before else 0.0)
    assert len(endpoint.asked) == len(before) + 1
    assert not ours._open
    assert eventually(lambda: ours._helper is None)


def test_a_put_has_no_more_time_behind_one_that_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is parked first waits for an owner for ever, as for the next incarnation of a durable queue's."""
    monkeypatch.setattr(owner_lookup, "GRACE_S", 0.05)
    endpoint, found = FakeEndpoint(), threading.Event()
    lookup: Any = FakeLookup(None, endpoint)
    lookup.before_attach = lambda: found.wait(DEADLINE_S)
    lookup.not_found = lambda begun: QueueNotFoundError("nobody came")
    ours = QueueProducer(cast(OwnerLookup, lookup))
    first = ours.put_async([b"a"])
    with pytest.raises(QueueNotFoundError, match="nobody came"):
        ours.put([b"b"], 0.05)
    found.set()
    first.result(DEADLINE_S)
    assert eventually(lambda: ours._helper is None)
    assert [question[3] for question in endpoint.asked] == [[b"a"]]


def test_an_error_of_the_owner_is_not_tried_again() -> None:
    endpoint = FakeEndpoint(RpcError("the disk is full"))
    with pytest.raises(RpcError, match="the disk is full"):
        producer_of(endpoint).put([b"a"], None)
    assert endpoint.numbers == [0]


def test_a_put_that_is_cancelled_while_it_waits_for_an_owner_is_not_made() -> None:
    old, new = FakeEndpoint("later", is_durable=True), FakeEndpoint(is_durable=True)
    lookup = FakeLookup(old, new)
    ours = QueueProducer(cast(OwnerLookup, lookup))
    kept = ours.put_async([b"0"])
    cancelled: list[Future[None]] = []

    def put_and_cancel() -> None:
        cancelled.append(ours.put_async([b"1"]))
        cancelled[0].cancel()

    lookup.before_attach = put_and_cancel
    old.later[0].fail(DIED)
    kept.result(DEADLINE_S)
    assert cancelled[0].cancelled()
    assert eventually(lambda: ours._helper is None)
    assert new.numbers == [0]


def dying(num_puts: int) -> tuple[QueueProducer, Any, FakeEndpoint, FakeEndpoint, list[Future[None]]]:
    """So many puts are on their way to an owner of which it is known that it died; with it the lookup, both endpoints,
    and the futures. Their calls have ended, and whoever waits for them is about to be told."""
    old, new = FakeEndpoint(*["later"] * num_puts, is_durable=True), FakeEndpoint(is_durable=True)
    lookup = FakeLookup(old, new)
    ours = QueueProducer(cast(OwnerLookup, lookup))
    futures = puts(ours, num_puts)
    lookup.detach(old)
    return ours, lookup, old, new, futures


def test_what_is_put_before_those_on_their_way_come_back_stays_behind_them() -> None:
    ours, lookup, old, new, futures = dying(2)
    looks, is_there = threading.Event(), threading.Event()

    def wait_for_the_owner() -> None:
        looks.set()
        is_there.wait(DEADLINE_S)

    lookup.before_attach = wait_for_the_owner
    futures += puts(ours, 1)
    assert looks.wait(DEADLINE_S)
    for call in old.later:
        call.fail(DIED)
    is_there.set()
    for each in futures:
        each.result(DEADLINE_S)
    assert new.numbers == [0, 1, 2]


@pytest.mark.parametrize("how", ["put", "put_async"])
def test_an_owner_that_is_back_sooner_than_they_are_gets_them_first(how: str) -> None:
    ours, lookup, old, new, futures = dying(2)
    futures += puts(ours, 1)
    assert eventually(lambda: lookup.endpoint is new)
    if how == "put":
        pool = ThreadPoolExecutor(1)
        futures.append(pool.submit(ours.put, [b"3"], None))
        pool.shutdown(wait=False)
        assert eventually(lambda: 3 in ours._parked)
    else:
        futures += puts(ours, 1)
    assert new.asked == []
    for call in old.later:
        call.fail(DIED)
    for each in futures:
        each.result(DEADLINE_S)
    assert new.numbers == [0, 1, 2, 3]
    assert eventually(lambda: ours._helper is None)


def test_those_on_their_way_come_back_one_by_one() -> None:
    ours, _, old, new, futures = dying(3)
    old.later[0].fail(DIED)
    futures[0].result(DEADLINE_S)
    assert eventually(lambda: ours._helper is None)
    futures += puts(ours, 1)
    assert new.numbers == [0], "what is not back does not keep from going what was put before"
    old.later[1].fail(DIED)
    futures[1].result(DEADLINE_S)
    old.later[2].succeed(None)  # it had been answered before the death
    futures[3].result(DEADLINE_S)
    assert new.numbers == [0, 1, 3]
    ours.put([b"straight again"], None)
    assert new.numbers == [0, 1, 3, 4]
    assert not ours._open


def test_a_put_that_is_cancelled_while_it_waits_for_room_is_not_asked_for_again() -> None:
    endpoint = FakeEndpoint("later", "later")
    ours = producer_of(endpoint)
    first, second = puts(ours, 2)
    first.cancel()
    endpoint.later[0].succeed(WAITING)
    assert endpoint.numbers == [0, 1]
    endpoint.later[1].succeed(WAITING)
    second.result(DEADLINE_S)
    assert [question[1:3] for question in endpoint.asked] == [(0, 0), (1, 0), (1, 1)], (
        "the owner hears that 0 is given up"
    )
    assert not ours._open


def test_a_put_that_is_cancelled_just_before_it_is_sent_is_not_sent() -> None:
    endpoint = FakeEndpoint()
    lookup: Any = FakeLookup(None, endpoint)
    ours = QueueProducer(cast(OwnerLookup, lookup))
    ask, cancelled = ours._ask, threading.Event()

    def cancel_and_ask(put: Any, endpoint: Any) -> Any:
        put.future.cancel()
        cancelled.set()
        return ask(put, endpoint)

    ours._ask = cancel_and_ask  # type: ignore[method-assign]
    future = ours.put_async([b"a"])
    assert cancelled.wait(DEADLINE_S)
    assert eventually(lambda: ours._helper is None)
    assert future.cancelled()
    assert endpoint.asked == []


def test_puts_go_on_when_the_system_has_a_thread_again(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = FakeEndpoint()
    ours = producer_of(None, endpoint)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            ours.put([b"a"], None)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            ours.put_async([b"a"]).result(DEADLINE_S)
    assert not ours._open
    ours.put([b"b"], DEADLINE_S)
    assert endpoint.numbers == [2]


def test_a_callback_that_ends_its_thread_does_not_end_that_of_the_puts() -> None:
    lookup: Any = FakeLookup(None, FakeEndpoint([int(Outcome.CLOSED), 0]))
    is_there = threading.Event()
    lookup.before_attach = lambda: is_there.wait(DEADLINE_S)
    ours = QueueProducer(cast(OwnerLookup, lookup))
    first, second = puts(ours, 2)
    first.add_done_callback(lambda _: sys.exit("of a user's"))
    is_there.set()
    with pytest.raises(QueueClosedError):
        first.result(DEADLINE_S)
    second.result(DEADLINE_S)
    assert eventually(lambda: ours._helper is None)


def test_an_owner_in_this_process_that_fails_ends_the_put_and_no_other() -> None:
    endpoint: Any = FakeEndpoint()
    put_there, errors = endpoint.put, [QueueJournalError("the disk is full")]

    def put_here(*question: Any) -> Any:
        if errors:
            raise errors.pop()
        return put_there(*question)

    endpoint.put = put_here
    ours = producer_of(None, endpoint)
    first, second = puts(ours, 2)
    with pytest.raises(QueueJournalError):
        first.result(DEADLINE_S)
    second.result(DEADLINE_S)
    assert not ours._open


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("size", "num_slices"), [(1, 1), (LARGE_BYTES + 1, 2)])
def test_a_wait_counts_after_a_long_slice(size: int, num_slices: int) -> None:
    """The first slice of a large put is short."""
    endpoint = FakeEndpoint(*[WAITING] * num_slices, "later")
    ours = producer_of(endpoint)
    thread = threading.Thread(target=ours.put, args=[[bytes(size)], None])
    thread.start()
    assert eventually(lambda: endpoint.later, DEADLINE_S)
    assert QUEUE_USES[thread] == {("puts", "q"): 1}
    endpoint.later[0].succeed(None)
    thread.join(DEADLINE_S)
    assert QUEUE_USES[thread] == {("puts", "q"): 0}

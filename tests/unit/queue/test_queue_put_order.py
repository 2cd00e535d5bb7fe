"""Puts that wait for others, that are given up, or that a thread fails: each goes in in its order or not at all, and
nobody waits for ever."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from tests.support.queue_endpoints import DIED, PATIENCE_S, WAITING, FakeEndpoint, FakeLookup, producer_of, puts
from unified.errors import QueueClosedError, QueueJournalError
from unified.queue.core.messages import Outcome
from unified.queue.owner_lookup import OwnerLookup
from unified.queue.producer import QueueProducer
from unified.testing import eventually


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
    attach, looks, is_there = lookup.attach, threading.Event(), threading.Event()

    def slow_attach(until: float | None = None) -> Any:
        looks.set()
        is_there.wait(PATIENCE_S)
        return attach(until)

    lookup.attach = slow_attach
    futures += puts(ours, 1)
    assert looks.wait(PATIENCE_S)
    for call in old.later:
        call.fail(DIED)
    is_there.set()
    for each in futures:
        each.result(PATIENCE_S)
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
        each.result(PATIENCE_S)
    assert new.numbers == [0, 1, 2, 3]
    assert eventually(lambda: ours._helper is None)


def test_those_on_their_way_come_back_one_by_one() -> None:
    ours, _, old, new, futures = dying(3)
    old.later[0].fail(DIED)
    futures[0].result(PATIENCE_S)
    assert eventually(lambda: ours._helper is None)
    futures += puts(ours, 1)
    assert new.numbers == [0], "what is not back does not keep from going what was put before"
    old.later[1].fail(DIED)
    futures[1].result(PATIENCE_S)
    old.later[2].succeed(None)  # it had been answered before the death
    futures[3].result(PATIENCE_S)
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
    second.result(PATIENCE_S)
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
    assert cancelled.wait(PATIENCE_S)
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
            ours.put_async([b"a"]).result(PATIENCE_S)
    assert not ours._open
    ours.put([b"b"], PATIENCE_S)
    assert endpoint.numbers == [2]


def test_a_callback_that_ends_its_thread_does_not_end_that_of_the_puts() -> None:
    lookup: Any = FakeLookup(None, FakeEndpoint([int(Outcome.CLOSED), 0]))
    is_there, attach = threading.Event(), lookup.attach

    def slow_attach(until: float | None = None) -> Any:
        is_there.wait(PATIENCE_S)
        return attach(until)

    lookup.attach = slow_attach
    ours = QueueProducer(cast(OwnerLookup, lookup))
    first, second = puts(ours, 2)
    first.add_done_callback(lambda _: sys.exit("of a user's"))
    is_there.set()
    with pytest.raises(QueueClosedError):
        first.result(PATIENCE_S)
    second.result(PATIENCE_S)
    assert eventually(lambda: ours._helper is None)


def test_an_owner_in_this_process_that_fails_ends_the_put_and_no_other() -> None:
    endpoint: Any = FakeEndpoint()
    put, errors = endpoint.put, [QueueJournalError("the disk is full")]

    def put_here(*question: Any) -> Any:
        if errors:
            raise errors.pop()
        return put(*question)

    endpoint.put = put_here
    ours = producer_of(None, endpoint)
    first, second = puts(ours, 2)
    with pytest.raises(QueueJournalError):
        first.result(PATIENCE_S)
    second.result(PATIENCE_S)
    assert not ours._open


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")

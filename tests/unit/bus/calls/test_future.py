"""A call's future in every place where a standard one works: threads, callbacks, event loops."""

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future
from functools import partial

import pytest

from tests.support.deadlines import met
from unified.bus.calls.future import RpcFuture, gather
from unified.bus.codec.codec import encode
from unified.errors import RpcCancelledError, RpcError, RpcTimeoutError, UsageError, WorkerDiedError
from unified.testing import eventually

DEADLINE_S = met(100.0)


def soon(work: Callable[[], object]) -> None:
    threading.Timer(0.01, work).start()


def pending(number: int) -> list[RpcFuture[int]]:
    return [RpcFuture(f"call {i}") for i in range(number)]


def ended(value: int) -> RpcFuture[int]:
    future: RpcFuture[int] = RpcFuture()
    future.succeed(value)
    return future


async def wait_for(future: RpcFuture[int]) -> int:
    return await future


@pytest.fixture
def future() -> RpcFuture[int]:
    return RpcFuture()


# Threads.


def test_many_threads_wait_for_one_call(future: RpcFuture[int]) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(future.result, DEADLINE_S) for _ in range(8)]
        soon(lambda: future.succeed(5))
        assert [each.result(DEADLINE_S) for each in waiting] == [5] * 8


def test_state_as_it_is_seen_from_outside(future: RpcFuture[int]) -> None:
    assert (future.done(), future.running(), future.cancelled()) == (False, False, False)
    future.succeed(1)
    assert (future.done(), future.running(), future.cancelled()) == (True, False, False)
    assert future.exception() is None
    failed: RpcFuture[int] = RpcFuture()
    failed.fail(WorkerDiedError("died"))
    assert isinstance(failed.exception(), WorkerDiedError)
    assert not failed.cancelled()


def test_of_many_who_end_it_one_does() -> None:
    for _ in range(50):
        future: RpcFuture[int] = RpcFuture()
        called: list[int] = []
        future.add_done_callback(lambda each, called=called: called.append(each.result()))  # type: ignore[misc]
        start = threading.Barrier(4)

        def end(value: int, future: RpcFuture[int] = future, start: threading.Barrier = start) -> None:
            start.wait(DEADLINE_S)
            future.succeed(value)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(end, range(4)))
        assert called == [future.result(0)]


def test_error_keeps_no_future_alive() -> None:
    future: RpcFuture[int] = RpcFuture()
    future.fail(WorkerDiedError("died"))
    there = weakref.ref(future)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(WorkerDiedError):
            future.result()
        del future
        assert there() is None
    finally:
        gc.enable()


def test_it_cannot_be_sent_or_copied() -> None:
    future: RpcFuture[int] = RpcFuture("the call of 'm' to worker b")
    with pytest.raises(TypeError, match="the future of the call of 'm' to worker b cannot be sent"):
        pickle.dumps(future)
    with pytest.raises(UsageError, match="cannot be sent"):
        encode([future])


# concurrent.futures.


def test_wait_for_all_for_the_first_and_for_the_first_error() -> None:
    first, second, third = pending(3)
    assert concurrent.futures.wait([first, second], timeout=0).done == set()
    soon(lambda: second.succeed(2))
    assert concurrent.futures.wait([first, second], DEADLINE_S, FIRST_COMPLETED).done == {second}
    soon(lambda: third.fail(WorkerDiedError("died")))
    done, left = concurrent.futures.wait([first, third], DEADLINE_S, FIRST_EXCEPTION)
    assert (done, left) == ({third}, {first})
    soon(lambda: first.succeed(1))
    assert concurrent.futures.wait([first, second, third], DEADLINE_S).not_done == set()


def test_wait_counts_a_future_once_that_ends_as_it_begins() -> None:
    first, slow, last = sorted(pending(3), key=id)  # as `wait` goes about them
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with last._condition:  # holds `wait` up when it has all but this
            waiting = pool.submit(concurrent.futures.wait, [first, slow, last], DEADLINE_S)
            assert eventually(lambda: not is_free(first._condition))
            pool.submit(first.succeed, 1)
            time.sleep(0.05)  # it ends now, or when it was counted
        last.succeed(3)
        assert not concurrent.futures.wait([waiting], 0.05).done
        slow.succeed(2)
        assert waiting.result(DEADLINE_S).not_done == set()


def is_free(condition: threading.Condition) -> bool:
    """Whether no other thread holds it."""
    if is_mine := condition.acquire(blocking=False):
        condition.release()
    return is_mine


def test_wait_together_with_futures_of_another_kind(future: RpcFuture[int]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(int, "7")
        soon(lambda: future.succeed(5))
        assert concurrent.futures.wait([future, other], DEADLINE_S).done == {future, other}


def test_wait_counts_a_cancelled_call_as_done() -> None:
    future, other = pending(2)
    soon(future.cancel)
    assert concurrent.futures.wait([future, other], DEADLINE_S, FIRST_COMPLETED).done == {future}
    assert concurrent.futures.wait([future, other], timeout=0) == ({future}, {other})
    assert concurrent.futures.wait([future]).done == {future}


def test_a_cancelled_call_is_not_the_first_error_that_is_waited_for() -> None:
    cancelled, failed = pending(2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(concurrent.futures.wait, [cancelled, failed], DEADLINE_S, FIRST_EXCEPTION)
        assert eventually(lambda: cancelled.is_watched and failed.is_watched)
        cancelled.cancel()
        assert not concurrent.futures.wait([waiting], 0.05).done
        failed.fail(WorkerDiedError("died"))
        assert waiting.result(DEADLINE_S).done == {cancelled, failed}


def test_as_completed_gives_them_as_they_end() -> None:
    futures = pending(3)
    futures[1].succeed(1)
    ended = concurrent.futures.as_completed(futures, DEADLINE_S)
    assert next(ended) is futures[1]
    soon(lambda: futures[2].fail(WorkerDiedError("died")))
    assert next(ended) is futures[2]
    soon(lambda: futures[0].succeed(0))
    assert list(ended) == [futures[0]]
    with pytest.raises(concurrent.futures.TimeoutError):
        list(concurrent.futures.as_completed(pending(1), timeout=0))


# Callbacks.


@pytest.mark.parametrize("end", ["succeed", "fail", "cancel"])
def test_callbacks_are_called_once_in_order_and_at_once_when_it_has_ended(end: str, future: RpcFuture[int]) -> None:
    called: list[tuple[int, bool]] = []
    for i in range(2):
        future.add_done_callback(lambda each, i=i: called.append((i, each.done())))  # type: ignore[misc]
    {"succeed": lambda: future.succeed(1), "fail": lambda: future.fail(RpcError("x")), "cancel": future.cancel}[end]()
    future.succeed(2)
    assert called == [(0, True), (1, True)]
    future.add_done_callback(lambda each: called.append((2, each is future)))
    assert called[2:] == [(2, True)]


def test_callback_that_raises_stops_neither_the_others_nor_who_ended_it(
    caplog: pytest.LogCaptureFixture, future: RpcFuture[int]
) -> None:
    called: list[int] = []
    with caplog.at_level(logging.ERROR, "concurrent.futures"):
        future.add_done_callback(lambda each: called.append(1 // 0))
        future.add_done_callback(lambda each: called.append(each.result()))
        future.succeed(7)
    assert called == [7]
    assert "ZeroDivisionError" in caplog.text


def test_callback_may_make_another_call_and_chain_it() -> None:
    first, second = pending(2)
    whole: RpcFuture[int] = RpcFuture()
    first.add_done_callback(lambda _: second.add_done_callback(lambda each: whole.succeed(each.result())))
    first.succeed(1)
    second.succeed(2)
    assert whole.result(0) == 2


def test_callbacks_added_while_it_ends_are_all_called() -> None:
    for _ in range(50):
        future: RpcFuture[int] = RpcFuture()
        called: list[int] = []
        ending = threading.Thread(target=future.succeed, args=[1])
        ending.start()
        for i in range(20):
            future.add_done_callback(lambda _, i=i, called=called: called.append(i))  # type: ignore[misc]
        ending.join()
        eventually(lambda called=called: sorted(called) == list(range(20)))  # type: ignore[misc]


# Event loops.


async def test_await_what_is_there_already(future: RpcFuture[int]) -> None:
    future.succeed(5)
    assert await future == 5
    assert await future == 5
    assert await asyncio.wrap_future(ended(6)) == 6
    assert list(await asyncio.gather(ended(1), ended(2))) == [1, 2]


async def test_many_tasks_await_one_call(future: RpcFuture[int]) -> None:
    tasks = [asyncio.create_task(wait_for(future)) for _ in range(5)]
    soon(lambda: future.succeed(5))
    assert await asyncio.gather(*tasks) == [5] * 5


async def test_wrap_future_and_back(future: RpcFuture[int]) -> None:
    wrapped = asyncio.wrap_future(future)
    soon(lambda: future.succeed(5))
    assert await wrapped == 5
    failing: RpcFuture[int] = RpcFuture()
    soon(lambda: failing.fail(WorkerDiedError("died")))
    with pytest.raises(WorkerDiedError):
        await asyncio.wrap_future(failing)
    doomed: RpcFuture[int] = RpcFuture()
    asyncio.wrap_future(doomed).cancel()
    await asyncio.sleep(0)
    assert doomed.cancelled()


async def test_wrap_future_of_a_call_that_is_cancelled(future: RpcFuture[int]) -> None:
    wrapped = asyncio.wrap_future(future)
    soon(future.cancel)
    with pytest.raises((RpcCancelledError, asyncio.CancelledError)):
        await wrapped


async def test_gather_wait_and_as_completed_of_asyncio() -> None:
    futures = pending(4)
    for i, future in enumerate(futures):
        soon(partial(future.succeed, i))
    assert await asyncio.gather(*futures[:2]) == [0, 1]
    done, left = await asyncio.wait([asyncio.ensure_future(each) for each in futures], timeout=DEADLINE_S)
    assert (sorted(each.result() for each in done), left) == ([0, 1, 2, 3], set())
    assert sorted([await each for each in asyncio.as_completed(futures)]) == [0, 1, 2, 3]


async def test_timeout_around_an_await_cancels_the_call(future: RpcFuture[int]) -> None:
    other: RpcFuture[int] = RpcFuture()
    with pytest.raises(TimeoutError) as caught:
        await asyncio.wait_for(future, 0.01)
    with pytest.raises(TimeoutError) as also_caught:
        async with asyncio.timeout(0.01):
            await other
    assert not isinstance(caught.value, RpcTimeoutError)
    assert not isinstance(also_caught.value, RpcTimeoutError)
    assert future.cancelled()
    assert other.cancelled()


async def test_shielded_call_goes_on(future: RpcFuture[int]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(future)), 0.01)
    assert not future.done()
    soon(lambda: future.succeed(5))
    assert await future == 5


async def test_rpc_timeout_of_the_call_is_raised_by_await(future: RpcFuture[int]) -> None:
    soon(lambda: future.fail(RpcTimeoutError("deadline")))
    with pytest.raises(RpcTimeoutError, match="deadline"):
        await future


def test_await_in_one_loop_and_result_in_another_thread(future: RpcFuture[int]) -> None:
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(asyncio.run, wait_for(future)) for _ in range(2)] + [pool.submit(future.result)]
        soon(lambda: future.succeed(5))
        assert [each.result(DEADLINE_S) for each in waiting] == [5] * 3


# Groups.


def test_gather_of_other_futures_and_of_itself() -> None:
    inner = pending(2)
    plain: Future[int] = Future()
    whole = gather([gather(inner, "inner"), gather([plain], "plain")], "outer")
    inner[0].succeed(0)
    plain.set_result(2)
    assert not whole.done()
    soon(lambda: inner[1].succeed(1))
    assert whole.result(DEADLINE_S) == [[0, 1], [2]]


async def test_gather_can_be_awaited_and_cancelled() -> None:
    futures = pending(2)
    whole = gather(futures, "all")
    for future in futures:
        soon(partial(future.succeed, 1))
    assert await whole == [1, 1]
    doomed = pending(2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gather(doomed, "all"), 0.01)
    assert all(each.cancelled() for each in doomed)


def test_gather_whose_parts_end_together() -> None:
    for _ in range(50):
        futures = pending(4)
        whole = gather(futures, "all")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for i, each in enumerate(futures):
                pool.submit(each.succeed, i)
            assert whole.result(DEADLINE_S) == [0, 1, 2, 3]


def test_ends_once() -> None:
    future = ended(1)
    future.succeed(2)
    future.fail(RpcError("late"))
    assert future.result() == 1
    assert not future.cancel()


def test_result_that_is_not_there_yet_is_a_timeout_and_the_call_goes_on() -> None:
    future: RpcFuture[int] = RpcFuture("the call of 'm' to worker b")
    for wait in (future.result, future.exception):
        with pytest.raises(RpcTimeoutError, match="the call of 'm' to worker b had not ended after 0 s"):
            wait(0)
    assert not future.done()


def test_cancel_ends_in_rpc_cancelled_and_tells() -> None:
    told: list[int] = []
    future: RpcFuture[int] = RpcFuture(on_cancel=lambda: told.append(1))
    assert future.cancel()
    assert future.cancel()
    assert future.cancelled()
    assert told == [1]
    with pytest.raises(RpcCancelledError):
        future.result()


@pytest.mark.parametrize("error", [KeyError("k"), TimeoutError("raised by the handler"), WorkerDiedError("died")])
async def test_what_the_call_ended_in_is_raised_as_it_is(future: RpcFuture[int], error: Exception) -> None:
    future.fail(error)
    with pytest.raises(type(error)) as caught:
        await future
    assert caught.value is error
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            future.result()
        assert caught.value is error
    assert future.exception() is error


@pytest.mark.parametrize(("cancelled", "error"), [("call", RpcCancelledError), ("task", asyncio.CancelledError)])
async def test_cancelled_call_does_not_look_like_a_cancelled_task(
    future: RpcFuture[int], cancelled: str, error: type[BaseException]
) -> None:
    waiter = asyncio.ensure_future(future)
    await asyncio.sleep(0)
    (future if cancelled == "call" else waiter).cancel()
    with pytest.raises(error):
        await waiter
    assert future.cancelled()


def test_gather_keeps_the_order() -> None:
    futures = pending(3)
    whole = gather(futures, "all")
    for i in (2, 0, 1):
        assert not whole.done()
        futures[i].succeed(i)
    assert whole.result(0) == [0, 1, 2]
    assert gather([], "none").result(0) == []


def test_gather_fails_with_the_first_failure() -> None:
    futures = pending(3)
    whole = gather(futures, "all")
    futures[1].fail(KeyError("k"))
    with pytest.raises(KeyError):
        whole.result(0)
    futures[0].succeed(1)
    futures[2].fail(ValueError("later"))


def test_cancelled_gather_cancels_all() -> None:
    futures = pending(3)
    assert gather(futures, "all").cancel()
    assert all(future.cancelled() for future in futures)

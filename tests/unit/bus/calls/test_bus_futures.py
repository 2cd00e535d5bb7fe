"""A future for every way of waiting."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from unified.bus.calls.future import RpcFuture, gather
from unified.errors import RpcCancelledError, RpcError, RpcTimeoutError


def ended(value: int) -> RpcFuture[int]:
    future: RpcFuture[int] = RpcFuture()
    future.succeed(value)
    return future


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


def test_far_timeout_error_is_raised_as_it_is() -> None:
    future: RpcFuture[int] = RpcFuture()
    future.fail(TimeoutError("raised by the handler"))
    with pytest.raises(TimeoutError, match="raised by the handler"):
        future.result()


def test_cancel_ends_in_rpc_cancelled_and_tells() -> None:
    told: list[int] = []
    future: RpcFuture[int] = RpcFuture(on_cancel=lambda: told.append(1))
    assert future.cancel()
    assert future.cancel()
    assert future.cancelled()
    assert told == [1]
    with pytest.raises(RpcCancelledError):
        future.result()


def test_wait_of_concurrent_futures() -> None:
    slow: RpcFuture[int] = RpcFuture()
    done, pending = concurrent.futures.wait([ended(1), slow], timeout=0)
    assert len(done) == len(pending) == 1
    slow.cancel()
    assert concurrent.futures.wait([slow]).done == {slow}


async def test_await() -> None:
    future: RpcFuture[int] = RpcFuture()
    threading.Timer(0.01, future.succeed, [5]).start()
    assert await future == 5
    assert await asyncio.wrap_future(ended(6)) == 6
    assert list(await asyncio.gather(ended(1), ended(2))) == [1, 2]


async def test_await_raises_what_the_call_ended_in() -> None:
    future: RpcFuture[int] = RpcFuture()
    future.fail(KeyError("k"))
    with pytest.raises(KeyError):
        await future


async def test_cancelled_call_does_not_look_like_a_cancelled_task() -> None:
    future: RpcFuture[int] = RpcFuture()
    waiter = asyncio.ensure_future(future)
    await asyncio.sleep(0)
    future.cancel()
    with pytest.raises(RpcCancelledError):
        await waiter


async def test_cancelled_task_cancels_the_call() -> None:
    future: RpcFuture[int] = RpcFuture()
    waiter = asyncio.ensure_future(future)
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert future.cancelled()


def test_gather_keeps_the_order() -> None:
    futures: list[RpcFuture[int]] = [RpcFuture() for _ in range(3)]
    whole = gather(futures, "all")
    for i in (2, 0, 1):
        assert not whole.done()
        futures[i].succeed(i)
    assert whole.result(0) == [0, 1, 2]
    assert gather([], "none").result(0) == []


def test_gather_fails_with_the_first_failure() -> None:
    futures: list[RpcFuture[int]] = [RpcFuture() for _ in range(3)]
    whole = gather(futures, "all")
    futures[1].fail(KeyError("k"))
    with pytest.raises(KeyError):
        whole.result(0)
    futures[0].succeed(1)
    futures[2].fail(ValueError("later"))


def test_cancelled_gather_cancels_all() -> None:
    futures: list[RpcFuture[int]] = [RpcFuture() for _ in range(3)]
    assert gather(futures, "all").cancel()
    assert all(future.cancelled() for future in futures)

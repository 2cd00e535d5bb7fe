"""Serialised methods of several workers that call one another: they work, or one of them is told why not."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.support.bus import DEADLINE_S, World
from unified.bus.calls.deadlock import monitor
from unified.bus.calls.future import RpcFuture
from unified.bus.calls.registry import rpc
from unified.errors import RpcError
from unified.testing import eventually


class Cast:
    def __init__(self, world: World, **methods: Callable[[Cast], dict[str, Callable[..., Any]]]) -> None:
        self.ends = world.cast({name: make(self) for name, make in methods.items()})

    def call(self, caller: str, target: str, method: str, *args: Any) -> RpcFuture[Any]:
        return self.ends[caller].call(target, method, args, {})


def ask(future: concurrent.futures.Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def look_on(future: concurrent.futures.Future[Any]) -> Any:
    concurrent.futures.wait([future], DEADLINE_S)
    return future.result(0)


def ends_of(calls: list[concurrent.futures.Future[Any]]) -> list[BaseException | None]:
    """What each ended in, long before any of `DEADLINE_S` is over."""
    assert not concurrent.futures.wait(calls, DEADLINE_S / 2).not_done
    return [each.exception() for each in calls]


def counting(cast: Cast) -> dict[str, Callable[..., Any]]:
    """A stream that holds its group as long as it is read, and another method of that group."""

    @rpc(group="g")
    def count() -> Iterator[int]:
        yield from range(1000)

    @rpc(group="g")
    def double(i: int) -> int:
        return 2 * i

    return {"count": count, "double": double}


def meeting(
    me: str, all_in: threading.Barrier, then: Callable[[Cast], Any], concurrency: int = 1
) -> Callable[[Cast], dict[str, Callable[..., Any]]]:
    """A method `m` that says who it is of; called as a root, it does something once all roots are in."""

    def make(cast: Cast) -> dict[str, Callable[..., Any]]:
        @rpc(concurrency=concurrency)
        def m(is_root: bool) -> str:
            if not is_root:
                return me
            all_in.wait(DEADLINE_S)
            return str(then(cast))

        return {"m": m}

    return make


@pytest.mark.parametrize("wait", [ask, look_on])
def test_two_serialised_methods_that_call_one_another_from_two_roots(
    world: World, wait: Callable[[concurrent.futures.Future[Any]], Any]
) -> None:
    both = threading.Barrier(2)
    a = meeting("a", both, lambda cast: wait(cast.call("a", "b", "m", False)))
    b = meeting("b", both, lambda cast: wait(cast.call("b", "a", "m", False)))
    cast = Cast(world, a=a, b=b, x=lambda cast: {}, y=lambda cast: {})
    errors = ends_of([cast.call("x", "a", "m", True), cast.call("y", "b", "m", True)])
    refused = [error for error in errors if error is not None]
    assert len(refused) == 1, errors
    assert isinstance(refused[0], RpcError)
    assert "wait for one another there" in str(refused[0])
    assert "'m' in worker a (in line)" in str(refused[0])
    assert "'m' in worker b (in line)" in str(refused[0])
    assert ask(cast.call("x", "a", "m", False)) == "a"


def test_cycle_through_a_worker_without_limits_and_limits_for_two(world: World) -> None:
    all_in = threading.Barrier(4)
    a = meeting("a", all_in, lambda cast: ask(cast.call("a", "c", "hand_on", "b")), concurrency=2)
    b = meeting("b", all_in, lambda cast: ask(cast.call("b", "c", "hand_on", "a")), concurrency=2)
    cast = Cast(world, a=a, b=b, c=lambda cast: {"hand_on": lambda other: ask(cast.call("c", other, "m", False))})
    errors = ends_of([cast.call("c", target, "m", True) for target in ("a", "a", "b", "b")])
    assert 1 <= sum(error is not None for error in errors) < 4, errors
    assert all(error is None or "wait for one another there" in str(error) for error in errors)


def test_line_that_moves_refuses_nobody(world: World) -> None:
    release = threading.Event()

    def serving(cast: Cast) -> dict[str, Callable[..., Any]]:
        @rpc(concurrency=1)
        def slow(i: int) -> int:
            release.wait(DEADLINE_S)
            return i

        return {"slow": slow}

    def asking(cast: Cast) -> dict[str, Callable[..., Any]]:
        return {"ask": lambda i: ask(cast.call("b", "a", "slow", i))}

    cast = Cast(world, a=serving, b=asking)
    calls = [cast.call("a", "b", "ask", i) for i in range(5)]
    watch = cast.ends["b"]._server.deadlocks
    assert eventually(lambda: watch._graph.has_heard)  # they were told that they wait, and for what
    release.set()
    assert [ask(each) for each in calls] == list(range(5))


def test_log_says_who_is_in_line_behind_a_stream_that_its_caller_does_not_read(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor, "WARN_S", 0.1)

    cast = Cast(world, a=counting, b=lambda cast: {})
    with ask(cast.call("b", "a", "count")) as numbers:
        assert next(numbers) == 0
        doubled = cast.call("b", "a", "double", 1)
        assert eventually(lambda: "event=in-line-behind-stream method='double' caller=b stream='count'" in caplog.text)
        assert not doubled.done()
    assert ask(doubled) == 2
    assert caplog.text.count("in-line-behind-stream") == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_stream_that_waits_for_whoever_is_in_line_behind_it(world: World, is_async: bool) -> None:
    def serving(cast: Cast) -> dict[str, Callable[..., Any]]:
        @rpc(group="g")
        async def count_async() -> AsyncIterator[int]:
            for i in range(1000):
                yield i

        return {**counting(cast), **({"count": count_async} if is_async else {})}

    def asking(cast: Cast) -> dict[str, Callable[..., Any]]:
        def ask_for_each() -> list[int]:
            with ask(cast.call("b", "a", "count")) as numbers:
                return [ask(cast.call("b", "a", "double", i)) for i in numbers]

        return {"ask_for_each": ask_for_each}

    cast = Cast(world, a=serving, b=asking)
    (error,) = ends_of([cast.call("a", "b", "ask_for_each")])
    assert isinstance(error, RpcError)
    assert "'double' in worker a (in line) -> 'count' in worker a (waits) -> " in str(error)
    assert ask(cast.call("b", "a", "double", 1)) == 2  # the stream was closed by its reader


@pytest.mark.parametrize("wait", [ask, look_on])
@pytest.mark.parametrize("is_read", [True, False])
def test_script_that_waits_for_whoever_is_in_line_behind_its_stream(
    world: World, wait: Callable[[concurrent.futures.Future[Any]], Any], is_read: bool
) -> None:
    cast = Cast(world, a=counting, b=lambda cast: {})
    with ask(cast.call("b", "a", "count")) as numbers:
        if is_read:
            assert next(numbers) == 0
        with pytest.raises(RpcError) as caught:
            wait(cast.call("b", "a", "double", 1))
        assert "a call from worker b was given up: calls wait for one another" in str(caught.value)
        assert "'double' in worker a (in line) -> 'count' in worker a (waits) -> its reader (waits)" in str(
            caught.value
        )
        assert list(numbers) == list(range(int(is_read), 1000))
    assert wait(cast.call("b", "a", "double", 1)) == 2


def test_task_that_waits_for_whoever_is_in_line_behind_its_stream(world: World) -> None:
    cast = Cast(world, a=counting, b=lambda cast: {})

    async def both() -> None:
        numbers = await cast.call("b", "a", "count")
        assert await anext(numbers) == 0
        read = asyncio.create_task(read_on(numbers))
        assert await cast.call("b", "a", "double", 1) == 2, "another task reads it"
        assert await read == list(range(1, 1000))

    async def alone() -> None:
        async with contextlib.aclosing(await cast.call("b", "a", "count")) as numbers:
            assert await anext(numbers) == 0
            with pytest.raises(RpcError, match="'count' in worker a \\(waits\\) -> its reader"):
                await cast.call("b", "a", "double", 1)
            with pytest.raises(RpcError, match="'count' in worker a \\(waits\\) -> its reader"):
                cast.call("b", "a", "double", 1).result(DEADLINE_S)  # as does its whole thread

    async def read_on(numbers: Any) -> list[int]:
        await asyncio.sleep(0.6)  # more than two looks
        return [number async for number in numbers]

    asyncio.run(asyncio.wait_for(both(), DEADLINE_S))
    asyncio.run(asyncio.wait_for(alone(), DEADLINE_S))


@pytest.mark.parametrize("is_handler", [True, False])
def test_stream_whose_reader_waits_for_a_worker_that_is_in_line_behind_it(world: World, is_handler: bool) -> None:
    def reading(cast: Cast) -> dict[str, Callable[..., Any]]:
        def read() -> int:
            with ask(cast.call("b", "a", "count")) as numbers:
                next(numbers)
                return int(ask(cast.call("b", "c", "hand_on", 1)))

        return {"read": read}

    def middle(cast: Cast) -> dict[str, Callable[..., Any]]:
        return {"hand_on": lambda i: ask(cast.call("c", "a", "double", i))}

    cast = Cast(world, a=counting, b=reading, c=middle, x=lambda cast: {})
    here = concurrent.futures.ThreadPoolExecutor(1)
    call = cast.call("x", "b", "read") if is_handler else here.submit(reading(cast)["read"])
    with pytest.raises(RpcError, match="a call from worker b was given up: calls wait for one another") as caught:
        call.result(DEADLINE_S / 2)
    here.shutdown(wait=False)
    for words in ("'hand_on' in worker c (waits)", "'double' in worker a (in line)", "'count' in worker a (waits)"):
        assert words in str(caught.value)
    assert ask(cast.call("b", "a", "double", 1)) == 2

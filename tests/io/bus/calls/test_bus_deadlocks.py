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
from unified.bus.calls.future import RpcFuture, gather
from unified.bus.calls.registry import rpc
from unified.errors import RpcError
from unified.testing import eventually
from unified.worker.stacks import threads


class Cast:
    def __init__(self, world: World, **methods: Callable[[Cast], dict[str, Callable[..., Any]]]) -> None:
        self.begun: RpcFuture[Any] = RpcFuture()
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


def _on_loop(cast: Cast) -> dict[str, Callable[..., Any]]:
    """Methods of worker `a`: some wait on its event loop without `await`, for calls that come back to that loop."""
    entered = threading.Event()

    async def inner() -> str:
        return "inner"

    async def count() -> AsyncIterator[int]:
        for i in range(1000):
            yield i

    async def directly() -> Any:
        return ask(cast.call("a", "a", "inner"))

    async def through(target: str, method: str) -> Any:
        return ask(cast.call("a", target, method))

    async def by_exception() -> Any:
        error = cast.call("a", "a", "inner").exception(DEADLINE_S)
        raise error if error is not None else AssertionError("it cannot have ended")

    async def by_gather() -> Any:
        return gather([cast.call("a", "c", "ping"), cast.call("a", "a", "inner")], "both").result(DEADLINE_S)

    async def open_stream() -> Any:
        return next(ask(cast.call("a", "a", "count")))

    async def read_stream() -> Any:
        return list(await cast.call("a", "a", "count"))

    async def suspended() -> str:
        entered.set()
        return str(await cast.call("a", "c", "when_asked"))

    async def for_one_that_has_begun() -> Any:
        cast.begun = cast.call("c", "a", "suspended")
        await asyncio.to_thread(entered.wait, DEADLINE_S)
        return ask(cast.call("a", "c", "ask_for_begun"))

    async def with_await(target: str, method: str) -> Any:
        return await cast.call("a", target, method)

    async def in_a_thread() -> Any:
        return await asyncio.to_thread(ask, cast.call("a", "b", "ask_back"))

    return {name: each for name, each in locals().items() if callable(each)}


def _helpers(cast: Cast) -> dict[str, Callable[..., Any]]:
    """Methods of worker `b`, which call the loop of `a` back."""

    async def ask_back_async() -> Any:
        return await cast.call("b", "a", "inner")

    async def ask_back_without_await() -> Any:
        return ask(cast.call("b", "a", "inner"))

    return {
        "ask_back": lambda: ask(cast.call("b", "a", "inner")),
        "ask_back_async": ask_back_async,
        "ask_back_without_await": ask_back_without_await,
    }


def _loop_cast(world: World) -> Cast:
    asked = threading.Event()

    def ask_for_begun(cast: Cast) -> Any:
        asked.set()
        return ask(cast.begun)

    def third(cast: Cast) -> dict[str, Callable[..., Any]]:
        return {
            "ping": lambda: 1,
            "when_asked": lambda: asked.wait(DEADLINE_S),
            "ask_for_begun": lambda: ask_for_begun(cast),
        }

    return Cast(world, a=_on_loop, b=_helpers, c=third)


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("directly", ()),
        ("by_exception", ()),
        ("by_gather", ()),
        ("open_stream", ()),
        ("read_stream", ()),
        ("for_one_that_has_begun", ()),
        ("through", ("b", "ask_back")),
        ("through", ("b", "ask_back_async")),
        ("through", ("b", "ask_back_without_await")),
    ],
)
def test_async_handler_that_waits_without_await_for_its_own_loop_is_refused(
    world: World, method: str, args: tuple[str, ...]
) -> None:
    cast = _loop_cast(world)
    (error,) = ends_of([cast.call("c", "a", method, *args)])
    assert isinstance(error, RpcError)
    assert "a turn on the event loop of worker" in str(error)
    assert "which a handler blocks that does not `await` (in line)" in str(error)
    assert "Await calls in an `async def` handler" in str(error)
    assert ask(cast.call("c", "a", "inner")) == "inner", "the loop goes on"
    assert ask(cast.call("c", "a", "with_await", "b", "ask_back")) == "inner"


def test_async_handler_that_does_not_block_its_loop_is_not_refused(world: World) -> None:
    cast = _loop_cast(world)
    assert ask(cast.call("c", "a", "with_await", "a", "inner")) == "inner"
    assert ask(cast.call("c", "a", "with_await", "b", "ask_back_async")) == "inner"
    assert ask(cast.call("c", "a", "in_a_thread")) == "inner"
    assert ask(cast.call("c", "a", "through", "c", "ping")) == 1, "it blocks the loop, and needs it not"


def test_calls_behind_a_loop_that_is_blocked_for_a_while_are_not_refused(world: World) -> None:
    entered, release = threading.Event(), threading.Event()

    def serving(cast: Cast) -> dict[str, Callable[..., Any]]:
        async def wait_for_c() -> Any:
            return ask(cast.call("a", "c", "hold"))

        async def inner() -> str:
            return "inner"

        return {"wait_for_c": wait_for_c, "inner": inner}

    def holding(cast: Cast) -> dict[str, Callable[..., Any]]:
        def hold() -> int:
            entered.set()
            release.wait(DEADLINE_S)
            return 1

        return {"hold": hold}

    def asking(cast: Cast) -> dict[str, Callable[..., Any]]:
        return {"ask": lambda: ask(cast.call("b", "a", "inner"))}

    cast = Cast(world, a=serving, b=asking, c=holding)
    first = cast.call("b", "a", "wait_for_c")
    assert entered.wait(DEADLINE_S)
    second = cast.call("c", "b", "ask")
    watch = cast.ends["b"]._server.deadlocks
    assert eventually(lambda: watch._graph.has_heard)  # it was told that its call waits, and for what
    release.set()
    assert ask(first) == 1
    assert ask(second) == "inner"


def test_handler_that_blocks_the_loop_is_named_in_the_log_and_in_the_stacks(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor, "WARN_S", 0.1)
    entered, release = threading.Event(), threading.Event()

    def serving(cast: Cast) -> dict[str, Callable[..., Any]]:
        async def block() -> str:
            entered.set()
            await asyncio.sleep(0)
            release.wait(DEADLINE_S)
            return threading.current_thread().name

        async def nap() -> None:
            await asyncio.sleep(0)

        return {"block": block, "nap": nap}

    cast = Cast(world, a=serving, b=lambda cast: {})
    line = "worker=a event=loop-blocked method='block' seconds="

    def loops() -> list[str]:
        return [thread.name for thread in threads() if thread.name.startswith("bus-loop")]

    assert ask(cast.call("b", "a", "nap")) is None
    for num_blocked in (1, 2):
        blocked = cast.call("b", "a", "block")
        assert eventually(lambda: loops() == ["bus-loop, blocked by block"])
        assert not blocked.done()
        assert eventually(lambda number=num_blocked: caplog.text.count(line) == number)  # type: ignore[misc]
        release.set()
        assert ask(blocked) == "bus-loop, blocked by block"
        assert eventually(lambda: loops() == ["bus-loop"])
        release.clear()
    assert ask(cast.call("b", "a", "nap")) is None
    assert caplog.text.count("loop-blocked") == 2


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_callback_may_wait_for_another_worker_than_the_one_that_it_interrupts(
    world: World, is_gathered: bool
) -> None:
    if world.route != "auto":
        pytest.skip("only a thread that receives from a Unix socket reads its own answers")
    release, found = threading.Event(), list[Any]()
    slow = {"slow": lambda: release.wait(DEADLINE_S)}
    cast = Cast(world, a=lambda cast: {}, b=lambda cast: slow, c=lambda cast: {"ping": lambda: "pong"})
    call = cast.call("a", "b", "slow")

    def wait_for_another(_: object) -> None:
        found.append(cast.call("a", "c", "ping").result(DEADLINE_S))

    call.on_end(wait_for_another)
    threading.Timer(0.3, release.set).start()  # while this thread waits, and reads the answer itself
    (gather([call], "all") if is_gathered else call).result(DEADLINE_S)
    eventually(lambda: found == ["pong"], DEADLINE_S)

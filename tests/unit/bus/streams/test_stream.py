"""Streams with threads and event loops on both sides: who waits, who wakes whom, who is closed."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing

import pytest

from tests.support.streams import DEADLINE_S, WHAT, Wire, count, count_async
from unified.bus.codec.codec import encode
from unified.bus.executor import HandlerPool
from unified.bus.streams.stream import WINDOW_ITEMS, Awaited, RpcStream, StreamFeed, waited_in_vain
from unified.errors import RemoteError, RpcTimeoutError, UsageError
from unified.protocol.envelope import Kind
from unified.testing import eventually


@pytest.fixture
def pool() -> Iterator[HandlerPool]:
    pool = HandlerPool("bus-stream-test", 2)
    yield pool
    pool.close()


def test_sync_to_sync(pool: HandlerPool) -> None:
    wire = Wire(count(1000))
    pool.submit(lambda: wire.source.run(pool))
    assert list(RpcStream[int](wire.feed)) == list(range(1000))
    assert len(wire.told) >= 1000 // WINDOW_ITEMS


def test_generator_stays_on_its_thread_and_in_its_context(pool: HandlerPool) -> None:
    def idents() -> Generator[int, None, None]:
        for _ in range(200):
            yield threading.get_ident()

    wires = [Wire(idents()) for _ in range(5)]
    for wire in wires:
        pool.submit(lambda wire=wire: wire.source.run(pool))  # type: ignore[misc]
    for wire in wires:
        assert len(set(RpcStream[int](wire.feed))) == 1


def test_waiting_streams_do_not_use_the_pool_up(pool: HandlerPool) -> None:
    wires = [Wire(count(100)) for _ in range(20)]
    for wire in wires:
        pool.submit(lambda wire=wire: wire.source.run(pool))  # type: ignore[misc]
    ran = threading.Event()
    pool.submit(ran.set)
    assert ran.wait(DEADLINE_S)
    eventually(lambda: all(wire.num_items == WINDOW_ITEMS for wire in wires))
    for wire in wires:
        assert list(RpcStream[int](wire.feed)) == list(range(100))


def test_close_wakes_a_generator_that_waits(pool: HandlerPool) -> None:
    seen: list[str] = []
    wire = Wire(count(100, seen))
    pool.submit(lambda: wire.source.run(pool))
    eventually(lambda: wire.num_items == WINDOW_ITEMS)
    wire.feed.close()
    eventually(lambda: seen == ["exit", "finally"])


def test_fail_wakes_a_consumer_that_waits() -> None:
    wire = Wire(count(0))
    threading.Timer(0.02, wire.feed.fail, [RpcTimeoutError("late")]).start()
    with pytest.raises(RpcTimeoutError):
        next(RpcStream[int](wire.feed))


def test_close_wakes_a_consumer_that_waits() -> None:
    wire = Wire(count(0))
    stream: RpcStream[int] = RpcStream(wire.feed)
    threading.Timer(0.02, stream.close).start()
    assert list(stream) == []


def test_several_threads_share_a_stream(pool: HandlerPool) -> None:
    wire = Wire(count(500))
    stream: RpcStream[int] = RpcStream(wire.feed)
    got: list[int] = []
    readers = [threading.Thread(target=lambda: got.extend(stream)) for _ in range(3)]
    for reader in readers:
        reader.start()
    pool.submit(lambda: wire.source.run(pool))
    for reader in readers:
        reader.join(DEADLINE_S)
    assert sorted(got) == list(range(500))


def test_before_and_after_a_wait_and_a_wait_that_is_refused() -> None:
    calls: list[object] = []

    class Watching:
        def before_wait(self, awaited: Awaited, task: int = 0) -> str:
            if awaited is refused:
                raise waited_in_vain(awaited)
            calls.append("before")
            threading.Thread(target=feed.end, args=[1]).start()
            return "token"

        def after_wait(self, token: str) -> None:
            calls.append(token)

        def failed(self, what: object, error: BaseException) -> None:
            raise AssertionError("a stream is no future")

    wire = Wire(count(0))
    feed, refused = (
        StreamFeed(WHAT, send_more=wire.more, cancel=wire.cancel, abandon=wire.abandon, host=Watching())
        for _ in range(2)
    )
    stream: RpcStream[int] = RpcStream(feed)
    feed.push(0, encode(7).body, [])
    assert next(stream) == 7
    assert calls == []  # it was there
    assert list(stream) == []
    assert calls == ["before", "token"]
    with pytest.raises(UsageError, match="'tokens' to worker b was waited for on a thread that its answer needs"):
        next(RpcStream[int](refused))


async def test_async_to_async() -> None:
    wire = Wire(count_async(300))
    wire.num_refusals = 3
    task = asyncio.create_task(wire.source.run_async())
    assert [i async for i in RpcStream[int](wire.feed)] == list(range(300))
    await task
    assert (wire.sent[0], wire.sent[-1]) == ((Kind.STREAM, 0), (Kind.RESULT, 300))


async def test_sync_to_async(pool: HandlerPool) -> None:
    wire = Wire(count(300))
    pool.submit(lambda: wire.source.run(pool))
    async with RpcStream[int](wire.feed) as stream:
        assert [i async for i in stream] == list(range(300))


async def test_async_source_parks_a_window_ahead() -> None:
    wire = Wire(count_async(100))
    task = asyncio.create_task(wire.source.run_async())
    for _ in range(10 * WINDOW_ITEMS):
        await asyncio.sleep(0)
    assert wire.num_items == WINDOW_ITEMS
    wire.source.close()
    await task


@pytest.mark.parametrize("where", ["parked", "awaiting", "no room to send", "not begun"])
async def test_async_generator_is_closed_wherever_it_is(where: str) -> None:
    seen: list[str] = []

    async def forever() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        except BaseException as error:
            seen.append(type(error).__name__)
            raise
        finally:
            await asyncio.sleep(0)
            seen.append("finally")

    wire = Wire(forever() if where == "awaiting" else count_async(100, seen))
    if where == "no room to send":
        wire.num_refusals = 10**9
    task = asyncio.create_task(wire.source.run_async())
    for _ in range(0 if where == "not begun" else 100):
        await asyncio.sleep(0)
    async with aclosing(RpcStream[int](wire.feed)):
        pass
    await asyncio.wait_for(task, DEADLINE_S)
    expected = {"parked": ["GeneratorExit", "finally"], "awaiting": ["CancelledError", "finally"]}
    assert seen == expected.get(where, [])


async def test_async_generator_that_swallows_its_cancellation_is_closed_at_its_next_value() -> None:
    seen: list[str] = []

    async def deaf() -> AsyncGenerator[int, None]:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("swallowed")
            yield 1

    wire = Wire(deaf())
    task = asyncio.create_task(wire.source.run_async())
    for _ in range(5):
        await asyncio.sleep(0)
    wire.source.close()
    await asyncio.wait_for(task, DEADLINE_S)
    assert seen == ["swallowed"]
    assert wire.num_items == 0


async def test_async_errors_reach_the_caller() -> None:
    async def broken() -> AsyncGenerator[object, None]:
        yield 1
        raise OSError(2, "No such file")

    async def cancelled() -> AsyncGenerator[object, None]:
        yield 1
        raise asyncio.CancelledError

    async def unsendable() -> AsyncGenerator[object, None]:
        yield 1
        yield threading.Lock()

    makers: list[Callable[[], AsyncGenerator[object, None]]] = [broken, cancelled, unsendable]
    errors: list[RemoteError] = []
    for maker in makers:
        wire = Wire(maker())
        await wire.source.run_async()
        stream: RpcStream[int] = RpcStream(wire.feed)
        assert await anext(stream) == 1
        with pytest.raises(RemoteError) as caught:
            await anext(stream)
        errors.append(caught.value)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert isinstance(errors[0], FileNotFoundError)
    assert errors[1].type_name.endswith("CancelledError")
    assert "cannot be sent" in errors[2].message


async def test_task_that_is_cancelled_from_outside_closes_the_generator() -> None:
    seen: list[str] = []
    task = asyncio.create_task(Wire(count_async(100, seen)).source.run_async())
    for _ in range(100):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["GeneratorExit", "finally"]


async def test_cancelled_consumer_leaves_the_stream_as_it_was() -> None:
    wire = Wire(count_async(3))
    stream: RpcStream[int] = RpcStream(wire.feed)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    await wire.source.run_async()
    assert [i async for i in stream] == [0, 1, 2]


async def test_async_deadline_ends_the_waiting() -> None:
    seen: list[str] = []
    wire = Wire(count_async(100, seen), expires=time.monotonic() + 0.05)
    await asyncio.wait_for(wire.source.run_async(), DEADLINE_S)
    assert seen == ["GeneratorExit", "finally"]
    assert wire.num_items == WINDOW_ITEMS


def test_consumer_on_a_loop_that_was_closed_is_forgotten() -> None:
    wire = Wire(count(0))

    async def wait() -> None:
        await asyncio.wait_for(anext(RpcStream[int](wire.feed)), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    wire.feed.push(0, encode(1).body, [])
    assert next(RpcStream[int](wire.feed)) == 1

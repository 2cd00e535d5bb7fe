"""Streams between two workers on real sockets, on every route."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bus import DEADLINE_S, World, entry, pass_deadlines
from unified.bus.calls.registry import rpc
from unified.bus.endpoint import BusEndpoint
from unified.bus.streams.stream import WINDOW_ITEMS, RpcStream
from unified.errors import RemoteError, RouteLostError, RpcCancelledError, RpcTimeoutError, WorkerDiedError
from unified.protocol.records import Reachability
from unified.testing import eventually
from unified_master.relay import BusRelay


def stream(bus: BusEndpoint, method: str, *args: Any, timeout: float | None = None) -> RpcStream[Any]:
    value = bus.call("b", method, args, {}, timeout=timeout).result(DEADLINE_S)
    assert isinstance(value, RpcStream)
    return value


class Counter:
    """Generators that say how far they are and how they ended."""

    def __init__(self) -> None:
        self.made = 0
        self.ends: list[str] = []
        self.ended = threading.Event()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        try:
            yield
            self.ends.append("end")
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        finally:
            self.ended.set()

    def count(self, number: int) -> Iterator[int]:
        with self.noting():
            for i in range(number):
                self.made = i + 1
                yield i

    async def count_async(self, number: int) -> AsyncIterator[int]:
        with self.noting():
            for i in range(number):
                self.made = i + 1
                yield i

    async def never(self) -> AsyncIterator[int]:
        with self.noting():
            yield 0
            await asyncio.Event().wait()

    def methods(self) -> dict[str, Any]:
        return {"count": self.count, "count_async": self.count_async, "never": self.never, "ping": lambda: "pong"}


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def a(world: World, counter: Counter) -> BusEndpoint:
    return world.pair(counter.methods())[0]


@pytest.fixture(params=["count", "count_async"])
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_items_come_in_order_to_the_end(a: BusEndpoint, method: str, counter: Counter) -> None:
    assert list(stream(a, method, 500)) == list(range(500))
    assert counter.ends == ["end"]
    assert list(stream(a, method, 0)) == []
    assert not a._client._outbound


async def test_async_iteration(a: BusEndpoint, method: str) -> None:
    both = await asyncio.gather(a.call("b", method, (300,), {}), a.call("b", method, (300,), {}))
    for each in both:
        assert [i async for i in each] == list(range(300))


def test_items_arrive_while_the_generator_runs(world: World) -> None:
    going = threading.Event()

    def steps() -> Iterator[str]:
        yield "first"
        assert going.wait(DEADLINE_S)
        yield "second"

    a, _ = world.pair({"steps": steps})
    items = stream(a, "steps")
    assert next(items) == "first"
    going.set()
    assert list(items) == ["second"]


def test_generator_is_held_back_a_window_ahead(a: BusEndpoint, method: str, counter: Counter) -> None:
    items = stream(a, method, 1000)
    eventually(lambda: counter.made >= WINDOW_ITEMS)
    assert a.call("b", "ping", (), {}).result(DEADLINE_S) == "pong"  # behind whatever else was sent
    assert counter.made == WINDOW_ITEMS
    for i in range(100):
        assert next(items) == i
    assert counter.made <= 100 + WINDOW_ITEMS
    items.close()


def test_early_close_closes_the_generator(a: BusEndpoint, method: str, counter: Counter) -> None:
    with stream(a, method, 1000) as items:
        assert [next(items), next(items)] == [0, 1]
    assert counter.ended.wait(DEADLINE_S)
    assert counter.ends == ["GeneratorExit"]
    assert list(items) == []
    eventually(lambda: not a._client._outbound)


def test_dropped_handle_closes_the_generator(a: BusEndpoint, method: str, counter: Counter) -> None:
    items: Any = stream(a, method, 1000)
    assert next(items) == 0
    del items
    gc.collect()
    assert counter.ended.wait(DEADLINE_S)
    assert counter.ends == ["GeneratorExit"]


def test_dropped_future_closes_the_generator(world: World, method: str, counter: Counter) -> None:
    a, b = world.pair(counter.methods())
    a.call("b", method, (1000,), {})
    gc.collect()
    eventually(lambda: not a._client._outbound)
    eventually(lambda: not b._server._known)
    assert counter.ends in ([], ["GeneratorExit"])  # none: it was closed before it had begun


def test_async_generator_that_awaits_is_cancelled(a: BusEndpoint, counter: Counter) -> None:
    items = stream(a, "never")
    assert next(items) == 0
    assert a.call("b", "ping", (), {}).result(DEADLINE_S) == "pong"
    items.close()
    assert counter.ended.wait(DEADLINE_S)
    assert counter.ends in (["CancelledError"], ["GeneratorExit"])  # the second: it had not yet come to awaiting


def test_deadline_is_one_for_the_whole_stream(a: BusEndpoint, counter: Counter) -> None:
    items = stream(a, "never", timeout=DEADLINE_S)
    assert next(items) == 0
    pass_deadlines(a)
    with pytest.raises(RpcTimeoutError, match=rf"within {DEADLINE_S:g} s"):
        next(items)
    assert counter.ended.wait(DEADLINE_S)
    assert list(items) == []
    assert a.call("b", "ping", (), {}).result(DEADLINE_S) == "pong"


async def test_deadline_ends_an_async_wait(a: BusEndpoint) -> None:
    items = await a.call("b", "never", (), {}, timeout=DEADLINE_S)
    assert await anext(items) == 0
    pass_deadlines(a)
    with pytest.raises(RpcTimeoutError):
        await anext(items)


def test_generator_that_waits_for_its_caller_ends_at_the_deadline(
    a: BusEndpoint, method: str, counter: Counter
) -> None:
    items = stream(a, method, 1000, timeout=DEADLINE_S)
    eventually(lambda: counter.made == WINDOW_ITEMS)
    pass_deadlines(a)
    assert counter.ended.wait(DEADLINE_S)
    assert counter.ends in (["GeneratorExit"], ["CancelledError"])
    assert counter.made == WINDOW_ITEMS
    got = []
    with pytest.raises(RpcTimeoutError):
        got += list(iter(lambda: next(items), None))
    eventually(lambda: not a._client._outbound)


def test_error_after_some_items(world: World) -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("key")

    a, _ = world.pair({"broken": broken})
    items = stream(a, "broken")
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError) as caught:
        next(items)
    error = caught.value
    assert isinstance(error, RemoteError)
    assert (error.worker, error.node) == ("b", "n1")
    assert 'raise KeyError("key")' in error.traceback
    for ours in ("stream_source.py", "service.py", "pool.py"):
        assert ours not in error.traceback
    (note,) = error.__notes__
    assert note.startswith("the call of 'broken' to worker b raised KeyError in worker b on node n1:\nTraceback")


def test_error_before_the_first_item_and_value_that_cannot_be_sent(world: World) -> None:
    def at_once() -> Iterator[object]:
        raise ValueError("at once")
        yield

    def unsendable() -> Iterator[object]:
        yield 1
        yield threading.Lock()

    a, _ = world.pair({"at_once": at_once, "unsendable": unsendable})
    with pytest.raises(ValueError, match="at once"):
        next(stream(a, "at_once"))
    items = stream(a, "unsendable")
    assert next(items) == 1
    with pytest.raises(RemoteError, match="cannot be sent"):
        next(items)
    with pytest.raises(TypeError):  # its arguments do not fit: it never becomes a generator
        a.call("b", "at_once", (1,), {}).result(DEADLINE_S)


def test_marked_generators_are_streams_too(world: World) -> None:
    class Service:
        @rpc()
        def letters(self, word: str) -> Iterator[str]:
            yield from word

        @rpc()
        async def letters_async(self, word: str) -> AsyncIterator[str]:
            for letter in word:
                yield letter

    service = Service()
    a, _ = world.pair({"letters": service.letters, "letters_async": service.letters_async})
    assert "".join(stream(a, "letters", "word")) == "word"
    assert "".join(stream(a, "letters_async", "word")) == "word"


def test_large_items(world: World) -> None:
    def arrays(number: int) -> Iterator[np.ndarray]:
        for i in range(number):
            yield np.full(8 << 20, i, np.uint8)

    a, _ = world.pair({"arrays": arrays})
    for i, array in enumerate(stream(a, "arrays", 12)):
        assert array.nbytes == 8 << 20
        assert (array[:: 1 << 20] == i).all()


def test_more_slow_streams_than_threads_and_others_are_still_served(a: BusEndpoint) -> None:
    opened = [a.call("b", "count", (40,), {}) for _ in range(60)]
    streams = [each.result(DEADLINE_S) for each in opened]
    assert a.call("b", "ping", (), {}).result(DEADLINE_S) == "pong"
    for each in streams:
        assert list(each) == list(range(40))


def test_thread_local_state_stays_with_its_generator(world: World) -> None:
    mine = threading.local()

    def numbered(number: int) -> Iterator[tuple[int, int]]:
        mine.number = number
        for _ in range(60):
            yield number, mine.number

    a, _ = world.pair({"numbered": numbered})
    streams = [stream(a, "numbered", i) for i in range(6)]
    for items in zip(*streams, strict=True):
        assert all(got == expected for expected, got in items)


def test_death_of_the_callee_comes_after_what_had_come(world: World) -> None:
    a, process = world.pair_with_process()
    items = stream(a, "count_for_ever", 5)
    assert [next(items) for _ in range(5)] == list(range(5))
    process.kill()
    a.update_directory([entry("b", None, 0, Reachability.DEAD, "killed by SIGKILL")])
    with pytest.raises(WorkerDiedError, match=r"worker b \(incarnation 0 on node n1\) died"):
        next(items)


def test_death_of_the_caller_closes_the_generator(world: World, method: str, counter: Counter) -> None:
    a, b = world.cast({"a": {}, "b": counter.methods()}).values()
    items = stream(a, method, 1000)
    assert next(items) == 0
    b.update_directory([entry("a", None, 0, Reachability.DEAD, "killed")])
    assert counter.ended.wait(DEADLINE_S)
    assert counter.ends == ["GeneratorExit"]
    eventually(lambda: not b._server._known)
    items.close()


def test_closing_the_caller_ends_the_iteration(a: BusEndpoint, counter: Counter) -> None:
    items = stream(a, "never")
    assert next(items) == 0
    a.close()
    with pytest.raises(RpcCancelledError, match="the bus of worker a was closed"):
        next(items)


def test_closing_the_callee_closes_its_generators(world: World, method: str, counter: Counter) -> None:
    a, b = world.pair(counter.methods())
    items = stream(a, method, 1000)
    assert next(items) == 0
    b.close()
    assert counter.ended.wait(DEADLINE_S)
    items.close()


def test_relay_that_is_lost_ends_the_streams_that_went_through_it(
    tmp_path: Path, method: str, counter: Counter
) -> None:
    relay = BusRelay("tcp://127.0.0.1:0")
    address = relay.start()
    with contextlib.closing(World(tmp_path, "relay", address)) as world:
        a, b = world.pair(counter.methods())
        items = stream(a, method, 1000)
        assert next(items) == 0
        relay.close()
        with pytest.raises(RouteLostError, match="connection to the bus relay broke"):
            list(items)
        assert counter.ended.wait(DEADLINE_S)
        assert counter.ends == ["GeneratorExit"]
        eventually(lambda: not b._server._known)
        with contextlib.closing(BusRelay(address)) as again:
            again.start()
            assert list(a.call("b", method, (20,), {}, timeout=DEADLINE_S).result()) == list(range(20))


def test_callee_that_loses_its_relay_says_so_to_who_might_wait_for_what_was_lost(
    tmp_path: Path, relay: str, counter: Counter
) -> None:
    with contextlib.closing(World(tmp_path, "relay", relay)) as world:
        a, b = world.pair(counter.methods())
        items = stream(a, "never")
        assert next(items) == 0
        b._dispatcher.relay_lost()
        b._dispatcher.relay_found()
        with pytest.raises(RouteLostError, match="the connection of worker b to the bus relay broke"):
            next(items)
        assert counter.ended.wait(DEADLINE_S)


def test_cancelling_before_the_first_item(world: World, counter: Counter) -> None:
    a, _ = world.endpoint("a")
    future = a.call("b", "count", (10,), {})  # b is not up
    assert future.cancel()
    _, inbox = world.endpoint("b", counter.methods())
    a.update_directory([entry("b", inbox)])
    assert a.call("b", "ping", (), {}).result(DEADLINE_S) == "pong"
    assert counter.made == 0


def test_stream_from_inside_a_handler_and_to_oneself(world: World) -> None:
    def double() -> Iterator[int]:
        for i in b.call("b", "count", (50,), {}).result(DEADLINE_S):
            yield 2 * i

    def count(number: int) -> Iterator[int]:
        yield from range(number)

    a, b = world.cast({"a": {}, "b": {"double": double, "count": count}}).values()
    assert list(stream(a, "double")) == [2 * i for i in range(50)]


def test_reading_on_the_thread_that_items_come_on_is_refused_instead_of_hanging(a: BusEndpoint) -> None:
    caught: list[BaseException] = []
    done = threading.Event()

    def read(future: Any) -> None:
        try:
            caught.append(AssertionError(list(future.result())))
        except BaseException as error:
            caught.append(error)
        finally:
            done.set()

    future = a.call("b", "count", (100,), {})
    future.add_done_callback(read)
    assert done.wait(DEADLINE_S)
    (error,) = caught
    assert "would wait for ever" in str(error) or str(error) == str(list(range(100)))

"""Which thread runs a handler, in what order they start, and that those that wait for one another never hang."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.bus import DEADLINE_S, World, call
from tests.support.deadlines import missed
from unified.bus.calls.inbound import current_call
from unified.bus.calls.registry import rpc
from unified.bus.calls.sender import Sender
from unified.bus.calls.server import MAX_HANDLER_THREADS
from unified.bus.endpoint import BusEndpoint
from unified.bus.transport.io_threads import INLINE_TICKS
from unified.bus.transport.unix_connection import UnixConnection
from unified.errors import RpcCancelledError, RpcError
from unified.protocol.envelope import Envelope, Kind
from unified.testing import eventually


def test_inline_runs_where_the_call_is_received(world: World) -> None:
    name = rpc(inline=True)(lambda: threading.current_thread().name)
    a, _ = world.pair({"name": name})
    assert call(a, "name").startswith("bus-remote" if world.route != "auto" else "bus-io")


def test_inline_handler_keeps_the_others_waiting_for_a_moment_and_not_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.route != "auto":
        pytest.skip("only the threads that receive from Unix sockets take turns")
    began, release = threading.Event(), threading.Event()

    @rpc(inline=True)
    def hold() -> bool:
        began.set()
        return release.wait(DEADLINE_S)

    a, b = world.pair({"hold": hold, "ping": rpc(inline=True)(lambda: 1)})
    monkeypatch.setattr(b._io._timer, "set", lambda at: None)  # the test ticks
    held = a.call("b", "hold", (), {})
    assert began.wait(DEADLINE_S)
    ping = a.call("b", "ping", (), {})
    for _ in range(10):
        b._io.tick()
    assert not concurrent.futures.wait([ping], missed(0.05)).done
    for _ in range(INLINE_TICKS):
        b._io.tick()
    assert ping.result(DEADLINE_S) == 1
    release.set()
    assert held.result(DEADLINE_S)


def test_short_handler_comes_to_run_where_it_is_received_and_a_long_one_leaves_again(world: World) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> str:
        naps.append(seconds)
        time.sleep(seconds)
        return threading.current_thread().name

    a, _ = world.pair({"nap": nap})
    assert call(a, "nap", 0).startswith("bus-handler")
    if world.route == "auto":
        assert eventually(lambda: call(a, "nap", 0).startswith("bus-io"))
    call(a, "nap", 0.05)
    assert call(a, "nap", 0).startswith("bus-handler")


def test_handler_that_was_short_and_blocks_holds_up_nobody(world: World) -> None:
    release = threading.Event()
    a, _ = world.pair({"wait": lambda is_long: release.wait(DEADLINE_S if is_long else 0), "ping": lambda: 1})
    for _ in range(20):
        call(a, "wait", False)
        call(a, "ping")
    stuck = [a.call("b", "wait", (True,), {}) for _ in range(3)]
    assert call(a, "ping") == 1
    release.set()
    assert all(each.result(DEADLINE_S) for each in stuck)


_read: list[int] = []
"""Numbers of the `Numbered` that were unpickled."""


class Numbered:
    """An argument that notes when it is read, which takes a millisecond for every third."""

    def __init__(self, i: int) -> None:
        self.i = i
        self.ballast = [(i,)] * 20_000 if i % 3 == 0 else []

    def __reduce__(self) -> Any:
        return note_read, (self.i, [*self.ballast])


def note_read(i: int, ballast: list[Any]) -> int:
    _read.append(i)
    return i


def call_numbered(a: BusEndpoint, method: str) -> None:
    _read.clear()
    calls = [a.call("b", method, (Numbered(i),), {}) for i in range(300)]
    assert not concurrent.futures.wait(calls, DEADLINE_S).not_done


def test_calls_of_one_caller_start_in_order(world: World) -> None:
    started: list[int] = []

    def note(i: int) -> None:
        started.append(i)
        if i % 7 == 0:
            time.sleep(0.002)

    async def note_async(i: int) -> None:
        started.append(i)
        await asyncio.sleep(0.001 * (i % 3))

    a, _ = world.pair({"note": note, "two_at_a_time": rpc(concurrency=2)(note), "note_async": note_async})
    call_numbered(a, "note_async")
    assert started == list(range(300))
    for method in ("note", "two_at_a_time"):
        started.clear()
        call_numbered(a, method)
        assert sorted(started) == list(range(300))
        # A thread reads its arguments, has the next call begun, and calls its handler: whose first line may run after
        # the next one's, if the system takes its core away between. So what is certain is the order of the reading.
        assert _read == list(range(300))


def test_concurrency_and_group(world: World) -> None:
    lock = threading.Lock()
    running = {"alone": 0, "group": 0}
    most = {"alone": 0, "group": 0}

    @contextlib.contextmanager
    def counted(kind: str) -> Iterator[None]:
        with lock:
            running[kind] += 1
            most[kind] = max(most[kind], running[kind])
        yield
        with lock:
            running[kind] -= 1

    @rpc(concurrency=2)
    def alone() -> None:
        with counted("alone"):
            time.sleep(0.001)

    @rpc(group="g")
    def left() -> None:
        with counted("group"):
            time.sleep(0.001)

    @rpc(group="g")
    async def right() -> None:
        with counted("group"):
            await asyncio.sleep(0.001)

    a, _ = world.pair({"alone": alone, "left": left, "right": right})
    futures = [a.call("b", method, (), {}) for _ in range(20) for method in ("alone", "left", "right")]
    assert not concurrent.futures.wait(futures, DEADLINE_S).not_done
    assert all(each.exception() is None for each in futures)
    assert most == {"alone": 2, "group": 1}


def test_cancelled_call_in_line_lets_the_next_through(world: World) -> None:
    release, ran = threading.Event(), []

    @rpc(concurrency=1)
    def alone(i: int) -> int:
        ran.append(i)
        release.wait(DEADLINE_S)
        return i

    a, b = world.pair({"alone": alone})
    first, second, third = (a.call("b", "alone", (i,), {}) for i in range(3))
    eventually(lambda: len(b._server._known) == 3 and ran)
    assert second.cancel()
    eventually(lambda: len(b._server._known) == 2)
    release.set()
    assert (first.result(DEADLINE_S), third.result(DEADLINE_S)) == (0, 2)
    assert ran == [0, 2]
    with pytest.raises(RpcCancelledError):
        second.result()


def test_answer_may_come_later(world: World) -> None:
    waiting: list[concurrent.futures.Future[str]] = []

    @rpc(inline=True)
    def later() -> concurrent.futures.Future[str]:
        waiting.append(concurrent.futures.Future())
        return waiting[-1]

    a, _ = world.pair({"later": later})
    good, bad = a.call("b", "later", (), {}), a.call("b", "later", (), {})
    eventually(lambda: len(waiting) == 2)
    waiting[0].set_result("now")
    waiting[1].set_exception(KeyError("k"))
    assert good.result(DEADLINE_S) == "now"
    with pytest.raises(KeyError):
        bad.result(DEADLINE_S)


def test_handler_knows_its_caller(world: World) -> None:
    a, _ = world.pair({"who": current_call})
    assert call(a, "who") == ("a", a.inbox_id)
    assert current_call() is None


def ring(world: World) -> tuple[BusEndpoint, BusEndpoint]:
    """Two workers that call one another: ``down(n)`` in each calls ``down(n - 1)`` in the other, and waits."""

    def down(me: str, other: str) -> Any:
        return lambda n: 0 if n == 0 else 1 + ends[me].call(other, "down", (n - 1,), {}, timeout=DEADLINE_S).result()

    ends: dict[str, BusEndpoint] = {}
    ends |= world.cast({me: {"down": down(me, other)} for me, other in (("a", "b"), ("b", "a"))})
    return ends["a"], ends["b"]


def test_cycle_of_calls_works_until_it_is_absurd(world: World) -> None:
    a, _ = ring(world)
    assert call(a, "down", 3) == 3
    assert call(a, "down", 50) == 50  # deeper than there are threads
    with pytest.raises(RpcError, match="Do they call one another in a cycle"):
        call(a, "down", 10_000)
    assert call(a, "down", 5) == 5


def test_call_to_oneself(world: World) -> None:
    a, _ = ring(world)
    assert a.call("a", "down", (1,), {}, timeout=DEADLINE_S).result() == 1


def test_serialised_method_that_calls_itself_is_told_so(world: World) -> None:
    @rpc(concurrency=1)
    def alone(n: int) -> int:
        return 0 if n == 0 else 1 + int(b.call("b", "alone", (n - 1,), {}, timeout=DEADLINE_S).result())

    a, b = world.cast({"a": {}, "b": {"alone": alone}}).values()
    with pytest.raises(RpcError, match="wait for one another there"):
        call(a, "alone", 1)
    assert call(a, "alone", 0) == 0


def test_calls_that_no_thread_is_left_for_are_refused(world: World) -> None:
    def ask(me: str, other: str, method: str) -> Any:
        def handler() -> Any:
            assert me == "a" or are_all_waiting.wait(DEADLINE_S)
            return ends[me].call(other, method, (), {}, timeout=DEADLINE_S).result()

        return handler

    are_all_waiting = threading.Event()
    ends: dict[str, BusEndpoint] = {}
    ends |= world.cast({"a": {"f": ask("a", "b", "g"), "h": lambda: 1}, "b": {"g": ask("b", "a", "h")}})
    for endpoint in ends.values():
        endpoint._pool.most_threads = 40
    calls = [ends["b"].call("a", "f", (), {}) for _ in range(60)]
    assert eventually(lambda: ends["a"]._pool._num_waiting == 40)
    are_all_waiting.set()
    assert not concurrent.futures.wait(calls, DEADLINE_S / 2).not_done  # before the deadlines of the inner calls
    errors = [error for error in (each.exception() for each in calls) if error is not None]
    assert all("all 40 threads for handlers there wait" in str(error) for error in errors), errors
    assert errors
    assert ends["b"].call("a", "f", (), {}, timeout=DEADLINE_S).result() == 1


def test_threads_that_wait_as_for_any_future_keep_no_others_from_theirs(world: World) -> None:
    all_in = threading.Barrier(MAX_HANDLER_THREADS)

    def f() -> int:
        all_in.wait(DEADLINE_S)
        future = ends["a"].call("b", "g", (), {})
        assert not concurrent.futures.wait([future], DEADLINE_S).not_done
        return int(future.result(0))

    ends: dict[str, BusEndpoint] = {}
    ends |= world.cast({"a": {"f": f, "h": lambda: 1}, "b": {"g": lambda: call(ends["b"], "h", target="a")}})
    calls = [ends["b"].call("a", "f", (), {}) for _ in range(MAX_HANDLER_THREADS)]
    assert [each.result(DEADLINE_S / 2) for each in calls] == [1] * MAX_HANDLER_THREADS
    assert eventually(lambda: ends["a"]._pool._num_presumed == 0)


def test_many_threads_call_at_once(world: World) -> None:
    a, _ = world.pair({"double": lambda x: 2 * x})

    def work(first: int) -> list[int]:
        return [call(a, "double", first + i) for i in range(100)]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = list(threads.map(work, range(0, 800, 100)))
    assert results == [[2 * (first + i) for i in range(100)] for first in range(0, 800, 100)]


def test_call_that_nobody_waits_for_is_made_all_the_same(world: World) -> None:
    ran: list[int] = []
    a, _ = world.pair({"note": ran.append})
    for i in range(100):
        a.call("b", "note", (i,), {})
    assert eventually(lambda: len(ran) == 100)


def test_deadline_wakes_whoever_receives(world: World) -> None:
    release = threading.Event()
    a, _ = world.pair({"wait": lambda: release.wait(DEADLINE_S)})
    threads = [
        threading.Thread(target=lambda: a.call("b", "wait", (), {}, timeout=missed(0.2)).exception()) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    release.set()


def test_cancelling_from_another_thread_wakes_whoever_receives(world: World) -> None:
    release = threading.Event()
    a, b = world.pair({"wait": lambda: release.wait(DEADLINE_S)})
    future = a.call("b", "wait", (), {})
    waiter = threading.Thread(target=future.exception)
    waiter.start()
    eventually(lambda: b._server._known)
    future.cancel()
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive()
    release.set()


def test_link_that_breaks_without_a_death_ends_the_call(world: World) -> None:
    if world.route != "auto":
        pytest.skip("what goes through ZeroMQ has tests of its own: test_bus_direct, test_bus_relay")
    release = threading.Event()
    a, b = world.pair({"wait": lambda: release.wait(DEADLINE_S), "ping": lambda: 1})
    assert call(a, "ping") == 1
    future = a.call("b", "wait", (), {})
    eventually(lambda: any(method.method == "wait" for method in b._server._known.values()))
    link = a._connections._connections[b.inbox_id]
    assert isinstance(link, UnixConnection)
    link._socket.shutdown(2)
    with pytest.raises(RpcError, match="were lost while 'wait' was open"):
        future.result(DEADLINE_S)
    release.set()
    assert call(a, "ping") == 1  # over a new one


def test_the_memory_of_arguments_and_results_is_free_before_the_answer_goes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who calls again at once would else get new memory from the system, which can take longer than the call itself."""
    seen: list[weakref.ref[Any]] = []
    left: list[bool] = []
    send = Sender.send

    def look(sender: Sender, way: Any, envelope: Envelope, *more: Any) -> bool:
        if envelope.kind is Kind.RESULT:
            left.append(seen[-1]() is not None)
        return send(sender, way, envelope, *more)

    def take(array: np.ndarray) -> int:
        memory: Any = array
        while world.route == "auto" and (behind := getattr(memory, "base", getattr(memory, "obj", None))) is not None:
            memory = behind  # at last what holds the caller's shared memory
        seen.append(weakref.ref(memory))
        return int(array[0])

    def make(array: np.ndarray) -> np.ndarray:
        made = np.ones(len(array), "u1")
        seen.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Sender, "send", look)
    a, _ = world.pair({"take": take, "make": make})
    for _ in range(10):  # on a thread of the pool, and where it is received
        call(a, "take", np.ones(1_000_000, "u1"))
    assert left == [False] * 10
    if world.route == "auto":  # else it is sent from where it was made
        for _ in range(10):
            call(a, "make", np.ones(1_000_000, "u1"))
        assert left == [False] * 20

"""Methods of `@rpc(thread="main")`: one thread runs them, one by one, and calls that can never run are refused."""

import asyncio
import contextlib
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tests.support.bus import DEADLINE_S, World, call, entry
from tests.support.deadlines import missed
from unified.bus.calls.registry import MethodRegistry, adopt_instance, rpc
from unified.bus.endpoint import BusEndpoint
from unified.errors import RpcError, UsageError
from unified.testing import eventually
from unified.threads import start_thread


@contextlib.contextmanager
def serving(bus: BusEndpoint) -> Iterator[threading.Thread]:
    """A thread that serves as the main thread of a service does."""
    bus._main.will_serve = True
    thread = start_thread("main", bus._main.serve, lambda work: work())
    yield thread
    bus._main.submit(None)
    thread.join(DEADLINE_S)


def exports(monkeypatch: pytest.MonkeyPatch, made: object) -> MethodRegistry:
    """The methods that a worker exports of its instance."""
    registry = MethodRegistry()
    monkeypatch.setattr("unified.bus.calls.registry.RPC_REGISTRY", registry)
    adopt_instance(None, made)
    return registry


@rpc(thread="main")
class Store:
    def __init__(self) -> None:
        self.table = sqlite3.connect(":memory:")
        self.table.execute("create table seen (x)")
        self.local = threading.local()
        self.local.x = 1

    @rpc()
    def add(self, x: int) -> int:
        self.table.execute("insert into seen values (?)", (x,))
        return int(self.table.execute("select sum(x) from seen").fetchone()[0])

    @rpc(concurrency=1)
    def mine(self) -> int:
        return int(self.local.x)

    @rpc()
    def count(self, n: int) -> Iterator[int]:
        for each in range(n):
            yield each + self.local.x

    @rpc(thread="any")
    def elsewhere(self) -> str:
        return threading.current_thread().name

    @rpc(thread="any")
    async def on_loop(self) -> str:
        return threading.current_thread().name


class Derived(Store):
    @rpc()
    def derived(self) -> str:
        return threading.current_thread().name


def test_methods_of_a_class_run_where_its_object_was_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = world.endpoint("a")
    b, inbox = world.endpoint("b")
    made: list[Store] = []
    b._main.submit(lambda: made.append(Derived()))
    with serving(b):
        b._main.submit((done := threading.Event()).set)
        assert done.wait(DEADLINE_S)
        b.registry.update(exports(monkeypatch, made[0]))
        b.open()
        a.update_directory([entry("b", inbox)])
        for number in range(50):
            assert call(a, "add", 1) == number + 1
        assert [call(a, "mine") for _ in range(50)] == [1] * 50
        assert list(call(a, "count", 100)) == [each + 1 for each in range(100)]
        assert call(a, "derived") == "main"
        assert call(a, "elsewhere") != "main"
        assert call(a, "on_loop") == "bus-loop"
        b._main.submit(made[0].table.close)  # only its own thread may close it
        b._main.submit((closed := threading.Event()).set)
        assert closed.wait(DEADLINE_S)


def test_one_call_at_a_time_and_others_beside_them(world: World) -> None:
    release, running, most = threading.Event(), [0], [0]

    def counted() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        release.wait(DEADLINE_S)
        running[0] -= 1

    one, other = rpc(thread="main")(counted), rpc(thread="main")(lambda: counted())
    a, b = world.pair({"one": one, "other": other, "ping": lambda: 1})
    with serving(b):
        calls = [a.call("b", name, (), {}) for name in ("one", "other", "one")]
        assert call(a, "ping") == 1
        release.set()
        for each in calls:
            each.result(DEADLINE_S)
    assert most == [1]


def test_cancelled_call_in_line_lets_the_next_through(world: World) -> None:
    release, began, ran = threading.Event(), threading.Event(), []

    @rpc(thread="main")
    def note(i: int) -> int:
        began.set()
        release.wait(DEADLINE_S)
        ran.append(i)
        return i

    a, b = world.pair({"note": note})
    with serving(b):
        first, second, third = (a.call("b", "note", (i,), {}) for i in range(3))
        eventually(lambda: len(b._server._known) == 3 and began.is_set(), DEADLINE_S)
        assert second.cancel()
        eventually(lambda: len(b._server._known) == 2, DEADLINE_S)
        release.set()
        assert (first.result(DEADLINE_S), third.result(DEADLINE_S)) == (0, 2)
    assert ran == [0, 2]


def test_call_to_oneself_from_the_main_thread_is_refused(world: World) -> None:
    a, b = world.pair({})

    @rpc(thread="main")
    def outer() -> Any:
        return b.call("b", "inner", (), {}).result(DEADLINE_S)

    b.registry.update({"outer": outer, "inner": rpc(thread="main")(lambda: 1)})
    b.update_directory([entry("b", b._listeners.inbox)])
    with serving(b):
        with pytest.raises(
            RpcError, match=r"the call of 'inner' in worker b was refused: calls of the main thread wait"
        ):
            call(a, "outer")
        assert call(a, "inner") == 1


def test_deadlock_through_two_main_threads_is_named(world: World) -> None:
    both = threading.Barrier(2)
    ends: dict[str, BusEndpoint] = {}

    def methods(me: str, other: str) -> dict[str, Callable[..., Any]]:
        @rpc(thread="main")
        def ask() -> Any:
            both.wait(DEADLINE_S)
            return ends[me].call(other, "name", (), {}).result(DEADLINE_S)

        return {"ask": ask, "name": rpc(thread="main")(lambda: me)}

    ends |= world.cast({"x": {}, "l": methods("l", "r"), "r": methods("r", "l")})
    with serving(ends["l"]), serving(ends["r"]):
        calls = [ends["x"].call(each, "ask", (), {}) for each in "lr"]
        errors = [each for each in (call.exception(DEADLINE_S / 2) for call in calls) if each]
    assert len(errors) == 1
    assert "calls of the main thread wait for one another there" in str(errors[0])
    assert "'name' in worker" in str(errors[0])


def test_call_that_another_worker_makes_for_the_main_thread_and_back_is_named(world: World) -> None:
    ends: dict[str, BusEndpoint] = {}

    @rpc(thread="main")
    def ask() -> Any:
        return ends["l"].call("r", "pass_on", (), {}).result(DEADLINE_S)

    def pass_on() -> Any:
        return ends["r"].call("l", "name", (), {}).result(DEADLINE_S)

    ends |= world.cast({"x": {}, "l": {"ask": ask, "name": rpc(thread="main")(lambda: "l")}, "r": {"pass_on": pass_on}})
    with serving(ends["l"]), pytest.raises(RpcError, match="calls of the main thread wait for one another there"):
        call(ends["x"], "ask", target="l")


def test_stream_keeps_the_main_thread_until_it_is_closed(world: World) -> None:
    names: list[str] = []

    @rpc(thread="main")
    def count() -> Iterator[int]:
        names.append(threading.current_thread().name)
        try:
            yield from range(1000)
        finally:
            names.append(threading.current_thread().name)

    a, b = world.pair({"count": count, "name": rpc(thread="main")(lambda: threading.current_thread().name)})
    with serving(b):
        stream = call(a, "count")
        assert next(stream) == 0
        with pytest.raises(RpcError, match=r"none can go on: 'name' in worker b \(in line\) -> 'count' in worker b"):
            call(a, "name")
        stream.close()
        assert call(a, "name") == "main"
    assert names == ["main", "main"]


def test_sigalrm_in_a_handler_and_after_it(world: World) -> None:
    """As math-verify does: SIGALRM ends what takes too long."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("alarm")

    @rpc(thread="main")
    def verify(is_long: bool) -> str:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, missed(0.05))
        if is_long:
            try:
                threading.Event().wait(DEADLINE_S)
            except TimeoutError:
                return "too long"
        return "soon"

    a, b = world.pair({"verify": verify})
    b._main.will_serve = True
    said: list[Any] = []

    def play() -> None:
        try:
            said.append(call(a, "verify", True))
            said.append(call(a, "verify", False))  # its alarm comes while the main thread is idle
            threading.Event().wait(missed(0.2))
            said.append(call(a, "verify", True))
        finally:
            b._main.submit(None)

    before = signal.getsignal(signal.SIGALRM)
    start_thread("player", play)
    try:
        b._main.serve(lambda work: work())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert said == ["too long", "soon", "too long"]


def test_worker_whose_main_thread_runs_a_program_refuses(world: World) -> None:
    a, _ = world.pair({"name": rpc(thread="main")(lambda: 1)})
    with pytest.raises(RpcError, match=r"'name' .* the main thread of worker b .* without run\(\)"):
        call(a, "name")


async def _coroutine(self: object = None) -> None:
    await asyncio.sleep(0)


async def _stream(self: object = None) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [_coroutine, _stream])
def test_async_def_is_refused(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=f"of {function.__name__}: .*`async def`"):
        rpc(thread="main")(function)
    cls = rpc(thread="main")(type("Mixed", (), {"method": rpc("method")(function)}))
    with pytest.raises(UsageError, match=r"of method: .*`async def`.* @rpc\(thread='any'\)"):
        exports(monkeypatch, cls())


@pytest.mark.parametrize("options", [{"inline": True}, {"group": "g"}, {"concurrency": 2}, {"thread": "loop"}])
def test_options_that_contradict_the_main_thread_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="main"):
        rpc(**{"thread": "main", **options})(lambda: 1)

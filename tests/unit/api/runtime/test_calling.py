"""Deadlines, retries and streams as groups, actors and proxies offer them."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.deadlines import met
from tests.support.runtime import InstantBus, in_worker
from unified.api.runtime import RoleGroup, RpcStream, create_rpc_proxy, export_rpc_instance, rpc
from unified.api.runtime.calling import CallOptions, PromisedStream
from unified.bus.calls.future import RpcFuture
from unified.errors import RpcCancelledError, RpcNotFoundError, UsageError, WorkerDiedError
from unified.testing import eventually

DEADLINE_S = met(100.0)
DEATH = WorkerDiedError("worker died")
NOT_IDEMPOTENT = r"'unsafe', which is not marked @rpc\(idempotent=True\)"


@pytest.fixture(autouse=True)
def bus() -> Iterator[InstantBus]:
    with in_worker(trainer=1, rollout=3) as bus:
        bus.methods = {"echo": lambda *args, **kwargs: (args, kwargs), "run": lambda xs: [2 * x for x in xs]}
        bus.methods |= {"safe": safe, "tokens": tokens, "tokens_async": tokens_async}
        yield bus


@rpc(idempotent=True)
def safe(x: int = 0) -> int:
    return x + 1


@rpc()
def unsafe() -> None: ...


@rpc()
def tokens(number: int, closed: list[int] | None = None) -> Iterator[int]:
    try:
        yield from range(number)
    finally:
        if closed is not None:
            closed.append(number)


@rpc()
async def tokens_async(number: int) -> AsyncIterator[int]:
    for i in range(number):
        await asyncio.sleep(0)
        yield i


# Deadlines.


def test_every_kind_of_call_takes_a_timeout(bus: InstantBus) -> None:
    group = RoleGroup("rollout")
    group[0].call("echo", _timeout=1)
    group.call("echo", _timeout=2)
    group.call("echo", [1, 2, 3], _scatter=True, _timeout=3)
    group.call_rank0("echo", _timeout=4)
    group.call_batch("run", 3, [1, 2, 3], _timeout=5)
    assert [call.timeout for call in bus.calls] == [1, 2, 2, 2, 3, 3, 3, 4, 5, 5, 5]
    assert all("_timeout" not in call.kwargs for call in bus.calls)


def test_none_leaves_the_deadline_to_the_job(bus: InstantBus) -> None:
    RoleGroup("rollout").call("echo")
    RoleGroup("rollout")[0].call("echo", _timeout=None)
    assert [call.timeout for call in bus.calls] == [None] * 4


def test_view_with_options_leaves_the_original_as_it_was(bus: InstantBus) -> None:
    group = RoleGroup("rollout")
    hurried = group.with_options(timeout=1.5)
    hurried.call("echo")
    hurried[1].call("echo")
    hurried.call_rank0("echo")
    hurried.call_batch("run", 1, [1])
    hurried.with_options(retries=2)[2].call("echo")
    hurried.call("echo", _timeout=9)
    group.call("echo")
    group[0].with_options(timeout=3).call("echo")
    assert [call.timeout for call in bus.calls] == [1.5] * 7 + [9] * 3 + [None] * 3 + [3]
    assert (hurried.name, len(hurried), group.options) == (group.name, 3, CallOptions())


@pytest.mark.parametrize("timeout", [0, -1, "3", True, float("nan")])
def test_timeout_is_a_number_above_0(timeout: Any) -> None:
    group = RoleGroup("rollout")
    for ask in (
        lambda: group.with_options(timeout=timeout),
        lambda: group.call("echo", _timeout=timeout),
        lambda: create_rpc_proxy("rollout", None, Service, timeout=timeout),
    ):
        with pytest.raises(UsageError, match="must be a number of seconds above 0"):
            ask()


# Retries.


@pytest.mark.parametrize("method", ["safe", safe])
def test_retries_of_one_actor(bus: InstantBus, method: Any) -> None:
    bus.failures = [DEATH, DEATH]
    assert RoleGroup("rollout")[1].with_options(retries=2).call(method, 4).result(DEADLINE_S) == 5
    bus.failures = [DEATH]
    assert RoleGroup("rollout").call_rank0(method, 4, _retries=1).result(DEADLINE_S) == 5
    assert [call.target for call in bus.calls] == ["rollout_3-1_1-0"] * 3 + ["rollout_3-0_1-0"] * 2
    assert {(call.method, call.args) for call in bus.calls} == {("safe", (4,))}


def test_retries_of_a_group_are_of_those_that_failed(bus: InstantBus) -> None:
    bus.failures = [DEATH]
    assert RoleGroup("rollout").call(safe, _retries=1).result(DEADLINE_S) == [1, 1, 1]  # type: ignore[call-overload]
    found = sorted(call.target for call in bus.calls)
    assert found == ["rollout_3-0_1-0", "rollout_3-0_1-0", "rollout_3-1_1-0", "rollout_3-2_1-0"]


def test_retries_of_a_batch_are_of_the_runs_that_failed(bus: InstantBus) -> None:
    bus.failures = [DEATH]
    results = RoleGroup("rollout").call_batch("run", 6, list(range(6)), _retries=1)
    assert results.wait(DEADLINE_S) == [0, 2, 4, 6, 8, 10]
    assert len(bus.calls) == 4


def test_no_retries_unless_asked_for(bus: InstantBus) -> None:
    bus.failures = [DEATH]
    with pytest.raises(WorkerDiedError):
        RoleGroup("rollout")[0].call(safe).result(DEADLINE_S)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda group: group.call(unsafe), NOT_IDEMPOTENT),
        (lambda group: group[0].call(unsafe), NOT_IDEMPOTENT),
        (lambda group: group.call_rank0(unsafe), NOT_IDEMPOTENT),
        (lambda group: group.call_batch(unsafe, 1, [1]), NOT_IDEMPOTENT),
        (lambda group: group.stream("tokens"), "a stream cannot be retried"),
        (lambda group: group[0].stream("tokens"), "a stream cannot be retried"),
    ],
)
def test_what_may_not_run_twice_is_not_retried(bus: InstantBus, ask: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ask(RoleGroup("rollout").with_options(retries=1))
    assert not bus.calls


@pytest.mark.parametrize("retries", [-1, 1.5, "2", True])
def test_retries_is_a_number(retries: Any) -> None:
    with pytest.raises(UsageError, match="must be a whole number, 0 or more"):
        RoleGroup("rollout").with_options(retries=retries)


# Streams.


@pytest.mark.parametrize("method", [tokens, tokens_async, "tokens", "tokens_async"])
def test_stream_of_an_actor(bus: InstantBus, method: Any) -> None:
    stream = RoleGroup("rollout")[1].stream(method, 40, _timeout=5)
    assert isinstance(stream, RpcStream)
    assert "tokens" in stream.what
    assert (list(stream), list(stream)) == (list(range(40)), [])
    assert bus.calls[0].timeout == 5


async def test_stream_on_a_loop() -> None:
    actor = RoleGroup("rollout")[0]
    assert [i async for i in actor.stream(tokens, 40)] == list(range(40))
    async with actor.stream(tokens_async, 40) as stream:
        assert [i async for i in stream] == list(range(40))


def test_streams_of_a_group_are_one_for_each_actor() -> None:
    group = RoleGroup("rollout")
    assert [list(stream) for stream in group.stream(tokens, 3)] == [[0, 1, 2]] * 3
    scattered = group.stream("tokens", [1, 2, 3], _scatter=True)
    assert [list(stream) for stream in scattered] == [[0], [0, 1], [0, 1, 2]]


def test_call_of_a_generator_gives_its_stream() -> None:
    assert list(RoleGroup("rollout")[0].call(tokens, 3).result(DEADLINE_S)) == [0, 1, 2]


@pytest.mark.parametrize("on_a_loop", [False, True])
async def test_stream_that_cannot_begin_says_so_where_it_is_read(bus: InstantBus, on_a_loop: bool) -> None:
    bus.failures = [RpcNotFoundError("no rpc method 'tokens'")]
    stream = RoleGroup("rollout")[0].stream("tokens", 3)
    with pytest.raises(RpcNotFoundError):
        await anext(stream) if on_a_loop else next(stream)
    assert ([i async for i in stream] if on_a_loop else list(stream)) == []


def test_stream_of_what_is_no_generator(bus: InstantBus) -> None:
    stream = RoleGroup("rollout")[0].stream("echo")
    with pytest.raises(UsageError, match="returned tuple instead of a stream: its handler is not a generator"):
        next(stream)


def test_close_before_it_has_begun_cancels_the_call() -> None:
    future: RpcFuture[Any] = RpcFuture("the call")
    with PromisedStream[int](future) as stream:
        pass
    assert future.cancelled()
    assert list(stream) == []
    stream.close()


def test_close_and_drop_stop_the_generator(bus: InstantBus) -> None:
    closed: list[int] = []
    bus.methods = {"tokens": lambda number: tokens(number, closed)}
    actor = RoleGroup("rollout")[0]
    with actor.stream(tokens, 100) as stream:
        assert next(stream) == 0
    eventually(lambda: closed == [100])
    dropped: Any = actor.stream(tokens, 200)
    assert next(dropped) == 0
    del dropped
    gc.collect()
    eventually(lambda: closed == [100, 200])


async def test_consumer_that_is_cancelled_at_the_first_item_may_come_back() -> None:
    future: RpcFuture[Any] = RpcFuture("the call")
    stream: PromisedStream[int] = PromisedStream(future)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    assert not future.done()
    bus = InstantBus()
    bus.methods = {"m": lambda: (value for value in (1, 2))}
    future.succeed(bus.call("b", "m", (), {}).result())
    assert [i async for i in stream] == [1, 2]


def test_call_that_is_cancelled_ends_the_stream() -> None:
    future: RpcFuture[Any] = RpcFuture("the call")
    stream: PromisedStream[int] = PromisedStream(future)
    threading.Timer(0.02, future.cancel).start()
    with pytest.raises(RpcCancelledError):
        next(stream)


# Proxies.


class Service:
    @rpc()
    def count(self, number: int) -> Iterator[int]:
        """Counts."""
        yield from range(number)

    @rpc()
    async def count_async(self, number: int) -> AsyncIterator[int]:
        for i in range(number):
            yield i

    @rpc(idempotent=True)
    def get(self) -> int:
        return 7

    @rpc()
    def add(self) -> int:
        return 8

    @rpc(idempotent=True)
    async def get_async(self) -> int:
        return 9


class Bare:
    @rpc()
    def add(self) -> int:
        return 8

    @rpc(idempotent=True)
    def count(self) -> Iterator[int]:
        yield 1


async def test_generator_methods_of_a_proxy(bus: InstantBus) -> None:
    export_rpc_instance("service", Service())
    proxy = create_rpc_proxy("rollout", "service", Service, timeout=2)
    assert list(proxy.count(20)) == list(range(20))
    assert [i async for i in proxy.count_async(20)] == list(range(20))
    assert proxy.count.__doc__ == "Counts."
    assert [call.timeout for call in bus.calls] == [2, 2]


async def test_proxy_retries_what_may_be_retried(bus: InstantBus) -> None:
    export_rpc_instance(None, Service())
    proxy = create_rpc_proxy("rollout", None, Service, retries=1)
    bus.failures = [DEATH]
    assert proxy.get() == 7
    bus.failures = [DEATH]
    with pytest.raises(WorkerDiedError):
        proxy.add()
    bus.failures = [DEATH]
    with pytest.raises(WorkerDiedError):
        next(proxy.count(3))
    bus.methods = {"get_async": lambda: 9}
    bus.failures = [DEATH]
    assert await proxy.get_async() == 9


def test_proxy_with_nothing_to_retry() -> None:
    with pytest.raises(UsageError, match="Bare has no method that may be retried"):
        create_rpc_proxy("rollout", None, Bare, retries=1)

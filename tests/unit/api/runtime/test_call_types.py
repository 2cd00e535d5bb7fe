"""What a type checker sees of a call is what the call gives. `make types` runs mypy over this file: `assert_type` fails
there, and an ignored error that is none does too. The tests see that the values are of these types."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterator
from typing import Any, assert_type

import pytest

from tests.support import typed_remote_call
from tests.support.runtime import InstantBus, in_worker
from unified.api.runtime import FutureSequence, RoleGroup, RpcStream, create_rpc_proxy, export_rpc_instance, rpc
from unified.bus.calls.future import RpcFuture


def add(x: int, *, y: int = 1) -> int:
    return x + y


async def add_async(x: int) -> str:
    return str(x)


@rpc(name="renamed", idempotent=True)
def marked(x: int) -> float:
    return x / 2


def count(number: int) -> Iterator[int]:
    yield from range(number)


def count_generator(number: int) -> Generator[str, None, None]:
    yield from map(str, range(number))


async def count_async(number: int) -> AsyncIterator[float]:
    for i in range(number):
        yield i / 2


async def count_async_generator(number: int) -> AsyncGenerator[bytes, None]:
    for i in range(number):
        yield bytes([i])


def run_batch(xs: list[int], scale: int = 1) -> list[str]:
    return [str(scale * x) for x in xs]


class Service:
    @rpc()
    def get(self, key: str) -> int:
        return len(key)

    @rpc()
    async def get_async(self, key: str) -> int:
        return len(key)

    @rpc(typed_remote_call.tokens)
    def count(self, number: int) -> Iterator[int]:
        yield from range(number)

    @rpc(name=typed_remote_call.wake_up)
    def awake(self) -> None: ...

    @rpc()
    async def count_async(self, number: int) -> AsyncIterator[int]:
        for i in range(number):
            yield i


class Scorer:
    @rpc()
    def score(self, key: str, *, times: int = 1) -> int:
        return len(key) * times

    @rpc()
    async def name_async(self, number: int) -> str:
        return str(number)

    @rpc()
    def count(self, number: int) -> Iterator[int]:
        yield from range(number)

    @rpc()
    async def count_async(self, number: int) -> AsyncIterator[float]:
        for i in range(number):
            yield i / 2

    @rpc()
    def rank(self, xs: list[int], scale: int = 1) -> list[str]:
        return [str(scale * x) for x in xs]


class Engine:
    """The provider of document 3's pattern."""

    def __init__(self) -> None:
        self.num_woken = 0

    @rpc(name=typed_remote_call.wake_up)
    def wake_up(self) -> None:
        self.num_woken += 1

    @rpc(name=typed_remote_call.generate)
    def generate(self, prompts: list[int], scale: int) -> list[int]:
        return [scale * prompt for prompt in prompts]

    @rpc(name=typed_remote_call.tokens)
    def tokens(self, prompt: str) -> Iterator[str]:
        yield from prompt

    @rpc(name=typed_remote_call.weight, idempotent=True)
    def weight(self, name: str) -> float:
        return float(len(name))


@pytest.fixture(autouse=True)
def bus() -> Iterator[InstantBus]:
    with in_worker(trainer=1, rollout=2) as bus:
        for function in (add, count, count_generator, count_async, count_async_generator, run_batch):
            bus.methods[function.__name__] = function
        bus.methods |= {"renamed": marked, "add_async": str}
        yield bus


def test_calls_of_functions() -> None:
    group = RoleGroup("rollout")
    actor = group.with_options(timeout=5, retries=0)[0]
    assert assert_type(actor.call(add, 1, y=2), RpcFuture[int]).result() == 3
    assert assert_type(actor.call(add_async, 1), RpcFuture[str]).result() == "1"
    assert assert_type(actor.call(marked, 1), RpcFuture[float]).result() == 0.5
    assert assert_type(group.call(add, 1), RpcFuture[list[int]]).result() == [2, 2]
    assert assert_type(group.call(add_async, 1), RpcFuture[list[str]]).result() == ["1", "1"]
    assert assert_type(group.call_rank0(add_async, 1), RpcFuture[str]).result() == "1"
    assert assert_type(group.call_rank0(add, 1), RpcFuture[int]).result() == 2


def test_calls_of_methods(bus: InstantBus) -> None:
    service = Scorer()
    for name in ("score", "count", "count_async", "rank"):
        bus.methods[name] = getattr(service, name)
    bus.methods["name_async"] = str
    group = RoleGroup("rollout")
    actor = group[0]
    assert assert_type(actor.call(Scorer.score, "key", times=2), RpcFuture[int]).result() == 6
    assert assert_type(actor.call(Scorer.name_async, 1), RpcFuture[str]).result() == "1"
    assert assert_type(actor.with_options(timeout=5).call(service.score, "key"), RpcFuture[int]).result() == 3
    assert list(assert_type(actor.call(Scorer.count, 2), RpcFuture[RpcStream[int]]).result()) == [0, 1]
    assert list(assert_type(actor.stream(Scorer.count, 2), RpcStream[int])) == [0, 1]
    assert list(assert_type(actor.stream(Scorer.count_async, number=2), RpcStream[float])) == [0, 0.5]
    assert assert_type(group.call(Scorer.score, "key"), RpcFuture[list[int]]).result() == [3, 3]
    assert assert_type(group.call_rank0(Scorer.score, "key"), RpcFuture[int]).result() == 3
    assert assert_type(group.call_rank0(Scorer.name_async, 1), RpcFuture[str]).result() == "1"
    assert [list(each) for each in assert_type(group.stream(Scorer.count, 1), list[RpcStream[int]])] == [[0]] * 2
    ranked = assert_type(group.call_batch(Scorer.rank, 2, [1, 2], scale=2), FutureSequence[str])
    assert list(ranked) == ["2", "4"]


def test_calls_by_name() -> None:
    group = RoleGroup("rollout")
    assert assert_type(group[0].call("add", 1, _timeout=5, _retries=1), RpcFuture[Any]).result() == 2
    assert assert_type(group.call("add", [1, 2], _scatter=True), RpcFuture[list[Any]]).result() == [2, 3]
    assert list(assert_type(group[0].stream("count", 2, _timeout=5), RpcStream[Any])) == [0, 1]
    assert list(assert_type(group.call_batch("run_batch", 2, [1, 2], _retries=1), FutureSequence[Any])) == ["1", "2"]


def test_streams_of_generators() -> None:
    group = RoleGroup("rollout")
    actor = group[0]
    assert list(assert_type(actor.stream(count, 2), RpcStream[int])) == [0, 1]
    assert list(assert_type(actor.stream(count_generator, 2), RpcStream[str])) == ["0", "1"]
    assert list(assert_type(actor.stream(count_async, 2), RpcStream[float])) == [0, 0.5]
    assert list(assert_type(actor.stream(count_async_generator, 2), RpcStream[bytes])) == [b"\0", b"\1"]
    assert [list(each) for each in assert_type(group.stream(count, 2), list[RpcStream[int]])] == [[0, 1]] * 2
    assert [list(each) for each in assert_type(group.stream(count_async, 1), list[RpcStream[float]])] == [[0]] * 2
    assert list(assert_type(actor.call(count, 2), RpcFuture[RpcStream[int]]).result()) == [0, 1]
    assert list(assert_type(actor.call(count_async, 2), RpcFuture[RpcStream[float]]).result()) == [0, 0.5]
    assert len(assert_type(group.call(count, 2), RpcFuture[list[RpcStream[int]]]).result()) == 2
    assert list(assert_type(group.call_rank0(count_async, 2), RpcFuture[RpcStream[float]]).result()) == [0, 0.5]


async def test_iteration_and_await() -> None:
    actor = RoleGroup("rollout")[0]
    for number in actor.stream(count, 1):
        assert assert_type(number, int) == 0
    async for part in actor.stream(count_async, 1):
        assert assert_type(part, float) == 0
    with actor.stream(count, 1) as stream:
        assert_type(stream, RpcStream[int])
    async with actor.stream(count, 1) as stream:
        assert_type(stream, RpcStream[int])
    assert assert_type(await actor.call(add_async, 1), str) == "1"
    assert assert_type(await asyncio.wrap_future(actor.call(add, 1)), int) == 2


def test_batches() -> None:
    group = RoleGroup("rollout")
    results = assert_type(group.call_batch(run_batch, 3, [1, 2, 3], scale=2), FutureSequence[str])
    assert assert_type(results[0], str) == "2"
    assert assert_type(results[1:], list[str]) == ["4", "6"]
    assert assert_type(results.wait(), list[str]) == ["2", "4", "6"]


async def test_proxies() -> None:
    export_rpc_instance("service", Service())
    proxy = create_rpc_proxy("rollout", "service", Service, timeout=5)
    assert_type(proxy, Service)
    assert assert_type(proxy.get("key"), int) == 3
    assert_type(proxy.awake(), None)
    assert [i async for i in assert_type(proxy.count_async(2), AsyncIterator[int])] == [0, 1]
    inner: object = await proxy.get_async("key")  # the bus of these tests does not await what a handler returns
    assert isinstance(inner, Coroutine)
    assert await inner == 3
    # `rpc(stub)` cannot be told from bare `rpc` by its types; `rpc(name=stub)`, as above, can.
    assert list(proxy.count(2)) == [0, 1]


def what_awaiting_a_proxy_gives(proxy: Service) -> Coroutine[None, None, int]:
    """For the type checker alone."""

    async def get() -> int:
        return assert_type(await proxy.get_async("key"), int)

    return get()


def test_stubs_with_their_signatures_in_a_pyi(bus: InstantBus) -> None:
    engine = Engine()
    export_rpc_instance(None, engine)
    assert_type(typed_remote_call.wake_up(), None)
    assert engine.num_woken == 2
    results = assert_type(typed_remote_call.generate([1, 2, 3], scale=3), FutureSequence[int])
    assert list(results) == [3, 6, 9]
    assert "".join(assert_type(typed_remote_call.tokens("abc"), RpcStream[str])) == "abc"
    assert assert_type(typed_remote_call.weight("name"), float) == 4
    assert [call.timeout for call in bus.calls][-1] == 100
    # Stubs are functions like any others to a group: a stub that gives a sequence is a batch.
    again = assert_type(
        RoleGroup("rollout").call_batch(typed_remote_call.generate, 2, [1, 2], scale=1), FutureSequence[int]
    )
    assert list(again) == [1, 2]


def test_wrong_arguments_are_found_by_the_type_checker(bus: InstantBus) -> None:
    bus.methods["get"] = Service().get
    group = RoleGroup("rollout")
    actor = group[0]
    for wrong in (
        lambda: actor.call(add, "1").result(),  # type: ignore[call-overload]
        lambda: group.call(add).result(),  # type: ignore[call-overload]
        lambda: list(actor.stream(count, 1, 2)),  # type: ignore[call-overload]
        lambda: list(actor.stream(add, 1)),  # type: ignore[call-overload]
        lambda: actor.call(Service.get).result(),  # type: ignore[call-overload]
        lambda: actor.call(Service.get, 1).result(),  # type: ignore[call-overload]
        lambda: list(actor.stream(Service.get, "key")),  # type: ignore[call-overload]
        lambda: typed_remote_call.wake_up(1),  # type: ignore[call-arg]
    ):
        with pytest.raises((TypeError, ValueError)):
            wrong()

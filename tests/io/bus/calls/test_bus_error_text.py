"""What a caller reads when something failed three workers away."""

import asyncio
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.support.bus import DEADLINE_S, World
from unified.bus.endpoint import BusEndpoint
from unified.errors import RemoteError


class Unpicklable(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.lock = threading.Lock()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for this")

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle of this")


WEIGHTS: dict[str, int] = {}


def look_up(name: str) -> None:
    try:
        WEIGHTS[name]
    except KeyError as error:
        raise ValueError(f"no weight {name!r}") from error


def hold(what: str) -> None:
    raise Unpicklable(what)


def hide(what: str) -> None:
    raise Unprintable


def yield_one(what: str) -> Iterator[str]:
    yield what
    raise Unpicklable(what)


HANDLERS: dict[str, Callable[..., Any]] = {"look_up": look_up, "hold": hold, "hide": hide, "yield_one": yield_one}


@pytest.fixture
def chain(world: World) -> BusEndpoint:
    """`a`, which calls `b`, which calls `c`, where it fails."""

    def ask(method: str, what: str) -> Any:
        return b.call("c", method, (what,), {}).result(DEADLINE_S)

    async def ask_async(method: str, what: str) -> Any:
        return await b.call("c", method, (what,), {})

    def pass_on(what: str) -> Iterator[str]:
        yield from b.call("c", "yield_one", (what,), {}).result(DEADLINE_S)

    async def pass_on_async(what: str) -> AsyncIterator[str]:
        async for each in await b.call("c", "yield_one", (what,), {}):
            yield each

    asking: list[Callable[..., Any]] = [ask, ask_async, pass_on, pass_on_async]
    a, b, _ = world.cast({"a": {}, "b": {each.__name__: each for each in asking}, "c": HANDLERS}).values()
    return a


def printed(ask: Callable[[], object]) -> tuple[RemoteError, list[str]]:
    with pytest.raises(RemoteError) as caught:
        ask()
    return caught.value, "".join(traceback.format_exception(caught.value)).splitlines()


def in_order(text: list[str], *wanted: str) -> None:
    lines = iter(text)
    for each in wanted:
        assert any(line.endswith(each) for line in lines), f"{each!r} is missing, or out of order, in\n" + "\n".join(
            text
        )


@pytest.mark.parametrize("method", ["ask", "ask_async"])
def test_every_worker_on_the_way_is_shown_from_the_caller_to_the_cause(chain: BusEndpoint, method: str) -> None:
    error, text = printed(lambda: chain.call("b", method, ("look_up", "w1"), {}).result(DEADLINE_S))
    assert isinstance(error, ValueError)
    assert (error.worker, error.type_name, error.message) == ("b", "ValueError", "no weight 'w1'")
    in_order(
        text,
        "in printed",
        "RemoteValueError: no weight 'w1'",
        f"the call of '{method}' to worker b raised ValueError in worker b on node n1:",
        "Traceback (most recent call last):",
        f"in {method}",
        "RemoteValueError: no weight 'w1'",
        "the call of 'look_up' to worker c raised ValueError in worker c on node n1:",
        "Traceback (most recent call last):",
        "in look_up",
        "KeyError: 'w1'",
        "The above exception was the direct cause of the following exception:",
        "in look_up",
        "ValueError: no weight 'w1'",
    )
    assert text[-1] == "ValueError: no weight 'w1'"
    for ours in ("service.py", "pool.py", "caller.py", "receiver.py"):
        assert not any(ours in line for line in text)


@pytest.mark.parametrize("method", ["pass_on", "pass_on_async"])
def test_stream_of_a_stream(chain: BusEndpoint, method: str) -> None:
    items = chain.call("b", method, ("word",), {}).result(DEADLINE_S)
    assert next(items) == "word"
    error, text = printed(lambda: next(items))
    assert error.type_name == f"{__name__}.Unpicklable"
    in_order(
        text,
        "RemoteError: word",
        f"the call of '{method}' to worker b raised {__name__}.Unpicklable in worker b on node n1:",
        f"in {method}",
        f"the call of 'yield_one' to worker c raised {__name__}.Unpicklable in worker c on node n1:",
        "in yield_one",
        f"{__name__}.Unpicklable: word",
    )
    assert not any("stream_source.py" in line for line in text)


def test_exception_that_cannot_be_pickled_arrives(chain: BusEndpoint) -> None:
    error, text = printed(lambda: chain.call("b", "ask", ("hold", "a lock"), {}).result(DEADLINE_S))
    assert type(error) is RemoteError
    assert (str(error), error.type_name) == ("a lock", f"{__name__}.Unpicklable")
    in_order(text, "RemoteError: a lock", "in ask", "in hold", f"{__name__}.Unpicklable: a lock")


def test_exception_that_can_be_neither_pickled_nor_printed_arrives(chain: BusEndpoint) -> None:
    error, text = printed(lambda: chain.call("b", "ask", ("hide", ""), {}).result(DEADLINE_S))
    assert "its __str__ raised RuntimeError" in str(error)
    in_order(text, "in ask", "in hide")


async def test_awaited_error_reads_the_same(chain: BusEndpoint) -> None:
    with pytest.raises(ValueError, match="no weight 'w1'") as caught:
        await asyncio.wrap_future(chain.call("b", "ask", ("look_up", "w1"), {}))
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("no weight 'w1'") >= 3
    assert "worker c on node n1" in text

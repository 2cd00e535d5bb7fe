"""Every answer arrives: errors without valid text, every class of error, groups of errors, answers that exit."""

import asyncio
import builtins
import concurrent.futures
import json
import logging
import os
import queue
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import urllib.error
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import process, thread
from email.message import Message
from typing import Any

import pytest

from tests.support.bus import DEADLINE_S, World, call
from unified import rpc
from unified.bus.calls.sender import Sender
from unified.bus.codec.codec import SerializedValue
from unified.errors import RemoteError, RpcError
from unified.protocol.envelope import Kind

STRAY = os.fsdecode(b"no file \xff")
"""Text that UTF-8 cannot express."""
SHOWN = r"no file \udcff"


class OddError(Exception):
    """An error with attributes that a `RemoteError` has, too, but read-only."""

    @property
    def message(self) -> str:
        return "read-only"

    @property
    def traceback(self) -> str:
        return "read-only"


class NotedError(ValueError):
    __notes__ = "no list"  # type: ignore[assignment]


class CallOffError(BaseException):
    """No `Exception`, as SystemExit is none."""


class HiddenError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    def __reduce__(self) -> Any:
        raise SystemExit(3)

    def with_traceback(self, tb: Any) -> Any:
        raise SystemExit(3)


class TextError(Exception):
    """An error with a text of a class that MessagePack refuses."""

    class Text(str):
        __slots__ = ()

    def __str__(self) -> str:
        return TextError.Text("odd text")


class Members(ExceptionGroup[Exception]):
    hint = ""

    def __new__(cls, message: str, errors: list[Exception], hint: str = "") -> "Members":
        self = super().__new__(cls, message, errors)
        self.hint = hint
        return self


class Locked(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("it holds a lock")


def with_note(error: BaseException, note: str) -> BaseException:
    error.add_note(note)
    return error


def named(name: str) -> BaseException:
    cls = type("Local", (ValueError,), {})
    cls.__qualname__ = name
    error: BaseException = cls("local")
    return error


def with_cause(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


STRAYS: dict[str, Callable[[], BaseException]] = {
    "text": lambda: ValueError(STRAY),
    "os": lambda: FileNotFoundError(2, "No such file", STRAY),
    "unprintable argument": lambda: KeyError(STRAY),
    "note": lambda: with_note(ValueError("text"), STRAY),
    "type name": lambda: named(STRAY),
    "cause": lambda: with_cause(ValueError("text"), OSError(STRAY)),
    "group": lambda: ExceptionGroup(STRAY, [ValueError(STRAY)]),
    "exit": lambda: SystemExit(STRAY),
    "own text": lambda: TextError(),
    "neither text nor pickle": lambda: HiddenError(),
    "ours": lambda: RpcError(STRAY),
}


def handlers(make: Callable[[], Any]) -> dict[str, Callable[..., Any]]:
    """Handlers of every kind that raise, or return or yield, what `make` makes."""

    def outcome() -> Any:
        made = make()
        if isinstance(made, BaseException):
            raise made
        return made

    async def on_loop() -> Any:
        return outcome()

    @rpc(inline=True)
    def inline() -> Any:
        return outcome()

    def generator() -> Iterator[Any]:
        yield outcome()

    async def async_generator() -> AsyncIterator[Any]:
        yield outcome()

    def future() -> Any:
        made: concurrent.futures.Future[Any] = concurrent.futures.Future()
        value = make()
        if isinstance(value, BaseException):
            made.set_exception(value)
        else:
            made.set_result(value)
        return made

    kinds = [on_loop, inline, generator, async_generator, future]
    return {"sync": outcome, **{each.__name__: each for each in kinds}, "echo": lambda value: value}


ONE_ROUTE = pytest.mark.parametrize("world", ["auto"], indirect=True)
"""For tables of values: how they travel makes no difference."""
KINDS = ["sync", "on_loop", "inline", "generator", "async_generator", "future"]


def outcome_of(world: World, kind: str, make: Callable[[], Any]) -> RpcError:
    """Return the error that a caller of such a handler gets; the next call gets its answer."""
    a, _ = world.pair(handlers(make))
    with pytest.raises(RpcError) as caught:  # noqa: PT012 - a generator raises at its first item
        value = a.call("b", kind, (), {}).result(DEADLINE_S)
        if "generator" in kind:
            next(value)
    assert call(a, "echo", 5) == 5
    return caught.value


@ONE_ROUTE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", STRAYS)
def test_error_whose_text_is_not_utf8_arrives(world: World, case: str, kind: str) -> None:
    error = outcome_of(world, kind, STRAYS[case])
    assert isinstance(error, RemoteError)
    parts = [error.message, error.type_name, error.traceback, error.__notes__[-1]]
    if case not in ("own text", "neither text nor pickle"):
        assert any(SHOWN in part for part in parts)
    for part in parts:
        part.encode()
    assert "Traceback" in error.traceback or kind == "future"


@ONE_ROUTE
@pytest.mark.parametrize("kind", KINDS)
def test_result_whose_refusal_is_not_utf8_is_an_error_of_the_call(world: World, kind: str) -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise ValueError(STRAY)

    assert SHOWN in str(outcome_of(world, kind, Refuses))


def test_answer_comes_although_the_log_fails(world: World) -> None:
    def fail(record: logging.LogRecord) -> bool:
        raise ValueError("no log")

    logger = logging.getLogger("unified.bus.calls.remote_errors")
    logger.addFilter(fail)
    try:
        assert outcome_of(world, "sync", lambda: ValueError("text")).args == ("text",)
    finally:
        logger.removeFilter(fail)


@pytest.mark.parametrize("kind", ["generator", "async_generator"])
def test_item_that_cannot_be_sent_ends_its_stream(world: World, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = Sender.reply

    def refuse(self: Sender, call: Any, kind: Kind, answer: SerializedValue, may_wait: bool, count: int = 0) -> bool:
        if kind is Kind.ITEM:
            raise ValueError("too large an item")
        return reply(self, call, kind, answer, may_wait, count)

    monkeypatch.setattr(Sender, "reply", refuse)
    assert "too large an item" in str(outcome_of(world, kind, lambda: 1))


SPECIAL: dict[str, tuple[Any, ...]] = {
    "UnicodeDecodeError": ("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "UnicodeEncodeError": ("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
    "UnicodeTranslateError": ("\udcff", 0, 1, "no such character"),
    "ExceptionGroup": ("group", [ValueError("member"), ExceptionGroup("inner", [KeyError("key")])]),
    "BaseExceptionGroup": ("group", [ValueError("member"), SystemExit(3)]),
    "ImportError": ("no module",),
}
OF_BUILTINS = {
    name: cls for name, cls in vars(builtins).items() if isinstance(cls, type) and issubclass(cls, BaseException)
}
OF_SYNTAX = [name for name, cls in OF_BUILTINS.items() if issubclass(cls, SyntaxError)]
SPECIAL |= dict.fromkeys(OF_SYNTAX, ("no syntax", ("file.py", 3, 4, "x = = 1")))
EVERY: dict[str, BaseException] = {
    **{name: cls(*SPECIAL.get(name, ("text", 7))) for name, cls in OF_BUILTINS.items()},
    **{
        f"{type(error).__module__}.{type(error).__qualname__}": error
        for error in (
            subprocess.CalledProcessError(3, ["ls"], b"out", b"err"),
            subprocess.TimeoutExpired(["ls"], 2.5),
            json.JSONDecodeError("no value", "{", 1),
            urllib.error.URLError("no route"),
            urllib.error.HTTPError("http://host", 404, "Not Found", Message(), None),
            urllib.error.ContentTooShortError("too short", (None, None)),  # type: ignore[arg-type]
            asyncio.CancelledError("cancelled"),
            asyncio.IncompleteReadError(b"part", 10),
            asyncio.InvalidStateError("state"),
            asyncio.LimitOverrunError("too long", 5),
            asyncio.QueueEmpty("empty"),
            asyncio.QueueFull("full"),
            asyncio.BrokenBarrierError("barrier"),
            asyncio.SendfileNotAvailableError("sendfile"),
            concurrent.futures.CancelledError("cancelled"),
            concurrent.futures.InvalidStateError("state"),
            concurrent.futures.BrokenExecutor("broken"),
            process.BrokenProcessPool("broken"),
            thread.BrokenThreadPool("broken"),
            socket.gaierror(-2, "Name or service not known"),
            socket.herror(1, "Unknown host"),
            zipfile.BadZipFile("no zip"),
            zipfile.LargeZipFile("large"),
            *(
                cls("text")
                for cls in vars(sqlite3).values()
                if isinstance(cls, type) and issubclass(cls, Exception) and cls.__module__ == "sqlite3"
            ),
            ssl.SSLError(1, "no handshake"),
            ssl.SSLCertVerificationError(1, "no certificate"),
            ssl.SSLZeroReturnError(6, "closed"),
            queue.Empty(),
            queue.Full(),
            OddError("odd"),
            NotedError("noted"),
            Locked("locked"),
        )
    },
}


def type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


PLAIN = (StopIteration, StopAsyncIteration, Locked)
"""Errors that arrive without their class: a future refuses them, or pickle does."""


@ONE_ROUTE
@pytest.mark.parametrize("name", EVERY)
def test_error_of_every_class_arrives(world: World, name: str) -> None:
    raised = EVERY[name]
    error = outcome_of(world, "sync", lambda: raised)
    assert isinstance(error, RemoteError)
    assert (error.type_name, error.message, str(error)) == (type_name(raised), str(raised), str(raised))
    assert "raise made" in error.traceback
    assert error.traceback.rstrip() in error.__notes__[-1]
    if isinstance(raised, Exception) and not isinstance(raised, PLAIN) and not is_lost_in_pickle(raised):
        assert isinstance(error, type(raised))
        if not isinstance(raised, ExceptionGroup):
            assert error.args == raised.args
    elif isinstance(raised, BaseExceptionGroup):
        assert isinstance(error, ExceptionGroup)


def is_lost_in_pickle(error: BaseException) -> bool:
    """Return True for classes of the standard library that pickle cannot rebuild."""
    return isinstance(error, (urllib.error.HTTPError, urllib.error.ContentTooShortError))


async def start_tasks() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail_async(ValueError("first")))
        group.create_task(fail_async(Locked("second")))


async def fail_async(error: Exception) -> None:
    raise error


def described(group: BaseExceptionGroup[Any]) -> list[Any]:
    return [
        described(each) if isinstance(each, BaseExceptionGroup) else (each.type_name, str(each))
        for each in group.exceptions
    ]


def test_members_of_a_task_group_arrive(world: World) -> None:
    a, _ = world.pair({"start_tasks": start_tasks})
    locked: list[Exception] = []
    values: list[Exception] = []
    try:
        call(a, "start_tasks")
    except* ValueError as group:
        values += group.exceptions
    except* RemoteError as group:
        locked += group.exceptions
    assert [str(each) for each in values] == ["first"]
    assert [(type(each), str(each)) for each in locked] == [(RemoteError, "second")]
    assert all("in fail_async" in each.traceback for each in (*values, *locked) if isinstance(each, RemoteError))


def test_nested_groups_arrive_through_two_workers(world: World) -> None:
    inner = Members("inner", [KeyError("key"), Locked("lock")], "look there")
    outer = BaseExceptionGroup("outer", [inner, CallOffError("off"), OSError(2, "No such file", "x.txt")])
    cast = world.cast(
        {"a": {}, "b": {"ask": lambda: call(cast["b"], "sync", target="c")}, "c": handlers(lambda: outer)}
    )
    with pytest.raises(ExceptionGroup) as caught:
        call(cast["a"], "ask")
    error = caught.value
    assert isinstance(error, RemoteError)
    assert error.type_name == "BaseExceptionGroup"
    assert str(error) == "outer (3 sub-exceptions)"
    assert "in worker c on node n1" in error.traceback
    assert described(error) == [
        [("KeyError", "'key'"), (f"{__name__}.Locked", "lock")],
        (f"{__name__}.CallOffError", "off"),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'x.txt'".replace(" or directory", "")),
    ]
    assert isinstance(error.exceptions[2], FileNotFoundError)
    assert error.exceptions[2].filename == "x.txt"
    assert error.subgroup(KeyError) is not None


def test_group_keeps_its_class_and_attributes(world: World) -> None:
    error = outcome_of(world, "sync", lambda: Members("group", [ValueError("member")], "look there"))
    assert isinstance(error, Members)
    assert error.hint == "look there"
    (member,) = error.exceptions
    assert isinstance(member, ValueError)
    assert isinstance(member, RemoteError)


@ONE_ROUTE
def test_group_that_is_nested_too_deeply_arrives_as_a_plain_error(world: World) -> None:
    def nest() -> ExceptionGroup[Exception]:
        group: ExceptionGroup[Exception] = ExceptionGroup("innermost", [ValueError("member")])
        for _ in range(2 * sys.getrecursionlimit()):
            group = ExceptionGroup("group", [group])
        return group

    error = outcome_of(world, "sync", nest)
    assert type(error) is RemoteError
    assert (error.type_name, error.message) == ("ExceptionGroup", "group (1 sub-exception)")


class Ends:
    """A value whose unpickling raises."""

    def __init__(self, raised: BaseException) -> None:
        self.raised = raised

    def __reduce__(self) -> Any:
        return end, (type(self.raised), self.raised.args)


class EndsError(ValueError):
    """An error whose unpickling raises."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__("text")
        self.raised = raised

    def __reduce__(self) -> Any:
        return end, (type(self.raised), self.raised.args)


def end(cls: type[BaseException], args: tuple[Any, ...]) -> None:
    raise cls(*args)


ENDS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), CallOffError()]


@ONE_ROUTE
@pytest.mark.parametrize("raised", ENDS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_result_whose_unpickling_raises_is_an_error_of_its_call(world: World, kind: str, raised: BaseException) -> None:
    error = outcome_of(world, kind, lambda: Ends(raised))
    assert "cannot be read here" in str(error)
    assert type(raised).__name__ in str(error)


@ONE_ROUTE
@pytest.mark.parametrize("raised", ENDS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_error_whose_unpickling_raises_arrives_as_a_plain_error(world: World, kind: str, raised: BaseException) -> None:
    error = outcome_of(world, kind, lambda: EndsError(raised))
    assert type(error) is RemoteError
    assert (error.type_name, error.message) == (f"{__name__}.EndsError", "text")


@ONE_ROUTE
@pytest.mark.parametrize("raised", ENDS, ids=lambda each: type(each).__name__)
def test_argument_whose_unpickling_raises_is_an_error_of_its_call(world: World, raised: BaseException) -> None:
    a, _ = world.pair({"echo": lambda value: value})
    with pytest.raises(RemoteError, match=type(raised).__name__):
        call(a, "echo", Ends(raised))
    assert call(a, "echo", 5) == 5


def test_answer_that_exits_breaks_no_other_call(world: World) -> None:
    ready = concurrent.futures.Future[int]()
    a, _ = world.pair({"ends": lambda: Ends(SystemExit(3)), "ready": lambda: ready})
    other, mine = a.call("b", "ready", (), {}), a.call("b", "ends", (), {})
    with pytest.raises(RpcError, match="SystemExit"):
        mine.result(DEADLINE_S)
    ready.set_result(5)
    assert other.result(DEADLINE_S) == 5


class Interrupts:
    """A value whose unpickling is interrupted by a signal."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return interrupt, (self.number,)


def interrupt(number: int) -> None:
    signal.raise_signal(number)
    for _ in range(1000):
        pass


def leave(number: int, frame: object) -> None:
    raise SystemExit(number)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_while_an_answer_is_read_reaches_the_program(
    world: World, number: signal.Signals, expected: type[BaseException]
) -> None:
    a, _ = world.pair({"interrupts": lambda: Interrupts(number)})
    before = signal.signal(number, leave if number == signal.SIGTERM else signal.default_int_handler)
    try:
        with pytest.raises((expected, RpcError)) as caught:
            a.call("b", "interrupts", (), {}).result(DEADLINE_S)
    finally:
        signal.signal(number, before)
    if world.route == "auto":
        assert caught.type is expected

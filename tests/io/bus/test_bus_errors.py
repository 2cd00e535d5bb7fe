"""What a caller sees of an error that was raised in another worker, on every route."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.io.bus.world import PATIENCE_S, World, entry
from unified.bus.endpoint import BusEndpoint
from unified.errors import RemoteError, RpcNotFoundError, UsageError


def call(bus: BusEndpoint, method: str, *args: Any, target: str = "b", **kwargs: Any) -> Any:
    return bus.call(target, method, args, kwargs).result(PATIENCE_S)


class OwnError(Exception):
    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def fail(error: BaseException) -> Any:
    def handler() -> None:
        raise error

    return handler


def own_error() -> None:
    raise OwnError(7, hint="look there")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_error_is_remote_and_what_was_raised(world: World, is_async: bool) -> None:
    async def missing() -> None:
        fail(KeyError("key"))()

    a, _ = world.pair({"missing": missing if is_async else fail(KeyError("key"))})
    with pytest.raises(KeyError) as caught:
        call(a, "missing")
    error = caught.value
    assert isinstance(error, RemoteError)
    assert (error.type_name, error.message, error.worker, error.node) == ("KeyError", "'key'", "b", "n1")
    assert error.args == ("key",)
    assert "raise error" in error.traceback
    assert "service.py" not in error.traceback
    (note,) = error.__notes__
    assert note.startswith("the call of 'missing' to worker b raised KeyError in worker b on node n1:\nTraceback")


def test_errors_of_every_shape(world: World) -> None:
    handlers = {
        "os": fail(FileNotFoundError(2, "No such file", "x.txt")),
        "own": own_error,
        "lock": lambda: fail(Unpicklable())(),
        "local": lambda: fail(type("Local", (ValueError,), {})("here only"))(),
        "exit": fail(SystemExit(3)),
        "stop": fail(StopIteration(1)),
        "unicode": lambda: b"\xff".decode(),
    }
    a, _ = world.pair(handlers)
    with pytest.raises(FileNotFoundError) as os_error:
        call(a, "os")
    assert (os_error.value.errno, os_error.value.filename) == (2, "x.txt")
    with pytest.raises(RemoteError, match="holds a lock") as lock_error:
        call(a, "lock")
    assert lock_error.value.type_name.endswith("Unpicklable")
    for method, text in (("local", "here only"), ("exit", "3"), ("stop", "1"), ("own", "code 7")):
        with pytest.raises(RemoteError, match=text):
            call(a, method)
    with pytest.raises(UnicodeDecodeError):
        call(a, "unicode")


def test_error_through_two_workers_keeps_its_class(world: World) -> None:
    a, b = world.pair({"relayed": lambda: call(b, "missing", target="c")})
    _, inbox = world.endpoint("c", {"missing": fail(KeyError("key"))})
    b.update_directory([entry("c", inbox)])
    with pytest.raises(KeyError) as caught:
        call(a, "relayed")
    assert isinstance(caught.value, RemoteError)
    assert "in worker c on node n1" in caught.value.traceback


def test_not_found_names_what_there_is(world: World) -> None:
    a, _ = world.pair({"generate": print, "wake_up": print})
    with pytest.raises(RpcNotFoundError, match=r"worker b has no rpc method 'genrate'\. Did you mean 'generate'\?"):
        call(a, "genrate")


def test_result_that_cannot_be_sent_is_an_error_of_the_call(world: World) -> None:
    a, _ = world.pair({"lock": threading.Lock})
    with pytest.raises(RemoteError, match="cannot be sent"):
        call(a, "lock")
    with pytest.raises(UsageError, match="cannot be sent"):
        a.call("b", "lock", (threading.Lock(),), {})

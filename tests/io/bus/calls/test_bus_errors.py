"""What a caller sees of an error that was raised in another worker, on every route."""

import pickle
import threading
from typing import Any

import pytest

from tests.support.bus import DEADLINE_S, World, call, entry
from unified.errors import ProtocolError, RemoteError, RpcError, RpcNotFoundError, UsageError


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


def echo(value: Any = None) -> Any:
    return value


async def echo_async(value: Any = None) -> Any:
    return value


def count(value: Any = None) -> Any:
    yield value


def misuse(timeout: float = 0) -> Any:
    return echo(timeout=timeout)  # type: ignore[call-arg]


@pytest.mark.parametrize("option", ["timeout", "retries"])
@pytest.mark.parametrize("handler", [echo, echo_async, count])
def test_option_that_went_to_the_handler_is_pointed_out(world: World, option: str, handler: Any) -> None:
    a, _ = world.pair({"method": handler})
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'") as caught:
        a.call("b", "method", (1,), {option: 2}).result(DEADLINE_S)
    assert any(f"It is written `_{option}=`" in note for note in getattr(caught.value, "__notes__", []))


def test_other_arguments_that_do_not_fit_are_no_options(world: World) -> None:
    a, _ = world.pair({"echo": echo, "misuse": misuse})
    for method, kwargs in (("echo", {"time": 2}), ("misuse", {"timeout": 2})):
        with pytest.raises(TypeError, match="unexpected keyword argument 'time") as caught:
            a.call("b", method, (), kwargs).result(DEADLINE_S)
        assert "Did you mean the option" not in "".join(caught.value.__notes__)


class Cut:
    """Arrives as a pickle that ends in the middle."""

    def __reduce__(self) -> Any:
        return pickle.loads, (pickle.dumps("whole")[:-2],)


def test_pickle_that_is_cut_ends_its_own_call_and_no_other(world: World) -> None:
    a, _ = world.pair({"echo": echo, "cut": Cut, "echo_async": echo_async})
    for method in ("echo", "echo_async"):
        with pytest.raises(ProtocolError, match="cannot be decoded"):
            call(a, method, Cut())
    with pytest.raises(RpcError, match="cannot be decoded"):
        call(a, "cut")
    assert call(a, "echo", 5) == 5


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


def test_argument_that_cannot_be_sent_keeps_the_whole_group_from_being_called(world: World) -> None:
    ran: list[int] = []
    a, _ = world.pair({"note": ran.append})
    with pytest.raises(UsageError, match="cannot be sent"):
        a.call_each(["b", "b"], "note", [((1,), {}), ((threading.Lock(),), {})])
    each = a.call_each(["b", "b"], "note", [((2,), {}), ((3,), {})])
    assert [future.result(DEADLINE_S) for future in each] == [None, None]
    assert sorted(ran) == [2, 3]

"""Stubs of a `remote_call.py`: functions without a body that call a role."""

# mypy: disable-error-code=empty-body

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, assert_type

import pytest

from tests.support.runtime import InstantBus, in_worker
from unified.api.runtime import FutureSequence, RpcStream, rpc
from unified.api.runtime.remote_call import bind, bind_module, is_stub
from unified.bus.calls.future import RpcFuture
from unified.bus.calls.registry import export_rpc_instance, mark_of
from unified.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

rollout = bind("rollout")


@rollout
def wake_up() -> None:
    """Load the weights again."""


@rollout
def generate(prompts: Sequence[str], length: int = 1) -> FutureSequence[str]: ...


@rollout
def tokens(prompt: str) -> RpcStream[str]: ...


@rollout
def version() -> int: ...


@rollout
def load(path: str) -> RpcFuture[int]: ...


@rollout
async def later(number: int) -> int: ...


@bind("rollout", to="all")
def versions() -> list[int]: ...


class Engine:
    def __init__(self) -> None:
        self.num_woken = 0

    @rpc(name=wake_up)
    def wake(self) -> None:
        self.num_woken += 1

    @rpc(name=generate)
    def run(self, prompts: list[str], length: int = 1) -> list[str]:
        return [prompt * length for prompt in prompts]

    @rpc(name=tokens)
    def split(self, prompt: str) -> Iterator[str]:
        yield from prompt

    @rpc(name=version)
    def version(self) -> int:
        return 7

    @rpc(name=versions)
    def all_versions(self) -> int:
        return 8

    @rpc(name=load)
    def load(self, path: str) -> int:
        return len(path)

    @rpc(name=later)
    def later(self, number: int) -> int:
        return number + 1


@pytest.fixture(autouse=True)
def bus() -> Iterator[InstantBus]:
    with in_worker(trainer=1, rollout=2) as bus:
        yield bus


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    export_rpc_instance(None, engine)
    return engine


def targets(bus: InstantBus) -> list[str]:
    return [call.target for call in bus.calls]


def test_stub_without_a_result_calls_every_worker_and_waits(bus: InstantBus, engine: Engine) -> None:
    assert_type(wake_up(), None)
    assert engine.num_woken == 2
    assert targets(bus) == ["rollout_2-0_1-0", "rollout_2-1_1-0"]
    assert (wake_up.__name__, wake_up.__doc__) == ("wake_up", "Load the weights again.")


def test_what_it_says_it_returns_decides_how_it_is_called(bus: InstantBus, engine: Engine) -> None:
    assert list(assert_type(generate(["a", "b", "c"], length=2), FutureSequence[str])) == ["aa", "bb", "cc"]
    assert len(set(targets(bus))) == 2
    bus.calls.clear()
    assert "".join(assert_type(tokens("abc"), RpcStream[str])) == "abc"
    assert assert_type(version(), int) == 7
    assert assert_type(load("path"), RpcFuture[int]).result() == 4
    assert asyncio.run(later(1)) == 2
    assert targets(bus) == ["rollout_2-0_1-0"] * 4
    assert assert_type(versions(), list[int]) == [8, 8]


def test_options_of_all_calls(bus: InstantBus) -> None:
    bus.methods["slow"] = lambda: 1

    @bind("rollout", timeout=3.0)
    def slow() -> int: ...

    assert slow() == 1
    assert bus.calls[-1].timeout == 3.0


def test_wrong_arguments_are_refused_here(bus: InstantBus) -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'prompts'"):
        generate()  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="none of its arguments is a sequence"):
        generate(3)  # type: ignore[arg-type]
    assert not bus.calls


def test_body_that_would_never_run_is_refused() -> None:
    def real(x: int) -> int:
        return x

    def five() -> int:
        return 5

    for function in (real, five):
        assert isinstance(function, types.FunctionType)
        assert not is_stub(function)
        with pytest.raises(UsageError, match=r"has a body, which would never run: .*@rpc\(name="):
            rollout(function)
    for other in (print, Engine()):
        with pytest.raises(UsageError, match="makes a function call a role"):
            rollout(other)  # type: ignore[type-var]


def test_stub_says_how_it_is_called_or_is_refused() -> None:
    def no_type(): ...  # type: ignore[no-untyped-def]

    with pytest.raises(UsageError, match=r"has no return annotation, .*bind\(role, to='all'\)"):
        rollout(no_type)
    with pytest.raises(UsageError, match="`to` is one of all, rank0, batch, stream"):
        bind("rollout", to="every")  # type: ignore[arg-type]


MODULE = """
def vllm_wakeup() -> None: ...
def vllm_generate(prompt_token_ids, params) -> "FutureSequence": ...
def helper(): return 1
"""


def test_module_of_plain_stubs_as_document_3_has_it(bus: InstantBus, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("remote_call_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(MODULE, vars(module))
    assert bind_module("rollout", module.__name__) == ["vllm_wakeup", "vllm_generate"]
    handlers: dict[str, Callable[..., Any]] = {
        "vllm_wakeup": lambda: None,
        "vllm_generate": lambda ids, params: [len(each) for each in ids],
    }
    bus.methods.update(handlers)
    assert module.vllm_wakeup() is None
    assert list(module.vllm_generate([[1], [2, 3]], {"n": 1})) == [1, 2]

    @rpc(module.vllm_generate)
    def provider() -> None: ...

    mark = mark_of(provider)
    assert mark is not None
    assert mark.name == "vllm_generate"
    assert module.helper() == 1
    with pytest.raises(UsageError, match="has no function whose body is"):
        bind_module("rollout", module)  # all are bound

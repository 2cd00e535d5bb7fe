"""Every way to mark, export and name a method."""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unified.bus.calls.registry import (
    RPC_REGISTRY,
    MethodRegistry,
    export_rpc_instance,
    export_rpc_method,
    export_rpc_module,
    is_async,
    mark_of,
    method_name,
    rpc,
)
from unified.errors import RpcNotFoundError


def module_stub(x: int) -> int:
    return x


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(RPC_REGISTRY)
    RPC_REGISTRY.clear()
    yield
    RPC_REGISTRY.clear()
    RPC_REGISTRY.update(before)


def test_missing_method_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="has no rpc method 'x'"):
        RPC_REGISTRY.find("x", "w")
    assert issubclass(RpcNotFoundError, LookupError)


def test_bare_on_a_function_that_replaces_one_of_its_name() -> None:
    space: dict[str, Any] = {"rpc": rpc}
    for result in (1, 2):  # as when a module is loaded again
        exec(f"@rpc\ndef handler(): return {result}", space)
    assert space["handler"]() == 2


def local_stub_forms() -> list[Callable[[Callable[[], int]], Callable[[], int]]]:
    def local_stub() -> None: ...

    return [rpc, rpc(), rpc("wanted"), rpc(name="wanted"), rpc(local_stub), rpc(name=local_stub), rpc(module_stub)]


@pytest.mark.parametrize(
    ("form", "name"), [*enumerate(["handler"] * 2 + ["wanted"] * 2 + ["local_stub"] * 2 + ["module_stub"])]
)
def test_marked_in_every_form(form: int, name: str) -> None:
    decorate = local_stub_forms()[form]

    @decorate
    def handler() -> int:
        return 1

    assert handler() == 1
    assert method_name(handler) == name
    assert RPC_REGISTRY == {}


def test_stub_that_is_marked_itself_gives_its_rpc_name() -> None:
    @rpc("far")
    def stub() -> None: ...

    @rpc(stub)
    def handler() -> None: ...

    assert method_name(handler) == "far"


def test_stub_taken_for_a_decorator_says_so() -> None:
    with pytest.raises(TypeError, match="takes it for a stub"):
        rpc(module_stub)(5)


def test_export_registers_at_once_and_refuses_a_second() -> None:
    @rpc(export=True)
    def handler() -> int:
        return 1

    assert RPC_REGISTRY["handler"]() == 1
    with pytest.raises(ValueError, match=r"^RPC method 'handler' already registered\.$"):
        export_rpc_method("handler", handler)
    with pytest.raises(ValueError, match="already registered"):

        @rpc(name="handler", export=True)
        def other() -> None: ...


def test_unregister_frees_the_name() -> None:
    export_rpc_method("x", module_stub)
    RPC_REGISTRY.unregister("x")
    assert "x" not in RPC_REGISTRY
    RPC_REGISTRY.unregister("x")
    export_rpc_method("x", module_stub)
    assert "x" in RPC_REGISTRY


class Service:
    def __init__(self) -> None:
        self.calls = 0

    @rpc
    def plain(self) -> int:
        self.calls += 1
        return self.calls

    @rpc("other_name")
    async def named(self) -> str:
        return "named"

    @staticmethod
    @rpc
    def inner_static() -> str:
        return "static"

    @rpc
    @staticmethod
    def outer_static() -> str:
        return "static"

    @rpc()
    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    def unmarked(self) -> None: ...

    @property
    def trap(self) -> int:
        raise AssertionError("exporting must not run properties")


class Child(Service):
    def plain(self) -> int:
        return -1


def test_instance_with_and_without_namespace() -> None:
    service = Service()
    export_rpc_instance("ns", service)
    assert sorted(RPC_REGISTRY) == ["ns.inner_static", "ns.of_class", "ns.other_name", "ns.outer_static", "ns.plain"]
    export_rpc_instance(None, service)
    assert RPC_REGISTRY["plain"]() == 1
    assert RPC_REGISTRY["ns.plain"]() == 2
    assert RPC_REGISTRY["inner_static"]() == RPC_REGISTRY["outer_static"]() == "static"
    assert RPC_REGISTRY["of_class"]() == "Service"
    assert is_async(RPC_REGISTRY["other_name"])


def test_override_without_a_mark_keeps_the_name() -> None:
    export_rpc_instance(None, Child())
    assert RPC_REGISTRY["plain"]() == -1


def test_two_instances_under_one_namespace_are_refused() -> None:
    export_rpc_instance("ns", Service())
    with pytest.raises(ValueError, match="already registered"):
        export_rpc_instance("ns", Service())


def test_what_has_no_rpc_methods_is_refused_and_a_module_exports_its_functions() -> None:
    for what, said in (
        (object(), r"no method that is marked with @rpc\."),
        (Service, r"It is a class: export an instance of it, Service\(…\)\."),
        (types, r"no method that is marked with @rpc\.$"),
    ):
        with pytest.raises(ValueError, match=said):
            export_rpc_instance(None, what)
    module = module_of("@rpc()\ndef ping(): return 'pong'\ndef other(): ...")
    export_rpc_instance(None, module)
    export_rpc_instance("ns", module)
    assert sorted(RPC_REGISTRY) == ["ns.ping", "ping"]
    assert RPC_REGISTRY["ns.ping"]() == "pong"


def test_exporting_the_same_instance_again_changes_nothing() -> None:
    service = Service()
    export_rpc_instance(None, service)
    exported = dict(RPC_REGISTRY)
    export_rpc_instance(None, service)
    assert dict(RPC_REGISTRY) == exported


def test_export_inside_a_class_is_bound_when_the_instance_comes() -> None:
    class Entry:
        @rpc(export=True)
        def get_status(self) -> str:
            return "bound"

    export_rpc_instance(None, Entry())
    assert RPC_REGISTRY["get_status"]() == "bound"


def module_of(code: str) -> types.ModuleType:
    module = types.ModuleType("m")
    exec(code, vars(module) | {"rpc": rpc}, vars(module))
    return module


def test_module_exports_its_marked_functions() -> None:
    module = module_of("@rpc\ndef a(): return 1\n@rpc(export=True)\ndef b(): return 2\ndef c(): ...")
    export_rpc_module(module)
    export_rpc_module(module)
    assert {name: function() for name, function in RPC_REGISTRY.items()} == {"a": 1, "b": 2}


def test_two_functions_of_one_name_in_a_module_are_refused() -> None:
    with pytest.raises(ValueError, match="'x' already registered"):
        export_rpc_module(module_of("@rpc('x')\ndef a(): ...\n@rpc('x')\ndef b(): ..."))


def test_names_of_methods() -> None:
    assert method_name("by_name") == "by_name"
    assert method_name(module_stub) == "module_stub"
    assert method_name(Service.named) == "other_name"
    assert mark_of(module_stub) is None
    with pytest.raises(TypeError, match="by name or as a function"):
        method_name(functools.partial(module_stub))


def test_not_found_names_what_is_registered() -> None:
    for name in ("generate", "wake_up", "unified.weights.default.begin"):
        export_rpc_method(name, module_stub)
    with pytest.raises(
        RpcNotFoundError,
        match=r"worker w has no rpc method 'genrate'\. Did you mean 'generate'\? Registered there: generate, wake_up\.",
    ):
        RPC_REGISTRY.find("genrate", "w")
    for name in ("generate", "wake_up"):
        RPC_REGISTRY.unregister(name)
    with pytest.raises(RpcNotFoundError, match=r"'x'\. Nothing is registered there"):
        RPC_REGISTRY.find("x", "w")


def test_a_function_without_a_mark_is_told_from_one_that_does_not_exist() -> None:
    class Owner:
        number = 3

        def score(self) -> None:
            pass

    registry = MethodRegistry({"other": print})
    registry.owners = [Owner]
    with pytest.raises(RpcNotFoundError, match=r"worker w: 'score' exists, but is not marked @rpc: .*there: other\.$"):
        registry.find("score", "w")
    with pytest.raises(RpcNotFoundError, match=r"has no rpc method 'number'"):
        registry.find("number", "w")

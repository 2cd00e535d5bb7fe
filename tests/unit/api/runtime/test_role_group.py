"""Groups, proxies, and the sharing out of batches."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.runtime import InstantBus, in_worker
from unified.api.runtime import (
    PrimeMasterApi,
    RoleActor,
    RoleGroup,
    UserRpcProxy,
    create_rpc_proxy,
    export_rpc_instance,
    rpc,
)
from unified.api.runtime.batch import is_cut
from unified.errors import NotInWorkerError, UsageError
from unified.worker.context import set_current_worker


@pytest.fixture(autouse=True)
def bus() -> Iterator[InstantBus]:
    with in_worker(trainer=1, rollout=3, idle=0) as bus:
        yield bus


def generate(prompts: list[int], scale: int = 1) -> list[int]:
    return [prompt * scale for prompt in prompts]


@rpc("far_name")
def stub() -> str:
    return "near"


async def stub_async(x: int) -> int:
    return x


def test_group_is_a_sequence_of_actors() -> None:
    group = RoleGroup("rollout")
    assert [actor.name for actor in group] == ["rollout_3-0_1-0", "rollout_3-1_1-0", "rollout_3-2_1-0"]
    assert (len(group), group[-1].rank, [actor.rank for actor in group[:2]]) == (3, 2, [0, 1])
    assert group[2:9] == [group[2]]
    for index in (3, -4):
        with pytest.raises(IndexError, match=rf"RoleGroup\('rollout'\)\[{index}\]: it has 3 workers"):
            group[index]
    assert (group[1].info.role, repr(group)) == ("rollout", "RoleGroup('rollout', 3 actors)")
    assert is_cut(group)


def test_group_of_several_roles() -> None:
    group = RoleGroup(name="agents", roles=["rollout", "trainer"])
    assert [actor.info.role for actor in group] == ["rollout"] * 3 + ["trainer"]
    assert group.name == "agents"


@pytest.mark.parametrize("role", ["idle", "roll"])
def test_no_such_actors(role: str) -> None:
    with pytest.raises(ValueError, match=rf"^No actors found for role '{role}'\."):
        RoleGroup(role)
    assert len(RoleGroup(role, optional=True)) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({}, None), ({"role": "trainer", "roles": ["rollout"]}, None), ({"roles": []}, None)),
        (
            {"role": "roll_out"},
            r"^No actors found for role 'roll_out'\. Did you mean 'rollout'\? Roles: trainer, rollout, idle\.$",
        ),
    ],
)
def test_role_or_roles(given: dict[str, Any], message: str | None) -> None:
    with pytest.raises(UsageError, match=message):
        RoleGroup(**given)


def test_outside_a_worker() -> None:
    set_current_worker(None)
    with pytest.raises(NotInWorkerError):
        RoleGroup("rollout")


def test_call_of_one_actor(bus: InstantBus) -> None:
    bus.methods = {"generate": generate, "far_name": lambda: "far", "stub_async": lambda x: x}
    actor: RoleActor = RoleGroup("rollout")[1]
    assert actor.call("generate", [1], scale=2).result() == [2]
    assert actor.call(generate, [1]).result() == [1]
    assert actor.call(stub).result() == "far"
    assert actor.call(stub_async, 3).result() == 3
    assert actor.call("generate", [1], _timeout=2.5).result() == [1]
    assert bus.calls[-1] == ("rollout_3-1_1-0", "generate", ([1],), {}, 2.5)
    assert bus.calls[0].kwargs == {"scale": 2}
    assert RoleGroup("rollout").call_batch(generate, 4, [1, 2, 3, 4], scale=2).wait() == [2, 4, 6, 8]


def test_call_of_all_and_of_rank_0(bus: InstantBus) -> None:
    bus.methods = {"echo": lambda *args, **kwargs: (args, kwargs)}
    group = RoleGroup("rollout")
    assert group.call("echo", [1], key=2).result() == [(([1],), {"key": 2})] * 3
    assert group.call_rank0("echo", 1).result() == ((1,), {})
    assert bus.calls[-1].target == "rollout_3-0_1-0"


def test_scatter(bus: InstantBus) -> None:
    bus.methods = {"echo": lambda *args, **kwargs: (args, kwargs)}
    group = RoleGroup("rollout")
    scattered = group.call("echo", [1, 2, 3], key=["a", "b", "c"], _scatter=True).result()
    assert scattered == [((1,), {"key": "a"}), ((2,), {"key": "b"}), ((3,), {"key": "c"})]
    with pytest.raises(ValueError, match="key has 2 entries for 3 actors"):
        group.call("echo", [1, 2, 3], key=["a", "b"], _scatter=True)
    with pytest.raises(ValueError, match="argument 0 is a str, not a list"):
        group.call("echo", "abc", _scatter=True)


def test_empty_group() -> None:
    group = RoleGroup("idle", optional=True)
    assert group.call("anything").result() == []
    for call in (lambda: group.call_rank0("m"), lambda: group.call_batch("m", 1, [1])):
        with pytest.raises(ValueError, match=r"^No actors in the role group\.$"):
            call()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((4, [1, 2, 3]), {}, "the batch has 4 inputs, but argument 0 has 3 entries"),
        ((4, [1, 2, 3, 4]), {"extra": (1,)}, "the batch has 4 inputs, but extra has 1 entries"),
        ((4, np.zeros((3, 4))), {}, "argument 0 has 3 entries"),
        *(((size, [1]), {}, "the size of a batch") for size in (-1, 1.5, "4")),
    ],
)
def test_size_is_a_number_that_the_arguments_have(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RoleGroup("rollout").call_batch("m", *args, **kwargs)


class Service:
    @rpc()
    def hello(self, name: str) -> str:
        """Greets."""
        return f"Hello, {name}!"

    @rpc("renamed")
    async def later(self) -> str:
        return "later"

    def unmarked(self) -> None: ...


@pytest.mark.parametrize("owner", ["rollout_3-2_1-0", "rollout-2"])
async def test_proxy(bus: InstantBus, owner: str) -> None:
    export_rpc_instance("simple_class", Service())
    proxy = create_rpc_proxy(owner, "simple_class", Service)
    assert proxy.hello("World") == "Hello, World!"
    assert bus.calls[-1][:2] == ("rollout_3-2_1-0", "simple_class.hello")
    inner: Any = await asyncio.create_task(proxy.later())
    assert await inner == "later"  # this bus does not await what the handler returned
    assert (proxy.owner, proxy.name, proxy.cls) == (owner, "simple_class", Service)  # type: ignore[attr-defined]
    assert proxy.hello.__doc__ == "Greets."
    assert repr(proxy) == "UserRpcProxy('rollout_3-2_1-0', 'simple_class', Service)"
    with pytest.raises(AttributeError, match=r"Service.* has no @rpc method 'helo'\. Did you mean 'hello'\?"):
        proxy.helo  # type: ignore[attr-defined]  # noqa: B018  # that it is missing is the point
    with pytest.raises(AttributeError):
        proxy.unmarked()


def test_async_method_of_a_proxy_can_be_run_from_sync_code(bus: InstantBus) -> None:
    export_rpc_instance("simple_class", Service())
    coroutine = create_rpc_proxy("rollout", "simple_class", Service).later()
    assert bus.calls[-1].method == "simple_class.renamed"  # it is called at once, and not when it is awaited
    asyncio.run(coroutine).close()  # type: ignore[attr-defined]  # this bus does not await what the handler returned


def test_methods_hide_the_attributes_of_a_proxy(bus: InstantBus) -> None:
    class Named:
        @rpc()
        def name(self) -> str:
            return "far"

    export_rpc_instance("named", Named())
    assert create_rpc_proxy("rollout", "named", Named).name() == "far"


def test_size_of_a_batch_by_its_name(bus: InstantBus) -> None:
    bus.methods["double"] = lambda items, size=0: [2 * item + size for item in items]
    group = RoleGroup("rollout")
    assert list(group.call_batch("double", size=3, items=[1, 2, 3])) == [2, 4, 6]
    assert list(group.call_batch("double", [1, 2, 3], size=3)) == [2, 4, 6]  # type: ignore[call-overload]
    # an argument of the method
    assert list(group.call_batch("double", 3, [1, 2, 3], size=1)) == [3, 5, 7]  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="needs size, the number"):
        group.call_batch("double", items=[1])  # type: ignore[call-overload]


def test_proxy_of_a_role_is_of_its_rank_0_and_a_namespace_may_be_missing(bus: InstantBus) -> None:
    export_rpc_instance(None, Service())
    assert UserRpcProxy("rollout", None, Service).hello("you") == "Hello, you!"
    assert bus.calls[-1][:2] == ("rollout_3-0_1-0", "hello")


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        ("rollout-7", r"No actor is named 'rollout-7'\. Role 'rollout' has no rank 7: its ranks are 0 to 2\."),
        ("rolout", r"No actor is named 'rolout'\. Did you mean 'rollout'\? The job has the roles trainer"),
        ("other-0", r"No actor is named 'other-0'\. The job has the roles"),
        ("rollout_9-0_1-0", r"No actor is named 'rollout_9-0_1-0'"),
    ],
)
def test_proxy_of_nobody(owner: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create_rpc_proxy(owner, "ns", Service)


def test_roles_and_workers_are_known_without_asking_the_master() -> None:
    roles = PrimeMasterApi.get_all_roles()
    assert {role: len(actors) for role, actors in roles.items()} == {"trainer": 1, "rollout": 3, "idle": 0}
    assert [actor.rank for actor in PrimeMasterApi.get_workers_by_role("rollout")] == [0, 1, 2]
    assert PrimeMasterApi.get_workers_by_role("nobody", optional=True) == []
    with pytest.raises(ValueError, match=r"^No actors found for role 'nobody'\. Roles: trainer, rollout, idle\.$"):
        PrimeMasterApi.get_workers_by_role("nobody")
    assert PrimeMasterApi.get_actor_info("rollout-1").name == "rollout_3-1_1-0"

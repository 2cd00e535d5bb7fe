"""Where workers go, and why they do not: units, rooms and plans, without a cluster."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.support.master import simple
from unified.job.spec import JobSpec, Resources, RoleSpec
from unified.protocol.records import Device, NodeResources
from unified_master.core.node_capacity import Allocation, NodeCapacity, Unit
from unified_master.core.scheduling.packing import PlacementPlan, plan
from unified_master.core.scheduling.placement import all_units, units_of


def role(
    name: str, total: int, accelerator: float = 0, *, per_group: int = 1, collocation: str | None = None, **needs: Any
) -> RoleSpec:
    resources = Resources(accelerator=accelerator, **needs)
    return simple(name, total, per_group=per_group, collocation=collocation, resources=resources)


def job(*roles: RoleSpec, device_per_node: int = 8, isolation: str = "") -> JobSpec:
    return JobSpec(name="j", roles=list(roles), device_per_node=device_per_node, worker_isolation_resource=isolation)


def node(cpu: float = 8, devices: int = 0, kind: str = "cuda", **user: float) -> NodeResources:
    return NodeResources(
        cpu=cpu,
        memory_mb=1000,
        disk_mb=1000,
        devices=[Device(index=index, kind=kind) for index in range(devices)],
        user_defined=user,
    )


def capacities(spec: JobSpec, nodes: Sequence[NodeResources]) -> list[NodeCapacity]:
    return [
        NodeCapacity(f"n{number}", offered, spec.accelerator_type, spec.device_cap)
        for number, offered in enumerate(nodes, 1)
    ]


def place(spec: JobSpec, *nodes: NodeResources) -> PlacementPlan:
    return plan(all_units(spec), lambda: capacities(spec, nodes))


def assigned(found: PlacementPlan) -> dict[str, tuple[str, list[int]]]:
    """Worker by role-rank → node and device numbers."""
    assert found.fits, found.reason
    short = {}
    for one in found.assignments:
        name, world_rank, _ = one.worker.rsplit("_", 2)
        short[f"{name}-{world_rank.split('-')[1]}"] = (one.node, [index for _, index in one.allocation.devices])
    return dict(sorted(short.items()))


@pytest.mark.parametrize(
    ("spec", "devices", "expected"),
    [
        # whole devices are packed on as few nodes as hold them
        (job(role("a", 3, 1)), [2, 2], {"a-0": ("n1", [0]), "a-1": ("n1", [1]), "a-2": ("n2", [0])}),
        # the node that fits best is taken
        (job(role("a", 1, 2)), [8, 2, 4], {"a-0": ("n2", [0, 1])}),
        # large units are placed before small ones
        (job(role("small", 2, 1), role("large", 1, 4)), [4, 2],
         {"large-0": ("n1", [0, 1, 2, 3]), "small-0": ("n2", [0]), "small-1": ("n2", [1])}),
        # workers without devices are spread
        (job(role("a", 4)), [0, 0], {"a-0": ("n1", []), "a-1": ("n2", []), "a-2": ("n1", []), "a-3": ("n2", [])}),
        # a group lands on one node
        (job(role("a", 4, 1, per_group=2)), [3, 3],
         {"a-0": ("n1", [0]), "a-1": ("n1", [1]), "a-2": ("n2", [0]), "a-3": ("n2", [1])}),
        # two shares of one worker each fill a device
        (job(role("a", 4, 0.5)), [4],
         {"a-0": ("n1", [0]), "a-1": ("n1", [0]), "a-2": ("n1", [1]), "a-3": ("n1", [1])}),
        # shares that do not add up to one stay apart
        (job(role("a", 2, 0.6)), [2], {"a-0": ("n1", [0]), "a-1": ("n1", [1])}),
        # a fraction above one takes whole devices
        (job(role("a", 1, 1.5)), [2], {"a-0": ("n1", [0, 1])}),
    ],
)  # fmt: skip
def test_where_workers_are_placed(spec: JobSpec, devices: list[int], expected: dict[str, Any]) -> None:
    assert assigned(place(spec, *(node(devices=number) for number in devices))) == expected


@pytest.mark.parametrize("share", [0.5, 0.33])
def test_collocated_workers_of_one_local_rank_share_a_device(share: float) -> None:
    names = ["a", "b"] if share == 0.5 else ["a", "b", "c"]
    roles = [role(name, 4, share, per_group=2, collocation="x") for name in names]
    found = assigned(place(job(*roles), node(devices=2), node(devices=2)))
    for name in names:
        assert [found[f"{name}-{rank}"] for rank in range(4)] == [("n1", [0]), ("n1", [1]), ("n2", [0]), ("n2", [1])]


def test_collocated_groups_of_different_sizes_share_what_they_can() -> None:
    found = assigned(place(job(role("a", 4, 0.5, per_group=2, collocation="x"), role("b", 2, 0.5, collocation="x")),
                        node(devices=2), node(devices=2)))  # fmt: skip
    assert found["b-0"] == found["a-0"] == ("n1", [0])
    assert found["b-1"] == found["a-2"] == ("n2", [0])
    assert (found["a-1"], found["a-3"]) == (("n1", [1]), ("n2", [1]))


def test_groups_that_may_share_nodes_use_the_devices_of_all_of_them() -> None:
    spec = JobSpec(name="j", roles=[role("a", 2, 2)], node_num=2, device_per_node=2, may_share_nodes=True)
    assert {where for where, _ in assigned(place(spec, node(devices=4))).values()} == {"n1"}
    assert place(JobSpec(name="j", roles=[role("a", 2, 2)], node_num=2, device_per_node=2), node(devices=4)).reason


def ranks(total: int, per_group: int, nodes: int, **fields: Any) -> JobSpec:
    """A CPU job of one elastic role that names no resource."""
    elastic = msgspec.structs.replace(role("t", total, per_group=per_group), kind="elastic")
    return JobSpec(name="j", roles=[elastic], accelerator_type="CPU", node_num=nodes, **fields)


def test_ranks_of_a_cpu_job_spread_over_nodes_as_if_they_had_devices() -> None:
    four = ranks(4, 2, 2, device_per_node=2)
    found = assigned(place(four, node(cpu=1), node(cpu=1)))
    assert {name: where for name, (where, _) in found.items()} == {"t-0": "n1", "t-1": "n1", "t-2": "n2", "t-3": "n2"}
    assert (
        place(four, node()).reason
        == "role t needs 2 groups of 2 ranks; the job may have 2 on a node (device_per_node), and 1 node is there"
    )
    for fits_on_one in (
        ranks(4, 2, 2, device_per_node=4),
        ranks(4, 2, 2, device_per_node=2, may_share_nodes=True),
        ranks(6, 1, 1, device_per_node=2),  # its one node has to do
        ranks(6, 6, 1, device_per_node=2),
    ):
        assert place(fits_on_one, node(cpu=1)).fits


def test_at_most_device_per_node_devices_of_a_node_are_used() -> None:
    spec = job(role("a", 4, 1), device_per_node=2)
    found = assigned(place(spec, node(devices=8), node(devices=8)))
    assert {name: where for name, (where, _) in found.items()} == {"a-0": "n1", "a-1": "n1", "a-2": "n2", "a-3": "n2"}
    assert place(spec, node(devices=8)).reason == (
        "role a needs 4 groups of 1 device; there is room for 2 of them, after which the largest free node n1 has 0"
    )
    assert place(job(role("a", 1, 4), device_per_node=2), node(devices=8)).reason == (
        "role a needs 1 group of 4 devices; the job may use 2 of a node (device_per_node)"
    )


def test_shares_on_devices_already_used_do_not_count_twice_against_the_cap() -> None:
    assert assigned(place(job(role("a", 4, 0.25), device_per_node=1), node(devices=2))).keys() == {
        "a-0", "a-1", "a-2", "a-3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("accelerator", "offered", "expected"),
    [
        ("GPU", node(devices=2), [("device", 0), ("device", 1)]),
        ("GPU", node(devices=2, kind="virtual"), [("device", 0), ("device", 1)]),
        ("CPU", node(cpu=3, devices=2, kind="virtual"), [("device", 0), ("device", 1)]),
        ("CPU", node(cpu=3.5, devices=2), [("slot", 0), ("slot", 1), ("slot", 2)]),
        ("TPU", node(cpu=3), []),
    ],
)
def test_the_pool_of_devices_depends_on_the_accelerator_type(
    accelerator: str, offered: NodeResources, expected: list[tuple[str, int]]
) -> None:
    assert list(NodeCapacity("n1", offered, accelerator, 8).devices) == expected


def test_real_devices_are_preferred_over_virtual_ones() -> None:
    devices = [Device(index=0, kind="virtual"), Device(index=1, kind="npu")]
    mixed = msgspec.structs.replace(node(), devices=devices)
    assert list(NodeCapacity("n1", mixed, "GPU", 8).devices) == [("device", 1)]
    assert list(NodeCapacity("n1", mixed, "CPU", 8).devices) == [("device", 0)]


@pytest.mark.parametrize(
    ("needs", "nodes", "reason"),
    [
        (role("a", 2, cpu=6), [node(DB=1)], "role a needs 2 groups of 6 CPU cores; there is room for 1 of them, "
         "after which the largest free node n1 has 2"),
        (role("a", 2, memory_mb=2000), [node(DB=1)], "role a needs 2 groups of 2000 MB of memory; no node of this "
         "cluster has 2000 MB of memory (the largest, n1, has 1000)"),
        (role("a", 2, disk_mb=1001), [node(DB=1)], "role a needs 2 groups of 1001 MB of disk; no node of this "
         "cluster has 1001 MB of disk (the largest, n1, has 1000)"),
        (role("a", 2, user_defined={"MR": 1.0}), [node(DB=1)], "role a needs 2 groups of 1 MR; no node has any left"),
        (role("a", 2, user_defined={"DB": 2.0}), [node(DB=1)],
         "role a needs 2 groups of 2 DB; the node with most, n1, has 1"),
        (role("a", 1, 2, cpu=4), [node(cpu=8), node(cpu=2, devices=2)],
         "role a needs 1 group; no node has all resources of one group free at the same time"),
        # a group is not cut in two
        (role("a", 4, 1, per_group=4), [node(devices=3)] * 2,
         "role a needs 1 group of 4 devices; no node of this cluster has 4 (the largest, n1, has 3); "
         "a role that needs no device says .resource(cpu=1)"),
    ],
)  # fmt: skip
def test_the_reason_names_what_is_short(needs: RoleSpec, nodes: list[NodeResources], reason: str) -> None:
    assert place(job(needs), *nodes).reason == reason


def test_user_defined_resources_choose_the_node() -> None:
    spec = job(role("reader", 2, user_defined={"DB": 1.0}), role("b", 1))
    assert assigned(place(spec, node(), node(DB=2)))["reader-1"][0] == "n2"


def test_the_isolation_resource_is_needed_by_every_worker() -> None:
    spec = job(role("a", 2), isolation="MR")
    assert {where for where, _ in assigned(place(spec, node(), node(MR=2))).values()} == {"n2"}
    assert "1 MR" in place(spec, node(), node(MR=1)).reason


@pytest.mark.parametrize(
    ("spec", "nodes", "fits"),
    [
        (job(role("a", 50)), [node(cpu=0)], True),  # what does not matter is not counted
        (job(role("a", 0)), [], True),
        (job(role("a", 1)), [], False),
    ],
)
def test_what_fits(spec: JobSpec, nodes: list[NodeResources], fits: bool) -> None:
    assert place(spec, *nodes).fits is fits


def test_claims_of_others_make_a_room_smaller() -> None:
    capacity = NodeCapacity("n1", node(cpu=4, devices=2, MR=1), "GPU", 8)
    allocation = Allocation(cpu=3, memory_mb=10, user_defined={"MR": 1.0}, devices=(("device", 0),), share=0.5)
    capacity.subtract(allocation)
    assert (capacity.cpu, capacity.memory_mb, capacity.user_defined["MR"], capacity.free_devices) == (1, 990, 0, 1)
    (unit,) = units_of(job(role("a", 1, 0.5)))
    chosen = capacity.choose_devices(unit)
    assert chosen is not None
    assert list(chosen.values()) == [(("device", 0),)]


def test_units_of_collocated_roles_hold_the_runs_of_each() -> None:
    units = units_of(job(role("a", 4, per_group=2, collocation="x"), role("b", 2, collocation="x"), role("c", 1)))
    assert [(unit.label, [member.worker for member in unit.members]) for unit in units] == [
        ("roles a, b (collocated)", ["a_4-0_2-0", "a_4-1_2-1", "b_2-0_1-0"]),
        ("roles a, b (collocated)", ["a_4-2_2-0", "a_4-3_2-1", "b_2-1_1-0"]),
        ("role c", ["c_1-0_1-0"]),
    ]


def test_a_large_job_looks_at_each_room_once_and_then_at_those_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    one = NodeCapacity.fit

    def counted(capacity: NodeCapacity, unit: Unit) -> dict[str, Allocation] | None:
        looks.append(capacity.name)
        return one(capacity, unit)

    monkeypatch.setattr(NodeCapacity, "fit", counted)
    found = place(job(role("a", 400, 1), role("b", 100, 0, cpu=1)), *[node(devices=8)] * 50)
    assert found.fits, found.reason
    assert {len([one for one in found.assignments if one.node == f"n{number}"]) for number in range(1, 51)} == {10}
    assert len(looks) <= 2 * 50 + 2 * 500


def on_at_most(number: int, spec: JobSpec, *nodes: NodeResources) -> PlacementPlan:
    return plan(all_units(spec), lambda: capacities(spec, nodes), number)


def nodes_of(found: PlacementPlan) -> list[str]:
    return [node for node, _ in assigned(found).values()]


def trainer(groups: int, per_group: int = 2, **more: Any) -> RoleSpec:
    return msgspec.structs.replace(role("t", groups * per_group, 1, per_group=per_group, **more), kind="elastic")


def test_no_more_nodes_are_used_than_node_num() -> None:
    four = [node(devices=2)] * 4
    assert set(nodes_of(on_at_most(2, job(role("a", 4, 1)), *four))) == {"n1", "n2"}
    assert set(nodes_of(on_at_most(1, job(role("a", 4)), *four))) == {"n1"}
    assert on_at_most(1, job(role("a", 4, 1)), *four).reason == "it fits on 2 nodes, and may use 1 (node_num)"
    assert on_at_most(1, job(role("a", 9, 1)), *four).reason.startswith("role a needs 9 groups of 1 device; there is")


def test_the_nodes_are_chosen_that_hold_all_of_the_job() -> None:
    """Where the best node for its first unit has no room for the others."""
    spec = job(role("a", 4, 1), role("b", 2, cpu=1))
    small, large = node(devices=1), node(devices=4)
    assert set(nodes_of(on_at_most(1, spec, small, large, node(devices=8), small))) == {"n2"}
    assert set(nodes_of(on_at_most(2, job(role("a", 9, 1)), small, large, small, node(devices=6)))) == {"n2", "n4"}
    mixed = job(role("a", 2, 2), role("big", 1, 4), role("c", 4, cpu=4))
    assert len(set(nodes_of(on_at_most(2, mixed, *[node(devices=2)] * 3, node(devices=4), node(devices=4))))) == 2


def test_nodes_that_the_job_is_on_count() -> None:
    spec = job(role("a", 1, 1))

    def opened() -> list[NodeCapacity]:
        found = capacities(spec, [node(devices=4), node(devices=2), node(devices=2)])
        found[0].note_own("a")
        return found

    assert set(nodes_of(plan(all_units(spec), opened, 1))) == {"n1"}
    assert set(nodes_of(plan(all_units(spec), opened, 2))) == {"n2"}


def test_groups_of_an_elastic_role_are_spread() -> None:
    eights = [node(devices=8)] * 3
    assert nodes_of(on_at_most(2, job(trainer(2)), *eights)) == ["n1", "n1", "n2", "n2"]
    assert nodes_of(on_at_most(1, job(trainer(2)), *eights)) == ["n1"] * 4
    assert sorted(nodes_of(on_at_most(3, job(trainer(4)), *eights))) == ["n1"] * 4 + ["n2"] * 2 + ["n3"] * 2
    assert nodes_of(on_at_most(2, job(trainer(2)), node(devices=4), node(devices=1))) == ["n1"] * 4


def test_groups_are_not_spread_where_the_rest_of_the_job_would_not_fit() -> None:
    spec = job(trainer(2, per_group=3), role("a", 3, 2))
    found = assigned(place(spec, node(devices=6), node(devices=6)))
    assert {where for worker, (where, _) in found.items() if worker[0] == "t"} == {"n1"}


@pytest.mark.parametrize(
    ("word", "expected"), [("pool", {"n2", "n3"}), ("pool=b", {"n3"}), ("MR", {"n4"}), ("MR=1", set()), ("x", set())]
)
def test_isolation_takes_a_resource_a_label_or_a_label_with_its_value(word: str, expected: set[str]) -> None:
    spec = job(role("a", 2), isolation=word)
    labels: list[dict[str, str]] = [{}, {"pool": "a"}, {"pool": "b", "y": "MR"}, {}]

    def opened() -> list[NodeCapacity]:
        found = [NodeCapacity(f"n{number}", node(), "GPU", 8, known) for number, known in enumerate(labels[:3], 1)]
        return [*found, NodeCapacity("n4", node(MR=2), "GPU", 8)]

    found = plan(all_units(spec), opened)
    if expected:
        assert set(nodes_of(found)) == expected
        assert all(one.allocation.user_defined == ({"MR": 1.0} if word == "MR" else {}) for one in found.assignments)
    else:
        pair = "label" if "=" in word else "resource or label"
        assert found.reason == f"role a may only be on a node with the {pair} {word!r}, and there is none"


def control(*roles: RoleSpec, **more: Any) -> JobSpec:
    return msgspec.structs.replace(job(*roles), **more)


def test_what_the_store_host_needs_is_reserved() -> None:
    spec = control(role("s", 1, cpu=6), trainer(1), master_cpu=2, master_memory_mb=300)
    (store,) = (one for one in place(spec, node(cpu=8, devices=2)).assignments if one.worker == "store")
    assert (store.node, store.allocation) == ("n1", Allocation(cpu=2, memory_mb=300))
    assert place(spec, node(cpu=7, devices=2)).reason == (
        "the store host of the job needs 2 CPU cores; the largest free node n1 has 1"
    )
    assert not any(one.worker == "store" for one in place(control(role("s", 1), master_cpu=2), node()).assignments)
    assert not any(one.worker == "store" for one in place(control(trainer(1)), node(devices=2)).assignments)


def test_the_store_host_goes_where_it_may_and_does_not_count_among_the_nodes() -> None:
    spec = control(trainer(1), master_isolation_resource="HEAD")
    found = on_at_most(1, spec, node(devices=2), node(HEAD=1))
    assert {one.worker.split("_")[0]: one.node for one in found.assignments} == {"t": "n1", "store": "n2"}
    assert place(spec, node(devices=2)).reason == (
        "the store host of the job may only be on a node with the resource or label 'HEAD', and there is none"
    )


def test_the_store_host_is_placed_first_where_it_would_find_no_room_last() -> None:
    spec = control(role("a", 2, cpu=4), trainer(1), master_cpu=5)
    found = place(spec, node(cpu=8, devices=2), node(cpu=8))
    assert found.fits, found.reason
    assert len({one.node for one in found.assignments if one.worker.startswith("a_")}) == 1

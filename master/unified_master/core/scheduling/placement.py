"""Placement of the workers of a job: its units, and the nodes that may take them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from unified.errors import listed
from unified.job.names import parse_worker
from unified.job.spec import JobSpec, Resources, RoleSpec, has_placed_store, has_range
from unified_master.core.node_capacity import Member, NodeCapacity, Unit
from unified_master.core.scheduling.packing import PlacementPlan, plan
from unified_master.core.state import STORE, Cluster, JobRecord, NodeRecord

SPARE = "spare"
"""Label, with any value, of a spare node, which is kept for jobs that have lost a node."""


def units_of(spec: JobSpec) -> list[Unit]:
    """Cut a job into units: group i of each collocation, or of a role alone."""
    together: dict[str, list[str]] = {}
    for role in spec.roles:
        together.setdefault(f"@{role.collocation}" if role.collocation else role.name, []).append(role.name)
    units: list[Unit] = []
    for names in together.values():
        roles = [spec.role(name) for name in names]
        label = f"role {names[0]}" if len(names) == 1 else f"roles {', '.join(names)} (collocated)"
        for index in range(max(role.num_groups for role in roles)):
            members = [
                Member(worker=role.worker(rank), role=role.name, local_rank=rank % role.per_group, needs=role.resources)
                for role in roles
                for rank in range(index * role.per_group, min((index + 1) * role.per_group, role.total))
            ]
            if members:
                units.append(
                    Unit(
                        label=label,
                        members=tuple(members),
                        isolation=spec.worker_isolation_resource,
                        elastic=tuple(role.name for role in roles if role.kind == "elastic"),
                        max_ranks=_max_ranks(spec, roles),
                    )
                )
    return units


def _max_ranks(spec: JobSpec, roles: Sequence[RoleSpec]) -> int:
    """Return the most ranks on a node for an elastic role of a CPU job without resources: as many as devices, or more
    if `node_num` nodes could not hold all ranks otherwise. Return 0, no limit, for other roles."""
    role = roles[0]
    is_free = not (role.resources.cpu or role.resources.accelerator or role.resources.user_defined)
    if spec.accelerator_type != "CPU" or len(roles) > 1 or role.kind != "elastic" or not is_free:
        return 0
    return max(spec.device_cap, role.per_group * math.ceil(role.num_groups / spec.node_num))


def control_unit(spec: JobSpec) -> Unit | None:
    """Return the unit of the job's store host, if the job places it; else the store goes with the first rank."""
    if not has_placed_store(spec) or not any(role.kind == "elastic" and role.total > 0 for role in spec.roles):
        return None
    needs = Resources(cpu=spec.master_cpu, memory_mb=spec.master_memory_mb)
    return Unit(
        label="the store host of the job",
        members=(Member(worker=STORE, role="", local_rank=0, needs=needs),),
        isolation=spec.master_isolation_resource,
        is_control=True,
    )


def all_units(spec: JobSpec) -> list[Unit]:
    """Return every unit of a job, its store host included."""
    control = control_unit(spec)
    return units_of(spec) + ([control] if control is not None else [])


def place(
    cluster: Cluster,
    job: JobRecord,
    units: Sequence[Unit],
    *,
    is_empty: bool = False,
    spare_use: Sequence[bool] = (False, True),
) -> PlacementPlan:
    """Plan on the nodes that the job may use; with `is_empty`, on the alive cluster as if nothing ran on it.

    A job that has run may use spares, by default only if other nodes are not enough: `spare_use` lists the attempts.
    """
    used = set() if is_empty else _nodes_of(job)
    allowed: list[NodeRecord] = []
    excluded, drained, spares = [], [], []
    for node in cluster.alive_nodes():
        if not (is_empty or node.is_open):
            continue
        if node.name in job.excluded:
            excluded.append(node.name)
        elif not node.is_in_service:
            drained.append(node.name)
        else:
            allowed.append(node)
            if SPARE in node.info.labels and node.name not in used:
                spares.append(node.name)
    max_nodes = job.spec.node_num - len(used - {node.name for node in allowed})  # less those in use but not allowed
    found = PlacementPlan()
    for uses_spares in spare_use if spares and _has_run(job) else (False,):
        usual = allowed if uses_spares else [node for node in allowed if node.name not in spares]
        found = plan(units, partial(capacities, usual, job, is_empty=is_empty), max_nodes)
        if found.fits:
            return found
    if not (allowed or excluded or drained):
        return PlacementPlan(reason=_no_nodes(cluster))
    reasons = [f"{listed(sorted(excluded))} failed too often for this job"] if excluded else []
    reasons += [f"out of service: {listed(sorted(drained))}"] if drained else []
    reasons += [f"kept as spares: {listed(sorted(spares))}"] if spares and not _has_run(job) else []
    return msgspec.structs.replace(found, reason=f"{found.reason} ({'; '.join(reasons)})") if reasons else found


def capacities(nodes: Iterable[NodeRecord], job: JobRecord, *, is_empty: bool) -> list[NodeCapacity]:
    """Return what is free of each node for a job; with `is_empty`, as if nothing ran there."""
    kind, cap = job.spec.accelerator_type, job.spec.device_cap
    own = set() if is_empty else {worker.node for worker in job.workers.values() if worker.allocation is not None}
    return [
        _beside_own(node, job) if node.name in own else node.capacity(kind, cap, is_empty=is_empty) for node in nodes
    ]


def _beside_own(node: NodeRecord, job: JobRecord) -> NodeCapacity:
    """Return what is free of a node where the job has workers already."""
    capacity = node.capacity(job.spec.accelerator_type, job.spec.device_cap).copy()
    for (owner, worker), allocation in node.allocations.items():
        if owner == job.job_id:
            capacity.note_own_devices(allocation.devices)
            if worker != STORE:
                capacity.note_own(parse_worker(worker).role)
    return capacity


def _has_run(job: JobRecord) -> bool:
    """Return True if workers of the job have run: it is placed again because something failed."""
    return any(worker.incarnation >= 0 for worker in job.workers.values())


def _nodes_of(job: JobRecord) -> set[str]:
    """Return the nodes that count in `node_num`."""
    placed = (worker for worker in job.workers.values() if worker.kind == "worker" and worker.allocation is not None)
    return {worker.node for worker in placed}


def place_within_ranges(
    cluster: Cluster, job: JobRecord, units: Sequence[Unit], *, is_empty: bool = False, is_growth: bool = False
) -> PlacementPlan:
    """Plan as `place` does, but leave out units without a place if their role has a range of nodes.

    Each such role keeps its least number of groups. Further groups are on nodes without another group of the role, and
    take spares unless `is_growth`.
    """
    required, optional = _required(job, units, is_empty=is_empty)
    if not optional:
        return place(cluster, job, units, is_empty=is_empty)
    low, high = 0, min(len(optional), len(cluster.alive_nodes()))
    best = place(cluster, job, required, is_empty=is_empty) if required else PlacementPlan()
    while best.fits and low < high:  # the largest number that fits
        number = (low + high + 1) // 2
        chosen = [*required, *optional[:number]]
        plans = (
            place(cluster, job, chosen, is_empty=is_empty, spare_use=(uses_spares,))
            for uses_spares in ((False,) if is_growth else (False, True))
        )
        if fitting := next((found for found in plans if found.fits and not _shares_node(job, chosen, found)), None):
            best, low = fitting, number
        else:
            high = number - 1
    return best


def _required(job: JobRecord, units: Sequence[Unit], *, is_empty: bool) -> tuple[list[Unit], list[Unit]]:
    """Split units into those that must have a place, and optional ones of roles with a range of nodes."""
    missing = {role.name: role.min_groups for role in job.spec.roles if has_range(role)}
    if not is_empty:
        for name in missing:
            role = job.spec.role(name)
            missing[name] -= len(job.members(role)) // role.per_group
    required: list[Unit] = []
    optional: list[Unit] = []
    for unit in units:
        name = unit.members[0].role
        if missing.get(name, 1) <= 0:
            optional.append(unit)
            continue
        required.append(unit)
        if name in missing:
            missing[name] -= 1
    return required, optional


def _shares_node(job: JobRecord, units: Sequence[Unit], found: PlacementPlan) -> bool:
    """Return True if groups of a role with a range would share a node."""
    nodes = {one.worker: one.node for one in found.assignments}
    for role in filter(has_range, job.spec.roles):
        used = {worker.node for worker in job.members(role) if worker.rank % role.per_group == 0}
        for unit in units:
            if unit.members[0].role != role.name:
                continue
            if (node := nodes[unit.members[0].worker]) in used:
                return True
            used.add(node)
    return False


def _no_nodes(cluster: Cluster) -> str:
    alive = cluster.alive_nodes()
    if any(node.has_reported for node in alive):
        return "each node that is alive still stops workers that are no longer wanted"
    if alive:
        return "no node has come back yet since the master restarted"
    if cluster.nodes:  # whoever started their agents, such as a cluster of one job, starts them again
        return f"no node is alive; lost: {listed(sorted(cluster.nodes))}"
    return "no node is alive; start an agent with `unified-agent --master …`"

"""Placement of the workers of a job: its units, and the nodes that are there for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unified.job.spec import JobSpec, Resources
from unified_master.core.scheduling.node_capacity import Member, Unit, free_capacity
from unified_master.core.scheduling.packing import PlacementPlan, plan
from unified_master.core.state import STORE, Cluster, JobRecord


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
                    )
                )
    return units


def control_unit(spec: JobSpec) -> Unit | None:
    """Return the unit of the job's store host, if the job says where it goes; else it goes with the first rank."""
    is_said = spec.master_isolation_resource or spec.master_cpu > 0 or spec.master_memory_mb > 0
    if not is_said or not any(role.kind == "elastic" and role.total > 0 for role in spec.roles):
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


def place(cluster: Cluster, job: JobRecord, units: Sequence[Unit], *, is_empty: bool = False) -> PlacementPlan:
    """Plan on the nodes that the job may use; with `is_empty`, on the alive cluster as if nothing ran on it."""
    nodes = [node for node in cluster.alive_nodes() if is_empty or (node.is_connected and node.has_reported)]
    allowed = [node for node in nodes if node.name not in job.excluded]
    found = plan(units, lambda: [free_capacity(node, job, is_empty=is_empty) for node in allowed], job.spec.node_num)
    if found.fits:
        return found
    if not nodes:
        return PlacementPlan(reason=_no_nodes(cluster))
    if len(allowed) < len(nodes):
        left_out = ", ".join(node.name for node in nodes if node.name in job.excluded)
        return msgspec.structs.replace(found, reason=f"{found.reason} ({left_out} failed too often for this job)")
    return found


def _no_nodes(cluster: Cluster) -> str:
    if cluster.alive_nodes():
        return "no node has come back yet since the master restarted"
    return "no node is alive; start an agent with `unified-agent --master …`"

"""Attempts to place waiting jobs. Sums show what a large job lacks; a plan is made again only if room became free."""

from __future__ import annotations

from unified.job.spec import JobSpec
from unified_master.core.node_capacity import EPSILON, NodeCapacity, PlacementAttempt
from unified_master.core.scheduling.packing import PlacementPlan
from unified_master.core.scheduling.placement import all_units, capacities, place_within_ranges
from unified_master.core.state import Cluster, JobRecord

MANY_WORKERS = 256
"""Least number of workers with which a job's needs are summed up before a plan, which takes 10 µs a worker."""
_AMOUNTS = {"cpu": "CPU cores", "memory_mb": "MB of memory", "disk_mb": "MB of disk"}
_WORDS = {**_AMOUNTS, "accelerator": "devices", "processes": "processes"}


def plan_for(cluster: Cluster, job: JobRecord) -> PlacementPlan:
    """Return places for all workers of a job that has none, or the reason why there are none."""
    last = job.attempt
    if last is not None and last.capacity_version == cluster.capacity_version:
        return PlacementPlan(reason=last.reason)
    reason = _lack(cluster, job)
    found = PlacementPlan(reason=reason) if reason else place_within_ranges(cluster, job, all_units(job.spec))
    nodes = _nodes(cluster, job)
    known = last.could_fit if last is not None and last.nodes == nodes else None
    job.attempt = PlacementAttempt(
        capacity_version=cluster.capacity_version, reason=found.reason, nodes=nodes, could_fit=known
    )
    return found


def could_ever_fit(cluster: Cluster, job: JobRecord) -> bool:
    """Return True if the job would fit if nothing else ran on the nodes that are alive."""
    last, nodes = job.attempt, _nodes(cluster, job)
    if last is not None and last.nodes == nodes and last.could_fit is not None:
        return last.could_fit
    is_lacking = bool(_lack(cluster, job, of_empty=True))
    fits = not is_lacking and place_within_ranges(cluster, job, all_units(job.spec), is_empty=True).fits
    if last is not None:
        job.attempt = PlacementAttempt(
            capacity_version=last.capacity_version, reason=last.reason, nodes=nodes, could_fit=fits
        )
    return fits


def _lack(cluster: Cluster, job: JobRecord, *, of_empty: bool = False) -> str:
    """Return what a job of many workers lacks in the sum of all nodes; empty if nothing, or if it has few workers.

    The sentence has no number that changes whenever another job begins or ends.
    """
    num_workers = sum(role.min_groups * role.per_group for role in job.spec.roles)
    allowed = [node for node in cluster.alive_nodes() if node.name not in job.excluded]
    if num_workers < MANY_WORKERS or not allowed:
        return ""
    needs = _needs(job.spec)
    lack = ""
    for is_empty in (True,) if of_empty else (False, True):  # empty nodes only if too little is free
        there = capacities([node for node in allowed if is_empty or node.is_connected], job, is_empty=is_empty)
        has = {name: _total(there, name) for name, amount in needs.items() if amount > 0}
        name = next((name for name in sorted(has) if needs[name] > has[name] + EPSILON), None)
        if name is None:
            break
        which = f"the nodes have {has[name]:g}" if is_empty else "less is free"
        need = f"{needs[name]:g} {_WORDS.get(name, name)}"
        lack = f"its {num_workers} workers need {need} at once, and {which}"
    return lack


def _needs(spec: JobSpec) -> dict[str, float]:
    """Return what all workers of a job need together; a role with a range of nodes counts with its fewest."""
    needs: dict[str, float] = {}
    for role in spec.roles:
        amounts = {name: getattr(role.resources, name) for name in (*_AMOUNTS, "accelerator")}
        amounts |= {"processes": 1.0, **role.resources.user_defined}
        for name, amount in amounts.items():
            needs[name] = needs.get(name, 0.0) + role.min_groups * role.per_group * amount
    return needs


def _total(nodes: list[NodeCapacity], name: str) -> float:
    if name in _AMOUNTS:
        return float(sum(getattr(node, name) for node in nodes))
    if name == "processes":
        return sum(node.num_free_workers for node in nodes)
    if name == "accelerator":
        return sum(min(node.device_share, node.device_cap) for node in nodes)
    return sum(node.user_defined.get(name, 0.0) for node in nodes)


def _nodes(cluster: Cluster, job: JobRecord) -> int:
    return hash((cluster.num_node_changes, tuple(job.excluded)))


def waiting_jobs(cluster: Cluster) -> list[JobRecord]:
    """Return the jobs that wait for a place, oldest first."""
    found = (job for job in cluster.jobs.values() if job.is_waiting and job.suspended is None)
    return sorted(found, key=lambda job: job.sequence)


def blocker(cluster: Cluster) -> JobRecord | None:
    """Return the first waiting job that could fit later; all later jobs are behind it."""
    return next((job for job in waiting_jobs(cluster) if could_ever_fit(cluster, job)), None)


def behind(job: JobRecord) -> str:
    return f"job {job.job_id} came first and waits for room"

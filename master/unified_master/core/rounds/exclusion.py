"""Nodes that a job uses no more: they failed too often for it, or were given up together with their group."""

from __future__ import annotations

from unified.job.spec import RoleSpec
from unified.protocol.records import WorkerState
from unified_master.core import budgets
from unified_master.core.rounds.restart import Cause, restart
from unified_master.core.scheduling import waiting
from unified_master.core.state import JobRecord, NodeRecord, WorkerRecord
from unified_master.core.step import MasterStep


def exclude(step: MasterStep, job: JobRecord, role: RoleSpec, worker: WorkerRecord) -> None:
    """Exclude the node of a worker that failed, for the failures of its role there, unless the job needs the node."""
    if worker.node in job.excluded:
        return
    count = job.roles[role.name].node_failures[worker.node]
    why = f"{count} failures of role {role.name} there, {budgets.node_limit(role)}"
    if not _fits_without(step, job, [worker.node]):
        text = f"node {worker.node} is kept, since the job does not fit on what is left: {why}"
        step.report("node-kept", text, job, role.name, node=worker.node)
        return
    exclude_node(step, job, worker, why)
    if (node := step.cluster.nodes.get(worker.node)) is not None:
        watch_group(step, job, role, node)


def _fits_without(step: MasterStep, job: JobRecord, nodes: list[str]) -> bool:
    """Return True if the job could run without these nodes as well."""
    before, job.excluded = job.excluded, [*job.excluded, *nodes]
    fits = waiting.could_ever_fit(step.cluster, job)
    job.excluded = before
    return fits


def exclude_node(step: MasterStep, job: JobRecord, worker: WorkerRecord, why: str) -> None:
    """Exclude the node of a worker, unless it was excluded before."""
    if worker.node in job.excluded:
        return
    job.excluded = [*job.excluded, worker.node]
    text = f"node {worker.node} is excluded for this job: {why}"
    step.decide("node-excluded", text, job, worker.role, node=worker.node)


def give_up(step: MasterStep, job: JobRecord, nodes: list[str]) -> None:
    """Keep excluded nodes from the job for its window, or until their agents are started anew."""
    job.given_up = {**job.given_up, **dict.fromkeys(nodes, step.now)}
    budgets.refill(step, job)  # arms the timer for these nodes


def readmit(step: MasterStep, job: JobRecord) -> None:
    """Let the job use nodes again whose failures are no longer charged."""
    window_s = job.spec.restart_window_s
    if window_s > 0:
        job.given_up = {name: at for name, at in job.given_up.items() if at + window_s > step.now}
    kept = [name for name in job.excluded if name in job.given_up or budgets.is_used_up(job, name)]
    if kept == job.excluded:
        return
    back = ", ".join(name for name in job.excluded if name not in kept)
    job.excluded = kept
    step.touch_job(job)
    step.report("node-readmitted", f"this job may use {back} again: the reason for the exclusion is over", job)
    step.wants_schedule = True


def on_agent_started(step: MasterStep, node: str) -> None:
    """Take back a given-up node whose agent was started anew, unless failures of its own exclude the node."""
    for job in step.cluster.jobs.values():
        if job.given_up.pop(node, None) is not None:
            readmit(step, job)


def watch_group(step: MasterStep, job: JobRecord, role: RoleSpec, node: NodeRecord) -> None:
    """Give the role its time to run again without this node; after that time, the node's group is given up."""
    value = node.info.labels.get(role.failover_label) if role.failover_label is not None else None
    if value is None:
        return
    record = job.roles[role.name]
    record.failed_groups = {**record.failed_groups, node.name: value}
    if record.group_due_at is None:
        record.group_due_at = step.now + role.failover_timeout_s
        step.cluster.timers.arm(("group", job.job_id, role.name), record.group_due_at)
    step.touch_job(job)


def on_running(step: MasterStep, job: JobRecord, role: str) -> None:
    """Forget failed groups once all workers of the role that have a place run again."""
    record = job.roles[role]
    if not record.failed_groups:
        return
    placed = [worker for worker in job.ranks(role) if worker.allocation is not None]
    if all(worker.state is WorkerState.RUNNING or worker.is_done for worker in placed):
        _forget_groups(step, job, role)


def group_overdue(step: MasterStep, job: JobRecord, name: str) -> None:
    """Give up the groups that kept a role from running again, if the job could run without them."""
    role, record = job.spec.role(name), job.roles[name]
    if job.suspended is not None:
        _forget_groups(step, job, name)  # it is not meant to run
        return
    if job.is_ending or not record.failed_groups or role.failover_label is None:
        return
    label, values = role.failover_label, set(record.failed_groups.values())
    group = sorted(
        node.name
        for node in step.cluster.nodes.values()
        if node.info.labels.get(label) in values and node.name not in job.excluded
    )
    failed = ", ".join(sorted(record.failed_groups))
    failure = f"role {name} does not run again {role.failover_timeout_s:g} s after {failed} failed"
    groups = ", ".join(f"{label}={value}" for value in sorted(values))
    if not _fits_without(step, job, group):
        record.group_due_at = step.now + role.failover_timeout_s
        step.cluster.timers.arm(("group", job.job_id, name), record.group_due_at)
        step.touch_job(job)
        text = f"{failure}; the other nodes with {groups} are kept, since the job does not fit on what is left"
        step.report("node-group-kept", text, job, name)
        return
    job.excluded = [*job.excluded, *group]
    give_up(step, job, group)
    _forget_groups(step, job, name)
    why = f"{failure}: all nodes with {groups} are given up for this job ({', '.join(group) or 'they were before'})"
    step.wants_schedule = True
    if not job.is_placed:
        step.decide("node-group-given-up", why, job, name)
        return
    is_job = job.spec.failover_exec == 1 and not role.restart_alone
    names = None if is_job else [worker.name for worker in job.ranks(name)]
    restart(step, job, names, Cause("node-group-given-up", why, name))


def _forget_groups(step: MasterStep, job: JobRecord, role: str) -> None:
    record = job.roles[role]
    record.failed_groups, record.group_due_at = {}, None
    step.cluster.timers.cancel(("group", job.job_id, role))
    step.touch_job(job)

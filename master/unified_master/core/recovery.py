"""Recovery from failures: the worker that is charged, the budget it comes out of, and the workers that start again."""

from __future__ import annotations

from typing import Literal, NamedTuple

from unified.core.backoff import Backoff
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.records import Failure, NodeState, Stage, WorkerState
from unified_master.core import directory, incarnations, jobs
from unified_master.core.restart import (
    all_workers,
    begin,
    count_job,
    restart,
    restart_job,
    stop,
    unfinished_elastic,
)
from unified_master.core.scheduling import job_queue
from unified_master.core.state import JobRecord, NodeRecord, WorkerRecord
from unified_master.core.step import MasterStep

QUICK_S = 1.0
"""Time of running below which each failure in a row makes the wait before the next incarnation longer."""
BACKOFF = Backoff()

Scope = Literal["job", "role", "worker"]
"""Part of the job that begins again after a failure."""


class Refusal(NamedTuple):
    """The limit that forbids to repair a failure, and a sentence about it."""

    limit: str
    why: str


def on_failure(step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure) -> None:
    """Settle which worker is to blame for the bad end of a desired incarnation, then decide."""
    worker.state = WorkerState.EXITED
    worker.failure = failure
    worker.reason = failure.summary
    step.touch_worker(job, worker)
    directory.publish(step, job, worker)
    step.report("worker-failed", _story(worker, failure), job, worker.role, worker.name, worker.node)
    if job.is_ending or failure.category == "node":
        return  # an agent that stops says so when all its workers are gone; the node is then dealt with as a whole
    if worker.kind == "store":
        _store_failed(step, job, worker, failure)
        return
    if failure.category == "setup":
        limit = "not restarted: a setup failure would happen again"
        jobs.fail(step, job, worker, failure, limit, limit)
        return
    role = job.roles[worker.role]
    if not failure.is_collateral:
        _clear_suspect(step, job, worker.role)
        judge(step, job, worker)
    elif not role.suspect and not role.pending:
        role.suspect, role.suspect_at = worker.name, step.now
        step.cluster.timers.arm(("settle", job.job_id, role.name), step.now + step.cluster.intervals.settle_s)
        why = f"{worker.name} seems to have failed because a peer did; waits for the root cause"
        step.decide("failure-suspect", why, job, role.name, worker.name, worker.node)


def settle(step: MasterStep, job: JobRecord, role: str) -> None:
    """Take the suspect for the root cause, once every node of the role has spoken and no other worker has failed."""
    worker = job.workers.get(job.roles[role].suspect)
    if worker is None or job.is_ending:
        return
    if (until := _late_until(step, job, role)) is not None:
        step.cluster.timers.arm(("settle", job.job_id, role), until)
        return
    _clear_suspect(step, job, role)
    judge(step, job, worker)


def judge(step: MasterStep, job: JobRecord, worker: WorkerRecord, *, is_due: bool = False) -> None:
    """Decide about a root cause. `is_due`: the others of its role are done, so there is nothing more to wait for."""
    failure = worker.failure
    if failure is None or job.is_ending:
        return
    role = job.spec.role(worker.role)
    if (refusal := policy_refusal(job.spec)) is not None:
        jobs.fail(step, job, worker, failure, *refusal)
        return
    if not is_due and _waits(step, job, role, worker, failure):
        return
    is_excluding = False
    if failure.category != "node":  # which was charged to its node, when that was lost
        if (refusal := _charge(step, job, role, worker)) is not None:
            jobs.fail(step, job, worker, failure, *refusal)
            return
        num_on_node = job.roles[role.name].node_failures[worker.node]
        is_excluding = role.role_max_restart is None and num_on_node > role.per_node_max_failure
        if is_excluding:
            _exclude(step, job, role, worker)
    _repair(step, job, worker, failure, _scope(job, role), is_excluding=is_excluding)


def judge_pending(step: MasterStep, job: JobRecord) -> None:
    """Decide failures that waited until the other workers of the role were done."""
    for record in job.roles.values():
        worker = job.workers.get(record.pending)
        if worker is None or job.is_ending:
            continue
        is_store = worker.kind == "store"
        roles = job.elastic_roles() if is_store else [job.spec.role(record.name)]
        if any(_others_work(job, role, worker) for role in roles):
            continue
        if is_store:
            for other in job.roles.values():
                other.pending = "" if other.pending == worker.name else other.pending
            _replace_store(step, job, worker)
        else:
            record.pending = ""
            judge(step, job, worker, is_due=True)


def on_node_lost(step: MasterStep, job: JobRecord, node: NodeRecord, reason: str) -> None:
    """Charge a lost node once for the workers it took along, and give them new places by the job's strategies."""
    failure = Failure(summary=f"node {node.name} was lost: {reason}", category="node")
    is_store_needed = bool(unfinished_elastic(job))
    lost = [one for one in _reap(step, job, node, failure) if one.kind == "worker" or is_store_needed]
    if job.is_ending or not lost:
        return
    first = lost[0]
    limit = job.spec.node_max_restart
    job.node_losses[node.name] = job.node_losses.get(node.name, 0) + 1
    step.touch_job(job)
    if job.node_losses[node.name] > limit:
        why = f"the limit node_max_restart={limit} is used up for node {node.name}"
        jobs.fail(step, job, first, failure, "node_max_restart", why)
        return
    if (refusal := policy_refusal(job.spec)) is not None:
        jobs.fail(step, job, first, failure, *refusal)
        return
    names: set[str] = set()
    scopes: set[str] = set()
    for worker in lost:
        if worker.kind == "store":
            if not _store_waits(step, job, worker, failure):
                scopes.add("job" if job.spec.failover_exec == 1 else "role")
                names |= unfinished_elastic(job)
            continue
        role = job.spec.role(worker.role)
        if worker.is_held or not _waits(step, job, role, worker, failure):  # one decided before is not put off
            scopes.add(_scope(job, role))
            names.update(_scoped(job, worker, _scope(job, role)))
    if not names:
        return
    cause = _cause(job, first, failure)
    if "job" in scopes:
        if (refusal := _job_refusal(job)) is not None:
            jobs.fail(step, job, first, failure, *refusal)
            return
        job.num_charged_restarts += 1
        why = f"job restarts: {cause}"
        step.decide("job-restarts", why, job, node=node.name)
        job_queue.requeue_unless(step, job, restart_job(step, job, why))
        return
    why = f"workers restart: {cause}"
    step.decide("workers-restart", why, job, node=node.name)
    job_queue.requeue_unless(step, job, restart(step, job, names, why))


def policy_refusal(spec: JobSpec) -> Refusal | None:
    """Return what in the job's strategies forbids any restart."""
    if spec.failover_trigger == 0:
        return Refusal("failover_trigger_strategy=0", "failover_trigger_strategy=0 never restarts")
    if spec.failover_exec == 0:
        return Refusal("failover_exec_strategy=0", "failover_exec_strategy=0 stops the job at a failure")
    return None


def _repair(
    step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure, scope: Scope, *, is_excluding: bool
) -> None:
    """Restart the scope of a charged failure, or end the job if it may not or cannot."""
    role = job.spec.role(worker.role)
    delay = BACKOFF.delay_s(max(0, job.roles[role.name].num_quick - 1))
    after = f" after {delay:g} s" if delay else ""
    is_role_limited = role.role_max_restart is not None and failure.category != "node"
    if scope == "job":
        if not is_role_limited and (refusal := _job_refusal(job)) is not None:
            jobs.fail(step, job, worker, failure, *refusal)
            return
        what, whom = "job", ("", "")
    elif scope == "role":
        what, whom = f"role {role.name}", (role.name, "")
    else:
        what, whom = "worker", (role.name, worker.name)
    why = f"{what} restarts{after}: {_cause(job, worker, failure)}"
    pending = stop(step, job, _scoped(job, worker, scope), why)
    if is_excluding and not pending.plan.fits and not job_queue.could_ever_fit(step.cluster, job):
        limit = f"the limit per_node_max_failure={role.per_node_max_failure} is used up and {pending.plan.reason}"
        jobs.fail(step, job, worker, failure, "per_node_max_failure", limit)
        return
    if scope == "job":
        job.num_charged_restarts += not is_role_limited
        count_job(job)
    step.decide(f"{scope}-restarts", why, job, *whom)
    begin(step, job, pending, delay)
    job_queue.requeue_unless(step, job, pending.plan)


def _scope(job: JobRecord, role: RoleSpec) -> Scope:
    """Return what restarts after a failure in a role: the worker if the role says so, else what the strategy says."""
    if role.restart_alone:
        return "worker"
    return "job" if job.spec.failover_exec == 1 else "role"


def _scoped(job: JobRecord, worker: WorkerRecord, scope: Scope) -> list[str]:
    if scope == "job":
        return all_workers(job)
    return [worker.name] if scope == "worker" else [peer.name for peer in job.ranks(worker.role)]


def _cause(job: JobRecord, worker: WorkerRecord, failure: Failure) -> str:
    """Return a failure in words, with what it was charged to."""
    if failure.category == "node":
        losses = job.node_losses.get(worker.node, 0)
        return f"{failure.summary} (loss {losses} of that node, {job.spec.node_max_restart} allowed)"
    role = job.spec.role(worker.role)
    if role.role_max_restart is not None:
        counted = f"failure {job.roles[role.name].num_failures} of the role, {role.role_max_restart} allowed"
        return f"{worker.name} on {worker.node}: {failure.summary} ({counted})"
    allowed = role.max_restart
    return f"{worker.name} on {worker.node}: {failure.summary} (failure {worker.num_failures}, {allowed} allowed)"


def _waits(step: MasterStep, job: JobRecord, role: RoleSpec, worker: WorkerRecord, failure: Failure) -> bool:
    """Return True if the failure is decided later: others of the role still work and the strategy lets them."""
    if job.spec.failover_trigger != 1 or not _others_work(job, role, worker):
        return False
    record = job.roles[role.name]
    if not record.pending:
        record.pending = worker.name
        why = f"{worker.name} failed ({failure.summary}); decided when the others of role {role.name} are done"
        step.decide("failure-waits", why, job, role.name, worker.name, worker.node)
    return True


def _charge(step: MasterStep, job: JobRecord, role: RoleSpec, worker: WorkerRecord) -> Refusal | None:
    """Count a root cause against its worker and its node."""
    record = job.roles[role.name]
    is_quick = worker.running_at is None or step.now - worker.running_at < QUICK_S
    record.num_quick = record.num_quick + 1 if is_quick else 0
    record.node_failures[worker.node] = record.node_failures.get(worker.node, 0) + 1
    record.num_failures += 1
    worker.num_failures += 1
    step.touch_worker(job, worker)
    step.touch_job(job)
    if role.role_max_restart is not None:
        if record.num_failures <= role.role_max_restart:
            return None
        limit = f"role_max_restart={role.role_max_restart}"
        return Refusal("role_max_restart", f"the limit {limit} (--max-restarts) of role {role.name} is used up")
    if worker.num_failures > role.max_restart:
        return Refusal("max_restart", f"the limit max_restart={role.max_restart} of role {role.name} is used up")
    return None


def _job_refusal(job: JobRecord) -> Refusal | None:
    limit = job.spec.job_max_restart
    if job.num_charged_restarts >= limit:
        return Refusal("job_max_restart", f"the limit job_max_restart={limit} is used up")
    return None


def _exclude(step: MasterStep, job: JobRecord, role: RoleSpec, worker: WorkerRecord) -> None:
    if worker.node in job.excluded:
        return
    job.excluded = [*job.excluded, worker.node]
    count = job.roles[role.name].node_failures[worker.node]
    why = (
        f"node {worker.node} is excluded for this job: {count} failures of role {role.name} there, "
        f"per_node_max_failure={role.per_node_max_failure}"
    )
    step.decide("node-excluded", why, job, role.name, node=worker.node)


def _store_failed(step: MasterStep, job: JobRecord, store: WorkerRecord, failure: Failure) -> None:
    """Begin a new store, and a new round of the roles not done: without its store no elastic role can go on."""
    limit = max(role.max_restart for role in job.elastic_roles())
    store.num_failures += 1
    if store.num_failures > limit:
        why = f"the limit max_restart={limit} is used up for the job's torch store"
        jobs.fail(step, job, store, failure, "max_restart", why)
        return
    if unfinished_elastic(job) and (refusal := policy_refusal(job.spec)) is not None:
        jobs.fail(step, job, store, failure, *refusal)
        return
    if not _store_waits(step, job, store, failure):
        _replace_store(step, job, store)


def _store_waits(step: MasterStep, job: JobRecord, store: WorkerRecord, failure: Failure) -> bool:
    """Call `_waits` for each elastic role, also behind one that waits; return True if any waits."""
    waits = [_waits(step, job, role, store, failure) for role in job.elastic_roles()]
    return any(waits)


def _replace_store(step: MasterStep, job: JobRecord, store: WorkerRecord) -> None:
    """Restart the store, and by the job's strategy all of the job, or the elastic roles that are not done."""
    names = unfinished_elastic(job)
    if not names or job.is_ending or store.failure is None:
        return
    cause = f"the torch store on {store.node}: {store.failure.summary}"
    delay = BACKOFF.delay_s(max(0, store.num_failures - 1))
    if job.spec.failover_exec != 1:
        why = f"elastic roles restart: {cause}"
        step.decide("role-restarts", why, job)
        job_queue.requeue_unless(step, job, restart(step, job, names, why, delay))
        return
    if (refusal := _job_refusal(job)) is not None:
        jobs.fail(step, job, store, store.failure, *refusal)
        return
    job.num_charged_restarts += 1
    why = f"job restarts: {cause}"
    step.decide("job-restarts", why, job)
    job_queue.requeue_unless(step, job, restart_job(step, job, why, delay))


def _reap(step: MasterStep, job: JobRecord, node: NodeRecord, failure: Failure) -> list[WorkerRecord]:
    """Mark every incarnation on a lost node as ended and free its place; return the workers that are missed."""
    missed: list[WorkerRecord] = []
    reported: list[WorkerRecord] = []
    drivers = {role.name for role in job.driver_roles()}
    for worker in job.workers.values():
        if worker.node != node.name:
            continue
        is_delivered = worker.state is WorkerState.FINISHED and worker.role in drivers
        was_living = worker.incarnation >= 0 and worker.state is not WorkerState.EXITED
        is_missed = worker.is_desired and ((was_living and not is_delivered) or _is_taken_along(worker))
        if _is_taken_along(worker):  # and that it failed was reported when it did
            reported.append(worker)
        if is_missed:
            worker.failure = failure
            worker.reason = failure.summary
        if is_missed or worker.is_held:
            missed.append(worker)
        if was_living:
            worker.state = WorkerState.EXITED
        incarnations.end(step, job, worker)
        incarnations.release(step, job, worker)
        step.touch_worker(job, worker)
        directory.publish(step, job, worker)
    for worker in missed:
        if worker not in reported:
            step.report("worker-failed", _story(worker, failure), job, worker.role, worker.name, node.name)
    return missed


def _others_work(job: JobRecord, role: RoleSpec, worker: WorkerRecord) -> bool:
    """Return True if a peer runs, or will: one whose order waits for the failed worker itself will not."""
    will_be_ordered = role.kind != "elastic" and job.stage is not Stage.INIT
    return any(
        peer is not worker and not peer.is_done and not peer.has_failed and (peer.run is not None or will_be_ordered)
        for peer in job.ranks(role.name)
    )


def _clear_suspect(step: MasterStep, job: JobRecord, role: str) -> None:
    job.roles[role].suspect = ""
    step.cluster.timers.cancel(("settle", job.job_id, role))
    step.touch_job(job)


def _late_until(step: MasterStep, job: JobRecord, role: str) -> float | None:
    """Return when to look again, if a node of this role has not spoken since the suspect failed: its loss may have
    taken the suspect along. The lease ends the wait.
    """
    suspect_at = job.roles[role].suspect_at
    desired = [worker for worker in job.ranks(role) if worker.is_desired]
    departing = {worker.node for worker in desired if _is_taken_along(worker)}
    for name in sorted({worker.node for worker in desired}):
        node = step.cluster.nodes.get(name)
        if node is None or node.state is not NodeState.ALIVE:
            continue
        if name in departing:
            return step.now + step.cluster.intervals.settle_s
        if node.has_reported and node.seen_at >= suspect_at:  # before its report, a new master has heard nothing of it
            continue
        deadline = step.cluster.leases.deadline(name)
        if deadline is not None and deadline > step.now:
            return min(deadline, step.now + step.cluster.intervals.settle_s)
    return None


def _is_taken_along(worker: WorkerRecord) -> bool:
    """Return True if its agent stopped the worker because the agent itself stops."""
    return worker.has_failed and worker.failure is not None and worker.failure.category == "node"


def _story(worker: WorkerRecord, failure: Failure) -> str:
    kind = "collateral of a peer's failure" if failure.is_collateral else f"category {failure.category}"
    return f"incarnation {worker.incarnation} on {worker.node}: {failure.summary} ({kind})"

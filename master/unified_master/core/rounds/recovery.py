"""Recovery from failures: the worker that is charged, the budget that pays, and the workers that start again."""

from __future__ import annotations

from typing import Literal

from msgspec import structs

from unified.job.spec import RoleSpec
from unified.protocol.records import Failure, NodeState, Stage, WorkerState
from unified_master.core import budgets, directory
from unified_master.core.rounds import exclusion, incarnations, jobs, next_round, node_checks
from unified_master.core.rounds.rendezvous import staying
from unified_master.core.rounds.restart import (
    Cause,
    broken_with_store,
    outlives_store,
    restart,
    unfinished_elastic,
)
from unified_master.core.state import JobRecord, NodeRecord, WorkerRecord
from unified_master.core.step import MasterStep

Scope = Literal["job", "role", "worker"]
"""Part of the job that begins again after a failure."""


def on_failure(step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure) -> None:
    """Settle which worker is to blame for the bad end of a desired incarnation, then decide."""
    worker.state = WorkerState.EXITED
    worker.failure = failure
    worker.reason = failure.summary
    step.touch_worker(job, worker)
    directory.publish(step, job, worker)
    step.report("worker-failed", _story(worker, failure), job, worker.role, worker.name, worker.node)
    node_checks.forget(job, worker, failure)
    if job.is_ending or failure.category == "node":
        return  # a stopping agent reports its stop after its workers' ends; the node is then handled as a whole
    if worker.kind == "store":
        _store_failed(step, job, worker, failure)
        return
    if next_round.is_newcomer(job, worker):
        next_round.retire(step, job, worker, f"{worker.name} on {worker.node}: {failure.summary}")
        return
    if failure.category == "setup":
        limit = "not restarted: a setup failure would happen again"
        jobs.fail(step, job, worker, failure, limit, limit)
        return
    is_behind = worker.run is not None and 0 < worker.round < worker.run.round  # it failed in a round that has ended
    if not failure.is_collateral:
        _clear_suspect(step, job, worker.role)
        judge(step, job, worker)
    elif (worker.notice is not None and worker.notice.kind == "broken") or is_behind:
        next_round.restart_along(step, job, [worker])
    else:
        _suspect(step, job, worker, f"{worker.name} seems to have failed because a peer did")


def on_left(step: MasterStep, job: JobRecord, worker: WorkerRecord) -> None:
    """Suspect a worker that left its round unasked: a collective broke, because a peer or a connection failed."""
    is_in_round = job.spec.role(worker.role).kind == "elastic" and worker.notice is None
    if job.stage is Stage.RUNNING and is_in_round:
        _suspect(step, job, worker, f"{worker.name} left round {worker.left_round} because a collective failed")


def _suspect(step: MasterStep, job: JobRecord, worker: WorkerRecord, text: str) -> None:
    role = job.roles[worker.role]
    if role.suspect or role.pending:
        return
    role.suspect, role.suspect_at = worker.name, step.now
    step.cluster.timers.arm(("settle", job.job_id, role.name), step.now + step.cluster.intervals.settle_s)
    why = f"{text}; waits for the root cause"
    step.decide("failure-suspect", why, job, role.name, worker.name, worker.node)


def settle(step: MasterStep, job: JobRecord, role: str) -> None:
    """Judge the suspect as the root cause, once every node of the role has reported and no other worker has failed."""
    worker = job.workers.get(job.roles[role].suspect)
    if worker is None or job.is_ending:
        return
    if (until := _late_until(step, job, role)) is not None:
        step.cluster.timers.arm(("settle", job.job_id, role), until)
        return
    _clear_suspect(step, job, role)
    if worker.failure is None:  # it only left its round; a peer that failed must be replaced
        worker = next((peer for peer in job.ranks(role) if peer.has_failed), worker)
    if worker.failure is not None:
        worker.failure = _with_ended_peers(job, worker, worker.failure)
        judge(step, job, worker)
    elif worker.rejoins and worker.notice is None and worker.left_round == job.roles[role].round:
        _round_left(step, job, worker)


def _with_ended_peers(job: JobRecord, worker: WorkerRecord, failure: Failure) -> Failure:
    """Return a collateral failure that names ranks whose programs had ended in an earlier collective, if any."""
    ended = [peer for peer in job.ranks(worker.role) if peer.state is WorkerState.FINISHED]
    counts = {peer.rank_in_round: _num_collectives(peer) for peer in ended}
    own = _num_collectives(worker)
    known = {rank: count for rank, count in counts.items() if count is not None and (own is None or count < own)}
    if not known or not failure.is_collateral:
        return failure
    texts = [f"the program of rank {rank} had ended after {count} collectives" for rank, count in sorted(known.items())]
    more = f" (and those of {len(texts) - 3} more)" if len(texts) > 3 else ""
    then = "went on" if own is None else f"was in collective {own}"
    summary = f"{', '.join(texts[:3])}{more}, and rank {worker.rank_in_round} {then}: {failure.summary}"
    return structs.replace(failure, summary=summary)


def _num_collectives(worker: WorkerRecord) -> int | None:
    return None if worker.progress is None else worker.progress.num_collectives


def judge(step: MasterStep, job: JobRecord, worker: WorkerRecord, *, is_due: bool = False) -> None:
    """Decide about a root cause; with `is_due` without waiting, because the others of its role are done."""
    failure = worker.failure
    if failure is None or job.is_ending:
        return
    role = job.spec.role(worker.role)
    if not is_due and _waits(step, job, role, worker, failure):
        return
    if not _may_repair(step, job, worker, failure):
        return
    if failure.category != "node" and budgets.is_used_up_by(job, role, worker.node):
        exclusion.exclude(step, job, role, worker)
    is_excluding = failure.category == node_checks.CATEGORY
    _repair(step, job, worker, failure, _scope(step, job, role), is_excluding=is_excluding)


def _may_repair(
    step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure, *, lost: NodeRecord | None = None
) -> bool:
    """Charge a failure, or a lost node; end the job if its strategies or a limit forbid the repair."""
    refusal = budgets.charge(step, job, worker, failure, lost=lost)
    exclusion.readmit(step, job)  # a charge may have moved to its root cause
    if refusal is not None:
        jobs.fail(step, job, worker, failure, *refusal)
    return refusal is None


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
    """Charge a lost node once for all its workers, and give them new places by the job's strategies."""
    failure = Failure(summary=f"node {node.name} was lost: {reason}", category="node")
    is_store_needed = bool(unfinished_elastic(job))
    lost = [one for one in _reap(step, job, node, failure) if one.kind == "worker" or is_store_needed]
    if job.is_ending or not lost:
        return
    first = lost[0]
    if not _may_repair(step, job, first, failure, lost=node):
        return
    for role in {worker.role: job.spec.role(worker.role) for worker in lost if worker.kind == "worker"}.values():
        exclusion.watch_group(step, job, role, node)
    names: set[str] = set()
    scopes: dict[str, Scope] = {}
    for worker in lost:
        if worker.kind == "store":
            if not _store_waits(step, job, worker, failure):
                is_whole = job.spec.failover_exec == 1 and not outlives_store(step, job)
                scopes[worker.role] = "job" if is_whole else "role"
                names |= broken_with_store(step, job)
            continue
        role = job.spec.role(worker.role)
        if next_round.is_newcomer(job, worker):
            next_round.retire(step, job, worker, failure.summary)
            continue
        if worker.is_held or not _waits(step, job, role, worker, failure):  # a decision already made stands
            if role.name not in scopes:
                scopes[role.name] = _scope(step, job, role)
                names.update(_scoped(job, worker, scopes[role.name]) or ())
            names.add(worker.name)
    if not scopes:
        return
    is_job = "job" in scopes.values()
    event, whom = ("job-restarts", "job restarts") if is_job else ("workers-restart", "workers restart")
    why = f"{whom}: {budgets.cause(job, first, failure, restarts_job=is_job)}"
    restart(step, job, None if is_job else names, Cause(event, why, node=node.name, failed=(first, failure)))


def _repair(
    step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure, scope: Scope, *, is_excluding: bool
) -> None:
    role = job.spec.role(worker.role)
    delay = budgets.delay_s(job, job.roles[role.name].num_quick)
    after = f" after {delay:g} s" if delay else ""
    what = f"role {role.name}" if scope == "role" else scope
    beside = ", peers stay" if _is_in_place(step, job, role) and scope == "worker" else ""
    is_role_limited = role.role_max_restart is not None and failure.category != "node"
    restarts_job = scope == "job" and not is_role_limited
    cause = Cause(
        event=f"{scope}-restarts",
        why=f"{what} restarts{after}{beside}: {budgets.cause(job, worker, failure, restarts_job=restarts_job)}",
        role="" if scope == "job" else role.name,
        worker=worker.name if scope == "worker" else "",
        failed=(worker, failure),
        delay_s=delay,
        is_role_limited=is_role_limited,
        is_excluding=is_excluding,
    )
    restart(step, job, _scoped(job, worker, scope), cause)


def _round_left(step: MasterStep, job: JobRecord, worker: WorkerRecord) -> None:
    """Break a round that a worker left although none has failed, and charge the worker that left."""
    text = f"left round {worker.left_round}: a collective failed, and no worker did"
    failure = Failure(summary=text, is_collateral=True)
    if not _may_repair(step, job, worker, failure):
        return
    why = f"round {worker.left_round} is broken: {budgets.cause(job, worker, failure)}"
    next_round.begin_anew(step, job, worker.role, why)


def _is_in_place(step: MasterStep, job: JobRecord, role: RoleSpec) -> bool:
    return role.kind == "elastic" and bool(staying(step, job, role.name))


def _scope(step: MasterStep, job: JobRecord, role: RoleSpec) -> Scope:
    """Return what restarts after a failure in a role: the worker alone if the role says so, if its peers stay, or in a
    simple service; the role in an elastic service; else what the strategy says.
    """
    is_service = job.is_service(role)
    if role.restart_alone or _is_in_place(step, job, role) or (is_service and role.kind != "elastic"):
        return "worker"
    if is_service:
        return "role"
    return "job" if job.spec.failover_exec == 1 else "role"


def _scoped(job: JobRecord, worker: WorkerRecord, scope: Scope) -> list[str] | None:
    if scope == "job":
        return None
    return [worker.name] if scope == "worker" else [peer.name for peer in job.ranks(worker.role)]


def _waits(step: MasterStep, job: JobRecord, role: RoleSpec, worker: WorkerRecord, failure: Failure) -> bool:
    """Return True if the failure is decided later: others of the role still work and the strategy lets them."""
    if job.spec.failover_trigger != 1 or budgets.policy_refusal(job.spec) is not None:
        return False
    if not _others_work(job, role, worker) or _is_in_place(step, job, role):
        return False
    record = job.roles[role.name]
    if not record.pending:
        record.pending = worker.name
        why = f"{worker.name} failed ({failure.summary}); decided when the others of role {role.name} are done"
        step.decide("failure-waits", why, job, role.name, worker.name, worker.node)
    return True


def _store_failed(step: MasterStep, job: JobRecord, store: WorkerRecord, failure: Failure) -> None:
    """Begin a new store, and new rounds of unfinished roles: no elastic role can go on without the store."""
    is_repaired = unfinished_elastic(job) and _may_repair(step, job, store, failure)
    if is_repaired and not _store_waits(step, job, store, failure):
        _replace_store(step, job, store)


def _store_waits(step: MasterStep, job: JobRecord, store: WorkerRecord, failure: Failure) -> bool:
    """Call `_waits` for every elastic role, without a short circuit; return True if any waits."""
    waits = [_waits(step, job, role, store, failure) for role in job.elastic_roles()]
    return any(waits)


def _replace_store(step: MasterStep, job: JobRecord, store: WorkerRecord) -> None:
    """Restart the store, and by the job's strategy all of the job, or the elastic roles that are not done."""
    names = broken_with_store(step, job)
    if not unfinished_elastic(job) or job.is_ending or store.failure is None:
        return
    is_in_place = outlives_store(step, job)
    is_job = job.spec.failover_exec == 1 and not is_in_place
    what = "job restarts" if is_job else f"elastic roles {'begin a new round' if is_in_place else 'restart'}"
    cause = Cause(
        event="job-restarts" if is_job else "role-restarts",
        why=f"{what}: the torch store on {store.node}: {store.failure.summary}",
        failed=(store, store.failure),
        delay_s=budgets.delay_s(job, store.num_failures),
    )
    restart(step, job, None if is_job else names, cause)


def _reap(step: MasterStep, job: JobRecord, node: NodeRecord, failure: Failure) -> list[WorkerRecord]:
    """Mark every incarnation on a lost node as ended and free its place; return the workers that are missed."""
    missed: list[WorkerRecord] = []
    reported: set[str] = set()
    drivers = {role.name for role in job.driver_roles()}
    for worker in job.workers.values():
        if worker.node != node.name:
            continue
        is_delivered = worker.state is WorkerState.FINISHED and worker.role in drivers
        was_living = worker.incarnation >= 0 and worker.state is not WorkerState.EXITED
        is_missed = worker.is_desired and ((was_living and not is_delivered) or _is_taken_along(worker))
        if _is_taken_along(worker):  # its failure was reported before
            reported.add(worker.name)
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
        if worker.name not in reported:
            step.report("worker-failed", _story(worker, failure), job, worker.role, worker.name, node.name)
    return missed


def _others_work(job: JobRecord, role: RoleSpec, worker: WorkerRecord) -> bool:
    """Return True if a peer runs or will run; a peer whose order waits for the failed worker will not."""
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
    """Return when to look again, if a node of this role has not reported since the suspect failed.

    The node's loss may be the root cause. Its lease ends the wait.
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
        if node.has_reported and node.seen_at >= suspect_at:  # a new master sets `seen_at` without a report
            continue
        deadline = step.cluster.leases.deadline(name)
        if deadline is not None and deadline > step.now:
            return min(deadline, step.now + step.cluster.intervals.settle_s)
    return None


def _is_taken_along(worker: WorkerRecord) -> bool:
    """Return True if the worker's agent stopped it because the agent itself stops."""
    return worker.has_failed and worker.failure is not None and worker.failure.category == "node"


def _story(worker: WorkerRecord, failure: Failure) -> str:
    kind = "collateral of a peer's failure" if failure.is_collateral else f"category {failure.category}"
    return f"incarnation {worker.incarnation} on {worker.node}: {failure.summary} ({kind})"

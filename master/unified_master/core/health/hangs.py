"""Hangs: roles without progress for longer than their `hang_timeout` are diagnosed, and then fail.

The ranks of an elastic role wait for one another, so that any rank's progress is the role's. The workers of other roles
are watched each by itself. Queues that wait for one another in a cycle are named; nothing is ended by that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unified.core.hangs.stacks import StackGroup, group, merge
from unified.core.hangs.verdict import judge, ranks_text
from unified.protocol.records import Failure, NodeState, QueueUse, WorkerState
from unified.protocol.stacks import StackReport
from unified_master.core.health import stacks
from unified_master.core.membership import WorkerMembership, membership_of
from unified_master.core.rounds import incarnations, recovery
from unified_master.core.state import HangWatch, JobRecord, StackCollection, TimerKey, WorkerRecord
from unified_master.core.step import MasterStep

WITHIN_S = 5.0
"""Time that agents have to send the stacks."""
MAX_GROUPS = 12
MAX_FRAMES = 30
MAX_REASON = 2000
QUEUES_S = 2.0
_BETWEEN = (
    *(WorkerMembership.HELD, WorkerMembership.STARTING, WorkerMembership.READY),
    *(WorkerMembership.JOINING, WorkerMembership.LEAVING, WorkerMembership.BETWEEN),
)


def progressed(step: MasterStep, job: JobRecord, worker: WorkerRecord) -> None:
    """Note that a running worker has begun or made progress."""
    if worker.kind != "worker" or worker.state is not WorkerState.RUNNING:
        return
    role = job.spec.role(worker.role)
    if role.hang_timeout_s is None:
        return
    key = (job.job_id, worker.role, "" if role.kind == "elastic" else worker.name)
    watch = step.cluster.hangs.setdefault(key, HangWatch())
    watch.progressed_at = step.now
    if (timer := ("hang", *key)) not in step.cluster.timers:  # an armed timer looks at the new time when it fires
        step.cluster.timers.arm(timer, step.now + role.hang_timeout_s)


def look(step: MasterStep, timer: TimerKey) -> None:
    """Check if a watched role has made no progress for too long; if so, collect its stacks."""
    cluster, (_, job_id, role_name, name) = step.cluster, timer
    found = _watched_role(step, (job_id, role_name, name))
    if found is None:
        return
    job, watch, timeout_s, watched = found
    running = [worker for worker in watched if _runs(worker)]
    due = watch.progressed_at + timeout_s
    if due <= step.now and (any(map(_is_between, watched)) or any(one.waits_for for one in job.workers.values())):
        watch.progressed_at, due = step.now, step.now + timeout_s
    if due <= step.now and not all(_is_heard(step, worker) for worker in running):
        due = step.now + cluster.intervals.heartbeat_s  # progress may be in transit; else the lease ends it
    if due > step.now:
        cluster.timers.arm(timer, due)
        return
    watch.suspected_at = step.now
    job.account.suspect(watch.progressed_at)
    text = f"{_subject(role_name, name)} has made no progress for {timeout_s:g} s (hang_timeout): its stacks are read"
    step.decide("hang-suspected", text, job, role_name, name)
    collection = StackCollection(job_id=job_id, hang=(role_name, name))
    diagnosed(step, stacks.collect(step, collection, [worker for worker in watched if _answers(worker)], WITHIN_S))


def diagnosed(step: MasterStep, collection: StackCollection | None) -> None:
    """Report the diagnosis of a hang, and fail the worker that is to blame, unless the role goes on by now."""
    if collection is None:
        return
    cluster, (role_name, name) = step.cluster, collection.hang
    key = (collection.job_id, role_name, name)
    found = _watched_role(step, key)
    if found is None:
        return
    job, watch, timeout_s, watched = found
    there = {worker.name: worker for worker in watched if _answers(worker)}
    if watch.progressed_at > watch.suspected_at:
        job.account.goes_on(step.now)
        step.decide("hang-over", f"{_subject(role_name, name)} goes on", job, role_name, name)
        cluster.timers.arm(("hang", *key), watch.progressed_at + timeout_s)
        return
    del cluster.hangs[key]
    report = merge(collection.reports)
    verdict = judge(report.workers)
    blamed = [there[each.worker] for each in verdict.culprits if each.worker in there]
    worker = blamed[0] if blamed else next(worker for worker in there.values() if _runs(worker))
    findings = verdict.findings or ["none of its ranks waits in a collective"]
    groups = [f"{ranks_text(each.workers)} in {_where(each)}" for each in _main_groups(report)]
    text = "; ".join([*findings, *groups])
    step.report("hang-diagnosed", text[:MAX_REASON], job, role_name, worker.name, worker.node)
    incarnations.end(step, job, worker)
    failure = Failure(
        category="hang",
        summary=f"hang: no progress for {timeout_s:g} s; {findings[0]}",
        traceback=_text(report, findings),
    )
    recovery.on_failure(step, job, worker, failure)


def look_at_queues(step: MasterStep, job: JobRecord) -> None:
    """Name a cycle in which queues of the job wait for one another, and say when it is over."""
    uses = {w.name: w.progress.queues for w in job.workers.values() if w.progress is not None and job.can_call(w)}
    if (cycle := queue_cycle(uses)) != job.queue_cycle:
        job.queue_cycle = cycle
        text = f"queues wait for one another: {cycle}" if cycle else "the queues go on"
        step.decide("queue-cycle" if cycle else "queue-cycle-over", text[:MAX_REASON], job)
    if cycle:
        step.cluster.timers.arm(("queues", job.job_id), step.now + QUEUES_S)


def queue_cycle(reports: Mapping[str, Sequence[QueueUse]]) -> str:
    """Return a cycle of threads that wait at queues for one another, in words; empty: there is none. A wait ends if any
    thread on the other side of its queue goes on. So it stands if some are known there, and all of them stand."""
    others: dict[tuple[str, str], list[str]] = {}  # threads on the other side of a wait
    waits: dict[str, set[tuple[str, str]]] = {}
    for worker, uses in reports.items():
        for thread, does, queue, is_waiting in uses:
            user = f"worker {worker} (thread {thread})"
            others.setdefault(("puts" if does == "gets" else "gets", queue), []).append(user)
            if is_waiting:
                waits.setdefault(user, set()).add((does, queue))
    stuck = {("", "")}
    while stuck != (stuck := {side for side, users in others.items() if all(user in waits for user in users)}):
        waits = {user: sides for user, sides in waits.items() if sides <= stuck}
    if not waits:
        return ""
    path = [min(waits)]
    while path.count(path[-1]) == 1:
        path.append(others[min(waits[path[-1]])][0])
    cycle = [(user, *min(waits[user])) for user in path[path.index(path[-1]) : -1]]
    what = {"gets": "gets from empty", "puts": "puts to full"}
    return " -> ".join([*(f"{user} {what[does]} queue {queue!r}" for user, does, queue in cycle), "the first"])


class _WatchedRole(NamedTuple):
    """A role or a single worker that is watched, with at least one running worker."""

    job: JobRecord
    watch: HangWatch
    timeout_s: float
    workers: list[WorkerRecord]


def _watched_role(step: MasterStep, key: tuple[str, str, str]) -> _WatchedRole | None:
    """Return what is watched under a key; None, and stop the watch, if none of its workers runs any more."""
    job_id, role_name, name = key
    watch, job = step.cluster.hangs.get(key), step.cluster.jobs.get(job_id)
    if watch is not None and job is not None and not job.is_ending:
        workers = [job.workers[name]] if name else job.ranks(role_name)
        timeout_s = job.spec.role(role_name).hang_timeout_s
        watch.progressed_at = max(watch.progressed_at, job.waited_at)
        if timeout_s is not None and any(map(_runs, workers)):
            return _WatchedRole(job, watch, timeout_s, workers)
    step.cluster.hangs.pop(key, None)
    return None


def _runs(worker: WorkerRecord) -> bool:
    return worker.is_desired and worker.state is WorkerState.RUNNING


def _answers(worker: WorkerRecord) -> bool:
    """Return True if the worker runs, or its program has ended, which sets it apart from workers that hang."""
    return worker.is_desired and worker.state in (WorkerState.RUNNING, WorkerState.FINISHED)


def _is_between(worker: WorkerRecord) -> bool:
    """Return True if peers may rightly wait for the worker: it is between two incarnations or two rounds."""
    return membership_of(worker) in _BETWEEN


def _is_heard(step: MasterStep, worker: WorkerRecord) -> bool:
    """Return True if the worker's agent was heard lately, so that progress would be known."""
    node = step.cluster.nodes.get(worker.node)
    if node is None or node.state is not NodeState.ALIVE or not node.has_reported:
        return False
    return step.now - node.seen_at <= 2 * step.cluster.intervals.heartbeat_s


def _subject(role: str, name: str) -> str:
    return name or f"role {role}"


def _main_groups(report: StackReport) -> list[StackGroup]:
    return [each for each in group(report) if each.is_main][:MAX_GROUPS]


def _where(found: StackGroup) -> str:
    return found.frames[-1] if found.frames else "no Python code"


def _text(report: StackReport, findings: Sequence[str]) -> str:
    """Return the diagnosis with its stacks, for the traceback of the failure."""
    lines = list(findings)
    for each in group(report)[:MAX_GROUPS]:
        lines += ["", f"{ranks_text(each.workers)}, {', '.join(each.threads[:3])}:"]
        lines += [f"  {line}" for line in each.frames[-MAX_FRAMES:]]
    lines += ["", *(f"rank {each.rank}: {each.note}" for each in report.workers if each.note)]
    return "\n".join(lines).rstrip() + "\n"

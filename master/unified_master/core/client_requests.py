"""Requests of clients, and their answers."""

from __future__ import annotations

from typing import assert_never

import msgspec

from unified.errors import UsageError, listed, nearest
from unified.job.names import parse_worker
from unified.job.spec import EntryPoint, JobSpec
from unified.protocol.agent_master import LogRead, ReadAgentLog
from unified.protocol.client_master import (
    Accepted,
    ClientToMaster,
    Done,
    DrainNode,
    Explain,
    GetDirectory,
    GetJob,
    GetStacks,
    JobDirectory,
    JobList,
    JobStatus,
    ListJobs,
    ListNodes,
    LogChunk,
    MasterToClient,
    NodeList,
    ReadLog,
    Refused,
    RestartWorkers,
    StopJob,
    SubmitJob,
)
from unified.protocol.records import JobWorkerIncarnation, Stage, WorkerState
from unified_master.core import (
    directory,
    jobs,
    nodes,
    status,
)
from unified_master.core.health import stacks
from unified_master.core.restart import all_workers, restart, restart_job
from unified_master.core.scheduling import job_queue, waiting
from unified_master.core.state import STORE, JobRecord, ParkedPoll, ParkedRead, TimerKey, WorkerRecord
from unified_master.core.step import MasterStep

MAX_WAIT_S = 300.0
MAX_READ = 8 * 1024 * 1024
MAX_NAMED = 3
"""Jobs that an error about an unknown one names."""
Answer = MasterToClient | None
"""The answer; None: a later step gives it."""


def answer(step: MasterStep, peer: bytes, request_id: int, request: ClientToMaster) -> Answer:
    """Do what is asked, or return the reason why not."""
    match request:
        case SubmitJob():
            return _submit(step, request)
        case ListJobs():
            asked = request.labels.items()
            jobs_of_labels = (job for job in step.cluster.jobs.values() if asked <= job.spec.labels.items())
            return JobList(jobs=[status.job_line(job) for job in jobs_of_labels])
        case ListNodes():
            known = step.cluster.nodes
            return NodeList(nodes=[status.node_status(step.now, known[name]) for name in sorted(known)])
        case DrainNode():
            return _drain(step, request)
    job = find_job(step, request.job)
    if isinstance(job, Refused):
        return job
    match request:
        case GetJob():
            return _get(step, peer, request_id, request, job)
        case ReadLog():
            return _read(step, peer, request_id, request, job)
        case StopJob():
            return _stop(step, request, job)
        case RestartWorkers():
            return _restart(step, request, job)
        case Explain():
            worker = find_worker(job, request.worker) if request.worker else None
            return worker if isinstance(worker, Refused) else status.story(step.cluster, job, worker, request.limit)
        case GetStacks():
            return stacks.get(step, peer, request_id, request, job)
        case GetDirectory():
            return _directory(step, request, job)
        case _:
            assert_never(request)


def find_job(step: MasterStep, word: str) -> JobRecord | Refused:
    """Return the job of this id, or the newest of this name."""
    known = step.cluster.jobs
    if word in known:
        return known[word]
    if (newest := _newest(step, word)) is not None:
        return newest
    return Refused(code="not-found", reason=f"there is no job {word[:100]!r}.{_hint(known, word)}")


def _newest(step: MasterStep, name: str) -> JobRecord | None:
    named = (job for job in step.cluster.jobs.values() if job.spec.name == name)
    return max(named, key=lambda job: job.sequence, default=None)


def _hint(known: dict[str, JobRecord], word: str) -> str:
    """Return the jobs whose id begins like this, newest first; else the name that is most like it."""
    alike = [job_id for job_id in reversed(known) if word and job_id.lower().startswith(word.lower())][:MAX_NAMED]
    if alike:
        return f" Did you mean {' or '.join(repr(job_id) for job_id in alike)}?"
    names = [*known, *(job.spec.name for job in known.values())]
    return nearest(word, names) or " `unified jobs` lists those that are known."


def find_worker(job: JobRecord, word: str) -> WorkerRecord | Refused:
    """Return the worker of this full name, or of the short form ``role-rank``."""
    if word in job.workers and word != STORE:
        return job.workers[word]
    try:
        ref = parse_worker(word)
    except UsageError as error:
        return Refused(code="not-found", reason=str(error))
    for worker in job.workers.values():
        if worker.kind == "worker" and (worker.role, worker.rank) == ref:
            return worker
    names = [f"{worker.role}-{worker.rank}" for worker in job.workers.values() if worker.kind == "worker"]
    hint = nearest(word, names) or f" Its roles are {listed(job.roles)}."
    return Refused(code="not-found", reason=f"job {job.job_id} has no worker {word[:100]!r}.{hint}")


def answer_polls(step: MasterStep, job: JobRecord, overdue: TimerKey = ()) -> None:
    """Answer those who waited for news of a job, and with the state as it is the one whose timer is `overdue`."""
    parked = step.cluster.polls.pop(job.job_id, [])
    due = [poll for poll in parked if job.version > poll.after_version or _poll_timer(poll) == overdue]
    if len(due) < len(parked):
        step.cluster.polls[job.job_id] = [poll for poll in parked if poll not in due]
    news: JobStatus | None = None
    for poll in due:
        step.cluster.timers.cancel(_poll_timer(poll))
        if job.version <= poll.after_version:
            step.send(poll.peer, status.job_status(step.cluster, job, has_workers=False), poll.request_id)
            continue
        news = news or status.job_status(step.cluster, job)
        step.send(poll.peer, news, poll.request_id)


def log_read(step: MasterStep, request_id: int, read: LogRead) -> None:
    """Pass on an agent's answer to a `ReadAgentLog`."""
    parked = step.cluster.reads.pop(request_id, None)
    if parked is None:
        return
    step.cluster.timers.cancel(("read", str(request_id)))
    life = parked.life
    if read.error:
        reason = f"the log of {life.worker} on {parked.node} cannot be read: {read.error}"
        step.send(parked.peer, Refused(code="not-found", reason=reason), parked.request_id)
        return
    chunk = LogChunk(
        worker=life.worker,
        incarnation=life.incarnation,
        data=read.data,
        offset=read.offset,
        next_offset=read.next_offset,
        size=read.size,
        is_final=_is_over(step, life) and read.next_offset >= read.size,
        path=read.path,
    )
    step.send(parked.peer, chunk, parked.request_id)


def read_overdue(step: MasterStep, number: int) -> None:
    """Answer a read whose agent did not answer."""
    parked = step.cluster.reads.pop(number, None)
    if parked is not None:
        waited = step.cluster.intervals.connect_s
        reason = f"the agent of {parked.node} did not send the log of {parked.life.worker} within {waited:g} s."
        step.send(parked.peer, Refused(code="unavailable", reason=reason), parked.request_id)


def _directory(step: MasterStep, request: GetDirectory, job: JobRecord) -> Answer:
    if job.stage is Stage.STOPPED:
        code = "" if job.exit_code is None else f" with exit code {job.exit_code}"
        return Refused(code="ended", reason=f"job {job.job_id} has ended{code}: nobody is there to be called.")
    revision = step.cluster.first_number + job.revision
    return JobDirectory(
        job_id=job.job_id,
        revision=revision,
        relay=step.cluster.relay,
        roles={role.name: [worker.name for worker in job.ranks(role.name)] for role in job.spec.roles},
        entries=None if request.after_revision == revision else directory.entries_of(job),
    )


def _submit(step: MasterStep, request: SubmitJob) -> Answer:
    spec = request.spec
    if faults := list(jobs.faults_of(spec)):
        return Refused(code="bad-request", reason=" ".join(faults[:5]))
    for other in step.cluster.jobs.values():
        if other.spec.name == spec.name and other.stage is not Stage.STOPPED:
            if request.joins and _work(other.spec) == _work(spec):
                return Accepted(job_id=other.job_id, submitted_by=other.spec.submitted_by or "another host")
            reason = (
                f"job {other.job_id} has this name and is {other.stage}: choose another name, "
                f"or stop it with `unified stop {other.job_id}`."
            )
            return Refused(code="name-taken", reason=reason)
    if refused := _taken_label(step, request) or _not_followed(step, request):
        return refused
    if not request.wait and (why := _why_not_now(step, request)):
        return Refused(code="does-not-fit", reason=f"job {spec.name} does not fit now: {why}.")
    if request.follows and request.kept_env:
        spec = _with_kept_env(spec, step.cluster.jobs[request.follows].spec, request.kept_env)
    return Accepted(job_id=jobs.accept(step, spec).job_id)


def _taken_label(step: MasterStep, request: SubmitJob) -> Refused | None:
    """Return a refusal if a living job has the same value of a label that is to be unique."""
    labels = {name: request.spec.labels.get(name) for name in request.unique_labels}
    for other in step.cluster.jobs.values() if labels else ():
        if other.stage is not Stage.STOPPED:
            for name, value in labels.items():
                if value is not None and other.spec.labels.get(name) == value:
                    reason = f"job {other.job_id} has the label {name}={value} too and is {other.stage}."
                    return Refused(code="name-taken", reason=reason)
    return None


def _not_followed(step: MasterStep, request: SubmitJob) -> Refused | None:
    """Return a refusal if the newest job of this name is not the one that the submitter knows of."""
    if request.follows is None:
        return None
    newest = _newest(step, request.spec.name)
    found = newest.job_id if newest is not None else ""
    if found == request.follows:
        return None
    known = f"job {found} is the newest of this name" if found else "no job of this name is known any more"
    return Refused(code="name-taken", reason=f"{known}, not {request.follows or 'none'}: look again before you submit.")


def _with_kept_env(spec: JobSpec, earlier: JobSpec, names: list[str]) -> JobSpec:
    envs = {role.name: role.envs for role in earlier.roles}
    roles = []
    for role in spec.roles:
        kept = {name: value for name, value in envs.get(role.name, {}).items() if name in names}
        roles.append(msgspec.structs.replace(role, envs={**kept, **role.envs}))
    return msgspec.structs.replace(spec, roles=roles)


def _work(spec: JobSpec) -> list[tuple[str, int, EntryPoint]]:
    """Return what two submissions of one job have in common, from whichever host they come."""
    return [(role.name, role.total, role.entry_point) for role in spec.roles]


def _why_not_now(step: MasterStep, request: SubmitJob) -> str:
    if (ahead := job_queue.blocker(step.cluster)) is not None:
        return job_queue.behind(ahead)
    probe = JobRecord(job_id="", sequence=0, spec=request.spec)
    return waiting.plan_for(step.cluster, probe).reason


def _get(step: MasterStep, peer: bytes, request_id: int, request: GetJob, job: JobRecord) -> Answer:
    has_news = job.version > request.after_version or job.stage is Stage.STOPPED
    if has_news or not request.wait_s > 0:
        found = status.job_status(step.cluster, job)
        return msgspec.structs.replace(found, annotations=job.spec.annotations) if request.annotations else found
    poll = ParkedPoll(peer=peer, request_id=request_id, job_id=job.job_id, after_version=request.after_version)
    parked = step.cluster.polls.setdefault(job.job_id, [])
    parked[:] = [other for other in parked if _poll_timer(other) != _poll_timer(poll)] + [poll]
    step.cluster.timers.arm(_poll_timer(poll), step.now + min(request.wait_s, MAX_WAIT_S))
    return None


def _poll_timer(poll: ParkedPoll) -> TimerKey:
    return ("poll", poll.job_id, poll.peer.hex(), str(poll.request_id))


def _read(step: MasterStep, peer: bytes, request_id: int, request: ReadLog, job: JobRecord) -> Answer:
    worker = find_worker(job, request.worker)
    if isinstance(worker, Refused):
        return worker
    incarnation = worker.incarnation if request.incarnation is None else request.incarnation
    life = JobWorkerIncarnation(job.job_id, worker.name, incarnation)
    if worker.incarnation < 0:
        is_final = job.stage is Stage.STOPPED
        return LogChunk(worker=worker.name, incarnation=0, data=b"", offset=0, next_offset=0, size=0, is_final=is_final)
    earlier = (past.node for past in worker.past if past.incarnation == incarnation)
    name = worker.node if incarnation == worker.incarnation else next(earlier, "")
    if not name:
        reason = f"nothing is known of incarnation {incarnation} of {worker.name}; its newest is {worker.incarnation}."
        return Refused(code="not-found", reason=reason)
    node = step.connected_node(name)
    if node is None:
        reason = f"the log of {worker.name} is on node {name}, which is not connected."
        return Refused(code="unavailable", reason=reason)
    number = step.cluster.next_read
    step.cluster.next_read += 1
    step.cluster.reads[number] = ParkedRead(peer=peer, request_id=request_id, life=life, node=name)
    step.cluster.timers.arm(("read", str(number)), step.now + step.cluster.intervals.connect_s)
    order = ReadAgentLog(
        job_id=job.job_id,
        worker=worker.name,
        worker_incarnation=incarnation,
        stream=request.stream,
        offset=request.offset,
        max_bytes=max(1, min(request.max_bytes, MAX_READ)),
        keep=request.keep,
    )
    step.send(node.peer, order, number)
    return None


def _drain(step: MasterStep, request: DrainNode) -> Answer:
    name = request.node
    if name not in step.cluster.nodes:
        hint = nearest(name, step.cluster.nodes) or " `unified nodes` lists those that are known."
        return Refused(code="not-found", reason=f"there is no node {name[:100]!r}.{hint}")
    nodes.drain(step, name, None if request.is_over else request.reason)
    return Done(note=f"node {name} is {'in' if request.is_over else 'out of'} service.")


def _is_over(step: MasterStep, life: JobWorkerIncarnation) -> bool:
    """Return True if the incarnation has ended, so that its log grows no more."""
    worker = step.cluster.worker(life.job_id, life.worker)
    if worker is None or any(leaving.life == life for leaving in step.cluster.leaving_of(life.job_id)):
        return worker is None
    return life.incarnation < worker.incarnation or worker.state is WorkerState.EXITED


def _stop(step: MasterStep, request: StopJob, job: JobRecord) -> Answer:
    if job.stage is Stage.STOPPED:
        return Done(note=f"job {job.job_id} had already ended with exit code {job.exit_code}.")
    if request.force and not job.is_forced:
        job.is_forced = True
        step.touch_job(job)
        for leaving in step.cluster.leaving_of(job.job_id):
            step.touch_node(leaving.node)
    if job.stage is Stage.STOPPING:
        return Done(note=f"job {job.job_id} is being stopped{' by force' if job.is_forced else ''}.")
    job.is_interrupted = request.interrupt
    jobs.begin_stop(step, job, jobs.EXIT_STOPPED, f"stopped: {request.reason}")
    return Done(note=f"job {job.job_id} stops{' by force' if request.force else ''}.")


def _restart(step: MasterStep, request: RestartWorkers, job: JobRecord) -> Answer:
    if job.is_ending:
        return Refused(code="ended", reason=f"job {job.job_id} is {job.stage}: submit it again.")
    if job.is_waiting:
        return Done(note=f"job {job.job_id} has not begun: {job.reason.rstrip('.')}.")
    names: list[str] = []
    for word in request.workers:
        worker = find_worker(job, word)
        if isinstance(worker, Refused):
            return worker
        names.append(worker.name)
    why = f"restarted on request: {listed(names) if names else 'the whole job'}"
    step.decide("restart-asked", why, job)
    before = {name: job.workers[name].incarnation for name in all_workers(job)}
    found = restart(step, job, names, why) if names else restart_job(step, job, why)
    job_queue.requeue_unless(step, job, found)
    coming = {
        name: number + 1
        for name, number in before.items()
        if job.is_waiting or job.workers[name].is_held or job.workers[name].incarnation > number
    }
    return Done(note=why, lives=coming)

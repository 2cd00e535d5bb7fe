"""Requests of clients, and their answers."""

from __future__ import annotations

import signal
from typing import assert_never

import msgspec

from unified.errors import UsageError, listed, nearest
from unified.job.names import parse_worker
from unified.job.spec import EntryPoint, JobSpec
from unified.protocol import client_master
from unified.protocol.agent_master import LogRead, PassSignal, ReadAgentLog
from unified.protocol.records import MAX_PROFILE_S, JobWorkerIncarnation, Stage, WorkerState
from unified_master.core import directory, job_queue, nodes
from unified_master.core.clients import status, watching
from unified_master.core.health import stacks
from unified_master.core.job_faults import faults_of
from unified_master.core.rounds import jobs
from unified_master.core.rounds.restart import Cause, restart
from unified_master.core.scheduling import waiting
from unified_master.core.state import STORE, JobRecord, ParkedRead, WorkerRecord
from unified_master.core.step import MasterStep, count

MAX_READ = 8 * 1024 * 1024
MAX_PATTERN = 500
"""Characters of a regular expression that logs are searched for."""
PROFILE_SLACK_S = 40.0
"""Time that a profile may take beyond its sampling time: memray takes seconds to begin and to end."""
_JOIN_REFUSED = "; another command is refused: "
MAX_NAMED = 3
"""Most jobs that an error about an unknown job names."""
Answer = client_master.MasterToClient | None
"""The answer; None: a later step gives it."""


def answer(step: MasterStep, peer: bytes, request_id: int, request: client_master.ClientToMaster) -> Answer:
    """Do what is asked, or return the reason why not."""
    match request:
        case client_master.SubmitJob():
            return _submit(step, request)
        case client_master.ListJobs():
            return _list(step, request)
        case client_master.ListNodes():
            known = step.cluster.nodes
            nodes = [status.node_status(step.now, known[name]) for name in sorted(known)]
            return client_master.NodeList(nodes=nodes, at=step.now, relay=step.cluster.relay)
        case client_master.DrainNode():
            return _drain(step, request)
        case client_master.SuspendJob() | client_master.ResumeJob():
            return _suspend(step, request)
        case client_master.WatchCluster(job=""):
            return watching.watch(step, peer, request_id, request, "")
    job = find_job(step, request.job)
    if isinstance(job, client_master.Refused):
        return job
    match request:
        case client_master.GetJob():
            found = status.job_status(step.cluster, job)
            return msgspec.structs.replace(found, annotations=job.spec.annotations) if request.annotations else found
        case client_master.WatchCluster():
            return watching.watch(step, peer, request_id, request, job.job_id)
        case client_master.ReadLog():
            return _read(step, peer, request_id, request, job)
        case client_master.StopJob():
            return _stop(step, request, job)
        case client_master.SignalWorkers():
            return _signal(step, request, job)
        case client_master.RestartWorkers():
            return _restart(step, request, job)
        case client_master.Explain():
            worker = find_worker(job, request.worker) if request.worker else None
            return (
                worker
                if isinstance(worker, client_master.Refused)
                else status.story(step.cluster, job, worker, request.limit, request.before)
            )
        case client_master.GetStacks():
            return stacks.get(step, peer, request_id, request, job)
        case client_master.GetDirectory():
            return _directory(step, request, job)
        case _:
            assert_never(request)


def _list(step: MasterStep, request: client_master.ListJobs) -> Answer:
    end = find_job(step, request.before) if request.before else None
    if isinstance(end, client_master.Refused):
        return end
    found = [
        job
        for job in step.cluster.jobs.values()
        if request.labels.items() <= job.spec.labels.items()
        and (end is None or job.sequence < end.sequence)
        and (not request.stages or job.stage in request.stages)
        and (request.text in job.job_id or request.text in job.spec.submitted_by)
    ]
    return client_master.JobList(jobs=[status.job_line(step.now, job) for job in found[-max(0, request.limit) :]])


def find_job(step: MasterStep, word: str) -> JobRecord | client_master.Refused:
    """Return the job of this id, or the newest of this name, or the newest of this name and number."""
    known = step.cluster.jobs
    if word in known:
        return known[word]
    if (newest := _newest(step, word) or _numbered(step, word)) is not None:
        return newest
    return client_master.Refused(code="not-found", reason=f"there is no job {word[:100]!r}.{_hint(known, word)}")


def _newest(step: MasterStep, name: str) -> JobRecord | None:
    named = (job for job in step.cluster.jobs.values() if job.spec.name == name)
    return max(named, key=lambda job: job.sequence, default=None)


def _numbered(step: MasterStep, word: str) -> JobRecord | None:
    """Return the newest job whose id is `word` and a suffix, so that people need not write the suffix."""
    numbered = (job for job in step.cluster.jobs.values() if word == f"{job.spec.name}-{job.sequence}")
    return max(numbered, key=lambda job: job.submitted_at, default=None)


def _hint(known: dict[str, JobRecord], word: str) -> str:
    """Return the jobs whose id begins like this, newest first; else the name that is most like it."""
    alike = [job_id for job_id in reversed(known) if word and job_id.lower().startswith(word.lower())][:MAX_NAMED]
    if alike:
        return f" Did you mean {' or '.join(repr(job_id) for job_id in alike)}?"
    names = [*known, *(job.spec.name for job in known.values())]
    return nearest(word, names) or " `unified jobs` lists those that are known."


def find_worker(job: JobRecord, word: str) -> WorkerRecord | client_master.Refused:
    """Return the worker of this full name, or of the short form ``role-rank``."""
    if word in job.workers and word != STORE:
        return job.workers[word]
    try:
        ref = parse_worker(word)
    except UsageError as error:
        return client_master.Refused(code="not-found", reason=str(error))
    for worker in job.workers.values():
        if worker.kind == "worker" and (worker.role, worker.rank) == ref:
            return worker
    names = [f"{worker.role}-{worker.rank}" for worker in job.workers.values() if worker.kind == "worker"]
    hint = nearest(word, names) or f" Its roles are {listed(job.roles)}."
    return client_master.Refused(code="not-found", reason=f"job {job.job_id} has no worker {word[:100]!r}.{hint}")


def log_read(step: MasterStep, request_id: int, read: LogRead) -> None:
    """Pass on an agent's answer to a `ReadAgentLog`."""
    parked = step.cluster.reads.pop(request_id, None)
    if parked is None:
        return
    step.cluster.timers.cancel(("read", str(request_id)))
    incarnation = parked.incarnation
    if read.error and parked.request.take:
        reason = f"{incarnation.worker} on {parked.node} cannot be profiled: {read.error}."
        step.send(parked.peer, client_master.Refused(code="unavailable", reason=reason), parked.request_id)
        return
    if read.is_missing and (
        kept := _kept_tail(step, incarnation, parked.request, f"node {parked.node} has lost the file")
    ):
        step.send(parked.peer, kept, parked.request_id)
        return
    if read.error:
        reason = f"the log of {incarnation.worker} on {parked.node} cannot be read: {read.error}"
        may_be_read = not (read.is_missing or parked.request.grep)
        refused = client_master.Refused(code="unavailable" if may_be_read else "not-found", reason=reason)
        step.send(parked.peer, refused, parked.request_id)
        return
    chunk = client_master.LogChunk(
        worker=incarnation.worker,
        incarnation=incarnation.number,
        data=read.data,
        offset=read.offset,
        next_offset=read.next_offset,
        size=read.size,
        is_final=_is_over(step, incarnation) and read.next_offset >= read.size,
        path=read.path,
        is_busy=read.is_busy,
    )
    step.send(parked.peer, chunk, parked.request_id)


def read_overdue(step: MasterStep, number: int) -> None:
    """Refuse a read whose agent did not answer in time."""
    parked = step.cluster.reads.pop(number, None)
    if parked is not None:
        what = "a profile" if parked.request.take else "the log"
        waited = _read_within_s(step, parked.request)
        reason = f"the agent of {parked.node} did not send {what} of {parked.incarnation.worker} within {waited:g} s."
        step.send(parked.peer, client_master.Refused(code="unavailable", reason=reason), parked.request_id)


def _directory(step: MasterStep, request: client_master.GetDirectory, job: JobRecord) -> Answer:
    if job.stage is Stage.STOPPED:
        code = "" if job.exit_code is None else f" with exit code {job.exit_code}"
        return client_master.Refused(
            code="ended", reason=f"job {job.job_id} has ended{code}: nobody is there to be called."
        )
    revision = step.cluster.first_number + job.revision
    return client_master.JobDirectory(
        job_id=job.job_id,
        revision=revision,
        relay=step.cluster.relay,
        roles={role.name: [worker.name for worker in job.ranks(role.name)] for role in job.spec.roles},
        entries=None if request.after_revision == revision else directory.entries_of(job),
    )


def _submit(step: MasterStep, request: client_master.SubmitJob) -> Answer:
    spec = request.spec
    if faults := list(faults_of(spec)):
        return client_master.Refused(code="bad-request", reason=" ".join(faults[:5]))
    for other in step.cluster.jobs.values():
        if other.spec.name == spec.name and other.stage is not Stage.STOPPED:
            if request.joins and _work(other.spec) == _work(spec):
                job_queue.resume(step, other)
                return client_master.Accepted(
                    job_id=other.job_id, submitted_by=other.spec.submitted_by or "another host"
                )
            if request.joins and other.suspended is not None:
                reason = (
                    f"job {other.job_id} is suspended, and what is submitted now has other roles or another entry "
                    "point, because its file was changed. Submit the unchanged file, or give the new job another name."
                )
                return client_master.Refused(code="name-taken", reason=reason)
            if request.joins and not other.is_ending and (reason := _other_size(other.spec, spec)):
                step.decide("join-refused", f"{other.reason.partition(_JOIN_REFUSED)[0]}{_JOIN_REFUSED}{reason}", other)
                return client_master.Refused(code="name-taken", reason=f"job {other.job_id}: {reason}")
            reason = (
                f"job {other.job_id} has this name and is {other.stage}: choose another name, "
                f"or stop it with `unified stop {other.job_id}`"
                f"{'.' if other.suspended is None else f', or let it go on: `unified resume {other.job_id}`.'}"
            )
            return client_master.Refused(code="name-taken", reason=reason)
    if refused := _taken_label(step, request) or _not_followed(step, request):
        return refused
    if not request.wait and (why := _why_not_now(step, request)):
        return client_master.Refused(code="does-not-fit", reason=f"job {spec.name} does not fit now: {why}.")
    if request.follows and request.kept_env:
        spec = _with_kept_env(spec, step.cluster.jobs[request.follows].spec, request.kept_env)
    return client_master.Accepted(job_id=jobs.accept(step, spec).job_id)


def _taken_label(step: MasterStep, request: client_master.SubmitJob) -> client_master.Refused | None:
    """Return a refusal if an unfinished job has the same value of a label that must be unique."""
    labels = {name: request.spec.labels.get(name) for name in request.unique_labels}
    for other in step.cluster.jobs.values() if labels else ():
        if other.stage is not Stage.STOPPED:
            for name, value in labels.items():
                if value is not None and other.spec.labels.get(name) == value:
                    reason = f"job {other.job_id} has the label {name}={value} too and is {other.stage}."
                    return client_master.Refused(code="name-taken", reason=reason)
    return None


def _not_followed(step: MasterStep, request: client_master.SubmitJob) -> client_master.Refused | None:
    """Return a refusal if the newest job of this name is not the one that the submitter knows of."""
    if request.follows is None:
        return None
    newest = _newest(step, request.spec.name)
    found = newest.job_id if newest is not None else ""
    if found == request.follows:
        return None
    known = f"job {found} is the newest of this name" if found else "no job of this name is known any more"
    return client_master.Refused(
        code="name-taken", reason=f"{known}, not {request.follows or 'none'}: check the newest job before you submit."
    )


def _with_kept_env(spec: JobSpec, earlier: JobSpec, names: list[str]) -> JobSpec:
    envs = {role.name: role.envs for role in earlier.roles}
    roles = []
    for role in spec.roles:
        kept = {name: value for name, value in envs.get(role.name, {}).items() if name in names}
        roles.append(msgspec.structs.replace(role, envs={**kept, **role.envs}))
    return msgspec.structs.replace(spec, roles=roles)


def _work(spec: JobSpec) -> list[tuple[str, int, int, EntryPoint]]:
    """Return the parts of a spec that are equal if one job is submitted from two hosts."""
    return [(role.name, role.total, role.per_group, role.entry_point) for role in spec.roles]


def _other_size(first: JobSpec, second: JobSpec) -> str:
    """Return a sentence with both sizes if two specs have the same work for different numbers of workers."""
    for one, other in zip(first.roles, second.roles, strict=False):
        has, asks = (f"{count(it.num_groups, 'group')} of {count(it.per_group, 'worker')}" for it in (one, other))
        if (one.name, one.entry_point) == (other.name, other.entry_point) and has != asks:
            return (
                f"role {one.name} of {first.submitted_by or 'its submitter'} has {has}, and "
                f"{second.submitted_by or 'another command'} asks for {asks}. The commands of one job need the same "
                "--nnodes and --nproc-per-node."
            )
    return ""


def _why_not_now(step: MasterStep, request: client_master.SubmitJob) -> str:
    if (ahead := waiting.blocker(step.cluster)) is not None:
        return waiting.behind(ahead)
    probe = JobRecord(job_id="", sequence=0, spec=request.spec)
    return waiting.plan_for(step.cluster, probe).reason


def _read(step: MasterStep, peer: bytes, request_id: int, request: client_master.ReadLog, job: JobRecord) -> Answer:
    worker = find_worker(job, request.worker)
    if isinstance(worker, client_master.Refused):
        return worker
    number = worker.incarnation if request.incarnation is None else request.incarnation
    incarnation = JobWorkerIncarnation(job.job_id, worker.name, number)
    if worker.incarnation < 0:
        is_final = job.stage is Stage.STOPPED
        return client_master.LogChunk(
            worker=worker.name, incarnation=0, data=b"", offset=0, next_offset=0, size=0, is_final=is_final
        )
    earlier = (past.node for past in worker.past if past.incarnation == number)
    name = worker.node if number == worker.incarnation else next(earlier, "")
    if not name:
        reason = f"nothing is known of incarnation {number} of {worker.name}; its newest is {worker.incarnation}."
        return client_master.Refused(code="not-found", reason=reason)
    node = step.connected_node(name)
    if node is None:
        if kept := _kept_tail(step, incarnation, request, f"node {name} is not connected"):
            return kept
        reason = f"the log of {worker.name} is on node {name}, which is not connected."
        return client_master.Refused(code="unavailable", reason=reason)
    if len(request.grep) > MAX_PATTERN:
        reason = f"a pattern of {len(request.grep)} characters is longer than {MAX_PATTERN}."
        return client_master.Refused(code="bad-request", reason=reason)
    read = step.cluster.next_read
    step.cluster.next_read += 1
    step.cluster.reads[read] = ParkedRead(
        peer=peer, request_id=request_id, incarnation=incarnation, node=name, request=request
    )
    step.cluster.timers.arm(("read", str(read)), step.now + _read_within_s(step, request))
    order = ReadAgentLog(
        job_id=job.job_id,
        worker=worker.name,
        worker_incarnation=number,
        stream=request.stream,
        offset=request.offset,
        max_bytes=max(1, min(request.max_bytes, MAX_READ)),
        keep=request.keep,
        grep=request.grep,
        since=request.since,
        until=request.until,
        take=request.take,
        wait_s=_profile_s(request),
    )
    step.send(node.peer, order, read)
    return None


def _profile_s(request: client_master.ReadLog) -> float:
    return max(0.0, min(request.wait_s, MAX_PROFILE_S))


def _read_within_s(step: MasterStep, request: client_master.ReadLog) -> float:
    more_s = _profile_s(request) + PROFILE_SLACK_S if request.take else 0.0
    return step.cluster.intervals.connect_s + more_s


def _kept_tail(
    step: MasterStep, incarnation: JobWorkerIncarnation, request: client_master.ReadLog, why: str
) -> client_master.LogChunk | None:
    """Return the kept end of a log that its node cannot send; None without one, or if the reader waits for the node."""
    part = step.cluster.tails.read(
        incarnation, request.stream, request.offset, max(1, min(request.max_bytes, MAX_READ))
    )
    if part is None:
        return None
    job = step.cluster.jobs[incarnation.job_id]
    is_over = job.stage is Stage.STOPPED
    if request.keep and not is_over:  # the node may come back with the whole log
        return None
    next_offset = part.offset + len(part.data)
    worker = step.cluster.worker(incarnation.job_id, incarnation.worker)
    node = step.cluster.nodes.get(worker.node) if worker is not None else None
    at = node.info.log_archive.rstrip("/") if node is not None else ""
    archive = f"; the whole is in {at}/{job.job_id}/{incarnation.worker}" if at else ""
    return client_master.LogChunk(
        worker=incarnation.worker,
        incarnation=incarnation.number,
        data=part.data,
        offset=part.offset,
        next_offset=next_offset,
        size=part.size,
        is_final=is_over and next_offset >= part.size,
        note=f"{why}: this is the end of the log, as far as the master has it{archive}",
    )


def _drain(step: MasterStep, request: client_master.DrainNode) -> Answer:
    name = request.node
    if name not in step.cluster.nodes:
        hint = nearest(name, step.cluster.nodes) or " `unified nodes` lists those that are known."
        return client_master.Refused(code="not-found", reason=f"there is no node {name[:100]!r}.{hint}")
    nodes.drain(step, name, request.reason, is_over=request.is_over)
    return client_master.Done(note=f"node {name} is {'in' if request.is_over else 'out of'} service.")


def _is_over(step: MasterStep, incarnation: JobWorkerIncarnation) -> bool:
    """Return True if the incarnation has ended, so that its log grows no more."""
    worker = step.cluster.worker(incarnation.job_id, incarnation.worker)
    if worker is None or any(
        leaving.incarnation == incarnation for leaving in step.cluster.leaving_of(incarnation.job_id)
    ):
        return worker is None
    return incarnation.number < worker.incarnation or worker.state is WorkerState.EXITED


def _stop(step: MasterStep, request: client_master.StopJob, job: JobRecord) -> Answer:
    if job.stage is Stage.STOPPED:
        return client_master.Done(note=f"job {job.job_id} had already ended with exit code {job.exit_code}.")
    if request.force and not job.is_forced:
        job.is_forced = True
        step.touch_job(job)
        for leaving in step.cluster.leaving_of(job.job_id):
            step.touch_node(leaving.node)
    if job.stage is Stage.STOPPING:
        return client_master.Done(note=f"job {job.job_id} is being stopped{' by force' if job.is_forced else ''}.")
    job.is_interrupted = request.interrupt
    jobs.begin_stop(step, job, jobs.EXIT_STOPPED, f"stopped: {request.reason}")
    return client_master.Done(note=f"job {job.job_id} stops{' by force' if request.force else ''}.")


def _suspend(step: MasterStep, request: client_master.SuspendJob | client_master.ResumeJob) -> Answer:
    found = [job for job in step.cluster.jobs.values() if not job.is_ending]
    if request.job:
        job = find_job(step, request.job)
        if isinstance(job, client_master.Refused):
            return job
        if job.is_ending:
            return client_master.Refused(code="ended", reason=f"job {job.job_id} is {job.stage}: submit it again.")
        found = [job]
    for job in found:
        if isinstance(request, client_master.SuspendJob):
            job_queue.suspend(step, job, request.reason)
        else:
            job_queue.resume(step, job, request.reason)
    word = "suspended" if isinstance(request, client_master.SuspendJob) else "resumed"
    return client_master.Done(note=f"{word}: {listed([job.job_id for job in found]) if found else 'no job'}.")


def _signal(step: MasterStep, request: client_master.SignalWorkers, job: JobRecord) -> Answer:
    number = request.signal
    if number not in signal.valid_signals():
        return client_master.Refused(code="bad-request", reason=f"{number} is no signal.")
    if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):
        return client_master.Refused(
            code="bad-request", reason=f"{signal.Signals(number).name} is a stop: stop the job."
        )
    found: dict[str, list[str]] = {}
    for worker in job.workers.values():
        has_program = worker.state in (WorkerState.READY, WorkerState.RUNNING, WorkerState.SERVING)
        if worker.kind == "worker" and worker.is_desired and has_program:
            found.setdefault(worker.node, []).append(worker.name)
    for node, names in found.items():
        order = PassSignal(job_id=job.job_id, workers=names, signal=number)
        step.send(step.cluster.nodes[node].peer, order)
    return client_master.Done(note=f"signal {number} is sent to {count(sum(map(len, found.values())), 'worker')}.")


def _restart(step: MasterStep, request: client_master.RestartWorkers, job: JobRecord) -> Answer:
    if job.is_ending:
        return client_master.Refused(code="ended", reason=f"job {job.job_id} is {job.stage}: submit it again.")
    if job.is_waiting:
        return client_master.Done(note=f"job {job.job_id} has not begun: {job.reason.rstrip('.')}.")
    names: list[str] = []
    for word in request.workers:
        worker = find_worker(job, word)
        if isinstance(worker, client_master.Refused):
            return worker
        names.append(worker.name)
    why = f"restarted on request: {listed(names) if names else 'the whole job'}"
    before = {worker.name: worker.incarnation for worker in job.workers.values() if worker.kind == "worker"}
    restart(step, job, names or None, Cause("restart-asked", why))
    coming = {
        name: number + 1
        for name, number in before.items()
        if job.is_waiting or job.workers[name].is_held or job.workers[name].incarnation > number
    }
    return client_master.Done(note=why, incarnations=coming)

"""The life of a job: accepted, ready, running, stopping, stopped. Each next stage is read off the job's workers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from unified.errors import JobNameError
from unified.job.names import check_job_name
from unified.job.spec import JobSpec, RoleSpec, has_range
from unified.protocol.client_master import EndReport
from unified.protocol.records import JOB_MOVES, Failure, JobWorkerIncarnation, NodeState, Stage, WorkerState
from unified_master.core import directory, incarnations, rendezvous
from unified_master.core.state import JobRecord, NodeRecord, RoleRecord, WorkerRecord
from unified_master.core.step import MasterStep, count

MAX_WORKERS = 100_000
MAX_SPEC_BYTES = 8 * 2**20
MAX_LABEL_CHARS = 8192
"""Most characters of a job's labels, which each list has."""
MAX_ENDED = 1000
"""Jobs that have ended and are still known."""
MAX_ENDED_WEIGHT = 200_000
"""Weight of all ended jobs: a worker, an event or a kilobyte of description weighs 1, about as much memory."""
EXIT_FAILED = 1
EXIT_STOPPED = 130
"""Exit code that a shell gives a program that Ctrl-C ended."""


def faults_of(spec: JobSpec) -> Iterator[str]:
    """Yield the faults of a job that came over the wire; the builder checks more, and says it better."""
    try:
        check_job_name(spec.name)
    except JobNameError as error:
        yield str(error)
    names = [role.name for role in spec.roles]
    if not names:
        yield f"job {spec.name} has no role."
    if len(set(names)) != len(names):
        yield f"job {spec.name} has two roles of one name."
    if spec.node_num < 1:
        yield f"job {spec.name}: node_num must be at least 1."
    if not all(math.isfinite(amount) and amount >= 0 for amount in (spec.master_cpu, spec.master_memory_mb)):
        yield f"job {spec.name}: master_cpu and master_memory_mb must be numbers from 0 upwards."
    if spec.device_per_node < 1:
        yield f"job {spec.name}: device_per_node must be at least 1."
    for name in ("stop_grace_s", "restart_window_s", "restart_backoff_s"):
        if not math.isfinite(seconds := getattr(spec, name)) or seconds < 0:
            yield f"job {spec.name}: {name} must be 0 or more seconds."
    if sum(max(0, role.total) for role in spec.roles) > MAX_WORKERS:
        yield f"job {spec.name} has more than {MAX_WORKERS} workers."
        return
    if sum(len(name) + len(value) for name, value in spec.labels.items()) > MAX_LABEL_CHARS:
        yield f"job {spec.name} has more than {MAX_LABEL_CHARS} characters of labels; annotations may be longer."
    yield from _weight_faults(spec)
    counts: dict[str, int] = {}
    for role in spec.roles:
        yield from _role_faults(role)
        count = role.total // max(1, role.per_group)
        if role.collocation and counts.setdefault(role.collocation, count) != count:
            yield f"role {role.name}: collocated roles must have the same number of groups."


def accept(step: MasterStep, spec: JobSpec) -> JobRecord:
    """Take a job into the queue."""
    cluster = step.cluster
    sequence = cluster.next_sequence
    cluster.next_sequence += 1
    job = JobRecord(
        job_id=f"{spec.name}-{sequence}",
        sequence=sequence,
        submitted_at=step.now,
        spec=spec,
        version=cluster.first_number,
        roles={role.name: RoleRecord(name=role.name) for role in spec.roles},
    )
    for role in spec.roles:
        for rank in range(role.total):
            name = role.worker(rank)
            job.workers[name] = WorkerRecord(job_id=job.job_id, name=name, role=role.name, rank=rank)
    cluster.jobs[job.job_id] = job
    step.save("meta", "next_sequence", str(cluster.next_sequence).encode())
    step.save("spec", job.job_id, msgspec.msgpack.encode(spec))
    for worker in job.workers.values():
        step.touch_worker(job, worker)
    by = f" by {spec.submitted_by}" if spec.submitted_by else ""
    shape = ", ".join(f"{role.name}={role.total}" for role in spec.roles)
    step.decide("job-submitted", f"submitted{by}: {shape}", job)
    step.has_new_job = True
    return job


def advance(step: MasterStep, job: JobRecord) -> None:
    """Let the job take every step that its workers' states allow; failures have been judged before."""
    if job.stage is Stage.STOPPING:
        settle_stop(step, job)
        return
    if job.stage is Stage.STOPPED or not job.is_placed:
        return
    workers = [one for one in job.workers.values() if one.kind == "worker" and not job.is_absent(one)]
    if job.stage is Stage.INIT:
        is_ready = all(worker.has_ended_well or rendezvous.is_ready(worker) for worker in workers)
        if not is_ready or not rendezvous.is_store_ready(job):
            return
        job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.READY)
        step.decide("job-ready", f"{count(len(workers), 'worker')} answered", job)
    rendezvous.give_orders(step, job)
    if job.stage is Stage.READY:  # before the orders leave, so that an entry point that asks is told RUNNING
        job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.RUNNING)
        job.started_at = job.started_at or step.now
        step.decide("job-running", "all workers run", job)
    if job.stage is Stage.RUNNING and _is_done(job):
        begin_stop(step, job, 0, "done: every worker that the job waits for has finished")


def prune(step: MasterStep) -> None:
    """Forget the jobs that ended first; the one that ended last is always known."""
    cluster = step.cluster
    ended = [job for job in cluster.jobs.values() if job.stage is Stage.STOPPED]
    weight = 0
    for number, job in enumerate(sorted(ended, key=lambda job: (job.ended_at or 0.0, job.sequence), reverse=True)):
        blobs = (job.spec.user_config, *(role.config for role in job.spec.roles))
        description_kb = sum(len(blob.data) for blob in blobs) // 1024
        weight += len(job.workers) + len(cluster.events.get(job.job_id, ())) + description_kb
        if number == 0 or (number < MAX_ENDED and weight <= MAX_ENDED_WEIGHT):
            continue
        del cluster.jobs[job.job_id]
        cluster.events.pop(job.job_id, None)
        cluster.batched_at.pop(("news", job.job_id), None)
        cluster.batched_at.pop(("advance", job.job_id), None)
        step.forget(job)


def _is_done(job: JobRecord) -> bool:
    """Return True if nothing is left to do for the roles that the job waits for, nor to decide about them."""
    roles = job.driver_roles()
    is_decided = not any(rendezvous.missed(job, role) for role in roles)
    return is_decided and all(worker.is_done for role in roles for worker in job.members(role))


def _weight_faults(spec: JobSpec) -> Iterator[str]:
    """Yield what makes a job too heavy. Each node and each worker is sent all of the job, on the connection that also
    carries heartbeats.
    """
    if (total := len(msgspec.msgpack.encode(spec))) <= MAX_SPEC_BYTES:
        return
    parts = {"the job's config": len(spec.user_config.data)}
    for role in spec.roles:
        parts[f"the config of role {role.name}"] = len(role.config.data)
        parts[f"the environment of role {role.name}"] = sum(len(key) + len(value) for key, value in role.envs.items())
    heaviest = max(parts, key=lambda name: parts[name])
    yield (
        f"job {spec.name} has {total / 2**20:.1f} MiB of description, at most {MAX_SPEC_BYTES / 2**20:g} are allowed; "
        f"{heaviest} has {parts[heaviest] / 2**20:.1f} of them. Put large data into a file, and its path into the job."
    )


def _role_faults(role: RoleSpec) -> Iterator[str]:
    if not role.name or len(role.name) > 63 or not all(letter.isalnum() or letter in "._-" for letter in role.name):
        yield f"role name {role.name[:64]!r} is not allowed: at most 63 letters, digits and ._- only."
    if role.name.startswith("."):
        yield f"role name {role.name!r} must not begin with a dot."
    if role.total < 0 or role.per_group < 1:
        yield f"role {role.name}: total must be at least 0 and per_group at least 1."
    elif role.total % role.per_group:
        yield f"role {role.name}: total={role.total} cannot be cut into groups of {role.per_group}."
    is_of_range = role.kind == "elastic" and not role.collocation and role.num_groups == role.max_nodes
    if has_range(role) and not is_of_range:
        yield f"role {role.name}: a range of nodes is for an elastic role, not collocated, of so many workers in all."
    if role.restart_alone and role.kind == "elastic":
        yield f"role {role.name}: the ranks of an elastic role restart together, so restart_alone is not for it."
    needs = role.resources
    amounts = [needs.cpu, needs.memory_mb, needs.disk_mb, needs.accelerator, *needs.user_defined.values()]
    if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
        yield f"role {role.name}: an amount of a resource must be a number from 0 upwards."
    if min(role.max_restart, role.per_node_max_failure, role.role_max_restart or 0) < 0:
        yield f"role {role.name}: max_restart, role_max_restart and per_node_max_failure must not be negative."


def begin_stop(step: MasterStep, job: JobRecord, outcome: int, reason: str) -> None:
    """Decide the exit code and desire no worker any more."""
    job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.STOPPING)
    job.outcome = outcome
    job.restart_at = None
    step.cluster.timers.cancel(("restart", job.job_id))
    for role in job.roles.values():
        role.suspect = role.pending = ""
        step.cluster.timers.cancel(("settle", job.job_id, role.name))
    step.decide("job-stops", reason, job)
    for worker in job.workers.values():
        if worker.incarnation < 0:
            worker.reason = f"never started: {reason}"
            step.touch_worker(job, worker)
        elif worker.is_held or (worker.is_desired and worker.state not in (WorkerState.FINISHED, WorkerState.EXITED)):
            worker.reason = f"stopped with its job: {reason}"
        worker.is_held = False
        incarnations.end(step, job, worker)
        directory.publish(step, job, worker)


def fail(step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure, limit: str, why: str) -> None:
    """Stop a job because of a failure that nothing may repair; `limit` names what forbade it."""
    job.end = _end_report(worker, failure, limit)
    begin_stop(step, job, EXIT_FAILED, f"failed: {worker.name} on {worker.node}: {failure.summary.rstrip('.')}; {why}")


def cut_short(step: MasterStep, life: JobWorkerIncarnation, node: NodeRecord, failure: Failure) -> None:
    """Take in that a stop has cut short what a program does at its end: a job that went well so far did not."""
    job = step.cluster.jobs.get(life.job_id)
    worker = job.workers.get(life.worker) if job is not None else None
    if job is None or worker is None or life not in node.leaving:
        return
    text = f"incarnation {life.incarnation} on {node.name}: {failure.summary}"
    step.report("worker-failed", text, job, worker.role, worker.name, node.name)
    if job.stage is not Stage.STOPPING or job.outcome != 0 or worker.incarnation != life.incarnation:
        return
    job.outcome = EXIT_FAILED
    limit = f"stop_grace_s={job.spec.stop_grace_s:g}"
    job.end = _end_report(worker, failure, limit)
    why = f"{failure.summary.rstrip('.')}; {limit} is what a stop gives it"
    step.decide("job-failed", f"failed: {worker.name} on {node.name}: {why}", job)


def _end_report(worker: WorkerRecord, failure: Failure, limit: str) -> EndReport:
    return EndReport(
        worker=worker.name,
        incarnation=max(0, worker.incarnation),
        node=worker.node,
        failure=failure,
        limit=limit,
        log_file=worker.log_file,
    )


def settle_stop(step: MasterStep, job: JobRecord) -> None:
    """Move a STOPPING job to STOPPED when no incarnation of it is left."""
    if step.cluster.leaving_of(job.job_id) or _may_have_more(step, job):
        return
    for worker in job.workers.values():
        incarnations.release(step, job, worker)
    job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.STOPPED)
    job.exit_code = job.outcome
    job.ended_at = step.now
    step.wants_schedule = step.has_ended_job = True
    step.touch_job(job)
    step.report("job-stopped", f"exit code {job.exit_code}: {job.reason}", job)


def _may_have_more(step: MasterStep, job: JobRecord) -> bool:
    """Return True if a node that had workers of the job has yet to report: the master or the connection is new."""
    names = {worker.node for worker in job.workers.values()}
    names |= {past.node for worker in job.workers.values() for past in worker.past}
    nodes = (step.cluster.nodes.get(name) for name in names)
    return any(node is not None and node.state is NodeState.ALIVE and not node.has_reported for node in nodes)

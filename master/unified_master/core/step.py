"""The step context: the actions so far, and the records that the step touched and must save, send or look at again."""

from __future__ import annotations

from collections import deque

import msgspec

from unified.protocol.agent_master import MasterToAgent
from unified.protocol.client_master import MasterToClient
from unified.protocol.records import EventRecord, Stage
from unified_master.core import presence
from unified_master.core.changes import ChangedPart
from unified_master.core.messages import MasterAction, ReportEvent, SaveRecord, Send
from unified_master.core.state import MAX_EVENTS, Cluster, JobRecord, NodeRecord, TimerKey, WorkerRecord

BATCH_FROM = 64
"""Least number of nodes with which work is done in batches."""
BATCH_S = 0.05
LARGE_JOB = 256
"""Least number of workers with which a job of a large cluster is advanced in batches, too: more workers cost more."""


class MasterStep:
    """The results of one step, as the functions of this package add them. Dictionaries keep the order of touching."""

    def __init__(self, now: float, cluster: Cluster) -> None:
        self.now = now
        self.cluster = cluster
        self.actions: list[MasterAction] = []
        self.to_advance: dict[str, None] = {}
        self.to_send: dict[str, None] = {}
        self.wants_schedule = False
        """True if a waiting job may fit now."""
        self.has_new_job = self.has_ended_job = False
        self.first_version = cluster.changes.version
        """Version of what clients see, before this step."""
        self._jobs: dict[str, JobRecord] = {}
        self._workers: dict[tuple[str, str], WorkerRecord] = {}

    def save(self, kind: str, key: str, data: bytes | None) -> None:
        self.actions.append(SaveRecord(kind=kind, key=key, data=data))

    def send(self, peer: bytes, message: MasterToAgent | MasterToClient, request_id: int = 0) -> None:
        if peer:
            self.actions.append(Send(peer=peer, request_id=request_id, message=message))

    def touch_job(self, job: JobRecord) -> None:
        """Save a job whose record changed, show it, and see whether it can go on."""
        self._jobs[job.job_id] = job
        self.show_job(job)
        self.to_advance[job.job_id] = None

    def touch_worker(self, job: JobRecord, worker: WorkerRecord) -> None:
        """Save a worker whose record changed, show it, and see whether its job can go on."""
        self._workers[worker.place_key] = worker
        self.touch_progress(job, worker)
        self.to_advance[job.job_id] = None

    def save_worker(self, worker: WorkerRecord) -> None:
        """Save a worker after a change that clients do not see, and that does not advance the job."""
        self._workers[worker.place_key] = worker

    def forget(self, job: JobRecord) -> None:
        """Save nothing of a job any more, and delete what was saved."""
        self._jobs.pop(job.job_id, None)
        self.cluster.changes.remove(ChangedPart("job", job.job_id))
        self.save("spec", job.job_id, None)
        self.save("job", job.job_id, None)
        for worker in job.workers.values():
            self._workers.pop(worker.place_key, None)
            self.save("worker", f"{job.job_id}/{worker.name}", None)

    def touch_ending_jobs(self) -> None:
        """Advance the jobs that stop: their last incarnations may have ended."""
        for job in self.cluster.jobs.values():
            if job.stage is Stage.STOPPING:
                self.to_advance[job.job_id] = None

    def show_job(self, job: JobRecord) -> None:
        """Show clients a change of a job, without a save."""
        self.cluster.changes.touch(ChangedPart("job", job.job_id))

    def show_times(self, job: JobRecord) -> None:
        """Show clients a change of the account of a job's time."""
        self.cluster.changes.touch(ChangedPart("times", job.job_id))

    def touch_progress(self, job: JobRecord, worker: WorkerRecord) -> None:
        """Show clients a change of a worker, without a save."""
        if worker.kind == "worker":
            self.cluster.changes.touch(ChangedPart("worker", job.job_id, worker.name))

    def touch_node(self, name: str) -> None:
        """Send the node its desired set, which changed."""
        self.to_send[name] = None
        self.show_node(name)

    def show_node(self, name: str) -> None:
        if name in self.cluster.nodes:
            self.cluster.changes.touch(ChangedPart("node", "", name))

    def report(
        self, event: str, reason: str, job: JobRecord | None = None, role: str = "", worker: str = "", node: str = ""
    ) -> None:
        """Report a fact or a decision, for the log and for `unified explain`."""
        self.actions.append(ReportEvent(record=self.entry(event, reason, job, role, worker, node)))

    def entry(
        self, event: str, reason: str, job: JobRecord | None = None, role: str = "", worker: str = "", node: str = ""
    ) -> EventRecord:
        """Return the next entry of the event log, which the caller has to report."""
        record = EventRecord(
            at=self.now,
            event=event,
            reason=reason,
            job=job.job_id if job else "",
            role=role,
            worker=worker,
            node=node,
            sequence=self.cluster.next_event,
        )
        self.cluster.next_event += 1
        self.cluster.recent_events.append((self.cluster.changes.tick(), record))
        if job is not None:
            self.cluster.events.setdefault(job.job_id, deque(maxlen=MAX_EVENTS)).append(record)
        return record

    def decide(self, event: str, reason: str, job: JobRecord, role: str = "", worker: str = "", node: str = "") -> None:
        """Report a decision about a whole job or role, which is the job's reason from now on."""
        job.reason = reason
        self.touch_job(job)
        self.report(event, reason, job, role, worker, node)

    def flush_saves(self) -> None:
        for job in presence.follow(self.now, self.cluster.jobs, self._jobs.values(), self._workers.values()):
            self._jobs[job.job_id] = job
            self.show_times(job)
        for job in self._jobs.values():
            self.save("job", job.job_id, job.saved())
        for worker in self._workers.values():
            self.save("worker", f"{worker.job_id}/{worker.name}", msgspec.msgpack.encode(worker))

    def connected_node(self, name: str) -> NodeRecord | None:
        """Return the node, if its agent can be sent messages."""
        node = self.cluster.nodes.get(name)
        return node if node is not None and node.is_connected else None


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"


def may_run_now(step: MasterStep, key: TimerKey) -> bool:
    """Return True if work whose cost grows with the cluster may be done now; otherwise arm the timer `key` for it.

    The first request of a burst is served at once, so a single event has no delay; the others are served together.
    """
    cluster = step.cluster
    if len(cluster.nodes) < BATCH_FROM:
        return True
    last = cluster.batched_at.get(key)
    if last is not None and last <= step.now < last + BATCH_S:
        if key not in cluster.timers:
            cluster.timers.arm(key, last + BATCH_S)
        return False
    cluster.timers.cancel(key)
    cluster.batched_at[key] = step.now
    return True

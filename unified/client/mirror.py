"""The client's copy of the master's state, updated by changes, for all views of jobs, workers, nodes and events. The
mirror is pure; a watch sends the requests.
"""

from __future__ import annotations

from collections import deque

from msgspec import structs

from unified.client.connection import MasterConnection, PendingReply
from unified.errors import ProtocolError
from unified.protocol.client_master import Changes, JobStatus, NodeStatus, WatchCluster, WorkerStatus
from unified.protocol.columns import rows_of
from unified.protocol.records import EventRecord

MAX_EVENTS = 2000


class ClusterMirror:
    """The state of the cluster, or of one job, at one version of the master's state.

    Attributes:
        version: version of the state; -1 before the first answer.
        at: the master's clock when it sent that version, in seconds since 1970.
        problem: `Changes.problem` of the newest answer. It is then the reason of each job.
        jobs: jobs by id, without workers.
        nodes: nodes by name. Their `seen_s_ago` is as of their last change.
        events: the newest events of jobs and nodes, oldest first.
    """

    def __init__(self) -> None:
        self.version = -1
        self.at = 0.0
        self.problem = ""
        self.is_complete = False
        """True if no further part of the newest state is to be requested at once."""
        self.jobs: dict[str, JobStatus] = {}
        self.workers: dict[str, dict[str, WorkerStatus]] = {}
        """Workers by job and full name. Only their order is cached, in `_order`."""
        self.nodes: dict[str, NodeStatus] = {}
        self.events: deque[EventRecord] = deque(maxlen=MAX_EVENTS)
        self._order: dict[str, list[str]] = {}

    def apply(self, changes: Changes) -> None:
        """Apply changes. ValueError: they are not of this protocol."""
        if changes.is_whole:
            for known in (self.jobs, self.workers, self.nodes, self.events, self._order):
                known.clear()
        for job_id in changes.gone_jobs:
            for of_jobs in (self.jobs, self.workers, self._order):
                of_jobs.pop(job_id, None)
        for name in changes.gone_nodes:
            self.nodes.pop(name, None)
        self.jobs.update((job.job_id, job) for job in changes.jobs)
        self.nodes.update((node.node, node) for node in rows_of(changes.nodes, NodeStatus))
        for job_id, columns in changes.workers.items():
            workers = self.workers.setdefault(job_id, {})
            count = len(workers)
            workers.update((worker.name, worker) for worker in rows_of(columns, WorkerStatus))
            if len(workers) != count:
                self._order.pop(job_id, None)
        self.events.extend(changes.events)
        self.at, self.problem = changes.at, changes.problem
        if not self.problem:
            self.version, self.is_complete = changes.version, changes.is_last

    def status(self, job_id: str) -> JobStatus | None:
        """Return the status of a job with its workers, by role and rank; None: there is no such job."""
        job = self.jobs.get(job_id)
        if job is None:
            return None
        workers = self.workers.get(job_id, {})
        if (order := self._order.get(job_id)) is None:
            number = {role.name: index for index, role in enumerate(job.roles)}
            order = sorted(workers, key=lambda name: (number.get(workers[name].role, 0), workers[name].rank))
            self._order[job_id] = order
        return structs.replace(job, workers=[workers[name] for name in order], reason=self.problem or job.reason)


class ClusterWatch:
    """The client's side of a watch: requests changes, and keeps a mirror.

    Args:
        job_id: id of the job to watch, or a name for the newest job of that name; empty: the cluster.
        has_workers: False for jobs without their workers.
    """

    def __init__(self, connection: MasterConnection, job_id: str = "", *, has_workers: bool = True) -> None:
        self.mirror = ClusterMirror()
        self._connection = connection
        self._job_id = job_id
        self._has_workers = has_workers

    @property
    def version(self) -> int:
        """Version of the newest answer; -1 before the first."""
        return self.mirror.version

    def request(self, wait_s: float = 0.0) -> WatchCluster:
        after, is_with = self.mirror.version, self._has_workers
        return WatchCluster(job=self._job_id, after_version=after, wait_s=wait_s, has_workers=is_with)

    def take(self, reply: PendingReply) -> bool:
        """Apply the answer to a `request`. False: there is more, to be requested at once."""
        changes = self._connection.take(reply, Changes)
        self.mirror.apply(changes)
        if self._job_id and self._job_id not in self.mirror.jobs:  # it was the job's name
            self._job_id = next(iter(self.mirror.jobs), self._job_id)
        return self.mirror.is_complete

    def refresh(self, wait_s: float = 0.0, timeout_s: float | None = None) -> None:
        """Wait at most `wait_s` seconds for changes, and apply them. The first call does not wait.

        Raises:
            RefusedError: the master does not know the job.
            MasterUnreachableError: nobody answered in time.
        """
        is_last = False
        while not is_last:
            reply = self._connection.send(self.request(wait_s), timeout_s=timeout_s)
            is_last, wait_s = self.take(reply), 0.0


class JobWatch(ClusterWatch):
    @property
    def status(self) -> JobStatus:
        """The job's status as of the newest answer."""
        status = self.mirror.status(self._job_id)
        if status is None:  # the master would have refused the request
            raise ProtocolError(f"the master told nothing about job {self._job_id}.")
        return status

    def next_status(self, wait_s: float = 0.0) -> JobStatus:
        """Return the status after a `refresh`."""
        self.refresh(wait_s)
        return self.status

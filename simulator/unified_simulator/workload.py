"""Training jobs of a simulated cluster: a rank's death breaks its round and loses work since the last checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from unified.job.spec import EntryPoint, JobSpec, Resources, RoleSpec
from unified.protocol.client_master import Accepted, SubmitJob
from unified.protocol.records import Failure, JobWorkerIncarnation
from unified_simulator.agent import REJOINS, SimulatedAgent
from unified_simulator.cluster import SimulatedCluster

ROLE = "trainer"
MOST_RESTARTS = 1_000_000
COLLATERAL = Failure(summary="connection closed by peer", category="user", is_collateral=True)
NOTICE_S = 2.0
"""Longest time until a rank's collective breaks after the death of a peer."""


class TrainingJob(msgspec.Struct):
    """State of a job as its processes see it."""

    job_id: str
    num_nodes: int
    total: int
    left_s: float
    """Seconds of useful work still to do."""
    running: dict[JobWorkerIncarnation, SimulatedAgent] = {}
    useful_since: float | None = None
    """Time since which all ranks train; None: they do not."""
    broken_at: float | None = None
    """Time at which training stopped; None: it goes on, or never began."""
    period: int = 0
    """Number of starts of training."""


class Workload:
    """Keeps the cluster full of jobs of a few sizes: a new job follows each finished one.

    Args:
        sizes: numbers of nodes of the jobs, used in turn.
        work_s: mean seconds of useful work of a job.
        checkpoint_s: seconds between checkpoints; a restarted job goes on from the last one.
    """

    def __init__(
        self,
        cluster: SimulatedCluster[SimulatedAgent],
        rng: random.Random,
        *,
        per_node: int,
        sizes: Sequence[int],
        work_s: float,
        checkpoint_s: float,
        in_place: bool,
    ) -> None:
        self._cluster = cluster
        self._rng = rng
        self._per_node, self._sizes = per_node, sizes
        self._work_s, self._checkpoint_s, self._in_place = work_s, checkpoint_s, in_place
        self._num_submitted = 0
        self.jobs: dict[str, TrainingJob] = {}
        self.num_finished = 0
        self.useful_node_s = 0.0
        self.lost_node_s = 0.0
        self.waiting_node_s = 0.0
        """Node time between a break of training and its next start."""
        self.recoveries_s: list[float] = []

    def submit(self, num_nodes: int) -> None:
        """Submit jobs of all sizes in turn until they need `num_nodes` nodes."""
        while num_nodes > 0:
            size = self._sizes[self._num_submitted % len(self._sizes)]
            size = size if size <= num_nodes else num_nodes
            self.submit_one(size)
            num_nodes -= size

    def submit_one(self, size: int) -> None:
        self._num_submitted += 1
        total = size * self._per_node
        role = RoleSpec(
            name=ROLE,
            kind="elastic",
            entry_point=EntryPoint(kind="attribute", target=REJOINS if self._in_place else "train", attribute="main"),
            total=total,
            per_group=self._per_node,
            resources=Resources(accelerator=1),
            max_restart=MOST_RESTARTS,
            per_node_max_failure=MOST_RESTARTS,
        )
        spec = JobSpec(
            name=f"train{self._num_submitted}",
            roles=[role],
            node_num=size,
            device_per_node=self._per_node,
            job_max_restart=MOST_RESTARTS,
            node_max_restart=MOST_RESTARTS,
        )
        number = self._cluster.ask(SubmitJob(spec=spec))
        answer = self._cluster.answers.pop(number, None)
        if not isinstance(answer, Accepted):  # the master is down, or busy with its disk
            self._cluster.after(1.0, lambda: self._retry(number, size))
            return
        self._accepted(answer, size, total)

    def _retry(self, number: int, size: int) -> None:
        answer = self._cluster.answers.pop(number, None)
        if isinstance(answer, Accepted):
            self._accepted(answer, size, size * self._per_node)
        else:
            self.submit_one(size)

    def _accepted(self, answer: Accepted, size: int, total: int) -> None:
        work_s = self._work_s * self._rng.uniform(0.5, 1.5)
        self.jobs[answer.job_id] = TrainingJob(answer.job_id, num_nodes=size, total=total, left_s=work_s)

    # -- events of processes -----------------------------------------------------------------------------------------

    def began(self, agent: SimulatedAgent, incarnation: JobWorkerIncarnation) -> None:
        """Note that a rank runs its entry point, or a further round."""
        if incarnation.worker == "store" or (job := self.jobs.get(incarnation.job_id)) is None:
            return
        job.running[incarnation] = agent
        if len(job.running) == job.total and job.useful_since is None:
            now = self._cluster.now
            job.useful_since = now
            job.period += 1
            if job.broken_at is not None:
                self.recoveries_s.append(now - job.broken_at)
                self.waiting_node_s += (now - job.broken_at) * job.num_nodes
                job.broken_at = None
            period = job.period
            self._cluster.after(job.left_s, lambda: self._done(job, period))

    def ended(self, incarnation: JobWorkerIncarnation) -> None:
        """Note that a process is gone; each peer notices after a random time."""
        job = self.jobs.get(incarnation.job_id)
        if job is None or job.running.pop(incarnation, None) is None or job.useful_since is None:
            return
        now = self._cluster.now
        self._stop_clock(job)
        job.broken_at = now
        for peer, agent in job.running.items():
            self._cluster.after(self._rng.uniform(0.01, NOTICE_S), self._broken(job, peer, agent))
        if self._in_place:  # each is counted again when it joins the next round
            job.running.clear()

    def _broken(self, job: TrainingJob, incarnation: JobWorkerIncarnation, agent: SimulatedAgent) -> Callable[[], None]:
        period = job.period

        def fail() -> None:
            """Leave the round in place, or fail too, unless the agent ended the worker or a new round began."""
            is_there = self._cluster.agents.get(agent.node) is agent and incarnation in agent.incarnations
            if not is_there or job.period != period:
                return
            if not self._in_place:
                said = agent.end(incarnation.job_id, incarnation.worker, COLLATERAL)
            elif agent.incarnations[incarnation].left_round < agent.incarnations[incarnation].round:
                said = agent.leave_round(incarnation.job_id, incarnation.worker)
            else:
                return
            self._cluster.act(agent, lambda: said)

        return fail

    def _stop_clock(self, job: TrainingJob) -> None:
        """Count the useful time; work after the last checkpoint is lost."""
        assert job.useful_since is not None
        spent_s = self._cluster.now - job.useful_since
        kept_s = min(job.left_s, spent_s - spent_s % self._checkpoint_s)
        job.useful_since = None
        job.left_s -= kept_s
        self.useful_node_s += kept_s * job.num_nodes
        self.lost_node_s += (spent_s - kept_s) * job.num_nodes

    def _done(self, job: TrainingJob, period: int) -> None:
        """Let all ranks return, and submit a new job of this size."""
        if job.period != period or job.useful_since is None:
            return
        job.useful_since = None
        self.useful_node_s += job.left_s * job.num_nodes
        self.num_finished += 1
        del self.jobs[job.job_id]
        for one, agent in job.running.items():
            self._cluster.act(agent, lambda agent=agent, one=one: agent.finish(one.job_id, one.worker))  # type: ignore[misc]  # bound defaults
        self._cluster.after(5.0, lambda: self.submit_one(job.num_nodes))

    def stop_clocks(self) -> None:
        """Count the work since the last start of training as useful, at the end of the simulation."""
        for job in self.jobs.values():
            if job.useful_since is not None:
                self.useful_node_s += (self._cluster.now - job.useful_since) * job.num_nodes

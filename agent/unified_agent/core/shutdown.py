"""The agent's shutdown: workers move elsewhere, the rest are stopped, snapshots are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unified.job.spec import JobSpec
from unified.protocol.agent_master import DesiredJob
from unified_agent.core.membership import Membership, MembershipState
from unified_agent.core.messages import PersistHeld
from unified_agent.core.step import AgentStep, AgentTimer
from unified_agent.core.worker import LocalWorker

MARGIN_S = 2.0
"""Time for which the agent waits for the effect of its last SIGKILL."""

PERSIST_WITHIN_S = 10.0
"""Time for snapshots to be written to storage when the agent stops, if there is no job that sets another time."""

ANSWER_S = 3.0
"""Time within which a running master answers a heartbeat."""


class Shutdown:
    """The agent's shutdown: its reason, and how urgent it is."""

    def __init__(self, step: AgentStep, membership: Membership, vacate_s: float) -> None:
        self.reason = ""
        self.has_begun = False
        self.is_at_once = False
        self.has_snapshots = False
        """True if the snapshot server has snapshots to write to storage first."""
        self.is_persisting = False
        self._step = step
        self._membership = membership
        self._vacate_s = vacate_s
        self._vacates_from: float | None = None
        self._drains_at = 0.0

    @property
    def is_asked(self) -> bool:
        return self.has_begun or self.is_vacating

    @property
    def holds_ends(self) -> bool:
        """True while ends of workers are not reported to the master: their ranks would go on elsewhere, without the
        snapshots that are not on storage yet."""
        return self.is_asked and self.has_snapshots and not self.is_at_once

    @property
    def is_vacating(self) -> bool:
        """True while workers go on, and the master moves them elsewhere."""
        return self._vacates_from is not None and not self.has_begun

    def vacates(self, reason: str, workers: Iterable[LocalWorker], generation: int) -> bool:
        """Ask the master to move the workers elsewhere first; return False if there is no master, or no worker."""
        has_master = self._membership.state is MembershipState.REGISTERED
        if not has_master or all(worker.is_ended for worker in workers):
            return False
        self.reason, self._vacates_from = reason, self._step.now
        self._step.report("agent-vacates", f"{reason}; its workers have {self._vacate_s:g} s to move elsewhere")
        self._membership.stops(reason, self._step.now + self._vacate_s, generation)
        self._step.arm(AgentTimer("vacate"), min(ANSWER_S, self._vacate_s))
        return True

    def still_vacates(self) -> bool:
        """Return True if the workers have more time to move: the master knows of the stop, and time is left."""
        since = self._vacates_from
        if since is None or self.has_begun or not self._membership.was_answered_since(since):
            return False
        left_s = since + self._vacate_s - self._step.now
        if left_s > 0:
            self._step.arm(AgentTimer("vacate"), left_s)
        return left_s > 0

    def begin(
        self, reason: str, workers: Iterable[LocalWorker], jobs: Mapping[str, DesiredJob], *, at_once: bool
    ) -> None:
        """Begin to stop the workers that are left, or hasten their stop."""
        self.is_at_once = at_once
        self.reason = self.reason or reason
        self.has_begun = True
        self._step.timers.cancel(AgentTimer("vacate"))
        live = [worker for worker in workers if not worker.is_ended]
        longest_s = max((self.grace_s(worker, jobs.get(worker.job_id))[0] for worker in live), default=0.0)
        self._step.report("agent-stopping", f"{reason.rstrip('.')}; {len(live)} workers to stop")
        self._drains_at = self._step.now + longest_s + MARGIN_S
        self._step.timers.arm(AgentTimer("drain"), self._drains_at)
        for worker in live:
            if worker.is_stop_asked and not at_once:
                self.awaits(worker)

    def awaits(self, worker: LocalWorker) -> None:
        """Wait for a stopping worker until its kill time, which is later while it writes a checkpoint."""
        if self.has_begun and not self.is_persisting and worker.kill_at + MARGIN_S > self._drains_at:
            self._drains_at = worker.kill_at + MARGIN_S
            self._step.timers.arm(AgentTimer("drain"), self._drains_at)

    @property
    def what_is_late(self) -> str:
        """Part of a sentence that names what did not end in time."""
        what = "snapshots were written to storage" if self.is_persisting else "workers ended"
        return f"not all {what} in time"

    def grace_s(self, worker: LocalWorker, job: DesiredJob | None) -> tuple[float, float]:
        """Return the time that a worker of a job has to end, and the extra time for a save that is under way."""
        if self.is_at_once:
            return 0.0, 0.0
        if job is None or job.stop_grace_s is None:
            return worker.grace_s, worker.save_grace_s
        if self.has_begun and job.stop_grace_s > 0:  # that serves a fast restart of the job, not the agent's stop
            return worker.grace_s, worker.save_grace_s
        return job.stop_grace_s, 0.0

    def persists_first(self, specs: Iterable[JobSpec]) -> bool:
        """Start to write the snapshots of the ended workers to storage, if any; return True if the agent has to wait
        for that, so that no rank goes on elsewhere without them."""
        if not self.has_snapshots or self.is_at_once:
            return False
        if not self.is_persisting:
            self.is_persisting = True
            within_s = max((spec.stop_grace_s for spec in specs), default=PERSIST_WITHIN_S)
            self._step.report("snapshots-persisting", f"the agent stops; they have {within_s:g} s")
            self._step.act(PersistHeld())
            self._step.arm(AgentTimer("drain"), within_s)
        return True

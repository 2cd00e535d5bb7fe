"""The master's core: one entry, `step(now, event) -> actions`. It decides everything and touches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from unified.config.settings import Intervals
from unified.core.timers import earliest
from unified.protocol import agent_master
from unified.protocol.records import EventRecord
from unified_master.core import (
    agent_reports,
    budgets,
    client_requests,
    copy_nodes,
    desired,
    directory,
    job_queue,
    nodes,
)
from unified_master.core.clients import watching
from unified_master.core.health import hangs, stacks
from unified_master.core.messages import MasterAction, MasterEvent, MasterTick, Received, ReportEvent
from unified_master.core.restore import Record, restore
from unified_master.core.rounds import exclusion, jobs, next_round, recovery, restart
from unified_master.core.state import Cluster, JobRecord, TimerKey
from unified_master.core.step import LARGE_JOB, MasterStep, may_run_now


class MasterCore:
    """The core of the master: placement, rounds, restarts, leases, stages of jobs; pure and deterministic.

    Args:
        intervals: leases, heartbeats and deadlines, in seconds.
        relay: address of the bus relay, for agents; empty if there is none.
        id_suffix: end of the ids of this term's jobs. Numbers of jobs begin again at 1 with an empty store, and repeat
            with a restored one, so the suffix has to be one that no other term has.

    Each call takes the time: seconds since 1970, on a clock that never goes back while the master runs.
    """

    def __init__(self, intervals: Intervals, relay: str = "", id_suffix: str = "") -> None:
        self.cluster = Cluster(intervals, relay, id_suffix)

    @property
    def next_deadline(self) -> float | None:
        """Time at which `MasterTick` is due; None if nothing is awaited."""
        return earliest(self.cluster.timers.next_deadline, self.cluster.leases.next_check)

    def restore(
        self, now: float, records: Iterable[Record] = (), events: Iterable[EventRecord] = ()
    ) -> list[MasterAction]:
        """Begin a term, before the first step, with an earlier one's records; RestoreError: they are unreadable."""
        step = MasterStep(now, self.cluster)
        restore(step, records, events)
        return self._finish(step)

    def step(self, now: float, event: MasterEvent) -> list[MasterAction]:
        """Return the actions that an event leads to, maybe none. Every event is valid in every state."""
        step = MasterStep(now, self.cluster)
        match event:
            case Received():
                self._received(step, event)
            case MasterTick():
                self._time_passed(step, event)
            case _:
                assert_never(event)
        return self._finish(step)

    def remark(self, now: float, event: str, reason: str, job: str = "", worker: str = "") -> ReportEvent:
        """Return an entry for the event log about a decision made elsewhere in this process."""
        return ReportEvent(
            record=MasterStep(now, self.cluster).entry(event, reason, self.cluster.jobs.get(job), worker=worker)
        )

    def _received(self, step: MasterStep, event: Received) -> None:
        peer, number, message = event.peer, event.request_id, event.message
        match message:
            case agent_master.RegisterAgent():
                nodes.register(step, peer, number, message)
            case agent_master.AgentHeartbeat():
                nodes.heartbeat(step, peer, number, message)
            case agent_master.AgentPulse():
                nodes.pulse(step, peer, number, message)
            case agent_master.AgentDied():
                nodes.died(step, peer, number, message)
            case agent_master.ObservedWorkers():
                node = nodes.renew(step, message.node, message.incarnation)
                if node is None:
                    step.send(peer, agent_master.RegisterAgain(), number)
                else:
                    agent_reports.observe(step, node, message)
            case agent_master.LogRead():
                if nodes.renew(step, message.node, message.incarnation) is not None:
                    client_requests.log_read(step, number, message)
            case agent_master.OutputTails():
                if nodes.renew(step, message.node, message.incarnation) is not None:
                    agent_reports.keep_tails(step, message)
            case agent_master.StacksRead():
                if nodes.renew(step, message.node, message.incarnation) is not None:
                    hangs.diagnosed(step, stacks.take(step, number, message))
            case agent_master.AgentLeaving():
                nodes.leave(step, message)
            case _:
                answer = client_requests.answer(step, peer, number, message)
                if answer is not None:
                    step.send(peer, answer, number)

    def stop(self, now: float) -> list[MasterAction]:
        step = MasterStep(now, self.cluster)
        nodes.stop(step)
        return self._finish(step)

    def _time_passed(self, step: MasterStep, tick: MasterTick) -> None:
        late_s = max(0.0, step.now - (self.next_deadline or step.now))
        for name in [] if tick.is_behind else self.cluster.leases.expired(step.now):
            nodes.expire(step, name, late_s)
        for key in self.cluster.timers.due(step.now):
            self._timer_fired(step, key)

    def _timer_fired(self, step: MasterStep, key: TimerKey) -> None:
        match key[0]:
            case "watch":
                watching.overdue(step, key)
            case "read":
                client_requests.read_overdue(step, int(key[1]))
            case "stacks":
                hangs.diagnosed(step, stacks.overdue(step, int(key[1])))
            case "hang":
                hangs.look(step, key)
            case "forget":
                nodes.forget(step, key[1])
            case "start" | "join":
                agent_reports.overdue(step, key)
            case "schedule":
                step.wants_schedule = True
            case "advance":
                step.to_advance[key[1]] = None
            case _ if (job := self.cluster.jobs.get(key[1])) is not None:
                self._job_timer_fired(step, job, key)

    def _job_timer_fired(self, step: MasterStep, job: JobRecord, key: TimerKey) -> None:
        if job.is_ending:
            return
        match key[0]:
            case "settle":
                recovery.settle(step, job, key[2])
            case "restart":
                restart.begin_held(step, job, job.workers.values())
            case "refill":
                budgets.refill(step, job)
                exclusion.readmit(step, job)
            case "grow":
                next_round.growth_due(step, job, key[2])
            case "replace" | "change":
                step.touch_job(job)
            case "group":
                exclusion.group_overdue(step, job, key[2])
            case "queues":
                hangs.look_at_queues(step, job)

    def _finish(self, step: MasterStep) -> list[MasterAction]:
        """Advance and schedule until nothing more follows; then save, and only then send."""
        while step.to_advance or step.wants_schedule or step.has_new_job:
            for job_id in list(step.to_advance):
                del step.to_advance[job_id]
                job = self.cluster.jobs.get(job_id)
                if job is not None and (len(job.workers) < LARGE_JOB or may_run_now(step, ("advance", job_id))):
                    recovery.judge_pending(step, job)
                    next_round.gather(step, job)
                    jobs.advance(step, job)
                    copy_nodes.settle(step, job)
            if not step.to_advance:
                self.cluster.capacity_version += step.wants_schedule
                step.wants_schedule = step.has_new_job = False
                if may_run_now(step, ("schedule",)):
                    job_queue.schedule(step)
                    next_round.grow(step)
        if step.has_ended_job:
            jobs.prune(step)
        step.flush_saves()
        watching.settle(step)
        directory.flush(step)
        for name in sorted(step.to_send):
            if (node := self.cluster.nodes.get(name)) is not None:
                desired.send(step, node)
        return step.actions

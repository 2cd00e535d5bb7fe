"""The master's core: one entry, `step(now, event) -> actions`. It decides everything and touches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from unified.config.settings import Intervals
from unified.protocol.agent_master import (
    AgentLeaving,
    Heartbeat,
    LogRead,
    ObservedWorkers,
    RegisterAgain,
    RegisterAgent,
)
from unified.protocol.records import EventRecord
from unified_master.core import agent_reports, client_requests, desired, directory, jobs, nodes, recovery, restart
from unified_master.core.messages import MasterAction, MasterEvent, MasterTimePassed, Received, ReportEvent
from unified_master.core.restore import Record, restore
from unified_master.core.scheduling import job_queue
from unified_master.core.state import Cluster, TimerKey
from unified_master.core.step import Turn, may_pass


class MasterCore:
    """Placement, rounds, restarts, leases, lives of jobs: pure and deterministic.

    Args:
        intervals: leases, heartbeats and deadlines, in seconds.
        relay: address of the bus relay, for agents; empty if there is none.

    Time is seconds since 1970 on a clock that never goes back while the master lives; it is an argument of each call.
    """

    def __init__(self, intervals: Intervals, relay: str = "") -> None:
        self.relay = relay
        self.cluster = Cluster(intervals)
        self.cluster.relay = relay

    @property
    def next_deadline(self) -> float | None:
        """When `MasterTimePassed` is due; None if nothing is awaited."""
        deadlines = [self.cluster.timers.next_deadline, self.cluster.leases.next_check]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def restore(
        self, now: float, records: Iterable[Record] = (), events: Iterable[EventRecord] = ()
    ) -> list[MasterAction]:
        """Begin a reign, with what an earlier one saved. Call it once, before the first step.

        Raises:
            RestoreError: the records are not readable.
        """
        turn = Turn(now, self.cluster)
        restore(turn, records, events)
        return self._finish(turn)

    def step(self, now: float, event: MasterEvent) -> list[MasterAction]:
        """What to do about an event. Every event has an answer in every state, even if it is nothing."""
        turn = Turn(now, self.cluster)
        match event:
            case Received():
                self._received(turn, event)
            case MasterTimePassed():
                self._time_passed(turn)
            case _:
                assert_never(event)
        return self._finish(turn)

    def remark(self, now: float, event: str, reason: str, job: str = "", worker: str = "") -> ReportEvent:
        """An entry for the event log about what was decided elsewhere in this process."""
        return ReportEvent(
            record=Turn(now, self.cluster).entry(event, reason, self.cluster.jobs.get(job), worker=worker)
        )

    def _received(self, turn: Turn, event: Received) -> None:
        peer, number, message = event.peer, event.request_id, event.message
        match message:
            case RegisterAgent():
                nodes.register(turn, peer, number, message, self.relay)
            case Heartbeat():
                nodes.heartbeat(turn, peer, number, message)
            case ObservedWorkers():
                node = nodes.meet(turn, peer, message.node, message.incarnation)
                if node is None:
                    turn.send(peer, RegisterAgain(), number)
                else:
                    agent_reports.observe(turn, node, message)
            case LogRead():
                if nodes.meet(turn, peer, message.node, message.incarnation) is not None:
                    client_requests.log_read(turn, number, message)
            case AgentLeaving():
                nodes.leave(turn, peer, message)
            case _:
                answer = client_requests.answer(turn, peer, number, message)
                if answer is not None:
                    turn.send(peer, answer, number)

    def _time_passed(self, turn: Turn) -> None:
        due = self.next_deadline
        is_late = due is not None and turn.now - due > self.cluster.intervals.lease_s / 2
        for name in self.cluster.leases.expired(turn.now):
            nodes.expire(turn, name, is_late=is_late)
        for key in self.cluster.timers.due(turn.now):
            self._timer_fired(turn, key)

    def _timer_fired(self, turn: Turn, key: TimerKey) -> None:
        match key[0]:
            case "poll":
                client_requests.poll_overdue(turn, key)
            case "read":
                client_requests.read_overdue(turn, int(key[1]))
            case "forget":
                nodes.forget(turn, key[1])
            case "start":
                agent_reports.start_overdue(turn, key)
            case "schedule":
                turn.wants_schedule = True
            case "settle" | "restart" if (job := self.cluster.jobs.get(key[1])) is not None:
                if key[0] == "settle":
                    recovery.settle(turn, job, key[2])
                elif not job.is_ending:
                    restart.begin_held(turn, job)

    def _finish(self, turn: Turn) -> list[MasterAction]:
        """Follow the consequences to their end; then save, and only then send."""
        while turn.to_advance or turn.wants_schedule:
            for job_id in list(turn.to_advance):
                del turn.to_advance[job_id]
                if (job := self.cluster.jobs.get(job_id)) is not None:
                    recovery.judge_pending(turn, job)
                    jobs.advance(turn, job)
            if turn.wants_schedule and not turn.to_advance:
                turn.wants_schedule = False
                if may_pass(turn, ("schedule",)):
                    job_queue.schedule(turn)
                    jobs.prune(turn)
        for job in turn.flush_saves():
            client_requests.answer_polls(turn, job)
        directory.flush(turn)
        for name in sorted(turn.to_send):
            if (node := self.cluster.nodes.get(name)) is not None:
                desired.send(turn, node)
        return turn.actions

"""The agent's membership of the cluster: unknown to its master, registered, or not heard of lately."""

from __future__ import annotations

from enum import StrEnum

from unified.config.logging import LogOnce
from unified.config.settings import Intervals
from unified.protocol.agent_master import AgentHeartbeat, AgentRefused, AgentRegistered, RegisterAgent
from unified.protocol.records import TransitionTable
from unified.protocol.snapshots import SnapshotHost
from unified_agent.core.lease import NodeLease, request_id_at, request_time
from unified_agent.core.messages import Exit, Reconnect
from unified_agent.core.step import AgentStep, AgentTimer
from unified_agent.environment import NodeFacts

EX_CONFIG = 78
"""Exit code, of sysexits.h, of an agent that would end the same way after a restart."""
COMPLAIN_EVERY_S = 30.0
"""Period at which an agent that cannot reach its master says so."""


class MembershipState(StrEnum):
    UNKNOWN = "UNKNOWN"
    """Not registered, or no longer registered; the agent keeps asking."""
    REGISTERED = "REGISTERED"
    SILENT = "SILENT"
    """Registered, but the master has said nothing for a third of the lease. The workers stay until the lease ends."""
    REFUSED = "REFUSED"


MEMBERSHIP_MOVES = TransitionTable(
    "agent",
    {
        MembershipState.UNKNOWN: (MembershipState.REGISTERED, MembershipState.REFUSED),
        MembershipState.REGISTERED: (MembershipState.SILENT, MembershipState.UNKNOWN, MembershipState.REFUSED),
        MembershipState.SILENT: (MembershipState.REGISTERED, MembershipState.UNKNOWN, MembershipState.REFUSED),
        MembershipState.REFUSED: (),
    },
)


class Membership:
    """Registers, renews the lease, notices silence."""

    def __init__(
        self,
        step: AgentStep,
        facts: NodeFacts,
        intervals: Intervals,
        give_up_s: float | None,
        leave_after_s: float | None,
    ) -> None:
        self.state = MembershipState.UNKNOWN
        self.relay = ""
        self._step = step
        self._facts = facts
        self._terms = NodeLease(intervals.lease_s, intervals.heartbeat_s)
        """The lease's length, as the master last told it."""
        self._connect_s = intervals.connect_s
        self._give_up_s = leave_after_s if give_up_s is None else give_up_s
        self._leave_after_s = leave_after_s
        self._heard_at = 0.0
        self._answered_at = 0.0
        self._kept_until = 0.0
        """End of the longer lease that a master gave when it stopped in order."""
        self._cut_off = ""
        self._stops = ""
        self._stops_at = 0.0
        self._unanswered_since: float | None = None
        self.snapshots: SnapshotHost | None = None
        """Address and token secret of the snapshot server, for the master; None until they are known."""
        self.metrics = ""
        """``host:port`` of this agent's metrics; empty: it has none."""
        self._was_ever_registered = False
        self._is_locked_out = False
        self._lock_outs = LogOnce()
        self._reconnect_at = 0.0
        step.timers.arm(AgentTimer("register"), 0.0)

    @property
    def is_registered(self) -> bool:
        return self.state in (MembershipState.REGISTERED, MembershipState.SILENT)

    @property
    def is_cut_off(self) -> bool:
        """True from the end of a lease until the master registers the agent again."""
        return bool(self._cut_off)

    def lease(self, now: float) -> NodeLease:
        return self._terms._replace(
            lease_s=self._terms.lease_s if self._answered_at else 0.0,
            answered_at=max(self._answered_at, self._kept_until - self._terms.lease_s),
            turned_at=now,
            is_locked_out=float(self._is_locked_out),
        )

    def keep(self, away_s: float, generation: int) -> None:
        """Keep the workers for `away_s` without a master, which stops in order; answer it by a heartbeat."""
        self._kept_until = self._step.now + away_s
        text = f"the master stops in order; the workers stay for {away_s:g} s, even if its host is gone"
        self._step.report("master-stopping", text)
        self.beat(generation)

    def stops(self, reason: str, at: float, generation: int) -> None:
        """Tell the master, with every heartbeat, when the agent stops, so that the workers move elsewhere first."""
        self._stops, self._stops_at = reason, at
        self.beat(generation)

    def was_answered_since(self, time: float) -> bool:
        """Return True if the master has answered a heartbeat of this time or later."""
        return self._answered_at >= request_time(request_id_at(time))

    def answered(self, request_id: int) -> None:
        """Take in that the master has renewed the lease, in answer to this request."""
        self._answered_at = max(self._answered_at, min(self._step.now, request_time(request_id)))

    def cut_off(self, reason: str) -> None:
        """Take in the end of the lease: the agent registers again, as one without workers."""
        self._cut_off = reason
        if self.is_registered:
            self.register()

    def reached(self, generation: int) -> None:
        """Use a new connection at once: messages that were sent without a connection are lost."""
        if self.is_registered:
            self.beat(generation)
        elif self.state is MembershipState.UNKNOWN:
            self.register()

    def heard(self) -> bool:
        """Note that the master said something; return True if it had been silent."""
        was_silent = self.state is MembershipState.SILENT
        self._heard_at = self._step.now
        self._unanswered_since = None
        self._is_locked_out = False
        self._step.timers.cancel(AgentTimer("reconnect"))
        self._step.timers.cancel(AgentTimer("complain"))
        if was_silent:
            self._move(MembershipState.REGISTERED)
            self._step.report("master-back", f"the master at {self._facts.master} answers again")
        return was_silent

    def register(self) -> None:
        """Ask to be registered, and again until there is an answer."""
        self._move(MembershipState.UNKNOWN)
        facts = self._facts
        self._step.send(
            RegisterAgent(
                node=facts.node,
                incarnation=facts.incarnation,
                hostname=facts.hostname,
                host_id=facts.host_id,
                address=facts.address,
                pid=facts.pid,
                resources=facts.resources,
                labels=facts.labels,
                log_dir=facts.log_dir,
                log_archive=facts.log_archive,
                cut_off=self._cut_off,
                snapshots=self.snapshots,
                metrics=self.metrics,
            ),
            request_id_at(self._step.now),
        )
        self._await_answer()
        self._step.arm(AgentTimer("register"), self._terms.heartbeat_s)

    def accept(self, terms: AgentRegistered) -> bool:
        """Take in that the agent is registered, on these terms; return True if it was not before."""
        is_new = not self.is_registered
        self._was_ever_registered = True
        self._cut_off = ""
        self._kept_until = 0.0
        self._terms, self.relay = NodeLease(terms.lease_s, terms.heartbeat_s), terms.relay
        if is_new:
            self._lock_outs = LogOnce()
            self._move(MembershipState.REGISTERED)
            self._step.timers.cancel(AgentTimer("register"))
            self._step.arm(AgentTimer("heartbeat"), self._terms.heartbeat_s)
            self._step.report("registered", f"registered with the master at {self._facts.master}")
        return is_new

    def refuse(self, message: AgentRefused) -> None:
        if message.retry_after_s is None:
            self.end(message.reason, EX_CONFIG)
            return
        self._move(MembershipState.UNKNOWN)
        text = f"{message.reason}; asks again in {message.retry_after_s:g} s"
        self._step.report("refused", text, level="warning")
        self._step.arm(AgentTimer("register"), message.retry_after_s)

    def end(self, reason: str, code: int = 1) -> None:
        """End the agent, because it cannot join this cluster."""
        self._move(MembershipState.REFUSED)
        self._step.act(Exit(code=code, reason=reason))

    def lock_out(self, event: str, reason: str, *, may_pass: bool = False) -> None:
        """Handle a master with another key, or one that cannot be read. An agent that was never registered ends. Other
        agents go on, and the lease keeper ends their workers in time, because this master does not renew the lease.
        """
        if not self._was_ever_registered:
            self.end(reason, 1 if may_pass else EX_CONFIG)
            return
        self._is_locked_out = True
        if self._lock_outs.is_new(self._step.now, reason):
            text = f"{reason} The agent tries again; the workers end with this node's lease."
            self._step.report(event, text, level="error")
        self._step.arm(AgentTimer("reconnect"), self._terms.lease_s)

    def register_due(self) -> None:
        if self.state is not MembershipState.UNKNOWN:
            return
        if not self._gives_up():
            self.register()

    def _gives_up(self) -> bool:
        """End the agent if its master has been silent for too long; return True in this case."""
        limit_s = self._leave_after_s if self._was_ever_registered else self._give_up_s
        if limit_s is None or self._waited_s < limit_s:
            return False
        self.end(f"cannot reach the master at {self._facts.master}: no answer for {self._waited_s:.0f} s.")
        return True

    def complain_due(self) -> None:
        if self._unanswered_since is not None:
            text = f"cannot reach the master at {self._facts.master}: no answer for {self._waited_s:.0f} s"
            self._step.report("master-unreachable", f"{text}; keeps trying", level="warning")
            self._step.arm(AgentTimer("complain"), COMPLAIN_EVERY_S)

    def heartbeat_due(self, generation: int) -> None:
        if not self.is_registered:
            return
        self._step.arm(AgentTimer("heartbeat"), self._terms.heartbeat_s)
        self.beat(generation)
        silent_s = self._step.now - self._heard_at
        if self.state is MembershipState.REGISTERED and self._terms.is_in_doubt(silent_s):
            self._move(MembershipState.SILENT)
            text = f"the master at {self._facts.master} has said nothing for {silent_s:.1f} s"
            self._step.report("master-silent", text, level="warning")
            self._await_answer()
            self._reconnect_at = self._step.now
        if self.state is MembershipState.SILENT and not self._gives_up() and self._step.now >= self._reconnect_at:
            self._reconnect_at = self._step.now + self._terms.reconnect_s
            self._step.act(Reconnect())

    def beat(self, generation: int) -> None:
        """Renew the lease."""
        facts, now = self._facts, self._step.now
        message = AgentHeartbeat(
            node=facts.node,
            incarnation=facts.incarnation,
            generation=generation,
            stops=self._stops,
            stops_in_s=max(0.0, self._stops_at - now) if self._stops else 0.0,
        )
        self._step.send(message, request_id_at(now))

    @property
    def _waited_s(self) -> float:
        return 0.0 if self._unanswered_since is None else self._step.now - self._unanswered_since

    def _await_answer(self) -> None:
        if self._unanswered_since is None:
            self._unanswered_since = self._step.now
            self._step.arm(AgentTimer("complain"), self._connect_s)

    def _move(self, state: MembershipState) -> None:
        if state is not self.state:
            self.state = MEMBERSHIP_MOVES.check(self._facts.node, self.state, state)

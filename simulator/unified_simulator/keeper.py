"""Lease keepers of simulated agents: the real core, with its own connection to the master.

A keeper goes on while its agent is stopped, and after its agent has died; it ends with its host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from unified.protocol.agent_master import AgentDied, AgentPulse, AgentToMaster
from unified_agent.core.lease import LATE_HEARTBEATS, NodeLease, request_id_at
from unified_agent.core.lease_keeping import Contact, KeeperAction, Kill, LeaseKeeping, Probe, Renew, TellAgent
from unified_master.core.messages import Received
from unified_simulator.node import SimulatedNode

PROBE_S = 3.0
"""Timeout of an attempt to connect."""
DEATH_S = 5.0
"""Time for which a keeper tries to report its agent's death to the master."""
DEATH_EVERY_S = 0.2


class KeptCluster(Protocol):
    """The cluster around a keeper."""

    now: float
    cut: set[str]
    is_down: bool

    def after(self, seconds: float, what: Callable[[], None]) -> None: ...
    def hear_keeper(self, node: str, event: Received) -> None: ...
    def lose_lease(self, node: str, reason: str) -> None: ...
    def kill_agent(self, node: str, *, with_host: bool) -> None: ...
    def wake(self, node: str) -> None: ...


class SimulatedKeeper:
    """The keeper of one agent. It checks the agent's lease when the last answer to a heartbeat is late."""

    def __init__(self, cluster: KeptCluster, agent: SimulatedNode) -> None:
        self._cluster = cluster
        self._agent = agent
        self._core = LeaseKeeping()
        self.node = agent.node
        self.peer = f"{agent.node}/keeper-{agent.incarnation}".encode()
        self.stopped_at: float | None = None
        """Time at which its agent was stopped by a signal; None: the agent runs."""
        self.is_over = False
        """True if its host is gone."""
        self.is_resting = False
        """True if heartbeats of its agent are left out, and count as answered."""
        self._is_agent_dead = self._is_looking = False
        self._is_death_known = False

    def wake(self) -> None:
        """Check the lease from now on."""
        self.is_resting = False
        if not self._is_looking:
            self._is_looking = True
            self._cluster.after(0.0, self._look)

    def answered(self, request_id: int) -> None:
        self._core.answered(request_id)
        self._is_death_known = self._is_agent_dead

    def tell_death(self) -> None:
        """Tell the master that the agent has died, until it answers."""
        self._is_agent_dead = True
        self._say_dead(self._cluster.now + DEATH_S)

    def _say_dead(self, until: float) -> None:
        if not self.is_over and not self._is_death_known and self._cluster.now < until:
            reason = "its agent (pid 1) ended"
            self._say(AgentDied(node=self.node, incarnation=self._agent.incarnation, reason=reason))
            self._cluster.after(DEATH_EVERY_S, lambda: self._say_dead(until))

    def _say(self, message: AgentToMaster, request_id: int | None = None) -> None:
        number = request_id_at(self._cluster.now) if request_id is None else request_id
        self._cluster.hear_keeper(self.node, Received(peer=self.peer, request_id=number, message=message))

    def _look(self) -> None:
        if self.is_over or self._is_agent_dead or self.is_resting:
            self._is_looking = False
            return
        now = self._cluster.now
        lease = self._agent.lease(now if self.stopped_at is None else self.stopped_at)
        for action in self._core.step(now, lease):
            self._perform(action, lease)
        late_at = lease.answered_at + LATE_HEARTBEATS * lease.heartbeat_s
        self._cluster.after(max(self._core.next_look_s(lease), late_at - now), self._look)

    def _perform(self, action: KeeperAction, lease: NodeLease) -> None:
        match action:
            case Renew(request_id=number):
                self._say(AgentPulse(node=self.node, incarnation=self._agent.incarnation), number)
            case Probe():
                self._probe(min(PROBE_S, lease.lease_s / 5))
            case TellAgent(reason=reason):
                self._cluster.lose_lease(self.node, reason)
            case Kill(who="workers"):
                self._agent.kill_processes()
                self._cluster.wake(self.node)
            case Kill():
                self._cluster.kill_agent(self.node, with_host=False)

    def _probe(self, within_s: float) -> None:
        """Try to connect to the master's port: the answer comes at once, or the attempt times out."""
        if self.node in self._cluster.cut:
            self._cluster.after(within_s, lambda: self._core.contact(self._cluster.now, Contact.NONE))
        else:
            self._core.contact(self._cluster.now, Contact.REFUSED if self._cluster.is_down else Contact.ACCEPTED)

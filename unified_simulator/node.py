"""Interface of agents in a simulated cluster: the real core of one, or a stand-in."""

from __future__ import annotations

from typing import Protocol

from unified.protocol.agent_master import AgentToMaster, MasterToAgent
from unified_agent.core.lease import NodeLease

Said = tuple[int, AgentToMaster]
"""Request id and message."""


class SimulatedNode(Protocol):
    """One incarnation of an agent, as the cluster drives it; what it says is sent to the master."""

    node: str
    incarnation: str

    @property
    def next_deadline(self) -> float | None:
        """Time of the next `tick`."""

    @property
    def is_quiet(self) -> bool:
        """True if it would only send heartbeats, were it left alone."""

    def rouse(self, now: float) -> None:
        """Take it for granted that the heartbeats until now were sent and answered."""

    def begin(self, now: float) -> list[Said]: ...
    def reached(self, now: float) -> list[Said]: ...
    def receive(self, now: float, request_id: int, message: MasterToAgent) -> list[Said]: ...
    def tick(self, now: float) -> list[Said]: ...

    def lease(self, turned_at: float) -> NodeLease:
        """Return the lease as the agent last knew it, the loop of which last turned at this time."""

    def lose_lease(self, reason: str) -> list[Said]:
        """Take in that the lease keeper says that the lease ends."""

    def kill_processes(self) -> None:
        """Kill every process, as the lease keeper does; the agent sees their ends when it can."""

    def die(self) -> None:
        """Lose every process at once, with the agent."""

"""Interface of agents in a simulated cluster: a real core, or a stand-in."""

from __future__ import annotations

from typing import Protocol

from unified.protocol.agent_master import AgentToMaster, MasterToAgent
from unified_agent.core.lease import NodeLease

Said = tuple[int, AgentToMaster]
"""Request id and message."""


class SimulatedNode(Protocol):
    """One incarnation of an agent, as the cluster drives it; the cluster sends the returned messages to the master."""

    node: str
    incarnation: str

    @property
    def next_deadline(self) -> float | None:
        """Time of the next `tick`."""

    @property
    def is_quiet(self) -> bool:
        """True if the agent would only send heartbeats without further events."""

    def rouse(self, now: float) -> None:
        """Continue as if all heartbeats until now had been sent and answered."""

    def begin(self, now: float) -> list[Said]: ...
    def reached(self, now: float) -> list[Said]: ...
    def receive(self, now: float, request_id: int, message: MasterToAgent) -> list[Said]: ...
    def tick(self, now: float) -> list[Said]: ...

    def lease(self, turned_at: float) -> NodeLease:
        """Return the lease as the agent knew it at `turned_at`, the last turn of its loop."""

    def lose_lease(self, reason: str) -> list[Said]:
        """Handle the lease keeper's message that the lease ends."""

    def cannot_read(self, reason: str) -> list[Said]:
        """Handle an answer of the master that the agent cannot read."""

    def kill_processes(self) -> None:
        """Kill every process, as the lease keeper does; the agent sees their ends when it can."""

    def die(self) -> None:
        """Lose every process at once, with the agent."""

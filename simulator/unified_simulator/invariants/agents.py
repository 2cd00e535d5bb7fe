"""Invariants of one agent's state, and of the processes of all agents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unified.protocol.records import JobWorkerIncarnation, WorkerState
from unified.protocol.worker_agent import Launch
from unified_agent.core.agent import AgentCore
from unified_agent.core.membership import MembershipState
from unified_agent.core.step import AgentTimer
from unified_master.core.node_capacity import EPSILON, share_of

_DEADLINES = {WorkerState.STARTING: "start", WorkerState.STOPPING: "kill"}
"""Timer that ends each state; without it a worker could stay in the state for ever."""


def check_agent(core: AgentCore) -> list[str]:
    """Return the broken invariants of an agent."""
    broken: list[str] = []
    timers = {kind: {timer.incarnation for timer in core.timers if timer.kind == kind} for kind in _DEADLINES.values()}
    living: set[tuple[str, str]] = set()
    for incarnation, worker in core.workers.items():
        if worker.incarnation != incarnation:
            broken.append(f"{worker.incarnation} is kept under {incarnation}.")
        state = worker.state
        if state is WorkerState.EXITED:
            if any(incarnation in armed for armed in timers.values()):
                broken.append(f"{incarnation} has EXITED and a deadline is armed for it.")
            continue
        if incarnation[:2] in living:
            broken.append(f"{incarnation.job_id}/{incarnation.worker} has more than one running incarnation.")
        living.add(incarnation[:2])
        if state in _DEADLINES and incarnation not in timers[_DEADLINES[state]] and not worker.is_killed:
            broken.append(f"{incarnation} is {state} without a deadline.")
        if state is WorkerState.STARTING and worker.kind == "worker" and core.shutdown.has_begun:
            broken.append(f"{incarnation} is STARTING while the agent stops.")
    broken += [f"{why}, and nothing is armed for it." for why in _unarmed(core)]
    return broken


def _unarmed(core: AgentCore) -> Iterator[str]:
    """Yield the states in which the agent waits without a timer."""
    state = core.membership.state
    if state is MembershipState.UNKNOWN and not core.shutdown.has_begun and AgentTimer("register") not in core.timers:
        yield "it is not registered"
    if core.membership.is_registered and AgentTimer("heartbeat") not in core.timers:
        yield "it is registered"


def check_devices(node: str, launches: Iterable[Launch]) -> list[str]:
    """Return a message for each device of a node that its processes, over all jobs, use beyond its capacity."""
    shares: dict[int, float] = {}
    for launch in launches:
        if launch.kind == "worker":
            need = launch.spec.role(launch.role).resources.accelerator
            for device in launch.devices:
                shares[device.index] = shares.get(device.index, 0.0) + share_of(need)
    return [f"{node}: {used:g} of device {index} is in use" for index, used in shares.items() if used > 1 + EPSILON]


class RunningRanks:
    """The workers that run their entry point on all nodes, also on nodes that the master considers lost."""

    def __init__(self) -> None:
        self._locations: dict[tuple[str, str], tuple[str, JobWorkerIncarnation]] = {}

    def note(self, node: str, incarnation: JobWorkerIncarnation, is_running: bool) -> None:
        """Note that a process begins to run or is gone; AssertionError if another incarnation still runs."""
        key, place = (incarnation.job_id, incarnation.worker), (node, incarnation)
        known = self._locations.get(key)
        if not is_running:
            if known == place:
                del self._locations[key]
            return
        assert known in (None, place), f"{incarnation} begins to run on {node} while {known[1]} runs on {known[0]}"
        self._locations[key] = place

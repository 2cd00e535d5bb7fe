"""Invariants of an agent's state, which tests check after every step."""

from collections import Counter

from unified.protocol.records import WorkerState
from unified_agent.core.agent import AgentCore
from unified_agent.core.step import AgentTimer


def check(core: AgentCore) -> list[str]:
    broken: list[str] = []
    live = [worker for worker in core.workers.values() if not worker.is_ended]
    for (job_id, name), count in Counter((worker.job_id, worker.name) for worker in live).items():
        if count > 1:
            broken.append(f"{job_id}/{name} lives {count} times.")
    for life, worker in core.workers.items():
        if worker.life != life:
            broken.append(f"{worker.life} is kept under {life}.")
        starts, kills = AgentTimer("start", life) in core.timers, AgentTimer("kill", life) in core.timers
        for state, is_armed in ((WorkerState.STARTING, starts), (WorkerState.STOPPING, kills)):
            if worker.state is state and not is_armed and not worker.is_killed:
                broken.append(f"{life} is {state} without a deadline.")
        if worker.is_ended and (starts or kills):
            broken.append(f"{life} has EXITED and a deadline is armed for it.")
    if core.shutdown.has_begun and any(worker.state is WorkerState.STARTING for worker in live):
        broken.append("a worker is STARTING while the agent stops.")
    if core.membership.is_registered and AgentTimer("heartbeat") not in core.timers:
        broken.append("registered, but no heartbeat is armed.")
    return broken

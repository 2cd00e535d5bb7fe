"""A simulated cluster with what tests ask of it."""

from typing import TypeVar

from tests.support.sim.sim_agent import SimAgent
from unified.protocol.client_master import ClientToMaster, MasterAnswer
from unified.protocol.records import Stage
from unified_master.core.state import JobRecord
from unified_simulator.agent import SimulatedAgent
from unified_simulator.cluster import SimulatedCluster

A = TypeVar("A")


class World(SimulatedCluster[SimAgent | SimulatedAgent]):
    """Questions of a client with their answers, and the things of the cluster by name."""

    def answer(self, number: int) -> MasterAnswer | None:
        return self.answers.get(number)

    def request(self, request: ClientToMaster) -> MasterAnswer:
        """Ask, and wait for the answer."""
        number = self.ask(request)
        self.until(lambda: number in self.answers, f"an answer to {type(request).__name__}")
        return self.answers[number]

    def get(self, kind: type[A], request: ClientToMaster) -> A:
        """Ask, and wait for the answer, which must be of this kind."""
        answer = self.request(request)
        assert isinstance(answer, kind), answer
        return answer

    def sim_agent(self, node: str) -> SimAgent:
        agent = self.agents[node]
        assert isinstance(agent, SimAgent)
        return agent

    def job(self, name: str) -> JobRecord:
        found = [job for job in self.core.cluster.jobs.values() if name in (job.job_id, job.spec.name)]
        return max(found, key=lambda job: job.sequence)

    def until_stage(self, name: str, stage: Stage) -> None:
        self.until(lambda: self.job(name).stage is stage, f"{name} to be {stage}")

"""One job on simulated agents whose workers fail as told: what the tests of the master's recovery share."""

from typing import Any

from tests.support.sim.sim_agent import REJOINS, SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import EntryPoint, JobSpec, Resources, RoleSpec
from unified.protocol.client_master import SubmitJob
from unified.protocol.records import DirectoryEntry, Failure, Stage, WorkerState
from unified_master.core.state import JobRecord, WorkerRecord

CRASH = Failure(summary="killed by SIGKILL", category="crash", signal=9)
USER = Failure(summary="ValueError: boom", category="user", exception_type="ValueError")
COLLATERAL = Failure(summary="connection closed", category="user", is_collateral=True)
SETUP = Failure(summary="no run()", category="setup")


class Bench:
    """One job, whose workers fail as told."""

    def __init__(
        self,
        *roles: RoleSpec,
        nodes: int = 1,
        devices: int = 8,
        labels: Any = (),
        **options: Any,
    ) -> None:
        """`labels`: a dict for each node, if they have any."""
        self.world = World()
        options.setdefault("node_num", nodes)
        for number in range(1, nodes + 1):
            label = labels[number - 1] if labels else None
            self.world.add(SimAgent(f"n{number}", resources(devices=devices), labels=label))
        self.world.run(0.1)
        self.world.ask(SubmitJob(spec=JobSpec(name="job", roles=list(roles), **options)))
        self.running()
        self.world.run(2.0)

    @property
    def job(self) -> JobRecord:
        return self.world.job("job")

    def worker(self, role: str, rank: int = 0) -> WorkerRecord:
        return self.job.ranks(role)[rank]

    @property
    def store(self) -> WorkerRecord:
        assert self.job.store is not None
        return self.job.store

    def entry(self, role: str = "s", rank: int = 0) -> DirectoryEntry:
        entry = self.worker(role, rank).entry
        assert entry is not None
        return entry

    def incarnations(self) -> dict[str, int]:
        return {f"{one.role}-{one.rank}": one.incarnation for one in self.job.workers.values() if one.kind == "worker"}

    def end(self, role: str, rank: int, failure: Failure | None) -> None:
        self.end_worker(self.worker(role, rank), failure)

    def agent(self, node: str = "n1") -> SimAgent:
        return self.world.sim_agent(node)

    def end_worker(self, worker: WorkerRecord, failure: Failure | None) -> None:
        self.world.say(worker.node, self.agent(worker.node).end("job-1", worker.name, failure))
        self.world.run(0.002)

    def restart(self, role: str, rank: int, failure: Failure | None, settle_s: float = 0.0) -> None:
        """End a worker, and run until all run again and for so long after that."""
        self.end(role, rank, failure)
        self.running()
        if settle_s:
            self.world.run(settle_s)

    def finish(self, role: str, rank: int = 0, state: WorkerState = WorkerState.FINISHED) -> None:
        worker = self.worker(role, rank)
        self.world.say(worker.node, self.agent(worker.node).finish("job-1", worker.name, state))
        self.world.run(0.002)

    def serve(self, role: str, rank: int = 0) -> None:
        """Have a worker say that its role is a service."""
        self.finish(role, rank, WorkerState.SERVING)

    def running(self) -> None:
        self.world.until(lambda: all_run(self.job), "all workers to run")

    def stopped(self) -> JobRecord:
        self.world.until_stage("job", Stage.STOPPED)
        return self.job

    def limit(self) -> str:
        job = self.stopped()
        assert job.exit_code == 1
        assert job.end is not None
        return job.end.limit


def all_run(job: JobRecord) -> bool:
    workers = [worker for worker in job.workers.values() if worker.kind == "worker" and not job.is_absent(worker)]
    return all(worker.state in (WorkerState.RUNNING, WorkerState.SERVING, WorkerState.FINISHED) for worker in workers)


ENTRY = EntryPoint(kind="attribute", target="m", attribute="f")
LOOP = EntryPoint(kind="attribute", target=REJOINS, attribute="f")


def simple(name: str = "s", total: int = 1, **more: Any) -> RoleSpec:
    return RoleSpec(name=name, kind="simple", entry_point=ENTRY, total=total, **more)


def elastic(
    name: str = "e", total: int = 2, accelerator: float = 0, entry_point: EntryPoint = ENTRY, **more: Any
) -> RoleSpec:
    needs = Resources(accelerator=accelerator)
    return RoleSpec(name=name, kind="elastic", entry_point=entry_point, total=total, resources=needs, **more)


def rejoining(name: str = "e", total: int = 3, **more: Any) -> RoleSpec:
    """An elastic role whose workers take part in round after round."""
    return elastic(name, total, entry_point=LOOP, **more)


def ranged(low: int, high: int, per_group: int = 1, *, rejoins: bool = True, **more: Any) -> RoleSpec:
    """A role `e` that runs on any number of nodes within a range."""
    entry_point = LOOP if rejoins else ENTRY
    total = high * per_group
    return elastic("e", total, entry_point=entry_point, per_group=per_group, min_nodes=low, max_nodes=high, **more)

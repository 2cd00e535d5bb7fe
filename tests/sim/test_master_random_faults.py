"""The master under seeded random faults: its invariants hold after every step, all ends well when the faults end,
and what it saved is all that it knew.
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.support.invariants.master import check
from tests.support.master import COLLATERAL, CRASH, ENTRY, SETUP, USER, simple
from tests.support.sim.real_agent import RealAgent
from tests.support.sim.sim_agent import Delays, SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import JobSpec, Resources, RoleSpec
from unified.protocol.client_master import GetJob, ReadLog, RestartWorkers, StopJob, SubmitJob
from unified.protocol.records import DirectoryEntry, Stage, WorkerState
from unified_master.core.master import MasterCore
from unified_master.core.state import JobRecord, WorkerRecord

NODES = [f"n{number}" for number in range(1, 6)]
FAILURES = [CRASH, USER, COLLATERAL, SETUP]


class Chaos:
    """Does one random thing after another to a world."""

    def __init__(self, seed: int, *, is_real: bool = False) -> None:
        self.is_real = is_real
        self.rng = random.Random(seed)
        self.world = World(seed=seed)
        self.lives = 0
        self.jobs = 0
        for node in NODES:
            self.start(node)
        self.deeds: list[tuple[int, Callable[[], None]]] = [
            (6, self.submit),
            (10, self.end_worker),
            (14, self.finish_worker),
            (6, self.progress),
            (8, self.claim),
            (3, self.poll),
            (3, self.read),
            (2, self.stop),
            (2, self.restart),
            (2, self.kill_agent),
            (4, self.start_missing),
            (2, self.cut),
            (5, self.heal),
            (1, self.world.restart_master),
        ]

    def run(self, num_deeds: int) -> None:
        weights = [weight for weight, _ in self.deeds]
        for _ in range(num_deeds):
            self.rng.choices(self.deeds, weights)[0][1]()
            self.world.run(self.rng.choice((0.0, 0.02, 0.1, 0.5, 2.0, 7.0)))

    def start(self, node: str) -> None:
        self.lives += 1
        delays = Delays(start=self.rng.uniform(0.01, 0.3), run=0.01, stop=self.rng.uniform(0.01, 3))
        offered, incarnation = resources(devices=4, MR=2), str(self.lives)
        agent = (
            RealAgent(node, offered, lambda: self.world.now, incarnation=incarnation, delays=delays)
            if self.is_real
            else SimAgent(node, offered, incarnation=incarnation, delays=delays)
        )
        agent.is_stuck = self.rng.random() < 0.2
        self.world.add(agent)

    def start_missing(self) -> None:
        for node in NODES:
            if node not in self.world.agents:
                self.start(node)
                return

    def kill_agent(self) -> None:
        if self.world.agents:
            self.world.kill_agent(self.rng.choice(sorted(self.world.agents)))

    def cut(self) -> None:
        self.world.cut.add(self.rng.choice(NODES))

    def heal(self) -> None:
        self.world.cut.clear()

    def submit(self) -> None:
        rng = self.rng
        self.jobs += 1
        roles = [self.role(f"r{number}") for number in range(rng.randint(1, 3))]
        spec = JobSpec(
            name=f"job{self.jobs % 9}",
            roles=roles,
            device_per_node=rng.choice((2, 4)),
            failover_exec=rng.choice((0, 1, 2)),
            failover_trigger=rng.choice((0, 1, 1, 2, 2, 2)),
            node_num=rng.choice((1, 2, 9)),
            job_max_restart=rng.choice((0, 2, 10)),
            node_max_restart=rng.choice((0, 2, 10)),
            worker_isolation_resource=rng.choice(("", "", "MR")),
            master_isolation_resource=rng.choice(("", "", "MR")),
            master_cpu=rng.choice((0, 0, 1)),
            stop_grace_s=rng.choice((0.0, 1.0, 5.0)),
        )
        self.world.ask(SubmitJob(spec=spec, wait=rng.random() < 0.9))

    def role(self, name: str) -> RoleSpec:
        rng = self.rng
        per_group = rng.choice((1, 1, 2))
        kind: Any = rng.choice(("simple", "elastic"))
        return RoleSpec(
            name=name,
            kind=kind,
            restart_alone=kind == "simple" and rng.random() < 0.5,
            entry_point=ENTRY,
            total=per_group * rng.choice((0, 1, 2, 3)),
            per_group=per_group,
            resources=Resources(accelerator=rng.choice((0, 0.5, 1, 2)), cpu=rng.choice((0, 1))),
            is_driver=rng.random() < 0.7,
            max_restart=rng.choice((0, 1, 5)),
            per_node_max_failure=rng.choice((0, 1, 3)),
        )

    def living(self) -> list[tuple[JobRecord, WorkerRecord, SimAgent | RealAgent]]:
        """Workers of which an agent runs a life."""
        found = []
        for job in self.world.core.cluster.jobs.values():
            for worker in job.workers.values():
                agent = self.world.agents.get(worker.node)
                if worker.is_desired and agent is not None and worker.life in agent.lives:
                    found.append((job, worker, agent))
        return found

    def end_worker(self) -> None:
        if living := self.living():
            job, worker, agent = self.rng.choice(living)
            failure = self.rng.choices([*FAILURES, None], (5, 3, 3, 1, 1))[0]
            self.world.say(agent.node, agent.end(job.job_id, worker.name, failure))

    def finish_worker(self) -> None:
        if living := self.living():
            job, worker, agent = self.rng.choice(living)
            self.world.say(agent.node, agent.finish(job.job_id, worker.name))

    def progress(self) -> None:
        if living := self.living():
            job, worker, agent = self.rng.choice(living)
            self.world.say(agent.node, agent.report_progress(job.job_id, worker.name, self.rng.randrange(1000)))

    def claim(self) -> None:
        """Several workers of a job want the same few names, at about the same time."""
        living = self.living()
        for job, worker, agent in self.rng.sample(living, min(len(living), 4)):
            names = [name for name in "xyz" if self.rng.random() < 0.5]
            self.world.say(agent.node, agent.claim(job.job_id, worker.name, names))

    def check_names(self) -> None:
        """In calm weather every claim has its answer, and every agent has heard who holds what."""
        self.world.run(15.0)
        for job, worker, agent in self.living():
            process = agent.lives[worker.life]
            if not job.can_call(worker):
                continue
            answers = {**worker.names, **{name: one.number for name, one in worker.refused.items()}}
            assert answers == process.claims.names, f"{worker.life} claims, and the master knows otherwise"
            if isinstance(agent, RealAgent) and job.stage is not Stage.INIT:
                known = {entry.worker: _fact(entry) for entry in agent.directory(job.job_id)}
                true = {one.name: _fact(one.entry) for one in job.workers.values() if one.entry is not None}
                assert known == true, f"{agent.node} has missed news of {job.job_id}"

    def a_job(self) -> str:
        return f"job{self.rng.randrange(9)}"

    def stop(self) -> None:
        self.world.ask(StopJob(job=self.a_job(), force=self.rng.random() < 0.5))

    def restart(self) -> None:
        self.world.ask(RestartWorkers(job=self.a_job(), workers=self.rng.choice(([], ["r0-0"]))))

    def poll(self) -> None:
        job = self.a_job()
        known = [one.version for one in self.world.core.cluster.jobs.values() if one.spec.name == job]
        self.world.ask(GetJob(job=job, after_version=max(known, default=0), wait_s=self.rng.choice((0.0, 1.0, 30.0))))

    def read(self) -> None:
        self.world.ask(ReadLog(job=self.a_job(), worker="r0-0"))

    def calm(self) -> None:
        """No more faults; every agent is there."""
        self.heal()
        while len(self.world.agents) < len(NODES):
            self.start_missing()
        self.world.run(60.0)

    def finish_all(self) -> None:
        for _ in range(400):
            for job, worker, agent in self.living():
                if worker.state is WorkerState.RUNNING:
                    self.world.say(agent.node, agent.finish(job.job_id, worker.name))
            self.world.run(1.0)
            if all(job.stage is Stage.STOPPED for job in self.world.core.cluster.jobs.values()):
                return
            for job in list(self.world.core.cluster.jobs.values()):
                if job.is_waiting:  # larger than the cluster, or excluded everywhere
                    self.world.ask(StopJob(job=job.job_id))


@pytest.mark.parametrize("is_real", [False, True], ids=["stand-in", "real-agents"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_invariants_hold_and_all_jobs_end(seed: int, is_real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:  # work in batches, as in a large cluster
        monkeypatch.setattr("unified_master.core.step.BATCH_FROM", 1)
    chaos = Chaos(seed, is_real=is_real)
    chaos.run(220)
    chaos.calm()
    chaos.check_names()
    for _ in range(20):
        chaos.claim()
    chaos.check_names()
    chaos.finish_all()
    cluster = chaos.world.core.cluster
    stuck = [
        f"{job.job_id} {job.stage}: {job.reason}" for job in cluster.jobs.values() if job.stage is not Stage.STOPPED
    ]
    assert not stuck, f"seed {seed}: {stuck}\n{chaos.world.recent()}"
    assert all(job.exit_code in (0, 1, 130) for job in cluster.jobs.values())
    assert all((job.end is not None) == (job.exit_code == 1) for job in cluster.jobs.values())
    chaos.world.run(400.0)
    for node in cluster.nodes.values():
        held = (node.incarnations, node.allocations, node.leaving)
        assert held == ({}, {}, {}), f"seed {seed}: {node.name} holds something"
        assert chaos.world.agents[node.name].lives == {}, f"seed {seed}: {node.name} still runs something"
    assert (cluster.polls, cluster.reads) == ({}, {})
    assert [job.job_id for job in cluster.jobs.values() if job.holders] == []
    answered = [request for request, _ in chaos.world.answers]
    assert len(answered) == len(set(answered)), "a request was answered twice"


@pytest.mark.parametrize("is_real", [False, True], ids=["stand-in", "real-agents"])
@pytest.mark.parametrize("seed", range(20))
def test_of_many_that_claim_a_name_at_once_one_gets_it(seed: int, is_real: bool) -> None:
    """On slow and quick connections, while the master is killed, and again when the holder has died."""
    chaos = Chaos(seed, is_real=is_real)
    chaos.world.run(1.0)
    spec = JobSpec(name="contest", roles=[simple("r", 9)], failover_exec=2, stop_grace_s=0)
    chaos.world.ask(SubmitJob(spec=spec))
    for _ in range(4):
        chaos.world.until_stage("contest", Stage.RUNNING)
        chaos.world.run(10.0)
        claimants = chaos.living()
        assert len(claimants) == 9
        chaos.rng.shuffle(claimants)
        for number, (job, worker, agent) in enumerate(claimants):
            chaos.world.say(agent.node, agent.claim(job.job_id, worker.name, ["x"]))
            chaos.world.run(chaos.rng.choice((0.0, 0.0, 0.001)))
            if number == 4 and seed % 2:
                chaos.world.restart_master()
        chaos.check_names()
        job = chaos.world.job("contest")
        refused = [worker.name for worker in job.workers.values() if "x" in worker.refused]
        assert sorted([*refused, job.holders["x"]]) == sorted(job.workers)
        for job, worker, agent in chaos.living():
            if worker.name == job.holders["x"]:
                chaos.world.say(agent.node, agent.end(job.job_id, worker.name, FAILURES[0]))
            else:
                chaos.world.say(agent.node, agent.claim(job.job_id, worker.name, []))


@pytest.mark.parametrize("seed", range(100, 103))
def test_a_restored_master_knows_what_the_old_one_knew(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(25):
        chaos.run(5)
        old = chaos.world.core.cluster
        core = MasterCore(chaos.world.intervals)
        records = [(kind, key, data) for (kind, key), data in chaos.world.stored.items()]
        core.restore(chaos.world.now, records, chaos.world.log)
        new = core.cluster
        assert check(new) == []
        assert new.term == old.term + 1
        assert new.next_sequence == old.next_sequence
        assert {name: node.state for name, node in new.nodes.items()} == {n: o.state for n, o in old.nodes.items()}
        assert list(new.jobs) == list(old.jobs)
        for job_id, job in new.jobs.items():
            assert job.spec == old.jobs[job_id].spec
            assert job.holders == old.jobs[job_id].holders
            if job.is_waiting:  # says now that no node has come back yet
                job.reason = old.jobs[job_id].reason
            assert job.saved() == old.jobs[job_id].saved()
            known = {name: _lasting(worker) for name, worker in old.jobs[job_id].workers.items()}
            assert {name: _lasting(worker) for name, worker in job.workers.items()} == known
            assert [name for name in job.workers if name != "store"] == [name for name in known if name != "store"]
            story = list(old.events.get(job_id, ()))
            assert list(new.events.get(job_id, ()))[: len(story)] == story


def _fact(entry: DirectoryEntry) -> DirectoryEntry:
    """Why a life ended an agent and the master may say in different words."""
    return msgspec.structs.replace(entry, reason="")


def _lasting(worker: WorkerRecord) -> WorkerRecord:
    """Progress is not kept: it comes again with the next report."""
    return msgspec.structs.replace(worker, progress=None)

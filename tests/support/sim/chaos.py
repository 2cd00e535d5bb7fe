"""Random jobs and random faults, one after another, for a simulated cluster of five nodes."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from tests.support.master import COLLATERAL, CRASH, ENTRY, LOOP, SETUP, USER
from tests.support.sim.sim_agent import SimAgent
from tests.support.sim.world import World
from unified.job.spec import JobSpec, Resources, RoleSpec, has_range
from unified.protocol.client_master import (
    DrainNode,
    ReadLog,
    RestartWorkers,
    ResumeJob,
    StopJob,
    SubmitJob,
    SuspendJob,
    WatchCluster,
)
from unified.protocol.records import DirectoryEntry, JobWorkerIncarnation, Stage, WorkerState
from unified.protocol.snapshots import SnapshotHost
from unified_master.core.state import JobRecord, WorkerRecord
from unified_simulator.agent import Delays, SimulatedAgent, SimulatedProcess, resources
from unified_simulator.cluster import Watch
from unified_simulator.invariants.agents import RunningRanks, check_devices
from unified_simulator.invariants.master import check_charges
from unified_simulator.network import SLOW_AND_QUICK, NetworkOptions
from unified_simulator.snapshots import SimulatedSnapshots

NODES = [f"n{number}" for number in range(1, 6)]
NUM_DEEDS = 100
FAILURES = [CRASH, USER, COLLATERAL, SETUP]
Living = tuple[JobRecord, WorkerRecord, SimAgent | SimulatedAgent]


class Chaos:
    """Does one random thing after another to a world.

    Args:
        is_real: agents have their real core.
        has_all_faults: not only nodes die or are cut off and the master is killed: connections break, packets are lost,
            agents stand still or leave, the disk is slow, the master dies between a decision and its sending, and peers
            fail along.
    """

    def __init__(
        self, seed: int, *, is_real: bool = False, has_all_faults: bool = False, watch: Watch | None = None
    ) -> None:
        self.is_real = is_real
        self.rng = random.Random(seed)
        loss = self.rng.choice((0.0, 0.01, 0.1)) if has_all_faults else 0.0
        self.world = World(
            seed=seed, network=NetworkOptions(SLOW_AND_QUICK.delays_s, loss), watch=watch, check_all_every=20
        )
        self.running = RunningRanks()
        self.faults: Counter[str] = Counter()
        """Faults that may be charged, by job."""
        self.snapshots = SimulatedSnapshots(self.world.agents, self.world.cut)
        self.incarnations = 0
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
            (2, self.leave_round),
            (2, self.stop),
            (2, self.restart),
            (2, self.kill_agent),
            (4, self.start_missing),
            (2, self.cut),
            (5, self.heal),
            (1, self.world.restart_master),
        ]
        if has_all_faults:
            self.deeds += [
                (3, self.break_connection),
                (2, self.freeze),
                (1, self.leave),
                (2, self.crash_master),
                (1, self.make_unreadable),
                (1, self.world.lose_state),
                (2, self.slow_disk),
                (4, self.fail_together),
                (2, self.drain),
                (3, self.undrain),
                (2, self.suspend),
                (4, self.resume),
            ]
        if has_all_faults and is_real:
            self.deeds += [(25, self.take_snapshots), (3, self.kill_zygote), (3, self.die_unseen)]

    def run(self, num_deeds: int) -> None:
        weights = [weight for weight, _ in self.deeds]
        for _ in range(num_deeds):
            deed = self.rng.choices(self.deeds, weights)[0][1]
            self.world.watch(self.world.now, "fault", deed.__name__.replace("_", " "))
            deed()
            self.world.run(self.rng.choice((0.0, 0.02, 0.1, 0.5, 2.0, 7.0)))
            self.check_processes()

    # -- nodes and the network ---------------------------------------------------------------------------------------

    def start(self, node: str) -> None:
        self.incarnations += 1
        delays = Delays(start=self.rng.uniform(0.01, 0.3), run=0.01, stop=self.rng.uniform(0.01, 3))
        offered, incarnation = resources(devices=4, MR=2), str(self.incarnations)
        labels = {"rack": "a" if node in NODES[:3] else "b"}
        agent = (
            SimulatedAgent(
                node,
                offered,
                lambda: self.world.now,
                incarnation=incarnation,
                delays=delays,
                labels=labels,
                on_process=lambda agent, incarnation, is_running: self.running.note(
                    agent.node, incarnation, is_running
                ),
            )
            if self.is_real
            else SimAgent(node, offered, incarnation=incarnation, delays=delays, labels=labels)
        )
        if isinstance(agent, SimulatedAgent):
            agent.faults = self.faults
            agent.serve_snapshots(SnapshotHost(f"tcp://{node}", incarnation.encode()))
        agent.is_stuck = self.rng.random() < 0.2
        self.world.unreadable.discard(node)  # an agent that never registered would end
        self.world.add(agent)

    def start_missing(self) -> None:
        for node in NODES:
            if node not in self.world.agents:
                self.start(node)
                return

    def kill_agent(self) -> None:
        """A host is lost, or only the agent's process, the keeper of which tells the master."""
        if self.world.agents:
            self.world.kill_agent(self.rng.choice(sorted(self.world.agents)), with_host=self.rng.random() < 0.5)

    def drain(self) -> None:
        self.world.ask(DrainNode(node=self.rng.choice(NODES)))

    def undrain(self) -> None:
        for node in NODES:
            self.world.ask(DrainNode(node=node, is_over=True))

    def leave(self) -> None:
        """An agent is asked to end, and is gone a while later."""
        if self.world.agents:
            node = self.rng.choice(sorted(self.world.agents))
            agent = self.world.agents[node]
            self.world.say(node, agent.leave())
            self.world.after(10.0, lambda: self._gone(node, agent))

    def _gone(self, node: str, agent: SimAgent | SimulatedAgent) -> None:
        if self.world.agents.get(node) is agent:
            self.world.kill_agent(node)

    def cut(self) -> None:
        self.world.cut.add(self.rng.choice(NODES))

    def make_unreadable(self) -> None:
        node = self.rng.choice(NODES)
        if node in self.world.agents:
            self.world.make_unreadable(node)

    def heal(self) -> None:
        """The way is free again; TCP has given up the connections."""
        for node in sorted(self.world.cut | self.world.unreadable):
            self.world.heal(node)

    def break_connection(self) -> None:
        self.world.break_connection(self.rng.choice(NODES))

    def freeze(self) -> None:
        node = self.rng.choice(NODES)
        if node in self.world.agents:
            self.world.freeze_agent(node)
            self.world.after(self.rng.choice((0.5, 3.0, 8.0, 20.0, 40.0)), lambda: self.world.thaw_agent(node))

    # -- the master --------------------------------------------------------------------------------------------------

    def crash_master(self) -> None:
        """The next decision is lost with the master, or only what was to be sent of it."""
        self.world.crash_at = self.rng.choice(("before-save", "before-send"))
        self.world.down_s = self.rng.choice((0.01, 0.5, 3.0, 20.0))

    def slow_disk(self) -> None:
        seconds = self.rng.choice((0.0, 0.0, 0.05, 1.0, 4.0))
        self.world.disk_s = lambda: seconds

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        rng = self.rng
        self.jobs += 1
        roles = [self.role(f"r{number}") for number in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            roles = [self.range_of_nodes("r0")]
        spec = JobSpec(
            name=f"job{self.jobs % 9}",
            roles=roles,
            device_per_node=rng.choice((2, 4)),
            failover_exec=rng.choice((0, 1, 2)),
            failover_trigger=rng.choice((0, 1, 1, 2, 2, 2)),
            node_num=9 if any(map(has_range, roles)) else rng.choice((1, 2, 9)),
            job_max_restart=rng.choice((0, 2, 10)),
            node_max_restart=rng.choice((0, 2, 10)),
            worker_isolation_resource=rng.choice(("", "", "MR")),
            master_isolation_resource=rng.choice(("", "", "MR")),
            master_cpu=rng.choice((0, 0, 1)),
            stop_grace_s=rng.choice((0.0, 1.0, 5.0)),
            restart_window_s=rng.choice((0.0, 0.0, 5.0, 50.0)),
        )
        self.world.ask(SubmitJob(spec=spec, wait=rng.random() < 0.9))

    def role(self, name: str) -> RoleSpec:
        rng = self.rng
        per_group = rng.choice((1, 1, 2))
        kind: Any = rng.choice(("simple", "elastic"))
        groups = rng.choice((0, 1, 2, 3))
        is_range = kind == "elastic" and groups > 1 and rng.random() < 0.5
        return RoleSpec(
            name=name,
            kind=kind,
            restart_alone=kind == "simple" and rng.random() < 0.5,
            entry_point=rng.choice((ENTRY, LOOP)),
            total=per_group * groups,
            per_group=per_group,
            min_nodes=rng.randint(1, groups - 1) if is_range else None,
            max_nodes=groups if is_range else None,
            resources=Resources(accelerator=rng.choice((0, 0.5, 1, 2)), cpu=rng.choice((0, 1))),
            is_driver=rng.random() < 0.7,
            max_restart=rng.choice((0, 1, 5)),
            per_node_max_failure=rng.choice((0, 1, 3)),
            failover_label=rng.choice((None, "rack")),
            failover_timeout_s=rng.choice((0.5, 5.0)),
        )

    def range_of_nodes(self, name: str) -> RoleSpec:
        """Return a role that takes what nodes there are, and outlives most failures."""
        rng = self.rng
        groups, per_group = rng.choice((3, 4, 5)), rng.choice((1, 2))
        return RoleSpec(
            name=name,
            kind="elastic",
            entry_point=rng.choice((ENTRY, LOOP)),
            total=per_group * groups,
            per_group=per_group,
            min_nodes=rng.randint(1, 2),
            max_nodes=groups,
            resources=Resources(accelerator=rng.choice((1, 2))),
            max_restart=20,
            per_node_max_failure=20,
        )

    def living(self) -> list[Living]:
        """Workers of which an agent runs an incarnation."""
        found = []
        for job in self.world.core.cluster.jobs.values():
            for worker in job.workers.values():
                agent = self.world.agents.get(worker.node)
                if worker.is_desired and agent is not None and worker.incarnation_id in agent.incarnations:
                    found.append((job, worker, agent))
        return found

    def end_worker(self) -> None:
        if living := self.living():
            job, worker, agent = self.rng.choice(living)
            failure = self.rng.choices([*FAILURES, None], (5, 3, 3, 1, 1))[0]
            self.world.say(agent.node, agent.end(job.job_id, worker.name, failure))

    def fail_together(self) -> None:
        """One rank of a role dies, and its peers at times that nobody controls."""
        if living := self.living():
            job, worker, agent = self.rng.choice(living)
            is_elastic = worker.kind == "worker" and job.spec.role(worker.role).kind == "elastic"
            broken = self.round_of(worker.incarnation_id, agent) if is_elastic else 0
            for peer_job, peer, its_agent in living:
                if peer_job is job and peer.role == worker.role and peer is not worker:
                    self.world.after(
                        self.rng.choice((0.0, 0.01, 0.3, 2.0)), self._failing(peer.incarnation_id, its_agent, broken)
                    )
            self.world.say(agent.node, agent.end(job.job_id, worker.name, CRASH))

    def _failing(
        self, incarnation: JobWorkerIncarnation, agent: SimAgent | SimulatedAgent, broken: int
    ) -> Callable[[], None]:
        def fail() -> None:
            if self.world.agents.get(agent.node) is agent and incarnation in agent.incarnations:
                is_along = broken > 0 and self.round_of(incarnation, agent) == broken
                self.faults[incarnation.job_id] -= is_along
                self.world.say(agent.node, agent.end(incarnation.job_id, incarnation.worker, COLLATERAL))

        return fail

    def round_of(self, incarnation: JobWorkerIncarnation, agent: SimAgent | SimulatedAgent) -> int:
        """Return the round in which a process runs; 0 if it is in none."""
        process = agent.incarnations[incarnation]
        return process.round if isinstance(process, SimulatedProcess) and process.is_running else 0

    def kill_zygote(self) -> None:
        """The processes of a node end together, and their agent sees the ends one after another."""
        if self.world.agents:
            agent = self.world.agents[self.rng.choice(sorted(self.world.agents))]
            assert isinstance(agent, SimulatedAgent)
            self.world.say(agent.node, agent.kill_zygote(lambda: self.rng.choice((0.0, 0.001, 0.01, 0.1))))

    def die_unseen(self) -> None:
        """A rank dies, its peers leave the round at once, and the agent of the dead rank sees its end last."""
        found = [(worker, agent) for _, worker, agent in self.living() if worker.rejoins and not worker.is_joining]
        if not found:
            return
        victim, agent = self.rng.choice(found)
        assert isinstance(agent, SimulatedAgent)
        agent.kill(victim.incarnation_id, self.rng.choice((0.1, 0.8, 2.0, 10.0)))
        self.world.wake(agent.node)
        for peer, its_agent in found:
            if (peer.job_id, peer.role) == (victim.job_id, victim.role) and peer is not victim:
                self.faults[peer.job_id] -= 1
                self.world.say(its_agent.node, its_agent.leave_round(peer.job_id, peer.name))

    def finish_worker(self) -> None:
        if living := self.living():
            job, worker, agent = self.rng.choice(living)
            self.world.say(agent.node, agent.finish(job.job_id, worker.name))

    def leave_round(self) -> None:
        """A collective fails, and the one that hears of it may be the only one."""
        if living := self.living():
            job, worker, agent = self.rng.choice(living)
            if worker.rejoins:
                self.world.say(agent.node, agent.leave_round(job.job_id, worker.name))

    def progress(self) -> None:
        if living := self.living():
            job, worker, agent = self.rng.choice(living)
            self.world.say(agent.node, agent.report_progress(job.job_id, worker.name, self.rng.randrange(1000)))

    def take_snapshots(self) -> None:
        """All ranks of a round take a snapshot, or only some of them."""
        if rounds := self.snapshots.rounds():
            role, places = self.rng.choice(rounds)
            self.snapshots.advance(role, places, is_whole=self.rng.random() < 0.8)

    def claim(self) -> None:
        """Several workers of a job want the same few names, at about the same time."""
        living = self.living()
        for job, worker, agent in self.rng.sample(living, min(len(living), 4)):
            names = [name for name in "xyz" if self.rng.random() < 0.5]
            self.world.say(agent.node, agent.claim(job.job_id, worker.name, names))

    def a_job(self) -> str:
        return f"job{self.rng.randrange(9)}"

    def stop(self) -> None:
        self.world.ask(StopJob(job=self.a_job(), force=self.rng.random() < 0.5))

    def suspend(self) -> None:
        self.world.ask(SuspendJob(job=self.rng.choice((self.a_job(), ""))))

    def resume(self) -> None:
        self.world.ask(ResumeJob())

    def restart(self) -> None:
        self.world.ask(RestartWorkers(job=self.a_job(), workers=self.rng.choice(([], ["r0-0"]))))

    def poll(self) -> None:
        job, after = self.rng.choice(("", self.a_job())), self.world.core.cluster.changes.version
        wait_s, settle_s = self.rng.choice((0.0, 1.0, 30.0)), self.rng.choice((0.0, 0.5))
        self.world.ask(WatchCluster(job=job, after_version=after, wait_s=wait_s, settle_s=settle_s))

    def read(self) -> None:
        self.world.ask(ReadLog(job=self.a_job(), worker="r0-0"))

    # -- the end -----------------------------------------------------------------------------------------------------

    def check_processes(self) -> None:
        """No device is used twice. `running` sees that no rank runs twice, at each beginning of one."""
        for node, agent in self.world.agents.items():
            if isinstance(agent, SimulatedAgent):
                broken = check_devices(node, (process.launch for process in agent.incarnations.values()))
                assert not broken, f"at {self.world.now:.3f}: {broken}\n{self.world.recent()}"
        if self.is_real:
            self.snapshots.check()
        if self.is_real and not self.world.is_writing and not self.world.is_down:
            broken = list(check_charges(self.world.core.cluster, self.faults, self.world.log))
            assert not broken, f"at {self.world.now:.3f}: {broken}\n{self.world.recent()}"

    def check_names(self) -> None:
        """In calm weather every claim has its answer, and every agent has heard who holds what."""
        self.world.run(15.0)
        for job, worker, agent in self.living():
            process = agent.incarnations[worker.incarnation_id]
            if not job.can_call(worker):
                continue
            answers = {**worker.names, **{name: one.number for name, one in worker.refused.items()}}
            assert answers == process.claims.names, f"{worker.incarnation_id} claims, and the master knows otherwise"
            if isinstance(agent, SimulatedAgent) and job.stage is not Stage.INIT:
                known = {entry.worker: _fact(entry) for entry in agent.directory(job.job_id)}
                true = {one.name: _fact(one.entry) for one in job.workers.values() if one.entry is not None}
                assert known == true, f"{agent.node} has missed news of {job.job_id}"

    def calm(self) -> None:
        """No more faults; every agent is there."""
        self.world.crash_at = ""
        self.world.disk_s = lambda: 0.0
        self.heal()
        self.world.run(30.0)
        while len(self.world.agents) < len(NODES):
            self.start_missing()
        self.undrain()
        self.resume()
        self.world.run(30.0)

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

    def check_end(self) -> None:
        """Every job ends, well or with the limit that forbade to go on; nothing is held, runs or waits any more."""
        cluster = self.world.core.cluster
        stuck = [
            f"{job.job_id} {job.stage}: {job.reason}" for job in cluster.jobs.values() if job.stage is not Stage.STOPPED
        ]
        assert not stuck, f"{stuck}\n{self.world.recent()}"
        assert all(job.exit_code in (0, 1, 130) for job in cluster.jobs.values())
        assert all((job.end is not None) == (job.exit_code == 1) for job in cluster.jobs.values())
        self.world.run(40.0)
        for node in cluster.nodes.values():
            held = (node.incarnations, node.allocations, node.leaving)
            assert held == ({}, {}, {}), f"{node.name} holds something"
            assert self.world.agents[node.name].incarnations == {}, f"{node.name} still runs something"
        assert (cluster.watches, cluster.reads) == ({}, {})
        assert [job.job_id for job in cluster.jobs.values() if job.holders] == []


def play(seed: int, watch: Watch | None = None) -> None:
    """Play one seed with every fault there is: AssertionError, if an invariant breaks or something does not end."""
    chaos = Chaos(seed, is_real=True, has_all_faults=True, watch=watch)
    chaos.run(NUM_DEEDS)
    chaos.calm()
    chaos.check_names()
    chaos.finish_all()
    chaos.check_end()


def _fact(entry: DirectoryEntry) -> DirectoryEntry:
    """Why an incarnation ended an agent and the master may say in different words."""
    return msgspec.structs.replace(entry, reason="")

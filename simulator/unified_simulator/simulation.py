"""One run: a cluster full of training jobs under faults at given rates, and the figures of the run."""

from __future__ import annotations

import gc
import random
import resource
import time
from collections.abc import Callable

from unified.protocol.records import JobWorkerIncarnation, Stage
from unified.values import Value
from unified_simulator.agent import Delays, SimulatedAgent, resources
from unified_simulator.cluster import SimulatedCluster, Watch
from unified_simulator.faults import FaultRates, Faults
from unified_simulator.invariants.agents import RunningRanks
from unified_simulator.invariants.master import check
from unified_simulator.measure import KindOfEvent, Longest, LongestStep, quantile
from unified_simulator.network import NetworkOptions
from unified_simulator.workload import Workload

CHECK_ALL_EVERY = 20_000
"""Number of the master's events between two checks of the whole cluster."""
SLICE_S = 60.0
"""Virtual seconds between two progress reports."""
CALM_S = 300.0
"""Time without faults at the end; after it every agent must run what the master desires."""


class SimulationOptions(FaultRates, frozen=True, kw_only=True):
    """Size of the cluster, its work and its faults."""

    nodes: int
    workers: int
    """Number of workers, and of devices, of each node."""
    hours: float
    job_nodes: list[int]
    """Sizes of jobs in nodes, used in turn."""
    job_hours: float
    checkpoint_minutes: float
    spare: float
    """Part of the nodes that jobs leave free."""
    in_place: bool
    """True if processes of the jobs survive a broken round and join the next one."""
    delay_ms: float
    loss: float
    seed: int


class SimulationReport(Value, frozen=True, kw_only=True):
    """Figures of a run in which all invariants held."""

    options: SimulationOptions
    events: int
    decisions: int
    """Entries of the event log: placements, starts, rounds, restarts, ends."""
    events_a_second: float
    """Events that the master's core handles in a second of its CPU time."""
    decisions_a_second: float
    step_p50_us: float
    step_p99_us: float
    longest: LongestStep
    """The longest step of the master's core."""
    longest_of_agents: LongestStep
    core_share: float
    """Mean part of one CPU that the master's core would need, heartbeats included."""
    kinds: dict[str, KindOfEvent]
    checks: dict[str, int]
    """Numbers of invariant checks. Each of the master's `steps` checks the `nodes`, `jobs` and `workers` that it
    touched, or the `whole cluster`. A checked job is then left out for one step per 5 of its workers. Each of the
    `agent steps` checks its agent."""
    faults: dict[str, int]
    jobs_finished: int
    jobs_running: int
    recoveries: int
    recovery_p50_s: float
    """Time from the end of a rank until all ranks of its job train again."""
    recovery_p99_s: float
    goodput: float
    """Useful part of the jobs' node time."""
    wall_s: float
    cpu_s: float
    """Seconds of CPU of the whole simulation; a busy machine makes `wall_s` longer."""
    memory_mib: float


class Simulation:
    """The cluster, its work and its faults, from the seed of the options."""

    def __init__(self, options: SimulationOptions, watch: Watch | None = None) -> None:
        self.options = options
        self._rng = random.Random(options.seed)
        delay_s = options.delay_ms / 1000
        network = NetworkOptions((delay_s, delay_s, 2 * delay_s, 10 * delay_s), options.loss)
        self.cluster: SimulatedCluster[SimulatedAgent] = SimulatedCluster(
            seed=options.seed, network=network, watch=watch, check_all_every=CHECK_ALL_EVERY, is_large=True
        )
        nodes = [f"n{number}" for number in range(options.nodes)]
        self.workload = Workload(
            self.cluster,
            self._rng,
            per_node=options.workers,
            sizes=options.job_nodes,
            work_s=options.job_hours * 3600,
            checkpoint_s=options.checkpoint_minutes * 60,
            in_place=options.in_place,
        )
        self._num_incarnations = 0
        self._agent_times = Longest()
        self._running = RunningRanks()
        self.faults = Faults(self.cluster, self._rng, options, nodes, self._start)
        for node in nodes:
            self.cluster.add(self._start(node))

    def run(self, on_progress: Callable[[Simulation], None] = lambda _simulation: None) -> SimulationReport:
        """Run to the end, then without faults until all is at rest; AssertionError if the cluster does not converge."""
        begun = time.perf_counter()
        had_gc = gc.isenabled()
        gc.disable()  # a collection scans all agents, too, and would count as CPU time of the master's core
        try:
            self._run(on_progress)
        finally:
            if had_gc:
                gc.enable()
        return self._report(time.perf_counter() - begun)

    @property
    def progress(self) -> str:
        """Numbers of events, faults and ended jobs so far, in a line, with the memory used."""
        jobs, faults = self.workload.num_finished, self.faults.count.total()
        steps = self.cluster.checks.count["steps"]
        return f"{steps:,} events, {faults} faults, {jobs} jobs ended, {_memory_mib():,.0f} MiB"

    def _run(self, on_progress: Callable[[Simulation], None]) -> None:
        options = self.options
        self.cluster.run(2.0)
        self.workload.submit(max(1, int(options.nodes * (1 - options.spare))))
        self.faults.begin(options.nodes * options.workers)
        while self.cluster.now < options.hours * 3600:
            self.cluster.run(SLICE_S)
            on_progress(self)
        self.faults.stop()
        self.cluster.run(CALM_S)
        self._check_convergence()

    def _start(self, node: str) -> SimulatedAgent:
        self._num_incarnations += 1
        offered = resources(cpu=8 * self.options.workers, devices=self.options.workers, kind="cuda")
        delays = Delays(start=self._rng.uniform(0.05, 0.5), run=0.02, stop=self._rng.uniform(0.05, 1.0))
        agent = SimulatedAgent(
            node,
            offered,
            lambda: self.cluster.now,
            incarnation=str(self._num_incarnations),
            delays=delays,
            on_process=self._on_process,
        )
        agent.times = self._agent_times
        return agent

    def _on_process(self, agent: SimulatedAgent, incarnation: JobWorkerIncarnation, is_running: bool) -> None:
        self._running.note(agent.node, incarnation, is_running)
        if is_running:
            self.workload.began(agent, incarnation)
        else:
            self.workload.ended(incarnation)

    def _check_convergence(self) -> None:
        """Check that every agent runs what the master desires, and that every RUNNING job trains."""
        core = self.cluster.core.cluster
        broken = check(core)
        for name, agent in self.cluster.agents.items():
            desired = set(core.nodes[name].incarnations)
            if desired != set(agent.incarnations):
                broken.append(f"{name} runs {sorted(agent.incarnations)}, desired are {sorted(desired)}")
        for job in core.jobs.values():
            seen = self.workload.jobs.get(job.job_id)
            if job.stage is Stage.RUNNING and seen is not None and seen.useful_since is None:
                broken.append(f"{job.job_id} is RUNNING and does not train: {job.reason}")
        assert not broken, "\n".join([*broken[:20], self.cluster.recent()])

    def _report(self, wall_s: float) -> SimulationReport:
        self.workload.stop_clocks()
        ordered, kinds = self.cluster.times.ordered(), self.cluster.times.kinds()
        core_s = sum(ordered)
        beats = kinds.get("AgentHeartbeat")
        beats_s = self.options.nodes / self.cluster.intervals.heartbeat_s * (beats.p50_us / 1e6 if beats else 0.0)
        recoveries = sorted(self.workload.recoveries_s)
        decisions = self.cluster.num_decisions
        spent = self.workload.useful_node_s + self.workload.lost_node_s + self.workload.waiting_node_s
        return SimulationReport(
            options=self.options,
            events=len(ordered),
            decisions=decisions,
            events_a_second=len(ordered) / core_s,
            decisions_a_second=decisions / core_s,
            step_p50_us=quantile(ordered, 0.5) * 1e6,
            step_p99_us=quantile(ordered, 0.99) * 1e6,
            longest=self.cluster.times.longest.step,
            longest_of_agents=self._agent_times.step,
            core_share=core_s / self.cluster.now + beats_s,
            kinds=kinds,
            checks={**self.cluster.checks.count, "agent steps": self._agent_times.num_steps},
            faults=dict(self.faults.count),
            jobs_finished=self.workload.num_finished,
            jobs_running=sum(job.useful_since is not None for job in self.workload.jobs.values()),
            recoveries=len(recoveries),
            recovery_p50_s=quantile(recoveries, 0.5),
            recovery_p99_s=quantile(recoveries, 0.99),
            goodput=self.workload.useful_node_s / spent if spent else 0.0,
            wall_s=wall_s,
            cpu_s=time.process_time(),
            memory_mib=_memory_mib(),
        )


def _memory_mib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

"""Faults of a simulated cluster, each a Poisson process with a rate of its own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from unified.protocol.records import Failure
from unified.values import Value
from unified_simulator.agent import SimulatedAgent
from unified_simulator.cluster import SimulatedCluster

DAY_S = 86400.0
CRASH = Failure(summary="killed by SIGKILL", category="crash", signal=9)
CUT_S = (1.0, 120.0)
"""Shortest and longest time for which a node is cut off."""
SEEN_AFTER_S = (0.001, 0.01, 0.1)
"""Times after which an agent sees the end of a process that died with its zygote."""
DOWN_S = (1.0, 30.0)
"""Shortest and longest time for which the master is down."""


class FaultRates(Value, frozen=True, kw_only=True):
    """Mean days between two faults of one node, rack, worker or master; 0: none. Rates are constant over time."""

    node_days: float
    """Deaths of a node with all its processes; the node is back after `repair_hours`."""
    rack_days: float
    """Deaths of all nodes of a rack together."""
    worker_days: float
    """Deaths of a worker process alone."""
    zygote_days: float = 0.0
    """Deaths of a node's zygote, with all processes of workers there."""
    cut_days: float
    """Network cuts of a node."""
    master_days: float
    rack_size: int
    repair_hours: float


class Faults:
    """Makes faults happen until it is told to stop.

    Args:
        start: makes a new incarnation of a node's agent.
    """

    def __init__(
        self,
        cluster: SimulatedCluster[SimulatedAgent],
        rng: random.Random,
        rates: FaultRates,
        nodes: Sequence[str],
        start: Callable[[str], SimulatedAgent],
    ) -> None:
        self._cluster, self._rng, self._rates, self._nodes, self._start = cluster, rng, rates, nodes, start
        self.count: Counter[str] = Counter()
        self.is_over = False

    def begin(self, num_workers: int) -> None:
        """Arm every kind of fault."""
        rates, num_nodes = self._rates, len(self._nodes)
        num_racks = max(1, num_nodes // rates.rack_size)
        for days, number, fault in (
            (rates.node_days, num_nodes, self._node),
            (rates.rack_days, num_racks, self._rack),
            (rates.worker_days, num_workers, self._worker),
            (rates.zygote_days, num_nodes, self._zygote),
            (rates.cut_days, num_nodes, self._cut),
            (rates.master_days, 1, self._master),
        ):
            if days:
                self._arm(number / (days * DAY_S), fault)

    def _arm(self, rate: float, fault: Callable[[], None]) -> None:
        def happen() -> None:
            if not self.is_over:
                fault()
                self._arm(rate, fault)

        self._cluster.after(self._rng.expovariate(rate), happen)

    def _note(self, what: str, where: str) -> None:
        self.count[what] += 1
        self._cluster.watch(self._cluster.now, "fault", f"{what}: {where}")

    def _node(self) -> None:
        self._note("node", self._kill(self._rng.choice(self._nodes)))

    def _rack(self) -> None:
        size = self._rates.rack_size
        first = self._rng.randrange(max(1, len(self._nodes) // size)) * size
        nodes = self._nodes[first : first + size]
        for node in nodes:
            self._kill(node)
        self._note("rack", f"{nodes[0]} to {nodes[-1]}")

    def _kill(self, node: str) -> str:
        if node in self._cluster.agents:
            self._cluster.kill_agent(node)
            repair_s = self._rates.repair_hours * 3600
            self._cluster.after(self._rng.uniform(0.5, 1.5) * repair_s, lambda: self._repaired(node))
        return node

    def _repaired(self, node: str) -> None:
        if node not in self._cluster.agents:
            self._cluster.add(self._start(node))

    def _worker(self) -> None:
        agent = self._cluster.agents.get(self._rng.choice(self._nodes))
        running = (
            [incarnation for incarnation, process in agent.incarnations.items() if process.is_running]
            if agent is not None
            else []
        )
        if agent is not None and running:
            incarnation = self._rng.choice(running)
            self._note("worker", f"{incarnation.job_id}/{incarnation.worker} on {agent.node}")
            self._cluster.act(agent, lambda: agent.end(incarnation.job_id, incarnation.worker, CRASH))

    def _zygote(self) -> None:
        agent = self._cluster.agents.get(self._rng.choice(self._nodes))
        if agent is not None and agent.incarnations:
            self._note("zygote", f"of {agent.node}")
            self._cluster.act(agent, lambda: agent.kill_zygote(lambda: self._rng.choice(SEEN_AFTER_S)))

    def _cut(self) -> None:
        node = self._rng.choice(self._nodes)
        if node in self._cluster.agents and node not in self._cluster.cut:
            seconds = self._rng.uniform(*CUT_S)
            self._note("cut", f"{node} for {seconds:.0f} s")
            self._cluster.cut_off(node)
            self._cluster.after(seconds, lambda: self._cluster.heal(node))

    def _master(self) -> None:
        seconds = self._rng.uniform(*DOWN_S)
        self._note("master", f"for {seconds:.0f} s")
        self._cluster.crash_master(seconds)

    def stop(self) -> None:
        """Start no more faults; running repairs still happen at their times."""
        self.is_over = True

"""Holders of names, and the directory of a job as agents are told of it: all once, then changes, in batches."""

import msgspec
import pytest

from tests.support.master import CRASH, Bench, simple
from tests.support.sim.sim_agent import SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import JobSpec, Resources
from unified.protocol.agent_master import (
    AgentHeartbeat,
    DesiredWorkers,
    DirectoryChanged,
    ObservedWorkers,
    RegisterAgent,
)
from unified.protocol.client_master import SubmitJob
from unified.protocol.records import (
    DirectoryEntry,
    JournalPlace,
    NameClaims,
    NameRefusal,
    Reachability,
    Stage,
    WorkerState,
)
from unified_master.core import step
from unified_master.core.messages import Received


class NameBench(Bench):
    """A job of three simple workers, restarted alone, each on a node of its own unless there are fewer."""

    def __init__(self, nodes: int = 3) -> None:
        role = simple(total=3, resources=Resources(accelerator=1), restart_alone=True)
        super().__init__(role, nodes=nodes, devices=3 // nodes)
        self.pushed: list[DirectoryEntry] = []
        self.world.watch = self._watch

    def _watch(self, _now: float, who: str, what: object) -> None:
        if isinstance(what, DirectoryChanged) and who == "to n3":
            self.pushed += what.entries

    def claim(self, rank: int, *names: str) -> None:
        """The worker claims these names and no others; the master hears of it."""
        worker = self.worker("s", rank)
        agent = self.agent(worker.node)
        self.world.say(agent.node, agent.claim("job-1", worker.name, names))
        self.world.run(0.005)

    def report(self, rank: int, claims: NameClaims) -> None:
        """An agent's report with these claims reaches the master, whatever the worker claims now."""
        worker = self.worker("s", rank)
        agent = self.agent(worker.node)
        ((_, report),) = agent.report_progress("job-1", worker.name, 1)
        assert isinstance(report, ObservedWorkers)
        incarnations = [msgspec.structs.replace(one, claims=claims) for one in report.workers]
        report = msgspec.structs.replace(report, workers=incarnations)
        self.world.step(Received(peer=b"x", message=report))

    def holders(self) -> dict[str, int]:
        ranks = {worker.name: worker.rank for worker in self.job.workers.values()}
        return {name: ranks[holder] for name, holder in self.job.holders.items()}


@pytest.fixture
def bench() -> NameBench:
    return NameBench()


def test_the_first_claimant_holds_it_and_all_workers_are_told(bench: NameBench) -> None:
    bench.claim(0, "x", "y")
    assert bench.holders() == {"x": 0, "y": 0}
    assert bench.entry(rank=0).names == {"x": 1, "y": 1}
    assert bench.pushed == [bench.entry(rank=0)]
    found = [event.reason for event in bench.world.log if event.event == "name-claimed"]
    assert found == ["it holds the name 'x' from now on", "it holds the name 'y' from now on"]


def test_the_second_claimant_is_refused_for_good(bench: NameBench) -> None:
    bench.claim(0, "x")
    bench.claim(1, "x", "z")
    name = bench.worker("s", 0).name
    assert bench.entry(rank=1).refused == {"x": NameRefusal(number=1, holder=name)}
    assert bench.entry(rank=1).names == {"z": 1}
    bench.claim(0)
    assert bench.holders() == {"z": 1}, "what was refused is not granted behind the claimant's back"
    bench.claim(1, "z")
    assert bench.entry(rank=1).refused == {}
    bench.claim(1, "z", "x")
    assert bench.entry(rank=1).names == {"z": 1, "x": 3}


def test_claims_are_decided_in_the_order_in_which_they_are_heard(bench: NameBench) -> None:
    for rank in (1, 0, 2):
        bench.claim(rank, "x", f"own {rank}")
    assert bench.holders() == {"x": 1, "own 0": 0, "own 1": 1, "own 2": 2}


def test_a_claim_made_anew_gets_a_new_answer_though_its_withdrawal_was_never_heard(bench: NameBench) -> None:
    bench.claim(0, "x")
    bench.claim(1, "x")
    bench.claim(0)
    bench.report(1, NameClaims(number=3, names={"x": 3}))
    assert bench.entry(rank=1).names == {"x": 3}
    bench.report(1, NameClaims(number=5, names={"x": 5}))
    assert bench.entry(rank=1).names == {"x": 5}, "its own name is granted under the new number"


def test_reports_that_come_again_or_late_change_nothing(bench: NameBench) -> None:
    bench.report(0, NameClaims(number=2, names={"x": 2}))
    before = bench.entry(rank=0)
    for late in (NameClaims(number=2, names={"x": 2}), NameClaims(number=1, names={"y": 1}), NameClaims()):
        bench.report(0, late)
    assert bench.entry(rank=0) == before
    assert bench.holders() == {"x": 0}


def test_a_report_that_comes_late_does_not_bring_an_earlier_state_back(bench: NameBench) -> None:
    bench.claim(0, "x")
    worker = bench.worker("s", 0)
    agent = bench.agent(worker.node)
    ((_, report),) = agent.report_progress("job-1", worker.name, 1)
    assert isinstance(report, ObservedWorkers)
    early = [msgspec.structs.replace(one, state=WorkerState.STARTING, inbox=None) for one in report.workers]
    bench.world.step(Received(peer=b"x", message=msgspec.structs.replace(report, workers=early)))
    assert worker.state is WorkerState.RUNNING
    assert bench.holders() == {"x": 0}


def test_a_name_is_free_when_its_holder_died_and_the_next_incarnation_may_claim_it(bench: NameBench) -> None:
    bench.claim(0, "x")
    bench.end("s", 0, CRASH)
    assert bench.holders() == {}
    assert (bench.entry(rank=0).state, bench.entry(rank=0).names) == (Reachability.DEAD, {})
    assert bench.pushed[-1] == bench.entry(rank=0)
    bench.running()
    bench.claim(0, "x")
    assert bench.holders() == {"x": 0}
    entry = bench.entry(rank=0)
    assert (entry.incarnation, entry.names, entry.revision) == (1, {"x": 1}, 1)


def test_another_worker_may_claim_the_name_of_the_dead(bench: NameBench) -> None:
    bench.claim(0, "x")
    bench.end("s", 0, CRASH)
    bench.claim(1, "x")
    bench.running()
    bench.claim(0, "x")
    assert bench.holders() == {"x": 1}
    assert bench.entry(rank=0).refused["x"].holder == bench.worker("s", 1).name


def test_a_name_is_free_for_a_claim_that_comes_in_the_report_of_its_holders_end() -> None:
    bench = NameBench(nodes=1)
    bench.claim(1, "x")
    agent = bench.agent()
    agent.end("job-1", bench.worker("s", 1).name, CRASH)
    bench.claim(0, "x")
    assert bench.holders() == {"x": 0}


def test_a_lost_node_frees_its_names(bench: NameBench) -> None:
    bench.claim(1, "x")
    bench.world.kill_agent("n2")
    bench.world.run(20)
    assert bench.holders() == {}


def test_a_finished_worker_keeps_its_names_until_it_is_gone(bench: NameBench) -> None:
    bench.claim(0, "x")
    bench.finish("s", 0)
    assert bench.holders() == {"x": 0}
    for rank in (1, 2):
        bench.finish("s", rank)
    assert bench.job.stage is Stage.STOPPING
    assert bench.holders() == {"x": 0}
    bench.stopped()
    assert bench.holders() == {}


def test_a_restored_master_knows_the_holders_and_decides_what_came_meanwhile_alike(bench: NameBench) -> None:
    bench.claim(0, "x")
    bench.world.restart_master()
    assert bench.holders() == {"x": 0}
    for rank, node in enumerate(("n1", "n2", "n3")):
        agent = bench.agent(node)
        agent.claim("job-1", bench.worker("s", rank).name, ["x", "y"])  # nobody hears it
    bench.world.run(10)
    assert bench.holders()["x"] == 0
    assert [rank for rank in range(3) if "y" in bench.entry(rank=rank).names] == [bench.holders()["y"]]
    assert sum("y" in bench.entry(rank=rank).refused for rank in range(3)) == 2
    assert bench.incarnations() == {"s-0": 0, "s-1": 0, "s-2": 0}


def test_a_worker_that_claims_without_end_does_not_drown_the_log(bench: NameBench) -> None:
    for _ in range(150):
        bench.claim(0, "x")
        bench.claim(0)
    assert sum(event.event == "name-claimed" for event in bench.world.log) == 50


def test_a_large_cluster_is_told_news_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_master.core.step.BATCH_FROM", 2)
    bench = Bench(simple("s", 4, is_driver=False), simple("d"), nodes=2, failover_exec=2)
    told: list[dict[str, Reachability]] = []
    bench.world.watch = lambda _now, _who, what: told.extend(
        [{entry.worker: entry.state for entry in what.entries}] if isinstance(what, DirectoryChanged) else []
    )
    for rank in range(4):
        bench.end("s", rank, None)
    bench.world.run(0.1)
    nodes = {worker.node for worker in bench.job.workers.values()}
    assert [len(entries) for entries in told] == [1] * len(nodes) + [3] * len(nodes)
    assert all(state is Reachability.ENDED for entries in told for state in entries.values())


def test_a_large_cluster_schedules_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_master.core.step.BATCH_FROM", 1)
    world = World()
    world.add(SimAgent("n1", resources(devices=1)))
    world.run(0.01)
    for name in ("one", "two"):
        world.ask(SubmitJob(spec=JobSpec(name=name, roles=[simple()])))
    assert [world.job(name).is_placed for name in ("one", "two")] == [False, False]
    world.run(step.BATCH_S)
    assert [world.job(name).is_placed for name in ("one", "two")] == [True, True]


class DirectoryBench(Bench):
    """Two workers, restarted alone, a node each; n3 has none."""

    def __init__(self) -> None:
        role = simple(total=2, resources=Resources(accelerator=1), restart_alone=True)
        super().__init__(role, nodes=3, devices=1)
        self.told: list[tuple[str, str, list[str]]] = []
        """Node, kind of message, workers that the directory in it names."""
        self.world.watch = self._watch

    def _watch(self, _now: float, who: str, what: object) -> None:
        match what:
            case DesiredWorkers():
                names = [entry.worker for job in what.jobs for entry in job.directory]
                self.told.append((who.removeprefix("to "), "desired", names))
            case DirectoryChanged():
                self.told.append((who.removeprefix("to "), "changed", [entry.worker for entry in what.entries]))

    def take(self) -> set[tuple[str, str, int]]:
        """What was told since the last look: node, kind, number of entries."""
        told, self.told = self.told, []
        return {(node, kind, len(names)) for node, kind, names in told}


def test_who_was_told_all_is_told_changes_only() -> None:
    bench = DirectoryBench()
    bench.restart("s", 0, CRASH)
    bench.world.run(1)
    assert bench.take() == {("n1", "changed", 1), ("n2", "changed", 1), ("n1", "desired", 0)}
    found = {name: node.notified for name, node in bench.world.core.cluster.nodes.items()}
    assert found == {"n1": {"job-1": bench.job.revision}, "n2": {"job-1": bench.job.revision}, "n3": {}}


def test_an_agent_that_registers_again_is_told_all() -> None:
    bench = DirectoryBench()
    info = bench.world.core.cluster.nodes["n1"].info
    assert isinstance(info, RegisterAgent)
    bench.world.step(Received(peer=b"n1/1", request_id=1, message=info))
    assert bench.take() == {("n1", "desired", 2)}


def test_an_agent_that_missed_a_desired_set_is_told_all() -> None:
    bench = DirectoryBench()
    node = bench.world.core.cluster.nodes["n1"]
    beat = AgentHeartbeat(node="n1", incarnation=node.info.incarnation, generation=node.generation - 1)
    bench.world.now += 3
    bench.world.step(Received(peer=node.peer, request_id=1, message=beat))
    assert ("n1", "desired", 2) in bench.take()


def test_an_agent_on_a_new_connection_is_told_all_with_the_next_change() -> None:
    bench = DirectoryBench()
    node = bench.world.core.cluster.nodes["n2"]
    beat = AgentHeartbeat(node="n2", incarnation=node.info.incarnation, generation=node.generation)
    bench.world.step(Received(peer=b"n2/9", request_id=1, message=beat))
    bench.end("s", 0, CRASH)
    assert {one for one in bench.take() if one[0] == "n2"} == {("n2", "desired", 2)}


def test_a_node_without_workers_of_the_job_is_told_nothing() -> None:
    bench = DirectoryBench()
    bench.restart("s", 0, CRASH)
    bench.finish("s", 1)
    assert {node for node, _, _ in bench.told} == {"n1", "n2"}


def test_the_entry_of_an_incarnation_says_how_the_one_before_it_ended(bench: NameBench) -> None:
    """Who asks only now and then sees the new incarnation alone, and its calls to the old fail with the evidence."""
    assert bench.entry("s", 0).reason == ""
    bench.restart("s", 0, CRASH, settle_s=2)
    entry = bench.entry("s", 0)
    assert (entry.incarnation, entry.state, entry.reason) == (1, Reachability.ALIVE, "killed by SIGKILL")
    before = entry
    bench.claim(0, "x")
    assert bench.entry("s", 0) == msgspec.structs.replace(before, names={"x": 1}, revision=1)


def test_the_place_of_a_file_that_belongs_to_a_name_outlives_its_holder_and_the_master(bench: NameBench) -> None:
    bench.report(0, NameClaims(number=1, names={"q": 1}))
    assert bench.entry("s", 0).journals == {}
    bench.report(0, NameClaims(number=2, names={"q": 1, "r": 2}, journals={"q": "/a/q.sqlite", "z": "/not/held"}))
    first = bench.worker("s", 0).node
    assert bench.entry("s", 0).journals == {"q": JournalPlace(node=first, path="/a/q.sqlite")}
    bench.restart("s", 0, CRASH)
    assert bench.entry("s", 0).journals == {}
    bench.world.restart_master()
    bench.world.run(3)
    bench.report(1, NameClaims(number=1, names={"q": 1}))
    assert bench.entry("s", 1).journals == {"q": JournalPlace(node=first, path="/a/q.sqlite")}, "told with the grant"
    bench.report(1, NameClaims(number=2, names={"q": 1}, journals={"q": "/a/q.sqlite"}))
    second = bench.worker("s", 1).node
    assert second != first
    assert bench.entry("s", 1).journals == {"q": JournalPlace(node=second, path="/a/q.sqlite")}

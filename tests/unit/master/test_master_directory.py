"""What agents are told of a job's directory: all of it once, then what changes, and all again when in doubt."""

from __future__ import annotations

from tests.support.master import CRASH, Bench, simple
from unified.job.spec import Resources
from unified.protocol.agent_master import AgentHeartbeat, DesiredWorkers, DirectoryChanged, RegisterAgent
from unified_master.core.messages import Received


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
    bench.end("s", 0, CRASH)
    bench.running()
    bench.world.run(1)
    assert bench.take() == {("n1", "changed", 1), ("n2", "changed", 1), ("n1", "desired", 0)}
    assert {name: node.notified for name, node in bench.world.core.cluster.nodes.items()} == {
        "n1": {"job-1": bench.job.revision},
        "n2": {"job-1": bench.job.revision},
        "n3": {},
    }


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
    bench.end("s", 0, CRASH)
    bench.running()
    bench.finish("s", 1)
    assert {node for node, _, _ in bench.told} == {"n1", "n2"}

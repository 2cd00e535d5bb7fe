"""Outcomes of node checks in the master: a node at fault is given up for its job, and what was found is kept."""

from tests.support.master import Bench, elastic
from unified.protocol.client_master import ListNodes, NodeList
from unified.protocol.records import NodeCheckReport
from unified_master.core.budgets import in_use


def check(bench: Bench, node: str) -> str:
    return next(each.check for each in bench.world.get(NodeList, ListNodes()).nodes if each.node == node)


def say(bench: Bench, rank: int, report: NodeCheckReport) -> None:
    worker = bench.worker("e", rank)
    bench.world.say(worker.node, bench.agent(worker.node).check_node("job-1", worker.name, report))
    bench.world.run(0.1)


def test_what_a_node_check_found_outlives_the_master() -> None:
    bench = Bench(elastic(accelerator=1), nodes=2, devices=1, node_num=9)
    node = bench.worker("e", 0).node
    say(bench, 0, NodeCheckReport(round=1, matmul_s=0.002, copy_s=0.001, collective_s=0.009))
    assert check(bench, node) == "ok: matmul 2, copy 1, collective 9 ms"
    bench.world.restart_master()
    bench.world.run(5)
    assert check(bench, node) == "ok: matmul 2, copy 1, collective 9 ms"


def test_a_node_at_fault_is_excluded_and_charged_once_whoever_of_its_round_says_so() -> None:
    bench = Bench(elastic(accelerator=1), nodes=3, devices=1, node_num=9)
    node = bench.worker("e", 1).node
    report = NodeCheckReport(round=1, faulty={1: "ECC error"})
    for rank in (0, 1):
        say(bench, rank, report)
    bench.world.run(1)
    bench.running()
    assert bench.job.excluded == [node]
    assert {worker.node for worker in bench.job.ranks("e")} == {"n1", "n2", "n3"} - {node}
    assert {use.limit: use.used for use in in_use(bench.job)}["max_restart"] == 1

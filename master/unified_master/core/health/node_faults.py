"""Findings of the ranks of a round about their nodes: those at fault are excluded, slow ones reported."""

from __future__ import annotations

from unified.errors import listed
from unified.protocol.records import Failure, NodeCheckReport
from unified_master.core import nodes
from unified_master.core.rounds import exclusion, incarnations, node_checks, recovery
from unified_master.core.state import JobRecord, WorkerRecord
from unified_master.core.step import MasterStep


def judge_nodes(step: MasterStep, job: JobRecord, worker: WorkerRecord, report: NodeCheckReport) -> bool:
    """Apply one rank's report about its round; return True if it made the role fail."""
    if worker.run is None or worker.run.round != report.round or job.is_ending:
        return False
    _show(step, job, worker, report)
    ranks = {
        other.run.rank: other
        for other in job.ranks(worker.role)
        if other.is_desired and other.run is not None and other.run.round == report.round
    }
    if report.is_good:
        node_checks.passed(job.roles[worker.role], {other.node for other in ranks.values()})
        step.touch_job(job)
        return False
    faulty = {rank: why for rank, why in report.faulty.items() if rank in ranks}
    for rank, why in faulty.items():
        _exclude(step, job, ranks[rank], why)
    blamed = faulty or {rank: why for rank, why in report.undecided.items() if rank in ranks}
    if not blamed:
        return False
    first = ranks[min(blamed)]
    names = listed(sorted({ranks[rank].node for rank in blamed}))
    which = f"node {names} is at fault" if faulty else f"one of the nodes {names} is at fault"
    incarnations.end(step, job, first)
    failure = Failure(category=node_checks.CATEGORY, summary=f"node check: {which}: {blamed[min(blamed)]}")
    recovery.on_failure(step, job, first, failure)
    return True


def _exclude(step: MasterStep, job: JobRecord, worker: WorkerRecord, why: str) -> None:
    """Exclude a node for this job, for the job's window or until the node's agent is started anew."""
    exclusion.give_up(step, job, [worker.node])
    exclusion.exclude_node(step, job, worker, f"it failed the node check: {why}")


def _show(step: MasterStep, job: JobRecord, worker: WorkerRecord, report: NodeCheckReport) -> None:
    """Keep the outcome with the node, for `unified nodes`, and report a slow node when its outcome changes."""
    node = step.cluster.nodes.get(worker.node)
    if node is None or worker.run is None:
        return
    slow = ", ".join(f"{name} {factor:g} times the median" for name, factor in sorted(report.slow.items()))
    if worker.run.rank in report.faulty:
        outcome = "failed"
    elif worker.run.rank in report.undecided:
        outcome = "failed with others"
    elif slow:
        outcome = f"slow: {slow}"
    else:
        times = (report.matmul_s, report.copy_s, report.collective_s)
        outcome = "ok: matmul {:.0f}, copy {:.0f}, collective {:.0f} ms".format(*(1000 * seconds for seconds in times))
    if slow and outcome != node.check:
        step.decide("node-slow", f"node {node.name} is slow: {slow}", job, worker.role, node=node.name)
    if outcome != node.check:
        node.check = outcome
        nodes.remember(step, node)

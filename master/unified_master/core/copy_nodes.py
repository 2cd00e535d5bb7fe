"""Copy nodes: where the copies of a job's snapshots go while all ranks of one of its roles are on one node.

A copy node has no rank of that role. A job keeps its copy node as long as possible, even while its ranks are on several
nodes: the next incarnation of the job looks for copies there.
"""

from __future__ import annotations

import zlib
from functools import partial

from unified.job.spec import RoleSpec
from unified.protocol.agent_master import RunOrder
from unified.protocol.records import NodeState
from unified.protocol.snapshots import EarlierNode, ServerAddress
from unified_master.core.state import Cluster, JobRecord, NodeRecord, WorkerRecord
from unified_master.core.step import MasterStep

MAX_RAN_ON = 2000
"""Nodes on which a role has run and that are still known."""


def settle(step: MasterStep, job: JobRecord) -> None:
    """Give a job a copy node if it needs one, and take away a useless one."""
    if job.is_ending or not job.is_placed:
        return  # its next placement may need the copies there
    alone = _lonely_nodes(job)
    known = step.cluster.nodes.get(job.copy_node)
    if known is not None and known.name not in alone and _is_of_use(known):
        return
    copy_node = _choose(step.cluster, job, alone) if alone else ""
    if copy_node == job.copy_node:
        return
    job.copy_node = copy_node
    step.touch_job(job)
    if copy_node:
        # Only in the log: it is not known here whether the job ever takes a snapshot.
        reason = f"copies of snapshots of {job.job_id}, if it takes any, go there: all its ranks are on one node"
        step.report("copy-node-chosen", reason, node=copy_node)
    _notify(step, job)


def on_change(step: MasterStep, node: NodeRecord) -> None:
    """Look again at the jobs that a node may hold copies for: it came, went, or is in service again."""
    step.cluster.snapshot_nodes.pop(node.name, None)
    is_there = node.is_registered and _is_of_use(node)
    if is_there:
        step.cluster.snapshot_nodes[node.name] = node
    for job in step.cluster.jobs.values():
        if job.copy_node == node.name:  # its address may be another one now
            _notify(step, job)
            settle(step, job)
        elif is_there and not job.copy_node:
            settle(step, job)


def address_of(cluster: Cluster, job: JobRecord) -> ServerAddress | None:
    """Return the address of the snapshot server on a job's copy node; None: there is none now."""
    node = cluster.nodes.get(job.copy_node)
    if node is None or not node.is_connected or node.info.snapshots is None:
        return None
    return node.info.snapshots.address(node.name, job.job_id)


def note_run(step: MasterStep, job: JobRecord, worker: WorkerRecord, order: RunOrder) -> None:
    """Note that a worker runs on its node, which may hold its snapshots for a while after it has left."""
    ran_on, agent = job.roles[worker.role].ran_on, step.cluster.nodes[worker.node].info.incarnation
    last_agent, last_round, lost_round = ran_on.pop(worker.node, (agent, 0, 0))
    lost_round = lost_round if last_agent == agent else max(last_round, lost_round)
    ran_on[worker.node] = (agent, max(last_round, order.round), lost_round)
    if len(ran_on) > MAX_RAN_ON:
        del ran_on[next(iter(ran_on))]
    step.touch_job(job)


def earlier_nodes(cluster: Cluster, job: JobRecord, node: NodeRecord) -> list[EarlierNode]:
    """Return the nodes that roles have left, for an agent whose workers look for snapshots there: rank 0, for all ranks
    of an elastic role, and each worker of a simple one, where it was itself."""
    found = []
    for role in job.spec.roles:
        is_simple, is_of_role = role.kind == "simple", partial(_is_of, job, role)
        here = list(filter(is_of_role, node.incarnations.values()))
        if not any(is_simple or worker.rank_in_round == 0 for worker in here):
            continue
        ran_on = job.roles[role.name].ran_on
        was_on = {past.node for worker in here for past in worker.past}
        for name in filter(was_on.__contains__, ran_on) if is_simple else ran_on:
            agent, last_round, lost_round = ran_on[name]
            left = cluster.nodes.get(name)
            if left is None or not left.is_connected or left.info.incarnation != agent:
                left, lost_round = None, max(last_round, lost_round)  # its snapshots ended with that agent
            if lost_round:
                found.append(EarlierNode(role.name, ServerAddress(name, "", ""), lost_round))
            if left is None or left is node or (not is_simple and any(map(is_of_role, left.incarnations.values()))):
                continue  # gone, or ranks of the round are there, and see what it holds
            if left.info.snapshots is not None:
                server = left.info.snapshots.address(name, job.job_id)
                found.append(EarlierNode(role.name, server, last_round))
    return found


def _is_of(job: JobRecord, role: RoleSpec, worker: WorkerRecord) -> bool:
    return worker.job_id == job.job_id and worker.role == role.name


def _lonely_nodes(job: JobRecord) -> set[str]:
    """Return the nodes that have all ranks of an elastic role."""
    nodes: set[str] = set()
    for role in job.elastic_roles():
        used: set[str] = set()
        for worker in job.ranks(role.name):
            if worker.is_desired:
                used.add(worker.node)
                if len(used) > 1:
                    break
        if len(used) == 1:
            nodes |= used
    return nodes


def _is_of_use(node: NodeRecord) -> bool:
    """Return True if a node can hold copies, perhaps once it has registered with a new master."""
    host = node.info.snapshots
    # Addresses of snapshot servers are not saved: after a restart of the master only the node knows its own.
    may_serve = not node.is_registered or (host is not None and host.url != "")
    return node.state is NodeState.ALIVE and node.is_in_service and may_serve


def _choose(cluster: Cluster, job: JobRecord, alone: set[str]) -> str:
    """Return another node, if possible on another host. The jobs of a cluster are spread over its nodes."""
    fit = [node for name, node in cluster.snapshot_nodes.items() if name not in alone]
    hosts = {cluster.nodes[name].info.host_id for name in alone}
    tie = {node.name: zlib.crc32(f"{job.job_id}/{node.name}".encode()) for node in fit}
    best = min(fit, key=lambda node: (node.info.host_id in hosts, tie[node.name]), default=None)
    return "" if best is None else best.name


def _notify(step: MasterStep, job: JobRecord) -> None:
    for name in {worker.node for worker in job.workers.values() if worker.is_desired}:
        step.touch_node(name)

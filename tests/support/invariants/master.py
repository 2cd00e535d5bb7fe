"""Invariants of the master's cluster, which tests and the simulator check after every step."""

from collections.abc import Iterator

from unified.protocol.records import NodeState, Reachability, Stage, WorkerState
from unified_master.core.scheduling.node_capacity import EPSILON
from unified_master.core.state import Cluster, DeviceKey, JobRecord, NodeRecord


def check(cluster: Cluster) -> list[str]:
    broken: list[str] = []
    for node in cluster.nodes.values():
        broken += _node(cluster, node)
    for job in cluster.jobs.values():
        broken += _places(cluster, job)
        broken += _stage(cluster, job)
        broken += _rounds(job)
        broken += _budgets(job)
        broken += _names(job)
    broken += _waiting(cluster)
    return broken


def _node(cluster: Cluster, node: NodeRecord) -> Iterator[str]:
    has = node.info.resources
    allocations = list(node.allocations.values())
    for field in ("cpu", "memory_mb", "disk_mb"):
        used = sum(getattr(allocation, field) for allocation in allocations)
        if used > getattr(has, field) + EPSILON:
            yield f"node {node.name}: {used:g} of {getattr(has, field):g} {field} are claimed"
    shares: dict[DeviceKey, float] = {}
    for allocation in allocations:
        for key in allocation.devices:
            shares[key] = shares.get(key, 0.0) + allocation.share
    yield from (
        f"node {node.name}: {share:g} of device {key} is claimed" for key, share in shares.items() if share > 1 + 1e-4
    )
    for name in {name for allocation in allocations for name in allocation.user_defined}:
        used = sum(allocation.user_defined.get(name, 0.0) for allocation in allocations)
        if used > has.user_defined.get(name, 0.0) + EPSILON:
            yield f"node {node.name}: {used:g} of {has.user_defined.get(name, 0.0):g} {name} are claimed"
    if node.state is NodeState.LOST and (node.incarnations or node.allocations or node.leaving):
        yield f"node {node.name} is lost and still has workers"
    if node.state is NodeState.ALIVE and cluster.leases.deadline(node.name) is None:
        yield f"node {node.name} is alive without a lease"
    for life, worker in node.incarnations.items():
        if worker.life != life or worker.node != node.name or not worker.is_desired:
            yield f"node {node.name}: {life} is listed, but its worker is {worker.life} on {worker.node}"
        if life in node.leaving:
            yield f"node {node.name}: {life} is both desired and leaving"


def _places(cluster: Cluster, job: JobRecord) -> Iterator[str]:
    """At most one desired life for each worker, where the worker has its place."""
    devices: dict[str, set[DeviceKey]] = {}
    for worker in job.workers.values():
        listed = [
            node.name
            for node in cluster.nodes.values()
            for life in node.incarnations
            if life.job_id == job.job_id and life.worker == worker.name
        ]
        if listed != ([worker.node] if worker.is_desired else []):
            yield f"{worker.life}: desired={worker.is_desired} on {worker.node!r}, listed on {listed}"
        holders = [node.name for node in cluster.nodes.values() if worker.place_key in node.allocations]
        if holders != ([worker.node] if worker.allocation is not None else []):
            yield f"{worker.life}: has its place on {worker.node!r}, claims on {holders}"
        if worker.is_desired and worker.allocation is None:
            yield f"{worker.life} is desired without a place"
        if worker.allocation is not None:
            devices.setdefault(worker.node, set()).update(worker.allocation.devices)
    used = {worker.node for worker in job.workers.values() if worker.kind == "worker" and worker.allocation is not None}
    if len(used) > job.spec.node_num:
        yield f"job {job.job_id} uses {sorted(used)}; node_num={job.spec.node_num}"
    for name, keys in devices.items():
        if len(keys) > job.spec.device_per_node:
            yield f"job {job.job_id} uses {len(keys)} devices of {name}; device_per_node={job.spec.device_per_node}"


def _stage(cluster: Cluster, job: JobRecord) -> Iterator[str]:
    holds = [worker.name for worker in job.workers.values() if worker.allocation is not None]
    desired = [worker.name for worker in job.workers.values() if worker.is_desired]
    if (job.is_waiting or job.stage is Stage.STOPPED) and (holds or desired):
        yield f"job {job.job_id} is {job.stage} without a place, yet holds {holds} and desires {desired}"
    if job.is_ending and (desired or job.outcome is None):
        yield f"job {job.job_id} is {job.stage} with outcome {job.outcome}, yet desires {desired}"
    if (job.stage is Stage.STOPPED) != (job.exit_code is not None):
        yield f"job {job.job_id} is {job.stage} with exit code {job.exit_code}"
    if job.restart_at is not None and ("restart", job.job_id) not in cluster.timers:
        yield f"job {job.job_id} waits to restart, and nothing will wake it"
    if job.restart_at is None and any(worker.is_held for worker in job.workers.values()):
        yield f"job {job.job_id} holds workers back for ever"
    for role in job.roles.values():
        if role.suspect and ("settle", job.job_id, role.name) not in cluster.timers:
            yield f"role {role.name} of {job.job_id} has a suspect, and nothing will settle it"


def _rounds(job: JobRecord) -> Iterator[str]:
    """The members of a round are all of the role, with ranks from 0 and one store prefix."""
    for role in job.elastic_roles():
        orders = [worker.run for worker in job.ranks(role.name) if worker.is_desired and worker.run is not None]
        newest = [order for order in orders if order.round == job.roles[role.name].round]
        if len(newest) != len(orders):
            yield f"role {role.name} of {job.job_id} has orders of rounds {sorted({order.round for order in orders})}"
        if len({order.store_prefix for order in newest}) > 1:
            yield f"round {job.roles[role.name].round} of role {role.name} of {job.job_id} has two prefixes"
        for worker in job.ranks(role.name):
            order = worker.run
            if order is not None and (order.rank, order.world_size) != (worker.rank, role.total):
                yield f"{worker.life} has rank {order.rank} of {order.world_size}"


def _budgets(job: JobRecord) -> Iterator[str]:
    allowed = 1 if job.is_ending else 0  # the failure that ended the job is counted, too
    if job.num_charged_restarts > job.spec.job_max_restart:
        yield f"job {job.job_id} restarted {job.num_charged_restarts} times"
    for node, losses in job.node_losses.items():
        if losses > job.spec.node_max_restart + allowed:
            yield f"job {job.job_id} survived {losses} losses of node {node}"
    for record in job.roles.values():
        limit = job.spec.role(record.name).role_max_restart
        if limit is not None and record.num_failures > limit + allowed:
            yield f"role {record.name} of {job.job_id} was charged {record.num_failures} failures and goes on"
    for worker in job.workers.values():
        role = job.spec.role(worker.role) if worker.kind == "worker" else None
        if role and role.role_max_restart is None and worker.num_failures > role.max_restart + allowed:
            yield f"{worker.name} of {job.job_id} was charged {worker.num_failures} failures and goes on"


def _names(job: JobRecord) -> Iterator[str]:
    """A name has one holder, which is alive and published as such, and every claim has its answer."""
    holders: dict[str, str] = {}
    for worker in job.workers.values():
        for name in worker.names:
            if name in holders:
                yield f"name {name!r} of {job.job_id} is held by {holders[name]} and {worker.name}"
            holders[name] = worker.name
        if worker.names and not job.can_call(worker):
            yield f"{worker.life} holds names, and its life is over"
        entry = worker.entry
        told = (entry.incarnation, entry.state, entry.names, entry.refused, entry.revision) if entry else None
        true = (worker.incarnation, Reachability.ALIVE, worker.names, worker.refused, worker.revision)
        if (worker.names or worker.refused) and told != true:
            yield f"{worker.life} has the names {true}, published as {told}"
        answered = {**worker.names, **{name: one.number for name, one in worker.refused.items()}}
        if answered != worker.claims.names:
            yield f"{worker.life} claims {worker.claims.names}, the answers are {answered}"
    if holders != job.holders:
        yield f"names of {job.job_id} are held as {holders}, yet known as {job.holders}"


def _waiting(cluster: Cluster) -> Iterator[str]:
    """Whoever waits has somebody who will answer."""
    for job_id, polls in cluster.polls.items():
        for poll in polls:
            key = ("poll", job_id, poll.peer.hex(), str(poll.request_id))
            if key not in cluster.timers or job_id not in cluster.jobs:
                yield f"a poll for {job_id} waits for ever"
    for number in cluster.reads:
        if ("read", str(number)) not in cluster.timers:
            yield f"log read {number} waits for ever"
    for job in cluster.jobs.values():
        for worker in job.workers.values():
            is_due = worker.is_desired and worker.state is WorkerState.STARTING
            if is_due and ("start", job.job_id, worker.name, str(worker.incarnation)) not in cluster.timers:
                yield f"{worker.life} may start for ever"

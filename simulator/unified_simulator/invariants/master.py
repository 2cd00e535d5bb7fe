"""Invariants of the master's state; every step checks the whole cluster, or what the step touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from unified.job.spec import RoleSpec, has_range
from unified.protocol.agent_master import RunOrder
from unified.protocol.records import EventRecord, NodeState, Reachability, Stage, WorkerState
from unified_master.core import presence
from unified_master.core.membership import MEMBERSHIP_MOVES, WorkerMembership, membership_of
from unified_master.core.messages import MasterAction, MasterEvent, Received, SaveRecord, Send
from unified_master.core.node_capacity import EPSILON, DeviceKey, NodeCapacity
from unified_master.core.rounds import incarnations, rendezvous
from unified_master.core.state import Cluster, JobRecord, NodeRecord, WorkerRecord

WORKERS_A_STEP = 5
"""Workers of a large job that sparing checks look at per step, on average."""
MOST_MOVES = 2
"""Most moves of a membership in one step: the end of an incarnation, and the start of the next."""
_ORDERED = (WorkerState.RUNNING, WorkerState.FINISHED)


def _within(moves: int, old: WorkerMembership) -> set[WorkerMembership]:
    nearby = {old}
    for _ in range(moves):
        nearby |= {new for each in nearby for new in MEMBERSHIP_MOVES.moves[each]}
    return nearby


_WITHIN_A_STEP = {old: _within(MOST_MOVES, old) for old in WorkerMembership}


def check(
    cluster: Cluster,
    nodes: Iterable[NodeRecord] | None = None,
    jobs: Iterable[JobRecord] | None = None,
    workers: Iterable[WorkerRecord] = (),
) -> list[str]:
    """Return the broken invariants of the given nodes and jobs (None: all of them), and of each given worker alone."""
    broken: list[str] = []
    for worker in workers:
        broken += _place(cluster, worker)
        broken += _start(cluster, worker)
    for node in cluster.nodes.values() if nodes is None else nodes:
        broken += _node(cluster, node)
    for job in cluster.jobs.values() if jobs is None else jobs:
        broken += _locations(cluster, job)
        broken += _stage(cluster, job)
        broken += _rounds(job)
        broken += _gathering(cluster, job)
        broken += _orders(cluster, job)
        broken += _budgets(job)
        broken += _charges(cluster, job)
        broken += _names(job)
        broken += _account(job)
        for worker in job.workers.values():
            broken += _start(cluster, worker)
        broken += _leaving(cluster, job)
    broken += _waiting(cluster)
    if nodes is None:
        for node in cluster.nodes.values():
            broken += _capacities(node)
        leaving = {(node.name, incarnation) for node in cluster.nodes.values() for incarnation in node.leaving}
        known = {key for of_job in cluster.leaving.values() for key in of_job}
        broken += [f"{key} leaves, and is missing where its node or its job has it" for key in leaving ^ known]
    return broken


def _node(cluster: Cluster, node: NodeRecord) -> Iterator[str]:
    """No resource is allocated twice, and every listed worker has its placement on this node."""
    has = node.info.resources
    cpu = memory_mb = disk_mb = 0.0
    shares: dict[DeviceKey, float] = {}
    named: dict[str, float] = {}
    for allocation in node.allocations.values():
        cpu, memory_mb = cpu + allocation.cpu, memory_mb + allocation.memory_mb
        disk_mb += allocation.disk_mb
        for key in allocation.devices:
            shares[key] = shares.get(key, 0.0) + allocation.share
        for name, amount in allocation.user_defined.items():
            named[name] = named.get(name, 0.0) + amount
    offered = {"cpu": has.cpu, "memory_mb": has.memory_mb, "disk_mb": has.disk_mb, **has.user_defined}
    for name, amount in {"cpu": cpu, "memory_mb": memory_mb, "disk_mb": disk_mb, **named}.items():
        if amount > offered.get(name, 0.0) + EPSILON:
            yield f"node {node.name}: {amount:g} of {offered.get(name, 0.0):g} {name} are claimed"
    for key, share in shares.items():
        if share > 1 + 1e-4:
            yield f"node {node.name}: {share:g} of device {key} is claimed"
    if node.state is NodeState.LOST and (node.incarnations or node.allocations or node.leaving):
        yield f"node {node.name} is lost and still has workers"
    if not node.is_in_service:
        for incarnation in node.incarnations:
            if all(role.change_due_at is None for role in cluster.jobs[incarnation.job_id].roles.values()):
                yield f"node {node.name} is out of service, and {incarnation} is desired there, no change announced"
    if node.state is NodeState.ALIVE and cluster.leases.deadline(node.name) is None:
        yield f"node {node.name} is alive without a lease"
    for incarnation, worker in node.incarnations.items():
        if worker.incarnation_id != incarnation or worker.node != node.name or not worker.is_desired:
            yield f"node {node.name}: {incarnation} is listed, but {worker.incarnation_id} is on {worker.node}"
        if incarnation in node.leaving:
            yield f"node {node.name}: {incarnation} is both desired and leaving"
    for job_id, name in node.allocations:
        holder = cluster.worker(job_id, name)
        if holder is None or holder.node != node.name or holder.allocation is None:
            yield f"node {node.name}: {job_id}/{name} has a place, but not this one"


def _capacities(node: NodeRecord) -> Iterator[str]:
    """The capacities that placement keeps equal what is free."""
    for (kind, cap, is_empty), known in node.capacities.items():
        found = NodeCapacity(node.name, node.info.resources, kind, cap, node.info.labels)
        for allocation in () if is_empty else node.held():
            found.subtract(allocation)
        if found.state() != known.state():
            yield f"node {node.name}: {known.state()} is taken for free of {kind}, and {found.state()} is"


def _locations(cluster: Cluster, job: JobRecord) -> Iterator[str]:
    """A worker's desired incarnation is on its own node; `_node` finds incarnations that other nodes list."""
    devices: dict[str, set[DeviceKey]] = {}
    used: set[str] = set()
    for worker in job.workers.values():
        if worker.is_desired or worker.allocation is not None:
            yield from _place(cluster, worker)
        if worker.allocation is not None:
            devices.setdefault(worker.node, set()).update(worker.allocation.devices)
            if worker.kind == "worker":
                used.add(worker.node)
    if len(used) > job.spec.node_num:
        yield f"job {job.job_id} uses {sorted(used)}; node_num={job.spec.node_num}"
    for name, keys in devices.items():
        if len(keys) > job.spec.device_cap:
            yield f"job {job.job_id} uses {len(keys)} devices of {name}; it may use {job.spec.device_cap}"


def _place(cluster: Cluster, worker: WorkerRecord) -> list[str]:
    """A worker's node lists the worker and its allocation."""
    broken: list[str] = []
    node = cluster.nodes.get(worker.node)
    if worker.is_desired and (node is None or node.incarnations.get(worker.incarnation_id) is not worker):
        broken.append(f"{worker.incarnation_id} is desired on {worker.node!r}, which does not list it")
    if worker.allocation is not None and (node is None or worker.place_key not in node.allocations):
        broken.append(f"{worker.incarnation_id} has its place on {worker.node!r}, which does not know of it")
    if worker.is_desired and worker.allocation is None:
        broken.append(f"{worker.incarnation_id} is desired without a place")
    return broken


def _stage(cluster: Cluster, job: JobRecord) -> Iterator[str]:
    holds = [worker.name for worker in job.workers.values() if worker.allocation is not None]
    desired = [worker.name for worker in job.workers.values() if worker.is_desired]
    if (job.is_waiting or job.stage is Stage.STOPPED) and (holds or desired):
        yield f"job {job.job_id} is {job.stage} without a place, yet holds {holds} and desires {desired}"
    if job.is_ending and (desired or job.outcome is None):
        yield f"job {job.job_id} is {job.stage} with outcome {job.outcome}, yet desires {desired}"
    if (job.stage is Stage.STOPPED) != (job.exit_code is not None):
        yield f"job {job.job_id} is {job.stage} with exit code {job.exit_code}"
    for worker in [one for role in job.driver_roles() for one in job.ranks(role.name)] if job.outcome == 0 else []:
        is_left_out = worker.node_rank < 0 and has_range(job.spec.role(worker.role))
        if not is_left_out and (worker.incarnation < 0 or worker.is_held or worker.failure is not None):
            yield f"job {job.job_id} ended well, and {worker.incarnation_id}, for which it waits, did not finish"
    if job.restart_at is not None and ("restart", job.job_id) not in cluster.timers:
        yield f"job {job.job_id} waits to restart, and nothing will wake it"
    if job.restart_at is None and any(worker.is_held for worker in job.workers.values()):
        yield f"job {job.job_id} holds workers back for ever"
    for role in job.roles.values():
        if role.suspect and ("settle", job.job_id, role.name) not in cluster.timers:
            yield f"role {role.name} of {job.job_id} has a suspect, and nothing will settle it"


def _rounds(job: JobRecord) -> Iterator[str]:
    """All workers of a role are in its round, with ranks from 0 and one store prefix."""
    for role in job.elastic_roles():
        orders = [worker.run for worker in job.ranks(role.name) if worker.is_desired and worker.run is not None]
        newest = [order for order in orders if order.round == job.roles[role.name].round]
        if len(newest) != len(orders):
            yield f"role {role.name} of {job.job_id} has orders of rounds {sorted({order.round for order in orders})}"
        if len({order.store_prefix for order in newest}) > 1:
            yield f"round {job.roles[role.name].round} of role {role.name} of {job.job_id} has two prefixes"
        for worker in job.ranks(role.name):
            order = worker.run
            is_right = order is None or (order.rank, order.world_size) == (worker.rank, role.total)
            if not is_right and not has_range(role):
                rank, size = (order.rank, order.world_size) if order else (None, 0)
                yield f"{worker.incarnation_id} has rank {rank} of {size}"
        if has_range(role) and newest:
            yield from _ranks_of_range(job, role, newest)


def _ranks_of_range(job: JobRecord, role: RoleSpec, orders: list[RunOrder]) -> Iterator[str]:
    sizes, ranks = {order.world_size for order in orders}, [order.rank for order in orders]
    size = max(sizes)
    if len(sizes) > 1 or len(set(ranks)) < len(ranks) or max(ranks) >= size:
        yield f"role {role.name} of {job.job_id} has ranks {sorted(ranks)} of {sorted(sizes)}"
    if not role.min_groups * role.per_group <= size <= role.total or size % role.per_group:
        yield f"role {role.name} of {job.job_id} has {size} ranks in its round"


def _gathering(cluster: Cluster, job: JobRecord) -> Iterator[str]:
    """Workers that survive a break of their round are ordered into the next round, and have a deadline to join."""
    for worker in job.workers.values():
        is_timed = ("join", job.job_id, worker.name, str(worker.incarnation)) in cluster.timers
        if worker.is_joining and not is_timed and worker.notice is None:
            yield f"{worker.incarnation_id} may take for ever to join round {worker.run.round if worker.run else 0}"
    for role in job.elastic_roles():
        workers = job.members(role)
        if any(
            worker.notice is not None and worker.notice.kind == "broken" and worker.is_desired for worker in workers
        ):
            unable = [one.name for one in workers if one.is_desired and one.state in _ORDERED and not one.rejoins]
            if unable:
                yield f"role {role.name} of {job.job_id} waits for {unable}, which cannot rejoin"
            awaited = any(
                not one.rejoins and not (one.state is WorkerState.READY and one.run is None) for one in workers
            )
            is_store_up = job.store is not None and job.store.state is WorkerState.READY
            is_held_up = job.roles[role.name].waits_until is not None or cluster.leaving_of(job.job_id)
            if not awaited and is_store_up and not is_held_up:
                yield f"role {role.name} of {job.job_id} has all for its next round, which is not sealed"


def _orders(cluster: Cluster, job: JobRecord) -> Iterator[str]:
    """A worker that is ready for an order to run has one: waiting for the order has no deadline."""
    is_put_off = cluster.leaving_of(job.job_id) or ("advance", job.job_id) in cluster.timers
    if is_put_off or not job.is_placed or job.is_ending or not rendezvous.is_store_ready(job):
        return
    workers = [worker for worker in job.workers.values() if worker.kind == "worker" and not job.is_absent(worker)]
    if job.stage is not Stage.RUNNING:
        if all(worker.has_ended_well or rendezvous.is_ready(worker) for worker in workers):
            yield f"job {job.job_id} is {job.stage}, and all its workers are READY"
        return
    for role in job.spec.roles:
        members = job.members(role)
        free = [worker for worker in members if rendezvous.is_ready(worker) and worker.run is None]
        if role.kind == "elastic" and job.roles[role.name].waits_until is None:
            left = [worker for worker in members if rendezvous.has_left(worker)]
            free = free if len(free) + len(left) == len(members) else []
        elif role.kind == "elastic":
            free = []
        if free:
            yield f"{free[0].incarnation_id} and all workers that it waits for are READY, but it has no order to run"


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


def _charges(cluster: Cluster, job: JobRecord) -> Iterator[str]:
    """With a restart window, the counts match the charges within it; every due time has a timer."""
    if job.spec.restart_window_s:
        spent = sum(record.num_failures for record in job.roles.values()) + sum(job.node_losses.values())
        store = job.store.num_failures if job.store else 0
        if (counted := spent + store + job.num_charged_restarts) != len(job.charges):
            yield f"job {job.job_id} has {len(job.charges)} charges, and counts {counted}"
        if job.charges and not job.is_ending and ("refill", job.job_id) not in cluster.timers:
            yield f"the charges of job {job.job_id} will never be taken back"
    for record in job.roles.values():
        is_due = record.group_due_at is not None and not job.is_ending
        if is_due and ("group", job.job_id, record.name) not in cluster.timers:
            yield f"the failed groups of role {record.name} of {job.job_id} will never be given up"


def check_charges(cluster: Cluster, faults: Counter[str], log: Iterable[EventRecord]) -> Iterator[str]:
    """Yield the jobs that are charged for more failures than faults have hit them: one death, one charge.

    Args:
        faults: deaths of processes, of zygotes with all their processes, and broken collectives, by job.
        log: the master's events: each loss of a node is a fault, too.
    """
    losses = Counter(event.node for event in log if event.event == "node-lost")
    for job in cluster.jobs.values():
        charged = {worker.name: worker.num_failures for worker in job.workers.values() if worker.num_failures}
        if sum(charged.values()) > faults[job.job_id]:
            yield f"job {job.job_id} was hit by {faults[job.job_id]} faults, and is charged for {charged}"
        for node, number in job.node_losses.items():
            if number > losses[node]:
                yield f"job {job.job_id} is charged for {number} losses of {node}, which was lost {losses[node]} times"
        most = faults[job.job_id] + sum(losses.values())
        if job.num_charged_restarts > most:
            yield f"job {job.job_id} is charged for {job.num_charged_restarts} restarts after {most} faults"


def _names(job: JobRecord) -> Iterator[str]:
    """A name has one holder, which is alive and published; every claim has an answer."""
    holders: dict[str, str] = {}
    for worker in job.workers.values():
        if not (worker.names or worker.refused or worker.claims.names):
            continue
        for name in worker.names:
            if name in holders:
                yield f"name {name!r} of {job.job_id} is held by {holders[name]} and {worker.name}"
            holders[name] = worker.name
        if worker.names and not job.can_call(worker):
            yield f"{worker.incarnation_id} holds names, and its incarnation is over"
        entry = worker.entry
        counted = (entry.incarnation, entry.state, entry.names, entry.refused, entry.revision) if entry else None
        true = (worker.incarnation, Reachability.ALIVE, worker.names, worker.refused, worker.revision)
        if (worker.names or worker.refused) and counted != true:
            yield f"{worker.incarnation_id} has the names {true}, published as {counted}"
        answered = {**worker.names, **{name: one.number for name, one in worker.refused.items()}}
        if answered != worker.claims.names:
            yield f"{worker.incarnation_id} claims {worker.claims.names}, the answers are {answered}"
    if holders != job.holders:
        yield f"names of {job.job_id} are held as {holders}, yet known as {job.holders}"


def _waiting(cluster: Cluster) -> Iterator[str]:
    """Requests that wait have a deadline."""
    for job_id, watches in cluster.watches.items():
        if any(key not in cluster.timers for key in watches):
            yield f"a watch of {job_id or 'the cluster'} waits for ever"
    for number in cluster.reads:
        if ("read", str(number)) not in cluster.timers:
            yield f"log read {number} waits for ever"
    for number in cluster.collections:
        if ("stacks", str(number)) not in cluster.timers:
            yield f"collection {number} of stacks waits for ever"
    asked = {(each.job_id, *each.hang) for each in cluster.collections.values()}
    for watched in cluster.hangs:
        if ("hang", *watched) not in cluster.timers and watched not in asked:
            yield f"{watched} is watched for a hang, and nothing will look"


def _account(job: JobRecord) -> Iterator[str]:
    """The seconds of all phases add up to the wall time, and the phase matches the job's stage and workers."""
    account = job.account
    spent, seconds = job.account.spent, job.account.spent.seconds.values()
    if abs(spent.since - job.submitted_at - sum(seconds)) > 1e-3 or min(seconds, default=0.0) < 0:
        yield f"job {job.job_id} accounts for {sum(seconds)} s of {spent.since - job.submitted_at} s: {spent}"
    if (away := {name for name, worker in job.workers.items() if presence.is_away(job, worker)}) != job.away:
        yield f"job {job.job_id}: {sorted(away ^ job.away)} are away, or are taken to be"
    is_whole = job.stage is Stage.RUNNING and not away
    if account.is_whole != is_whole or not (is_whole or spent.phase == (presence.phase_of(job) or "")):
        yield f"job {job.job_id} is {job.stage}, {len(away)} away, and accounted as {spent.phase}"
    if job.stage is Stage.STOPPED and spent.since != job.ended_at:
        yield f"job {job.job_id} ended at {job.ended_at}, and is accounted for until {spent.since}"


def _leaving(cluster: Cluster, job: JobRecord) -> Iterator[str]:
    """Incarnations that leave are known both by job and by node."""
    for leaving in cluster.leaving_of(job.job_id):
        node = cluster.nodes.get(leaving.node)
        if node is None or node.leaving.get(leaving.incarnation) is not leaving:
            yield f"{leaving.incarnation} is waited for, and node {leaving.node} does not expect its end"


def _start(cluster: Cluster, worker: WorkerRecord) -> list[str]:
    """A starting worker has a timer."""
    is_due = worker.is_desired and worker.state is WorkerState.STARTING
    is_armed = not is_due or incarnations.start_timer(worker) in cluster.timers
    return [] if is_armed else [f"{worker.incarnation_id} may start for ever"]


class InvariantChecks:
    """Checks a cluster after every step of its master.

    Args:
        all_every: steps between two checks of the whole cluster; other steps check the nodes, jobs and workers that
            they touched.
        is_sparing: a job that was checked is left out until one step has passed for every 5 of its workers.
    """

    def __init__(self, all_every: int, *, is_sparing: bool) -> None:
        self.count: Counter[str] = Counter()
        """Number of steps, and of checks of the whole cluster, of single nodes, jobs and workers."""
        self._all_every = all_every
        self._is_sparing = is_sparing
        self._checked: dict[str, int] = {}
        """Step at which each job was last checked."""
        self._memberships: dict[tuple[str, str], WorkerMembership] = {}

    def after(
        self, cluster: Cluster, event: MasterEvent | None, actions: Iterable[MasterAction], but: bytes
    ) -> list[str]:
        """Return the broken invariants after a step; None as event is a restart of the master, which checks all."""
        self.count["steps"] += event is not None
        if event is None or self.count["steps"] % self._all_every == 0:
            self.count["whole cluster"] += 1
            if event is None:  # a restarted master has lost its unsaved changes
                self._memberships.clear()
            every = [worker for job in cluster.jobs.values() for worker in job.workers.values()]
            return [*self._moves(every), *check(cluster)]
        nodes, jobs, workers = touched(cluster, event, actions, but)
        jobs = [job for job in jobs if self._is_due(job)]
        self.count["nodes"] += len(nodes)
        self.count["jobs"] += len(jobs)
        self.count["workers"] += len(workers)
        return [*self._moves(workers), *check(cluster, nodes, jobs, workers)]

    def _moves(self, workers: Iterable[WorkerRecord]) -> Iterator[str]:
        """A worker's membership changes by legal moves, at most `MOST_MOVES` in a step."""
        for worker in workers:
            new = membership_of(worker)
            old = self._memberships.get(worker.place_key, new)
            self._memberships[worker.place_key] = new
            if new is not old and new not in _WITHIN_A_STEP[old]:
                yield f"{worker.incarnation_id} went from {old} to {new}, which no {MOST_MOVES} moves do"

    def _is_due(self, job: JobRecord) -> bool:
        steps = self.count["steps"]
        if self._is_sparing and steps - self._checked.get(job.job_id, 0) < len(job.workers) / WORKERS_A_STEP:
            return False
        self._checked[job.job_id] = steps
        return True


def touched(
    cluster: Cluster, event: MasterEvent, actions: Iterable[MasterAction], but: bytes
) -> tuple[list[NodeRecord], list[JobRecord], list[WorkerRecord]]:
    """Return the nodes, jobs and workers that a step touched; `but` is the peer that is no node."""
    workers: list[WorkerRecord] = []
    nodes: dict[str, None] = {}
    jobs: dict[str, None] = {}
    if isinstance(event, Received) and event.peer != but:
        nodes[event.peer.decode().partition("/")[0]] = None
    for action in actions:
        match action:
            case Send(peer=peer) if peer != but:
                nodes[peer.decode().partition("/")[0]] = None
            case SaveRecord(kind="worker", key=key):
                job_id, _, name = key.partition("/")
                jobs[job_id] = None
                if (worker := cluster.worker(job_id, name)) is not None:
                    workers.append(worker)
                    nodes[worker.node] = None
                    nodes.update({past.node: None for past in worker.past[-1:]})
            case SaveRecord(kind="job", key=key):
                jobs[key] = None
            case SaveRecord(kind="node", key=key):
                nodes[key] = None
    return (
        [cluster.nodes[name] for name in nodes if name in cluster.nodes],
        [cluster.jobs[name] for name in jobs if name in cluster.jobs],
        workers,
    )

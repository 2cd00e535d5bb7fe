"""Budgets of a job: charges for failures, the limits of the charges, and the refill over time.

Counts are kept for each job, by worker, role and node name, in saved records: they survive a new agent of a node and a
restart of the master. A charge that is older than the job's `restart_window_s` is taken back. Nobody else changes the
counts: `charge` is for a failure, `charge_restart` for the restart of a whole job.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import takewhile
from typing import NamedTuple

from unified.core.backoff import Backoff
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.client_master import BudgetUse
from unified.protocol.records import Failure
from unified_master.core.state import Charge, JobRecord, NodeRecord, WorkerRecord
from unified_master.core.step import MasterStep

QUICK_S = 1.0
"""Time of running below which a failure is quick: each quick one in a row makes the wait for a restart longer."""

NODE_LIMIT = "per_node_max_failure"
"""Name of the limit past which a role's failures on a node exclude the node."""
EARLY_S = 300.0
"""Time of running after which a worker may have made progress without reporting a step."""
MAX_CAUSES = 100
"""Faults, and broken rounds of unknown cause, that are remembered as charged."""
MAX_FRUITLESS = 5
"""Charged failures in a row without a new step between them, after which the job is not restarted."""
_MAY_PASS = (
    *("Connect", "Timeout", "Unavailable", "Unreachable", "URLError", "gaierror"),
    *("AcceleratorError", "torch.distributed.", "EngineError"),
)
"""Parts of the type names of errors of networks, devices and engines, which may not recur."""


class Refusal(NamedTuple):
    """The limit that forbids to repair a failure, and a sentence about it."""

    limit: str
    why: str


def charge(
    step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure, *, lost: NodeRecord | None = None
) -> Refusal | None:
    """Charge a failure of a worker or of the store host, or the loss of a node; return what forbids to repair it.

    A fault that ended several workers is charged once. A late root cause takes over what was charged in its place.

    Args:
        lost: the lost node of `worker`; the loss is charged once, and to the node alone.
    """
    if (refusal := policy_refusal(job.spec)) is not None:
        return refusal
    for each in [worker] if lost is None else [peer for peer in job.workers.values() if peer.node == lost.name]:
        _take_back(step, job, each)
    if lost is not None:
        return _charge_loss(step, job, lost)
    if failure.category == "node" or failure.cause in job.charged_causes:
        return None
    if failure.cause:
        job.charged_causes = dict([*job.charged_causes.items(), (failure.cause, worker.name)][-MAX_CAUSES:])
    if worker.kind == "store":
        return _charge_store(step, job, worker)
    refusal = _charge_failure(step, job, worker, failure)
    return refusal or _permanent_refusal(step, job, worker, failure) or _fruitless_refusal(step, job, worker)


def policy_refusal(spec: JobSpec) -> Refusal | None:
    """Return what in the job's strategies forbids any restart."""
    if spec.failover_trigger == 0:
        return Refusal("failover_trigger_strategy=0", "failover_trigger_strategy=0 never restarts")
    if spec.failover_exec == 0:
        return Refusal("failover_exec_strategy=0", "failover_exec_strategy=0 stops the job at a failure")
    return None


def _take_back(step: MasterStep, job: JobRecord, worker: WorkerRecord) -> None:
    """Take back charges for rounds that broke since the worker joined its last one: its failure is their cause."""
    if (record := job.roles.get(worker.role)) is None or worker.run is None:
        return
    taken = [each for each in record.presumed if each.round >= worker.round and each.at >= worker.began_at]
    record.presumed = [each for each in record.presumed if each not in taken]
    for each in taken:
        if each in job.charges or not job.spec.restart_window_s:  # else it no longer counts
            job.charges = [one for one in job.charges if one != each]
            _count(step, job, each, -1)


def _charge_failure(step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure) -> Refusal | None:
    """Charge a root cause to its worker, its role and its node; return the limit that is exceeded."""
    role, record = job.spec.role(worker.role), job.roles[worker.role]
    is_quick = worker.running_at is None or step.now - worker.running_at < QUICK_S
    record.num_quick = record.num_quick + 1 if is_quick else 0
    broken = worker.run.round if failure.is_collateral and role.kind == "elastic" and worker.run is not None else 0
    charge = Charge(at=step.now, worker=worker.name, role=role.name, node=worker.node, round=broken)
    _charge(step, job, charge)
    record.presumed = [*record.presumed, charge][-MAX_CAUSES:] if broken else record.presumed
    if role.role_max_restart is not None:
        if record.num_failures <= role.role_max_restart:
            return None
        limit = f"role_max_restart={role.role_max_restart}"
        return Refusal("role_max_restart", f"the limit {limit} (--max-restarts) of role {role.name} is used up")
    if worker.num_failures > role.max_restart:
        return Refusal("max_restart", f"the limit max_restart={role.max_restart} of role {role.name} is used up")
    return None


def _permanent_refusal(step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure) -> Refusal | None:
    """Return a refusal if the last restart led to the same error before any step; else remember the error.

    Equal failures of ranks count once: the second must be of an incarnation that began after the first failure.
    """
    record = job.roles[worker.role]
    digest = sha256(failure.traceback.encode()).hexdigest()[:16] if _is_early(step, job, worker, failure) else ""
    if digest and digest == record.early_failure:
        if worker.began_at < record.early_failure_at:
            return None
        return Refusal("permanent", "permanent: the same error at the same line before any step, twice")
    record.early_failure, record.early_failure_at = digest, step.now
    step.touch_job(job)
    return None


def _fruitless_refusal(step: MasterStep, job: JobRecord, worker: WorkerRecord) -> Refusal | None:
    """Return a refusal if the last restarts brought no new step.

    It needs a role that reports steps. Ranks that fail in the same incarnation count once.
    """
    record, peak = job.roles[worker.role], job.account.peak
    if job.account.role != worker.role:
        return None
    if peak > record.fruitless_peak:
        record.num_fruitless, record.fruitless_peak = 0, peak
    elif worker.began_at < record.fruitless_at:
        return None
    record.num_fruitless += 1
    record.fruitless_at = step.now
    step.touch_job(job)
    if record.num_fruitless < MAX_FRUITLESS:
        return None
    return Refusal("permanent", f"permanent: {record.num_fruitless} failures in a row, and no step beyond {peak}")


def _is_early(step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure) -> bool:
    """Return True for an exception of a worker's own code, before any step and likely to recur."""
    is_own = failure.category == "user" and bool(failure.traceback) and not failure.is_collateral
    has_run_long = worker.running_at is not None and step.now - worker.running_at >= EARLY_S
    may_pass = has_run_long or any(part in failure.exception_type for part in _MAY_PASS)
    return is_own and not (may_pass or any(peer.has_stepped for peer in job.workers.values()))


def _charge_store(step: MasterStep, job: JobRecord, store: WorkerRecord) -> Refusal | None:
    """Charge the end of the job's torch store. Its limit is the largest `max_restart` of the elastic roles."""
    _charge(step, job, Charge(at=step.now, worker=store.name))
    limit = max(role.max_restart for role in job.elastic_roles())
    if store.num_failures > limit:
        return Refusal("max_restart", f"the limit max_restart={limit} is used up for the job's torch store")
    return None


def _charge_loss(step: MasterStep, job: JobRecord, node: NodeRecord) -> Refusal | None:
    """Charge a lost node, once for all workers that it took along."""
    _charge(step, job, Charge(at=step.now, node=node.name))
    limit = job.spec.node_max_restart
    if job.node_losses[node.name] > limit:
        return Refusal("node_max_restart", f"the limit node_max_restart={limit} is used up for node {node.name}")
    return None


def job_refusal(job: JobRecord) -> Refusal | None:
    """Return a refusal if the whole job may not restart once more."""
    limit = job.spec.job_max_restart
    if job.num_charged_restarts >= limit:
        return Refusal("job_max_restart", f"the limit job_max_restart={limit} is used up")
    return None


def charge_restart(step: MasterStep, job: JobRecord) -> None:
    _charge(step, job, Charge(at=step.now))


def in_use(job: JobRecord) -> list[BudgetUse]:
    """Return the limits that were charged, with their use."""
    uses: list[tuple[str, str, int, int]] = []
    roles = {role.name: role for role in job.spec.roles}
    for worker in [each for each in job.workers.values() if each.num_failures]:  # few of many workers
        role = roles.get(worker.role)
        if role is None:  # the store host
            allowed = max((role.max_restart for role in job.elastic_roles()), default=0)
            uses.append(("max_restart", worker.name, worker.num_failures, allowed))
        elif role.role_max_restart is None:
            uses.append(("max_restart", worker.name, worker.num_failures, role.max_restart))
    for role in job.spec.roles:
        record = job.roles[role.name]
        if role.role_max_restart is not None:
            uses.append(("role_max_restart", role.name, record.num_failures, role.role_max_restart))
            continue
        for node, number in record.node_failures.items():
            uses.append((NODE_LIMIT, f"{role.name} on {node}", number, role.limits[NODE_LIMIT]))
    uses += [("node_max_restart", node, number, job.spec.node_max_restart) for node, number in job.node_losses.items()]
    uses.append(("job_max_restart", "", job.num_charged_restarts, job.spec.job_max_restart))
    return [
        BudgetUse(limit=limit, subject=subject, used=used, allowed=allowed)
        for limit, subject, used, allowed in uses
        if used
    ]


def is_used_up(job: JobRecord, node: str) -> bool:
    """Return True if any role's failures on this node exceed the role's limit."""
    return any(is_used_up_by(job, role, node) for role in job.spec.roles)


def is_used_up_by(job: JobRecord, role: RoleSpec, node: str) -> bool:
    """Return True if more failures of this role are charged to the node than the role allows for one node."""
    num_failures = job.roles[role.name].node_failures.get(node, 0)
    return num_failures > role.limits.get(NODE_LIMIT, num_failures)


def node_limit(role: RoleSpec) -> str:
    """Return the limit of a role's failures on one node, in words."""
    return f"{NODE_LIMIT}={role.limits[NODE_LIMIT]}"


def delay_s(job: JobRecord, num_quick: int) -> float:
    """Return the seconds to wait before a restart after this number of quick failures in a row."""
    return Backoff(limit_s=job.spec.restart_backoff_s).delay_s(max(0, num_quick - 1))


def cause(job: JobRecord, worker: WorkerRecord, failure: Failure, *, restarts_job: bool = False) -> str:
    """Return a failure in words, with what it was charged to and the limit that such failures reach first.

    Args:
        restarts_job: the whole job restarts, which is not charged yet.
    """
    who, spec = f"{worker.name} on {worker.node}: {failure.summary}", job.spec
    if failure.category == "node":
        who, name, limit = failure.summary, "node_max_restart", spec.node_max_restart
        what, number = "loss {} of that node", job.node_losses.get(worker.node, 0)
    elif (payer := job.charged_causes.get(failure.cause, worker.name)) != worker.name:
        return f"{who} (charged once, to {payer})"
    elif (role := spec.role(worker.role)).role_max_restart is not None:
        name, limit = "role_max_restart", role.role_max_restart
        what, number = "failure {} of the role", job.roles[role.name].num_failures
    else:
        what, name, number, limit = "failure {}", "max_restart", worker.num_failures, role.max_restart
    if restarts_job and spec.job_max_restart - job.num_charged_restarts - 1 < limit - number:
        what, name, limit = "restart {} of the job", "job_max_restart", spec.job_max_restart
        number = job.num_charged_restarts + 1
    within = f" in {spec.restart_window_s:g} s" if spec.restart_window_s else ""
    return f"{who} ({what.format(number)}{within}, {name}={limit})"


def refill(step: MasterStep, job: JobRecord) -> None:
    """Take back charges older than the job's window; arm a timer for the next charge, or given-up node, of that age.

    A job that has ended keeps its charges, so that clients still see them.
    """
    window_s = job.spec.restart_window_s
    if window_s <= 0 or job.is_ending:
        return
    old = list(takewhile(lambda charge: charge.at + window_s <= step.now, job.charges))
    if old:
        job.charges = job.charges[len(old) :]
        for charge in old:
            _count(step, job, charge, -1)
    times = [*(charge.at for charge in job.charges[:1]), *job.given_up.values()]
    due = [at + window_s for at in times if at + window_s > step.now]
    if due:
        step.cluster.timers.arm(("refill", job.job_id), min(due))


def _charge(step: MasterStep, job: JobRecord, charge: Charge) -> None:
    _count(step, job, charge, 1)
    if job.spec.restart_window_s > 0:
        job.charges = [*job.charges, charge]
        refill(step, job)


def _count(step: MasterStep, job: JobRecord, charge: Charge, number: int) -> None:
    if worker := job.workers.get(charge.worker):
        worker.num_failures += number
        step.touch_worker(job, worker)
    if charge.role:
        record = job.roles[charge.role]
        record.num_failures += number
        _add(record.node_failures, charge.node, number)
    elif charge.node:
        _add(job.node_losses, charge.node, number)
    elif not charge.worker:
        job.num_charged_restarts += number
    step.touch_job(job)


def _add(counts: dict[str, int], node: str, number: int) -> None:
    counts[node] = counts.get(node, 0) + number
    if not counts[node]:
        del counts[node]

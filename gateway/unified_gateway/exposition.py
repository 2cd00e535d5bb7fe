"""Metrics of the whole cluster for Prometheus, from the mirror: one scrape for any number of nodes.

Names and labels follow docs/observability.md. No label has a value per worker. A job's series end an hour after it.
The master keeps a job's counters, so that a restart of the gateway does not reset them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from statistics import median
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unified.client.mirror import ClusterMirror
from unified.client.report import SUSPENDED, node_state, stage_text
from unified.protocol.client_master import JobStatus, WorkerStatus
from unified.protocol.framing import PROTOCOL_VERSION
from unified.protocol.records import NodeState, Phase, Stage, WorkerState

SHOWN_S = 3600.0
"""Seconds after its end for which a job has series."""
MAX_REPORTED = 20
"""Most reported values of a role that have series."""
Labels = tuple[str, ...]
Values = Iterator[tuple[Labels, float]]


class Scraped(NamedTuple):
    """The cluster at one scrape, with groups that several families use."""

    mirror: ClusterMirror
    jobs: list[JobStatus]
    """Jobs that have series."""
    roles: list[tuple[JobStatus, str, list[WorkerStatus]]]
    """Roles of `jobs`, with their workers."""

    @classmethod
    def of(cls, mirror: ClusterMirror) -> Scraped:
        """Group the workers of a cluster once, for all families."""
        jobs = [job for job in mirror.jobs.values() if job.ended_at is None or mirror.at - job.ended_at < SHOWN_S]
        roles: list[tuple[JobStatus, str, list[WorkerStatus]]] = []
        for job in jobs:
            by_role: dict[str, list[WorkerStatus]] = {role.name: [] for role in job.roles}
            for worker in mirror.workers.get(job.job_id, {}).values():
                by_role.setdefault(worker.role, []).append(worker)
            roles += ((job, role, workers) for role, workers in by_role.items())
        return cls(mirror, jobs, roles)


class Family(NamedTuple):
    """A family of series, and the function that yields its values."""

    name: str
    help: str
    labels: Labels
    values: Callable[[Scraped], Values]
    is_counter: bool = False


class ClusterCollector(Collector):
    """Collector of the series of a cluster.

    Attributes:
        mirror: the cluster; None: the master does not answer.
    """

    def __init__(self, mirror: ClusterMirror | None = None) -> None:
        self.mirror = mirror

    def describe(self) -> Iterable[Metric]:
        return ()  # otherwise the registration would collect all series

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("unified_build_info", "Release of the gateway.", labels=["version", "protocol"])
        build.add_metric([version("unified-runtime"), str(PROTOCOL_VERSION)], 1)
        yield build
        yield GaugeMetricFamily("unified_master_up", "1 if the master answers.", value=float(self.mirror is not None))
        if self.mirror is None:
            return
        now = Scraped.of(self.mirror)
        for family in FAMILIES:
            kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
            made = kind(family.name, family.help, labels=family.labels)
            for labels, value in family.values(now):
                made.add_metric(labels, value)
            yield made


def _nodes(now: Scraped) -> Values:
    yield from (((state,), number) for state, number in Counter(map(node_state, now.mirror.nodes.values())).items())


def _node_up(now: Scraped) -> Values:
    yield from (((name,), float(node.state is NodeState.ALIVE)) for name, node in now.mirror.nodes.items())


def _devices(now: Scraped) -> Values:
    found: Counter[Labels] = Counter()
    for node in now.mirror.nodes.values():
        free = Counter(device.kind for device in node.free.devices)
        for kind, number in Counter(device.kind for device in node.resources.devices).items():
            is_alive = node.state is NodeState.ALIVE
            found[kind, "free" if is_alive else "lost"] += free[kind] if is_alive else number
            found[kind, "held"] += number - free[kind] if is_alive else 0
    yield from found.items()


def _amounts(field: str, factor: float = 1.0) -> Callable[[Scraped], Values]:
    def values(now: Scraped) -> Values:
        alive = [node for node in now.mirror.nodes.values() if node.state is NodeState.ALIVE]
        free = sum(getattr(node.free, field) for node in alive)
        yield ("free",), free * factor
        yield ("held",), (sum(getattr(node.resources, field) for node in alive) - free) * factor

    return values


def _stage(job: JobStatus) -> str:
    """Return the job's stage, or SUSPENDED, which an alert on waiting jobs needs."""
    return SUSPENDED if stage_text(job, 0.0) == SUSPENDED else job.stage.value


def _jobs(now: Scraped) -> Values:
    yield from (((stage,), number) for stage, number in Counter(map(_stage, now.mirror.jobs.values())).items())


def _job_info(now: Scraped) -> Values:
    yield from (((job.job_id, job.name, job.submitted_by), 1) for job in now.jobs)


def _job_stage(now: Scraped) -> Values:
    for job in now.jobs:
        yield from (((job.job_id, stage), float(_stage(job) == stage)) for stage in (*Stage, SUSPENDED))


def _job_times(field: str) -> Callable[[Scraped], Values]:
    def values(now: Scraped) -> Values:
        for job in now.jobs:
            if at := getattr(job, field):
                yield (job.job_id,), at

    return values


def _exit_codes(now: Scraped) -> Values:
    yield from (((job.job_id,), job.exit_code) for job in now.jobs if job.exit_code is not None)


def _job_workers(now: Scraped) -> Values:
    for job, role, workers in now.roles:
        states = Counter(worker.state for worker in workers)
        yield from (((job.job_id, role, state.value), states[state]) for state in WorkerState)


def _restarts(now: Scraped) -> Values:
    for job in now.jobs:
        yield (job.job_id, "job"), job.num_restarts
        yield from (((job.job_id, role.name), role.num_restarts) for role in job.roles)


def _failures(now: Scraped) -> Values:
    for job, role, workers in now.roles:
        yield (job.job_id, role), sum(worker.num_failures for worker in workers)


def _left(now: Scraped) -> Values:
    for job in now.jobs:
        least: dict[str, int] = {}
        for use in job.budgets:
            least[use.limit] = min(least.get(use.limit, use.allowed), use.allowed - use.used)
        yield from (((job.job_id, limit), left) for limit, left in least.items())


def _rounds(now: Scraped) -> Values:
    yield from (((job.job_id, role.name), role.round) for job in now.jobs for role in job.roles)


def _world_sizes(now: Scraped) -> Values:
    alive = (WorkerState.RUNNING, WorkerState.SERVING)
    for job, role, workers in now.roles:
        yield (job.job_id, role), sum(worker.state in alive for worker in workers)


def _steps(now: Scraped) -> Values:
    for job, role, workers in now.roles:
        steps = [worker.progress.step for worker in workers if worker.progress and worker.progress.step is not None]
        if steps:
            yield (job.job_id, role, "slowest"), min(steps)
            yield (job.job_id, role, "median"), median(steps)
            yield (job.job_id, role, "fastest"), max(steps)


def _targets(now: Scraped) -> Values:
    for job, role, workers in now.roles:
        if totals := [worker.progress.total for worker in workers if worker.progress and worker.progress.total]:
            yield (job.job_id, role), max(totals)


def _reported(now: Scraped) -> Values:
    for job, role, workers in now.roles:
        values: dict[str, list[float]] = {}
        for worker in workers:
            for name, value in worker.progress.metrics.items() if worker.progress else ():
                if isinstance(value, int | float) and (name in values or len(values) < MAX_REPORTED):
                    values.setdefault(name, []).append(value)
        for name, found in values.items():
            for statistic, value in (("min", min(found)), ("mean", sum(found) / len(found)), ("max", max(found))):
                yield (job.job_id, role, name, statistic), value


def _seconds(now: Scraped) -> Values:
    for job in now.jobs:
        if job.times is not None:
            spent = job.times.at(now.mirror.at)
            yield from (((job.job_id, phase.value), spent.get(phase.value, 0.0)) for phase in Phase)


FAMILIES = (
    Family("unified_nodes", "Nodes by state.", ("state",), _nodes),
    Family("unified_node_up", "1 if the node is believed alive.", ("node",), _node_up),
    Family(
        "unified_devices", "Accelerators by kind: free, held by jobs, or on lost nodes.", ("kind", "state"), _devices
    ),
    Family("unified_cpus", "CPUs of living nodes: free, or held by jobs.", ("state",), _amounts("cpu")),
    Family("unified_memory_bytes", "Memory of living nodes: free, or held.", ("state",), _amounts("memory_mb", 2**20)),
    Family("unified_jobs", "Jobs that are known, by stage.", ("stage",), _jobs),
    Family("unified_job_info", "Name and submitter of a job.", ("job_id", "name", "owner"), _job_info),
    Family("unified_job_stage", "1 for the stage that the job is in.", ("job_id", "stage"), _job_stage),
    Family("unified_job_submitted_timestamp_seconds", "Time of submission.", ("job_id",), _job_times("submitted_at")),
    Family("unified_job_started_timestamp_seconds", "Time of the first start.", ("job_id",), _job_times("started_at")),
    Family("unified_job_ended_timestamp_seconds", "Time of the end.", ("job_id",), _job_times("ended_at")),
    Family("unified_job_exit_code", "Exit code of a job that has ended.", ("job_id",), _exit_codes),
    Family("unified_job_workers", "Workers by role and state.", ("job_id", "role", "state"), _job_workers),
    Family("unified_job_restarts", "Restarts of the job, and of each role.", ("job_id", "scope"), _restarts, True),
    Family("unified_worker_failures", "Failures charged to workers.", ("job_id", "role"), _failures, True),
    Family("unified_job_restarts_left", "Rest of a limit of which some is used up.", ("job_id", "limit"), _left),
    Family("unified_job_time_seconds", "Seconds of the job by phase.", ("job_id", "phase"), _seconds),
    Family("unified_role_round", "Round of the rendezvous.", ("job_id", "role"), _rounds),
    Family("unified_role_world_size", "Workers of the role that run.", ("job_id", "role"), _world_sizes),
    Family("unified_role_step", "Step that workers have reported.", ("job_id", "role", "of"), _steps),
    Family("unified_role_steps_target", "Number of steps to do.", ("job_id", "role"), _targets),
    Family(
        "unified_role_reported", "Values that workers have reported.", ("job_id", "role", "name", "stat"), _reported
    ),
)
"""Families from the mirror, in the order of a scrape."""

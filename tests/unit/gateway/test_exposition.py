"""Metrics of the cluster: what a scrape reads, and how many series that is."""

import re
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_master import worker_status
from tests.unit.client.test_overview import NOW, job, mirror, node
from unified.client.mirror import ClusterMirror
from unified.protocol.client_master import BudgetUse, JobStatus, RoleStatus
from unified.protocol.records import NodeState, Progress, Stage, TimeSpent, WorkerState
from unified_gateway.exposition import FAMILIES, MAX_REPORTED, ClusterCollector


def scraped(made: ClusterMirror | None) -> dict[str, float]:
    """Return the values of a scrape, by ``name{labels}``."""
    registry = CollectorRegistry()
    registry.register(ClusterCollector(made))
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def role(name: str, total: int, **fields: Any) -> RoleStatus:
    return RoleStatus(name=name, kind="elastic", total=total, is_driver=True, **fields)


def busy() -> ClusterMirror:
    budget = BudgetUse(limit="max_restart", subject="t-0", used=3, allowed=10)
    running = job(
        roles=[role("trainer", 3, round=2, num_restarts=1)],
        budgets=[budget],
        submitted_by="kim",
        started_at=NOW,
        times=TimeSpent(seconds={"waiting": 3.0}, phase="recovering", since=NOW - 2),
    )
    old = job(job_id="old-0", stage=Stage.STOPPED, ended_at=NOW - 4000, exit_code=0)
    failed = job(job_id="bad-2", stage=Stage.STOPPED, ended_at=NOW - 60, exit_code=1)
    kept = job(job_id="kept-3", stage=Stage.INIT, suspended="for you", num_restarts=1)
    again = job(job_id="again-4", stage=Stage.INIT, num_restarts=1)
    made = mirror(running, old, failed, kept, again, nodes=[node("a"), node("b", state=NodeState.LOST)])
    workers = [
        worker_status(
            rank, num_failures=rank, progress=Progress(step=10 + rank, total=100, metrics={"loss": rank, "at": "x"})
        )
        for rank in range(2)
    ]
    workers.append(worker_status(2, state=WorkerState.STARTING))
    made.workers["gpt-1"] = {each.name: each for each in workers}
    return made


def test_what_a_scrape_reads() -> None:
    found = scraped(busy())
    expected = {
        "unified_master_up{}": 1,
        "unified_nodes{state=ALIVE}": 1,
        "unified_nodes{state=LOST}": 1,
        "unified_node_up{node=b}": 0,
        "unified_devices{kind=virtual,state=held}": 1,
        "unified_devices{kind=virtual,state=lost}": 1,
        "unified_cpus{state=free}": 8,
        "unified_memory_bytes{state=held}": 0,
        "unified_jobs{stage=STOPPED}": 2,
        "unified_job_info{job_id=gpt-1,name=gpt,owner=kim}": 1,
        "unified_job_stage{job_id=gpt-1,stage=RUNNING}": 1,
        "unified_job_stage{job_id=gpt-1,stage=INIT}": 0,
        "unified_job_stage{job_id=gpt-1,stage=SUSPENDED}": 0,
        "unified_job_stage{job_id=kept-3,stage=INIT}": 0,
        "unified_job_stage{job_id=kept-3,stage=SUSPENDED}": 1,
        "unified_job_stage{job_id=again-4,stage=INIT}": 1,
        "unified_jobs{stage=INIT}": 1,
        "unified_jobs{stage=SUSPENDED}": 1,
        "unified_job_time_seconds{job_id=gpt-1,phase=waiting}": 3,
        "unified_job_time_seconds{job_id=gpt-1,phase=recovering}": 2,
        "unified_job_time_seconds{job_id=gpt-1,phase=productive}": 0,
        "unified_job_exit_code{job_id=bad-2}": 1,
        "unified_job_workers{job_id=gpt-1,role=trainer,state=RUNNING}": 2,
        "unified_job_restarts_total{job_id=gpt-1,scope=trainer}": 1,
        "unified_worker_failures_total{job_id=gpt-1,role=trainer}": 1,
        "unified_job_restarts_left{job_id=gpt-1,limit=max_restart}": 7,
        "unified_role_round{job_id=gpt-1,role=trainer}": 2,
        "unified_role_world_size{job_id=gpt-1,role=trainer}": 2,
        "unified_role_step{job_id=gpt-1,of=slowest,role=trainer}": 10,
        "unified_role_step{job_id=gpt-1,of=median,role=trainer}": 10.5,
        "unified_role_steps_target{job_id=gpt-1,role=trainer}": 100,
        "unified_role_reported{job_id=gpt-1,name=loss,role=trainer,stat=mean}": 0.5,
    }
    assert {name: found[name] for name in expected} == expected
    assert not [name for name in found if "old-0" in name], "an hour after its end a job has no series"
    assert not [name for name in found if "name=at" in name], "a text is no value"


def test_without_a_word_of_the_master_there_is_only_that() -> None:
    assert list(scraped(None).values())[1:] == [0.0]


def test_names_are_those_of_the_field() -> None:
    for family in FAMILIES:
        assert re.fullmatch(r"unified(_[a-z]+)+", family.name)
        assert not {"job", "instance", "worker"} & set(family.labels), (
            f"{family.name}: Prometheus owns these, or too many"
        )
        assert not family.is_counter or not family.name.endswith("_total"), "the client adds that"


@pytest.mark.parametrize(("num_nodes", "num_jobs"), [(10, 1), (10_000, 20)])
def test_the_number_of_series_is_bounded(num_nodes: int, num_jobs: int) -> None:
    """≤ 100 + 2 × nodes + 60 × jobs + 25 × roles + 3 × reported values."""
    limits = ["max_restart", "node_max_restart", "job_max_restart", "per_node_max_failure", "role_max_restart"]
    budgets = [BudgetUse(limit=limit, subject="", used=1, allowed=10) for limit in limits]
    names = ["actor", "critic", "rollout"]
    roles = [role(name, 8) for name in names]
    jobs: list[JobStatus] = [
        job(
            job_id=f"j-{number}",
            roles=roles,
            budgets=budgets,
            started_at=NOW,
            ended_at=NOW,
            exit_code=0,
            times=TimeSpent(),
        )
        for number in range(num_jobs)
    ]
    made = mirror(*jobs, nodes=[node(f"n{number}") for number in range(num_nodes)])
    reported: dict[str, float | int | str] = {f"value_{number}": 1.0 for number in range(5)}
    for each in jobs:
        workers = [
            worker_status(rank, name, progress=Progress(step=1, total=9, metrics=reported))
            for name in names
            for rank in range(8)
        ]
        made.workers[each.job_id] = {worker.name: worker for worker in workers}
    num_roles = num_jobs * len(names)
    bound = 100 + 2 * num_nodes + 60 * num_jobs + 25 * num_roles + 3 * len(reported) * num_roles
    assert len(scraped(made)) <= bound
    many = worker_status(progress=Progress(metrics={f"value_{number:03}": 1.0 for number in range(200)}))
    made.workers["j-0"] = {many.name: msgspec.structs.replace(many, role="actor")}
    reported_series = [name for name in scraped(made) if name.startswith("unified_role_reported{job_id=j-0,")]
    assert len(reported_series) == 3 * MAX_REPORTED

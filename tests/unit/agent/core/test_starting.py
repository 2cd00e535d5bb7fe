"""Starts on one node: a bounded number at once, each end of a start begins another, and the end of a job overtakes."""

import msgspec
import pytest

from tests.support.agent_core import FACTS, SPEC, Driver, started, wanted
from unified.protocol.agent_master import DesiredJob, DesiredWorkers
from unified.protocol.records import Failure, JobWorkerIncarnation, WorkerState
from unified_agent.core.agent import AgentCore
from unified_agent.core.messages import SignalWorker, WorkerExited, WorkerNotStarted
from unified_agent.core.starting import LEAST_STARTS, max_starts

NUM = 10 * LEAST_STARTS
ROLE = msgspec.structs.replace(SPEC.roles[0], total=NUM, per_group=1)
JOB = DesiredJob(job_id="job-1", spec=msgspec.structs.replace(SPEC, roles=[ROLE]), stop_grace_s=0.0)
INCARNATIONS = [JobWorkerIncarnation("job-1", name, 0) for name in ROLE.workers]


@pytest.fixture
def driver() -> Driver:
    driver = Driver(registered=False)
    facts = msgspec.structs.replace(FACTS, host_cpus=1)
    driver.core = AgentCore(facts, driver.core.intervals)
    driver.desire(*map(wanted, INCARNATIONS), jobs=[JOB])
    return driver


def test_larger_hosts_start_more_at_once() -> None:
    assert [max_starts(cpus) for cpus in (0.5, 2, 64, float("inf"))] == [16, 16, 256, float("inf")]


def test_each_hello_lets_one_more_start_until_all_have(driver: Driver) -> None:
    begun = started(driver.take())
    assert begun == INCARNATIONS[:LEAST_STARTS]
    for number, incarnation in enumerate(INCARNATIONS):
        driver.start(incarnation, pid=number + 1)
        begun += started(driver.take())
        assert sum(worker.state is WorkerState.STARTING for worker in driver.core.workers.values()) <= LEAST_STARTS
    assert begun == INCARNATIONS


def test_a_start_that_fails_makes_room_too(driver: Driver) -> None:
    driver.take()
    driver.step(WorkerNotStarted(incarnation=INCARNATIONS[0], failure=Failure(summary="no memory", category="crash")))
    driver.step(WorkerExited(incarnation=INCARNATIONS[1], code=1))
    assert started(driver.take()) == INCARNATIONS[LEAST_STARTS : LEAST_STARTS + 2]


def test_the_end_of_a_job_overtakes_its_starts(driver: Driver) -> None:
    driver.take()
    driver.desire(jobs=[JOB])
    actions = driver.take()
    assert started(actions) == []
    killed = [action.incarnation for action in actions if isinstance(action, SignalWorker)]
    assert killed == INCARNATIONS[:LEAST_STARTS]
    for incarnation in killed:
        driver.step(WorkerExited(incarnation=incarnation, code=-9))
    assert started(driver.take()) == []


def test_a_description_is_kept_while_its_job_has_workers_here(driver: Driver) -> None:
    driver.take()
    again = msgspec.structs.replace(JOB, spec=None)
    driver.desire(*map(wanted, INCARNATIONS), jobs=[again])
    driver.start(INCARNATIONS[0])
    assert started(driver.take()) == INCARNATIONS[LEAST_STARTS : LEAST_STARTS + 1]
    driver.desire(jobs=[msgspec.structs.replace(JOB, job_id="job-2")])
    assert list(driver.core.specs.job_ids) == ["job-2"]


def test_a_set_that_lacks_a_description_changes_nothing_until_it_is_sent_whole() -> None:
    driver = Driver()
    lacking = DesiredWorkers(
        generation=5, workers=[wanted(INCARNATIONS[0])], jobs=[msgspec.structs.replace(JOB, spec=None)]
    )
    driver.hear(lacking)
    assert started(driver.take()) == []
    assert driver.core.generation == 0, "so its heartbeats ask for it again"
    driver.hear(msgspec.structs.replace(lacking, jobs=[JOB]))
    assert started(driver.take()) == [INCARNATIONS[0]]
    assert driver.core.generation == 5

"""An agent's answers to requests for profiles: each once, with the reason where there is none."""

from tests.support.agent_core import W0, W1, Driver, launched, wanted
from unified.protocol.agent_master import ReadAgentLog
from unified.protocol.records import JobWorkerIncarnation, ProfileKind
from unified.protocol.worker_agent import RecordStep, StepRecorded
from unified_agent.core.messages import MasterSaid, SampleWorker, SendLog, TellWorker, WorkerExited


def ask(driver: Driver, incarnation: JobWorkerIncarnation, kind: ProfileKind = "torch", request_id: int = 9) -> None:
    order = ReadAgentLog(
        job_id=incarnation.job_id,
        worker=incarnation.worker,
        worker_incarnation=incarnation.number,
        stream="profile",
        offset=0,
        max_bytes=10,
        take=kind,
        wait_s=5.0,
    )
    driver.step(MasterSaid(message=order, request_id=request_id))


def answers(driver: Driver) -> list[tuple[int, str]]:
    return [(each.request_id, each.error) for each in driver.take() if isinstance(each, SendLog)]


def test_a_profile_from_outside_is_the_shells() -> None:
    driver = launched(wanted(W0, 1))
    ask(driver, W0, "flamegraph")
    (action,) = driver.notable()
    assert isinstance(action, SampleWorker)
    assert (action.incarnation, action.pid, action.order.take, action.request_id) == (W0, 7, "flamegraph", 9)


def test_a_step_is_the_workers() -> None:
    driver = launched(wanted(W0, 1), wanted(W1, 1))
    ask(driver, W0)
    assert driver.notable() == [TellWorker(incarnation=W0, message=RecordStep(within_s=5.0))]
    ask(driver, W0, request_id=10)
    assert answers(driver) == [(10, "it is recording a step already")]
    driver.say(W1, StepRecorded())
    assert answers(driver) == [], "it was not asked"
    driver.say(W0, StepRecorded(error="it has not imported torch"), StepRecorded())
    assert answers(driver) == [(9, "it has not imported torch")]
    ask(driver, W0, request_id=11)
    driver.say(W0, StepRecorded())
    assert answers(driver) == [(11, "")]


def test_a_worker_that_is_not_there() -> None:
    driver = launched(wanted(W0, 1))
    driver.desire(wanted(W0, 1), wanted(W1, 1))
    driver.take()
    ask(driver, W1, "flamegraph")
    assert answers(driver) == [(9, "its process has not said hello yet")]
    ask(driver, W0)
    driver.step(WorkerExited(incarnation=W0, code=-9))
    ((number, error),) = answers(driver)
    assert number == 9
    assert error.startswith("it ended before a step was recorded: ")
    ask(driver, W0, "memory")
    assert answers(driver) == [(9, "it has ended")]

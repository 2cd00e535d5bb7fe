"""An agent's reads of stacks: every request is answered once, in time, whatever the workers do."""

import random

import pytest

from tests.support.agent_core import W0, W1, Driver, launched, wanted
from unified.core.hangs.stacks import Thread, add_threads
from unified.protocol.agent_master import ReadStacks, StacksRead
from unified.protocol.records import JobWorkerIncarnation
from unified.protocol.stacks import StackReport, WorkerStacks
from unified.protocol.worker_agent import DumpStacks, StacksDumped
from unified_agent.core.messages import HeldStacksRead, MasterSaid, ReadHeldStacks, SendMaster, TellWorker, WorkerExited
from unified_agent.core.stacks import ANSWER_S, MAX_OPEN


def ask(driver: Driver, request_id: int, *incarnations: JobWorkerIncarnation, within_s: float = 5.0) -> None:
    order = ReadStacks(job_id="job-1", workers=[incarnation.worker for incarnation in incarnations], within_s=within_s)
    driver.step(MasterSaid(message=order, request_id=request_id))


def dumps(driver: Driver) -> dict[JobWorkerIncarnation, int]:
    """Workers that were asked, with the number of the request."""
    return {
        action.incarnation: action.message.number
        for action in driver.take()
        if isinstance(action, TellWorker) and isinstance(action.message, DumpStacks)
    }


def own(incarnation: JobWorkerIncarnation) -> StackReport:
    worker = WorkerStacks(worker=incarnation.worker, incarnation=incarnation.number, rank=0, source="interpreter")
    return add_threads(worker, [Thread("MainThread", ["train.py:1 in run"], True)])


def answers(driver: Driver) -> dict[int, StackReport]:
    sent = [action for action in driver.take() if isinstance(action, SendMaster)]
    found = [(each.request_id, each.message) for each in sent if isinstance(each.message, StacksRead)]
    assert len({number for number, _ in found}) == len(found), "answered twice"
    return {number: message.report for number, message in found if isinstance(message, StacksRead)}


def test_workers_answer_for_themselves() -> None:
    driver = launched(wanted(W0, 1), wanted(W1, 1))
    ask(driver, 9, W0, W1)
    asked = dumps(driver)
    assert set(asked) == {W0, W1}
    driver.say(W0, StacksDumped(number=asked[W0], report=own(W0)))
    assert answers(driver) == {}
    driver.say(W1, StacksDumped(number=asked[W1], report=own(W1)))
    report = answers(driver)[9]
    assert report.stacks == ["train.py:1 in run"]
    assert [worker.worker for worker in report.workers] == [W0.worker, W1.worker]
    driver.pass_time(10)
    assert answers(driver) == {}


def test_one_whose_interpreter_is_held_is_read_from_outside() -> None:
    driver = launched(wanted(W0, 1), wanted(W1, 1))
    ask(driver, 9, W0, W1)
    asked = dumps(driver)
    driver.say(W0, StacksDumped(number=asked[W0], report=own(W0)))
    driver.pass_time(ANSWER_S)
    held = [action for action in driver.take() if isinstance(action, ReadHeldStacks)]
    assert [action.incarnation for action in held] == [W1]
    assert held[0].worker.pid == 7
    assert held[0].within_s == pytest.approx(5.0 - ANSWER_S)
    outside = add_threads(held[0].worker, [Thread("MainThread", ["c.py:1 in f"], True)])
    driver.step(HeldStacksRead(incarnation=W1, number=held[0].number, report=outside))
    driver.say(W1, StacksDumped(number=held[0].number, report=own(W1)))  # too late: the first counts
    assert len(answers(driver)[9].workers) == 2


def test_one_that_ends_or_says_nothing_at_all_is_no_reason_to_wait() -> None:
    driver = launched(wanted(W0, 1), wanted(W1, 1))
    ask(driver, 9, W0, W1)
    driver.step(WorkerExited(incarnation=W0, code=-9))
    driver.pass_time(4.9)
    assert answers(driver) == {}
    driver.pass_time(0.2)
    notes = {worker.worker: worker.note for worker in answers(driver)[9].workers}
    assert "killed by SIGKILL" in notes[W0.worker]
    assert "in time" in notes[W1.worker]


def test_one_that_starts_and_one_that_is_not_here() -> None:
    driver = Driver()
    driver.desire(wanted(W0))
    driver.take()
    ask(driver, 3, W0, W1)
    report = answers(driver)[3]
    assert [(worker.worker, worker.note) for worker in report.workers] == [
        (W0.worker, "its process has not said hello yet")
    ]


def test_too_many_at_once_cost_the_oldest_its_answers() -> None:
    driver = launched(wanted(W0, 1))
    for number in range(1, MAX_OPEN + 2):
        ask(driver, number, W0)
    assert list(answers(driver)) == [1]


@pytest.mark.parametrize("seed", range(10))
def test_each_request_has_one_answer(seed: int) -> None:
    for draw in (random.Random(f"{seed}-{number}") for number in range(30)):
        driver = launched(wanted(W0, 1), wanted(W1, 1))
        expected = range(1, draw.randint(2, 5))
        told: dict[int, StackReport] = {}
        open_dumps: list[tuple[JobWorkerIncarnation, int]] = []
        for number in expected:
            ask(driver, number, *draw.sample([W0, W1], draw.randint(1, 2)), within_s=draw.uniform(0.1, 8))
            for _ in range(draw.randint(0, 4)):
                taken = list(driver.actions)
                told |= answers(driver)
                open_dumps += [
                    (each.incarnation, each.message.number)
                    for each in taken
                    if isinstance(each, TellWorker) and isinstance(each.message, DumpStacks)
                ]
                match draw.randrange(4):
                    case 0 if open_dumps:
                        incarnation, dump = draw.choice(open_dumps)
                        driver.say(incarnation, StacksDumped(number=dump, report=own(incarnation)))
                    case 1 if open_dumps:
                        incarnation, dump = draw.choice(open_dumps)
                        driver.step(HeldStacksRead(incarnation=incarnation, number=dump, report=own(incarnation)))
                    case 2 if draw.random() < 0.2:
                        driver.step(WorkerExited(incarnation=draw.choice([W0, W1]), code=-9))
                    case _:
                        driver.pass_time(draw.uniform(0, 3))
        driver.pass_time(20)
        told |= answers(driver)
        assert sorted(told) == list(expected)
        assert driver.core.stack_reads._reads == {}

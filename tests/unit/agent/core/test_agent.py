"""The agent's decisions about workers: what is desired against what is, in every order in which news can come."""

import msgspec
import pytest
from msgspec import structs

from tests.support.agent_core import SPEC, STORE, W0, W1, Driver, launched, next_incarnation, started, wanted
from unified.protocol.agent_master import AgentRegistered, DesiredJob, RegisterAgain, RoundNotice, RunOrder
from unified.protocol.records import Failure, Inbox, JobWorkerIncarnation, Progress, WorkerReport, WorkerState
from unified.protocol.worker_agent import (
    AFTER_SAVE_S,
    Failed,
    Finished,
    Hello,
    Notice,
    Rejoins,
    Reported,
    Run,
    Running,
    Saving,
    Stop,
)
from unified_agent.core.messages import (
    AgentEvent,
    KeepReports,
    SignalWorker,
    StartWorker,
    TellWorker,
    WorkerExited,
    WorkerNotStarted,
    WorkerSaid,
    WorkerStarted,
)

# Reconciliation


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_what_is_desired_is_started_once_however_often_it_is_said(driver: Driver) -> None:
    driver.desire(wanted(W0), wanted(W1))
    assert started(driver.take()) == [W0, W1]
    driver.generation -= 1
    driver.desire(wanted(W0), wanted(W1))
    driver.desire(wanted(W0), wanted(W1))
    assert driver.notable() == []


def test_an_older_generation_is_ignored(driver: Driver) -> None:
    driver.generation = 5
    driver.desire(wanted(W0))
    driver.take()
    driver.generation = 3
    driver.desire()
    assert driver.notable() == []
    assert driver.core.generation == 6


def test_generations_begin_anew_with_a_new_registration(driver: Driver) -> None:
    driver.generation = 5
    driver.desire(wanted(W0))
    driver.hear(RegisterAgain())
    driver.hear(AgentRegistered(lease_s=15, heartbeat_s=1))
    driver.generation = 0
    driver.take()
    driver.desire()
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]


def test_a_new_incarnation_waits_until_the_old_one_is_gone() -> None:
    driver = launched(wanted(W0, run=1))
    driver.desire(wanted(next_incarnation(W0)))
    assert started(driver.take()) == []
    driver.step(WorkerExited(incarnation=W0, code=0))
    assert started(driver.take()) == [next_incarnation(W0)]


def test_an_incarnation_that_ended_is_not_started_again(driver: Driver) -> None:
    driver.desire(wanted(W0))
    driver.step(WorkerExited(incarnation=W0, code=3))
    driver.take()
    driver.desire(wanted(W0))
    assert driver.notable() == []


def test_an_ended_incarnation_is_told_until_a_later_desired_set_leaves_it_out(driver: Driver) -> None:
    driver.desire(wanted(W0))
    driver.step(WorkerExited(incarnation=W0, code=3))
    assert driver.observed()[f"{W0.worker}#0"].state is WorkerState.EXITED
    driver.desire(wanted(W0))
    assert f"{W0.worker}#0" in driver.observed()
    driver.desire()
    assert driver.observed() == {}


def test_a_worker_without_its_job_or_role_is_no_reason_to_fall_over(driver: Driver) -> None:
    driver.desire(wanted(JobWorkerIncarnation("job-2", "w", 0)), msgspec.structs.replace(wanted(W0), role="nobody"))
    assert started(driver.take()) == []


# Leave to run


def test_a_round_is_told_once_and_only_to_a_worker_that_said_hello(driver: Driver) -> None:
    driver.desire(wanted(W0, run=1))
    assert [type(action) for action in driver.notable()] == [StartWorker]
    driver.start(W0)
    order = RunOrder(round=1, rank=0, world_size=2)
    assert driver.notable() == [TellWorker(incarnation=W0, message=Run(order=order))]
    driver.desire(wanted(W0, run=1))
    driver.say(W0, Running(round=1))
    driver.desire(wanted(W0, run=1))
    assert driver.notable() == []


def test_a_later_round_is_told_to_a_worker_that_can_rejoin() -> None:
    driver = launched(wanted(W0, run=1))
    driver.say(W0, Running(round=1))
    driver.take()
    driver.desire(wanted(W0, run=2))
    assert driver.notable() == []
    driver.say(W0, Rejoins(is_able=True))
    told = [TellWorker(incarnation=W0, message=Run(order=RunOrder(round=2, rank=0, world_size=2)))]
    assert driver.notable() == told
    driver.say(W0, Running(round=2))
    assert driver.observed()[f"{W0.worker}#0"].round == 2
    driver.desire(wanted(W0, run=2))
    assert driver.notable() == []


def test_a_notice_is_told_once_and_makes_an_order_into_its_round_void() -> None:
    notice = RoundNotice(round=2, kind="broken", reason="a peer died")
    driver = launched(wanted(W0, run=1))
    driver.say(W0, Running(round=1))
    driver.say(W0, Rejoins(is_able=True))
    driver.take()
    noticed = msgspec.structs.replace(wanted(W0, run=2), notice=notice)
    for _ in range(2):
        driver.desire(noticed)
    assert driver.notable() == [TellWorker(incarnation=W0, message=Notice(notice=notice))]
    driver.say(W0, Rejoins(is_able=True, left_round=1))
    driver.say(W0, Rejoins(is_able=True))
    seen = driver.observed()[f"{W0.worker}#0"]
    assert (seen.can_rejoin, seen.left_round) == (True, 1)
    driver.take()
    driver.desire(wanted(W0, run=3))
    assert driver.notable() == [TellWorker(incarnation=W0, message=Run(order=RunOrder(round=3, rank=0, world_size=2)))]


def test_a_notice_waits_for_a_worker_to_run() -> None:
    notice = RoundNotice(round=1, kind="planned", reason="a node joined", within_s=30)
    driver = launched(msgspec.structs.replace(wanted(W0), notice=notice))
    assert driver.notable() == []
    driver.desire(msgspec.structs.replace(wanted(W0), notice=notice, run=RunOrder(round=2, rank=0, world_size=2)))
    driver.take()
    driver.say(W0, Running(round=2))
    assert driver.notable() == [TellWorker(incarnation=W0, message=Notice(notice=notice))]


# A worker's incarnation


def test_the_states_of_a_good_incarnation_are_told(driver: Driver) -> None:
    driver.desire(wanted(W0, run=1))
    key = f"{W0.worker}#0"
    assert driver.observed()[key].state is WorkerState.STARTING
    driver.start(W0, pid=12)
    ready = driver.observed()[key]
    assert (ready.state, ready.pid, ready.inbox) == (WorkerState.READY, 12, Inbox(inbox_id=str(W0)))
    driver.say(W0, Running(round=1))
    assert driver.observed()[key].state is WorkerState.RUNNING
    driver.say(W0, Reported(progress=Progress(step=3)))
    assert driver.observed()[key].progress == Progress(step=3)
    driver.say(W0, Finished())
    assert driver.observed()[key].state is WorkerState.FINISHED
    driver.step(WorkerExited(incarnation=W0, code=0))
    ended = driver.observed()[key]
    assert (ended.state, ended.failure) == (WorkerState.EXITED, None)


def test_a_service_serves_until_it_ends(driver: Driver) -> None:
    driver.desire(wanted(W0, run=1))
    driver.start(W0)
    driver.say(W0, Running(round=1), Finished(is_serving=True))
    key = f"{W0.worker}#0"
    assert driver.observed()[key].state is WorkerState.SERVING
    driver.step(WorkerExited(incarnation=W0, code=-9))
    ended = driver.observed()[key]
    assert ended.state is WorkerState.EXITED
    assert ended.failure is not None


def test_points_are_kept_once_and_none_after_the_end(driver: Driver) -> None:
    driver.desire(wanted(W0, run=1))
    driver.start(W0)
    driver.say(W0, Running(round=1))
    driver.take()
    points = [WorkerReport(at=1.0, step=step, total=None, metrics={"loss": 0.5}, number=step) for step in range(3)]
    driver.say(W0, Reported(progress=Progress(step=1), points=points[:2]), Reported(progress=Progress(step=2)))
    driver.say(W0, Reported(progress=Progress(step=2), points=points[2:]))
    assert driver.notable() == [
        KeepReports(incarnation=W0, reports=points[:2]),
        KeepReports(incarnation=W0, reports=points[2:]),
    ]
    driver.step(WorkerExited(incarnation=W0, code=0))
    driver.say(W0, Reported(progress=Progress(), points=points))
    assert driver.notable() == []


CRASHES = [(-9, "killed by SIGKILL", None, 9), (-11, "killed by SIGSEGV", None, 11), (3, "exited with code 3", 3, None)]


@pytest.mark.parametrize(("code", "summary", "exit_code", "signal"), CRASHES)
@pytest.mark.parametrize("is_running", [False, True])
def test_an_end_without_a_word_is_a_crash(
    code: int, summary: str, exit_code: int | None, signal: int | None, is_running: bool, driver: Driver
) -> None:
    driver.desire(wanted(W0, run=1))
    if is_running:
        driver.start(W0)
        driver.say(W0, Running(round=1))
    driver.step(WorkerExited(incarnation=W0, code=code, last_lines="oh no"))
    assert driver.observed()[f"{W0.worker}#0"].failure == Failure(
        category="crash", summary=summary, exit_code=exit_code, signal=signal, traceback="oh no"
    )


def test_an_exit_with_code_0_is_success_for_who_runs_and_a_crash_before() -> None:
    """`os._exit(0)` in a script is what it is under torchrun."""
    driver = launched(wanted(W0, run=1))
    driver.say(W0, Running(round=1))
    driver.step(WorkerExited(incarnation=W0, code=0))
    assert driver.observed()[f"{W0.worker}#0"].failure is None
    driver = launched(wanted(W0))
    driver.step(WorkerExited(incarnation=W0, code=0))
    failure = driver.observed()[f"{W0.worker}#0"].failure
    assert failure == Failure(category="crash", summary="exited with code 0 before it was told to run", exit_code=0)


def test_what_a_worker_says_of_its_failure_counts_more_than_its_exit_code() -> None:
    driver = launched(wanted(W0, run=1))
    failure = Failure(summary="ValueError: no", exception_type="ValueError")
    driver.say(W0, Running(round=1), Failed(failure=failure))
    driver.step(WorkerExited(incarnation=W0, code=1, last_lines="noise"))
    assert driver.observed()[f"{W0.worker}#0"].failure == failure


def test_a_failed_worker_that_hangs_on_its_way_out_is_killed() -> None:
    driver = launched(wanted(W0, run=1))
    driver.say(W0, Failed(failure=Failure(summary="no")))
    driver.take()
    driver.pass_time(9.9, answered=True)
    assert driver.notable() == []
    driver.pass_time(0.2)
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]


def test_a_bad_exit_after_the_work_was_done_is_still_told() -> None:
    driver = launched(wanted(W0, run=1))
    driver.say(W0, Running(round=1), Finished())
    driver.step(WorkerExited(incarnation=W0, code=-6))
    failure = driver.observed()[f"{W0.worker}#0"].failure
    assert failure is not None
    assert failure.summary == "killed by SIGABRT"


def test_a_worker_that_never_says_hello_is_killed(driver: Driver) -> None:
    driver.desire(wanted(W0))
    driver.step(WorkerStarted(incarnation=W0, pid=7))
    driver.take()
    driver.pass_time(59, answered=True)
    assert driver.notable() == []
    driver.pass_time(2, answered=True)
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]
    driver.step(WorkerExited(incarnation=W0, code=-9))
    failure = driver.observed()[f"{W0.worker}#0"].failure
    assert failure == Failure(category="crash", summary="did not answer within 60 s of its start")


def test_news_of_a_start_does_not_cut_a_graceful_stop_short(driver: Driver) -> None:
    """The worker's own hello may overtake what its zygote says of it."""
    driver.desire(wanted(W0))
    driver.say(W0, Hello(pid=7))
    driver.desire()
    assert driver.state(W0) is WorkerState.STOPPING
    driver.take()
    driver.step(WorkerStarted(incarnation=W0, pid=7))
    assert driver.notable() == []


def test_a_worker_that_cannot_be_started_has_ended(driver: Driver) -> None:
    driver.desire(wanted(W0))
    failure = Failure(category="setup", summary="no such interpreter")
    driver.step(WorkerNotStarted(incarnation=W0, failure=failure))
    ended = driver.observed()[f"{W0.worker}#0"]
    assert (ended.state, ended.failure) == (WorkerState.EXITED, failure)


STALE: list[AgentEvent] = [
    WorkerStarted(incarnation=W0, pid=7),
    WorkerNotStarted(incarnation=W0, failure=Failure(summary="late")),
    WorkerSaid(incarnation=W0, word=Hello(pid=7)),
    WorkerSaid(incarnation=W0, word=Finished()),
    WorkerSaid(incarnation=W0, word=Failed(failure=Failure(summary="late"))),
    WorkerExited(incarnation=W0, code=1),
    WorkerStarted(incarnation=next_incarnation(W0), pid=7),
    WorkerExited(incarnation=next_incarnation(W0), code=1),
]


@pytest.mark.parametrize("event", STALE, ids=lambda event: type(event).__name__)
def test_news_of_an_incarnation_that_has_ended_changes_nothing(event: AgentEvent, driver: Driver) -> None:
    driver.desire(wanted(W0))
    driver.step(WorkerExited(incarnation=W0, code=0))
    before = driver.core.workers[W0].observed()
    driver.take()
    driver.step(event)
    assert driver.notable() == []
    assert driver.core.workers[W0].observed() == before


# Stopping


def stopping(grace_s: float | None = None) -> Driver:
    driver = launched(wanted(W0, run=1))
    driver.say(W0, Running(round=1))
    driver.take()
    driver.desire(grace_s=grace_s)
    return driver


def test_a_stop_asks_first_and_kills_after_the_grace() -> None:
    driver = stopping()
    told = TellWorker(incarnation=W0, message=Stop(grace_s=10, save_grace_s=60, reason="it is no longer desired"))
    assert driver.notable() == [told, SignalWorker(incarnation=W0, how="terminate")]
    driver.pass_time(9.9, answered=True)
    driver.desire()
    assert driver.notable() == []
    driver.pass_time(0.2, answered=True)
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]
    driver.step(WorkerExited(incarnation=W0, code=-9))
    assert driver.observed()[f"{W0.worker}#0"].failure is None


@pytest.mark.parametrize("begins", ["before the stop", "after the stop"])
def test_a_checkpoint_that_is_being_written_is_waited_for(begins: str) -> None:
    driver = launched(wanted(W0, run=1))
    driver.say(W0, Running(round=1), *([Saving()] if begins == "before the stop" else []))
    driver.desire()
    driver.say(W0, *([Saving()] if begins == "after the stop" else []))
    driver.take()
    driver.pass_time(30, answered=True)
    driver.desire()
    assert driver.notable() == []
    driver.say(W0, Saving(is_over=True))
    driver.pass_time(AFTER_SAVE_S - 0.1, answered=True)
    assert driver.notable() == []
    driver.pass_time(0.2, answered=True)
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]


def test_a_checkpoint_that_is_never_written_is_waited_for_to_its_limit() -> None:
    driver = stopping()
    driver.say(W0, Saving(), Saving(is_over=True), Saving())
    driver.take()
    driver.pass_time(69.9, answered=True)
    assert driver.notable() == []
    driver.pass_time(0.2, answered=True)
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]


def test_a_checkpoint_written_within_the_grace_leaves_the_rest_of_it() -> None:
    driver = stopping()
    driver.say(W0, Saving(), Saving(is_over=True))
    driver.take()
    driver.pass_time(9.9, answered=True)
    assert driver.notable() == []
    driver.pass_time(0.2, answered=True)
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]


def test_a_job_that_goes_on_hastens_no_checkpoint_that_is_being_written_but_force_does() -> None:
    driver = stopping()
    driver.say(W0, Saving())
    driver.take()
    driver.desire(grace_s=2)  # it was resumed: the next incarnation waits for this one
    driver.pass_time(30, answered=True)
    assert driver.notable() == []
    driver.desire(grace_s=0)
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]


def test_a_restart_waits_for_no_checkpoint() -> None:
    driver = stopping(grace_s=2)
    driver.say(W0, Saving())
    driver.take()
    driver.pass_time(2.1, answered=True)
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]


def test_the_master_may_set_another_grace_and_none_is_a_kill_at_once() -> None:
    driver = stopping(grace_s=2)
    driver.take()
    driver.pass_time(2.1)
    assert driver.notable() == stopping(grace_s=0).notable() == [SignalWorker(incarnation=W0, how="kill")]


def test_a_stop_that_has_begun_can_be_hastened_but_not_delayed() -> None:
    driver = stopping(grace_s=5)
    driver.take()
    driver.desire(grace_s=60)
    driver.desire(grace_s=3)
    driver.pass_time(2.9)
    assert driver.notable() == []
    driver.desire(grace_s=0)
    driver.desire(grace_s=0)
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]


def test_a_worker_that_is_still_starting_is_killed_without_ado(driver: Driver) -> None:
    driver.desire(wanted(W0))
    driver.take()
    driver.desire()
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]
    driver.step(WorkerStarted(incarnation=W0, pid=7))
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]
    driver.step(WorkerExited(incarnation=W0, code=-9))
    assert driver.observed()[f"{W0.worker}#0"].failure is None


def test_ctrl_c_is_sigint() -> None:
    driver = launched(wanted(W0, run=1))
    driver.desire(jobs=[DesiredJob(job_id="job-1", spec=SPEC, is_interrupted=True)])
    told = TellWorker(
        incarnation=W0, message=Stop(grace_s=10, save_grace_s=60, reason="it is no longer desired", interrupt=True)
    )
    assert driver.notable() == [told, SignalWorker(incarnation=W0, how="interrupt")]


@pytest.mark.parametrize("is_told", [True, False])
def test_an_end_that_a_stop_cut_short_is_a_failure(is_told: bool) -> None:
    driver = stopping(grace_s=2)
    driver.say(W0, Running(round=0, is_ending=True))
    if is_told:
        driver.say(W0, Failed(failure=Failure(summary="its end was cut short", is_cut=True)))
    driver.pass_time(2.1)
    driver.step(WorkerExited(incarnation=W0, code=-9))
    driver.desire()  # another job's news, before the end was told
    failure = driver.observed()[f"{W0.worker}#0"].failure
    driver.desire()
    assert driver.observed() == {}
    assert failure is not None
    assert failure.is_cut
    assert failure.summary.startswith(
        "its end was cut short" if is_told else "its end took longer than 2 s and was cut"
    )


def test_what_fails_while_it_stops_did_not_fail() -> None:
    driver = stopping()
    driver.say(W0, Failed(failure=Failure(summary="a broken collective")))
    driver.step(WorkerExited(incarnation=W0, code=1))
    assert driver.observed()[f"{W0.worker}#0"].failure is None


def test_the_store_outlives_the_workers_that_stop() -> None:
    driver = launched(wanted(W0, run=1), wanted(STORE))
    driver.desire()
    assert {action.incarnation for action in driver.notable() if isinstance(action, SignalWorker)} == {W0}
    driver.step(WorkerExited(incarnation=W0, code=0))
    assert SignalWorker(incarnation=STORE, how="terminate") in driver.take()


def test_a_worker_waits_for_its_device_until_the_worker_of_a_job_that_the_master_has_forgotten_ends() -> None:
    old, new = structs.replace(wanted(W0), devices=[0]), JobWorkerIncarnation("job-1-b", W0.worker, 0)
    other = new._replace(worker=W1.worker)
    driver = launched(old)
    jobs = [DesiredJob(job_id=new.job_id, spec=SPEC)]
    driver.desire(structs.replace(wanted(new), devices=[0]), structs.replace(wanted(other), devices=[1]), jobs=jobs)
    assert started(driver.take()) == [other]
    driver.step(WorkerExited(incarnation=W0, code=0))
    assert started(driver.take()) == [new]

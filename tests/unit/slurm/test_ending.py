"""The decisions at the end of an allocation of SLURM: signals and times in, suspends, signals and a requeue out."""

import itertools
import os
import signal

import pytest

from unified.slurm.ending import AGAIN_S, END_S, MARGIN_S, OUTPUT_S, SUSPEND, TERM_S, UNKNOWN_S, Ending

Log = list[tuple[float, str | signal.Signals]]


def ending(*signals: int, num_restarts: int = 0, requeues: int | None = None) -> Ending:
    """The end of allocation 4711, after these signals at time 100."""
    made = Ending("4711", num_restarts, requeues)
    for number in signals:
        made.note(number, 100.0)
    return made


def played(made: Ending, left_s: float | None, *, for_s: float) -> Log:
    """Return what is done, at which second after the signals, while the driver takes no notice."""
    log: Log = []
    for tenths in range(int(for_s * 10)):
        now = 100.0 + tenths / 10
        if (due := made.due(now)) is not None:
            log.append((round(now - 100, 1), due))
        if due == SUSPEND:
            made.suspends(now, None if left_s is None else left_s - tenths / 10)
    return log


def signals_of(log: Log) -> Log:
    return [(at, due) for at, due in log if due != SUSPEND]


def test_without_a_signal_or_after_ctrl_c_nothing_is_done() -> None:
    for made in (ending(), ending(signal.SIGINT)):
        assert played(made, None, for_s=1000) == []
        assert not made.has_begun
    assert ending(signal.SIGINT).is_asked


def test_at_the_time_limit_jobs_are_suspended_again_and_again_and_the_driver_ends_before_the_allocation() -> None:
    log = played(ending(signal.SIGUSR1), 120.0, for_s=118)
    suspends = [at for at, due in log if due == SUSPEND]
    assert suspends[0] == 0.0
    assert {round(later - at, 1) for at, later in itertools.pairwise(suspends)} == {AGAIN_S}
    (ends_at, first), (killed_at, last) = signals_of(log)
    assert (first, last) == (signal.SIGTERM, signal.SIGKILL)
    assert ends_at == pytest.approx(120 - MARGIN_S, abs=0.2)
    assert killed_at - ends_at == pytest.approx(END_S, abs=0.2)


@pytest.mark.parametrize(("left_s", "after_s"), [(10.0, OUTPUT_S), (0.0, OUTPUT_S), (None, UNKNOWN_S)])
def test_a_driver_has_time_for_its_last_output_and_more_where_the_end_is_not_known(
    left_s: float | None, after_s: float
) -> None:
    (ends_at, _), *_ = signals_of(played(ending(signal.SIGUSR1), left_s, for_s=400))
    assert ends_at == pytest.approx(after_s, abs=0.2)


@pytest.mark.parametrize("before", [(), (signal.SIGUSR1,)])
def test_after_sigterm_which_the_driver_has_too_it_is_killed_soon(before: tuple[int, ...]) -> None:
    made = ending(*before, signal.SIGTERM)
    log = played(made, 120.0, for_s=60)
    assert log[0] == (0.0, SUSPEND)
    ((killed_at, last),) = signals_of(log)
    assert last == signal.SIGKILL
    assert killed_at == pytest.approx(TERM_S, abs=0.2)


@pytest.mark.parametrize(
    ("signals", "num_restarts", "requeues", "left_s", "text"),
    [
        ([signal.SIGUSR1], 0, None, 130.4, " in 130 s; it goes on in restart 1"),
        ([signal.SIGUSR1], 1, 3, 60.0, " in 60 s; it goes on in restart 2 of 3"),
        ([signal.SIGUSR1], 3, 3, 60.0, " in 60 s"),
        ([signal.SIGUSR1], 0, 0, 60.0, " in 60 s"),
        ([signal.SIGUSR1], 0, None, None, "; it goes on in restart 1"),
        ([signal.SIGTERM], 0, None, None, " (SIGTERM, as for scancel, a requeue, a preemption)"),
    ],
)
def test_the_reason_says_what_comes_next(
    signals: list[int], num_restarts: int, requeues: int | None, left_s: float | None, text: str
) -> None:
    made = ending(*signals, num_restarts=num_restarts, requeues=requeues)
    assert made.suspends(100.0, left_s)[0] == f"SLURM ends allocation 4711{text}"


@pytest.mark.parametrize("has_suspended", [True, False])
@pytest.mark.parametrize("num_restarts", [0, 1, 2])
def test_a_job_that_waits_at_the_time_limit_is_put_back_as_often_as_it_may(
    num_restarts: int, has_suspended: bool
) -> None:
    made = ending(signal.SIGUSR1, num_restarts=num_restarts, requeues=2)
    made.driver_ended(os.EX_TEMPFAIL if has_suspended else 0, has_suspended=has_suspended)
    assert made.is_unfinished == has_suspended
    if has_suspended:
        spent = (False, "the job has not ended, and --requeues 2 are used up")
        assert made.requeues() == ((True, "") if num_restarts < 2 else spent)


@pytest.mark.parametrize(
    ("signals", "code", "has_suspended", "is_unfinished"),
    [
        ([], 0, False, False),
        ([], 1, False, False),
        ([], 0, True, False),  # somebody suspended another job, which is not this driver's
        ([], os.EX_TEMPFAIL, True, True),  # `unified suspend` by hand
        ([signal.SIGINT], 130, False, False),
        ([signal.SIGUSR1], 0, False, False),  # it was done before it saw that the time is over
        ([signal.SIGUSR1], 3, False, False),
        ([signal.SIGUSR1], 0, True, True),  # a driver that submits and does not wait
        ([signal.SIGTERM], 0, False, False),
        ([signal.SIGTERM], os.EX_TEMPFAIL, True, True),
    ],
)
def test_whether_a_job_waits(signals: list[int], code: int, has_suspended: bool, is_unfinished: bool) -> None:
    made = ending(*signals)
    made.due(100.0)
    made.driver_ended(code, has_suspended=has_suspended)
    assert made.is_unfinished == is_unfinished


def test_a_driver_that_had_to_be_ended_leaves_its_job_unfinished() -> None:
    made = ending(signal.SIGUSR1)
    assert signals_of(played(made, 60.0, for_s=32)) != []
    made.driver_ended(-signal.SIGTERM, has_suspended=False)
    assert made.is_unfinished
    assert made.requeues() == (True, "")


def test_after_sigterm_slurm_alone_decides_and_without_a_signal_the_user_does() -> None:
    assert ending(signal.SIGUSR1, signal.SIGTERM).requeues() == (False, "")
    goes_back, text = ending().requeues()
    assert not goes_back
    assert "`scontrol requeue 4711` lets the job go on" in text

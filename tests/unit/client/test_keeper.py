"""When a cluster that stays has been idle for long enough."""

from unified.client.keeper import Idleness
from unified.protocol.client_master import JobLine
from unified.protocol.records import Stage


def job(stage: Stage) -> JobLine:
    return JobLine(
        job_id="j-1", name="j", stage=stage, exit_code=None, reason="", submitted_at=0.0, ended_at=None, num_workers=1
    )


def test_the_time_begins_when_the_last_job_has_ended() -> None:
    idleness = Idleness(60.0, 0.0)
    assert not idleness.is_over([], 59.0)
    assert not idleness.is_over([job(Stage.RUNNING)], 61.0)
    assert not idleness.is_over([job(Stage.STOPPED)], 120.0)
    assert idleness.is_over([job(Stage.STOPPED)], 121.0)


def test_a_job_that_came_and_went_between_two_looks_counts() -> None:
    idleness = Idleness(60.0, 0.0)
    assert not idleness.is_over([job(Stage.STOPPED)], 100.0)
    assert not idleness.is_over([job(Stage.STOPPED)], 159.0)


def test_without_a_limit_it_never_ends() -> None:
    assert not Idleness(0.0, 0.0).is_over([], 1e9)

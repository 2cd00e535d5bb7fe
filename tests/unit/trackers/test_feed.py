"""What a tracker is given: each step once, in order, across restarts; and what a tracker that fails does: nothing."""

import threading
from typing import Any

import pytest

from tests.support.runtime import ENTRY, launch_of
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.records import WorkerReport
from unified.testing import eventually
from unified.trackers import points as core
from unified.trackers.feed import TrackerFeed, run_of
from unified.trackers.points import Point, PointBuffer, StepOrder, points_of


def points(steps: list[int], incarnation: int = 0) -> list[Point]:
    return [Point(step, 1.0, {"loss": step + incarnation / 10}) for step in steps]


def shown(given: list[Point]) -> dict[int, Any]:
    """Values of `loss` as a reader has them, which forgets what a rewind replaces; each step must be new to it."""
    held: dict[int, Any] = {}
    for point in given:
        if point.rewinds:
            held = {step: value for step, value in held.items() if step < point.step}
        if "loss" in point.values:
            assert point.step not in held
            held[point.step] = point.values["loss"]
    return held


def test_the_first_values_stay_where_none_can_be_replaced() -> None:
    first = StepOrder(-1, rewinds=False).new(points([0, 1, 2, 3]))
    again = StepOrder(3, rewinds=False)
    second = again.new(points([2, 3, 4, 5], 1)) + again.new(points([4, 5, 6], 2))
    assert shown(first + second) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4.1, 5: 5.1, 6: 6.2}


def test_the_last_values_stay_where_they_replace_others() -> None:
    first = StepOrder(-1, rewinds=True).new(points([0, 1, 2, 3]))
    again = StepOrder(3, rewinds=True)
    second = again.new(points([2, 3, 4, 5], 1)) + again.new(points([4, 5, 6], 2))
    assert shown(first + second) == {0: 0, 1: 1, 2: 2.1, 3: 3.1, 4: 4.2, 5: 5.2, 6: 6.2}
    assert [point.step for point in second if point.rewinds] == [2, 4]


def test_a_value_that_is_late_replaces_nothing_of_others() -> None:
    order = StepOrder(-1, rewinds=True)
    given = order.new([*points([0, 5, 9]), Point(5, 1.0, {"eval": 1}), Point(8, 1.0, {"eval": 2}), *points([10])])
    assert [(point.step, point.rewinds) for point in given] == [
        (0, True),
        (5, False),
        (9, False),
        (5, False),
        (8, False),
        (10, False),
    ]
    again = order.new([Point(8, 2.0, {"eval": 3}), *points([8, 9])])  # both are redone
    assert [(point.step, point.rewinds) for point in again] == [(8, True), (8, False), (9, False)]


@pytest.mark.parametrize("rewinds", [True, False])
def test_names_of_one_step_may_come_one_by_one(rewinds: bool) -> None:
    order = StepOrder(-1, rewinds=rewinds)
    given = order.new([Point(5, 1.0, {"a": 1}), Point(5, 2.0, {"b": 2}), Point(5, 3.0, {"a": 9})])
    assert [point.values for point in given] == [{"a": 1}, {"b": 2}]


def test_a_buffer_puts_the_parts_of_a_step_together() -> None:
    buffer = PointBuffer()
    buffer.add(None, 1.0, {"size": 7})
    buffer.add(3, 2.0, {"loss": 1.0})
    buffer.add(3, 3.0, {"lr": 0.1, "loss": 2.0})
    buffer.add(4, 4.0, {})
    buffer.add(4, 5.0, {"loss": 3.0})
    assert buffer.take() == [Point(3, 2.0, {"size": 7, "loss": 2.0, "lr": 0.1}), Point(4, 5.0, {"loss": 3.0})]
    assert buffer.take() == []


def test_a_buffer_is_bounded_and_keeps_the_newest() -> None:
    buffer = PointBuffer()
    for step in range(3 * core.MAX_POINTS):
        buffer.add(step, 1.0, {"loss": 1.0})
    steps = [point.step for point in buffer.take()]
    assert buffer.is_thinned
    assert core.MAX_POINTS // 2 < len(steps) <= core.MAX_POINTS
    assert steps[-100:] == list(range(3 * core.MAX_POINTS - 100, 3 * core.MAX_POINTS))


class Memory:
    """A tracker, which may fail or block."""

    rewinds = False

    def __init__(self, highest: int = -1) -> None:
        self.highest = highest
        self.given: list[Point] = []
        self.fails = self.is_closed = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def write(self, points: list[Point]) -> None:
        self.may_go_on.wait(100)
        if self.fails:
            raise OSError("disk is full")
        self.given += points

    def close(self) -> None:
        self.is_closed = True


def ended(fed: TrackerFeed) -> None:
    fed.close(100)


def test_a_feed_writes_what_was_missed_and_then_what_comes(capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Memory(highest=2)
    fed = TrackerFeed("memory", lambda: tracker, lambda: points([0, 1, 2, 3, 4]))
    for step in (3, 4, 5):
        fed.add(step, {"loss": step + 0.1})
    ended(fed)
    assert [(point.step, point.values["loss"]) for point in tracker.given] == [(3, 3.0), (4, 4.0), (5, 5.1)]
    assert tracker.is_closed
    assert capfd.readouterr().err == ""


def test_values_without_any_step_are_there_at_the_end() -> None:
    tracker = Memory()
    fed = TrackerFeed("memory", lambda: tracker, list)
    fed.add(None, {"loss": 1.0})
    fed.add(None, {"loss": 2.0})
    ended(fed)
    assert [(point.step, point.values) for point in tracker.given] == [(0, {"loss": 2.0})]


def test_a_tracker_that_fails_is_said_once_and_switched_off(capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Memory()
    tracker.fails = True
    fed = TrackerFeed("memory", lambda: tracker, list)
    fed.add(0, {"loss": 1.0})
    eventually(lambda: not fed._thread.is_alive(), timeout=100)
    for step in range(100):
        fed.add(step, {"loss": 1.0})
    ended(fed)
    told = "unified: memory is switched off, and this worker goes on: OSError: disk is full.\n"
    assert capfd.readouterr().err == told


def test_a_package_that_is_missing_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def connect() -> Memory:
        raise ModuleNotFoundError("No module named 'mlflow'", name="mlflow")

    fed = TrackerFeed("mlflow", connect, list)
    fed.add(0, {"loss": 1.0})
    ended(fed)
    assert capfd.readouterr().err == (
        "unified: mlflow is switched off, and this worker goes on: ModuleNotFoundError: mlflow in UNIFIED_REPORT_TO "
        "needs mlflow, which is not installed: pip install 'unified-runtime[trackers]'.\n"
    )


def test_a_tracker_that_blocks_keeps_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Memory()
    tracker.may_go_on.clear()
    fed = TrackerFeed("memory", lambda: tracker, list)
    for step in range(1000):
        fed.add(step, {"loss": 1.0})
    fed.close(0.1)
    assert "memory did not take all reports before this worker had to end.\n" in capfd.readouterr().err
    tracker.may_go_on.set()
    ended(fed)
    assert len(tracker.given) == 1000


def test_points_are_reports_with_a_step() -> None:
    reports = [
        WorkerReport(at=1.0, step=None, total=None, metrics={"a": 1}),
        WorkerReport(at=2.0, step=3, total=None, metrics={"a": None, "b": "x"}),
    ]
    [point] = points_of(reports)
    assert (point.step, point.at, point.values["b"]) == (3, 2.0, "x")
    assert str(point.values["a"]) == "nan"


@pytest.mark.parametrize(
    ("roles", "given", "run"),
    [
        (["w"], "mine", ("mine", "j-1", "j")),
        (["w", "v"], "mine", ("mine-w", "j-1/w", "j")),
        (["w"], "", ("j-1", "j-1", "j")),
    ],
)
def test_a_run_has_a_name_that_no_incarnation_changes(roles: list[str], given: str, run: tuple[str, str, str]) -> None:
    spec = JobSpec(name="j", roles=[RoleSpec(name=n, kind="simple", entry_point=ENTRY, total=1) for n in roles])
    for incarnation in (0, 1):
        launch = launch_of(spec, job_id="j-1", incarnation=incarnation)
        assert run_of(launch, given) == run

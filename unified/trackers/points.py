"""Points that a worker reports to a tracker: the choice of new ones, and a buffer for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from unified.protocol.records import WorkerReport, reported_value

MAX_POINTS = 10_000
Value = float | int | str


class Point(NamedTuple):
    """Values of one step."""

    step: int
    at: float
    """Time, in seconds since 1970."""
    values: dict[str, Value]
    rewinds: bool = False
    """True if this point and later ones replace the tracker's values of this step and of later steps."""


class TrackedRun(NamedTuple):
    """Run of one worker in a tracker, over all its incarnations."""

    id: str
    name: str
    job: str
    """Name of the job: the default for the project or experiment."""


class Tracker(Protocol):
    """A run that is open in a tracker. Its methods may block and raise."""

    highest: int
    """Last step that the tracker has of earlier incarnations; -1: none."""
    rewinds: bool
    """True if values of repeated steps replace earlier ones; False: the first values stay."""

    def write(self, points: list[Point]) -> None: ...
    def close(self) -> None: ...


class StepOrder:
    """Selects the values for a tracker, so that it has each name once for each step. Pure."""

    def __init__(self, highest: int, *, rewinds: bool) -> None:
        self._rewinds, self._floor = rewinds, -1 if rewinds else highest
        self._last: dict[str, int] = {}
        self._highest: int | None = None

    def new(self, points: Iterable[Point]) -> list[Point]:
        """Return the points that have new values, without their old values."""
        return [fresh for point in points if (fresh := self._fresh(point)).values]

    def _fresh(self, point: Point) -> Point:
        goes_back = self._rewinds and (
            self._highest is None
            or (point.step < self._highest and any(self._last.get(name, -1) >= point.step for name in point.values))
        )  # otherwise the point is late, such as an evaluation beside the training
        if goes_back:
            self._last = {name: step for name, step in self._last.items() if step < point.step}
            self._highest = point.step
        values = {name: v for name, v in point.values.items() if point.step > self._last.get(name, self._floor)}
        self._last.update(dict.fromkeys(values, point.step))
        self._highest = max(point.step, self._highest or 0)
        return point._replace(values=values, rewinds=goes_back)


class PointBuffer:
    """Points on their way to a tracker, with the parts of a step merged. Pure.

    Values before the first step become a part of it. Above `MAX_POINTS`, every second one of the older half is dropped.
    """

    def __init__(self) -> None:
        self.is_thinned = False
        self.early: dict[str, Value] = {}
        self._points: list[Point] = []

    def add(self, step: int | None, at: float, values: Mapping[str, Value]) -> None:
        if step is None or not values:
            self.early.update(values)
            return
        if self._points and self._points[-1].step == step:
            self._points[-1].values.update(values)
            return
        self._points.append(Point(step, at, {**self.early, **values}))
        self.early.clear()
        if len(self._points) > MAX_POINTS:
            self.is_thinned = True
            del self._points[: MAX_POINTS // 2 : 2]

    def take(self) -> list[Point]:
        points, self._points = self._points, []
        return points


def points_of(reports: Iterable[WorkerReport]) -> Iterator[Point]:
    """Yield reports that have a step, as points."""
    for report in reports:
        if report.step is not None:
            values = {name: reported_value(value) for name, value in report.metrics.items()}
            yield Point(report.step, report.at, values)

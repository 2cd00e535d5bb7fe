"""CPU time of the cores: of each event of the master, and of the longest step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from unified.values import Value
from unified_master.core.messages import MasterAction, MasterEvent, Received, ReportEvent, SaveRecord


class KindOfEvent(Value, frozen=True, kw_only=True):
    """Times of the master's core for events of one kind."""

    number: int
    p50_us: float
    p99_us: float
    max_ms: float
    total_s: float


class LongestStep(Value, frozen=True, kw_only=True):
    """The step of a core that took longest."""

    ms: float = 0.0
    at_hours: float = 0.0
    event: str = ""
    """The event, and a summary of its actions."""


class Longest:
    """Keeps the longest of all steps."""

    def __init__(self) -> None:
        self.step = LongestStep()
        self.num_steps = 0

    def note(self, now: float, seconds: float, describe: Callable[[], str]) -> None:
        self.num_steps += 1
        if 1000 * seconds > self.step.ms:
            self.step = LongestStep(ms=1000 * seconds, at_hours=now / 3600, event=describe())


class StepTimes:
    """Seconds of CPU of each step of the master's core, by kind of event."""

    def __init__(self) -> None:
        self._by_kind: dict[str, array[float]] = {}
        self.longest = Longest()

    def note(self, now: float, event: MasterEvent, seconds: float, actions: Sequence[MasterAction]) -> None:
        kind = type(event.message).__name__ if isinstance(event, Received) else type(event).__name__
        self._by_kind.setdefault(kind, array("d")).append(seconds)
        self.longest.note(now, seconds, lambda: _described(kind, actions))

    def kinds(self) -> dict[str, KindOfEvent]:
        return {kind: _kind(times) for kind, times in self._by_kind.items()}

    def ordered(self) -> list[float]:
        """Return the times of all events, shortest first."""
        return sorted(seconds for times in self._by_kind.values() for seconds in times)


def _kind(times: array[float]) -> KindOfEvent:
    ordered = sorted(times)
    return KindOfEvent(
        number=len(ordered),
        p50_us=quantile(ordered, 0.5) * 1e6,
        p99_us=quantile(ordered, 0.99) * 1e6,
        max_ms=ordered[-1] * 1e3,
        total_s=sum(ordered),
    )


def _described(kind: str, actions: Sequence[MasterAction]) -> str:
    number = Counter(type(action) for action in actions)
    reported = Counter(action.record.event for action in actions if isinstance(action, ReportEvent))
    decisions = ", ".join(f"{count} × {event}" for event, count in reported.most_common(4))
    saved = number.pop(SaveRecord, 0)
    sent = number.total() - number[ReportEvent]
    return f"{kind}: {saved} records saved, {sent} messages sent; {decisions or 'nothing decided'}"


def quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0

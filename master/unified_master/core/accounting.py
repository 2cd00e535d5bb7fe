"""Accounting of a job's time: its seconds in each `Phase`, from submission to end.

Each instant belongs to exactly one phase, so the seconds sum to the wall time, and each event costs O(1).
`unified_master.core.presence` tells an account the phase of its job.
"""

from __future__ import annotations

import msgspec

from unified.protocol.records import Phase, TimeSpent

MIN_STALL_S = 30.0
"""Shortest time without a step that is taken for a stall."""
STALL_TIMES = 5.0
"""Shortest stall as a multiple of the usual time between two reports of steps."""
WEIGHT = 0.1
"""Weight of the newest time between two reports of steps in the usual time."""


class Account(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The account of one job, saved with it."""

    spent: TimeSpent = TimeSpent()
    """Without a phase before submission and after the end."""
    is_whole: bool = False
    """True while no worker of a leading role is away."""
    has_run: bool = False
    """True if the job was whole since it last had no place."""
    before: str = ""
    """Phase before the job was whole; the time until the first step belongs to it."""
    unsettled_s: float = 0.0
    """Seconds until the very first step. Once the usual time is known, that much of them becomes productive."""
    role: str = ""
    """Leading role whose steps count: the first that reported any."""
    step: int = -1
    """Highest step since the job was last whole; -1: none."""
    peak: int = -1
    """Highest step ever."""
    stepped_at: float = 0.0
    """Time at which the job reached `step`, or last became whole."""
    interval_s: float = 0.0
    """Usual time between two reports of steps; 0: not known."""

    def enter(self, now: float, phase: Phase | None, *, is_whole: bool) -> bool:
        """Become whole, or enter a phase (None: the job has ended). Return True if that is a change."""
        is_same = is_whole is self.is_whole and (is_whole or phase == self.spent.phase)
        if not self.spent.phase or is_same:
            return False
        if is_whole:
            self.before, self.has_run, self.unsettled_s = self.spent.phase, True, 0.0
            self.step, self.stepped_at = -1, now
        elif phase is Phase.WAITING:
            self.has_run = False
        self.is_whole = is_whole
        awaited = self.before if self.peak >= 0 else Phase.PRODUCTIVE
        self._enter(now, awaited if is_whole else phase or "")
        return True

    def stepped(self, now: float, role: str, step: int, *, is_last: bool) -> None:
        """Take in a step that a worker of a leading role reported; `is_last`: no other step follows."""
        is_known = self.is_whole and self.step - 1 <= step <= self.step  # thousands of ranks may report it
        if is_known or not self.spent.phase or self.role not in ("", role):
            return
        self.role = role
        if self.is_whole:
            moves = self._learn(now, step)
            if step > self.step:
                self.step, self.stepped_at = step, now
            stall_after_s = self._stall_after_s() if self.interval_s and not is_last else None
            self._enter(now, self._running(), *moves, stall_after_s=stall_after_s)
        self.peak = max(self.peak, step)

    def suspect(self, progressed_at: float) -> None:
        """Begin a stall at `progressed_at`, the last progress of a role that may hang."""
        if self.is_whole:
            self._enter(max(progressed_at, self.stepped_at), Phase.STALLED)

    def goes_on(self, now: float) -> None:
        """End a stall: the suspected hang was none."""
        if self.spent.phase == Phase.STALLED:
            self._enter(now, self._running())

    def _running(self) -> Phase:
        return Phase.REDONE if 0 <= self.step < self.peak else Phase.PRODUCTIVE

    def _stall_after_s(self) -> float:
        return max(MIN_STALL_S, STALL_TIMES * self.interval_s)

    def _learn(self, now: float, step: int) -> list[tuple[str, str, float]]:
        """Update the usual time between two reports; return the moves of seconds between phases due to the step."""
        elapsed_s = now - self.stepped_at
        if self.step < 0 and self.peak < 0:
            self.unsettled_s = elapsed_s
            return [(Phase.PRODUCTIVE, self.before, elapsed_s)]
        if self.step < 0:
            kind = Phase.REDONE if step <= self.peak else Phase.PRODUCTIVE
            return [(self.before, kind, min(elapsed_s, self.interval_s))]
        if step <= self.step:
            return []
        usual_s = min(elapsed_s, self._stall_after_s())
        new = min(1.0, (step - self.peak) / (step - self.step)) if self.step < self.peak else 0.0
        first_s = 0.0 if self.interval_s else min(self.unsettled_s, elapsed_s)
        self.interval_s += WEIGHT * (usual_s - self.interval_s) if self.interval_s else elapsed_s
        return [(Phase.REDONE, Phase.PRODUCTIVE, new * usual_s), (self.before, Phase.PRODUCTIVE, first_s)]

    def _enter(
        self, now: float, phase: str, *moves: tuple[str, str, float], stall_after_s: float | None = None
    ) -> None:
        """Count the seconds until now, move some from one phase to another, and enter a phase."""
        seconds = self.spent.at(now)
        for source, target, asked_s in moves:
            if (moved_s := min(asked_s, seconds.get(source, 0.0))) > 0:
                seconds[source] -= moved_s
                seconds[target] = seconds.get(target, 0.0) + moved_s
        since, stalls_at = max(now, self.spent.since), None if stall_after_s is None else now + stall_after_s
        self.spent = TimeSpent(seconds=seconds, phase=phase, since=since, stalls_at=stalls_at)

"""Equal lines of many workers as one, for a person at a terminal: ``[trainer 0-511 ×512] step 100``."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from unified.core.hangs.verdict import ranges_text

FOLD_S = 0.25
"""Time for which a line waits for others that are equal to it."""
MAX_LINES = 10_000
"""Greatest number of lines that wait; if there are more, the oldest is shown at once."""
FOLD_VARIABLE = "UNIFIED_FOLD"
_PREFIX = re.compile(r"\[(.+)-(\d+)(#\d+)?\] ")


@dataclass
class _FoldedLine:
    line: str
    incarnation: str | None
    prefixes: list[str]
    since: float
    number: int


class LineFolder:
    """Lines that wait for equal ones. Each worker's order is kept, and no line is lost: each is shown, or counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[_FoldedLine] = deque()
        self._equal: dict[str, list[_FoldedLine]] = {}
        self._last: dict[str, int] = {}
        """Number of the newest line that waits, by worker."""
        self._count = 0

    def add(self, prefix: str, line: str) -> None:
        last = self._last.get(prefix, 0)
        equal = self._equal.setdefault(line, [])
        worker = _PREFIX.fullmatch(prefix)
        incarnation = worker[3] if worker else None  # the same line after a restart is another one
        same = (each for each in equal if each.number > last and each.incarnation == incarnation)
        found = next(same, None) if worker else None
        if found is None:
            self._count += 1
            found = _FoldedLine(line, incarnation, [], self._clock(), self._count)
            self._waiting.append(found)
            equal.append(found)
        found.prefixes.append(prefix)
        self._last[prefix] = found.number

    def take(self, *, is_end: bool = False) -> list[str]:
        """Return the lines that have waited long enough, or all."""
        taken = []
        until = self._clock() - FOLD_S
        while (waiting := self._waiting) and (is_end or waiting[0].since <= until or len(waiting) > MAX_LINES):
            oldest = waiting.popleft()
            equal = self._equal[oldest.line]
            equal.remove(oldest)
            if not equal:
                del self._equal[oldest.line]
            taken.append(folded_prefix(oldest.prefixes) + oldest.line)
        if not self._waiting:
            self._last.clear()
        return taken


def folded_prefix(prefixes: Sequence[str]) -> str:
    """Return one prefix for several workers: ``[trainer 0-2, 5 ×4] ``."""
    if len(prefixes) == 1:
        return prefixes[0]
    ranks: dict[str, list[int]] = {}
    for found in filter(None, map(_PREFIX.fullmatch, prefixes)):
        ranks.setdefault(found[1] + (found[3] or ""), []).append(int(found[2]))
    names = ", ".join(f"{role} {ranges_text(numbers)}" for role, numbers in sorted(ranks.items()))
    return f"[{names} ×{len(prefixes)}] "


def is_wanted(env: Mapping[str, str] | None = None) -> bool:
    """Return False where ``UNIFIED_FOLD=0`` says so."""
    return (os.environ if env is None else env).get(FOLD_VARIABLE) != "0"

"""What the bus has to reach beside its peers: each floor as data, and whether a run passed it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.bus import work

Medians = Mapping[str, Mapping[str, float]]
"""By contender, then by row."""


class Floor(NamedTuple):
    """``ours`` on `row` against ``peer`` on `peer_row`, as a ratio."""

    contender: str
    row: str
    peer: str
    peer_row: str
    at_least: float
    """How many times better than the peer; below 1, it may be worse."""
    note: str = ""
    """What a reader has to know of it."""
    is_copy: bool = False
    """The row is one copy of memory: no runtime is quicker than `COPY_LIMIT`, however slow or quick the peer is."""


COPY_LIMIT = "memory"
"""The contender that copies with nothing around it."""
COPY_SHARE = 0.75
"""Share of that contender's rate from which on a copy counts as being at the limit of the machine."""


class Judged(NamedTuple):
    """A floor, and whether it is held."""

    word: str
    line: str

    def __str__(self) -> str:
        return f"{self.line}: {self.word}"


class Verdict(NamedTuple):
    floor: Floor
    ratio: float | None
    """How many times better; None where one of the two was not measured."""
    copy_share: float | None = None
    """Share of the rate of `COPY_LIMIT`, of a row that is a copy."""

    @property
    def is_passed(self) -> bool | None:
        return None if self.ratio is None else self.ratio >= self.floor.at_least or self.is_at_limit

    @property
    def is_at_limit(self) -> bool:
        return self.copy_share is not None and self.copy_share >= COPY_SHARE

    @property
    def word(self) -> str:
        return {True: "pass", False: "FAIL", None: "not measured"}[self.is_passed]

    def __str__(self) -> str:
        floor = self.floor
        rows = floor.row if floor.row == floor.peer_row else f"{floor.row} ÷ {floor.peer_row}"
        ratio = "–" if self.ratio is None else f"{self.ratio:.2f}×"
        note = f" ({floor.note})" if floor.note else ""
        limit = "" if self.copy_share is None else f", or {COPY_SHARE:g} of memcpy: {self.copy_share:.2f}"
        return (
            f"{floor.contender} against {floor.peer}: {rows} {ratio} "
            f"(floor {floor.at_least:.3g}×{limit}): {self.word}{note}"
        )


def _floor(
    row: str,
    peer: str,
    at_least: float,
    *,
    contender: str = "direct",
    peer_row: str = "",
    note: str = "",
    is_copy: bool = False,
) -> Floor:
    return Floor(contender, row, peer, peer_row or row, at_least, note, is_copy)


LARGE = {"fanout", *(name for mib in work.LARGE for name in work.array_rows(mib))}
NO_MEASURE = {"rss_children", *work.BUSY, *(row.name for row in work.ROWS if row.plain)}
"""Each of our workers shares the pages of the process it was forked from, and resident sizes count them for each.
What only ours has is no floor."""
UNLIKE = (
    "two different things: ours is PSS without workers, the peer's is resident sizes with workers; "
    "the row memory_idle itself has like beside like"
)
FLOORS = [
    _floor("sync_p50", "ray", 4),
    _floor("async_1_1", "ray", 6),
    _floor("async_2_2", "ray", 6),
    *(_floor(f"{way}_{mib}MiB", "ray", 8, is_copy=mib in work.LARGE) for mib in work.ARRAYS for way in ("arg", "ret")),
    _floor("queue_single", "ray", 12),
    _floor("queue_batch100", "ray", 5),
    _floor("start_4_workers", "ray", 4),
    _floor("memory_idle", "ray", 8, peer_row="rss_children", note=UNLIKE),
    _floor("sync_p50", "xoscar", 1 / 0.85),
    _floor("async_1_1", "xoscar", 4),
    _floor("sync_p50", "zmq", 1 / 1.6),
    *(_floor(name, "ray", 1, contender="relay") for name in work.NAMES if name not in LARGE | NO_MEASURE),
]
"""The floors of the first release of the bus."""


def medians(figures: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {
        contender: {name: statistics.median(values) for name, values in rows.items() if values}
        for contender, rows in figures.items()
    }


def times_better(row: str, ours: float, theirs: float, rows: Iterable[work.Row] = work.ROWS) -> float:
    """Above 1: ours is better, whichever way is better on that row."""
    is_rate = next(each.is_rate for each in rows if each.name == row)
    better, worse = (ours, theirs) if is_rate else (theirs, ours)
    return better / worse if worse else float("inf")


def verdicts(
    found: Medians, floors: Iterable[Floor] = FLOORS, rows: Sequence[work.Row] = work.ROWS
) -> Iterator[Verdict]:
    for floor in floors:
        ours = found.get(floor.contender, {}).get(floor.row)
        theirs = found.get(floor.peer, {}).get(floor.peer_row)
        ratio = None if ours is None or theirs is None else times_better(floor.row, ours, theirs, rows)
        limit = found.get(COPY_LIMIT, {}).get(floor.row) if floor.is_copy else None
        yield Verdict(floor, ratio, None if ours is None or limit is None else ours / limit)

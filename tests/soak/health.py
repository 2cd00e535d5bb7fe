"""Memory and descriptors of every process of a cluster over time, and whether they grow. The judgement is pure."""

import contextlib
import itertools
import os
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from unified.client.daemons import marked_processes

SHARED_MEMORY = Path("/dev/shm")
MIB = 1 << 20
BUCKETS = 24
"""At most; of each, only the least counts: what is in use for a moment is no growth."""
FEWEST_BUCKETS = 6
SHARED = "shared memory"
CONFIDENCE = 1.96
"""Standard deviations of the trend's rank statistic: one trend in forty that is none is taken for growth."""
POOLS_FILL_S = 120.0
"""Every size of slot has been needed by then, so that the pools have what they will have."""
TOLERANCE = {"mib": (8.0, 0.05), "descriptors": (4.0, 0.05)}
"""Growth over the whole time that is let pass: so much, or this share of the beginning."""


class Sample(NamedTuple):
    """One look."""

    at: float
    """Seconds since the beginning."""
    anonymous_mib: dict[str, float]
    """Memory of its own, by process; shared memory and files do not count."""
    descriptors: dict[str, int]
    pss_mib: float
    """Of all processes together."""
    shared_mib: float
    """In /dev/shm, of ours."""
    num_processes: int


class Growth(NamedTuple):
    """What a series does over its time."""

    total: float
    """By the middle slope."""
    at_least: float
    """By the lower end of the slope's confidence interval."""


def look(at: float, setting: str, names: dict[int, str], inboxes: Collection[str]) -> Sample:
    """Look at every process of a cluster.

    Args:
        setting: ``NAME=value`` that marks its processes.
        names: pids to the names under which processes are followed; others count in the totals alone.
        inboxes: of its processes, by which their shared memory is known.
    """
    anonymous: dict[str, float] = {}
    descriptors: dict[str, int] = {}
    pss = 0.0
    marked = marked_processes(setting)
    for process in marked:
        try:
            sizes = _sizes(process.pid)
            num = len(os.listdir(f"/proc/{process.pid}/fd"))
        except OSError:  # it has just ended
            continue
        pss += sizes.get("Pss", 0) / 1024
        if (name := names.get(process.pid)) is not None:
            anonymous[name] = sizes.get("Anonymous", 0) / 1024
            descriptors[name] = num
    return Sample(at, anonymous, descriptors, pss, _shared_mib(inboxes), len(marked))


def shared_files(inboxes: Collection[str]) -> list[Path]:
    """What the processes with these inboxes have, or left, in shared memory; others may work on this machine too."""
    return [path for path in SHARED_MEMORY.glob("unified-*") if path.name.split("-")[1] in inboxes]


def _shared_mib(inboxes: Collection[str]) -> float:
    total = 0
    for path in shared_files(inboxes):
        with contextlib.suppress(OSError):  # it has just gone
            total += path.stat().st_blocks * 512
    return total / MIB


def judge(samples: Sequence[Sample], since_s: float) -> tuple[dict[str, Growth], list[str]]:
    """Growth of every process that lived from `since_s` on, and a sentence for each that is too much."""
    window = [sample for sample in samples if sample.at >= since_s]
    growths: dict[str, Growth] = {}
    wrong: list[str] = []
    names = sorted({name for sample in window for name in sample.anonymous_mib})
    series = [(f"memory of {name}", "mib", [s.anonymous_mib.get(name) for s in window]) for name in names]
    series += [(f"descriptors of {name}", "descriptors", [s.descriptors.get(name) for s in window]) for name in names]
    if since_s >= POOLS_FILL_S:
        series.append((SHARED, "mib", [s.shared_mib for s in window]))
    for title, unit, values in series:
        known = [value for value in values if value is not None]
        found = growth([sample.at for sample in window], known) if len(known) == len(window) else None
        if found is None:
            continue
        growths[title] = found
        least, share = TOLERANCE[unit]
        # Of a process in a long run the trend itself counts; where much comes and goes, only what is sure.
        counted = found.total if since_s >= POOLS_FILL_S and title != SHARED else found.at_least
        if counted > max(least, share * known[0]):
            wrong.append(f"{title} grows: by {found.total:.1f} {unit}, by {found.at_least:.1f} at the least")
    return growths, wrong


def growth(times: Sequence[float], values: Sequence[float]) -> Growth | None:
    """Theil and Sen's slope over the least values of equal spans of time, with Sen's confidence interval; None if
    there are too few.
    """
    count = min(BUCKETS, len(values) // 2)
    if count < FEWEST_BUCKETS:
        return None
    edges = [len(values) * place // count for place in range(count + 1)]
    points = [(statistics.fmean(times[start:end]), min(values[start:end])) for start, end in itertools.pairwise(edges)]
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for place, earlier in enumerate(points)
        for later in points[place + 1 :]
    )
    deviation = (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    lowest = max(0, round((len(slopes) - CONFIDENCE * deviation) / 2))
    span = times[-1] - times[0]
    return Growth(statistics.median(slopes) * span, slopes[lowest] * span)


def _sizes(pid: int) -> dict[str, int]:
    """KiB by name, from the kernel's summary of a process's memory."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0])
    return found

"""The end of a soak: one page of words, one picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from soak_health import Sample


def show(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("", "", title=f"{result['seconds']:g} seconds", show_header=False)
    for title, value in summary(result).items():
        table.add_row(title, value)
    console.print(table)
    for line in result["shown"]:
        console.print(line, style="red", markup=False, highlight=False)
    console.print("passed" if result["passed"] else f"FAILED: {len(result['wrong'])} things are wrong")


def summary(result: dict[str, Any]) -> dict[str, str]:
    items, calls = result["items"], result["calls"]
    ends: dict[str, int] = {}
    for name, count in calls.items():
        end = name.partition("/")[2]
        ends[end] = ends.get(end, 0) + count
    growths = {name: total for name, (total, _) in result["growth"].items()}
    most = sorted(growths, key=lambda name: growths[name], reverse=True)[:4]
    return {
        "calls": f"{sum(calls.values())}, {result['calls_per_s']:.0f}/s; " + _counts(ends),
        "longest after its deadline": f"{result['longest_lateness_s']:.3f} s",
        "queue items": _counts(items),
        "killed": _counts(result["kills_by_role"]),
        "memory of all": f"{result['pss_mib']:.0f} MiB at the end (PSS), shared {result['shared_mib']:.0f} MiB",
        "what grows most": ", ".join(f"{name} {growths[name]:+.1f}" for name in most) or "too short to tell",
    }


def plot(samples: Sequence[Sample], calls: Sequence[tuple[float, int]], kills: Sequence[float], file: Path) -> None:
    """Calls, memory and descriptors by time, with a line for each kill.

    Args:
        calls: seconds since the beginning, and calls that ended within that second.
        kills: seconds since the beginning.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (rate, memory, descriptors) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 9), layout="constrained")
    times = [sample.at for sample in samples]
    rate.plot([at for at, _ in calls], [count for _, count in calls], linewidth=0.8)
    rate.vlines(kills, 0, 1, transform=rate.get_xaxis_transform(), color="red", linewidth=0.4, alpha=0.5)
    rate.set_ylabel("calls ended a second\n(red: a worker is killed)")
    rate.set_ylim(bottom=0)
    memory.plot(times, [sample.pss_mib for sample in samples], label="all processes (PSS)", color="black")
    memory.plot(times, [sample.shared_mib for sample in samples], label="shared memory", color="grey")
    for name in sorted({name for sample in samples for name in sample.anonymous_mib}):
        memory.plot(times, [sample.anonymous_mib.get(name) for sample in samples], label=name, linewidth=0.8)
        descriptors.plot(times, [sample.descriptors.get(name) for sample in samples], label=name, linewidth=0.8)
    memory.set_ylabel("MiB (of one process: its own)")
    memory.set_yscale("log")
    memory.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    descriptors.set_ylabel("open descriptors")
    descriptors.set_xlabel("seconds")
    descriptors.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file)
    pyplot.close(figure)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda each: -each[1]))

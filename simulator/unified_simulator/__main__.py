"""The process behind ``unified simulate``: options as JSON in, a table or JSON out."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from unified.protocol.records import EventRecord
from unified_simulator.cluster import Watch
from unified_simulator.measure import LongestStep
from unified_simulator.simulation import Simulation, SimulationOptions, SimulationReport


@contextlib.contextmanager
def writing(file: str) -> Iterator[Watch | None]:
    """Give a function that writes decisions and faults into the file, or None if no file is named."""
    if not file:
        yield None
        return
    with open(file, "w") as out:

        def watch(now: float, who: str, what: object) -> None:
            if isinstance(what, EventRecord):
                where = " ".join(filter(None, (what.job, what.worker or what.role, what.node)))
                out.write(f"{now:.3f} {what.event} {where}: {what.reason}\n")
            elif isinstance(what, str):
                out.write(f"{now:.3f} {who} {what}\n")

        yield watch


def simulate(options: SimulationOptions, transcript: str) -> SimulationReport:
    """Run with a progress bar on stderr; if stderr is no terminal, with a line for each virtual hour."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[so_far]}"), TimeElapsedColumn())
    with writing(transcript) as watch, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{options.nodes} nodes", total=options.hours, so_far="")
        begun, shown = time.monotonic(), 0

        def show(simulation: Simulation) -> None:
            nonlocal shown
            hours = simulation.cluster.now / 3600
            progress.update(task, completed=hours, so_far=f"{hours:.1f} h: {simulation.progress}")
            if not console.is_terminal and int(hours) > shown:
                shown = int(hours)
                passed = f"{shown} of {options.hours:g} h in {time.monotonic() - begun:.0f} s"
                print(f"{passed}: {simulation.progress}", file=sys.stderr, flush=True)

        return Simulation(options, watch).run(show)


def table(report: SimulationReport) -> Table:
    """Return a table of the main figures, each with its name."""
    options, faults = report.options, report.faults
    found = Table(title=f"A simulation of {options.nodes:,} nodes with {options.nodes * options.workers:,} workers")
    found.add_column("of")
    found.add_column("figure", justify="right")
    checks = ", ".join(f"{number:,} × {what}" for what, number in report.checks.items())
    rows = {
        "virtual time": f"{options.hours:g} h",
        "faults": ", ".join(f"{number} × {what}" for what, number in sorted(faults.items())) or "none",
        "jobs that train at the end; that ended": f"{report.jobs_running}; {report.jobs_finished}",
        "goodput: useful part of the jobs' node time": f"{report.goodput:.2%}",
        "recoveries; from a death to training again, p50, p99": (
            f"{report.recoveries}; {report.recovery_p50_s:.1f} s, {report.recovery_p99_s:.1f} s"
        ),
        "events of the master's core, and decisions": f"{report.events:,}, {report.decisions:,}",
        "events a second of the core's time, decisions": (
            f"{report.events_a_second:,.0f}, {report.decisions_a_second:,.0f}"
        ),
        "time of the core for one event: p50, p99": f"{report.step_p50_us:.0f} µs, {report.step_p99_us / 1000:.2f} ms",
        "the longest": _longest(report.longest),
        "the longest of an agent's core": _longest(report.longest_of_agents),
        "part of one CPU that the core needs, heartbeats included": f"{report.core_share:.2%}",
        "memory of the simulation": f"{report.memory_mib:,.0f} MiB",
        "its time, and that of its CPU": f"{report.wall_s:,.0f} s, {report.cpu_s:,.0f} s",
        "invariants, which held": f"checked after {checks}",
    }
    for name, text in rows.items():
        found.add_row(name, text)
    return found


def _longest(step: LongestStep) -> str:
    return f"{step.ms:,.1f} ms at {step.at_hours:.2f} h ({step.event})"


def main() -> int:
    """Run the simulation that the command line describes; return the exit code."""
    given, transcript, *flags = sys.argv[1:]
    options = msgspec.json.decode(given, type=SimulationOptions)
    try:
        report = simulate(options, transcript)
    except AssertionError as error:
        print(f"unified simulate: an invariant broke with seed {options.seed}: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # from the transcript file
        print(f"unified simulate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if flags:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        Console().print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

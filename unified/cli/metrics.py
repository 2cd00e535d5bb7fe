"""``unified metrics JOB``: the reports of its workers as a table, lines, CSV, JSON or TensorBoard files."""

from __future__ import annotations

import csv as csv_format
import math
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from unified.cli.options import add_job, add_json, add_master
from unified.cli.show import moment, print_json, table, terminal_width
from unified.client.connection import MasterConnection, connect_master
from unified.client.report import number_text, short_name
from unified.client.reports import KeptReports, read_reports
from unified.config.logging import escaped
from unified.errors import UsageError
from unified.job.names import parse_worker
from unified.lazy import needed_by
from unified.protocol.client_master import GetJob, JobStatus, WorkerStatus
from unified.protocol.records import Stage, WorkerReport, reported_value

MAX_REPORTS = 100_000
LOOK_S = 1.0
SKEW_S = 5.0
"""Largest difference between the clocks of two nodes."""
CURVE_CHARS = 24
_BARS = "▁▂▃▄▅▆▇█"
_HEADER = ["WORKER", "NAME", "STEP", "LAST", "LOWEST", "HIGHEST", "POINTS", "REPORTED", "CURVE"]
_CSV_HEADER = ["worker", "incarnation", "time", "step", "name", "value"]
Write = Callable[[str, WorkerReport], object]


def metrics_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("worker", nargs="?", default="", metavar="WORKER", help="trainer-0; else rank 0 of each role.")
    add_master(parser)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--csv", action="store_true", help="Print a line for each value, with all its digits.")
    forms.add_argument("--tensorboard", metavar="DIR", help="Write them for TensorBoard, a folder a worker, into DIR.")
    add_json(forms)
    parser.add_argument("--follow", "-f", action="store_true", help="Go on until the job has ended.")


def metrics(
    job: str, worker: str, master: str | None, csv: bool, tensorboard: str | None, json: bool, follow: bool
) -> None:
    """Show the newest value of each name that workers reported; with --follow a line for each step. Of the old steps of
    a long run some are kept."""
    with connect_master(master) as connection:
        status = connection.ask(GetJob(job=job), JobStatus)
        wanted = [parse_worker(worker)] if worker else [(role.name, 0) for role in status.roles]
        chosen = [each for each in status.workers if (each.role, each.rank) in wanted]
        if not chosen:
            raise UsageError(f"job {status.job_id} has no worker {worker!r}: `unified status {job}` lists them.")
        if csv or tensorboard or follow:
            write = _csv_writer() if csv else _export(tensorboard, status.job_id) if tensorboard else _print_line
            _follow(connection, status, {each.name for each in chosen}, write, once=not follow)
            return
        series = {short_name(each): _read(connection, status.job_id, each) for each in chosen}
    if json:
        print_json({name: {**each._asdict(), "num_thinned": each.num_thinned} for name, each in series.items()})
    else:
        print("\n".join(newest_lines(series, terminal_width())))


def _read(connection: MasterConnection, job_id: str, worker: WorkerStatus, since: float = 0.0) -> KeptReports:
    return read_reports(connection, job_id, worker.name, worker.incarnation, since=since, limit=MAX_REPORTS)


def _follow(
    connection: MasterConnection, status: JobStatus, names: set[str], write: Write, *, once: bool = False
) -> None:
    """Write each point, `once` or until the job has ended. The newest point waits, because it may still get values."""
    last: dict[str, WorkerReport] = {}
    said: set[str] = set()
    is_over = False
    while not is_over:
        is_over = once or status.stage == Stage.STOPPED
        for worker in (each for each in status.workers if each.name in names):
            seen = last.get(worker.name)
            found = _read(connection, status.job_id, worker, max(0.0, seen.at - SKEW_S) if seen else 0.0)
            for report in found.reports if is_over else found.reports[:-1]:
                if seen is None or (report.incarnation, report.number) > (seen.incarnation, seen.number):
                    write(short_name(worker), report)
                    last[worker.name] = report
            for reason in set(found.missing) - said:
                said.add(reason)
                print(f"unified: {escaped(reason)}", file=sys.stderr)
        sys.stdout.flush()
        if not is_over:
            time.sleep(LOOK_S)
            status = connection.ask(GetJob(job=status.job_id), JobStatus)


def newest_lines(series: Mapping[str, KeptReports], width: int | None = None) -> list[str]:
    """Return a row for each name: its newest value, and on a terminal its curve over all incarnations."""
    rows: list[list[object]] = []
    for worker, found in series.items():
        for name in dict.fromkeys(name for report in found.reports for name in report.metrics):
            points = [report for report in found.reports if name in report.metrics]
            values = [reported_value(report.metrics[name]) for report in points]
            numbers = [float(value) for value in values if not isinstance(value, str) and math.isfinite(value)]
            ends = [number_text(end(numbers)) if numbers else "-" for end in (min, max)]
            step, at = points[-1].step, moment(points[-1].at)
            shown = [worker, name, "-" if step is None else step, number_text(values[-1]), *ends, len(points), at]
            rows.append([*shown, curve(numbers) if width is not None and numbers else "-"])
    num_thinned = sum(found.num_thinned for found in series.values())
    notes = [f"{num_thinned} points between these were thinned out"] if num_thinned else []
    notes += [reason for found in series.values() for reason in found.missing]
    return [*(table(_HEADER, rows, width) if rows else ["nothing was reported"]), *notes]


def curve(numbers: Sequence[float]) -> str:
    """Return finite numbers as at most `CURVE_CHARS` bars; each bar is the mean of equally many numbers."""
    size, scale = -(-len(numbers) // CURVE_CHARS), max(map(abs, numbers)) or 1.0  # scaled, so that no sum overflows
    scaled = [number / scale for number in numbers]
    means = [math.fsum(part := scaled[at : at + size]) / len(part) for at in range(0, len(scaled), size)]
    span = max(means) - min(means)
    return "".join(_BARS[round((mean - min(means)) / span * (len(_BARS) - 1)) if span else 0] for mean in means)


def _print_line(worker: str, report: WorkerReport) -> None:
    step = [] if report.step is None else [f"step {report.step}"]
    values = [f"{name} {number_text(reported_value(value))}" for name, value in report.metrics.items()]
    print(escaped("  ".join([moment(report.at), worker, *step, *values])))


def _csv_writer() -> Write:
    writer = csv_format.writer(sys.stdout, lineterminator="\n")
    writer.writerow(_CSV_HEADER)
    return lambda worker, report: writer.writerows(
        [worker, report.incarnation, report.at, report.step, name, reported_value(value)]
        for name, value in report.metrics.items()
    )


def _export(folder: str, job_id: str) -> Write:
    """Return a writer of TensorBoard files. For a step that a worker has repeated, the last values are shown."""
    try:
        with needed_by("unified metrics --tensorboard"):
            import_module("tensorboard")
    except ModuleNotFoundError as error:
        raise UsageError(str(error)) from None
    from unified.trackers.backends import TensorBoard
    from unified.trackers.points import StepOrder, TrackedRun, points_of

    opened: dict[str, tuple[TensorBoard, StepOrder]] = {}

    def write(worker: str, report: WorkerReport) -> None:
        if worker not in opened:
            opened[worker] = TensorBoard(folder, TrackedRun("", f"{job_id}/{worker}", "")), StepOrder(-1, rewinds=True)
        tracker, order = opened[worker]
        if points := order.new(points_of([report])):
            tracker.write(points)

    return write

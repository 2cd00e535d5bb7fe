"""``unified status JOB``: its stage, its roles, its workers, and why it is where it is."""

from __future__ import annotations

import time
from argparse import ArgumentParser

from unified.cli.options import add_job, add_json, add_master, connect
from unified.cli.text import first_line, moment, print_json, table, terminal_width
from unified.client.connection import MasterConnection
from unified.client.report import duration_text, end_lines, number_text, short_name, state_text, summarise, unread_lines
from unified.protocol.client_master import GetJob, JobStatus, WorkerStatus
from unified.protocol.records import Stage, WorkerState

MAX_ROWS = 40


def add_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    add_master(parser)
    parser.add_argument("--watch", "-w", action="store_true", help="Show it live until it has ended.")
    add_json(parser)


def status(job: str, master: str | None, watch: bool, json: bool) -> int:
    """Show a job. With --watch the exit code is the job's."""
    with connect(master) as connection:
        found = connection.ask(GetJob(job=job), JobStatus)
        if watch and found.stage != Stage.STOPPED:
            found = _watch(connection, found.job_id)
    if json:
        print_json(found)
    else:
        print("\n".join(status_lines(found, time.time(), terminal_width())))
    return (found.exit_code or 0) if watch else 0


def _watch(connection: MasterConnection, job_id: str) -> JobStatus:
    from unified.client.display import open_display
    from unified.client.foreground import Watch

    with open_display() as display:
        return Watch(connection, job_id, display, with_logs=False, stops_job=False).run()


def status_lines(status: JobStatus, now: float, width: int | None = None) -> list[str]:
    """All of it as text. `now` is the wall clock; the table of workers is cut to `width`."""
    if status.stage == Stage.STOPPED:
        lines = end_lines(status)
    else:
        since = duration_text(now - status.submitted_at) if status.submitted_at else "-"
        lines = [f"job {status.job_id} is {status.stage}, for {since}"]
        if status.reason:
            lines.append(f"  {first_line(status.reason)}")
        lines += unread_lines(status)
    lines.append(f"  submitted {moment(status.submitted_at)} by {status.submitted_by or '-'}")
    lines += ["", *(f"  {role.text}" for role in summarise(status))]
    if status.workers:
        lines += ["", *(f"  {line}" for line in _worker_lines(status, width))]
    return lines


def _worker_lines(status: JobStatus, width: int | None) -> list[str]:
    workers = status.workers
    odd_first = sorted(workers, key=lambda worker: (worker.state == WorkerState.RUNNING, worker.role, worker.rank))
    shown = odd_first[:MAX_ROWS] if len(workers) > MAX_ROWS else workers
    header = ["WORKER", "LIFE", "STATE", "NODE", "PID", "DEVICES", "FAILED", "PROGRESS", "REASON"]
    lines = table(header, [_row(status, worker) for worker in shown], None if width is None else width - 2)
    if len(workers) > len(shown):
        lines.append(f"… {len(workers) - len(shown)} more; --json has them all")
    return lines


def _row(status: JobStatus, worker: WorkerStatus) -> list[object]:
    return [
        short_name(worker),
        worker.incarnation,
        state_text(status, worker),
        worker.node or "-",
        worker.pid or "-",
        ",".join(str(index) for index in worker.devices) or "-",
        worker.num_failures or "-",
        _progress(worker),
        first_line(worker.reason),
    ]


def _progress(worker: WorkerStatus) -> str:
    if worker.progress is None:
        return "-"
    step, total = worker.progress.step, worker.progress.total
    parts = [] if step is None else [f"{step}/{total}" if total else f"{step}"]
    parts += [f"{name}={number_text(value)}" for name, value in worker.progress.metrics.items()]
    return " ".join(parts) or "-"

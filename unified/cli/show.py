"""``unified status``, ``jobs``, ``nodes`` and ``explain``: commands that show what a master knows, as text or JSON."""

from __future__ import annotations

import math
import shutil
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from unified.cli.options import add_job, add_json, add_master, at_least
from unified.client import report
from unified.client.connection import MasterConnection, connect_master
from unified.client.left_logs import left_by
from unified.client.mirror import JobWatch
from unified.config.logging import escaped
from unified.errors import RefusedError, UsageError
from unified.job.names import WorkerRef, parse_worker
from unified.protocol import client_master
from unified.protocol.records import NodeState, Stage, WorkerState, json_value

REASON_WIDTH = 160
"""Width of the last column if stdout is no terminal."""
REASON_ROOM = 48
"""Width that the last column gets on a narrow terminal, in place of columns of `MINOR`."""
MINOR = ("ALSO", "MEMORY", "FREE CPU", "ADDRESS", "INCARNATION", "EXIT", "WORKERS", "ENDED", "SUBMITTED")
"""Columns that are left out on a narrow terminal, the least important first."""
MAX_ROWS = 40
MAX_BUDGETS = 8
JOB_HEADER = ["JOB", "STAGE", "EXIT", "WORKERS", "SUBMITTED", "ENDED", "REASON"]
NODE_HEADER = [
    "NODE", "STATE", "ADDRESS", "WORKERS", "FREE CPU", "MEMORY", "DEVICES", "ALSO", "SEEN", "CHECK", "REASON"
]  # fmt: skip
WORKER_HEADER = ["WORKER", "INCARNATION", "STATE", "NODE", "PID", "DEVICES", "FAILED", "PROGRESS", "REASON"]
SEARCHED_JOBS = 20
T = TypeVar("T")


def table(header: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None) -> list[str]:
    """Return rows under a header, with columns two spaces apart; the last column is not padded.

    With a `width`, columns that are empty in all rows are left out, then those of `MINOR` until there is room for the
    last column, or for `REASON_ROOM` characters of it. Lines are cut at the width, so that none wraps.
    Without a `width`, all columns are there, for programs that count them. Then only the last column, the reason, is
    cut, at 160 characters.
    """
    texts = [[escaped(str(cell)) for cell in row] for row in rows]
    if width is None:
        texts = [[*row[:-1], report.cut(row[-1], REASON_WIDTH)] for row in texts]
    cells, columns = [list(header), *texts], range(len(header))
    widths = [max(len(row[column]) for row in cells) for column in columns]
    shown = [column for column in columns if width is None or any(row[column] not in ("", "-") for row in texts)]
    for column in (header.index(name) for name in MINOR if shown and name in header):
        needed = sum(widths[each] + 2 for each in shown[:-1]) + min(widths[shown[-1]], REASON_ROOM)
        if width is not None and needed > width and column in shown:
            shown.remove(column)
    lines = ["  ".join(row[column].ljust(widths[column]) for column in shown).rstrip() for row in cells]
    return lines if width is None else [report.cut(line, width) for line in lines]


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if stdout is a file or a pipe, where nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def moment(at: float | None) -> str:
    """``07:49:42`` today, ``2025-03-01 07:49`` before; ``-`` for None."""
    if at is None or at <= 0:
        return "-"
    then, today = time.localtime(at), time.localtime()
    is_today = then[:3] == today[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", then)


def print_json(value: object) -> None:
    """Print a record, or a list of records, as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(json_value(msgspec.to_builtins(value))), indent=2).decode())


def amount(value: float) -> str:
    """``8``, ``0.5``: no trailing zeros."""
    return f"{value:.6g}"


def status_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    add_master(parser)
    parser.add_argument("--watch", "-w", action="store_true", help="Show it live until it has ended.")
    add_json(parser)


def status(job: str, master: str | None, watch: bool, json: bool) -> int:
    """Show a job. With --watch the exit code is the job's."""
    try:
        with connect_master(master) as connection:
            seen = JobWatch(connection, job)
            found, ahead_s = seen.next_status(), seen.mirror.at - time.time()
            if watch and found.stage != Stage.STOPPED:
                found = _watch(connection, found.job_id)
            queue = ""
            if found.stage == Stage.INIT and not json:
                begin = connection.ask(client_master.ListJobs(stages=[Stage.INIT]), client_master.JobList)
                queue = report.queue_text(found.job_id, begin.jobs)
    except (UsageError, RefusedError) as error:
        kept = left_by(job, master, error).status()
        if kept is None:
            raise
        found, ahead_s, queue = kept, 0.0, ""
    if json:
        print_json(found)
    else:
        print("\n".join(status_lines(found, time.time() + ahead_s, terminal_width(), queue)))
    return (found.exit_code or 0) if watch else 0


def _watch(connection: MasterConnection, job_id: str) -> client_master.JobStatus:
    from unified.client.display import open_display
    from unified.client.foreground import Watch

    with open_display() as display:
        return Watch(connection, job_id, display, with_logs=False, on_signal="leave").run()


def status_lines(status: client_master.JobStatus, now: float, width: int | None = None, queue: str = "") -> list[str]:
    """Return the whole status as text.

    Args:
        now: the master's clock.
        width: columns to which the table of workers is cut.
        queue: place of the job in the queue, as `queue_text` returns it.
    """
    lines = report.state_lines(status, now)
    submitted = f"submitted {moment(status.submitted_at)} by {status.submitted_by or '-'}"
    lines.append("  " + ", ".join(filter(None, (submitted, queue))))
    if (started := status.started_at) or status.ended_at:
        times = [f"started {moment(started)}" if started else "never started"]
        if status.ended_at:
            times.append(f"{report.stage_text(status, now).lower()} {moment(status.ended_at)}")
            times[1] += f" ({report.duration_text(status.ended_at - started)} later)" if started else ""
        lines.append("  " + ", ".join(times))
    if spent := report.time_text(status, now):
        lines.append(f"  time {spent}")
    if status.budgets:
        charges = map(report.budget_text, status.budgets[:MAX_BUDGETS])
        lines.append(f"  charged to its limits: {', '.join(charges)}")
    lines += ["", *(f"  {role.text}" for role in report.summarise(status))]
    if status.workers:
        lines += ["", *(f"  {line}" for line in _worker_lines(status, width))]
    return lines


def _worker_lines(status: client_master.JobStatus, width: int | None) -> list[str]:
    workers, usual = status.workers, (WorkerState.RUNNING, WorkerState.SERVING)
    states = {worker.name: report.state_text(status, worker) for worker in workers}
    odd_first = sorted(
        workers, key=lambda each: (states[each.name] != report.FAILED, each.state in usual, each.role, each.rank)
    )
    shown = odd_first[:MAX_ROWS] if len(workers) > MAX_ROWS else workers
    rows = [_worker_row(status, worker) for worker in shown]
    lines = table(WORKER_HEADER, rows, None if width is None else width - 2)
    if len(workers) > len(shown):
        lines.append(f"… {len(workers) - len(shown)} more; --json has them all")
    return lines


def _worker_row(status: client_master.JobStatus, worker: client_master.WorkerStatus) -> list[object]:
    return [
        report.short_name(worker),
        worker.incarnation,
        report.state_text(status, worker),
        worker.node or "-",
        worker.pid or "-",
        ",".join(str(index) for index in worker.devices) or "-",
        worker.num_failures or "-",
        _progress(worker),
        report.first_line(worker.reason),
    ]


def _progress(worker: client_master.WorkerStatus) -> str:
    if worker.progress is None:
        return "-"
    step, total = worker.progress.step, worker.progress.total
    parts = [] if step is None else [f"{step}/{total}" if total else f"{step}"]
    parts += [f"{name}={report.number_text(value)}" for name, value in worker.progress.metrics.items()]
    return " ".join(parts) or "-"


def nodes_arguments(parser: ArgumentParser) -> None:
    add_master(parser)
    add_json(parser)


def jobs_arguments(parser: ArgumentParser) -> None:
    nodes_arguments(parser)
    parser.add_argument("--limit", type=at_least(1), default=0, metavar="N", help="Only the newest N.")
    stages = [*map(str, Stage), *report.STAGE_WORDS]
    text = "Only in this stage, as the command shows it or as --json has it."
    parser.add_argument("--stage", action="append", type=str.upper, choices=stages, help=text)
    parser.add_argument("--text", default="", help="Only those with this in their id or their submitter.")


def jobs(master: str | None, json: bool, limit: int, stage: list[str] | None, text: str) -> None:
    """List jobs, newest first."""
    wanted, words = stage or [], set(stage or ()) & set(report.STAGE_WORDS)
    stages = [report.STAGE_WORDS.get(each) or Stage(each) for each in wanted]
    request = client_master.ListJobs(limit=0 if words else limit, stages=stages, text=text)
    with connect_master(master) as connection:
        found = connection.ask(request, client_master.JobList).jobs
    if words:  # the master knows the stages alone
        found = [job for job in found if job.stage in wanted or report.stage_text(job, 0.0) in words]
    found = sorted(found, key=lambda job: job.submitted_at, reverse=True)[: limit or None]
    _print_list(found, json, "no jobs", JOB_HEADER, _job_row)


def nodes(master: str | None, json: bool) -> None:
    """List nodes: what each has, and what of it no job holds."""
    with connect_master(master) as connection:
        found = connection.ask(client_master.ListNodes(), client_master.NodeList).nodes
    nothing = "no nodes: start `unified-agent --master tcp://HOST:PORT` on a host"
    _print_list(sorted(found, key=lambda node: node.node), json, nothing, NODE_HEADER, _node_row)


def _print_list(
    found: Sequence[T], json: bool, nothing: str, header: Sequence[str], row: Callable[[T], Sequence[object]]
) -> None:
    if json:
        print_json(found)
    elif not found:
        print(nothing)
    else:
        print("\n".join(table(header, [row(each) for each in found], terminal_width())))


def _job_row(job: client_master.JobLine) -> list[object]:
    return [
        job.job_id,
        report.stage_text(job, 0.0),  # the master's clock has decided whether it is stalled
        "-" if job.exit_code is None else job.exit_code,
        job.num_workers,
        moment(job.submitted_at),
        moment(job.ended_at),
        report.first_line(job.reason) if job.stalled_since is None else f"no step since {moment(job.stalled_since)}",
    ]


def _node_row(node: client_master.NodeStatus) -> list[object]:
    has, free = node.resources, node.free
    kinds = ", ".join(sorted(Counter(device.kind for device in has.devices)))
    extras = [f"{name}={amount(value)}" for name, value in sorted(has.user_defined.items())]
    extras += [f"{name}={value}" for name, value in sorted(node.labels.items())]
    return [
        node.node,
        report.node_state(node),
        node.address,
        node.num_workers,
        f"{amount(free.cpu)}/{amount(has.cpu)}",
        f"{_gb(free.memory_mb)}/{_gb(has.memory_mb)} GB",
        f"{len(free.devices)}/{len(has.devices)} {kinds}".rstrip(),
        " ".join(extras) or "-",
        f"{node.seen_s_ago:.1f} s ago",
        node.check or "-",
        report.first_line(node.reason if node.state != NodeState.ALIVE else node.drained or ""),
    ]


def _gb(megabytes: float) -> str:
    """Return ``14.9`` or ``1007``: three digits are enough, and four fit."""
    return f"{megabytes / 1024:.{0 if megabytes >= 102400 else 1}f}"


def explain_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("subject", metavar="JOB|WORKER", help="A job, JOB/WORKER, or a worker's name.")
    parser.add_argument(
        "worker", nargs="?", default="", metavar="WORKER", help="A worker of that job, such as trainer-0."
    )
    add_master(parser)
    parser.add_argument(
        "--limit", type=at_least(1), default=500, metavar="N", help="At most this many of the newest lines (500)."
    )
    add_json(parser)


def explain(subject: str, worker: str, master: str | None, limit: int, json: bool) -> None:
    """Say what was decided about a job, or one worker of it, with the reasons; of a stalled job, what it waits for."""
    job, _, named = subject.partition("/")
    if named and worker:
        raise UsageError(f"two workers are named, {named!r} and {worker!r}: write JOB/WORKER or JOB WORKER.")
    with connect_master(master) as connection:
        story = _tell(connection, job, named or worker, limit)
        lines = [report.event_text(event) for event in story.events]
        if lines and not json:
            lines += _now_lines(connection, story.events[0].job)
    if json:
        print_json(story.events)
    else:
        print("\n".join(lines or [f"nothing was decided about {subject} yet"]))


def _now_lines(connection: MasterConnection, job_id: str) -> list[str]:
    """Return who has which weights in a running job, and what it waits for if it is stalled."""
    request = client_master.ListJobs(text=job_id, stages=[Stage.RUNNING])
    jobs = connection.ask(request, client_master.JobList).jobs
    found = next((job for job in jobs if job.job_id == job_id), None)
    if found is None:
        return []
    status = connection.ask(client_master.GetJob(job=job_id), client_master.JobStatus)
    lines = report.weights_lines(status)
    if found.stalled_since is not None:
        lines.append(f"job {job_id} is {report.STALLED}: no step since {moment(found.stalled_since)}")
        lines += report.stall_lines(status, math.inf)
    return lines


def _tell(connection: MasterConnection, job: str, worker: str, limit: int) -> client_master.Story:
    try:
        return connection.ask(client_master.Explain(job=job, worker=worker, limit=limit), client_master.Story)
    except RefusedError as refusal:
        if worker or refusal.code != "not-found":
            raise
        try:
            wanted = parse_worker(job)
        except UsageError:
            raise refusal from None
        home = _job_with(connection, wanted)
        if home is None:
            raise
        return connection.ask(client_master.Explain(job=home, worker=job, limit=limit), client_master.Story)


def _job_with(connection: MasterConnection, wanted: WorkerRef) -> str | None:
    """Return the newest job that has this worker; None: no job has."""
    newest = sorted(
        connection.ask(client_master.ListJobs(), client_master.JobList).jobs,
        key=lambda job: job.submitted_at,
        reverse=True,
    )
    for line in newest[:SEARCHED_JOBS]:
        status = connection.ask(client_master.GetJob(job=line.job_id), client_master.JobStatus)
        if any((worker.role, worker.rank) == wanted for worker in status.workers):
            return line.job_id
    return None

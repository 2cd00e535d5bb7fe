"""``unified top``: a live table of the jobs, roles and nodes of a cluster, on a terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from unified.cli.options import add_master
from unified.client import report
from unified.client.connection import connect_master
from unified.client.mirror import ClusterMirror, ClusterWatch
from unified.client.views.overview import attention, totals
from unified.config.logging import escaped
from unified.errors import MasterUnreachableError, UsageError
from unified.protocol.client_master import JobStatus, NodeStatus, WorkerStatus
from unified.protocol.records import Stage, WorkerState

if TYPE_CHECKING:
    from rich.console import RenderableType

SETTLE_S = 0.5
POLL_S = 1.0
MAX_ATTENTION = 4
_KEY = re.compile("\x1b\\[[A-D]|.", re.DOTALL)
KEYS = {
    "\x1b[A": "up",
    "k": "up",
    "\x1b[B": "down",
    "j": "down",
    "\r": "open",
    "\n": "open",
    "\x1b": "back",
    "h": "back",
}
KEYS |= {"q": "quit", "n": "nodes", "s": "sort", "\x03": "quit", "": "quit"}
SORTS = ("newest", "name", "workers")
HELP = "↑↓ choose   enter open   esc back   n nodes   s sort   q quit"


@dataclass(frozen=True)
class TableView:
    """The table that is shown, and the row that is chosen."""

    what: Literal["jobs", "nodes", "job"] = "jobs"
    job: str = ""
    """Job that is open."""
    row: int = 0
    """Row that is chosen; the last one if there are fewer rows."""
    sort: str = SORTS[0]


def top_arguments(parser: ArgumentParser) -> None:
    add_master(parser)
    parser.add_argument("--once", action="store_true", help="Print it once, and need no terminal.")


def top(master: str | None, once: bool) -> None:
    """Show the jobs, roles and nodes of a cluster, live. Keys choose, open and sort; q ends it."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("unified top draws on a terminal: say --once for a file or a pipe, or `unified jobs`.")
    with connect_master(master) as connection:
        watch, view, silent_since = ClusterWatch(connection), TableView(), 0.0
        watch.refresh()
        if once:
            console.print(screen(watch.mirror, view))
            return
        with _cbreak() as fd, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                silent_s = time.monotonic() - silent_since if silent_since else 0.0
                live.update(screen(watch.mirror, view, console.height, silent_s), refresh=True)
                for key in _pressed(fd, SETTLE_S):
                    if key == "quit":
                        return
                    view = after_key(view, key, rows_of(watch.mirror, view))
                try:
                    watch.refresh(timeout_s=POLL_S)
                    silent_since = 0.0
                except MasterUnreachableError:
                    silent_since = silent_since or time.monotonic()


def rows_of(mirror: ClusterMirror, view: TableView) -> list[str]:
    """Return the ids of the rows of a view, in its order."""
    if view.what == "nodes":
        return sorted(mirror.nodes)
    if view.what == "job":
        status = mirror.status(view.job)
        return [] if status is None else [worker.name for worker in odd_first(status)]
    by_age = sorted(mirror.jobs.values(), key=lambda job: -job.submitted_at)
    if view.sort == "name":
        by_age.sort(key=lambda job: job.job_id)
    elif view.sort == "workers":
        by_age.sort(key=lambda job: -sum(role.total for role in job.roles))
    return [job.job_id for job in sorted(by_age, key=lambda job: job.stage is Stage.STOPPED)]


def odd_first(status: JobStatus) -> list[WorkerStatus]:
    """Return the workers of a job, those that do not run first."""
    usual = (WorkerState.RUNNING, WorkerState.SERVING)
    return sorted(status.workers, key=lambda worker: worker.state in usual)


def after_key(view: TableView, key: str, rows: Sequence[str]) -> TableView:
    row = min(view.row, max(0, len(rows) - 1))
    match key:
        case "up" | "down":
            return replace(view, row=max(0, min(len(rows) - 1, row + (1 if key == "down" else -1))))
        case "open" if view.what == "jobs" and rows:
            return TableView("job", rows[row], sort=view.sort)
        case "nodes":
            return TableView("jobs" if view.what == "nodes" else "nodes", sort=view.sort)
        case "back":
            return TableView(sort=view.sort)
        case "sort":
            return replace(view, sort=SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)], row=0)
    return view


def screen(mirror: ClusterMirror, view: TableView, height: int | None = None, silent_s: float = 0.0) -> RenderableType:
    """Return the screen: totals, what needs attention, and as many rows of the view as fit.

    Args:
        height: lines of the terminal; None: all rows are printed, and none is marked as chosen.
    """
    from rich.console import Group
    from rich.text import Text

    lines = [Text(_totals_text(mirror), style="bold")]
    if silent_s > POLL_S:
        text = f"the master has not answered for {report.duration_text(silent_s)}: this may be out of date"
        lines.append(Text(text, style="red"))
    matters = attention(mirror)
    lines += [
        Text(escaped(f"! {each.subject}  {each.sentence(mirror.at)}"), style="red" if each.is_urgent else "yellow")
        for each in matters[:MAX_ATTENTION]
    ]
    if len(matters) > MAX_ATTENTION:
        lines.append(Text(f"! and {len(matters) - MAX_ATTENTION} more", style="yellow"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    rows = rows_of(mirror, view)
    room = len(rows) if height is None else max(1, height - len(lines) - 3)
    row = min(view.row, max(0, len(rows) - 1))
    first = max(0, min(row - room // 2, len(rows) - room))
    shown = rows[first : first + room]
    chosen = -1 if height is None else row - first
    if not rows:
        nothing = {"jobs": "no jobs: `unified submit FILE` or `unified run SCRIPT` starts one", "nodes": "no nodes"}
        return Group(*lines, Text(f"\n{nothing.get(view.what, 'this job is not known any more')}\n"), Text(HELP, "dim"))
    return Group(*lines, _table(mirror, view, shown, chosen), Text(HELP if chosen >= 0 else "", "dim"))


def _totals_text(mirror: ClusterMirror) -> str:
    found = totals(mirror)
    nodes = ", ".join(f"{number} {state}" for state, number in found.nodes.items()) or "none"
    jobs = ", ".join(f"{number} {stage}" for stage, number in found.jobs.items()) or "none"
    held = found.num_devices - found.num_free
    return f"nodes: {nodes}   devices: {held} of {found.num_devices} held   jobs: {jobs}"


def _table(mirror: ClusterMirror, view: TableView, shown: Sequence[str], chosen: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    headers = {
        "jobs": ["JOB", "STAGE", "AGE", "WORKERS", "PROGRESS", "REASON"],
        "nodes": ["NODE", "STATE", "WORKERS", "FREE CPU", "DEVICES", "REASON"],
        "job": ["WORKER", "INCARNATION", "STATE", "NODE", "PROGRESS", "REASON"],
    }
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="dim")
    for title in headers[view.what]:
        table.add_column(title, no_wrap=title not in ("PROGRESS", "REASON"))  # these are cut before any name is
    status = mirror.status(view.job) if view.what == "job" else None
    for number, name in enumerate(shown):
        if view.what == "nodes":
            cells = _node_cells(mirror.nodes[name])
        elif status is not None:
            cells = _worker_cells(status, mirror.workers[view.job][name])
        else:
            found = mirror.status(name)
            cells = [] if found is None else _job_cells(found, mirror.at)
        texts = (Text(escaped(cell), no_wrap=True, overflow="ellipsis") for cell in cells)
        table.add_row(*texts, style="reverse" if number == chosen else "")
    return table


def _job_cells(job: JobStatus, now: float) -> list[str]:
    ended_at = now if job.ended_at is None else job.ended_at
    roles = [
        " ".join(filter(None, (role.name, role.step_text, role.metrics, report.restarts_text(role.num_restarts))))
        for role in report.summarise(job)
    ]
    total = sum(role.total for role in job.roles)
    age = report.duration_text(max(0.0, ended_at - job.submitted_at))
    return [job.job_id, report.stage_text(job, now), age, str(total), "; ".join(roles), report.why_text(job, now)]


def _node_cells(node: NodeStatus) -> list[str]:
    devices = f"{len(node.free.devices)}/{len(node.resources.devices)}"
    cpu, why = f"{node.free.cpu:g}/{node.resources.cpu:g}", node.reason or node.drained or ""
    return [node.node, report.node_state(node), str(node.num_workers), cpu, devices, why]


def _worker_cells(status: JobStatus, worker: WorkerStatus) -> list[str]:
    progress, incarnation = worker.progress, str(worker.incarnation)
    step = "" if progress is None or progress.step is None else str(progress.step)
    of_total = f"{step}/{progress.total}" if progress is not None and progress.total else step
    state, why = report.state_text(status, worker), report.first_line(worker.reason)
    return [report.short_name(worker), incarnation, state, worker.node, of_total, why]


@contextmanager
def _cbreak() -> Iterator[int]:
    """Make the terminal deliver each key at once; restore its mode at the end."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pressed(fd: int, within_s: float) -> Iterator[str]:
    """Yield the actions of keys that are pressed within `within_s` seconds; a closed terminal gives ``quit``."""
    if select.select([fd], [], [], within_s)[0]:
        text = os.read(fd, 64).decode("utf-8", "replace")
        yield from (KEYS[key] for key in _KEY.findall(text) or [text] if key in KEYS)

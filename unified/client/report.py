"""The last words about a job: one line when it went well, at most a screen when it did not. Pure."""

from __future__ import annotations

from unified.client.summary import duration_text, restarts_text, short_name
from unified.protocol.client_master import EndReport, JobStatus

TRACEBACK_LINES = 20
LINE_WIDTH = 200
STOPPED_BY_USER = 130
MAX_CALLERS = 3


def end_lines(status: JobStatus, *, story: str = "") -> list[str]:
    """What to print when a job has ended.

    Args:
        story: where the reasons of its decisions are: a command such as ``unified explain nanogpt-1`` (the default,
            for a job whose master goes on), or a file.
    """
    took = f" after {duration_text(status.ended_at - status.submitted_at)}" if status.ended_at else ""
    restarts = f", with {restarts_text(status.num_restarts)}" if status.num_restarts else ""
    unread = unread_lines(status)
    if status.exit_code == 0:
        return [f"job {status.job_id} finished{took}{restarts}", *unread]
    if status.exit_code == STOPPED_BY_USER:
        return [f"job {status.job_id} was stopped{took}: {status.reason.removeprefix('stopped: ')}", *unread]
    lines = [f"job {status.job_id} failed with exit code {status.exit_code}{took}{restarts}"]
    if status.end is not None:
        lines += _failure_lines(status, status.end)
    else:
        lines.append(_row("reason", status.reason or "the master gave none"))
    lines += unread
    lines.append(_row("next", story or f"unified explain {status.job_id}"))
    return lines


def unread_lines(status: JobStatus) -> list[str]:
    """A line about calls that failed without anybody reading the error, if there were any."""
    callers = [worker for worker in status.workers if worker.num_unread_errors]
    total = sum(worker.num_unread_errors for worker in callers)
    if not total:
        return []
    most = sorted(callers, key=lambda worker: -worker.num_unread_errors)[:MAX_CALLERS]
    named = ", ".join(f"{short_name(worker)} ({worker.num_unread_errors})" for worker in most)
    more = f" and {len(callers) - len(most)} more" if len(callers) > len(most) else ""
    calls = "1 call" if total == 1 else f"{total} calls"
    return [_row("rpc", f"{calls} failed and nobody read the error: see the stderr of {named}{more}")]


def _failure_lines(status: JobStatus, end: EndReport) -> list[str]:
    failure = end.failure
    life = f" (life {end.incarnation}; the first is 0)" if end.incarnation else ""
    lines = [
        _row("worker", f"{end.worker}{life} on node {end.node or '-'}"),
        _row("failure", failure.summary),
    ]
    limit, reason = _told_apart(end, status.reason)
    if limit:
        lines.append(_row("limit", limit))
    if reason:
        lines.append(_row("reason", reason))
    if failure.traceback:
        lines += ["", *_traceback_lines(failure.traceback), ""]
    if end.log_file:
        # one that was killed printed nothing to stderr, and perhaps something to stdout
        where = "" if failure.traceback or not end.log_file.endswith(".err") else " and .out"
        lines.append(_row("log", f"{end.log_file}{where}" + (f" (on node {end.node})" if end.node else "")))
    return lines


def _told_apart(end: EndReport, reason: str) -> tuple[str, str]:
    """The limit in as many words as there are, and what the reason says beyond it and the failure's summary."""
    _, summary, rest = reason.partition(end.failure.summary.rstrip("."))
    if not summary:
        return end.limit, reason
    rest = rest.lstrip("; ")
    return (rest, "") if end.limit.split(" ")[0] in rest else (end.limit, rest)


def _traceback_lines(traceback: str) -> list[str]:
    lines = [line for line in traceback.splitlines() if line.strip()]
    left_out = len(lines) - TRACEBACK_LINES
    shown = [f"    {_cut(line)}" for line in lines[-TRACEBACK_LINES:]]
    return [f"    … {left_out} lines above, in the log", *shown] if left_out > 0 else shown


def _row(label: str, text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return f"  {label:<8} {_cut(first, 2 * LINE_WIDTH)}"


def _cut(line: str, width: int = LINE_WIDTH) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"

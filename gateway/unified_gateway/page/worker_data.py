"""Logs, curves and stacks of workers, in the form that a browser shows. Pure."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Sequence
from typing import Any

from unified.client.mirror import ClusterMirror
from unified.client.reports import KeptReports
from unified.core.hangs.stacks import by_role, group
from unified.core.hangs.verdict import judge
from unified.errors import RefusedError
from unified.job.names import parse_worker
from unified.protocol.client_master import JobStacks, LogChunk, WorkerStatus
from unified.protocol.records import LOG_TIME, WorkerReport

MAX_LINE = 16_384
"""Characters of a line that are shown."""
MAX_POINTS = 1000
MAX_CURVES = 64
"""Most metrics whose values one answer has."""
_SPECIAL = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]"
)


def find_worker(mirror: ClusterMirror, job_id: str, word: str) -> WorkerStatus:
    """Return the worker of a full name or of ``role-rank``; for an empty word the first worker of the job.

    Raises:
        RefusedError: there is no such job, or no such worker in it.
    """
    status = mirror.status(job_id)
    if status is None:
        raise RefusedError("not-found", f"there is no job {job_id[:100]!r}.")
    if not word and status.workers:
        return status.workers[0]
    workers = mirror.workers.get(job_id, {})
    if word in workers:
        return workers[word]
    if word:
        wanted = parse_worker(word)
        for worker in workers.values():
            if (worker.role, worker.rank) == wanted:
                return worker
    raise RefusedError("not-found", f"job {job_id} has no worker {word[:100]!r}.")


def log_part(chunk: LogChunk, *, times: bytes = b"", is_tail: bool = False) -> dict[str, Any]:
    """Return a part of a log as text, and the times of its lines.

    It ends with a complete line, if it has one. The next request reads the rest, from `next_offset` on.

    Args:
        times: `LOG_TIME` records of the chunk.
        is_tail: the part comes from the log's end: leave out a first line whose beginning is missing.
    """
    begin = chunk.data.find(b"\n") + 1 if is_tail and chunk.offset > 0 else 0
    data, offset = chunk.data[begin:], chunk.offset + begin
    if not (chunk.is_final and chunk.next_offset >= chunk.size):
        end = data.rfind(b"\n") + 1 or _whole_characters(data)
        data = data[:end]
    return {
        "worker": chunk.worker,
        "incarnation": chunk.incarnation,
        "text": log_text(data),
        "times": line_times(data, offset, times),
        "offset": offset,
        "next_offset": offset + len(data),
        "size": chunk.size,
        "is_final": chunk.is_final,
        "path": chunk.path,
    }


def line_times(data: bytes, offset: int, times: bytes) -> list[tuple[int, float]]:
    """Return numbers of lines, and the time (seconds since 1970) of these and the following lines.

    The time of a line is the time at which its end was written.

    Args:
        offset: of the data in the log.
        times: `LOG_TIME` records; the first may be of earlier output.
    """
    found: list[tuple[int, float]] = []
    number, place = 0, 0
    for begin, at in LOG_TIME.iter_unpack(times[: len(times) // LOG_TIME.size * LOG_TIME.size]):
        end = max(place, begin - offset)
        number, place = number + data.count(b"\n", place, end), end
        found.append((number if found else 0, at))
    return found


def log_text(data: bytes) -> str:
    """Return a worker's output as text whose only control sequences are colours.

    Of an overwritten line (``\\r``) the last state is left. Other control characters, and marks that change
    the direction of text, are shown as escapes. A long line is cut.
    """
    lines = data.decode("utf-8", "replace").split("\n")
    return "\n".join(map(_line, lines))


def _line(line: str) -> str:
    line = line.rstrip("\r")
    line = line[line.rfind("\r") + 1 :]
    if len(line) > MAX_LINE:
        line = f"{line[:MAX_LINE]} … {len(line) - MAX_LINE} more characters"
    return line if line.isprintable() else _SPECIAL.sub(lambda found: found["colour"] or _escape(found[0]), line)


def _escape(text: str) -> str:
    return "".join(f"\\x{ord(sign):02x}" if ord(sign) < 256 else f"\\u{ord(sign):04x}" for sign in text)


def _whole_characters(data: bytes) -> int:
    """Return the length of data without an incomplete UTF-8 character at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(data) - len(decoder.getstate()[0]) or len(data)


def curves(kept: KeptReports, names: Sequence[str]) -> dict[str, Any]:
    """Return the curves of a worker, by columns, in at most `MAX_POINTS` points.

    Args:
        names: metrics whose values are wanted, at most `MAX_CURVES` of them; none: all.
    """
    reports = kept.reports
    known = list(dict.fromkeys(name for report in reports for name in report.metrics))
    stride = -(-len(reports) // MAX_POINTS) or 1
    shown = reports[::-1][::stride][::-1]  # the newest point is always there
    wanted = [name for name in (names or known) if name in known][:MAX_CURVES]
    return {
        "names": known,
        "step": [report.step for report in shown],
        "at": [report.at for report in shown],
        "values": {name: [_number(report, name) for report in shown] for name in wanted},
        "num_thinned": kept.num_thinned + len(reports) - len(shown),
        "missing": kept.missing,
    }


def _number(report: WorkerReport, name: str) -> float | None:
    value = report.metrics.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def stacks(found: JobStacks) -> dict[str, Any]:
    """Return the groups of equal stacks, the workers without any and why, and the verdict on each role."""
    report = found.report
    findings = [
        f"{role}: {finding.rstrip('.')}."
        for role, part in by_role(report).items()
        for finding in judge(part.workers).findings
    ]
    return {
        "groups": [
            {
                "workers": [_short(worker.worker) for worker in each.workers],
                "state": ", ".join(each.threads[:3]),
                "frames": each.frames,
            }
            for each in group(report)
        ],
        "missing": {_short(worker.worker): worker.note for worker in report.workers if not worker.threads},
        "verdict": " ".join(findings),
    }


def _short(name: str) -> str:
    found = parse_worker(name)
    return f"{found.role}-{found.rank}"

"""Output and last status of jobs whose embedded cluster has ended, read from the folder of the cluster."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from unified.client.logs import LineView, LogFilter, Output, OutputSource
from unified.config import settings
from unified.config.addresses import LOCAL
from unified.config.clusters import living_clusters
from unified.errors import RefusedError, UsageError
from unified.job.names import parse_worker
from unified.protocol.client_master import JobStatus

_BLOCK_CHARS = 1 << 20


class LeftLogs(NamedTuple):
    """Output of one job, in the home of its cluster."""

    home: Path
    job_id: str

    def status(self) -> JobStatus | None:
        """Return the last status; None if nobody waited for the job's end."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            data = (self.home / f"status-{self.job_id}.msgpack").read_bytes()
            return msgspec.msgpack.decode(data, type=JobStatus)
        return None

    def lines(self, wanted: LogFilter, *, is_data: bool = False) -> Iterator[str]:
        """Yield the lines of wanted workers in the form of `LogReader`, by worker, incarnation and stream."""
        for folder in sorted(self.home.glob(f"node-*/logs/{self.job_id}/*-*/")):
            role, rank = parse_worker(folder.name)
            if wanted.role in (None, role) and wanted.rank in (None, rank):
                for number in sorted({int(path.name.partition(".")[0]) for path in folder.glob("*.out")}):
                    for stream in wanted.streams:
                        name = f"{role}-{rank}"
                        prefix = f"[{name}{f'#{number}' if number else ''}] "
                        source = OutputSource(prefix, stream, worker=name, incarnation=number)
                        yield from _lines(folder / f"{number}.{stream}", source, is_data)


def keep_status(home: Path, status: JobStatus) -> None:
    """Keep the last status of a job in the home of its cluster, which is about to end."""
    with contextlib.suppress(OSError):
        (home / f"status-{status.job_id}.msgpack").write_bytes(msgspec.msgpack.encode(status))


def left_by(job: str, master: str | None, error: UsageError | RefusedError) -> LeftLogs:
    """Return what is left of a job that no master knows, and say where it is; raise the error if nothing is left."""
    is_known = master not in (None, LOCAL) or getattr(error, "code", "not-found") != "not-found"
    left = None if is_known else find_left(job)
    if left is None:
        raise error
    print(f"job {left.job_id} ran in a cluster that has ended; it left this in {left.home}", file=sys.stderr)
    return left


def find_left(job: str) -> LeftLogs | None:
    """Return the output of a job (by its id or name) in the newest ended cluster that has any; None: none has."""
    living = {record.home for record in living_clusters()}
    for home in sorted(settings.home().glob("embedded/*/"), reverse=True):
        names = {path.name for path in home.glob("node-*/logs/*/")}
        found = [name for name in names if job in (name, name.rsplit("-", 1)[0], name.rsplit("-", 2)[0])]
        if found and str(home) not in living:
            return LeftLogs(home, max(found, key=lambda name: (len(name), name)))
    return None


def _lines(path: Path, source: OutputSource, is_data: bool) -> Iterator[str]:
    view = LineView()
    view.is_data = is_data
    rotated = sorted(path.parent.glob(f"{path.name}.[0-9]*"), key=lambda each: -int(each.suffix[1:]))
    for segment in [*rotated, path]:
        with segment.open(errors="replace", newline="\n") as file:
            for text in iter(partial(file.read, _BLOCK_CHARS), ""):
                yield from view.feed([Output(source, text)])
    yield from view.flush()

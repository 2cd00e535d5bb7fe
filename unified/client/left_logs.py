"""Output of jobs whose embedded cluster has ended, read from the folder of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from unified.client.logs import LineView, LogFilter, Output, OutputSource
from unified.config import settings
from unified.config.clusters import living_clusters
from unified.job.names import parse_worker

_BLOCK_CHARS = 1 << 20


class LeftLogs(NamedTuple):
    """Output of one job, in the home of its cluster."""

    home: Path
    job_id: str

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

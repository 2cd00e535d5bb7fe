"""What a worker of the soak writes down, so that it outlives the worker: one line a fact, each a single `write`.

A line is a JSON array: a word, the wall clock, and the rest. A process that is killed leaves what it wrote; at most its
last line is cut. The words:

    start  inbox id                                  first line of an incarnation
    calls  {"kind/outcome": n, …}, longest lateness  since the line before
    wrong  what                                      something that must not be
    died   target, began, error                      a call ended in WorkerDiedError or RouteLostError
    put?   queue, ids        put!   queue, ids       before and after a put
    take   queue, ids                                a get gave these
    keep   queue, ids                                they are recorded: the consumer has done its work
    ack?   queue, ids        ack!   queue, ids       before and after what acknowledges them
    ack~   queue, ids                                after a get that acknowledged them and gave nothing
    doubt  queue, ids, error                         a put or an acknowledgement ended in an error
"""

import faulthandler
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Incarnation(NamedTuple):
    """One incarnation of one worker."""

    worker: str
    incarnation: int


class Fact(NamedTuple):
    incarnation: Incarnation
    at: float
    word: str
    rest: list[Any]


class Journal:
    """Written by one incarnation; any thread may write."""

    def __init__(self, folder: Path, incarnation: Incarnation) -> None:
        path = folder / f"{incarnation.worker}.{incarnation.incarnation}.journal"
        self._stacks = path.with_suffix(".stacks")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, word: str, *rest: Any) -> None:
        os.write(self._file, json.dumps([word, time.time(), *rest]).encode() + b"\n")

    def write_stacks(self) -> None:
        """Where every thread of this process is, for whoever has to find out why something hangs."""
        with self._stacks.open("a") as file:
            print(f"--- {time.time():.3f}", file=file, flush=True)
            faulthandler.dump_traceback(file)


class Tail:
    """How many of each word have been written so far, reading only what is new; calls count one each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.counts: Counter[str] = Counter()
        self.inboxes: dict[str, str] = {}
        """Whose each inbox is, or was."""

    def read(self) -> Counter[str]:
        for path in self._folder.glob("*.journal"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + bool(whole)
            for line in whole.splitlines():
                word, _, *rest = json.loads(line)
                if word == "start":
                    self.inboxes[rest[0]] = path.stem
                about = rest[1] if len(rest) > 1 else None
                several = sum(rest[0].values()) if word == "calls" else len(about) if isinstance(about, list) else 1
                self.counts[word] += several
        return self.counts


def read(folder: Path) -> Iterator[Fact]:
    """Everything that was written, file by file; a last line that was cut is left out."""
    for path in sorted(folder.glob("*.journal")):
        worker, _, number = path.stem.rpartition(".")
        incarnation = Incarnation(worker, int(number))
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    word, at, *rest = json.loads(line)
                    yield Fact(incarnation, at, word, rest)

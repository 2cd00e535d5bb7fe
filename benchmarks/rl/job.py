"""What runs inside our own workers when `benchmarks/rl/run.py` measures, through the public API alone."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.rl import work
from unified import DataQueue, RoleGroup, current_worker, rpc

Rows = Iterator[tuple[str, float]]


class Sink:
    """The worker that gets: it owns the queue, as the trainer of docs/queues.md does."""

    def __init__(self) -> None:
        self.mib = sizes().mib
        self.queue = DataQueue[dict[str, Any]]("dictionaries", is_master=True, size=4)

    @rpc
    def get(self, is_read: bool) -> None:
        (arrays,) = self.queue.get(1)
        work.check(arrays, self.mib, is_read)
        del arrays
        self.queue.task_done()

    @rpc
    def take(self, arrays: dict[str, Any], is_read: bool) -> None:
        work.check(arrays, self.mib, is_read)


class Source:
    """The worker that puts. It writes one JSON line a figure into the file it was given, and so ends the job."""

    def run(self) -> None:
        config = current_worker().job_info.user_config
        sink, arrays = RoleGroup("sink")[0], work.dictionary(sizes().mib)
        queue = DataQueue[dict[str, Any]]("dictionaries")

        def put(is_read: bool) -> None:
            queue.put(arrays)
            sink.call("get", is_read).result(work.WAIT_S)

        def call(is_read: bool) -> None:
            sink.call("take", arrays, is_read).result(work.WAIT_S)

        write(lambda: work.dictionary_rows(sizes(), config.rows, {"queue": put, "argument": call}))


class Caller:
    """The worker that calls the engine."""

    def run(self) -> None:
        judges = RoleGroup("judge")

        def begin() -> Any:
            return judges.next().call("request", "POST", "/score", work.QUESTION)

        def end(call: Any) -> Any:
            return call.result(work.WAIT_S)

        write(lambda: work.call_rows(sizes(), current_worker().job_info.user_config.rows, begin, end))


class Starter:
    """One of the workers whose start is timed; rank 0 asks all of them, itself too, and writes down when."""

    def __init__(self) -> None:
        self.import_s = work.import_all(sizes().imports)

    @rpc
    def imported(self) -> float:
        return self.import_s

    def run(self) -> None:
        worker = current_worker()
        if worker.actor_info.rank == 0:
            took = RoleGroup("starter").call("imported").result(work.WAIT_S)
            Path(worker.job_info.user_config.out).write_text(json.dumps({"at": time.time(), "import_s": max(took)}))


def sizes() -> work.Sizes:
    return work.Sizes.of(current_worker().job_info.user_config.sizes)


def write(measure: Callable[[], Rows]) -> None:
    """Add figures to the file of the job, and what went wrong."""
    with Path(current_worker().job_info.user_config.out).open("a") as file:
        try:
            for name, value in measure():
                file.write(json.dumps({"name": name, "value": value}) + "\n")
        except Exception:  # what was measured before is worth having
            file.write(json.dumps({"error": traceback.format_exc()}) + "\n")

"""Ray's column of `benchmarks/rl/run.py`. Prints one JSON line a figure; see benchmarks/README.md.

ray_rl.py SIZES [ROW …]
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray

from benchmarks.bus.work import say, wanted
from benchmarks.rl import work
from benchmarks.rl.http_judge import HttpJudge


@ray.remote(num_cpus=0)
class Sink:
    def __init__(self, mib: int) -> None:
        self.mib = mib

    def get(self, refs: list[Any], is_read: bool) -> None:
        work.check(ray.get(refs[0]), self.mib, is_read)

    def take(self, arrays: dict[str, Any], is_read: bool) -> None:
        work.check(arrays, self.mib, is_read)


@ray.remote(num_cpus=0)
class Source:
    def measure(self, sink: Any, sizes: work.Sizes, rows: list[str]) -> list[tuple[str, float]]:
        arrays = work.dictionary(sizes.mib)

        def put(is_read: bool) -> None:
            ref = ray.put(arrays)
            ray.get(sink.get.remote([ref], is_read), timeout=work.WAIT_S)

        def call(is_read: bool) -> None:
            ray.get(sink.take.remote(arrays, is_read), timeout=work.WAIT_S)

        return list(work.dictionary_rows(sizes, rows, {"queue": put, "argument": call}))


@ray.remote(num_cpus=0, max_concurrency=work.ACTOR_THREADS)
class Engine:
    def __init__(self) -> None:
        self.judge = HttpJudge()

    def request(self, method: str, path: str, body: Any) -> Any:
        return self.judge.request(method, path, body)

    def close(self) -> None:
        self.judge.close()


@ray.remote(num_cpus=0)
class Caller:
    def measure(self, engine: Any, sizes: work.Sizes, rows: list[str]) -> list[tuple[str, float]]:
        def begin() -> Any:
            return engine.request.remote("POST", "/score", work.QUESTION)

        def end(ref: Any) -> Any:
            return ray.get(ref, timeout=work.WAIT_S)

        return list(work.call_rows(sizes, rows, begin, end))


@ray.remote(num_cpus=1)
class Starter:
    def __init__(self, imports: str) -> None:
        self.import_s = work.import_all(imports)

    def imported(self) -> float:
        return self.import_s


def main() -> None:
    sizes, rows = work.of_command_line()
    ray.init(num_cpus=sizes.workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    time.sleep(sizes.settle_s)
    if wanted(*work.STARTS, rows=rows):
        say("start", start(sizes))
    if wanted(*work.DICTIONARY, rows=rows):
        sink, source = Sink.remote(sizes.mib), Source.remote()  # type: ignore[attr-defined]  # by ray.remote
        for name, value in ray.get(source.measure.remote(sink, sizes, rows)):
            say(name, value)
    if wanted(*work.CALLS, rows=rows):
        engine, caller = Engine.remote(), Caller.remote()  # type: ignore[attr-defined]
        for name, value in ray.get(caller.measure.remote(engine, sizes, rows)):
            say(name, value)
        ray.get(engine.close.remote())
    ray.shutdown()


def start(sizes: work.Sizes) -> float:
    began = time.perf_counter()
    workers = [Starter.remote(sizes.imports) for _ in range(sizes.workers)]  # type: ignore[attr-defined]
    took = ray.get([worker.imported.remote() for worker in workers])
    seconds = time.perf_counter() - began
    print(f"  Ray: {seconds:.2f} s, of which imports {max(took):.2f} s", file=sys.stderr, flush=True)
    for worker in workers:
        ray.kill(worker)
    time.sleep(1.0)
    return seconds


if __name__ == "__main__":
    main()

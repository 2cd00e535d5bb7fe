"""Jobs of four ranks that end at once: how many are restarted or fail. None may be. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

RANKS = 4
JOB_TIMEOUT_S = 120.0
LONGEST_S = 0.3
BUSY = "while True: pass"


class Counts(NamedTuple):
    jobs: int
    restarted: int
    failed: int
    seconds: float

    @property
    def is_clean(self) -> bool:
        return self.restarted == self.failed == 0


def nothing() -> None:
    """An entry point that returns at once, while other ranks may not even have begun."""


def random_end() -> None:
    """An entry point that ends at its own moment: each rank's generator differs from the others'."""
    time.sleep(random.SystemRandom().uniform(0.0, LONGEST_S))


ENTRIES: dict[str, Callable[[], None]] = {"nothing": nothing, "random_end": random_end}


def run_jobs(address: str, entry: str, jobs: int, *, max_restart: int) -> Counts:
    """Run `jobs` jobs, one after the other, on the cluster at `address`.

    Args:
        entry: a name in `ENTRIES`.
        max_restart: of the role; with 0 a rank that fails fails its job.
    """
    from unified.api.builder import DLJobBuilder

    begun = time.monotonic()
    restarted = failed = 0
    for number in range(jobs):
        builder = DLJobBuilder().node_num(1).device_per_node(RANKS).device_type("CPU")
        role = builder.train(f"short_jobs.{entry}").total(RANKS).per_group(RANKS).max_restart(max_restart)
        handle = role.build().submit(
            f"{entry}-{number}", blocking=False, master=address, working_dir=str(Path(__file__).parent)
        )
        failed += handle.wait(timeout=JOB_TIMEOUT_S) != 0
        restarts = sum(role.num_restarts for role in handle.status().roles)
        handle.close()
        if restarts:
            print(f"job {handle.job_id} was restarted {restarts} times", file=sys.stderr, flush=True)
        restarted += restarts > 0
        if number % 20 == 19:
            print(f"{entry}: {number + 1}/{jobs}, {restarted} restarted, {failed} failed", file=sys.stderr, flush=True)
    return Counts(jobs, restarted, failed, time.monotonic() - begun)


@contextmanager
def busy_loops(a_core: int) -> Iterator[None]:
    """Processes that compute for as long as this lasts, so many a core."""
    count = a_core * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500, help="whose entry does nothing (default: 500)")
    parser.add_argument("--random-jobs", type=int, default=100, help="whose ranks end at random moments (default: 100)")
    parser.add_argument("--max-restart", type=int, default=0, help="of the role (default: 0, a failure ends its job)")
    parser.add_argument("--busy", type=int, default=0, help="busy loops a core beside them (default: 0)")
    args = parser.parse_args(arguments)

    from unified.client.embedded import EmbeddedCluster

    is_clean = True
    with EmbeddedCluster(nodes=1, devices_per_node=RANKS) as cluster, busy_loops(args.busy):
        for entry, jobs in (("nothing", args.jobs), ("random_end", args.random_jobs)):
            counts = run_jobs(cluster.address, entry, jobs, max_restart=args.max_restart)
            is_clean = is_clean and counts.is_clean
            print(
                f"{entry}: {counts.jobs} jobs of {RANKS} ranks, {args.busy} busy loops a core: "
                f"{counts.restarted} restarted, {counts.failed} failed, {counts.seconds:.0f} s",
                flush=True,
            )
    return 0 if is_clean else 1


if __name__ == "__main__":
    raise SystemExit(main())

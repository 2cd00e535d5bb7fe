"""Kills an engine and the trainer while they work, and says what each kill cost."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

import unified
from unified.client.handle import JobHandle
from unified.protocol.client_master import WorkerStatus

JOB = "grpo_vllm"
POLL_S = 0.1


@dataclass
class Kill:
    """Something that was killed."""

    what: str
    at: float
    back_at: float = 0.0
    """When the killed role worked again; 0: it did not before the end."""


class Killer(threading.Thread):
    """Kills the program of one engine in a third of the way, and the trainer in two thirds, with SIGKILL.

    The cluster has to be on this host.
    """

    def __init__(self, out: Path, num_steps: int, address: str) -> None:
        super().__init__(daemon=True, name="killer")
        self.kills: list[Kill] = []
        self._out = out
        self._num_steps = num_steps
        self._address = address

    def run(self) -> None:
        self._await_step(1)  # the job is there
        with unified.connect(self._address) as cluster, cluster.job(JOB) as job:
            self._await_step(self._num_steps // 3)
            self._await_serving(job, 1)
            worker = psutil.Process(_worker(job, "rollout", 1).pid)
            kill = self._kill("one of two engines", worker.children()[0])
            self._await_serving(job, 1, _worker(job, "rollout", 1).incarnation + 1)
            kill.back_at = time.time()
            self._await_step(max(2 * self._num_steps // 3, len(self._ends()) + 2))
            ends = self._ends()
            time.sleep((ends[-1] - ends[0]) / len(ends) / 2)  # so that half a step is lost
            kill = self._kill("the trainer", psutil.Process(_worker(job, "trainer", 0).pid))
            self._await_step(len(self._ends()) + 1)
            kill.back_at = self._ends()[-1]

    def _kill(self, what: str, process: psutil.Process) -> Kill:
        self.kills.append(Kill(what, time.time()))
        process.kill()
        print(f"killed {what}: kill -9 {process.pid}", flush=True)
        return self.kills[-1]

    def _await_step(self, number: int) -> None:
        while len(self._ends()) < number:
            time.sleep(POLL_S)

    def _await_serving(self, job: JobHandle, rank: int, incarnation: int = 0) -> None:
        while True:
            worker = _worker(job, "rollout", rank)
            if worker.state == "SERVING" and worker.incarnation >= incarnation:
                return
            time.sleep(POLL_S)

    def _ends(self) -> list[float]:
        return [each["at"] for each in read(self._out)]


def _worker(job: JobHandle, role: str, rank: int) -> WorkerStatus:
    return next(each for each in job.status().workers if (each.role, each.rank) == (role, rank))


def read(out: Path) -> list[dict[str, float]]:
    """Return what the trainer has written down: a number and a time for each step that it has taken."""
    file = out / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def show(out: Path, kills: list[Kill]) -> None:
    """Print a line a kill: when the role worked again, what the training lost until then, and steps taken twice."""
    taken = read(out)
    numbers = [each["step"] for each in taken]
    ends = [each["at"] for each in taken]
    quiet = [
        end - began
        for began, end in itertools.pairwise(ends)
        if not any(began < (kill.back_at or ends[-1]) and kill.at < end for kill in kills)
    ]
    step_s = statistics.median(quiet)
    print(f"\na step takes {step_s:.1f} s (median of those beside no kill)")
    print(f"{'killed':<20} {'works again after':>18} {'training lost':>14} {'steps again':>12}")
    for kill in kills:
        before = max(index for index, end in enumerate(ends) if end <= kill.at)
        after = next((index for index, end in enumerate(ends) if end >= (kill.back_at or ends[-1])), len(ends) - 1)
        lost_s = ends[after] - ends[before] - (numbers[after] - numbers[before]) * step_s
        again = after - before - (numbers[after] - numbers[before])
        back = f"{kill.back_at - kill.at:.1f} s" if kill.back_at else "not at the end"
        print(f"{kill.what:<20} {back:>18} {lost_s:>12.1f} s {again:>12.0f}")

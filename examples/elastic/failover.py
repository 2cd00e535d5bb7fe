"""Kills, while the example trains, and what each of them cost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil


class Kill(NamedTuple):
    """Something that was killed."""

    at: float
    what: str
    pids: list[int]


class Killer(threading.Thread):
    """Kills a rank, then two at once, then a node, in a quarter, half and three quarters of the way.

    It looks for them among the processes that this one has started, so the cluster has to be embedded.
    """

    def __init__(self, out: Path, steps: int) -> None:
        super().__init__(daemon=True, name="killer")
        self.kills: list[Kill] = []
        self._out = out
        self._steps = steps

    def run(self) -> None:
        plan: list[tuple[str, Callable[[], list[int]]]] = [
            ("rank 1", lambda: _workers([1])),
            ("ranks 0 and 2", lambda: _workers([0, 2])),
            ("the node of rank 3", lambda: _agent_of(3)),
        ]
        for number, (what, find) in enumerate(plan, start=1):
            while newest_step(self._out) < number * self._steps // (len(plan) + 1):
                time.sleep(0.1)
            pids = find()
            self.kills.append(Kill(time.time(), what, pids))
            for pid in pids:
                psutil.Process(pid).kill()


def _workers(ranks: list[int]) -> list[int]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()[0].split()  # unified worker: ELASTIC_4-1_2-1 incarnation 0 of …
        except (psutil.Error, IndexError):
            continue
        if words[:2] == ["unified", "worker:"] and words[2] != "store":
            found[int(words[2].split("_")[-2].split("-")[1])] = process.pid
    return [found[rank] for rank in ranks]


def _agent_of(rank: int) -> list[int]:
    above = psutil.Process(_workers([rank])[0]).parents()
    return [next(each.pid for each in above if "unified_agent" in each.cmdline())]


def read(out: Path) -> list[dict[str, Any]]:
    """Return what all ranks have written down, in the order of time."""
    lines = [line for file in out.glob("steps-*.jsonl") for line in file.read_text().splitlines()]
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # its writer was killed in the middle
            continue
    return sorted(found, key=lambda each: each["at"])


def newest_step(out: Path) -> int:
    return max((each["step"] for each in read(out)), default=0)


def show(out: Path, kills: list[Kill]) -> None:
    """Print a line a kill: until when all ranks trained again, and how many steps were taken twice."""
    records = read(out)
    ranks = {each["rank"] for each in records}
    print(f"\n{'killed':<20} {'training again':>15} {'steps again':>12} {'processes kept':>15}")
    for kill in kills:
        before = {
            rank: [each for each in records if each["rank"] == rank and each["at"] < kill.at][-1] for rank in ranks
        }
        after = {
            rank: next(each for each in records if each["rank"] == rank and each["round"] > before[rank]["round"])
            for rank in ranks
        }
        again_s = max(each["at"] for each in after.values()) - kill.at
        repeated = max(before[rank]["step"] + 1 - after[rank]["step"] for rank in ranks)
        kept = sum(before[rank]["pid"] == after[rank]["pid"] for rank in ranks)
        print(f"{kill.what:<20} {again_s:>13.2f} s {max(0, repeated):>12} {kept:>8} of {len(ranks)}")

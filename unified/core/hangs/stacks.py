"""Stacks of many workers: merged, read from the output of faulthandler and py-spy, and grouped by equal stacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from unified.job.names import parse_worker
from unified.protocol.stacks import StackReport, ThreadStack, WorkerStacks

MAX_FRAMES = 100
"""Most frames of a stack that are kept: the innermost."""
MAX_THREADS = 100
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_RUNTIME = re.compile(r"(^|/)(unified|zmq)/|/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<frozen ")
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")
_LAUNCHER = re.compile(r"(^|/)unified/(worker|threads)|/runpy\.py:|^<frozen ")


class Thread(NamedTuple):
    """A thread, and its frames as lines, the innermost last."""

    name: str
    frames: Sequence[str]
    is_main: bool = False


class StackGroup(NamedTuple):
    """Threads of several workers that stand in the same place."""

    frames: list[str]
    """Frames of the user's code and of the code that it called, the innermost last; all frames if it has none."""
    threads: list[str]
    """Names of the threads, each once."""
    workers: list[WorkerStacks]
    """Workers that have such a thread."""
    is_main: bool
    """True if it includes the main thread of a worker."""


def frame(file: str, line: int | str, function: str) -> str:
    """Return the line of one frame; the path of an installed package begins with the package."""
    return f"{_PACKAGES.sub('', file)}:{line} in {function}"


def add_threads(worker: WorkerStacks, threads: Iterable[Thread]) -> StackReport:
    numbers: dict[str, int] = {}
    found = [
        ThreadStack(
            name=thread.name,
            stack=numbers.setdefault("\n".join(thread.frames[-MAX_FRAMES:]), len(numbers)),
            is_main=thread.is_main,
        )
        for thread in list(threads)[:MAX_THREADS]
    ]
    return StackReport(stacks=list(numbers), workers=[msgspec.structs.replace(worker, threads=found)])


def merge(reports: Iterable[StackReport]) -> StackReport:
    """Return one report of all workers, with each stack once."""
    numbers: dict[str, int] = {}
    workers = []
    for report in reports:
        here = [numbers.setdefault(stack, len(numbers)) for stack in report.stacks]
        for worker in report.workers:
            threads = [
                msgspec.structs.replace(thread, stack=here[thread.stack])
                for thread in worker.threads
                if thread.stack < len(here)
            ]
            workers.append(msgspec.structs.replace(worker, threads=threads))
    return StackReport(stacks=list(numbers), workers=workers)


def read_faulthandler(text: str) -> list[Thread]:
    """Read the output of `faulthandler`. It lists the newest thread first, so the main thread is the last."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            found.append((head[2] or head[1], []))
        elif found and (entry := _FRAME.match(line)) is not None:
            found[-1][1].insert(0, frame(entry[1], entry[2], entry[3]))
    return [
        Thread("MainThread" if number == len(found) else name, frames, number == len(found))
        for number, (name, frames) in enumerate(found, 1)
    ]


def read_py_spy(text: str | bytes, pid: int) -> list[Thread]:
    """Read the JSON of ``py-spy dump``; ValueError: it is something else."""
    try:
        return [_py_spy_thread(thread, pid) for thread in json.loads(text)]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the output of py-spy has an unknown format: {error!r}") from None


def _py_spy_thread(thread: Mapping[str, Any], pid: int) -> Thread:
    is_main = thread.get("os_thread_id") == pid
    name = "MainThread" if is_main else str(thread.get("thread_name") or thread["thread_id"])
    frames = [frame(each["filename"], each["line"], each["name"]) for each in reversed(thread["frames"])]
    return Thread(name, frames, is_main)


def by_role(report: StackReport) -> dict[str, StackReport]:
    """Return the report of each role, with its workers by rank."""
    roles: dict[str, list[WorkerStacks]] = {}
    for worker in sorted(report.workers, key=lambda worker: worker.rank):
        roles.setdefault(parse_worker(worker.worker).role, []).append(worker)
    return {name: msgspec.structs.replace(report, workers=workers) for name, workers in sorted(roles.items())}


def group(report: StackReport, *, with_runtime: bool = False) -> list[StackGroup]:
    """Return the groups of equal stacks, main threads first, then the larger group, then by rank.

    Args:
        with_runtime: keep all frames, and also threads that run only code of the runtime or of the standard library.
    """
    holders: dict[int, list[tuple[WorkerStacks, ThreadStack]]] = {}
    for worker in report.workers:
        for thread in worker.threads:
            holders.setdefault(thread.stack, []).append((worker, thread))
    groups = []
    for number, held in holders.items():
        frames = report.stacks[number].splitlines()
        is_main = any(thread.is_main for _, thread in held)
        if is_main or with_runtime or not is_runtime(frames):
            names = list(dict.fromkeys(thread.name for _, thread in held))
            workers = list({(worker.worker, worker.incarnation): worker for worker, _ in held}.values())
            groups.append(StackGroup(frames if with_runtime else users_part(frames), names, workers, is_main))
    return sorted(groups, key=lambda each: (not each.is_main, -len(each.workers), _first(each.workers)))


def _first(workers: Sequence[WorkerStacks]) -> tuple[str, int]:
    return min((worker.worker.rpartition("_")[0].rpartition("-")[0], worker.rank) for worker in workers)


def is_runtime(frames: Sequence[str]) -> bool:
    """Return True if a thread runs only the runtime's own code, ZeroMQ and the standard library."""
    return all(_RUNTIME.search(each) for each in frames)


def users_part(frames: Sequence[str]) -> list[str]:
    """Return the frames without the outermost ones, in which the runtime calls the user's code."""
    first = next((number for number, each in enumerate(frames) if not _LAUNCHER.search(each)), 0)
    return list(frames[first:])

"""A verdict on a role that stands still, from its ranks' collectives: which rank the others wait for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unified.protocol.stacks import Collective, GroupCollectives, WorkerStacks

DEFAULT_GROUP = "0"
"""Name that torch gives to the default process group."""


class HangVerdict(NamedTuple):
    """Findings as sentences, and the workers to blame, as far as known."""

    findings: list[str]
    culprits: list[WorkerStacks]


class _Wait(NamedTuple):
    """The lowest collective of one process group that a rank is in and has not left."""

    group: str
    number: int
    waiting: list[WorkerStacks]
    absent: list[WorkerStacks]
    """Members that have not entered it."""
    failing: list[WorkerStacks]
    """Waiting members that handle an exception while others do not: they wait in their clean-up."""
    ended_after: dict[int, int]
    """Collectives that absent members had entered when their programs ended, by rank."""
    unknown: list[WorkerStacks]
    """Members of which it is not known whether they have entered it."""
    operations: dict[str, list[WorkerStacks]]
    age_s: float
    is_whole: bool
    """True if the group is the default one."""


def judge(workers: Sequence[WorkerStacks]) -> HangVerdict:
    """Return the verdict on the workers of one role; no findings if nobody waits and all have answered."""
    waits = [wait for name in _names(workers) if (wait := _wait(name, workers)) is not None]
    silent = [worker for worker in workers if worker.groups is None and worker.source != "interpreter"]
    findings = [_sentence(wait) for wait in waits]
    findings += [f"rank {worker.rank} did not answer: {worker.note}" for worker in silent if worker.note]
    return HangVerdict(findings, _culprits(waits, silent))


def _names(workers: Iterable[WorkerStacks]) -> list[str]:
    return sorted({group.group for worker in workers for group in worker.groups or ()})


def _wait(name: str, workers: Sequence[WorkerStacks]) -> _Wait | None:
    states = {worker.worker: _state(name, worker) for worker in workers}
    ranks = {rank for state in states.values() if state is not None for rank in state.ranks}
    members = [worker for worker in workers if worker.rank in ranks or states[worker.worker] is not None]
    fronts = {
        worker.worker: min(is_open)
        for worker in members
        if (state := states[worker.worker]) is not None
        and (is_open := [each.number for each in state.recent if not each.is_done])
    }
    if not fronts:
        return None
    number = min(fronts.values())
    waiting = [worker for worker in members if fronts.get(worker.worker) == number]
    unknown = [worker for worker in members if _is_unknown(worker, states[worker.worker])]
    absent = [
        worker
        for worker in members
        if worker not in unknown and ((state := states[worker.worker]) is None or state.entered < number)
    ]
    operations: dict[str, list[WorkerStacks]] = {}
    ages = [0.0]
    for worker in members:
        if (found := _entry(states[worker.worker], number)) is not None:
            operations.setdefault(found.operation, []).append(worker)
            ages += [found.age_s] if worker in waiting else []
    failing = [worker for worker in waiting if worker.handles and any(not peer.handles for peer in workers)]
    ended = {worker.rank: worker for worker in absent if worker.has_ended}
    ended_after = {rank: state.entered if (state := states[one.worker]) else 0 for rank, one in ended.items()}
    is_whole = name == DEFAULT_GROUP
    return _Wait(name, number, waiting, absent, failing, ended_after, unknown, operations, max(ages), is_whole)


def _state(name: str, worker: WorkerStacks) -> GroupCollectives | None:
    return next((group for group in worker.groups or () if group.group == name), None)


def _is_unknown(worker: WorkerStacks, state: GroupCollectives | None) -> bool:
    return worker.groups is None or (state is None and worker.is_cut)


def _entry(state: GroupCollectives | None, number: int) -> Collective | None:
    return None if state is None else next((each for each in state.recent if each.number == number), None)


def _sentence(wait: _Wait) -> str:
    operation = " or ".join(sorted(wait.operations))
    what = f"{operation} {wait.number}" + ("" if wait.is_whole else f" of process group {wait.group}")
    have = "has" if len(wait.waiting) == 1 else "have"
    waited = f"{ranks_text(wait.waiting)} {have} waited in it for {wait.age_s:.0f} s"
    if wait.failing:
        others = f", which {ranks_text(wait.absent)} never entered" if wait.absent else ""
        who = f"{ranks_text(wait.failing)} failed with {wait.failing[0].handles}"
        return f"{who}, and cleaned up in {what}{others} ({waited})"
    if wait.absent:
        also = f"; whether {ranks_text(wait.unknown)} did is not known" if wait.unknown else ""
        return f"{ranks_text(wait.absent)} never entered {what}{_ended(wait)}{also} ({waited})"
    if len(wait.operations) > 1:
        apart = " and ".join(
            f"{ranks_text(workers)} {'is' if len(workers) == 1 else 'are'} in {name} {wait.number}"
            for name, workers in sorted(wait.operations.items())
        )
        return f"{apart}: they have called different collectives"
    if wait.unknown:
        return f"{waited.replace('in it', f'in {what}')}; whether {ranks_text(wait.unknown)} entered it is not known"
    return f"all ranks entered {what}, and {waited}: look at the network between their nodes"


def _ended(wait: _Wait) -> str:
    """Return the words for absent members whose programs had ended."""
    found = sorted(wait.ended_after.items())
    return "".join(f"; the program of rank {rank} had ended after {number} collectives" for rank, number in found)


def _culprits(waits: Sequence[_Wait], silent: list[WorkerStacks]) -> list[WorkerStacks]:
    """Return the workers that keep others waiting and wait for nobody; if each waits for another, all of them."""
    if failing := _unique(worker for wait in waits for worker in wait.failing):
        return failing
    absent = _unique(worker for wait in waits for worker in wait.absent)
    waiting = {worker.worker for wait in waits for worker in wait.waiting}
    if free := [worker for worker in absent if worker.worker not in waiting]:
        return free
    if silent:
        unknown = {worker.worker for wait in waits for worker in wait.unknown}
        return [worker for worker in silent if worker.worker in unknown] or silent
    if absent:
        return absent
    odd = [min(wait.operations.values(), key=len) for wait in waits if len(wait.operations) > 1]
    return _unique(worker for workers in odd for worker in workers)


def _unique(workers: Iterable[WorkerStacks]) -> list[WorkerStacks]:
    return list({worker.worker: worker for worker in workers}.values())


def ranks_text(workers: Iterable[WorkerStacks]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 7``."""
    ranks = {worker.rank for worker in workers}
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges_text(ranks)}"


def ranges_text(ranks: Iterable[int]) -> str:
    """Return ``3`` or ``0-2, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)

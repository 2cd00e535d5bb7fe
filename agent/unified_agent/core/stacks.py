"""Reads of workers' stacks for the master: each worker is asked, and is read from outside if it does not answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from unified.core.hangs.stacks import merge
from unified.protocol.agent_master import ReadStacks, StacksRead
from unified.protocol.records import JobWorkerIncarnation, WorkerState
from unified.protocol.stacks import StackReport, WorkerStacks
from unified.protocol.worker_agent import DumpStacks
from unified_agent.core.messages import ReadHeldStacks, TellWorker
from unified_agent.core.step import AgentStep, AgentTimer
from unified_agent.core.worker import LocalWorker
from unified_agent.environment import NodeFacts

ANSWER_S = 1.0
"""Time in which even a busy interpreter answers, unless it is held."""
MAX_OPEN = 64
"""Most reads at a time; before one more begins, the oldest is answered with the reports so far."""
_TIMER = AgentTimer("stacks")


class _Read:
    """One `ReadStacks` until it is answered."""

    def __init__(self, request_id: int, held_at: float, until: float) -> None:
        self.request_id = request_id
        self.held_at: float | None = held_at
        """Time at which workers that have not answered are read from outside; None: this read has begun."""
        self.until = until
        self.reports: list[StackReport] = []
        self.missing: dict[JobWorkerIncarnation, WorkerStacks] = {}


class StackReads:
    def __init__(self, step: AgentStep, facts: NodeFacts) -> None:
        self._step = step
        self._facts = facts
        self._reads: dict[int, _Read] = {}
        self._count = 0

    def begin(self, order: ReadStacks, request_id: int, workers: Iterable[LocalWorker]) -> None:
        """Ask the workers on this node that the order names."""
        while len(self._reads) >= MAX_OPEN:
            self._answer(min(self._reads), "too many reads of stacks at once")
        self._count += 1
        now = self._step.now
        read = _Read(request_id, now + min(ANSWER_S, order.within_s / 2), now + order.within_s)
        self._reads[self._count] = read
        names = set(order.workers)
        for worker in workers:
            if worker.job_id == order.job_id and worker.name in names and not worker.is_ended:
                self._ask(read, worker)
        self._go_on(self._count)

    def take(self, incarnation: JobWorkerIncarnation, number: int, report: StackReport) -> None:
        """Take in a report on a worker, its own or one from outside; the first report counts."""
        read = self._reads.get(number)
        if read is not None and read.missing.pop(incarnation, None) is not None:
            read.reports.append(report)
            self._go_on(number)

    def ended(self, incarnation: JobWorkerIncarnation, how: str) -> None:
        """Stop waiting for the answer of an ended worker."""
        for number, read in list(self._reads.items()):
            if (missing := read.missing.pop(incarnation, None)) is not None:
                read.reports.append(_without(missing, f"it has ended: {how}"))
                self._go_on(number)

    def due(self) -> None:
        """Go on with reads whose time has come."""
        now = self._step.now
        for number, read in list(self._reads.items()):
            if read.until <= now:
                self._answer(number, "neither its interpreter nor its agent answered in time")
            elif read.held_at is not None and read.held_at <= now:
                read.held_at = None
                for incarnation, worker in read.missing.items():
                    within_s = read.until - now
                    self._step.act(
                        ReadHeldStacks(incarnation=incarnation, number=number, worker=worker, within_s=within_s)
                    )
        self._arm()

    def _ask(self, read: _Read, worker: LocalWorker) -> None:
        stacks = WorkerStacks(
            worker=worker.name,
            incarnation=worker.incarnation.number,
            rank=worker.rank,
            node=self._facts.node,
            pid=worker.pid,
        )
        if worker.state is WorkerState.STARTING:
            read.reports.append(_without(stacks, "its process has not said hello yet"))
        else:
            read.missing[worker.incarnation] = stacks
            self._step.act(TellWorker(incarnation=worker.incarnation, message=DumpStacks(number=self._count)))

    def _go_on(self, number: int) -> None:
        if not self._reads[number].missing:
            self._answer(number)
        self._arm()

    def _answer(self, number: int, why: str = "") -> None:
        read = self._reads.pop(number)
        reports = [*read.reports, *(_without(missing, why) for missing in read.missing.values())]
        node, incarnation = self._facts.node, self._facts.incarnation
        message = StacksRead(node=node, incarnation=incarnation, report=merge(reports))
        self._step.send(message, read.request_id)

    def _arm(self) -> None:
        due = [read.until if read.held_at is None else min(read.held_at, read.until) for read in self._reads.values()]
        if due:
            self._step.timers.arm(_TIMER, min(due))
        else:
            self._step.timers.cancel(_TIMER)


def _without(worker: WorkerStacks, why: str) -> StackReport:
    return StackReport(workers=[msgspec.structs.replace(worker, note=why)])

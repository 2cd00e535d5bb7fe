"""One incarnation of one worker on this node: its reports, the orders it was given, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import structs

from unified.job.spec import JobSpec
from unified.process import describe_end
from unified.protocol import worker_agent
from unified.protocol.agent_master import DesiredWorker, ObservedWorker, RoundNotice
from unified.protocol.records import (
    WORKER_MOVES,
    Failure,
    Inbox,
    JobWorkerIncarnation,
    NameClaims,
    NodeCheckReport,
    Progress,
    WorkerState,
)
from unified.protocol.worker_agent import AFTER_SAVE_S
from unified_agent.core.ends import how
from unified_agent.core.messages import WorkerExited
from unified_agent.environment import ZygoteKey

MAX_SUMMARY, MAX_TRACEBACK = 1_000, 32_000
"""Most characters of a failure that are kept; our own workers send 300 and 24 000 at most."""


class LocalWorker:
    """State of one incarnation. Only `AgentCore` changes it, through these methods."""

    def __init__(
        self,
        incarnation: JobWorkerIncarnation,
        desired: DesiredWorker,
        spec: JobSpec,
        log_file: str,
        zygote: ZygoteKey,
    ) -> None:
        self.incarnation = incarnation
        self.job_id = incarnation.job_id
        self.name = incarnation.worker
        self.kind: Literal["worker", "store"] = desired.kind
        self.rank = desired.place.rank
        self.role = desired.role
        self.devices = desired.devices
        self.grace_s = spec.stop_grace_s
        self.save_grace_s = spec.save_grace_s
        self.log_file = log_file
        self.zygote = zygote
        self.state = WorkerState.STARTING
        self.pid = 0
        self.round = 0
        self.ordered_round = 0
        self.can_rejoin = False
        self.left_round = 0
        self.notice: RoundNotice | None = None
        """The last notice that it was sent."""
        self.inbox: Inbox | None = None
        self.store_port: int | None = None
        self.progress: Progress | None = None
        self.claims = NameClaims()
        self.node_check: NodeCheckReport | None = None
        self.failure: Failure | None = None
        self.output_lost: dict[str, str] = {}
        """Losses of its output, by stream."""
        self.is_finished = False
        self.is_stop_asked = False
        """True if it was asked to end: then every end counts as a good end."""
        self.is_ending = False
        """True if the stop came while its program was ending: joining threads, or running `atexit` functions."""
        self.is_killed = False
        self.stop_began_at = 0.0
        self.is_saving = False
        self.saved_at = 0.0
        """Time of its last `Saving` message."""
        self.is_end_reported = False
        """True if a report to the master has said that the worker has ended."""

    @property
    def is_ended(self) -> bool:
        return self.state is WorkerState.EXITED

    @property
    def is_past(self) -> bool:
        """True if it has ended and can be forgotten. An end that a stop cut short must be reported first."""
        is_cut = self.failure is not None and self.failure.is_cut
        return self.is_ended and (self.is_end_reported or not is_cut)

    @property
    def has_user_code(self) -> bool:
        """True if it said hello, so that user code may run and a graceful stop makes sense."""
        states = (WorkerState.READY, WorkerState.RUNNING, WorkerState.SERVING, WorkerState.FINISHED)
        return self.state in states

    def move(self, state: WorkerState) -> None:
        self.state = WORKER_MOVES.check(str(self.incarnation), self.state, state)

    @property
    def waits(self) -> bool:
        """True while it waits for what its job needs here, or for a debugger."""
        return self.progress is not None and bool(self.progress.waits_for)

    def hear(self, word: worker_agent.WorkerToAgent) -> None:
        """Take in a message of the worker. A message that is late, out of order, or comes in a stop moves no state."""
        match word:
            case worker_agent.Hello():
                self.pid = self.pid or word.pid
                self.inbox, self.store_port = word.inbox, word.store_port
                self._advance(WorkerState.STARTING, WorkerState.READY)
            case worker_agent.Running():
                self.round = max(self.round, word.round)
                self.is_ending = self.is_ending or word.is_ending
                self._advance(WorkerState.READY, WorkerState.RUNNING)
            case worker_agent.Rejoins():
                self.can_rejoin = word.is_able
                self.left_round = max(self.left_round, word.left_round)
            case worker_agent.Reported():
                self.progress = word.progress
            case worker_agent.Claimed():
                if word.claims.number > self.claims.number:
                    self.claims = word.claims
            case worker_agent.NodesChecked():
                self.node_check = word.report
            case worker_agent.Saving():
                self.is_saving = not word.is_over
            case worker_agent.Finished():
                if not self.is_stop_asked:  # a worker that returns because of a stop has not done its work
                    self.is_finished = True
                self._advance(WorkerState.RUNNING, WorkerState.SERVING if word.is_serving else WorkerState.FINISHED)
            case worker_agent.Failed():
                # After a stop, an error is no failure, unless work that was done is lost by it.
                if not self.is_stop_asked or word.failure.is_cut:
                    self.failure = self.failure or _bounded(word.failure)

    @property
    def kill_at(self) -> float:
        """Time at which SIGKILL ends it, once it was asked to end."""
        until = self.stop_began_at + self.grace_s
        longest = until + self.save_grace_s
        return longest if self.is_saving else max(until, min(self.saved_at + AFTER_SAVE_S, longest))

    def _advance(self, old: WorkerState, new: WorkerState) -> None:
        if self.state is old:
            self.move(new)

    def exit(self, event: WorkerExited) -> None:
        """Settle how the incarnation ended; its process is gone."""
        code, last_lines = event.code, event.traceback or event.last_lines
        if self.failure is None and self.is_ending and self.is_killed:
            text = f"its end took longer than {self.grace_s:g} s and was cut short: it was killed"
            self.failure = Failure(summary=text, traceback=last_lines, signal=-code, is_cut=True)
        if self.failure is None and not self._ended_well(code):
            ended = self._summary(code) + how(event)
            is_oom = event.evidence is not None and event.evidence.out_of_memory
            self.failure = Failure(
                category="oom" if is_oom else "crash",
                summary=f"{event.error} ({ended})" if event.error else ended,
                traceback=last_lines,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
            )
        if self.failure is not None:
            self.failure = structs.replace(self.failure, evidence=event.evidence)
        self.move(WorkerState.EXITED)

    def _ended_well(self, code: int) -> bool:
        if self.is_stop_asked:
            return True
        # A program may end itself anywhere by os._exit(0): that is success, as any exit with code 0.
        return code == 0 and (self.is_finished or (self.state is WorkerState.RUNNING and self.kind == "worker"))

    def _summary(self, code: int) -> str:
        if code == 0:
            return "exited with code 0 before it was told to run" if self.kind == "worker" else "exited unasked"
        return describe_end(code)

    def orders(self, wanted: DesiredWorker) -> Iterator[worker_agent.Notice | worker_agent.Run]:
        """Yield the master's notice and order to run, if the worker can use them: each notice and each round once."""
        notice, order = wanted.notice, wanted.run
        if notice is not None and notice != self.notice and self.state is WorkerState.RUNNING:
            self.notice = notice
            yield worker_agent.Notice(notice=notice)
        is_void = order is not None and notice is not None and notice.round >= order.round
        is_awaited = self.state is WorkerState.READY or (self.state is WorkerState.RUNNING and self.can_rejoin)
        if order is not None and order.round > self.ordered_round and is_awaited and not is_void:
            self.ordered_round = order.round
            yield worker_agent.Run(order=order)

    def observed(self, *, holds_end: bool = False) -> ObservedWorker:
        """Return the report for the master. `holds_end`: do not report an end yet."""
        is_held = holds_end and self.is_ended and self.kind == "worker"
        return ObservedWorker(
            job_id=self.job_id,
            name=self.name,
            worker_incarnation=self.incarnation.number,
            kind=self.kind,
            state=WorkerState.STOPPING if is_held else self.state,
            pid=self.pid,
            round=self.round,
            inbox=self.inbox,
            store_port=self.store_port,
            progress=self.progress,
            failure=None if is_held else self.failure,
            log_file=self.log_file,
            node_check=self.node_check,
            claims=self.claims,
            can_rejoin=self.can_rejoin,
            left_round=self.left_round,
            output_lost="; ".join(f"{stream}: {text}" for stream, text in self.output_lost.items()),
        )


def _bounded(failure: Failure) -> Failure:
    """Return the failure, shortened to its limits: every report on the job contains it."""
    return structs.replace(
        failure,
        summary=failure.summary[:MAX_SUMMARY],
        exception_type=failure.exception_type[:MAX_SUMMARY],
        traceback=failure.traceback[-MAX_TRACEBACK:],
    )

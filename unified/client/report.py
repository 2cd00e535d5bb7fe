"""Texts about a job: a line a role while it runs, one line after a success, at most a screen after a failure. Pure."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from operator import attrgetter
from typing import NamedTuple

from unified.client.terminal import printable
from unified.config.logging import escaped
from unified.errors import listed
from unified.protocol import client_master
from unified.protocol.client_master import EndReport, JobLine, JobStatus, NodeStatus, RoleStatus, WorkerStatus
from unified.protocol.records import EventRecord, Evidence, NodeState, Phase, Progress, Stage, WorkerState

UNSTARTED = "UNSTARTED"
RESTARTING = "RESTARTING"
SUSPENDED = "SUSPENDED"
STALLED = "STALLED"
WAITING = "WAITING"
FAILED = "FAILED"
FINISHED = "FINISHED"
STAGE_WORDS = {
    WAITING: Stage.INIT,
    SUSPENDED: Stage.INIT,
    RESTARTING: Stage.INIT,
    STALLED: Stage.RUNNING,
    FINISHED: Stage.STOPPED,
    FAILED: Stage.STOPPED,
}
"""Words of `stage_text` in place of a stage; `stageOf` of the page has the same."""
DRAINING = "DRAINING"
TRACEBACK_LINES = 20
LINE_WIDTH = 200
STOPPED_BY_USER = 130
MAX_CALLERS = 3
MAX_QUEUES = 8
TIME_BAR = 20
_CHARGES = {"node_max_restart": ("loss", "losses"), "job_max_restart": ("restart", "restarts")}
"""Nouns for what is charged to a limit; failures if a limit is not here."""
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class StepSpread(NamedTuple):
    """Steps that the ranks of a role have reached."""

    slowest: int
    median: int
    fastest: int


class RoleSummary(NamedTuple):
    """State and progress of a role at a glance, for terminals, notebooks and the page."""

    name: str
    counts: dict[str, int]
    """Number of workers in each state, in the order in which a worker passes through the states."""
    round: int
    """0 for a role that is not elastic, or before its first round."""
    num_restarts: int
    step: int | None
    """Step of the first rank that reported anything, as `total` and `values` are."""
    total: int | None
    values: Mapping[str, float | int | str]
    """Newest metrics of that rank."""
    spread: StepSpread | None = None
    """Steps of all ranks; None: none was reported."""

    @property
    def states(self) -> str:
        """``2 RUNNING`` or ``1 RUNNING, 1 STARTING``."""
        return ", ".join(f"{count} {state}" for state, count in self.counts.items())

    @property
    def metrics(self) -> str:
        """``loss 2.31  lr 0.0003``."""
        return "  ".join(escaped(f"{name} {number_text(value)}") for name, value in self.values.items())

    @property
    def step_text(self) -> str:
        """``step 340/2000``, ``step 340`` or nothing."""
        if self.step is None:
            return ""
        return f"step {self.step}/{self.total}" if self.total else f"step {self.step}"

    @property
    def progress(self) -> tuple[str, str]:
        """Texts of the progress: step and metrics."""
        return (self.step_text, self.metrics)

    @property
    def text(self) -> str:
        """The whole summary in one line."""
        parts = [
            self.states,
            f"round {self.round}" if self.round else "",
            self.step_text,
            self.metrics,
            restarts_text(self.num_restarts),
        ]
        return f"{self.name}: " + ", ".join(part for part in parts if part)


def summarise(status: JobStatus) -> list[RoleSummary]:
    """Return one summary a role, in the order of the job's description."""
    of_role: dict[str, list[WorkerStatus]] = {role.name: [] for role in status.roles}
    for worker in status.workers:
        of_role.setdefault(worker.role, []).append(worker)
    return [_summarise_role(status, role, of_role[role.name]) for role in status.roles]


def _summarise_role(status: JobStatus, role: RoleStatus, workers: list[WorkerStatus]) -> RoleSummary:
    reported = (w.progress for w in sorted(workers, key=attrgetter("rank")) if w.progress is not None)
    progress = next((each for each in reported if each.step is not None or each.metrics), Progress())
    steps = sorted(w.progress.step for w in workers if w.progress is not None and w.progress.step is not None)
    found: Counter[str] = Counter(map(attrgetter("state"), workers))
    if _is_over(status):
        found[UNSTARTED] = found.pop(WorkerState.PENDING, 0)
    if status.end is not None and is_failed(status):
        for worker in (each for each in workers if each.name == status.end.worker):
            found[worker.state] -= 1
            found[FAILED] += 1
    counts = {str(state): found[state] for state in (FAILED, UNSTARTED, *WorkerState) if found[state]}
    return RoleSummary(
        name=role.name,
        counts=counts or {str(WorkerState.PENDING): role.total},
        round=role.round,
        num_restarts=role.num_restarts,
        step=progress.step,
        total=progress.total,
        values=progress.metrics,
        spread=StepSpread(steps[0], steps[len(steps) // 2], steps[-1]) if steps else None,
    )


def stalled_since(job: JobStatus | JobLine, now: float) -> float | None:
    """Return the time of the last step of a job that is stalled; None: it is not. `now` is the master's clock."""
    if isinstance(job, JobLine):
        return job.stalled_since
    return None if job.times is None else job.times.stalled_since(now)


def stage_text(job: JobStatus | JobLine, now: float) -> str:
    """Return the job's stage, or the word of `STAGE_WORDS` that says more. ``WAITING``: the job is in the queue,
    ``RESTARTING``: it is in INIT after a restart, ``STALLED``: it runs without a step for long.
    """
    if job.stage is Stage.STOPPED:
        return FAILED if is_failed(job) else FINISHED if job.exit_code == 0 else job.stage.value
    if stalled_since(job, now) is not None:
        return STALLED
    if job.suspended is not None and job.stage is Stage.INIT:
        return SUSPENDED
    is_again = job.num_restarts or (isinstance(job, JobStatus) and any(role.num_restarts for role in job.roles))
    if job.stage is Stage.INIT and (is_again or _waits_for_room(job)):
        return RESTARTING if is_again else WAITING
    return job.stage.value


def is_failed(job: JobStatus | JobLine) -> bool:
    """Return True if the job failed, or stops after a failure."""
    outcome = job.outcome if isinstance(job, JobStatus) else None
    return (outcome if job.exit_code is None else job.exit_code) not in (None, 0, STOPPED_BY_USER)


def _waits_for_room(job: JobStatus | JobLine) -> bool:
    return job.stage is Stage.INIT and job.suspended is None and job.reason.startswith("waits")


def node_state(node: NodeStatus) -> str:
    """Return the node's state; ``DRAINING`` and then ``DRAINED`` for one that is out of service."""
    if node.drained is None or node.state is not NodeState.ALIVE:
        return node.state.value
    return DRAINING if node.num_workers or node.num_leaving else "DRAINED"


def why_text(status: JobStatus, now: float) -> str:
    """Return the reason of the job's stage in one line: ``no step for 48 s`` of a job that is stalled."""
    since = stalled_since(status, now)
    return first_line(status.reason) if since is None else f"no step for {duration_text(now - since)}"


def queue_text(job_id: str, jobs: Iterable[JobLine]) -> str:
    """Return ``number 2 of 3 in the queue``, for jobs in their order; empty if the job does not wait for room."""
    ids = [job.job_id for job in jobs if _waits_for_room(job)]
    return f"number {ids.index(job_id) + 1} of {len(ids)} in the queue" if job_id in ids else ""


def headline_text(status: JobStatus, now: float) -> str:
    """``nanogpt-1  WAITING  waits: role trainer needs …``. `now` is the master's clock, as in all texts about a job."""
    return "  ".join(filter(None, (status.job_id, stage_text(status, now), why_text(status, now))))


def state_text(status: JobStatus, worker: WorkerStatus) -> str:
    """The worker's state; ``UNSTARTED`` if its job ended before it began, ``FAILED`` if its failure ended the job."""
    if status.end is not None and status.end.worker == worker.name and is_failed(status):
        return FAILED
    return UNSTARTED if _is_over(status) and worker.state is WorkerState.PENDING else worker.state.value


def _is_over(status: JobStatus) -> bool:
    return status.stage in (Stage.STOPPING, Stage.STOPPED)


def short_name(worker: WorkerStatus) -> str:
    """``trainer-0``."""
    return f"{worker.role}-{worker.rank}"


def restarts_text(count: int) -> str:
    """``1 restart``, ``2 restarts``, or nothing."""
    return f"{count} restart{'s' if count != 1 else ''}" if count else ""


def number_text(value: float | int | str) -> str:
    """A metric as a person reads it: four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration_text(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def first_line(text: str) -> str:
    """Return the first line of a text that may be empty; characters that cannot be printed are escaped."""
    return escaped(text.splitlines()[0]) if text else ""


def size_text(num_bytes: int) -> str:
    """``512 bytes``, ``95 MB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"


def end_lines(status: JobStatus, *, story: str = "", is_traceback_shown: bool = False) -> list[str]:
    """Return the lines to print when a job has ended.

    Args:
        story: where the reasons for decisions about the job are: a command such as ``unified explain nanogpt-1``
            (the default, for a job whose master goes on), or a file.
        is_traceback_shown: the traceback of the failure was shown before, with the output of the workers.
    """
    took = f" after {duration_text(status.ended_at - status.submitted_at)}" if status.ended_at else ""
    restarts = f", with {restarts_text(status.num_restarts)}" if status.num_restarts else ""
    unread = [*lost_lines(status), *unread_lines(status)]
    if status.exit_code == 0:
        return [f"job {status.job_id} finished{took}{restarts}", *unread]
    if status.exit_code == STOPPED_BY_USER:
        return [f"job {status.job_id} was stopped{took}: {status.reason.removeprefix('stopped: ')}", *unread]
    lines = [f"job {status.job_id} failed with exit code {status.exit_code}{took}{restarts}"]
    if status.end is not None:
        lines += _failure_lines(status, status.end, is_traceback_shown)
    else:
        lines.append(_row("reason", status.reason or "the master gave none"))
    lines += unread
    lines.append(_row("next", story or f"unified explain {status.job_id}"))
    return lines


def time_text(status: JobStatus, now: float) -> str:
    """Return ``[##############......] 71 % productive, 20 % starting, 9 % redone``. The bar shows the productive part.
    Empty: no times were recorded.
    """
    spent = {} if status.times is None else status.times.at(now)
    if (total := sum(spent.values())) <= 0:
        return ""
    shares = {phase: seconds / total for phase, seconds in spent.items()}
    useful = shares.pop(Phase.PRODUCTIVE.value, 0.0)
    others = sorted(shares.items(), key=lambda each: -each[1])
    parts = [f"{useful:.0%} productive", *(f"{share:.0%} {phase}" for phase, share in others if share >= 0.005)]
    length = round(useful * TIME_BAR)
    return f"[{'#' * length}{'.' * (TIME_BAR - length)}] {', '.join(parts).replace('%', ' %')}"


def state_lines(status: JobStatus, now: float) -> list[str]:
    """Return the lines that say how a job stands, or how it has ended. `now` is the wall clock."""
    if status.stage == Stage.STOPPED:
        return end_lines(status)
    since = duration_text(now - status.submitted_at) if status.submitted_at else "-"
    head, why = f"job {status.job_id} is {stage_text(status, now)}", why_text(status, now)
    is_stalled = stalled_since(status, now) is not None
    return [
        f"{head}, {why}" if is_stalled else f"{head}, for {since}",
        *([f"  {why}"] if why and not is_stalled else []),
        *stall_lines(status, now),
        *lost_lines(status),
        *unread_lines(status),
    ]


def weights_lines(status: JobStatus) -> list[str]:
    """Return lines that say which workers have which version of which weights, the newest version first."""
    workers: dict[str, dict[int, list[str]]] = {}
    for each in status.workers:
        load = each.progress.load if each.progress and each.state != WorkerState.EXITED else None
        for name, version in (load.weights if load else {}).items():
            workers.setdefault(name, {}).setdefault(version, []).append(short_name(each))
    return [
        _row("weights", escaped(f"{name}: version {version}: {listed(names, MAX_CALLERS)}"))
        for name, by_version in sorted(workers.items())
        for version, names in sorted(by_version.items(), reverse=True)
    ]


def stall_lines(status: JobStatus, now: float) -> list[str]:
    """Return lines about the queues in which workers of a stalled job wait, and the next command.

    There is no line if the job is not stalled.
    """
    if stalled_since(status, now) is None:
        return []
    present = [(each, each.progress) for each in status.workers if each.progress and each.state != WorkerState.EXITED]
    owned = {
        name: f" of {short_name(worker)}, {depth} of {size} items"
        for worker, progress in present
        for name, (depth, size, _) in (progress.load.queues if progress.load else {}).items()
    }
    waiting: dict[tuple[str, str], dict[str, None]] = {}
    for worker, progress in present:
        for use in progress.queues:
            if use.waits:
                waiting.setdefault((use.queue, use.does), {})[short_name(worker)] = None
    lines = []
    for (queue, does), names in sorted(waiting.items(), key=lambda item: -len(item[1]))[:MAX_QUEUES]:
        waits, what = "wait" if len(names) > 1 else "waits", "an item" if does == "gets" else "room"
        text = f"{queue}{owned.get(queue, '')}: {listed(names, MAX_CALLERS)} {waits} for {what}"
        lines.append(_row("queue", escaped(text)))
    if len(waiting) > MAX_QUEUES:
        lines.append(_row("queue", f"and {len(waiting) - MAX_QUEUES} more: the page has them all"))
    return [*lines, _row("next", f"unified stack {status.job_id}")]


def budget_text(use: client_master.BudgetUse) -> str:
    """``max_restart=1: 2 failures of trainer_2-1_1-0``."""
    one, many = _CHARGES.get(use.limit, ("failure", "failures"))
    subject = f" of {use.subject}" if use.subject else ""
    return f"{use.limit}={use.allowed}: {use.used} {one if use.used == 1 else many}{subject}"


def state_html(status: JobStatus, now: float) -> str:
    """Return the lines of `state_lines` for a notebook, with a table row a role."""
    head = "\n".join(escape(printable(line)) for line in state_lines(status, now))
    rows = ""
    for role in summarise(status):
        bar = f'<progress value="{role.step or 0}" max="{role.total}"></progress>' if role.total else ""
        texts = [role.name, role.states, role.step_text, role.metrics, restarts_text(role.num_restarts)]
        rows += f"<tr>{''.join(f'<td>{escape(printable(text))}</td>' for text in texts)}<td>{bar}</td></tr>"
    return f"<pre>{head}</pre><table>{rows}</table>"


def lost_lines(status: JobStatus) -> list[str]:
    """Return lines about dropped output, for the first workers that lost some."""
    lost = [worker for worker in status.workers if worker.output_lost]
    lines = [_row("output", f"{short_name(each)} on {each.node}, {each.output_lost}") for each in lost[:MAX_CALLERS]]
    return lines + ([_row("output", f"and of {len(lost) - MAX_CALLERS} more workers")] if lost[MAX_CALLERS:] else [])


def unread_lines(status: JobStatus) -> list[str]:
    """Return a line about failed calls whose error nobody read, if there were any."""
    callers = [worker for worker in status.workers if worker.num_unread_errors]
    total = sum(worker.num_unread_errors for worker in callers)
    if not total:
        return []
    callers.sort(key=lambda worker: -worker.num_unread_errors)
    named = listed((f"{short_name(each)} ({each.num_unread_errors})" for each in callers), MAX_CALLERS)
    calls = "1 call" if total == 1 else f"{total} calls"
    return [_row("rpc", f"{calls} failed and nobody read the error: see the stderr of {named}")]


def _failure_lines(status: JobStatus, end: EndReport, is_traceback_shown: bool) -> list[str]:
    failure = end.failure
    incarnation = f" (incarnation {end.incarnation}; the first is 0)" if end.incarnation else ""
    lines = [
        _row("worker", f"{end.worker}{incarnation} on node {end.node or '-'}"),
        _row("failure", failure.summary),
    ]
    limit, reason = _split(end, status.reason)
    if limit:
        lines.append(_row("limit", limit))
    if reason:
        lines.append(_row("reason", reason))
    if failure.evidence is not None and failure.evidence.memory:
        lines.append(_row("memory", _memory_text(failure.evidence)))
    if is_traceback_shown:
        lines.append(_row("trace", "above, in the output of the workers"))
    elif failure.traceback:
        lines += ["", *_traceback_lines(failure.traceback), ""]
    if end.log_file:
        # a worker that was killed wrote nothing to stderr, but perhaps something to stdout
        where = "" if failure.traceback or not end.log_file.endswith(".err") else " and .out"
        lines.append(_row("log", f"{end.log_file}{where}" + (f" (on node {end.node})" if end.node else "")))
    return lines


def _memory_text(evidence: Evidence) -> str:
    """``3900 MB at most; sampled: 210, 800, 2100 MB, from 15.0 s to 5.0 s before its end``."""
    samples = ", ".join(f"{sample.mb:.0f}" for sample in evidence.memory)
    peak = f"{evidence.peak_mb:.0f} MB at most; " if evidence.peak_mb else ""
    first, last = duration_text(evidence.memory[0].age_s), duration_text(evidence.memory[-1].age_s)
    when = f"from {first} to {last}" if len(evidence.memory) > 1 else first
    return f"{peak}sampled: {samples} MB, {when} before its end"


def _split(end: EndReport, reason: str) -> tuple[str, str]:
    """Return the limit in its longest wording, and the part of the reason beyond it and the failure's summary."""
    _, summary, rest = reason.partition(end.failure.summary.rstrip("."))
    if not summary:
        return end.limit, reason
    rest = rest.lstrip("; ")
    return (rest, "") if end.limit.split(" ")[0] in rest else (end.limit, rest)


def _traceback_lines(traceback: str) -> list[str]:
    lines = [escaped(_COLOUR.sub("", line)) for line in traceback.splitlines() if line.strip()]
    left_out = len(lines) - TRACEBACK_LINES
    shown = [f"    {cut(line)}" for line in lines[-TRACEBACK_LINES:]]
    return [f"    … {left_out} lines above, in the log", *shown] if left_out > 0 else shown


def _row(label: str, text: str) -> str:
    return f"  {label:<8} {cut(first_line(text), 2 * LINE_WIDTH)}"


def cut(text: str, width: int = LINE_WIDTH) -> str:
    """Return the text cut to at most `width` characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def event_text(event: EventRecord) -> str:
    """``07:49:42.120  worker-failed  trainer_2-0_2-0  killed by SIGKILL``."""
    moment = time.strftime("%H:%M:%S", time.localtime(event.at)) + f".{int(event.at % 1 * 1000):03}"
    who = event.worker or event.role or event.node or event.job
    return escaped(f"{moment}  {event.event:<20}  {who:<24}  {event.reason}".rstrip())

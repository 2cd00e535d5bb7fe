"""The last words about a job, and the line a role."""

import io
import time
from typing import Any

import msgspec
import pytest

from tests.support.fake_master import worker_status
from unified.cli.show import status_lines
from unified.client.display import LiveDisplay, role_table
from unified.client.report import (
    duration_text,
    end_lines,
    event_text,
    headline_text,
    size_text,
    state_html,
    state_lines,
    summarise,
    time_text,
    weights_lines,
)
from unified.protocol.client_master import EndReport, JobStatus, RoleStatus, WorkerStatus
from unified.protocol.records import (
    EventRecord,
    Evidence,
    Failure,
    MemorySample,
    Progress,
    QueueUse,
    Stage,
    TimeSpent,
    WorkerLoad,
    WorkerState,
)


def ended(exit_code: int | None, **fields: object) -> JobStatus:
    status = JobStatus(job_id="gpt-1", name="gpt", stage=Stage.STOPPED, exit_code=exit_code)
    return msgspec.structs.replace(status, **fields)


def worker(rank: int, state: WorkerState = WorkerState.RUNNING, progress: Progress | None = None) -> WorkerStatus:
    return worker_status(rank, name=f"trainer_3-{rank}_3-{rank}", local_rank=rank, state=state, progress=progress)


def end_of(failure: Failure, **fields: str) -> EndReport:
    return EndReport(worker="w_1-0_1-0", incarnation=0, node="n", failure=failure, **fields)


@pytest.mark.parametrize(
    ("status", "lines"),
    [
        (ended(0, submitted_at=100.0, ended_at=112.4), ["job gpt-1 finished after 12 s"]),
        (ended(0, num_restarts=1), ["job gpt-1 finished, with 1 restart"]),
        # a stop by the user is no failure
        (ended(130, reason="stopped: Ctrl-C in its driver"), ["job gpt-1 was stopped: Ctrl-C in its driver"]),
        # a failure without a worker still has a reason and a next step
        (ended(1, reason="refused"),
         ["job gpt-1 failed with exit code 1", "  reason   refused", "  next     unified explain gpt-1"]),
    ],
)  # fmt: skip
def test_an_end_in_few_lines(status: JobStatus, lines: list[str]) -> None:
    assert end_lines(status) == lines


def test_calls_that_failed_unread_are_counted_and_their_callers_named() -> None:
    workers = [msgspec.structs.replace(worker(rank), num_unread_errors=rank) for rank in range(6)]
    line = "  rpc      15 calls failed and nobody read the error: see the stderr of "
    line += "trainer-5 (5), trainer-4 (4), trainer-3 (3) and 2 more"
    assert end_lines(ended(0, workers=workers)) == ["job gpt-1 finished", line]
    assert line in end_lines(ended(1, workers=workers))
    running = msgspec.structs.replace(ended(None, workers=workers[:2]), stage=Stage.RUNNING)
    assert "1 call failed and nobody read the error: see the stderr of trainer-1 (1)" in status_lines(running, 0.0)[1]


def test_a_failure_names_worker_node_limit_log_and_what_to_do_next() -> None:
    failure = Failure(summary="ValueError: no", traceback="Traceback:\n  File x\nValueError: no\n")
    end = EndReport(
        worker="trainer_2-1_2-1",
        incarnation=2,
        node="n1",
        failure=failure,
        limit="max_restart of role trainer is 2",
        log_file="/logs/2.err",
    )
    assert end_lines(ended(1, end=end, reason="no restart is left")) == [
        "job gpt-1 failed with exit code 1",
        "  worker   trainer_2-1_2-1 (incarnation 2; the first is 0) on node n1",
        "  failure  ValueError: no",
        "  limit    max_restart of role trainer is 2",
        "  reason   no restart is left",
        "",
        "    Traceback:",
        "      File x",
        "    ValueError: no",
        "",
        "  log      /logs/2.err (on node n1)",
        "  next     unified explain gpt-1",
    ]


def test_a_reason_that_repeats_the_failure_is_said_once() -> None:
    end = end_of(Failure(summary="E: x"), limit="max_restart")
    lines = end_lines(ended(1, end=end, reason="failed: w_1-0_1-0 on n: E: x; the limit max_restart=0 is used up"))
    assert (lines[2:4], len(lines)) == (["  failure  E: x", "  limit    the limit max_restart=0 is used up"], 5)


def test_a_huge_traceback_fits_a_screen() -> None:
    failure = Failure(summary="E: " + "y" * 10_000 + "\nsecond", traceback="\n".join("x" * 5000 for _ in range(500)))
    lines = end_lines(ended(1, end=end_of(failure)))
    assert len(lines) <= 30
    assert max(len(line) for line in lines) <= 420
    assert "    … 480 lines above, in the log" in lines


def test_a_role_is_summed_up_in_one_line() -> None:
    status = ended(
        None,
        roles=[RoleStatus(name="trainer", kind="elastic", total=3, is_driver=True, round=2, num_restarts=1)],
        workers=[
            worker(2, WorkerState.READY),
            worker(1, progress=Progress(step=99)),
            worker(0, progress=Progress(step=340, total=2000, metrics={"loss": 2.30999, "epoch": 3})),
        ],
    )
    (role,) = summarise(status)
    assert role.text == "trainer: 1 READY, 2 RUNNING, round 2, step 340/2000, loss 2.31  epoch 3, 1 restart"


def test_a_role_without_workers_says_that_it_waits() -> None:
    status = ended(None, roles=[RoleStatus(name="actor", kind="simple", total=4, is_driver=False)])
    assert summarise(status)[0].text == "actor: 4 PENDING"


def test_workers_without_a_place_do_not_start() -> None:
    roles = [RoleStatus(name="trainer", kind="elastic", total=2, is_driver=True)]
    workers = [worker(rank, WorkerState.PENDING) for rank in range(2)]
    waiting = ended(None, stage=Stage.INIT, roles=roles, workers=workers)
    assert summarise(waiting)[0].text == "trainer: 2 PENDING"
    found = [line.split()[:3] for line in status_lines(waiting, 0.0)[-2:]]
    assert found == [["trainer-0", "0", "PENDING"], ["trainer-1", "0", "PENDING"]]
    placed = [worker(rank, WorkerState.STARTING) for rank in range(2)]
    assert summarise(ended(None, stage=Stage.INIT, roles=roles, workers=placed))[0].text == "trainer: 2 STARTING"
    assert summarise(ended(130, roles=roles, workers=workers))[0].text == "trainer: 2 UNSTARTED"


def test_durations_and_sizes_are_words() -> None:
    words = ["0.4 s", "12 s", "1 min 0 s", "3 min 20 s", "2 h 5 min"]
    assert [duration_text(s) for s in (0.42, 12.3, 59.7, 200, 7500)] == words
    assert [size_text(n) for n in (5, 95_400_000, 2_000)] == ["5 bytes", "95.4 MB", "2 kB"]


def test_a_worker_that_was_killed_may_have_said_something_on_stdout() -> None:
    lines = end_lines(ended(1, end=end_of(Failure(summary="SIGKILL"), log_file="/logs/0.err")))
    assert "  log      /logs/0.err and .out (on node n)" in lines


def test_samples_of_memory_are_said_to_be_older_than_the_end() -> None:
    one = Evidence(memory=[MemorySample(1.2, 226)], peak_mb=998)
    several = Evidence(memory=[MemorySample(15, 210), MemorySample(5, 2100)], peak_mb=3900)
    texts = [
        line
        for evidence in (one, several)
        for line in end_lines(ended(1, end=end_of(Failure(summary="E: x", evidence=evidence))))
        if line.startswith("  memory")
    ]
    assert texts == [
        "  memory   998 MB at most; sampled: 226 MB, 1.2 s before its end",
        "  memory   3900 MB at most; sampled: 210, 2100 MB, from 15 s to 5.0 s before its end",
    ]


@pytest.mark.parametrize(
    ("fields", "stage"),
    [
        ({}, "INIT"),
        ({"reason": "waits: no room"}, "WAITING"),
        ({"reason": "waits: no room", "suspended": "asked by me"}, "SUSPENDED"),
        ({"reason": "waits: no room", "num_restarts": 1}, "RESTARTING"),
        ({"num_restarts": 1}, "RESTARTING"),
        ({"roles": [RoleStatus(name="t", kind="simple", total=1, is_driver=True, num_restarts=1)]}, "RESTARTING"),
        ({"num_restarts": 1, "stage": Stage.RUNNING}, "RUNNING"),
    ],
)
def test_a_job_before_it_runs_says_what_it_waits_for(fields: dict[str, Any], stage: str) -> None:
    status = ended(None, **{"stage": Stage.INIT, **fields})
    assert headline_text(status, 0.0).startswith(f"gpt-1  {stage}")
    assert state_lines(status, 0.0)[0] == f"job gpt-1 is {stage}, for -"


@pytest.mark.parametrize(("exit_code", "stage"), [(0, "FINISHED"), (1, "FAILED"), (130, "STOPPED"), (None, "STOPPED")])
def test_the_stage_of_an_ended_job_says_how_it_ended(exit_code: int | None, stage: str) -> None:
    assert headline_text(ended(exit_code, reason="why"), 0.0) == f"gpt-1  {stage}  why"


def test_the_worker_whose_failure_ended_the_job_is_failed_and_the_others_are_not() -> None:
    end = EndReport(worker="trainer_3-1_3-1", incarnation=0, node="n", failure=Failure(summary="E: x"))
    workers = [worker(rank, WorkerState.EXITED) for rank in range(2)]
    status = ended(1, end=end, workers=workers)
    assert [line.split()[2] for line in status_lines(status, 0.0)[-2:]] == ["EXITED", "FAILED"]
    many = [worker(rank, WorkerState.EXITED) for rank in range(100)]
    of_90 = msgspec.structs.replace(end, worker=many[90].name)
    role = RoleStatus(name="trainer", kind="elastic", total=100, is_driver=True)
    crowd = msgspec.structs.replace(status, workers=many, end=of_90, roles=[role])
    lines = status_lines(crowd, 0.0)
    assert "  trainer: 1 FAILED, 99 EXITED" in lines
    assert "FAILED" in next(line for line in lines if line.startswith("  trainer-"))
    stopping = msgspec.structs.replace(status, stage=Stage.STOPPING, exit_code=None, outcome=1)
    assert [line.split()[2] for line in status_lines(stopping, 0.0)[-2:]] == ["EXITED", "FAILED"]


def test_the_status_of_an_ended_job_says_when_it_ended_and_for_how_long_it_ran() -> None:
    at = time.mktime((2025, 3, 1, 7, 49, 0, 0, 0, -1))
    failed = ended(1, submitted_at=at, started_at=at + 60, ended_at=at + 150, reason="why")
    assert "  started 2025-03-01 07:50, failed 2025-03-01 07:51 (1 min 30 s later)" in status_lines(failed, at + 999)
    done = msgspec.structs.replace(failed, exit_code=0)
    assert "  started 2025-03-01 07:50, finished 2025-03-01 07:51 (1 min 30 s later)" in status_lines(done, at + 999)
    never = msgspec.structs.replace(failed, exit_code=130, started_at=None)
    assert "  never started, stopped 2025-03-01 07:51" in status_lines(never, at + 999)
    runs = msgspec.structs.replace(failed, stage=Stage.RUNNING, exit_code=None, ended_at=None)
    assert "  started 2025-03-01 07:50" in status_lines(runs, at + 999)


def test_a_stalled_job_names_the_queues_in_which_workers_wait_and_a_next_command() -> None:
    def waiting(rank: int, *uses: QueueUse, **queues: tuple[int, int, int]) -> WorkerStatus:
        return worker(rank, progress=Progress(queues=list(uses), load=WorkerLoad(queues=queues)))

    gets, puts = QueueUse("MainThread", "gets", "samples", True), QueueUse("puts", "puts", "weights", True)
    workers = [
        waiting(0, QueueUse("", "puts", "samples", False), samples=(0, 4, 0)),
        *(waiting(rank, gets, gets._replace(thread="other")) for rank in range(1, 7)),
        waiting(7, puts),
        msgspec.structs.replace(waiting(8, gets), state=WorkerState.EXITED),
    ]
    times = TimeSpent(phase="productive", since=100.0, stalls_at=130.0)
    status = ended(None, stage=Stage.RUNNING, times=times, workers=workers)
    assert state_lines(status, 148.0) == [
        "job gpt-1 is STALLED, no step for 48 s",
        "  queue    samples of trainer-0, 0 of 4 items: trainer-1, trainer-2, trainer-3 and 3 more wait for an item",
        "  queue    weights: trainer-7 waits for room",
        "  next     unified stack gpt-1",
    ]
    assert state_lines(status, 129.0)[1:] == [], "a job that steps may wait"
    uses = [QueueUse("", "gets", f"q\n{number}", True) for number in range(10)]
    odd = msgspec.structs.replace(status, workers=[waiting(0, *uses)])
    shown = state_lines(odd, 148.0)[1:]
    assert shown[0] == r"  queue    q\n0: trainer-0 waits for an item"
    assert shown[-2:] == ["  queue    and 2 more: the page has them all", "  next     unified stack gpt-1"]


def test_the_versions_of_the_weights_and_their_workers_have_a_line_each() -> None:
    def having(rank: int, **weights: int) -> WorkerStatus:
        return worker(rank, progress=Progress(load=WorkerLoad(weights=weights)))

    workers = [having(0, default=5), having(1, default=4, judge=2), having(2, default=5), worker(3)]
    lines = weights_lines(msgspec.structs.replace(ended(None), workers=workers))
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        "default: version 5: trainer-0, trainer-2",
        "default: version 4: trainer-1",
        "judge: version 2: trainer-1",
    ]


def test_a_job_without_a_step_for_long_is_stalled_and_says_for_how_long() -> None:
    times = TimeSpent(phase="productive", since=100.0, stalls_at=130.0)
    status = ended(None, stage=Stage.RUNNING, submitted_at=40.0, reason="all workers run", times=times)
    assert headline_text(status, 129.0) == "gpt-1  RUNNING  all workers run"
    assert headline_text(status, 148.0) == "gpt-1  STALLED  no step for 48 s"
    assert state_lines(status, 148.0)[0] == "job gpt-1 is STALLED, no step for 48 s"
    hangs = msgspec.structs.replace(status, times=TimeSpent(phase="stalled", since=100.0))
    assert headline_text(hangs, 108.0) == "gpt-1  STALLED  no step for 8.0 s"


def test_a_notebook_shows_state_and_progress_and_no_markup_of_the_jobs() -> None:
    progress = Progress(step=3, total=10, metrics={"<b>": 1.5})
    role = RoleStatus(name="trainer", kind="simple", total=1, is_driver=True)
    status = ended(None, stage=Stage.RUNNING, reason="<i>", roles=[role], workers=[worker(0, progress=progress)])
    html = state_html(status, 0.0)
    assert "<pre>job gpt-1 is RUNNING, for -\n  &lt;i&gt;</pre>" in html
    assert '<progress value="3" max="10">' in html
    assert "<td>step 3/10</td><td>&lt;b&gt; 1.5</td>" in html


def test_no_text_of_a_worker_forges_a_line_or_reaches_the_terminal() -> None:
    """Neither in a status, of a job that runs or has failed, nor in its events or the live display."""
    hostile = "x\x1b]0;t\x07\x1b[2J\u202e\x9b1m\rjob gpt-1 finished"
    progress = Progress(step=1, metrics={hostile: hostile, "a\nb": 1})
    failure = Failure(summary=f"{hostile}\njob gpt-1 finished", traceback=f"Traceback\n  {hostile}\n\x1b[31mred\x1b[0m")
    roles = [RoleStatus(name="trainer", kind="simple", is_driver=True, total=1)]
    workers = [msgspec.structs.replace(worker(0, progress=progress), reason=hostile)]
    running = JobStatus(job_id="gpt-1", name="gpt", stage=Stage.RUNNING, reason=hostile, roles=roles, workers=workers)
    failed = ended(1, roles=roles, workers=workers, reason=hostile, end=end_of(failure))
    event = EventRecord(at=0.0, job="gpt-1", event="worker-failed", reason=hostile)
    terminal = io.StringIO()
    with LiveDisplay(terminal, terminal) as display:
        display._console.width = 400
        display._console.print(role_table(running))
        display.note(hostile)
    drawn = [line for line in terminal.getvalue().replace("\x1b[?25h", "").split("\n") if "x\\x1b" in line]
    assert len(drawn) >= 3
    lines = [*status_lines(running, 0.0), *status_lines(failed, 0.0), *end_lines(failed), event_text(event)]
    assert [line for line in [*lines, *drawn] if not line.isprintable()] == []
    assert sum(line.startswith("job gpt-1 ") for line in lines) == 3, "one of each status and end, and none forged"
    assert any(line.strip() == "red" for line in lines)


def test_the_time_by_phase_is_a_bar_and_a_line() -> None:
    times = TimeSpent(seconds={"starting": 20.0, "productive": 70.0}, phase="productive", since=190.0, stalls_at=191.0)
    status = JobStatus(job_id="j", name="j", stage=Stage.RUNNING, times=times)
    assert time_text(status, 191.0) == "[################....] 78 % productive, 22 % starting"
    assert time_text(status, 200.0) == "[##############......] 71 % productive, 20 % starting, 9 % stalled"
    assert time_text(msgspec.structs.replace(status, times=None), 200.0) == ""

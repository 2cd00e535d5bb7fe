"""A driver and the command line in front of a fake master: progress, output, Ctrl-C, last words, exit codes."""

import contextlib
import io
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs

from tests.support.deadlines import met, missed
from tests.support.fake_master import WORKER, FakeMaster, Job, changes_of, worker_status
from unified import process
from unified.cli.main import main
from unified.client.connection import MasterConnection
from unified.client.display import PlainDisplay, QuietDisplay
from unified.client.foreground import Watch
from unified.client.handle import JobHandle
from unified.client.output import Prefix
from unified.client.submission import run_job, submit_job
from unified.errors import ClusterError, MasterUnreachableError, ProtocolError, RefusedError
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.client_master import (
    Changes,
    ClientToMaster,
    EndReport,
    GetJob,
    JobLine,
    JobList,
    JobStatus,
    ListJobs,
    MasterAnswer,
    Refused,
    SignalWorkers,
    StopJob,
    SubmitJob,
    WatchCluster,
    WorkerStatus,
)
from unified.protocol.records import Failure, Progress, QueueUse, Stage, TimeSpent, WorkerState
from unified.testing import Belongings, eventually, left_behind

DEADLINE_S = met(100.0)
SPEC = JobSpec(
    name="gpt",
    roles=[RoleSpec(name="trainer", kind="simple", entry_point=EntryPoint(kind="script", target="t.py"))],
)


def test_a_blocking_submit_shows_output_and_returns_the_exit_code(
    job: Job, fake_master: FakeMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    threads_before = process.num_threads()
    job.output = {"out": b"hello\nworld\n", "err": b"careful\n"}

    def finish() -> None:
        eventually(lambda: len(fake_master.requests_of(WatchCluster)) >= 2, message="the status was not asked for")
        job.finish(0)

    finisher = threading.Thread(target=finish)
    finisher.start()
    assert run_job(SPEC) == 0
    finisher.join()
    said = capsys.readouterr()
    assert said.out == "[trainer-0] hello\n[trainer-0] world\n"
    lines = said.err.splitlines()
    assert "[trainer-0] careful" in lines
    assert lines[0].startswith("gpt-1  submitted to tcp://127.0.0.1:")
    assert "gpt-1  RUNNING  all workers run" in lines
    assert "gpt-1  trainer: 1 RUNNING, step 3/10" in lines
    assert lines[-1] == "job gpt-1 finished"
    eventually(lambda: process.num_threads() <= threads_before, message="threads are left")


def test_the_end_of_a_job_does_not_wait_for_a_stream_that_is_read_again_later(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified.client.logs.LogReader.pause_s", lambda self: 3600.0)
    threading.Timer(0.2, job.finish, (0,)).start()
    ended = threading.Event()

    def run() -> None:
        if run_job(SPEC) == 0:
            ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ended.wait(100)
    thread.join()


def test_no_output_comes_behind_the_end(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.output = {"out": b"", "err": b"last\n"}
    job.finish(0, "done")
    assert run_job(SPEC) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines.index("[trainer-0] last") < lines.index("gpt-1  FINISHED  done")


def test_a_failed_job_ends_with_its_first_failure(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(summary="ValueError: no", traceback="Traceback\nValueError: no")
    job.finish(
        1,
        "no restart is left",
        EndReport(worker=WORKER, incarnation=0, node="n1", failure=failure, limit="max_restart"),
    )
    assert run_job(SPEC) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "  failure  ValueError: no" in lines
    assert "  limit    max_restart" in lines
    assert "    ValueError: no" in lines
    assert lines[-1].startswith("  next     unified explain gpt-1 --master tcp://")


@pytest.mark.parametrize("is_printed", [True, False])
def test_a_traceback_is_shown_once(job: Job, capsys: pytest.CaptureFixture[str], is_printed: bool) -> None:
    text = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: no\n'
    job.num_workers = 2  # which print the same
    job.output = {"out": b"", "err": text.encode() if is_printed else b""}
    failure = Failure(summary="ValueError: no", traceback=text)
    end = EndReport(worker=WORKER, incarnation=0, node="n1", failure=failure, limit="permanent")
    job.finish(1, "failed: trainer_2-0_1-0 on n1: ValueError: no; permanent: twice", end)
    assert run_job(SPEC) == 1
    lines = capsys.readouterr().err.splitlines()
    assert sum("Traceback (most recent call last)" in line for line in lines) == 1
    assert ("[trainer-1] ValueError: no (the same traceback as trainer-0, above)" in lines) == is_printed
    assert ("  trace    above, in the output of the workers" in lines) == is_printed
    assert "  limit    permanent: twice" in lines


@pytest.mark.parametrize(("num_workers", "prefix"), [(1, "auto"), (2, "auto"), (2, "never")])
def test_lines_of_several_workers_carry_their_prefix_in_a_pipe(
    job: Job, capsys: pytest.CaptureFixture[str], num_workers: int, prefix: Prefix
) -> None:
    job.num_workers = num_workers
    job.output["out"] = b"hi\n"
    job.finish(0)
    spec = structs.replace(SPEC, roles=[structs.replace(SPEC.roles[0], total=num_workers)])
    assert run_job(spec, prefix=prefix) == 0
    has_prefix = (num_workers, prefix) == (2, "auto")
    expected = [f"[trainer-{rank}] hi" if has_prefix else "hi" for rank in range(num_workers)]
    assert sorted(capsys.readouterr().out.splitlines()) == expected


def test_a_refused_submit_raises_and_leaves_nothing(job: Job, fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: Refused(code="does-not-fit", reason="needs 8 devices; n1 has 1.")
    with pytest.raises(RefusedError, match="needs 8 devices"):
        run_job(SPEC, wait=False)
    (request,) = fake_master.requests_of(SubmitJob)
    assert (request.spec.name, request.wait) == ("gpt", False)


def test_a_handle_waits_reads_and_stops(job: Job) -> None:
    job.output["out"] = b"one\ntwo"
    with submit_job(SPEC) as handle:
        assert handle.status().stage == Stage.RUNNING
        assert list(handle.logs()) == ["[trainer-0] one", "[trainer-0] two"]
        assert list(handle.logs(role="other")) == []
        with pytest.raises(TimeoutError, match=r"still runs after 0\.05 s"):
            handle.wait(timeout=missed(0.05))
        handle.stop()
        assert handle.wait(timeout=DEADLINE_S) == 130
        assert list(handle.logs(follow=True)) == ["[trainer-0] one", "[trainer-0] two"]


def test_a_watch_ends_when_its_cluster_is_of_no_use(job: Job, fake_master: FakeMaster) -> None:
    with MasterConnection(fake_master.address, timeout_s=missed(0.1)) as connection:
        display = PlainDisplay(io.StringIO(), io.StringIO())
        check = Mock(side_effect=ClusterError("the embedded master was killed by SIGKILL"))
        watch = Watch(connection, "gpt-1", display, check=check)
        fake_master.close()
        with pytest.raises(ClusterError, match="the embedded master was killed by SIGKILL"):
            watch.run()
    watch.join()


def test_a_stall_is_shown_though_the_master_has_no_news(job: Job, fake_master: FakeMaster) -> None:
    answer, clock = fake_master.respond, iter(range(120, 100_000, 5))
    times = TimeSpent(phase="productive", since=100.0, stalls_at=130.0)

    def respond(message: ClientToMaster) -> Any:
        found = answer(message)
        if not isinstance(found, Changes):
            return found
        jobs = [structs.replace(each, times=times) for each in found.jobs if job.stage is Stage.RUNNING]
        return structs.replace(found, at=float(next(clock)), jobs=jobs or found.jobs)

    fake_master.respond = respond
    err = io.StringIO()

    def finish() -> None:
        eventually(lambda: "STALLED" in err.getvalue(), message="the stall was not shown", timeout=DEADLINE_S)
        job.finish(0)

    finisher = threading.Thread(target=finish)
    finisher.start()
    with MasterConnection(fake_master.address) as connection:
        Watch(connection, "gpt-1", PlainDisplay(io.StringIO(), err), with_logs=False).run()
    finisher.join()
    lines = [line for line in err.getvalue().splitlines() if line.split()[1].isupper()]
    assert lines[:2] == ["gpt-1  RUNNING  all workers run", "gpt-1  STALLED  no step for 30 s"]


def test_an_error_of_the_display_ends_a_watch(job: Job, fake_master: FakeMaster) -> None:
    """Also one of the class by which the queue of news says that there are none."""
    with MasterConnection(fake_master.address) as connection:
        watch = Watch(connection, "gpt-1", Mock(wants_all=True, update=Mock(side_effect=Empty)))
        with pytest.raises(Empty):
            watch.run()
    watch.join()


def test_an_answer_without_the_job_ends_a_watch_with_an_error(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: Changes(version=1, at=1.0, is_whole=True)
    with MasterConnection(fake_master.address) as connection:
        watch = Watch(connection, "gpt-1", PlainDisplay(io.StringIO(), io.StringIO()), with_logs=False)
        with pytest.raises(ProtocolError, match="the master told nothing about job gpt-1"):
            watch.run()
    watch.join()


def test_a_wait_survives_a_master_that_comes_back(job: Job, fake_master: FakeMaster) -> None:
    with MasterConnection(fake_master.address, timeout_s=missed(0.2)) as connection:
        codes: list[int] = []
        waiting = threading.Thread(target=lambda: codes.append(JobHandle(connection, "gpt-1").wait()))
        waiting.start()
        fake_master.close()
        waiting.join(missed(0.5))
        assert waiting.is_alive()
        with contextlib.closing(FakeMaster(fake_master.address)) as again:
            job.finish(0)
            again.respond = job.respond
            again.start()
            waiting.join(DEADLINE_S)
            assert codes == [0]


def test_a_master_that_is_away_is_told_once_and_its_return_too(
    job: Job, fake_master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slow answer of a busy machine is no silence: only the one that the test makes is as short as this.
    monkeypatch.setattr("unified.client.foreground.SILENT_S", DEADLINE_S)
    monkeypatch.setattr("unified.client.foreground.POLL_S", 0.0)
    monkeypatch.setattr("unified.client.connection.RESEND_S", 0.02)
    asked = 0

    def respond(message: ClientToMaster) -> MasterAnswer | None:
        nonlocal asked
        asked += isinstance(message, WatchCluster)
        is_silent = asked >= 3 and (asked < 40 or not err.getvalue())  # several requests are given up meanwhile
        monkeypatch.setattr("unified.client.foreground.SILENT_S", missed(0.1) if is_silent else DEADLINE_S)
        if is_silent:
            return None
        if asked == 50:
            job.finish(0)
        return job.respond(message)

    fake_master.respond = respond
    err = io.StringIO()
    with MasterConnection(fake_master.address, timeout_s=missed(0.2)) as connection:
        watch = Watch(connection, "gpt-1", QuietDisplay(io.StringIO(), err), with_logs=False)
        assert watch.run().exit_code == 0
    watch.join()
    master = f"gpt-1  the master at {fake_master.address}"
    assert err.getvalue().splitlines() == [
        f"{master} does not answer; the job goes on, waiting up to 300 s",
        f"{master} answers again",
    ]


DRIVER = """
import sys
from unified.client.submission import run_job
from unified.job.spec import JobSpec
sys.exit(run_job(JobSpec(name="gpt", roles=[])))
"""


@pytest.mark.parametrize(
    ("number", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)], ids=str
)
@pytest.mark.parametrize("is_stubborn", [False, True])
def test_ctrl_c_and_sigterm_stop_in_order_and_a_second_one_at_once(
    job: Job, fake_master: FakeMaster, is_stubborn: bool, number: signal.Signals, name: str, code: int
) -> None:
    job.ends_on_stop = not is_stubborn
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert driver.stderr is not None
    said = ""
    for line in driver.stderr:
        said += line
        if "RUNNING  all workers run" in line:
            driver.send_signal(number)
        if f"{name} again" in line and is_stubborn:
            driver.send_signal(number)
    assert driver.wait(DEADLINE_S) == code
    driver.communicate()
    assert [stop.force for stop in job.stops] == ([False, True] if is_stubborn else [False])
    assert "Traceback" not in said
    if not is_stubborn:
        assert said.splitlines()[-1] == f"job gpt-1 was stopped: {name} in its driver"


def test_signals_for_workers_go_to_the_master_and_the_driver_goes_on(job: Job, fake_master: FakeMaster) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert driver.stderr is not None
    for line in driver.stderr:
        if "RUNNING  all workers run" in line:
            driver.send_signal(signal.SIGUSR1)
        if "SIGUSR1 goes to the workers that handle it" in line:
            eventually(lambda: fake_master.requests_of(SignalWorkers), timeout=DEADLINE_S)
            job.finish(0)
    assert driver.wait(DEADLINE_S) == 0
    driver.communicate()
    assert [(each.job, each.signal) for each in fake_master.requests_of(SignalWorkers)] == [("gpt-1", signal.SIGUSR1)]


def test_output_that_is_dropped_is_told_once(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.output_lost = "stdout: 12 lines (400 bytes) dropped since 10:00:00: No space left on device"
    threading.Timer(0.2, job.finish, (0,)).start()
    assert run_job(SPEC) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "is dropped" in line]
    assert lines == [f"gpt-1  output of trainer-0 on n1 is dropped: {job.output_lost}"]


def test_what_workers_wait_for_is_told_as_it_comes(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    words = iter(["Collecting einops", "Collecting einops", "Installing einops"])

    def worker(rank: int) -> WorkerStatus:
        if job.stage is Stage.RUNNING and (word := next(words, "")):
            job.version += 1
            waits = Progress(waits_for=f"the packages: {word}")
            return worker_status(rank, state=WorkerState.STARTING, node="n1", progress=waits)
        job.finish(0)
        return worker_status(rank, state=WorkerState.EXITED)

    job.worker = worker  # type: ignore[method-assign]
    assert run_job(SPEC) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "waits for" in line]
    assert lines == [
        f"gpt-1  trainer-0 on n1 waits for the packages: {word} einops" for word in ("Collecting", "Installing")
    ]


def test_ctrl_c_is_heard_by_a_master_that_was_away(
    job: Job, fake_master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified.client.connection.RESEND_S", 0.02)
    asked: list[ClientToMaster] = []

    def respond(message: ClientToMaster) -> MasterAnswer | None:
        if isinstance(message, StopJob):
            asked.append(message)
            if len(asked) < 10:  # longer away than an ordinary request waits
                return None
        return job.respond(message)

    fake_master.respond = respond

    class Impatient(QuietDisplay):
        def update(self, status: JobStatus, now: float = 0.0) -> None:
            if not asked and status.stage == Stage.RUNNING:
                signal.raise_signal(signal.SIGINT)

    with MasterConnection(fake_master.address, timeout_s=missed(0.1)) as connection:
        watch = Watch(connection, "gpt-1", Impatient(io.StringIO(), io.StringIO()), with_logs=False)
        assert watch.run().exit_code == 130
    watch.join()
    assert len(asked) >= 10  # another may be on its way when the answer comes


def test_a_wait_on_a_handle_that_is_closed_ends(job: Job, fake_master: FakeMaster) -> None:
    handle = JobHandle(MasterConnection(fake_master.address), "gpt-1")
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            handle.wait()
        except MasterUnreachableError as error:
            ended.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(lambda: fake_master.requests_of(WatchCluster), message="nobody waits")
    handle.close()
    waiter.join(DEADLINE_S)
    assert [str(error).endswith("is closed.") for error in ended] == [True]


def test_an_interrupted_wait_says_that_the_job_goes_on(job: Job, fake_master: FakeMaster) -> None:
    def interrupt() -> None:
        eventually(lambda: fake_master.requests_of(WatchCluster), message="nobody waits")
        signal.raise_signal(signal.SIGINT)

    with JobHandle(MasterConnection(fake_master.address), "gpt-1") as handle:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt, match=r"job gpt-1 goes on: wait\(\) again, or stop\(\) it"):
            handle.wait()
        thread.join()
        job.finish(0)
        assert handle.wait() == 0


def test_a_handle_shows_state_and_progress_while_there_is_a_master(job: Job, fake_master: FakeMaster) -> None:
    handle = JobHandle(MasterConnection(fake_master.address), "gpt-1")
    assert repr(handle) == "<JobHandle gpt-1  RUNNING  all workers run; trainer: 1 RUNNING, step 3/10>"
    assert '<progress value="3" max="10">' in (handle._repr_html_() or "")
    handle.close()
    assert repr(handle) == f"JobHandle('gpt-1', master='{fake_master.address}')"
    assert handle._repr_html_() is None


def test_a_handle_gives_its_threads_and_descriptors_back_when_the_job_has_ended(
    job: Job, fake_master: FakeMaster
) -> None:
    job.finish(3)
    before = Belongings()
    handles = [JobHandle(MasterConnection(fake_master.address), "gpt-1") for _ in range(3)]
    assert [handle.wait() for handle in handles] == [3, 3, 3]
    assert left_behind(before) == []
    for handle in handles:
        assert handle.status().exit_code == 3
        assert left_behind(before) == []
        list(handle.logs())
        assert left_behind(before) == []
        handle.close()


def test_commands_print_what_the_master_knows(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> list[str]:
        assert main(words) == 0
        return capsys.readouterr().out.splitlines()

    assert [line.split()[:4] for line in run("jobs")] == [
        ["JOB", "STAGE", "EXIT", "WORKERS"],
        ["gpt-1", "RUNNING", "-", "1"],
    ]
    assert run("nodes")[1].split()[:9] == ["n1", "ALIVE", "10.0.0.1", "0", "6/8", "8.0/16.0", "GB", "0/1", "virtual"]
    status = run("status", "gpt")
    assert status[0].startswith("job gpt-1 is RUNNING")
    assert status[-1].split()[:5] == ["trainer-0", "0", "RUNNING", "n1", "77"]
    assert run("explain", "gpt-1")[0].split()[1:] == ["job-submitted", "gpt-1", "by", "me"]
    assert run("explain", "trainer-0") == run("explain", "gpt-1", "trainer-0")
    assert run("explain", "gpt-1/trainer-0") == run("explain", "gpt-1", "trainer-0")
    assert run("stop", "gpt") == ["gpt-1 is stopped"]
    assert run("stop", "gpt") == ["gpt-1 had already ended with exit code 130"]
    assert [stop.job for stop in job.stops] == ["gpt-1"]
    assert run("status", "gpt")[0] == "job gpt-1 was stopped: unified stop"


def test_commands_say_why_a_job_stands_still(
    job: Job, fake_master: FakeMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    """`explain`, too: the decisions of such a job end with its start."""
    use = QueueUse("MainThread", "gets", "samples", True)
    waiting = structs.replace(job.worker(0), progress=Progress(step=3, queues=[use]))
    stalled = structs.replace(job.status(), workers=[waiting], times=TimeSpent(phase="stalled", since=1.0))
    line = JobLine(
        job_id=stalled.job_id, name="gpt", stage=Stage.RUNNING, reason="", submitted_at=0.0, ended_at=None,
        num_workers=1, exit_code=None, stalled_since=1.0,
    )  # fmt: skip

    def respond(message: ClientToMaster) -> MasterAnswer:
        if isinstance(message, GetJob):
            return stalled
        if isinstance(message, WatchCluster):
            return changes_of(stalled, 1)
        return JobList(jobs=[line]) if isinstance(message, ListJobs) else job.respond(message)

    fake_master.respond = respond
    lines = ["  queue    samples: trainer-0 waits for an item", "  next     unified stack gpt-1"]
    assert main(["status", "gpt"]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == lines
    for words in (["gpt-1"], ["gpt-1", "trainer-0"], ["trainer-0"]):
        assert main(["explain", *words]) == 0
        event, state, *more = capsys.readouterr().out.splitlines()
        assert "job-submitted" in event
        assert state.startswith("job gpt-1 is STALLED: no step since ")
        assert more == lines
    line = structs.replace(line, stalled_since=None)
    assert main(["explain", "gpt-1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_jobs_are_chosen_by_the_stage_that_is_shown_or_by_that_of_the_data(
    job: Job, fake_master: FakeMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[ListJobs] = []

    def line(number: int, stage: Stage, exit_code: int | None = None, **fields: Any) -> JobLine:
        named = {"job_id": f"j-{number}", "name": "j", "reason": "why", "submitted_at": number, "num_workers": 1}
        return JobLine(**{**named, "stage": stage, "exit_code": exit_code, "ended_at": None, **fields})

    found = [
        line(6, Stage.STOPPED, 1),
        line(5, Stage.INIT, reason="waits: no room"),
        line(4, Stage.STOPPED, 0),
        line(3, Stage.RUNNING, stalled_since=1.0),
        line(2, Stage.INIT, suspended="asked"),
        line(1, Stage.STOPPED, 2),
    ]

    def respond(message: ClientToMaster) -> MasterAnswer:
        assert isinstance(message, ListJobs)
        asked.append(message)
        chosen = [each for each in found if not message.stages or each.stage in message.stages]
        return JobList(jobs=chosen[: message.limit or None])

    fake_master.respond = respond

    def shown(*words: str) -> list[str]:
        assert main(["jobs", *words]) == 0
        return [each.partition(" ")[0] for each in capsys.readouterr().out.splitlines()[1:]]

    assert shown("--stage", "failed") == ["j-6", "j-1"]
    assert shown("--stage", "FAILED", "--stage", "WAITING", "--limit", "2") == ["j-6", "j-5"]
    assert shown("--stage", "stalled", "--stage", "suspended") == ["j-3", "j-2"]
    assert shown("--stage", "STOPPED") == ["j-6", "j-4", "j-1"]
    assert asked[-1] == ListJobs(stages=[Stage.STOPPED])
    assert shown("--stage", "INIT", "--limit", "1") == ["j-5"]
    assert asked[-1].limit == 1


def test_commands_print_the_same_facts_as_data(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> Any:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    status = told("status", "gpt")
    assert (status["job_id"], status["stage"], status["exit_code"]) == ("gpt-1", "RUNNING", None)
    (worker,) = status["workers"]
    assert (worker["role"], worker["rank"], worker["node"], worker["progress"]["step"]) == ("trainer", 0, "n1", 3)
    assert [(each["job_id"], each["stage"], each["num_workers"]) for each in told("jobs")] == [("gpt-1", "RUNNING", 1)]
    assert [(each["node"], each["state"], each["free"]["cpu"]) for each in told("nodes")] == [("n1", "ALIVE", 6)]
    assert [(each["event"], each["reason"], each["at"]) for each in told("explain", "gpt-1")] == [
        ("job-submitted", "by me", 5.5)
    ]


def test_lines_of_logs_as_data(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.output = {"out": b'{"not": ours}\nsecond\n', "err": b"oops\n"}

    def told(*words: str) -> list[Any]:
        assert main(["logs", "gpt", "--json", *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    first = {"role": "trainer", "rank": 0, "incarnation": 0, "stream": "out", "at": 0.0}
    first |= {"line": '{"not": ours}', "note": ""}
    assert told() == [first, {**first, "line": "second"}, {**first, "stream": "err", "line": "oops"}]
    assert [each["line"] for each in told("--tail", "1", "--stream=out")] == ["second"]


def test_no_line_with_times_that_matches_is_left_out(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.output["out"] = b"".join(b"line %d\n" % number for number in range(300_000))  # a reader without a filter skips
    job.finish(0)
    assert main(["logs", "gpt", "--follow", "--times", "--grep", "line (7|299999)$"]) == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
        "[trainer-0] line 7",
        "[trainer-0] line 299999",
    ]


def test_logs_can_be_cut(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.output = {"out": b"".join(b"line %d\n" % number for number in range(5000)), "err": b"oops\n"}

    def run(*words: str) -> list[str]:
        assert main(["logs", "gpt", *words]) == 0
        return capsys.readouterr().out.splitlines()

    assert len(run()) == 5001
    assert run("--tail", "2", "--stream", "out") == ["[trainer-0] line 4998", "[trainer-0] line 4999"]
    assert run("--stream=err") == ["[trainer-0] oops"]
    assert run("trainer-0", "--stream=err") == ["[trainer-0] oops"]
    assert main(["logs", "gpt", "--role", "trainr"]) == 2
    assert "Did you mean 'trainer'?" in capsys.readouterr().err
    for word in ("trainer", "trainr"):  # a role in place of a worker
        assert main(["logs", "gpt", word]) == 2
        assert "not a worker's name" in (said := capsys.readouterr().err)
        assert said.endswith(f"All workers of a role: --role {word}.\n")
    assert main(["logs", "gpt", "--rank", "1"]) == 2
    assert "the largest role of job gpt-1 has 1 workers, so there is no rank 1." in capsys.readouterr().err


def test_a_job_that_is_not_known_is_exit_code_2(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UNIFIED_HOME", str(tmp_path))  # a home in which no ended cluster has left a job x
    for words in (["status", "x"], ["logs", "x"], ["stop", "x"], ["explain", "x"], ["explain", "x-1"]):
        assert main(words) == 2
        assert capsys.readouterr().err == "unified: there is no such job.\n"


def test_watching_a_job_ends_with_its_exit_code(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    threading.Timer(0.2, job.finish, (1, "it broke")).start()
    assert main(["status", "gpt", "--watch"]) == 1
    assert "  reason   it broke" in capsys.readouterr().out


def test_a_closed_pipe_is_no_error(job: Job) -> None:
    job.output["out"] = b"x" * 99 + b"\n"
    job.output["out"] *= 10_000
    command = f"{sys.executable} -m unified logs gpt | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "[trainer-0] " + "x" * 99 + "\n"


def test_a_closed_pipe_does_not_end_the_job(job: Job) -> None:
    job.output["out"] = (b"x" * 99 + b"\n") * 20_000
    threading.Timer(1.0, job.finish, (3,)).start()
    command = f"{sys.executable} -c '{DRIVER}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "[trainer-0] " + "x" * 99 + "\n"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert done.stderr.splitlines()[-3].startswith("job gpt-1 failed with exit code 3")
    assert done.returncode == 3


def test_run_sends_the_job_and_detaches(job: Job, fake_master: FakeMaster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--detach", "--nproc-per-node=2", "train.py", "--master", "not ours"]) == 0
    assert capsys.readouterr().out == "gpt-1\n"
    (request,) = fake_master.requests_of(SubmitJob)
    assert isinstance(request, SubmitJob)
    assert request.spec.roles[0].entry_point.argv == ["--master", "not ours"]
    assert request.spec.roles[0].total == 2
    assert not request.spec.roles[0].communication.auto_setup

"""The agent's profiler with tools that fail: one sentence each, and nothing stays. The real tools: tests/cluster."""

import os
import queue
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from unified.protocol.agent_master import ReadAgentLog
from unified.protocol.records import JobWorkerIncarnation, ProfileKind
from unified_agent.core.messages import SampleWorker
from unified_agent.measure import profiles
from unified_agent.measure.profiles import Profiler

INCARNATION = JobWorkerIncarnation("job-1", "w-0", 3)


class Tool:
    """Stands for py-spy and memray: writes `made` where its output goes, and says the rest."""

    def __init__(self, made: bytes = b"", out: bytes = b"", err: bytes = b"") -> None:
        self.made, self.out, self.err = made, out, err
        self.commands: list[list[str]] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, command: list[str], within_s: float, passed: list[int]) -> tuple[bytes, bytes]:
        self.commands.append(command)
        self.may_end.wait(100)
        if self.made == b"never":
            raise subprocess.TimeoutExpired(command, within_s)
        if passed and self.made:
            os.pwrite(passed[0], self.made, 0)  # a tool opens the path, and has a place of its own in it
        return self.out, self.err


class Bench:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "job-1" / "w-0"
        self.folder.mkdir(parents=True)
        self.tool = Tool()
        self.answers: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.profiler = Profiler(folder, lambda *args: self.tool(*args), self._answer)
        monkeypatch.setattr(profiles, "find_program", lambda name: f"/bin/{name}")

    def _answer(self, order: ReadAgentLog, request_id: int, error: str) -> None:
        self.answers.put((request_id, error))

    def begin(self, kind: ProfileKind = "flamegraph", number: int = 1) -> None:
        order = ReadAgentLog(
            job_id="job-1",
            worker="w-0",
            worker_incarnation=3,
            stream="profile",
            offset=0,
            max_bytes=1,
            take=kind,
            wait_s=1.0,
        )
        self.profiler.begin(SampleWorker(INCARNATION, os.getpid(), order, number))

    def error(self, kind: ProfileKind = "flamegraph", *, made: bytes = b"", out: bytes = b"", err: bytes = b"") -> str:
        self.tool = Tool(made, out, err)
        self.begin(kind)
        return self.answers.get(timeout=100)[1]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_a_profile_lies_beside_the_log(bench: Bench) -> None:
    assert bench.error(made=b"<svg/>", out=b"py-spy> Wrote") == ""
    (command,) = bench.tool.commands
    assert command[:2] == ["/bin/py-spy", "record"]
    assert "--nonblocking" in command, "the worker is not stopped"
    (file,) = bench.folder.iterdir()
    assert (file.name, file.read_bytes(), file.stat().st_mode & 0o777) == ("3.profile", b"<svg/>", 0o600)


def test_each_failure_is_one_sentence_and_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ran no Python code" in bench.error(made=b"<svg/>", err=b"Error: Failed: No stack counts found\n")
    empty = b"py-spy> Wrote speedscope file to '/dev/fd/9'. Samples: 0 Errors: 0\n"
    assert "ran no Python code" in bench.error("speedscope", made=b'{"profiles":[]}', err=empty)
    assert bench.error(err=b"\nError: no such process\nStack backtrace:\n") == (
        "py-spy cannot read it: Error: no such process"
    )
    assert bench.error() == "py-spy cannot read it: it said nothing"
    assert bench.error(err=b"Permission Denied: Try sudo").startswith("the kernel does not let py-spy read ")
    assert bench.error(made=b"never") == "py-spy did not end within 16 s"
    assert "memray cannot attach to it: no" in bench.error("memory", err=b"no module named memray\n")
    monkeypatch.setattr(profiles, "MAX_PROFILE_BYTES", 3)
    assert "more than 0 MiB" in bench.error(made=b"<svg/>")
    monkeypatch.setattr(profiles, "find_program", lambda name: None)
    assert bench.error() == "py-spy is not installed on its node: pip install 'unified-runtime[debug]' there"
    monkeypatch.setattr("sys.version_info", (3, 13))
    assert "install gdb there" in bench.error("memory")
    assert list(bench.folder.iterdir()) == []
    shutil.rmtree(bench.folder)
    monkeypatch.undo()
    monkeypatch.setattr(profiles, "find_program", lambda name: f"/bin/{name}")
    assert "cannot be written: [Errno 2] No such file" in bench.error(made=b"<svg/>")


def test_a_worker_is_profiled_once_at_a_time(bench: Bench) -> None:
    bench.tool = Tool(b"<svg/>")
    bench.tool.may_end.clear()
    bench.begin(number=1)
    bench.begin(number=2)
    assert bench.answers.get(timeout=100) == (2, "it is being profiled already")
    bench.tool.may_end.set()
    assert bench.answers.get(timeout=100) == (1, "")
    assert bench.error(made=b"<svg/>") == ""

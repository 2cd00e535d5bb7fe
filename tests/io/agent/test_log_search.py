"""Lines of logs by pattern and by time, searched for by a real agent's parts: only what matches travels."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.support.agents
from tests.support.agents import AgentProcess, PlayedMaster, eventually
from unified.protocol.agent_master import LogRead, ReadAgentLog, agent_to_master
from unified.protocol.records import JobWorkerIncarnation
from unified_agent.logs.logfile import LogSlice
from unified_agent.logs.output import OutputReader, SliceRead

pytestmark = pytest.mark.processes

JOB = "job-1"
MB = 1 << 20


class Searcher:
    """Asks a real agent for lines, again and again until it has searched all, as a client does by way of a master."""

    def __init__(self, folder: Path) -> None:
        self.master = PlayedMaster()
        self.logs = folder / "state/logs"
        self.agent = AgentProcess(folder, self.master.address)
        self.master.welcome()

    def write(self, data: bytes, worker: str = "w-0", size: int = 0) -> Path:
        """Write a log by hand; with a size larger than the data, with a hole of zeros before it."""
        path = self.logs / JOB / worker / "0.out"
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.truncate(max(0, size - len(data)))
            file.seek(0, os.SEEK_END)
            file.write(data)
        return path

    def ask(self, offset: int = 0, worker: str = "w-0", **fields: Any) -> LogRead:
        order: Any = {"job_id": JOB, "worker": worker, "worker_incarnation": 0, "stream": "out", "offset": offset}
        self.master.say(ReadAgentLog(**order, **{"max_bytes": 65536, **fields}), request_id=7)
        return self.master.hear(LogRead)

    def lines(self, worker: str = "w-0", **fields: Any) -> list[bytes]:
        found, read = b"", self.ask(0, worker, **fields)
        while read.next_offset < read.size:
            assert not read.error
            found += read.data
            read = self.ask(read.next_offset, worker, **fields)
        return (found + read.data).splitlines()


@pytest.fixture
def search(tmp_path: Path, agents: list[AgentProcess]) -> Iterator[Searcher]:
    one = Searcher(tmp_path)
    agents.append(one.agent)
    yield one
    one.agent.process.terminate()
    one.agent.wait()
    one.master.hang_up()


def test_lines_that_match_are_found_in_all_files_of_a_stream(search: Searcher) -> None:
    path = search.write(b"".join(b"step %d loss %d\n" % (step, step % 7) for step in range(60_000, 90_000)) + b"loss 3")
    first = b"".join(b"step %d loss %d\n" % (step, step % 7) for step in range(60_000))
    path.with_name("0.out.1").write_bytes(first)
    path.with_name("0.out.base").write_text(str(len(first)))
    wanted = [b"step %d loss 3" % step for step in range(90_000) if step % 7 == 3] + [b"loss 3"]
    assert search.lines(grep=r"loss 3$", max_bytes=20_000) == wanted
    assert search.lines(grep=r"^step 6000\d ") == [b"step 6000%d loss %d" % (n, (60_000 + n) % 7) for n in range(10)]
    assert search.lines(grep=r"1\sstep") == []  # a match does not span lines
    assert search.lines(grep="nothing like it") == []
    assert search.lines(worker="w-9", grep="loss") == []
    assert search.ask(worker="w-9", grep="loss").is_missing
    path.with_name("0.out.base").unlink()
    path.with_name("0.out.base").mkdir()  # as good as a disk that fails
    assert (read := search.ask(grep="loss")).error
    assert not read.is_missing


def test_a_line_without_end_and_one_longer_than_the_answer_are_found(search: Searcher) -> None:
    search.write(b"\0needle\xff" + b"x" * (3 * MB) + b"\nsmall needle\n")
    found = search.lines(grep="needle")
    assert [line[:7] for line in found] == [b"\0needle", b"small n"]
    assert len(found[0]) == 65535


def test_a_line_that_is_printed_in_two_parts_is_found(tmp_path: Path) -> None:
    def run(command: list[str], within_s: float, passed: list[int]) -> tuple[bytes, bytes]:
        done = subprocess.run(command, capture_output=True, timeout=100, pass_fds=passed)
        return done.stdout, done.stderr

    def ask(offset: int, pattern: str) -> LogSlice:
        place: dict[str, Any] = {"job_id": JOB, "worker": "w-0", "worker_incarnation": 0, "max_bytes": 65536}
        reader.read(ReadAgentLog(**place, stream="out", offset=offset, grep=pattern), 1)
        found = eventually(lambda: [one for one in reader.take() if isinstance(one, SliceRead)])
        return found[0].slice

    def printed(text: bytes) -> None:
        os.write(out, text)
        whole.extend(text)
        eventually(lambda: log.exists() and log.read_bytes() == whole)

    reader = OutputReader(tmp_path, max_bytes=MB, max_files=2, run=run)
    out, err = reader.open(JobWorkerIncarnation(JOB, "w-0", 0))
    log, whole = tmp_path / JOB / "w-0/0.out", bytearray()
    printed(b"begin\nERR")
    first = ask(0, "ERROR")
    for found in (first, ask(6, "ERROR")):
        assert (found.data, found.next_offset, found.size, found.is_busy) == (b"", 6, 9, False)
    printed(b"OR: bad\n")
    assert ask(6, "^ERROR").data == b"ERROR: bad\n"
    os.close(out)
    os.close(err)
    reader.close()


def test_a_pattern_that_takes_too_long_is_refused_and_the_agent_goes_on(search: Searcher) -> None:
    search.write(b"a" * 5000 + b"!\n")
    read = search.ask(grep="(a+)+$")
    assert "a simpler pattern" in read.error
    assert search.lines(grep="a!$") == [b"a" * 5000 + b"!"]


@pytest.mark.parametrize("pattern", ["(", "a{1,99999999999999}", "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"])
def test_a_pattern_that_is_none_is_refused(search: Searcher, pattern: str) -> None:
    search.write(b"a\n")
    assert search.ask(grep=pattern).error or pattern.startswith("((((a")
    assert search.lines(grep="a") == [b"a"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_a_hundred_large_logs_only_the_lines_that_match_travel(
    search: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logs are holes of zeros, 6.4 GB of them, which take no room on the disk."""
    for number in range(100):
        search.write(b"\nloss is nan at step %d\nend\n" % number, f"w-{number}", size=64 * MB)
    num_bytes = 0

    class Counted:
        @staticmethod
        def decode(frames: list[bytes]) -> Any:
            nonlocal num_bytes
            num_bytes += sum(map(len, frames))
            return agent_to_master.decode(frames)

    monkeypatch.setattr(tests.support.agents, "agent_to_master", Counted)
    found = [search.lines(f"w-{number}", grep="is nan") for number in range(100)]
    assert found == [[b"loss is nan at step %d" % number] for number in range(100)]
    assert num_bytes < 500_000, "heartbeats and all"

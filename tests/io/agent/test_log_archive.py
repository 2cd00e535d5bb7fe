"""Whole logs in a folder or a bucket, written by real agents that are killed, and that leave in order."""

import gzip
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.agents import AgentProcess, PlayedMaster, a_job, a_worker, eventually
from unified.protocol.agent_master import RegisterAgent
from unified.storage import open_storage
from unified.testing import eventually as soon
from unified_agent.logs import archive
from unified_agent.logs.archive import PART_BYTES, LogArchive
from unified_agent.logs.logfile import LogSlice, read_through

LINE = b"step %09d of a training that prints a great deal\n"


def archived(folder: Path) -> bytes:
    """What the parts of a stream are, one behind the other."""
    return gzip.decompress(b"".join(part.read_bytes() for part in sorted(folder.glob("*.gz"))))


def write(path: Path, nbytes: int) -> bytes:
    """Write a log that has rotated once."""
    whole = b"".join(LINE % number for number in range(nbytes // len(LINE)))
    path.parent.mkdir(parents=True)
    path.with_name(f"{path.name}.1").write_bytes(whole[: nbytes // 2])
    path.with_name(f"{path.name}.base").write_text(str(nbytes // 2))
    path.write_bytes(whole[nbytes // 2 :])
    return whole


@pytest.mark.slow
def test_an_agent_that_is_killed_goes_on_where_it_was(tmp_path: Path, agents: list[AgentProcess]) -> None:
    whole = write(tmp_path / "state/logs/job-0/w-0/0.out", 16 * PART_BYTES)
    folder = tmp_path / "archive/job-0/w-0/0.out"
    master = PlayedMaster()
    first = AgentProcess(tmp_path, master.address, "--log-archive", f"file://{tmp_path}/archive")
    agents.append(first)
    eventually(lambda: list(folder.glob("*.gz")))
    first.process.kill()
    first.wait()
    before = {part: part.stat().st_mtime_ns for part in sorted(folder.glob("*.gz"))}
    agents.append(AgentProcess(tmp_path, master.address, "--log-archive", f"file://{tmp_path}/archive"))
    second = master.hear(RegisterAgent, lambda said: said.pid == agents[-1].process.pid)
    assert second.log_archive == f"file://{tmp_path}/archive"
    eventually(lambda: archived(folder) == whole)
    assert [part for part, at in before.items() if part.stat().st_mtime_ns != at] in ([], list(before)[-1:])
    master.hang_up()


def test_an_agent_that_leaves_has_archived_what_was_printed_last(tmp_path: Path, agents: list[AgentProcess]) -> None:
    master = PlayedMaster()
    agents.append(AgentProcess(tmp_path, master.address, "--log-archive", str(tmp_path / "archive")))
    master.welcome()
    job = a_job("print:5000")
    master.desire(a_worker(), jobs=[job])
    log = tmp_path / "state/logs/job-1/w-0/0.out"
    eventually(lambda: log.exists() and log.stat().st_size)
    agents[0].process.terminate()
    assert agents[0].wait() == 0
    assert archived(tmp_path / "archive/job-1/w-0/0.out") == log.read_bytes()
    master.hang_up()


def test_a_kind_of_store_that_is_not_known_is_refused(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path, "tcp://127.0.0.1:1", "--log-archive", "ftp://host/logs")
    assert agent.wait() == 2
    assert "ftp://host/logs" in agent.stderr


@pytest.mark.slow
def test_a_bucket_that_is_away_for_a_while_gets_all(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(archive, "LOOK_S", 0.05)
    monkeypatch.setattr(archive, "RETRY_S", 0.05)
    path = tmp_path / "logs/job-0/w-0/0.err"
    whole = write(path, 3 * PART_BYTES)
    real, failures = gzip.compress, iter([OSError("no disk for it"), OSError("nor now")])

    def compress(data: bytes, **options: int) -> bytes:
        for failure in failures:
            raise failure
        return real(data, **options)

    monkeypatch.setattr(gzip, "compress", compress)
    with caplog.at_level(logging.ERROR):
        one = LogArchive(
            f"s3://{bucket}/logs", tmp_path / "logs", 4, lambda path, start, size: read_through(path, start, size, 4)
        )
        soon(lambda: path.with_name("0.err.archived").exists(), timeout=100)
        one.close()
    assert caplog.text.count("event=log-not-archived") == 2
    store, prefix = open_storage(f"s3://{bucket}/logs")
    keys = [stat.key for stat in store.list(f"{prefix}/job-0/w-0/0.err/")]
    assert len(keys) >= 3
    assert gzip.decompress(b"".join(store.read(key) for key in keys)) == whole
    store.close()


class Output:
    """The thread that writes a log, as the archive sees it: `first` is done before its first answer."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("LOOK_S", "RETRY_S"):
            monkeypatch.setattr(archive, name, 0.05)
        self.path = tmp_path / "logs/job-0/w-0/0.out"
        self.stored = tmp_path / "archive/job-0/w-0/0.out"
        self.first: Callable[[], LogSlice | None] = lambda: None
        self.archive = LogArchive(str(tmp_path / "archive"), tmp_path / "logs", 4, self.read)

    def run(self, *, ends: bool = True) -> bytes:
        """Archive the log until it is left, and return what is stored."""
        self.archive.begin(self.path)
        if ends:
            self.archive.end(self.path)
        soon(lambda: not self.archive._due, timeout=100)
        self.archive.close()
        return archived(self.stored)

    def read(self, path: Path, start: int, size: int) -> LogSlice:
        first, self.first = self.first, lambda: None
        return first() or read_through(path, start, size, 4)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Output:
    return Output(tmp_path, monkeypatch)


def test_a_rotation_that_is_half_done_ends_no_stream(output: Output) -> None:
    whole = write(output.path, 2 * PART_BYTES)
    output.path.rename(output.path.with_name("0.out.2"))  # not there for this moment

    def rotate() -> None:
        output.path.with_name("0.out.2").rename(output.path)

    output.first = rotate
    assert output.run() == whole
    made = [output.stored, *output.stored.parents[:3], *output.stored.iterdir()]  # from the archive's root down
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600, 0o700}, "private, as the log is"


def test_a_read_that_fails_is_tried_again_and_told(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    whole = write(output.path, 2 * PART_BYTES)
    output.first = lambda: LogSlice(error="too many open files")
    with caplog.at_level(logging.ERROR):
        assert output.run() == whole
    assert caplog.text.count("event=log-not-archived") == 1


def test_what_is_drained_at_the_end_of_a_stream_is_archived(output: Output) -> None:
    write(output.path, 2 * PART_BYTES)

    def drain() -> LogSlice:
        found = read_through(output.path, 0, 0, 4)
        with output.path.open("ab") as file:
            file.write(b"the last words")
        output.archive.end(output.path)
        return found

    output.first = drain
    assert output.run(ends=False).endswith(b"the last words")


def test_a_log_that_was_removed_is_left(output: Output) -> None:
    write(output.path, 2 * PART_BYTES)
    output.path.unlink()
    assert output.run() == b""

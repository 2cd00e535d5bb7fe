"""The output of a job that runs, in front of a fake master: all of it for a file, what can be followed for a person."""

import io
import os
import threading

import pytest

from tests.support.fake_master import FakeMaster, Job
from unified.client.connection import MasterConnection
from unified.client.display import PlainDisplay, QuietDisplay
from unified.client.foreground import Watch
from unified.protocol.client_master import ReadLog
from unified.testing import eventually


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_output_that_comes_faster_than_a_person_reads_is_skipped_on_a_terminal(job: Job) -> None:
    job.output["out"] = b"x" * 99 + b"\n"
    job.output["out"] *= 1_000_000
    job.finish(0)
    out, err = Terminal(), Terminal()
    with MasterConnection(os.environ["UNIFIED_MASTER"]) as connection, PlainDisplay(out, err) as display:
        watch = Watch(connection, "gpt-1", display)
        assert watch.run().exit_code == 0
    watch.join()
    lines = out.getvalue().splitlines()
    assert len(lines) < 3000
    assert any("99.9 MB skipped, whole log: /logs/0.out" in line for line in lines)


def test_a_file_gets_all_of_every_worker_and_says_that_it_wants_it(job: Job, fake_master: FakeMaster) -> None:
    job.output["out"] = b"".join(b"%07d\n" % number for number in range(40_000)) + b"half"
    job.num_workers = 18
    job.finish(0)
    out, err = io.StringIO(), io.StringIO()
    with MasterConnection(os.environ["UNIFIED_MASTER"]) as connection, PlainDisplay(out, err) as display:
        watch = Watch(connection, "gpt-1", display)
        assert watch.run().exit_code == 0
    watch.join()
    lines = out.getvalue().splitlines()
    assert len(lines) == 18 * 40_001
    assert lines.count("0039999") == lines.count("half") == 18
    assert all(request.keep for request in fake_master.requests_of(ReadLog))


def test_a_reader_that_nobody_empties_says_that_it_is_still_there(
    job: Job, fake_master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified.client.foreground.RENEW_S", 0.0)
    job.output["out"] = b"x" * 10_000_000
    reading, writing = os.pipe()
    with (
        os.fdopen(reading, "rb") as reader,
        os.fdopen(writing, "w") as pipe,
        MasterConnection(fake_master.address) as connection,
    ):
        watch = Watch(connection, "gpt-1", QuietDisplay(pipe, io.StringIO()))
        codes: list[int | None] = []
        watching = threading.Thread(target=lambda: codes.append(watch.run().exit_code))
        watching.start()
        eventually(
            lambda: [request for request in fake_master.requests_of(ReadLog) if request.max_bytes == 1],
            message="the log was not asked to be kept",
        )
        job.finish(0)
        assert len(reader.read(10_000_000)) == 10_000_000
        watching.join(100)
        assert codes == [0]
    watch.join()

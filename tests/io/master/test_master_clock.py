"""A master whose clock is older than its records: its times go on from the newest record."""

import contextlib
import re
import time
from pathlib import Path

import pytest

from tests.io.master.test_master_daemon import spec
from tests.support.master_process import StartMaster
from unified.cli.main import main
from unified.client.connection import MasterConnection
from unified.client.mirror import JobWatch
from unified.protocol.client_master import Accepted, Done, Explain, StopJob, Story, SubmitJob
from unified.protocol.records import EventRecord, Stage
from unified_master.core.messages import ReportEvent
from unified_master.store import Store

pytestmark = pytest.mark.processes

AHEAD_S = 5000.0


def test_times_go_on_from_the_newest_record(
    start_master: StartMaster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a host's clock was set back by more than an hour, or on a new host whose clock is older."""
    newest = time.time() + AHEAD_S
    with contextlib.closing(Store(tmp_path / "state")) as store:
        store.commit([], [ReportEvent(record=EventRecord(at=newest, event="x", reason="y", sequence=1))])
    for _ in range(2):  # the second start finds the times of the first
        master = start_master()
        with contextlib.closing(MasterConnection(master.address)) as client:
            job = client.ask(SubmitJob(spec=spec()), Accepted).job_id
            assert main(["status", "train", "--master", master.address]) == 0
            assert "100 % waiting" in capsys.readouterr().out, "by the master's clock"
            client.ask(StopJob(job=job), Done)
            watch = JobWatch(client, job)
            ended = watch.next_status()
            assert ended.stage is Stage.STOPPED
            assert ended.ended_at is not None
            assert newest <= ended.submitted_at <= ended.ended_at <= watch.mirror.at
            times = [event.at for event in client.ask(Explain(job=job), Story).events]
        assert times == sorted(times)
        newest = times[-1]
        master.kill()
    behind = [float(found) for found in re.findall(r"clock is (\S+) s behind", master.log.read_text())]
    assert len(behind) == 2
    assert all(0 < each < AHEAD_S + 600 for each in behind)

"""The archive of ``unified diagnose`` about a job that a played master tells of."""

import io
import json
import os
import resource
import stat
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.fake_master import WORKER, FakeMaster, Job
from unified.cli import diagnose as cli
from unified.cli.diagnose import LEFT_OUT, diagnose
from unified.errors import UsageError
from unified.protocol.client_master import ClientToMaster, MasterAnswer, ReadLog, Refused


def texts(path: Path) -> dict[str, str]:
    """Return the files of an archive by name."""
    with tarfile.open(path) as archive:
        found = {name: archive.extractfile(name) for name in archive.getnames()}
        return {name.partition("/")[2]: file.read().decode() for name, file in found.items() if file is not None}


def test_a_traceback_in_the_status_has_no_secret_and_the_archive_is_for_its_owner(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", 'abc"def12')
    job.reason = 'login({"wandb_api_key": "0123456789", "password": "hunter22"}) with abc"def12'
    job.output["out"] = b'{"a":"x abc\\"def12"}\n'
    mask = os.umask(0)
    try:
        diagnose("gpt", None, tmp_path / "x.tar.gz")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "x.tar.gz").stat().st_mode) == 0o600
    found = texts(tmp_path / "x.tar.gz")
    assert json.loads(found["status.json"])["reason"] == (
        f'login({{"wandb_api_key": "{LEFT_OUT}", "password": "{LEFT_OUT}"}}) with {LEFT_OUT}'
    )
    assert not [
        name for name, text in found.items() for secret in ("0123456789", "hunter22", "def12") if secret in text
    ]


def reads_of(master: FakeMaster) -> set[tuple[str, str]]:
    """Return worker and stream of the logs that were asked for."""
    return {(read.worker, read.stream) for read in master.requests_of(ReadLog)}


def test_a_full_disk_leaves_no_part_of_an_archive(job: Job, tmp_path: Path) -> None:
    job.output["out"] = os.urandom(50_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # fails as a full disk does, by an OSError of write
    try:
        with pytest.raises(UsageError, match=r"cannot write .*: File too large"):
            diagnose("gpt", None, tmp_path / "x.tar.gz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"cannot write /dev/null/x: Not a directory"):
        diagnose("gpt", None, Path("/dev/null/x"))


def test_a_silent_master_is_asked_for_no_other_log(
    job: Job, fake_master: FakeMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "SLOW_S", 0.0)
    job.num_workers = 3
    real = job.respond

    def respond(message: ClientToMaster) -> MasterAnswer | None:
        if isinstance(message, ReadLog):
            return None
        return real(message)

    fake_master.respond = respond
    monkeypatch.setenv("UNIFIED_CONNECT_S", "2")
    diagnose("gpt", None, tmp_path / "x.tar.gz")
    assert reads_of(fake_master) == {("trainer_3-0_1-0", "out")}
    found = texts(tmp_path / "x.tar.gz")
    assert "no master answers" in found["logs/trainer_3-0_1-0/0.out"]
    assert found["logs/trainer_3-2_1-0/0.err"] == "(cannot be had: the master did not answer before)\n"


def test_a_node_that_was_slow_to_refuse_is_asked_for_no_other_log(
    job: Job, fake_master: FakeMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.num_workers = 3
    refused, real = Refused(code="unavailable", reason="the agent did not send the log"), job.respond

    def respond(message: ClientToMaster) -> MasterAnswer:
        return refused if isinstance(message, ReadLog) else real(message)

    fake_master.respond = respond
    diagnose("gpt", None, tmp_path / "quick.tar.gz")
    assert len(reads_of(fake_master)) == 9
    fake_master.requests.clear()
    monkeypatch.setattr(cli, "SLOW_S", 0.0)
    diagnose("gpt", None, tmp_path / "slow.tar.gz")
    assert len(reads_of(fake_master)) == 1
    found = texts(tmp_path / "slow.tar.gz")
    assert found["logs/trainer_3-2_1-0/0.err"] == "(cannot be had: node n1 did not answer before)\n"


def test_one_deadline_holds_for_all_and_a_terminal_shows_what_is_read(
    job: Job, fake_master: FakeMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(cli, "WHOLE_S", 0.0)
    diagnose("gpt", None, tmp_path / "x.tar.gz")
    assert not reads_of(fake_master)
    assert "the 0 s for the whole archive are over" in texts(tmp_path / "x.tar.gz")["events.txt"]
    assert f"\r\033[Klogs/{WORKER}/0.out" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K")

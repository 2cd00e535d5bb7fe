"""A real master with a cluster key, and clients that have it, another, none, or half of it."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.support.fake_master import FakeMaster
from tests.support.master_process import MasterProcess, StartMaster
from unified.cli.main import main
from unified.client.connection import MasterConnection
from unified.errors import KeyRefusedError
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.client_master import (
    Accepted,
    Explain,
    JobList,
    ListJobs,
    ListNodes,
    NodeList,
    Refused,
    Story,
    SubmitJob,
    master_to_client,
)
from unified.protocol.framing import PROTOCOL_VERSION
from unified.security.curve import new_key, secure_client
from unified.security.keys import ClusterKey, write_key

pytestmark = pytest.mark.processes

KEY, OTHER = new_key(), new_key()
PUBLIC_ONLY = ClusterKey(public=KEY.public, secret=OTHER.secret)
SPEC = JobSpec(
    name="train",
    roles=[RoleSpec(name="t", kind="simple", entry_point=EntryPoint(kind="attribute", target="m"), total=1)],
)
DEADLINE_MS = 60_000


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "keys" / "cluster.key"
    write_key(path, KEY)
    monkeypatch.setenv("UNIFIED_KEY_FILE", str(path))
    return path


@pytest.fixture
def master(start_master: StartMaster, key_file: Path) -> MasterProcess:
    return start_master()


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        secure_client(socket, KEY)
        socket.connect(address)
        yield socket


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (None, "wants a cluster key: set UNIFIED_KEY_FILE"),
        (OTHER, "refused this side's cluster key SHA256:"),
        (PUBLIC_ONLY, "refused this side's cluster key SHA256:"),
    ],
    ids=["no key", "another key", "the public half alone"],
)
def test_a_stranger_is_told_at_once_and_disturbs_no_member(
    master: MasterProcess, key: ClusterKey | None, text: str
) -> None:
    with MasterConnection(master.address, key=KEY) as member:
        assert member.ask(ListNodes(), NodeList).nodes == []
        with MasterConnection(master.address, key=key, timeout_s=100) as stranger:
            for _ in range(2):
                with pytest.raises(KeyRefusedError, match=text) as caught:
                    stranger.request(SubmitJob(spec=SPEC))
                assert caught.value.code == "key"
                assert member.ask(ListJobs(), JobList).jobs == []
            assert stranger.is_open
    log = master.log.read_text()
    assert f"key={KEY.fingerprint}" in log
    refusals = re.findall(r"event=key-refused at='control' (peer=.*)", log)
    assert refusals, "it is said"
    assert len(refusals) == len(set(refusals)), "once for each way in which it failed"


def test_the_secret_is_in_no_file_and_no_answer(master: MasterProcess, key_file: Path) -> None:
    with MasterConnection(master.address, key=KEY) as member:
        assert member.ask(SubmitJob(spec=SPEC), Accepted).job_id.startswith("train-1-")
        story = member.ask(Explain(job="train-1"), Story)
    assert story.events
    assert KEY.secret not in repr(story)
    files = [path for path in key_file.parent.parent.rglob("*") if path.is_file() and path != key_file]
    assert len(files) >= 2, "the store and the log"
    assert not [path for path in files if KEY.secret.encode() in path.read_bytes()]
    for where in ("environ", "cmdline"):
        assert KEY.secret.encode() not in Path(f"/proc/{master.process.pid}/{where}").read_bytes()


def test_the_command_says_it_in_a_line(
    master: MasterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nodes", "--master", master.address]) == 0
    assert "no nodes" in capsys.readouterr().out
    other = tmp_path / "keys" / "other.key"
    write_key(other, OTHER)
    monkeypatch.setenv("UNIFIED_KEY_FILE", str(other))
    assert main(["nodes", "--master", master.address]) == 1
    said = capsys.readouterr().err
    assert f"refused this side's cluster key {OTHER.fingerprint}" in said
    assert len(said.splitlines()) == 1
    other.chmod(0o644)
    assert main(["nodes", "--master", master.address]) == 2
    assert "chmod 600" in capsys.readouterr().err


def test_a_connection_that_was_refused_works_once_the_master_lets_it_in(master: MasterProcess) -> None:
    address = master.address
    with MasterConnection(address, timeout_s=100) as connection:
        with pytest.raises(KeyRefusedError):
            connection.request(ListJobs())
        master.kill()
        with contextlib.closing(FakeMaster(address)) as open_master:
            open_master.respond = lambda message: JobList(jobs=[])
            open_master.start()
            assert connection.request(ListJobs()) == JobList(jobs=[])


def test_a_client_with_a_key_is_told_that_the_master_has_none(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: JobList(jobs=[])
    refused = pytest.raises(KeyRefusedError, match="cluster key")
    with MasterConnection(fake_master.address, key=KEY, timeout_s=100) as connection, refused:
        connection.request(ListJobs())
    assert fake_master.requests == []


@pytest.mark.parametrize("flags", [["--bind", "tcp://0.0.0.0:0"], ["--relay-bind", "tcp://0.0.0.0:0"]])
def test_it_does_not_listen_beyond_loopback_without_a_key(
    start_master: StartMaster, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setenv("UNIFIED_KEY_FILE", "")
    master = start_master(*flags)
    assert master.process.wait(100) == 2
    (line,) = master.log.read_text().splitlines()
    assert "unified-master would listen on tcp://0.0.0.0:0, which other hosts reach, without a cluster key" in line
    assert not master.address_file.exists()


def test_a_key_that_others_can_read_stops_it(start_master: StartMaster, key_file: Path) -> None:
    key_file.chmod(0o640)
    master = start_master()
    assert master.process.wait(100) == 2
    assert f"`chmod 600 {key_file}`" in master.log.read_text()


def test_frames_of_a_newer_version_are_logged_once_and_disturb_nobody(master: MasterProcess) -> None:
    with dealer(master.address) as newer, MasterConnection(master.address, key=KEY) as member:
        for request_id in range(1, 21):
            newer.send_multipart(master_to_client.encode(ListNodes(), request_id, version=PROTOCOL_VERSION + 1))
            assert newer.poll(DEADLINE_MS)
            header, body = newer.recv_multipart()
            refused = master_to_client.decode_body(body)
            assert isinstance(refused, Refused)
            assert refused.code == "version"
        assert member.ask(ListJobs(), JobList).jobs == []
    assert header
    assert master.log.read_text().count("event=message-refused") == 1


def test_a_replayed_request_is_answered_again_and_done_once(master: MasterProcess) -> None:
    codes: list[str] = []
    with dealer(master.address) as client:
        for _ in range(3):
            client.send_multipart(master_to_client.encode(SubmitJob(spec=SPEC), 7))
            assert client.poll(DEADLINE_MS)
            request_id, answer = master_to_client.decode(client.recv_multipart())
            assert request_id == 7
            codes.append(answer.code if isinstance(answer, Refused) else type(answer).__name__)
    assert codes == ["Accepted", "name-taken", "name-taken"]
    with MasterConnection(master.address, key=KEY) as member:
        assert [job.name for job in member.ask(ListJobs(), JobList).jobs] == ["train"]

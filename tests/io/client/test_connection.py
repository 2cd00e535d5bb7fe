"""A connection against a fake master: answers, refusals, silence, rubbish."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.deadlines import missed
from tests.support.fake_master import FakeMaster
from unified import process
from unified.client import connection as connection_module
from unified.client.connection import MasterConnection
from unified.errors import MasterUnreachableError, ProtocolError, RefusedError, UsageError, VersionMismatchError
from unified.job.spec import JobSpec
from unified.protocol.client_master import (
    Accepted,
    Changes,
    ClientRequest,
    ClientToMaster,
    Done,
    Explain,
    GetJob,
    JobList,
    ListJobs,
    ListNodes,
    MasterAnswer,
    NodeList,
    Refused,
    StopJob,
    SubmitJob,
    WatchCluster,
)
from unified.protocol.framing import MAX_MESSAGE, PROTOCOL_VERSION
from unified.testing import Belongings, eventually, left_behind


def test_a_request_gets_its_answer(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: JobList(jobs=[])
    with MasterConnection(fake_master.address) as connection:
        assert connection.request(ListJobs()) == JobList(jobs=[])
        assert connection.ask(ListJobs(), JobList).jobs == []


def test_many_threads_share_one_connection_and_each_gets_its_own_answer(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: Done(note=message.job) if isinstance(message, StopJob) else None
    with MasterConnection(fake_master.address) as connection, ThreadPoolExecutor(8) as threads:

        def ask(number: int) -> list[MasterAnswer]:
            return [connection.request(StopJob(job=f"{number}-{turn}")) for turn in range(20)]

        answers = list(threads.map(ask, range(8)))
    assert answers == [[Done(note=f"{number}-{turn}") for turn in range(20)] for number in range(8)]


def test_a_connection_that_rests_gives_its_thread_and_sockets_back_until_it_is_asked_again(
    fake_master: FakeMaster,
) -> None:
    fake_master.respond = lambda message: JobList(jobs=[]) if isinstance(message, ListJobs) else None
    before = Belongings()
    with MasterConnection(fake_master.address) as connection:
        for _ in range(3):
            assert connection.request(ListJobs()) == JobList(jobs=[])
            assert Belongings().left_since(before)
            connection.rest()
            assert left_behind(before) == []
        open_request = connection.send(ListNodes(), timeout_s=100)
        connection.rest()
        assert connection.request(ListJobs()) == JobList(jobs=[])
        connection.rest()
        assert not open_request.is_answered(0.0)
        connection.abandon(open_request)
        connection.rest()
        assert left_behind(before) == []


def test_requests_and_rests_of_many_threads_lose_no_answer(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: Done(note=message.job) if isinstance(message, StopJob) else None
    with MasterConnection(fake_master.address, timeout_s=100) as connection, ThreadPoolExecutor(4) as threads:

        def ask(number: int) -> list[MasterAnswer]:
            answers = []
            for turn in range(20):
                answers.append(connection.request(StopJob(job=f"{number}-{turn}")))
                connection.rest()
            return answers

        answers = list(threads.map(ask, range(4)))
    assert answers == [[Done(note=f"{number}-{turn}") for turn in range(20)] for number in range(4)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Explain(job="x", limit=10**20), "Explain.limit is 100000000000000000000, which takes more than 64 bits"),
        (StopJob(job="a\ud800"), r"StopJob.job is 'a\\ud800', which is not UTF-8"),
        (SubmitJob(spec=JobSpec(name="x", roles=[], sys_path=["/a", "/\udcff"])), r"SubmitJob.spec.sys_path\[1\] is"),
    ],
)
def test_a_request_that_cannot_be_sent_fails_alone_and_names_the_value(
    fake_master: FakeMaster, wrong: ClientRequest, said: str
) -> None:
    fake_master.respond = lambda message: JobList(jobs=[])
    with MasterConnection(fake_master.address) as connection:
        for _ in range(2):
            with pytest.raises(UsageError, match=said):
                connection.request(wrong)
            assert connection.request(ListJobs()) == JobList(jobs=[])


def test_answers_may_come_out_of_order(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: None if isinstance(message, ListNodes) else JobList(jobs=[])
    with MasterConnection(fake_master.address) as connection:
        first = connection.send(ListNodes(), timeout_s=missed(0.3))
        assert connection.request(ListJobs()) == JobList(jobs=[])
        with pytest.raises(MasterUnreachableError):
            first.result()


def test_a_refusal_carries_its_code(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: Refused(code="not-found", reason="no job 'x'.")
    with MasterConnection(fake_master.address) as connection, pytest.raises(RefusedError, match="no job 'x'") as caught:
        connection.request(GetJob(job="x"))
    assert caught.value.code == "not-found"


def test_nobody_there_is_said_with_the_address_and_the_time() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        with MasterConnection(address) as connection, pytest.raises(MasterUnreachableError) as caught:
            connection.request(ListJobs(), timeout_s=missed(0.1))
    assert f"no master answers at {address} after 0.1 s: is `unified-master` running there?" in str(caught.value)


@pytest.mark.parametrize("name", ["no-such-host.invalid", "too..many"])
def test_a_name_that_nobody_knows_is_said_at_once(name: str) -> None:
    with MasterConnection(name, timeout_s=1000.0) as connection:
        for _ in range(2):
            with pytest.raises(MasterUnreachableError, match=f"the host '{name}' of the master's address tcp://{name}"):
                connection.request(ListJobs())


def test_a_submission_that_timed_out_never_arrives_late(fake_master: FakeMaster) -> None:
    fake_master.close()
    with MasterConnection(fake_master.address) as connection:
        with pytest.raises(MasterUnreachableError, match="no master answers"):
            connection.request(SubmitJob(spec=JobSpec(name="late", roles=[])), timeout_s=missed(0.1))
        with contextlib.closing(FakeMaster(fake_master.address).start()) as late:
            late.respond = lambda message: JobList(jobs=[])
            assert connection.request(ListJobs()) == JobList(jobs=[])
            assert late.requests == [ListJobs()]


def test_a_silent_master_and_a_submission_say_that_it_may_have_been_taken(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: JobList(jobs=[]) if isinstance(message, ListJobs) else None
    with MasterConnection(fake_master.address) as connection:
        connection.request(ListJobs())
        submission = connection.send(SubmitJob(spec=JobSpec(name="once", roles=[])), timeout_s=missed(0.2))
        with pytest.raises(MasterUnreachableError, match="look with `unified jobs`"):
            submission.result()
        eventually(lambda: fake_master.requests_of(SubmitJob))
    assert len(fake_master.requests) == 2


@pytest.mark.parametrize(
    "message",
    [ListJobs(), SubmitJob(spec=JobSpec(name="once", roles=[]), follows="")],
    ids=["a-list", "a-submission-that-follows"],
)
def test_a_request_that_is_idempotent_is_sent_again_on_silence(
    fake_master: FakeMaster, monkeypatch: pytest.MonkeyPatch, message: ClientRequest
) -> None:
    monkeypatch.setattr(connection_module, "RESEND_S", 0.05)
    fake_master.respond = lambda message: JobList(jobs=[]) if len(fake_master.requests) > 2 else None
    with MasterConnection(fake_master.address, timeout_s=100) as connection:
        assert connection.request(message) == JobList(jobs=[])
    assert len(fake_master.requests) >= 3


def test_a_master_that_comes_late_is_reached(fake_master: FakeMaster) -> None:
    fake_master.close()
    with MasterConnection(fake_master.address) as connection:
        reply = connection.send(ListJobs())
        with contextlib.closing(FakeMaster(fake_master.address)) as late:
            late.respond = lambda message: JobList(jobs=[])
            late.start()
            assert reply.result() == JobList(jobs=[])


def test_a_long_poll_may_take_longer_than_the_timeout(fake_master: FakeMaster) -> None:
    changes = Changes(version=2, at=0.0)

    def respond(message: ClientToMaster) -> MasterAnswer:
        threading.Event().wait(missed(0.3))
        return changes

    fake_master.respond = respond
    with MasterConnection(fake_master.address, timeout_s=missed(0.2)) as connection:
        assert connection.request(WatchCluster(after_version=1, wait_s=60.0)) == changes


@pytest.mark.parametrize("how", ["refusal", "header"])
def test_another_version_is_an_error_of_its_own(fake_master: FakeMaster, how: str) -> None:
    if how == "header":
        fake_master.version = 9
        fake_master.respond = lambda message: NodeList(nodes=[])
    else:
        fake_master.respond = lambda message: Refused(code="version", reason="the peer speaks protocol version 9.")
    with MasterConnection(fake_master.address) as connection, pytest.raises(VersionMismatchError, match="version 9"):
        connection.request(ListNodes())


@pytest.mark.parametrize(
    "frames", [[b"rubbish"], [b"\xff\xff", b"more"], [bytes([0x92, PROTOCOL_VERSION, 1]), b"\xc1"], [b""]]
)
def test_rubbish_is_refused_and_the_connection_goes_on(fake_master: FakeMaster, frames: list[bytes]) -> None:
    fake_master.respond = lambda message: frames if isinstance(message, ListNodes) else JobList(jobs=[])
    with MasterConnection(fake_master.address) as connection:
        with pytest.raises(ProtocolError, match="is not a master of this release"):
            connection.request(ListNodes())
        assert connection.request(ListJobs()) == JobList(jobs=[])


def test_an_answer_of_the_wrong_kind_is_named(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: Accepted(job_id="a-1")
    wrong = pytest.raises(ProtocolError, match="answered ListJobs with Accepted, not with JobList")
    with MasterConnection(fake_master.address) as connection, wrong:
        connection.ask(ListJobs(), JobList)


def test_a_request_larger_than_the_master_takes_is_refused_here_and_the_others_go_on(
    fake_master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ would end the connection, and the request would be sent again and again until its time is up."""
    monkeypatch.setattr(connection_module, "RESEND_S", 60.0)
    fake_master.respond = lambda message: Done(note=str(len(message.job))) if isinstance(message, StopJob) else None
    largest = MAX_MESSAGE - 1000
    with MasterConnection(fake_master.address) as connection:
        with pytest.raises(UsageError, match=r"^StopJob has 64\.0 MiB, and the master takes 64 at most: put large"):
            connection.request(StopJob(job="x" * MAX_MESSAGE))
        assert connection.request(StopJob(job="x" * largest)) == Done(note=str(largest))
    assert [len(request.job) for request in fake_master.requests_of(StopJob)] == [largest]


def test_closing_fails_who_waits_and_leaves_nothing(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: None
    threads_before = process.num_threads()
    connection = MasterConnection(fake_master.address)
    reply = connection.send(ListJobs())
    eventually(lambda: fake_master.requests, message="the request did not arrive")
    connection.close()
    connection.close()
    with pytest.raises(MasterUnreachableError, match="is closed"):
        reply.result()
    with pytest.raises(MasterUnreachableError, match="is closed"):
        connection.request(ListJobs())
    eventually(lambda: process.num_threads() <= threads_before, message="threads are left")


@pytest.mark.parametrize("text", ["", "ipc:///tmp/x", "tcp://host:0", "tcp://host:99999", "a b", "tcp://a:b"])
def test_what_is_not_an_address_is_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError, match="write tcp://HOST:PORT"):
        MasterConnection(text)

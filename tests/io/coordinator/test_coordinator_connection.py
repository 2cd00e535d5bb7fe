"""What coordinators need of a connection: to be told of an answer, and to give one up."""

import threading

import pytest

from tests.support.fake_master import FakeMaster
from unified.client import connection as connection_module
from unified.client.connection import MasterConnection, PendingReply
from unified.coordinator import client as coordinator_client
from unified.coordinator.client import BARRIER_GRACE_S, RemoteCoordinator, barrier_after
from unified.errors import MasterUnreachableError
from unified.protocol.client_master import JobList, ListJobs, ListNodes
from unified.protocol.coordinator import BarrierResponse, WaitBarrier, worker_to_coordinator
from unified.testing import eventually


def test_an_answer_is_told_and_so_is_an_error(fake_master: FakeMaster) -> None:
    fake_master.respond = lambda message: JobList(jobs=[])
    told: list[PendingReply] = []
    is_told = threading.Event()

    def tell(reply: PendingReply) -> None:
        told.append(reply)
        is_told.set()

    connection = MasterConnection(fake_master.address)
    connection.send(ListJobs(), when_done=tell)
    assert is_told.wait(100)
    assert told[0].result() == JobList(jobs=[])
    connection.close()
    connection.send(ListJobs(), when_done=tell)
    with pytest.raises(MasterUnreachableError, match="closed"):
        told[1].result()


def test_what_was_given_up_is_not_asked_again(fake_master: FakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "RESEND_S", 0.05)
    fake_master.respond = lambda message: None
    told: list[PendingReply] = []
    with MasterConnection(fake_master.address) as connection:
        reply = connection.send(ListJobs(), timeout_s=100, when_done=told.append)
        other = connection.send(ListNodes(), timeout_s=100)
        eventually(lambda: len(fake_master.requests_of(ListJobs)) > 2)
        connection.abandon(reply)
        seen = len(fake_master.requests_of(ListNodes))
        eventually(lambda: len(fake_master.requests_of(ListNodes)) > seen + 1)
        settled = len(fake_master.requests_of(ListJobs))
        seen = len(fake_master.requests_of(ListNodes))
        eventually(lambda: len(fake_master.requests_of(ListNodes)) > seen + 3)
        assert len(fake_master.requests_of(ListJobs)) == settled
        assert not told
        connection.abandon(other)


BARRIER = WaitBarrier(barrier_id="b", worker_id="w", session="s", arrival=1, world_size=2, timeout_s=100)


def test_who_asks_again_at_a_barrier_says_how_much_of_its_time_is_left(
    fake_master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (connection_module, coordinator_client):
        monkeypatch.setattr(module, "RESEND_S", 0.05)
    fake_master.codec, fake_master.respond = worker_to_coordinator, lambda message: None
    with RemoteCoordinator(fake_master.address) as remote:
        future = remote.submit(BARRIER, BarrierResponse)
        eventually(lambda: len(fake_master.requests_of(WaitBarrier)) > 3)
        future.cancel()
    times = [each.timeout_s or 0.0 for each in fake_master.requests_of(WaitBarrier)]
    assert times == sorted(set(times), reverse=True)
    assert 0 < times[-1] < times[0] <= 100


@pytest.mark.parametrize(("waited_s", "left_s"), [(0.0, 100.0), (30.0, 70.0), (90.0, 10.0), (100.0, 5.0), (106.0, 2.0)])
def test_a_master_that_has_just_begun_has_time_to_hear_who_is_there(waited_s: float, left_s: float) -> None:
    after = barrier_after(BARRIER, waited_s)
    assert after.timeout_s == left_s
    assert waited_s + left_s < 100.0 + BARRIER_GRACE_S, "its answer comes before this side gives up"


def test_a_barrier_without_an_end_stays_without_one() -> None:
    assert barrier_after(WaitBarrier(barrier_id="b", worker_id="w", session="s", arrival=1, world_size=2), 1e5) == (
        WaitBarrier(barrier_id="b", worker_id="w", session="s", arrival=1, world_size=2)
    )

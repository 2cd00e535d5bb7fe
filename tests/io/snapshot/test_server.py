"""A real snapshot server: what it keeps, whom it serves, and what is left when somebody is killed."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import zmq

from tests.io.snapshot.conftest import Nodes
from tests.support.snapshots import SECRET, SnapshotNode, SnapshotRank, a_state
from unified.errors import SnapshotError, SnapshotQuotaError
from unified.protocol.snapshots import (
    LISTENER_NAME,
    AttachSeries,
    OfferSnapshot,
    OfferTaken,
    ReadPiece,
    ServerAddress,
    SnapshotStamp,
    encode_snapshot_message,
    peer_message,
    token_of,
)
from unified.security.curve import new_key
from unified.testing import eventually

pytestmark = pytest.mark.processes


def weights(state: object) -> float:
    assert isinstance(state, dict)
    values = state["weights"]
    assert values.eq(values[0]).all()
    return float(values[0])


def in_a_child(work: object) -> None:
    """Do something in a forked process, which then is killed as by the kernel."""
    child = os.fork()
    if not child:
        try:
            work()  # type: ignore[operator]
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_snapshot_outlives_its_worker_and_one_half_written_is_none(snapshot_node: Nodes) -> None:
    node = snapshot_node()

    def work() -> None:
        rank = SnapshotRank(node)
        rank.take(a_state(1.0), 1)
        rank.take(a_state(2.0), 2)
        rank.take(a_state(3.0), 3, before_commit=lambda: os.kill(os.getpid(), signal.SIGKILL))

    in_a_child(work)
    rank = SnapshotRank(node)
    assert rank.steps() == [(0, 2)]
    assert weights(rank.read(2)) == 2.0
    rank.take(a_state(4.0), 4)
    assert rank.steps() == [(0, 2), (0, 4)]
    rank.client.close()


def test_two_buffers_are_used_again(snapshot_node: Nodes) -> None:
    node = snapshot_node()
    rank = SnapshotRank(node)
    for step in range(1, 8):
        rank.take(a_state(float(step)), step)
    assert rank.steps() == [(0, 6), (0, 7)]
    assert node.num_buffers() == 2
    rank.client.close()


def test_what_was_read_stays_mapped_for_the_snapshots_to_come(snapshot_node: Nodes) -> None:
    node = snapshot_node()
    first, other = SnapshotRank(node), SnapshotRank(node, 1)
    other.take(a_state(5.0), 5)
    for step in (1, 2):
        first.take(a_state(float(step)), step)
    first.client.close()
    other.client.close()
    before = num_mapped()
    again = SnapshotRank(node)
    assert weights(again.read(2)) == 2.0
    assert num_mapped() == before + 1
    assert weights(again.read(5, of=other.series)) == 5.0  # that of another rank will never be written here
    assert num_mapped() == before + 1
    for step in (3, 4, 5):
        again.take(a_state(float(step)), step)
    assert num_mapped() == before + 2
    assert again.steps() == [(0, 4), (0, 5), (1, 5)]
    assert weights(again.read(5)) == 5.0
    again.client.close()


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:unified-snapshot")


def test_another_job_gets_nothing(snapshot_node: Nodes) -> None:
    node, other = snapshot_node("a"), snapshot_node("b")
    rank = SnapshotRank(node)
    rank.take(a_state(1.0), 1)
    stranger = SnapshotRank(node, job="job-2")
    assert stranger.held == []
    with pytest.raises(SnapshotError, match="belongs to another job"):
        stranger.read(1, of=rank.series)
    with pytest.raises(SnapshotError, match="no worker of job job-1"):
        SnapshotRank(node, token=stranger.token)
    far = SnapshotRank(other)
    forged = rank.server.__class__(node="a", url=rank.server.url, token=stranger.token)
    with pytest.raises(SnapshotError, match="the token is not that of job job-1 on node a"):
        far.read(1, of=rank.series, server=forged)
    for each in (rank, stranger, far):
        each.client.close()


def test_what_exceeds_the_quota_is_refused_and_what_is_held_stays(snapshot_node: Nodes) -> None:
    rank = SnapshotRank(snapshot_node(quota_mb=10))
    rank.take(a_state(1.0), 1)
    with pytest.raises(SnapshotQuotaError, match=r"12 MiB more .* of 10 MiB are in use.*--snapshot-mb"):
        rank.take(a_state(2.0, numel=3 << 20), 2)
    assert rank.steps() == [(0, 1)]
    rank.client.close()


@pytest.mark.smoke
@pytest.mark.parametrize("has_key", [False, True], ids=["open", "keyed"])
def test_a_copy_goes_to_the_partner_and_outlives_the_node(snapshot_node: Nodes, has_key: bool) -> None:
    key = new_key() if has_key else None
    first, second = snapshot_node("a", key=key), snapshot_node("b", key=key)
    rank, partner = SnapshotRank(first, 0), SnapshotRank(second, 1)
    for step in (1, 2, 3):
        rank.take(
            a_state(float(step), numel=6 << 20), step, partner=partner.server, needed=(SnapshotStamp(1, step - 1),)
        )
    eventually(lambda: (0, 3) in partner.steps(is_copy=True), message="no copy came")
    assert partner.steps(is_copy=True) == [(0, 2), (0, 3)], "the floor that came with the last one is 2"
    first.process.kill()
    moved = SnapshotRank(second, 0)
    assert weights(moved.read(3)) == 3.0
    for each in (rank, partner, moved):
        each.client.close()


def test_a_node_without_a_rank_holds_copies_for_the_next_incarnation_elsewhere(snapshot_node: Nodes) -> None:
    first, copy_node, third = (snapshot_node(name) for name in "abc")
    first.name_copy_node(copy_node)
    third.name_copy_node(copy_node)
    rank = SnapshotRank(first)
    for step in (1, 2, 3):  # each waits until the one before is there
        rank.take(a_state(float(step), numel=6 << 20), step, to_copy_node=True, needed=(SnapshotStamp(1, step - 1),))
    assert rank.copy_node is not None
    assert rank.copy_node.node == "b"
    eventually(lambda: 3 in [each.stamp.step for each in rank.client.held_elsewhere()[0].held], message="no copy came")
    first.process.kill()
    moved = SnapshotRank(third)
    found = max(moved.client.held_elsewhere()[0].held, key=lambda each: each.stamp)
    assert (found.rank, found.stamp.step, found.is_copy) == (0, 3, True)
    assert weights(moved.read(3, server=moved.copy_node, length=found.length)) == 3.0
    copy_node.process.kill()
    assert [each.held for each in moved.client.held_elsewhere()] == [[]]
    for each in (rank, moved):
        each.client.close()


def test_a_rank_that_moved_reads_from_another_node(snapshot_node: Nodes) -> None:
    first, second = snapshot_node("a"), snapshot_node("b")
    rank, moved = SnapshotRank(first, 0), SnapshotRank(second, 0)
    rank.take(a_state(7.0, numel=1 << 20), 7)
    length = rank.held[0].length
    assert length > 4 << 20
    found = moved.read(7, server=rank.server, length=length)
    assert weights(found) == 7.0
    assert moved.steps() == [(0, 7)]
    for each in (rank, moved):
        each.client.close()


def test_a_partner_without_the_key_is_refused_and_training_goes_on(snapshot_node: Nodes) -> None:
    first, second = snapshot_node("a", key=new_key()), snapshot_node("b", key=new_key())
    rank, partner = SnapshotRank(first, 0), SnapshotRank(second, 1)
    for step in (1, 2):
        rank.take(a_state(float(step)), step, partner=partner.server)
    assert rank.steps() == [(0, 1), (0, 2)]
    assert partner.steps(is_copy=True) == []
    for each in (rank, partner):
        each.client.close()


def test_a_partner_that_dies_costs_the_copies_alone(snapshot_node: Nodes) -> None:
    first, second = snapshot_node("a"), snapshot_node("b")
    rank, partner = SnapshotRank(first, 0), SnapshotRank(second, 1)
    rank.take(a_state(1.0), 1, partner=partner.server)
    second.process.kill()
    for step in range(2, 8):
        rank.take(a_state(float(step)), step, partner=partner.server)
    assert rank.steps()[-1] == (0, 7)
    assert weights(rank.read(7)) == 7.0
    for each in (rank, partner):
        each.client.close()


@pytest.mark.parametrize("is_read", [False, True], ids=["copy", "read"])
def test_a_slow_partner_is_waited_for_as_long_as_the_server_waits(
    snapshot_node: Nodes, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    first, second = snapshot_node("a"), snapshot_node("b")
    partner = SnapshotRank(second, 1)
    partner.take(a_state(7.0), 7)
    length = partner.held[0].length
    SnapshotRank(first).client.close()  # the server has started
    monkeypatch.setattr("unified.snapshot.worker.client.ANSWER_WITHIN_S", 2.0)
    rank = SnapshotRank(first)
    second.process.send_signal(signal.SIGSTOP)
    goes_on = threading.Timer(4.0, second.process.send_signal, [signal.SIGCONT])
    if not is_read:
        rank.take(a_state(1.0), 1, partner=partner.server)
    goes_on.start()
    if is_read:
        assert weights(rank.read(7, of=partner.series, server=partner.server, length=length)) == 7.0
    else:
        rank.take(a_state(2.0), 2, partner=partner.server)
        assert rank.complaint == ""
    goes_on.join()
    for each in (rank, partner):
        each.client.close()


def test_a_server_that_is_stopped_is_not_waited_for_for_ever(
    snapshot_node: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, other = snapshot_node("a"), snapshot_node("b")
    rank, reader, partner = SnapshotRank(node, 0), SnapshotRank(node, 1), SnapshotRank(other, 1)
    monkeypatch.setattr("unified.snapshot.worker.client.write_within_s", lambda length: length / 16000)
    node.process.send_signal(signal.SIGSTOP)
    with pytest.raises(SnapshotError, match="has not answered for 1 s"):
        rank.client.begin(1000, is_sent=True)
    with pytest.raises(SnapshotError, match="has not answered for 1 s"):
        reader.read(7, of=partner.series, server=partner.server, length=1000)
    node.process.send_signal(signal.SIGCONT)
    partner.client.close()


def test_jobs_that_nobody_runs_here_are_forgotten(snapshot_node: Nodes) -> None:
    node = snapshot_node(linger_s=0.1)
    rank = SnapshotRank(node)
    rank.take(a_state(1.0, numel=1 << 20), 1)
    rank.client.close()
    eventually(lambda: node.num_buffers() == 0, message="the memory was kept")


@pytest.mark.parametrize("is_killed", [False, True], ids=["agreed-again", "replaced"])
def test_a_job_whose_workers_went_through_a_second_round_counts_as_done(snapshot_node: Nodes, is_killed: bool) -> None:
    node = snapshot_node(linger_s=0.1)  # less than what a job is kept for whose workers are done
    rank, other = SnapshotRank(node, 0), SnapshotRank(node, 1)
    rank.take(a_state(1.0), 1)
    if is_killed:
        other.client.close()
        other = SnapshotRank(node, 1)
    for each in (rank, other):
        each.client.attach()
    for each in (rank, other):
        each.client.end()
        each.client.close()
    unfinished = SnapshotRank(node, job="job-2")
    unfinished.take(a_state(2.0), 2)
    unfinished.client.close()
    eventually(lambda: node.num_buffers() < 2, message="the memory of the job that is not done was kept")
    again = SnapshotRank(node)
    assert again.steps() == [(0, 1)]
    again.client.close()


def test_a_server_that_died_between_two_rounds_is_no_error_of_the_next(snapshot_node: Nodes) -> None:
    node, other = snapshot_node("a"), snapshot_node("b")
    rank = SnapshotRank(node)
    rank.take(a_state(1.0), 1)
    node.process.kill()
    node.process.wait()
    (other.run_dir / LISTENER_NAME).replace(node.run_dir / LISTENER_NAME)  # as the agent's next server, at its place
    found = rank.client.attach(AttachSeries(token=token_of(SECRET + b"b", "job-1"), series=rank.series))
    assert found.held == []
    rank.take(a_state(2.0), 2)
    with pytest.raises(SnapshotError, match="no worker of job job-1"):
        rank.client.attach(AttachSeries(token="", series=rank.series))
    rank.client.close()


def test_rubbish_ends_a_connection_and_nothing_else(snapshot_node: Nodes) -> None:
    node = snapshot_node()
    rank, other = SnapshotRank(node, 0), SnapshotRank(node, 1)
    assert other.client._socket is not None
    other.client._socket.send(b"\xc1 no message")
    with pytest.raises(SnapshotError, match="is gone"):
        other.client.go_back(SnapshotStamp(0, 0))
    rank.take(a_state(1.0), 1)
    assert rank.steps() == [(0, 1)]
    rank.client.close()


def test_a_peer_that_asks_for_nonsense_is_ignored(snapshot_node: Nodes) -> None:
    rank = SnapshotRank(snapshot_node())
    rank.take(a_state(1.0), 1)
    stamp, length = SnapshotStamp(1, 1), rank.held[0].length

    def asked(number: int, offset: int, nbytes: int) -> ReadPiece:
        return ReadPiece(number=number, token=rank.token, series=rank.series, stamp=stamp, offset=offset, nbytes=nbytes)

    nowhere = ServerAddress(node="c", url="nowhere", token="")
    offer = OfferSnapshot(
        number=4,
        token=rank.token,
        series=rank.series._replace(rank=1),
        stamp=stamp,
        length=length,
        source=nowhere,
    )
    requests = [asked(1, -1, 10), asked(2, 0, 8 << 30), asked(3, length + 1, 10), offer, asked(5, 0, length)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.rcvtimeo = 10_000
        peer.connect(rank.server.url)
        for request in requests:
            peer.send(encode_snapshot_message(request))
        answers = [peer.recv_multipart() for _ in range(3)]
    past_end, refused, whole = [peer_message.decode(answer[0]) for answer in answers]
    assert (past_end.number, answers[0][1]) == (3, b"")
    assert isinstance(refused, OfferTaken)
    assert "nowhere cannot be reached" in refused.error
    assert (whole.number, len(answers[2][1])) == (5, length)
    rank.client.close()


def test_the_server_holds_no_copy_of_its_own(snapshot_node: Nodes) -> None:
    first: SnapshotNode = snapshot_node("a")
    second: SnapshotNode = snapshot_node("b")
    rank, partner = SnapshotRank(first, 0), SnapshotRank(second, 1)
    before = first.memory_kib() + second.memory_kib()
    rank.take({"weights": torch.ones(48 << 18)}, 1, partner=partner.server)
    eventually(lambda: (0, 1) in partner.steps(is_copy=True), message="no copy came")
    assert first.memory_kib() + second.memory_kib() - before < 90 << 10
    for each in (rank, partner):
        each.client.close()

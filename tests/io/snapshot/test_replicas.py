"""Ranks of a node that all have the same state: it is there once, whoever restores it."""

import os
import signal
import socket
import threading
from collections.abc import Callable

import pytest

from tests.io.snapshot.conftest import Nodes
from tests.support.runtime import ENTRY, launch_of
from tests.support.snapshots import SnapshotNode, SnapshotRank, a_state
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.snapshots import (
    PACKET_BYTES,
    OpenSnapshot,
    Readable,
    SnapshotAnswer,
    SnapshotRefused,
    SnapshotStamp,
    encode_snapshot_message,
    snapshot_answer,
)
from unified.rounds.snapshot_agreement import RoundPlace
from unified.snapshot.worker.snapshots import Snapshots
from unified.testing import eventually

SAVED = SnapshotStamp(1, 7)


class Replicas:
    """A node that has a snapshot, and the ranks of another that are given it."""

    def __init__(self, first: SnapshotNode, second: SnapshotNode) -> None:
        self.first = first
        self.rank = SnapshotRank(first)
        self.rank.take(a_state(7.0, numel=6 << 20), SAVED.step)
        self.length = self.rank.held[0].length
        self.ranks = [SnapshotRank(second, rank) for rank in range(4)]

    def restore(self, meanwhile: Callable[[], None]) -> list[tuple[SnapshotAnswer, list[int]]]:
        """Have all ranks ask for it before any piece of it comes; return their answers, with descriptors."""
        self.first.process.send_signal(signal.SIGSTOP)
        source = self.rank.server
        request = OpenSnapshot(series=self.rank.series, stamp=SAVED, length=self.length, source=source)
        sockets = [each.client._socket for each in self.ranks[:3]]
        for connection in sockets:
            assert connection is not None
            connection.send(encode_snapshot_message(request))
        for _ in range(2):  # once it has answered these, it has heard those before
            assert self.ranks[3].client.attach().held == []
        meanwhile()
        return [answer_of(connection) for connection in sockets if connection is not None]

    def close(self) -> None:
        for each in (self.rank, *self.ranks):
            each.client.close()


def answer_of(connection: socket.socket) -> tuple[SnapshotAnswer, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
    return snapshot_answer.decode(data), descriptors


@pytest.fixture
def second(snapshot_node: Nodes) -> SnapshotNode:
    return snapshot_node("b")


@pytest.fixture
def replicas(snapshot_node: Nodes, second: SnapshotNode) -> Replicas:
    return Replicas(snapshot_node("a"), second)


def test_what_all_ranks_of_a_node_restore_is_fetched_and_kept_once(replicas: Replicas, second: SnapshotNode) -> None:
    answers = replicas.restore(lambda: replicas.first.process.send_signal(signal.SIGCONT))
    assert [type(answer) for answer, _ in answers] == [Readable] * 3
    buffers = {os.fstat(descriptor).st_ino for _, descriptors in answers for descriptor in descriptors}
    late = replicas.ranks[3]
    state = late.read(SAVED.step, of=replicas.rank.series, server=replicas.rank.server, length=replicas.length)
    assert isinstance(state, dict)
    assert state["weights"].eq(7.0).all()
    assert len(buffers) == 1
    assert len(late.held) == 1
    for _, descriptors in answers:
        os.close(descriptors[0])
    replicas.close()


def test_all_ranks_of_a_node_hear_that_what_they_wait_for_is_gone(replicas: Replicas) -> None:
    answers = replicas.restore(replicas.first.process.kill)
    assert [type(answer) for answer, _ in answers] == [SnapshotRefused] * 3
    replicas.close()


def test_what_was_fetched_goes_once_a_node_has_snapshots_of_its_own(replicas: Replicas, second: SnapshotNode) -> None:
    replicas.ranks[2].read(SAVED.step, of=replicas.rank.series, server=replicas.rank.server, length=replicas.length)
    assert replicas.ranks[3].steps(is_copy=True) == [(0, 7)]
    spec = JobSpec(name="job", roles=[RoleSpec(name="trainer", kind="elastic", entry_point=ENTRY, total=2)])
    launch = launch_of(spec, 1, run_dir=str(second.run_dir), snapshot_token=replicas.ranks[1].token)
    snapshots = Snapshots(launch, lambda: RoundPlace("trainer", 2, 1, 2, None, 30.0))
    snapshots.configure(replicated=True)
    for step in (8, 9):
        snapshots.take(a_state(float(step)), step)
    assert replicas.ranks[3].steps() == [(1, 8), (1, 9)]
    assert replicas.ranks[3].steps(is_copy=True) == []
    eventually(lambda: not any(each.name == "unified-snapshot" for each in threading.enumerate()))
    assert snapshots._client is not None
    snapshots._client.close()
    replicas.close()

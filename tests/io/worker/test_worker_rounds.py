"""Ranks that take part in one round after another without a restart, also out of a collective that would never end."""

import contextlib
import os
import signal
import socket

import pytest

from tests.support.workers import Agent, ForkedChild, Forker, Talk, attribute
from unified.protocol.agent_master import RoundNotice, RunOrder
from unified.protocol.worker_agent import Failed, Finished, Hello, Notice, Rejoins, Run, Running, Stop
from unified.worker.stop import EXIT_TERMINATED

pytestmark = pytest.mark.processes

REJOINING = """
    import os, socket, sys
    import torch
    import torch.distributed as dist
    from unified.api.runtime.worker import current_worker

    def reduce():
        value = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(value)
        return int(value)

    def run():
        rounds = current_worker().rounds
        rounds.begin_loop()
        assert not current_worker().should_stop  # it watches for a stop, so that it is given its time
        ours = socket.create_connection(("127.0.0.1", int(os.environ["OURS"])))  # a connection that is not torch's
        while True:
            try:
                dist.new_group(list(range(dist.get_world_size())))
                print("sum", reduce(), "round", current_worker().round, "of", os.environ["WORLD_SIZE"], flush=True)
                while current_worker().round < 3:
                    reduce()
                break
            except RuntimeError as error:
                assert rounds.is_broken_by(error)
                rounds.rejoin("cpu")
        rounds.end_loop()
        ours.sendall(b"still here")
"""


class Ranks:
    """Three ranks of one role, and the store of their rounds."""

    def __init__(self, forker: Forker, ours: int) -> None:
        self._forker = forker
        self._envs = {"OURS": str(ours)}
        self._store = forker.launch_store().expect(Hello).store_port or 0

    def launch(self, rank: int, incarnation: int = 0) -> ForkedChild:
        return self._forker.launch(
            attribute("run"), rank=rank, incarnation=incarnation, kind="elastic", total=3, per_group=3, envs=self._envs
        )

    def order(self, round_: int, rank: int, world_size: int = 3) -> RunOrder:
        return RunOrder(
            round=round_,
            rank=rank,
            world_size=world_size,
            store_host="127.0.0.1",
            store_port=self._store,
            store_prefix=f"job-1/role/{round_}",
        )


def break_round(child: Talk, round_: int) -> None:
    child.say(Notice(notice=RoundNotice(round=round_, kind="broken", reason="a peer is gone")))


def left(child: Talk) -> int:
    word = child.expect(Rejoins)
    assert word.is_able
    return word.left_round


def is_left(child: Talk, round_: int) -> bool:
    """Have a child leave a broken round. False: it was given up, as torch 2.13 loses an operation now and then."""
    break_round(child, round_)
    word = child.next_word()
    while not isinstance(word, Failed):
        if isinstance(word, Rejoins) and word.left_round == round_:
            return True
        word = child.next_word()
    assert word.failure.is_collateral, word.failure
    assert "Gloo lost an operation" in word.failure.summary
    child.until_gone()
    return False


@pytest.mark.smoke
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["dead", "silent"]
)
def test_healthy_ranks_keep_their_process(agent: Agent, forker: Forker, how: signal.Signals) -> None:
    agent.write("wp_code.py", REJOINING)
    with socket.create_server(("127.0.0.1", 0)) as ours:
        ranks = Ranks(forker, ours.getsockname()[1])
        children = [ranks.launch(rank) for rank in range(3)]
        pids = [child.run(ranks.order(1, rank)).pid for rank, child in enumerate(children)]
        for child in children:
            assert left(child) == 0
            child.until_printed("sum 6 round 1 of 3")
        os.kill(pids[0], how)
        # A silent peer leaves the others in a collective, for half an hour if nobody tells them.
        are_left = [is_left(child, 1) for child in children[1:]]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
        if not all(are_left):
            pytest.skip("Gloo lost an operation, so that a rank was given up before it could go on")

        # The next round breaks before it has begun: rank 0 never comes.
        for rank, child in enumerate(children[1:], start=1):
            child.say(Run(order=ranks.order(2, rank)))
            assert child.expect(Running).round == 2
        for child in children[1:]:
            break_round(child, 2)
            assert left(child) == 2

        replacement = ranks.launch(0, incarnation=1)
        replacement.expect(Hello)
        connections: list[bytes] = []
        again = [replacement, *children[1:]]
        for rank, child in enumerate(again):
            child.say(Run(order=ranks.order(3, rank)))
            assert child.expect(Running).round == 3
        for child in again:
            child.until_printed("sum 6 round 3 of 3")
            while child.expect(Rejoins).is_able:
                pass
            child.expect(Finished)
        for _ in range(4):  # a connection for each incarnation; that of the dead one is closed
            connection, _ = ours.accept()
            with connection:
                connections.append(connection.recv(100))
    assert sorted(connections) == [b"", *[b"still here"] * 3]


def test_a_rank_that_waits_for_its_next_round_can_be_stopped(agent: Agent, forker: Forker) -> None:
    agent.write("wp_code.py", REJOINING)
    with socket.create_server(("127.0.0.1", 0)) as ours:
        ranks = Ranks(forker, ours.getsockname()[1])
        children = [ranks.launch(rank) for rank in range(3)]
        for rank, child in enumerate(children):
            child.run(ranks.order(1, rank))
        for child in children:
            child.until_printed("sum 6 round 1 of 3")
            break_round(child, 1)  # all are told before one is waited for
        for child in children:
            if is_left(child, 1):
                child.say(Stop(grace_s=100, reason="the test is over"))
                assert child.failure().exit_code == EXIT_TERMINATED
                child.until_gone()

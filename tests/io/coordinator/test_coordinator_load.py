"""The load of the coordinator's benchmark: it asks a real master what it says it asks, and bears no other answer."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.coordinator import load
from benchmarks.coordinator.master import SHARDS, WORKERS, Populace, master
from unified.protocol.coordinator import DataShards, HeartbeatResponse, coordinator_to_worker


def test_a_master_answers_each_of_a_hundred_workers(tmp_path: Path) -> None:
    with master(tmp_path) as address, load.Loaders() as loaders:
        populace = Populace(address)
        for said in (populace.heartbeats, populace.look_ups):
            assert loaders.rate(address, said, 3) > 0
        answers = [coordinator_to_worker.decode_body(each.answer) for each in populace.look_ups]
        assert {len(each.shards) for each in answers if isinstance(each, DataShards)} == {SHARDS // WORKERS}
        arrivals = [msgspec.structs.replace(each, barrier_id="b") for each in populace.arrivals]
        taken, _ = load.barriers(address, arrivals, 2)
        assert len(taken) == 2


def test_another_answer_than_the_right_one_ends_the_load() -> None:
    body = coordinator_to_worker.encode_body
    right, wrong = body(HeartbeatResponse(is_known=True)), body(HeartbeatResponse(is_known=False))
    with load.echo(right) as address:
        assert len(load.latencies(address, load.Said(b"?", right), 5)) == 5
        with pytest.raises(load.WrongAnswerError):
            load.latencies(address, load.Said(b"?", wrong), 5)
        with pytest.raises(load.WrongAnswerError):
            load.storm(address, [load.Said(b"?", right), load.Said(b"?", wrong)], 2)

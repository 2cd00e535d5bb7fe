"""States that several ranks save and load together, by real processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.io.checkpoint.test_checkpoint_manager import do_damage
from tests.support.s3 import S3Server
from unified.checkpoint import CheckpointFallbackWarning, CheckpointManager
from unified.errors import CheckpointCorruptError, CheckpointError, UsageError

RANKS = Path(__file__).parents[2] / "support/programs/sharded_ranks.py"
LIMIT_S = 150
"""Nine processes import torch one part after another: 5 s on an idle host, ten times that beside seven other tests."""
Found = dict[str, list[dict[str, Any]]]


def run(place: object, scenario: str) -> Found:
    """What each rank found, by the function that it ran."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(RANKS.parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(RANKS), str(place), scenario], capture_output=True, text=True, env=env, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    found: Found = {}
    for line in sorted(done.stdout.splitlines(), key=lambda line: str(json.loads(line)["rank"])):
        each = json.loads(line)
        found.setdefault(each["work"], []).append(each)
    return found


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 10)
def test_what_four_ranks_saved_two_load_and_one_and_all_fall_back_from_what_one_sees_damaged(tmp_path: Path) -> None:
    found = run(tmp_path / "place", "reshard")
    saved = found["save"][0]["state"]
    assert found["save"][0]["steps"] == [2, 3]
    assert [each["steps"][-1] for each in found["save"]] == [3] * 4  # rank 0 may still sweep step 1
    assert [each["state"] for each in found["save"]] == [saved] * 4
    for each in found["load"]:
        assert (each["step"], each["state"], each["again"], each["warned"]) == (3, saved, saved, [])
    assert [(each["step"], each["state"], each["whole"]) for each in found["alone"]] == [(3, saved, saved)]
    first, second = found["load_damaged"]
    assert first["step"] == second["step"] == 2
    assert first["state"] == second["state"] != saved
    assert first["warned"] == second["warned"]
    assert "rank-00003.bin" in first["warned"][0]
    manifest = CheckpointManager(tmp_path / "place").checkpoint(2)
    assert (manifest.kind, manifest.world_size, manifest.metadata) == ("sharded", 4, {"loss": 0.5})
    left = [path.name for path in (tmp_path / "place").glob("*.parts/*")]
    assert sorted(left) == sorted([part.name for part in manifest.parts] * 2), "more is there than two checkpoints"


@pytest.mark.timeout(LIMIT_S + 10)
def test_each_rank_gets_its_own_values_back_and_another_number_of_ranks_must_choose(tmp_path: Path) -> None:
    first, second = run(tmp_path, "own")["own"]
    for step in (1, 2, 3, 4):
        for each in (first, second):
            assert each[f"loaded {step}"] == each[f"saved {step}"]
        for key in ("rng", "rows", "array", "best", "list", "big"):
            assert (first[f"saved {step}"][key] == second[f"saved {step}"][key]) is (step in (1, 4)), key
    with CheckpointManager(tmp_path) as manager:
        assert manager.load_state(1, weights_only=False)["rows"] == 10
        whole = manager.load_state(3, weights_only=False)
        assert whole["rows"] == [10, 12]
        assert whole["best"][0] is None
        assert whole["best"][1].tolist() == [1.0, 1.0]
        assert [each.tolist() for each in whole["list"][0]] == [[0.0, 0.0], [2.0, 2.0]]
        assert whole["list"][1]["deep"] == [0, 2]
        assert whole["same"].tolist() == [0.0, 1.0, 2.0]
        state: dict[str, Any] = {"rows": 0, "same": torch.zeros(3), "list": [torch.zeros(2), {"deep": 0}]}
        for number in (None, 2):
            with pytest.raises(CheckpointError, match=r"the 2 ranks .* own list\.0, list\.1\.deep, rows; .*of_rank="):
                manager.load_state_into(state, 3, of_rank=number)
        assert manager.load_state_into(state, 3, of_rank=1) == 3
        assert (state["rows"], state["list"][0].tolist(), state["list"][1]["deep"]) == (12, [2.0, 2.0], 2)
        assert manager.load_state_into({"same": torch.zeros(3)}, 3) == 3


@pytest.mark.slow
def test_ranks_save_to_a_bucket_and_go_back(s3_environment: S3Server) -> None:
    place = f"s3://{s3_environment.make_bucket()}/run"
    found_by = run(place, "bucket")
    assert [(each["gone"], each["steps"]) for each in found_by["go_back"]] == [([2, 3], [1])] * 2
    with CheckpointManager(place, "s3") as manager:
        found = manager.load_state()
    assert {key: each.tolist() for key, each in found.items()} == {
        "same": [0.0, 1.0, 2.0],
        "own-0": [0, 0],
        "own-1": [1, 1],
    }


@pytest.mark.slow
def test_a_rank_that_dies_or_fails_leaves_the_checkpoint_before_and_the_others_know(tmp_path: Path) -> None:
    found = run(tmp_path / "place", "faults")
    assert {work: [each["rank"] for each in ranks] for work, ranks in found.items()} == {
        "kill_before_part": [0, 1],
        "kill_before_note": [0],
        "kill_before_index": [1],
        "kill_before_manifest": [1],
        "refuse_part": [0, 1],
        "disagree": [0, 1],
    }
    reasons = {
        "kill_before_part": "ranks .*2 did not write their parts",
        "kill_before_note": "ranks 1 did not write their parts within 1 s",
        "kill_before_index": "rank 0 did not write the manifest within 1 s",
        "kill_before_manifest": "rank 0 did not write the manifest within 1 s",
        "refuse_part": "OSError: there is no room",
    }
    for work, reason in reasons.items():
        for each in found[work]:
            assert each["steps"] == [3], work
            assert re.search(f"step 4 .*{reason}", each["error"]), each
    refused = tmp_path / "place-rank-00001.bin"
    assert not list(refused.glob("step-000004.*/*.bin")), "what is of no use takes room"
    with CheckpointManager(tmp_path / "place-index") as manager:  # the next incarnation goes on
        assert sorted(manager.load_state()) == ["own-0", "own-1", "same"]
        manager.save({"same": torch.ones(3)}, 4, sharded=True)
        assert manager.steps() == [3, 4]
    for each in found["disagree"]:
        assert "rank 0 0, rank 1 1" in each["steps"]
        assert "JSON" in each["metadata"]
        assert each["steps_saved"] == [1, 2, 3]
        assert each["sizes"] == [[2_400_008, 2_400_000, each["sizes"][0][2]]] * 2  # what all have is written once
        assert each["is_equal"]


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # of torch 2.14
def test_one_process_saves_and_loads_what_is_to_be_sharded(tmp_path: Path, compression: str | None) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    odd: dict[str, Any] = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "turned": torch.arange(6).view(2, 3).t(),
        "sparse": torch.eye(3).to_sparse(),
        "text": "text",
        "pairs": [(1, 2), {"deep": torch.ones(1)}],
    }
    with CheckpointManager(tmp_path, compression=compression) as manager:
        manager.save({"net": net, "optimizer": optimizer, "odd": odd}, 7, sharded=True)
        other = torch.nn.Linear(3, 2)
        another = torch.optim.AdamW(other.parameters(), lr=9.0)
        empty: dict[str, Any] = {
            key: torch.zeros_like(each) if isinstance(each, torch.Tensor) else None for key, each in odd.items()
        }
        empty["pairs"] = [None, {"deep": torch.zeros(1)}]
        empty["sparse"] = torch.zeros(3, 3)
        state = {"net": other, "optimizer": another, "odd": empty}
        assert manager.load_state_into(state) == 7
        assert torch.equal(other.weight, net.weight)
        assert another.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        assert torch.equal(another.state[other.bias]["exp_avg"], optimizer.state[net.bias]["exp_avg"])
        whole = manager.load_state()["odd"]
        for key in ("empty", "scalar", "bool", "complex", "turned"):
            assert torch.equal(empty[key], odd[key]), key
            assert torch.equal(whole[key], odd[key]), key
        assert torch.equal(empty["sparse"], torch.eye(3))
        assert empty["text"] == whole["text"] == "text"
        assert empty["pairs"][0] == whole["pairs"][0] == (1, 2)
        made = manager.materialize_checkpoint(7, tmp_path / "local")
        assert torch.load(made / "state.pt")["odd"]["text"] == "text"


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save({"a": torch.ones(2)}, 1, sharded=True)
        manager.save({"a": torch.ones(2), "n": 5}, 2)
        state: dict[str, Any] = {"a": torch.zeros(2), "n": 0}
        assert manager.load_state_into(state) == 2  # one that a rank saved by itself will do
        assert (state["a"].tolist(), state["n"]) == ([1.0, 1.0], 5)
        for wrong, words in (({"b": torch.ones(2)}, "Missing key.* b"), ({"a": torch.ones(3)}, "Size mismatch")):
            with pytest.raises(CheckpointError, match=f"step 1 does not fit .*{words}"):
                manager.load_state_into(wrong, 1)
        with pytest.raises(CheckpointError, match=r"kind 'sharded'.* load_state_into"):
            manager.load_bytes(1)
        manager.save({"a": torch.ones(2), "object": Path("x")}, 3, sharded=True)
        with pytest.raises(CheckpointError, match=r"(?s)torch cannot load 'object'.* weights_only=False"):
            manager.load_state(3)
        assert manager.load_state(3, weights_only=False)["object"] == Path("x")
    for bad in (0, 600.0):
        with pytest.raises(UsageError, match="rank_timeout"):
            CheckpointManager(tmp_path, rank_timeout=bad)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "index"])
def test_damage_anywhere_falls_back(tmp_path: Path, damage: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save({"a": torch.full((8,), float(step))}, step, sharded=True)
        manager.wait()
        (path,) = tmp_path.glob(f"step-000002.*.parts/{'index' if damage == 'index' else 'rank-00000.bin'}")
        do_damage(path, damage)
        state = {"a": torch.zeros(8)}
        with pytest.warns(CheckpointFallbackWarning, match="step 2 is damaged.*step 1 instead"):
            assert manager.load_state_into(state) == 1
        assert state["a"].tolist() == [1.0] * 8
        with pytest.raises(CheckpointCorruptError, match="step 2"):
            manager.load_state(2, exact=True)

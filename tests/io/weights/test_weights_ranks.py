"""Ranks agree over torch.distributed, whatever mesh their model lies on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    script = str(Path(__file__).parents[2] / "support/programs/weights_ranks.py")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "store")], capture_output=True, text=True, env=env, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = {each["ranks"][0][0]: each for each in map(json.loads, done.stdout.splitlines())}
    assert sorted(found) == [0, 1, 2, 3]
    everybody = [f"from {rank}" for rank in range(4)]
    for rank, each in found.items():
        half = [f"from {other}" for other in (rank % 2, rank % 2 + 2)]
        assert each["ranks"] == [[rank, 4], [rank, 4], [rank // 2, 2]]
        assert each["gathered"] == [everybody, everybody, half]
        assert each["shared"] == ["from 0", "from 0", half[0]]
        assert each["lead"] == f"by {rank % 2}"
        assert each["refused"] == "not newer"
        assert each["aliases"] == {"same": "w"}
        assert each["senders"] == [0, 0, 1]  # what is not sharded comes from rank 0; the rest is spread
        assert each["digests"] == 1
        assert each["whole"] == [True, True]
        assert each["classes"] == ["WholeGroup", "MeshGroup", "Alone"]
        assert each["loaded"] == [True, True]

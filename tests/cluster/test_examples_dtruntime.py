"""examples/dtruntime: a worker is killed in mid-epoch, and every sample of every epoch counts exactly once."""

import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "dtruntime"


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_worker_resumes_and_every_sample_counts_once(local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=2, devices=2)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "submit.py"), "--master", cluster.address],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every sample of every epoch was counted exactly once" in done.stdout
    assert "worker 3: killed in the middle of shard" in done.stdout + done.stderr
    assert "worker 3: resumed at step" in done.stdout + done.stderr
    incarnations = {worker.name: worker.incarnation for worker in cluster.status("dtruntime").workers}
    assert {name: incarnation for name, incarnation in incarnations.items() if incarnation} == {"trainer_4-3_1-0": 1}

    (run,) = (each.parent for each in (tmp_path / "out/dtruntime").glob("*/trained"))
    records = [json.loads(line) for file in (run / "trained").iterdir() for line in file.read_text().splitlines()]
    assert Counter((each["epoch"], sample) for each in records for sample in each["samples"]) == Counter(
        (epoch, sample) for epoch in range(6) for sample in range(4000)
    )
    back = [each for each in records if each["incarnation"] == 1]
    assert {each["worker"] for each in back} == {3}
    first, last = (
        [each["loss"] for each in records if each["epoch"] == epoch and each["worker"] == 3] for epoch in (0, 5)
    )
    assert max(last) < sum(first) / len(first), "it learns, across its death"


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([[0, 1, 2], [0, 1, 2]], []),
        ([[0, 1, 2], [0, 2]], ["epoch 1: 1 samples are missing"]),
        ([[0, 1, 2, 2, 7], [2, 1, 0]], ["epoch 0: 2 samples are there more than once, or are none of the dataset's"]),
        ([[0, 1, 2], [0, 1, 2], [0]], ["epoch 2 was not asked for"]),
        ([[], []], ["epoch 0: 3 samples are missing", "epoch 1: 3 samples are missing"]),
    ],
)
def test_the_check_sees_what_is_missing_and_what_is_double(samples: list[list[int]], said: list[str]) -> None:
    problems: Any = runpy.run_path(str(EXAMPLE / "exactly_once.py"))["problems"]
    records = [{"epoch": epoch, "samples": each} for epoch, each in enumerate(samples)]
    assert problems(records, range(3), epochs=2) == said

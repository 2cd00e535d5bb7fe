"""examples/rl learns, and goes on when a rollout worker is killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unified.errors import RefusedError
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(180)]

SUBMIT = Path(__file__).parents[2] / "examples" / "rl" / "submit.py"
Cluster = Callable[..., LocalCluster]


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SUBMIT), *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def mean(rewards: list[float]) -> float:
    return sum(rewards) / len(rewards)


def progress(cluster: LocalCluster) -> int:
    """Iterations that the trainer has reported; -1 before the job is there."""
    try:
        workers = cluster.status("rl").workers
    except RefusedError:
        return -1
    steps = [worker.progress.step for worker in workers if worker.progress and worker.progress.step is not None]
    return max(steps, default=0)


def test_rl_learns_though_a_rollout_is_killed(local_cluster: Cluster, tmp_path: Path) -> None:
    """Mean reward at least doubles; the killed worker gets the weights again; the answers do not depend on who dies."""
    cluster = local_cluster(nodes=1, devices=2)
    process = start(tmp_path, "--master", cluster.address, "--iterations", "50")
    try:
        eventually(lambda: progress(cluster) >= 5 or process.poll() is not None, timeout=60, message="no progress")
        pids = cluster.workers("rl")
        os.kill(next(pid for name, pid in pids.items() if name.startswith("ROLLOUT_2-1")), signal.SIGKILL)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    results = json.loads((tmp_path / "out/rl/rewards.json").read_text())
    rewards = results["rewards"]
    assert len(rewards) == 50
    assert mean(rewards[-10:]) >= 2 * mean(rewards[:10]), rewards
    assert "mean reward by iteration" in output
    assert (tmp_path / "out/rl/curve.svg").stat().st_size > 1000
    lives = {worker.name: worker.incarnation for worker in cluster.status("rl").workers}
    assert {name for name, incarnation in lives.items() if incarnation} == {"ROLLOUT_2-1_2-1"}, lives

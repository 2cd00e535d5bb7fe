"""The examples, as a user starts them: a script, a cluster, an exit code."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import pytest

from tests.cluster.conftest import Cluster
from unified.cli.main import main
from unified.client.cluster_client import connect
from unified.errors import RefusedError
from unified.protocol.client_master import Explain, Story
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
README = EXAMPLES.parent / "README.md"


@contextmanager
def started(example: str, cwd: Path, *arguments: str, master: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start an example's script, which is killed at the end."""
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / example / "submit.py"), *arguments],
        cwd=cwd,
        env=os.environ if master is None else {**os.environ, "UNIFIED_MASTER": master},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def count_lines(example: str) -> int:
    """Lines of the example's Python files that are not empty."""
    texts = [file.read_text() for file in (EXAMPLES / example).glob("*.py")]
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def kill(pids: dict[str, int], prefix: str) -> None:
    os.kill(next(pid for name, pid in pids.items() if name.startswith(prefix)), signal.SIGKILL)


@pytest.mark.slow
def test_actors_find_the_line(local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=2, devices=1)
    with started("actors", tmp_path, "--master", cluster.address, "--goal", "Hello") as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert "100%  Hello" in output


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("example", "num_lines", "printed"),
    [
        ("service", 20, r"6 words"),
        ("parameter_server", 40, r"\[worker-3\] worker 3 is done; the weights are \[ 2\.  -3\.   0\.5\]"),
    ],
)
def test_services_are_short_to_write(
    local_cluster: Cluster, tmp_path: Path, example: str, num_lines: int, printed: str
) -> None:
    assert count_lines(example) <= num_lines
    cluster = local_cluster(nodes=2, devices=1)
    with started(example, tmp_path, master=cluster.address) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert re.search(printed, output), output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_evaluator_scores_and_trainers_resume(local_cluster: Cluster, tmp_path: Path) -> None:
    """A rank and the evaluator are killed: each role starts again; a second submit goes on from the last checkpoint."""
    assert count_lines("evaluator") <= 60
    cluster = local_cluster(nodes=1, devices=2)
    saved = tmp_path / "out/evaluator"
    with started("evaluator", tmp_path, master=cluster.address) as process:
        eventually(
            lambda: any(saved.glob("step-*.json")) or process.poll() is not None, timeout=200, message="no checkpoint"
        )
        pids = cluster.workers("fit")
        kill(pids, "ELASTIC_2-1")
        kill(pids, "evaluator")
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert {worker.incarnation for worker in cluster.status("fit").workers} == {1}, output
    assert re.search(r"resumed at step (?!0)\d*[05]0\n", output), output
    scores = [float(score) for score in re.findall(r"step \d+: ([\d.]+) on held-out rows", output)]
    assert scores[-1] < 0.3 * scores[0], output
    with started("evaluator", tmp_path, "650", master=cluster.address) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "resumed at step 600\n" in output, output
    assert re.findall(r"step (\d+): [\d.]+ on held-out rows", output) == ["650"], output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grpo_learns_though_a_rollout_is_killed(local_cluster: Cluster, tmp_path: Path) -> None:
    assert count_lines("grpo") <= 70
    cluster = local_cluster(nodes=1, devices=2)
    with started("grpo", tmp_path, master=cluster.address) as process:
        eventually(lambda: progress(cluster, "grpo") >= 5 or process.poll() is not None, timeout=200)
        kill(cluster.workers("grpo"), "rollout_2-1")
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    rewards = [float(reward) for reward in re.findall(r"step \d+: mean reward ([\d.]+)", output)]
    assert len(rewards) == 6, output
    assert rewards[-1] > 0.9 > 0.5 > rewards[0], rewards
    incarnations = {worker.name.split("_")[0]: worker.incarnation for worker in cluster.status("grpo").workers}
    assert incarnations["trainer"] == 0, output
    assert incarnations["rollout"] == 1, output


def suspend_and_resume(cluster: LocalCluster, checkpoints: Path) -> int:
    """Suspend and resume the job; return the step that it has saved."""
    with connect(cluster.address) as client, client.job("nanogpt") as handle:
        handle.suspend("a new switch")
        eventually(lambda: handle.status().num_leaving == 0)
        assert handle.status().suspended == "a new switch"
        saved = max(int(file.stem.removeprefix("step-")) for file in checkpoints.glob("*/step-*.json"))
        handle.resume()
    return saved


def busy_node(cluster: LocalCluster) -> str:
    return cluster.status("nanogpt").workers[0].node


DISTURBANCES: dict[str, tuple[Callable[[LocalCluster, Path], object], str]] = {
    "a rank is killed": (lambda cluster, _: kill(cluster.workers("nanogpt"), "ELASTIC_2-1"), "SIGKILL"),
    "it is suspended": (suspend_and_resume, "suspended: a new switch"),
    "a node is drained": (
        lambda cluster, _: main(["drain", busy_node(cluster), "--master", cluster.address, "--reason", "a new disk"]),
        "which is drained: a new disk",
    ),
    "an agent is stopped": (
        lambda cluster, _: cluster.kill_agent(int(busy_node(cluster).removeprefix("node-")) - 1, signal.SIGTERM),
        "whose agent stops: SIGTERM",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", DISTURBANCES)
def test_nanogpt_goes_on_at_the_saved_step(how: str, local_cluster: Cluster, tmp_path: Path) -> None:
    """A new round goes on from the checkpoint, also in the data; only a failure is charged, or is a warning."""
    disturb, reason = DISTURBANCES[how]
    cluster = local_cluster(nodes=3, devices=1, env={"UNIFIED_CHANGE_S": "1"})  # its ranks leave no round by themselves
    checkpoints = tmp_path / "out/nanogpt/checkpoints"
    with started("nanogpt", tmp_path, "--master", cluster.address, "--steps", "60") as process:
        eventually(
            lambda: any(checkpoints.glob("*/step-*.json")) or process.poll() is not None,
            timeout=100,
            message="no checkpoint",
        )
        saved = disturb(cluster, checkpoints)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    status = cluster.status("nanogpt")
    assert [worker.incarnation for worker in status.workers] == [1, 1]
    assert bool(status.budgets) == (how == "a rank is killed")
    story = cluster.connection.ask(Explain(job="nanogpt"), Story).events
    assert any(reason in event.reason for event in story)
    if how != "a rank is killed":
        lines = [line for path in cluster.home.glob("*.log") for line in path.read_text().splitlines()]
        of_load = "event=master-silent"  # a busy host is slow for longer than the short times of these clusters
        assert [line for line in lines if " WARNING " in line and of_load not in line] == []
    resumed = re.search(r"resumed at step (?!0)(\d+)", output)
    assert resumed is not None, output
    if how == "it is suspended":
        assert int(resumed[1]) == saved
    results = json.loads((tmp_path / "out/nanogpt/metrics.json").read_text())
    assert (results["steps"], results["ranks"]) == (60, 2)
    assert [line["step"] for line in results["history"]] == list(range(0, 61, 3)), "one curve, whole"
    assert results["history"][-1]["val_loss"] < 0.7 * results["history"][0]["val_loss"]
    assert (tmp_path / "out/nanogpt/curve.png").stat().st_size > 1000
    assert (tmp_path / "out/nanogpt/sample.txt").read_text().startswith("def ")


def test_nanogpt_says_at_once_that_there_is_no_text(tmp_path: Path) -> None:
    with started("nanogpt", tmp_path, "--data", str(tmp_path)) as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "name another file or folder with --data" in output


@pytest.mark.slow
def test_nanogpt_without_restarts_names_the_limit(local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=2, devices=1)
    with started("nanogpt", tmp_path, "--master", cluster.address, "--max-restart", "0") as process:
        pids = eventually(
            lambda: process.poll() is not None or any_running(cluster), timeout=100, message="no rank was running"
        )
        assert isinstance(pids, dict), process.communicate()[0]
        kill(pids, "ELASTIC_2-1")
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 1, output
    assert all(word in output for word in ("max_restart", "ELASTIC_2-1_1-0", "SIGKILL")), output


@pytest.mark.smoke
def test_readme_as_it_is_typed(local_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's files and commands as they stand: the ways to start a job, and those to look at it."""
    text, project = README.read_text(), tmp_path / "project"
    blocks = re.findall(r"^```python[^\n]*\n# (\w+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["linear.py", "submit.py"]
    script = "import torch.distributed as dist\ndist.init_process_group()\nprint(dist.get_world_size(), 'ranks')\n"
    script += "dist.barrier()\ndist.destroy_process_group()\n"  # one that ends at once breaks one that connects
    project.mkdir()
    for name, content in [*blocks, ("my_script.py", script)]:
        (project / name).write_text(content)
    submit, ship = re.findall(r"^UNIFIED_MASTER=\S+ (.*submit\.py)\b", text, re.MULTILINE)
    assert "--ship" in ship
    (run,) = re.findall(r"`(unified run [^`]*my_script\.py)`", text)
    (words,) = re.findall(r"unified (\w+(?: / \w+)+)", text)
    cluster = local_cluster(nodes=2, devices=2)
    monkeypatch.setenv("UNIFIED_MASTER", cluster.address)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # as `activate` does
    for command in [submit, *(f"unified {word} linear" for word in words.split(" / ")), run, ship]:
        done = subprocess.run(
            ["bash", "-c", command], cwd=project, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    statuses = [cluster.status(job.job_id) for job in cluster.jobs]
    reported = [{worker.progress and worker.progress.step for worker in each.workers} for each in statuses]
    assert reported == [{200}, {None}, {200}]
    assert (cluster.home / "code").exists()


def any_running(cluster: LocalCluster) -> dict[str, int]:
    """Pids by worker, once all of the job's workers run; empty before."""
    try:
        status = cluster.status("nanogpt")
    except RefusedError:  # not submitted yet
        return {}
    return {worker.name: worker.pid for worker in status.workers} if status.stage == "RUNNING" else {}


def progress(cluster: LocalCluster, job: str) -> int:
    """Steps that a worker of the job has reported; -1 before the job is there."""
    try:
        workers = cluster.status(job).workers
    except RefusedError:
        return -1
    steps = [worker.progress.step for worker in workers if worker.progress and worker.progress.step is not None]
    return max(steps, default=0)


@pytest.mark.slow
def test_rl_learns_though_a_rollout_is_killed(local_cluster: Cluster, tmp_path: Path) -> None:
    """Mean reward at least doubles; the killed worker gets the weights again; the answers do not depend on who dies."""
    cluster = local_cluster(nodes=1, devices=2)

    with started("rl", tmp_path, "--master", cluster.address, "--iterations", "50") as process:
        eventually(
            lambda: progress(cluster, "rl") >= 5 or process.poll() is not None, timeout=100, message="no progress"
        )
        kill(cluster.workers("rl"), "ROLLOUT_2-1")
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    results = json.loads((tmp_path / "out/rl/rewards.json").read_text())
    rewards = results["rewards"]
    assert len(rewards) == 50
    assert mean(rewards[-10:]) >= 2 * mean(rewards[:10]), rewards
    assert "mean reward by iteration" in output
    assert (tmp_path / "out/rl/curve.svg").stat().st_size > 1000
    incarnations = {worker.name: worker.incarnation for worker in cluster.status("rl").workers}
    assert {name for name, incarnation in incarnations.items() if incarnation} == {"ROLLOUT_2-1_2-1"}, incarnations


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("arguments", [[], ["--sharded"]], ids=["replicated", "sharded"])
def test_elastic_says_what_each_kill_cost(tmp_path: Path, arguments: list[str]) -> None:
    with started("elastic", tmp_path, "--kill", *arguments) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    found = re.findall(r"^(rank 1|ranks 0 and 2|the node of rank 3) +[\d.]+ s +(\d+) +(\d) of 4$", output, re.MULTILINE)
    assert [(what, int(kept)) for what, _, kept in found] == [
        ("rank 1", 3),
        ("ranks 0 and 2", 2),
        ("the node of rank 3", 2),
    ]
    assert all(int(again) <= 1 for _, again, _ in found), output

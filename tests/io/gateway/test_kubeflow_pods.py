"""The pods of a manifest as processes of this host: what Kubernetes would start is started, with torchrun and the meta
framework for real, and with the variables that the operator would give. Images, cgroups and names of hosts are not.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.deadlines import met
from tests.support.ports import unused_port
from unified_gateway.kubernetes import manifest
from unified_gateway.kubernetes.conditions import record_of, with_pods
from unified_gateway.kubernetes.manifest import KubeflowOptions, pytorch_job
from unified_gateway.plan import plan_run
from unified_gateway.schemas import TrainingRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

DEADLINE_S = met(200.0)
MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
STEPS = 6
SMALL = {"save_steps": 2, "batch_size": 2, "max_seq_len": 16}


def expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(
        r"\$(\$|\(([^)]*)\))", lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]), text
    )


class Pods:
    """Processes of a `PyTorchJob`, one for each pod."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        port = unused_port()
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        replicas = job["spec"]["pytorchReplicaSpecs"]
        total = sum(replica["replicas"] for replica in replicas.values())
        for number in range(total):
            (container,) = replicas["Master" if number == 0 else "Worker"]["template"]["spec"]["containers"]
            variables = {each["name"]: expanded(each.get("value", ""), {}) for each in container["env"]}
            variables |= {"POD_IP": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            variables |= {"WORLD_SIZE": str(total), "RANK": str(number), "PYTHONUNBUFFERED": "1"}
            command = [expanded(each, variables) for each in [*container["command"], *container["args"]]]
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            env = {**variables, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
            with (folder / f"pod-{number}.log").open("ab") as log:
                process = subprocess.Popen(
                    command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
                )
            self.processes.append(process)

    def wait(self) -> list[int]:
        return [process.wait(DEADLINE_S) for process in self.processes]

    def kill(self) -> None:
        """Kill launchers first, so that no rank is started again, then the ranks, which have groups of their own."""
        ranks = [rank for process in self.processes if process.poll() is None for rank in ranks_of(process.pid)]
        for process in self.processes:
            process.kill()
            process.wait()
        for rank in ranks:
            if Path(f"/proc/{rank}").exists():
                os.kill(rank, signal.SIGKILL)

    def wait_for_step(self, step: int) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            found = steps(self.folder)
            if found and int(found[-1][5:11]) >= step:
                return int(found[-1][5:11])
            assert all(process.poll() is None for process in self.processes), logs(self.folder)
            time.sleep(0.1)
        raise AssertionError(f"no step {step}; there are {steps(self.folder)}\n{logs(self.folder)}")


def ranks_of(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def job(folder: Path, attempt: str, **changes: Any) -> dict[str, Any]:
    payload = {
        "framework": "meta",
        "model_id": f"config:{json.dumps(MODEL)}",
        "run_id": "run-1",
        "num_nodes": 2,
        "checkpoint_base_uri": f"file://{folder}/runs",
        "dataset_uri": f"{folder}/data.jsonl",
        "extra_args": {**SMALL, "max_steps": STEPS},
        "image": "none",
        **changes,
    }
    request = TrainingRequest.model_validate(payload)
    plan = plan_run(request, attempt_id=attempt, salt="s", namespace="default")
    return pytorch_job(plan, "default", KubeflowOptions())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text("".join(f'{{"text": "row {number} of {{}}"}}\n' for number in range(64)))
    return tmp_path


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs/run-1/framework=meta/checkpoints").glob("step-*.json"))


def config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "runs/run-1/framework=meta/config/run.json").read_text()))


def logs(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("pod-*.log")))


def test_two_pods_train_and_a_resume_goes_on_from_their_checkpoint(data: Path) -> None:
    pods = Pods(job(data, "a1"), data)
    try:
        assert pods.wait() == [0, 0], logs(data)
    finally:
        pods.kill()
    assert steps(data) == ["step-000002.json", "step-000004.json", "step-000006.json"]
    pods = Pods(job(data, "a2", resume_from_checkpoint=True, extra_args={**SMALL, "max_steps": STEPS + 2}), data)
    try:
        assert pods.wait() == [0, 0], logs(data)
    finally:
        pods.kill()
    assert steps(data)[-1] == "step-000008.json"
    assert (config(data)["resumed_from_step"], config(data)["attempt_id"]) == (STEPS, "a2")


def test_ranks_of_both_pods_begin_anew_when_one_dies(data: Path) -> None:
    """torchrun starts them again, in both pods, and they go on from the last checkpoint of the same attempt."""
    long = {**SMALL, "max_steps": 2000, "save_steps": 10, "save_total_limit": 3}
    pods = Pods(job(data, "a1", extra_args=long), data)
    try:
        before = pods.wait_for_step(1)
        os.kill(ranks_of(pods.processes[1].pid)[0], signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while config(data)["resumed_from_step"] is None and time.monotonic() < deadline:
            time.sleep(0.1)
        resumed_from = config(data)["resumed_from_step"]
        assert resumed_from is not None, logs(data)
        assert resumed_from >= before
        pods.wait_for_step(resumed_from + 10)
    finally:
        pods.kill()


def test_the_reason_of_a_failure_is_found_in_what_a_pod_prints(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_RESTARTS", 0)
    (data / "data.jsonl").write_text('{"text": "a"}\n{"words": "b"}\n' * 32)
    pods = Pods(job(data, "a1", num_nodes=1), data)
    try:
        (code,) = pods.wait()
    finally:
        pods.kill()
    metadata = {"name": "x", "namespace": "default", "uid": "u"}
    failed = {"metadata": metadata, "status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    ended = {"terminated": {"exitCode": code, "reason": "Error", "message": logs(data)[-2048:]}}
    pod = {"metadata": metadata, "status": {"containerStatuses": [{"name": "pytorch", "state": ended}]}}
    run = with_pods(record_of(failed, now=0), [pod], logs(data))
    assert re.fullmatch(r".*: unified-train: line 2 of .*/data\.jsonl has no field 'text'.*", run.detail), logs(data)


def test_pods_that_are_told_to_end_save_a_checkpoint_first(data: Path) -> None:
    """SIGTERM reaches the launchers alone, as it does when Kubernetes removes pods; they pass it on."""
    pods = Pods(job(data, "a1", extra_args={**SMALL, "max_steps": 100_000, "save_steps": 1000}), data)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while "step 10/" not in logs(data) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in pods.processes:
            process.terminate()
        began = time.monotonic()
        assert all(code != 0 for code in pods.wait()), logs(data)
        assert time.monotonic() - began < manifest.STOP_GRACE_S
    finally:
        pods.kill()
    assert len(steps(data)) == 1, logs(data)

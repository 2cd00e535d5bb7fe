"""State of a run, from what Kubernetes says of its object and its pods."""

from typing import Any

import pytest

from unified_gateway.kubernetes.conditions import event_of, incarnation_of, record_of, with_pods

CREATED = 1767225600.0  # 2026-01-01
TORCHRUN_END = """
E0101 failed (exitcode: 1) local_rank: 0 (pid: 12) of binary: /usr/bin/python3
Traceback (most recent call last):
  File "/usr/local/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
unified.training FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 12)
============================================================
"""


def job(*conditions: tuple[str, str], **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "train-x",
            "namespace": "default",
            "uid": "u1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"unified/kind": "training", "unified/run-id": "x", "unified/framework": "hf", "team": "a"},
            **metadata,
        },
        "status": {
            "conditions": [
                {
                    "type": name,
                    "status": status,
                    "message": f"PyTorchJob train-x is {name}.",
                    "lastTransitionTime": f"2026-01-01T00:00:{number:02}Z",
                }
                for number, (name, status) in enumerate(conditions, 1)
            ]
        },
    }


def pod(kind: str = "master", index: int = 0, *, restarts: int = 0, **status: Any) -> dict[str, Any]:
    labels = {"training.kubeflow.org/replica-type": kind, "training.kubeflow.org/replica-index": str(index)}
    return {
        "metadata": {"name": f"train-x-{kind}-{index}", "uid": f"{kind}-{index}", "labels": labels},
        "status": {"containerStatuses": [{"name": "pytorch", "restartCount": restarts, **status}]},
    }


def ended(message: str | None, code: int = 1, at: int = 5, reason: str = "Error") -> dict[str, Any]:
    time = f"2026-01-01T00:00:{at:02}Z"
    return {"state": {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": time}}}


@pytest.mark.parametrize(
    ("conditions", "status", "detail"),
    [
        ([], "submitted", ""),
        ([("Created", "True")], "submitted", ""),
        ([("Created", "True"), ("Running", "True")], "running", ""),
        ([("Created", "True"), ("Running", "False"), ("Restarting", "True")], "running", "is Restarting."),
        ([("Created", "True"), ("Restarting", "False"), ("Running", "True")], "running", ""),
        ([("Created", "True"), ("Suspended", "True")], "submitted", "is Suspended."),
        ([("Created", "True"), ("Running", "False"), ("Succeeded", "True")], "succeeded", ""),
        ([("Created", "True"), ("Running", "False"), ("Failed", "True")], "failed", "is Failed."),
        ([("Created", "True"), ("Running", "True"), ("Failed", "True")], "failed", "is Failed."),
    ],
)
def test_conditions_make_the_status(conditions: list[tuple[str, str]], status: str, detail: str) -> None:
    run = record_of(job(*conditions), now=CREATED)
    assert (run.status, run.detail) == (status, f"PyTorchJob train-x {detail}" if detail else "")
    assert (run.run_id, run.framework, run.labels, run.job_id) == ("x", "hf", {"team": "a"}, "u1")
    times = [number for number, (name, _) in enumerate(conditions, 1) if name == "Running"]
    assert run.submitted_at == CREATED
    assert run.started_at == (CREATED + times[0] if times else None)
    assert run.ended_at == (CREATED + len(conditions) if run.is_ended else None)
    assert run.exit_code == (0 if status == "succeeded" else None)


def test_an_object_that_no_operator_takes_up_says_so() -> None:
    assert "operator" not in record_of(job(), now=CREATED + 10).detail
    assert "is the Kubeflow Training Operator running?" in record_of(job(), now=CREATED + 60).detail
    assert record_of({"metadata": job()["metadata"]}, now=CREATED).status == "submitted"


def test_one_that_is_being_deleted_is_being_stopped() -> None:
    going = job(("Running", "True"), deletionTimestamp="2026-01-01T00:01:00Z")
    assert record_of(going, now=CREATED).detail == "it is being stopped"
    over = job(("Succeeded", "True"), deletionTimestamp="2026-01-01T00:01:00Z")
    assert record_of(over, now=CREATED).status == "succeeded"


def test_an_object_of_somebody_else_is_no_run() -> None:
    assert record_of(job(labels={"unified/run-id": "x"}), now=CREATED).run_id == ""
    assert record_of(job(labels=None), now=CREATED).run_id == ""


def test_a_run_id_that_is_too_long_for_a_label_is_read_from_the_annotation() -> None:
    labels = {"unified/kind": "training", "unified/run-id": "xx-12345678"}
    found = record_of(job(labels=labels, annotations={"unified/run-id": "x" * 90}), now=CREATED)
    assert found.run_id == "x" * 90


FAILED = record_of(job(("Failed", "True")), now=CREATED)


@pytest.mark.parametrize(
    ("message", "code", "reason", "detail"),
    [
        (f"unified-train: no field 'text' in a.jsonl:3\n{TORCHRUN_END}", 1, "Error", "no field 'text' in a.jsonl:3"),
        (f"unified-train: run x ranks=2\n[rank0]: ValueError: bad\n{TORCHRUN_END}", 1, "Error", "ValueError: bad"),
        ("KeyError: first\nunified-train: run x ranks=2\ntorch.OutOfMemoryError: b", 1, "Error", "OutOfMemoryError: b"),
        ("one\nlast words\n", 1, "Error", "last words (exit code 1)"),
        (None, 137, "OOMKilled", "it ended with OOMKilled, exit code 137"),
        ("", 1, "Error", "it ended with exit code 1"),
    ],
)
def test_the_reason_of_a_failure_is_in_the_pod(message: str | None, code: int, reason: str, detail: str) -> None:
    run = with_pods(FAILED, [pod(**ended(message, code, reason=reason))])
    assert run.detail.removeprefix("master-0: ").removeprefix("unified-train: ") == detail
    assert run.exit_code == code


def test_the_first_pod_that_failed_says_why() -> None:
    pods = [
        pod(**ended("unified-train: connection closed by peer", at=9)),
        pod("worker", 0, **ended(None, code=0, at=1)),
        pod("worker", 1, restarts=2, **ended("unified-train: CUDA out of memory", at=7)),
    ]
    run = with_pods(FAILED, pods)
    assert run.detail == "worker-1: unified-train: CUDA out of memory"
    assert run.num_restarts == 2
    assert with_pods(FAILED, []) == FAILED
    log = f"unified-train: run x\nunified-train: no such bucket\n{TORCHRUN_END * 20}"
    assert with_pods(FAILED, pods, log).detail == "worker-1: unified-train: no such bucket"


def test_what_a_run_waits_for_is_in_its_pods() -> None:
    waiting = record_of(job(("Created", "True")), now=CREATED)
    unplaced = pod()
    unplaced["status"] = {
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient nvidia.com/gpu"}]
    }
    assert with_pods(waiting, [unplaced]).detail == "master-0: 0/3 nodes: Insufficient nvidia.com/gpu"
    assert incarnation_of(unplaced) is None
    pulling = pod(state={"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image\n x:1"}})
    assert with_pods(waiting, [pulling]).detail == "master-0: ImagePullBackOff: Back-off pulling image x:1"
    starting = pod(state={"waiting": {"reason": "ContainerCreating"}})
    assert with_pods(waiting, [starting]).detail == ""


def test_an_event_names_its_pod() -> None:
    event = {
        "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"},
        "involvedObject": {"name": "train-x-worker-3"},
        "reason": "Evicted",
        "message": "The node was low\non memory",
        "lastTimestamp": None,
        "eventTime": "2026-01-01T00:00:02.500000Z",
        "source": {"host": "gpu-7"},
    }
    found = event_of(event, "train-x")
    assert (found.at, found.event, found.worker, found.node) == (CREATED + 2.5, "Evicted", "worker-3", "gpu-7")
    assert found.reason == "The node was low on memory"
    assert event_of({**event, "involvedObject": {"name": "train-x"}}, "train-x").worker == ""

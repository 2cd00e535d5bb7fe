"""The builder's code in reference documents 1 and 2 builds, import prefix changed and placeholders filled in."""

from __future__ import annotations

import argparse

from omegaconf import DictConfig

from unified.api.builder import DLJobBuilder


def test_document_1_first_example() -> None:
    dl_job = (
        DLJobBuilder().dl_type("SFT").node_num(1).device_per_node(4).config({"k1": "v1"}).trainer("xxx", "xxx").build()
    )
    assert dl_job.get_workload("TRAINER").entry_point == "xxx.xxx"


def test_document_2_single_role() -> None:
    args = argparse.Namespace(data_dir="data/nanogpt/", batch_size=16)
    job = (
        DLJobBuilder()
        .config(DictConfig(args.__dict__))
        .node_num(2)
        .device_per_node(2)
        .device_type("CPU")
        .train("examples.unified.elastic.nanogpt.train.run")
        .nnodes(2)
        .nproc_per_node(2)
        .end()
        .build()
    )
    assert job.config.batch_size == 16
    assert job.get_workload("ELASTIC").total == 4


def test_document_2_single_role_by_command() -> None:
    cmd = (
        "dlrover-run --nnodes=1 --nproc_per_node=1 "
        "/root/dlrover/python/unified/tests/integration_test/dummy_run.py --test 0"
    )
    job = DLJobBuilder().by_dlrover_run_cmd(cmd).build()
    assert job.get_workload("ELASTIC").entry_point.endswith("dummy_run.py --test 0")


def test_document_2_outline() -> None:
    job = (
        DLJobBuilder()
        .node_num(2)
        .device_per_node(4)
        .device_type("GPU")
        .config({})
        .global_env({"DLROVER_LOG_LEVEL": "INFO"})
        .role("one")
        .run("m.one")
        .resource({"cpu": 1})
        .total(2)
        .role("two")
        .run("m.two")
        .workload("three", "m.three")
        .build()
    )
    assert {role: workload.total for role, workload in job.workloads.items()} == {"one": 2, "two": 1, "three": 1}


def test_document_2_reinforcement_learning() -> None:
    args = {"lr": 1e-4}
    job = (
        DLJobBuilder()
        .config(DictConfig(args))
        .role("trainer")
        .train("module.trainer.run")
        .total(2)
        .resource(gpu=1)
        .end()
        .role("rollout")
        .run("module.rollout.run")
        .total(4)
        .resource(cpu=4)
        .end()
        .workload("reward", "module.reward.run")
        .total(1)
        .resource(cpu=2)
        .end()
        .build()
    )
    assert {role: workload.backend for role, workload in job.workloads.items()} == {
        "trainer": "elastic",
        "rollout": "simple",
        "reward": "simple",
    }
    assert job.get_workload("rollout").resource.cpu == 4

"""The node check of real jobs: a node at fault is excluded and replaced, whatever is wrong with it."""

import json
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJob, DLJobBuilder
from unified.cli.main import main
from unified.client.handle import JobHandle
from unified.protocol.client_master import Explain, Story

pytestmark = pytest.mark.processes

RANKS = """
import os, time
import torch
import torch.distributed as dist
from unified import current_worker
from unified.rounds import node_check

fault = current_worker().job_info.user_config["fault"]
on_node = os.environ["UNIFIED_NODE"]
node_check.LINK_WITHIN_S = 3.0
node_check.DEVICE_WITHIN_S = 5.0

def raise_error(*_):
    raise RuntimeError("NIC on fire")

if fault == "link" and on_node == "node-2":
    node_check.measure_link = raise_error
if fault == "device" and on_node == "node-2":
    node_check.measure_device = lambda name: node_check.DeviceMeasure(node=0, error="ECC error")
if fault == "silent" and on_node == "node-2":
    node_check.measure_device = lambda name: time.sleep(600)
if fault == "slow":  # no device is measured: a busy machine would make node-1 slow, too
    matmul_s = 7.0 if on_node == "node-2" else 0.01
    node_check.measure_device = lambda name: node_check.DeviceMeasure(node=0, matmul_s=matmul_s, copy_s=0.001)

def run():
    value = torch.ones(1)
    dist.all_reduce(value)
    print("sum", value.item(), on_node, flush=True)
"""


def job(fault: str, nodes: int, *, skip: bool = False) -> DLJob:
    builder: Any = DLJobBuilder().node_num(nodes).device_per_node(1).device_type("CPU").config({"fault": fault})
    if skip:
        builder = builder.skip_node_check()
    builder.role("trainer").train("ranks.run").total(nodes).per_group(1)
    built: DLJob = builder.build()
    return built


def story(handle: JobHandle) -> dict[str, str]:
    events = handle.connection.ask(Explain(job=handle.job_id), Story).events
    return {event.event: event.reason for event in events}


def nodes_used(handle: JobHandle) -> set[str]:
    return {line.split()[-1] for line in handle.logs() if "sum" in line}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("link", "NIC on fire"),
        ("device", "ECC error"),
        ("silent", "in time"),
    ],
)
def test_a_node_at_fault_is_replaced(
    local_cluster: Cluster, project: Project, capsys: pytest.CaptureFixture[str], fault: str, why: str
) -> None:
    project(ranks=RANKS)
    cluster = local_cluster(nodes=4, devices=1)
    handle = cluster.submit(job(fault, 3), "checked", stop_grace_s=1)
    assert handle.wait(timeout=200) == 0, handle.status().end
    told = story(handle)
    if "node-excluded" in told:  # the three nodes that were chosen may be the good ones
        assert "node node-2 is excluded" in told["node-excluded"]
        assert why in told["node-excluded"]
        assert handle.status().num_restarts == 1
    assert nodes_used(handle) == {"node-1", "node-3", "node-4"}
    assert main(["nodes", "--master", cluster.address, "--json"]) == 0
    checks = {node["node"]: node["check"] for node in json.loads(capsys.readouterr().out)}
    assert checks["node-2"] in ("failed", "")
    assert checks["node-1"].startswith("ok: matmul ")


@pytest.mark.slow
def test_a_slow_node_is_reported_and_kept(local_cluster: Cluster, project: Project) -> None:
    project(ranks=RANKS)
    handle = local_cluster(nodes=2, devices=1).submit(job("slow", 2), "slow")
    assert handle.wait(timeout=200) == 0, handle.status().end
    events = handle.connection.ask(Explain(job=handle.job_id), Story).events
    assert any("node node-2 is slow: matmul " in each.reason for each in events if each.event == "node-slow")
    assert nodes_used(handle) == {"node-1", "node-2"}
    assert handle.status().num_restarts == 0


@pytest.mark.slow
def test_one_may_do_without(local_cluster: Cluster, project: Project) -> None:
    project(ranks=RANKS)
    handle = local_cluster(nodes=2, devices=1).submit(job("device", 2, skip=True), "unchecked")
    assert handle.wait(timeout=200) == 0, handle.status().end
    assert nodes_used(handle) == {"node-1", "node-2"}

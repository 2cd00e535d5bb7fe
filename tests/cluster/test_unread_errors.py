"""Calls that fail without anybody reading the error are told by the job's last words."""

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.client.report import end_lines

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

PROGRAM = """
from unified import RoleGroup, rpc

class Rollout:
    @rpc()
    def load_weights(self, version):
        pass

def train():
    for version in range(400):
        RoleGroup("rollout")[0].call("load_wieghts", version)
"""


def test_misspelt_calls_that_nobody_waits_for_are_logged_and_counted(local_cluster: Cluster, project: Project) -> None:
    project(misspelt=PROGRAM)
    builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU")
    builder.workload("trainer", "misspelt.train").resource(cpu=0.1)
    builder.workload("rollout", "misspelt.Rollout").resource(cpu=0.1).not_driver()
    handle = local_cluster(nodes=1, devices=2).submit(builder.build(), "misspelt")
    assert handle.wait(timeout=200) == 0
    status = handle.status()
    assert {worker.role: worker.num_unread_errors for worker in status.workers} == {"trainer": 400, "rollout": 0}
    assert end_lines(status)[1:] == [
        "  rpc      400 calls failed and nobody read the error: see the stderr of trainer-0 (400)"
    ]
    printed = "\n".join(handle.logs())
    assert printed.count("event=rpc-error-unread") == 1
    assert printed.count("event=rpc-handler-failed") == 1
    assert "has no rpc method 'load_wieghts'. Did you mean 'load_weights'?" in printed

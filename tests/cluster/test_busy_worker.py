"""A worker whose main thread is in a loop in pure Python, and answers calls all the same."""

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

SERVICE = """
import sys
from unified import rpc

class Busy:
    rounds = 0

    def run(self):
        while True:
            self.rounds += 1

    @rpc()
    def get_rounds(self):
        return self.rounds

    @rpc()
    async def get_rounds_async(self):
        return self.rounds

    @rpc(inline=True)
    def get_switch_interval(self):
        return sys.getswitchinterval()
"""

DRIVER = """
from unified import RoleGroup

def run():
    busy = RoleGroup("busy")[0]
    for method in ("get_rounds", "get_rounds_async"):
        seen = [busy.call(method).result() for _ in range(50)]
        assert seen == sorted(seen) and seen[0] < seen[-1], f"its main thread does not compute: {seen}"
    assert busy.call("get_switch_interval").result() == 0.001, "docs/bus-tuning.md says 1 ms"
"""


@pytest.mark.slow
def test_calls_are_answered_while_the_main_thread_computes(local_cluster: Cluster, project: Project) -> None:
    project(service=SERVICE, driver=DRIVER)
    builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU")
    builder.workload("driver", "driver.run").resource(cpu=0.1)
    builder.workload("busy", "service.Busy").resource(cpu=0.1).not_driver()
    handle = local_cluster(nodes=1, devices=2).submit(builder.build(), "busy", call_timeout_s=100, stop_grace_s=1)
    assert handle.wait(timeout=200) == 0, handle.status().end

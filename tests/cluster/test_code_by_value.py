"""Lambdas, local classes and what the driver's script defines, as arguments, results, queue items and configuration."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("without_torch")]

DRIVER = '''
from unified import DataQueue, RoleGroup, current_worker, rpc
from unified.api.builder import DLJobBuilder

class Config:
    """Of the script that submits, which workers import under its own name."""
    def __init__(self, reward):
        self.reward = reward

class Rollout:
    @rpc()
    def apply(self, function, value):
        return function(value)

    @rpc()
    def adder(self, number):
        return lambda value: value + number

    @rpc()
    def take(self):
        return DataQueue("functions").get(1)[0]()

def train():
    config = current_worker().job_info.user_config
    assert type(config) is Config, type(config).__module__
    assert config.reward(2) == 6
    rollout = RoleGroup("rollout")[0]
    factor = 3

    class Local:
        label = "local"

    assert rollout.call("apply", lambda value: value * factor, 5).result() == 15
    assert rollout.call("apply", lambda value: value.label + type(value).__name__, Local()).result() == "localLocal"
    assert type(rollout.call("apply", lambda value: value, Local()).result()) is Local  # there and back
    assert rollout.call("adder", 10).result()(1) == 11
    DataQueue("functions", is_master=True, size=4).put(lambda: factor)
    assert rollout.call("take").result() == 3

if __name__ == "__main__":
    builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU").config(Config(lambda value: 3 * value))
    builder.workload("trainer", "driver_of_test.train").resource(cpu=0.1)
    builder.workload("rollout", "driver_of_test.Rollout").resource(cpu=0.1).not_driver()
    raise SystemExit(builder.build().submit("by-value"))
'''


def test_code_goes_by_value_where_it_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "driver_of_test.py").write_text(DRIVER)
    ran = subprocess.run(
        [sys.executable, "driver_of_test.py"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

"""Lambdas, local classes and what the driver's script defines, as arguments, results, queue items and configuration."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

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


OBJECTS = '''
import asyncio, functools, sys
from dataclasses import dataclass

import unified
from unified import DLJobBuilder, RoleGroup, rpc

@dataclass
class Config:
    factor: int

@rpc
def top():
    return "top"

def mark(cls):
    cls.is_marked = True
    return cls

@mark
class Judge:
    """A class with @rpc methods alone, which takes the job's config."""
    def __init__(self, config):
        self.config = config

    @rpc()
    def score(self, value: Config):
        assert type(value) is type(self.config) is Config and self.is_marked
        return value.factor * self.config.factor

class Outer:
    class Inner:
        def run(self):
            print("inner", flush=True)

class Counter:
    def __init__(self, number):
        self.number = number

    def show(self):
        print("bound", self.number, flush=True)

def train(config):
    assert __name__ == "__main__"
    print("score", RoleGroup("judge")[0].call(Judge.score, Config(2)).result(), flush=True)
    print(RoleGroup("trainer")[0].call("top").result(), flush=True)

def closure(number):
    def show():
        print("closure", number, flush=True)
    return show

def other():
    print("text", flush=True)

def build(entries):
    builder = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").config(Config(3))
    for role, entry in entries.items():
        builder.workload(role, entry).resource(cpu=0.1)
    return builder.build()

ROLES = {
    "trainer": train, "judge": Judge, "inner": Outer.Inner, "lambda": lambda: print("lambda", flush=True),
    "partial": functools.partial(print, "partial", flush=True), "bound": Counter(4).show, "closure": closure(9),
    "text": "__main__.other",
}

def ran(entries):
    with build(entries).submit("objects", blocking=False) as handle:
        assert handle.wait(timeout=200) == 0, handle.status()
        return sorted(line.partition("] ")[2] for line in handle.logs())

async def main():
    """A loop runs all the time, as in a notebook."""
    with unified.local_cluster(devices=1) as cluster:
        all_of_them = ["bound 4", "closure 9", "inner", "lambda", "partial", "score 6", "text", "top"]
        found = ran(ROLES)
        assert found == all_of_them, found
        exec("def other(): print('changed', flush=True)", globals())
        assert ran({"text": other}) == ["changed"]
    assert cluster.left_behind == []

if __name__ == "__main__":
    asyncio.run(main())
'''

FILE = """
from dataclasses import dataclass
from unified import DLJobBuilder

@dataclass
class Config:
    text: str

def helper():
    return "of the file"

def train(config):
    assert type(config) is Config
    print(helper(), config.text, flush=True)

def build():
    return DLJobBuilder().node_num(1).device_type("CPU").config(Config("so")).role("a").run(train).resource(cpu=0.1)
"""


def test_code_goes_by_value_where_it_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "driver_of_test.py").write_text(DRIVER)
    run(tmp_path, "driver_of_test.py")


def test_functions_and_classes_are_entry_points(tmp_path: Path) -> None:
    (tmp_path / "objects.py").write_text(OBJECTS)
    run(tmp_path, "objects.py")


def test_functions_of_a_file_that_is_submitted_are_entry_points(tmp_path: Path) -> None:
    (tmp_path / "described.py").write_text(FILE)
    assert "of the file so\n" in run(tmp_path, "-m", "unified", "submit", "described.py")


def test_a_function_that_was_typed_is_an_entry_point(tmp_path: Path) -> None:
    typed = "from unified import DLJobBuilder\ndef say(): print('typed', flush=True)\n\n"
    typed += "DLJobBuilder().device_type('CPU').role('a').run(say).build().submit('typed')\n"
    assert "typed\n" in run(tmp_path, "-i", typed=typed)


def run(folder: Path, *arguments: str, typed: str = "") -> str:
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=folder, input=typed, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout

"""What `import unified` and building a job load, and the names that are there."""

import subprocess
import sys

import pytest

import unified
import unified.api.builder
import unified.job

BUILD = """
import sys
from unified.api.builder import DLJobBuilder, RLJobBuilder
from unified.job.options import submit_options
from unified.job.to_spec import to_spec
job = DLJobBuilder().config({"a": 1}).train("m.f").role("r").run("m.g").with_collocation_all().build()
to_spec(submit_options(job, {}, {}))
RLJobBuilder().trainer("m.t").actor("m.a").build()
"""
RUN = """
import os
from unified.api.builder import DLJobBuilder
from unified.api.builder.launcher import describe
from unified.api.builder.torchrun import table_parser
parser, builder = table_parser("torchrun", os.environ, None), DLJobBuilder()
describe(builder, parser.parse_args(["--nproc-per-node=2", "train.py"]), parser, "torchrun")
builder.build()
"""
HEAVY = ("torch", "numpy", "rich", "typer", "zmq")


def printed(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import unified, unified.job, unified.api.builder", (*HEAVY, "pydantic", "omegaconf")),
        (BUILD, HEAVY),
        (RUN, (*HEAVY, "omegaconf")),
    ],
    ids=["import", "building a job", "fast path of run"],
)
def test_what_is_slow_to_load_is_not_loaded(code: str, modules: tuple[str, ...]) -> None:
    assert printed(f"{code}\nimport sys\nprint([m for m in {modules!r} if m in sys.modules])") == "[]"


@pytest.mark.parametrize("package", [unified.job, unified.api.builder])
def test_every_public_name_can_be_had(package: object) -> None:
    names: list[str] = getattr(package, "__all__")  # noqa: B009 - a module typed as object
    assert names == sorted(names)
    assert set(names) <= set(dir(package))
    for name in names:
        assert getattr(package, name) is not None


def test_short_names_are_the_same_objects() -> None:
    from unified.api.builder import rl

    assert unified.DLJobBuilder is unified.api.builder.DLJobBuilder
    assert unified.RLJob is rl.RLJob
    assert unified.api.builder.RLJobBuilder is rl.RLJobBuilder


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'DLJobBuilder'"):
        unified.DLJobBulder  # noqa: B018 - the mistake is the point

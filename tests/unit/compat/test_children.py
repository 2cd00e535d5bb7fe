"""A job of a script that runs under `unified.compat` has workers that do so too, on whatever node they are."""

import pytest

from unified.api.builder import DLJobBuilder
from unified.cli.run import quick_spec, run_parser
from unified.job.driver import Driver
from unified.job.options import submit_options
from unified.job.to_spec import to_spec

PLACE = Driver(working_dir="/here", sys_path=["/here"], submitted_by="me@host:1")


def environment_of_a(driver: Driver, **own: str) -> dict[str, str]:
    job = DLJobBuilder().workload("a", "m.f").env(own).resource(cpu=1).global_env({"X": "1"}).build()
    return dict(to_spec(submit_options(job, {}, {}), driver).role("a").envs)


@pytest.mark.parametrize("value", ["1", "force"])
def test_workers_are_told_what_their_driver_was_told(value: str) -> None:
    driver = Driver.here({"UNIFIED_COMPAT": value, "HOME": "/root"})
    assert environment_of_a(driver) == {"UNIFIED_COMPAT": value, "X": "1"}


@pytest.mark.parametrize("env", [{}, {"UNIFIED_COMPAT": ""}])
def test_without_it_nothing_is_told(env: dict[str, str]) -> None:
    assert environment_of_a(Driver.here(env)) == {"X": "1"}


def test_what_the_job_says_itself_wins() -> None:
    assert environment_of_a(PLACE._replace(env={"UNIFIED_COMPAT": "1"}), UNIFIED_COMPAT="0")["UNIFIED_COMPAT"] == "0"


def test_variable_is_no_option_of_a_job() -> None:
    job = DLJobBuilder().workload("a", "m.f").resource(cpu=1).build()
    assert submit_options(job, {}, {"UNIFIED_COMPAT": "1"}).job_name


def test_quick_way_of_unified_run_leaves_it_to_the_long_one() -> None:
    """The quick one does not look at what workers inherit."""
    parser = run_parser({})
    parsed = parser.parse_args(["--nproc-per-node=1", "train.py"])
    assert quick_spec(parsed, parser, "j", PLACE, {}) is not None
    assert quick_spec(parsed, parser, "j", PLACE, {"UNIFIED_COMPAT": "1"}) is None

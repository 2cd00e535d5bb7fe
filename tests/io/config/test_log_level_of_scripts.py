"""What a script's environment has our loggers say, beside the logging that the script sets up itself."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

TRAIN = """
import asyncio, logging
from unified.data import TrainingOrchestrator
{before}
async def main():
    async with TrainingOrchestrator("w", "local", 1, 0) as me:
        await me.register_worker()
        logging.getLogger("unified.data").warning("a warning")
{after}
asyncio.run(main())
"""
VARIABLES = ("UNIFIED_LOG_LEVEL", "DLROVER_LOG_LEVEL", "RUST_LOG")
REGISTERED = "event=worker-registered worker=w"


def said(before: str = "", after: str = "", **env: str) -> str:
    environ = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    script = TRAIN.format(before=before, after=after)
    done = subprocess.run(
        [sys.executable, "-c", script], env={**environ, **env}, capture_output=True, text=True, check=True, timeout=100
    )
    return done.stderr


def test_without_a_level_it_is_as_python_has_it() -> None:
    assert said() == "a warning\n"


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_level_is_heeded(variable: str) -> None:
    told = said(**{variable: "info"})
    assert f" unified.data INFO {REGISTERED}" in told
    assert " unified.data WARNING a warning" in told
    assert said(**{variable: "error"}) == ""


def test_a_level_of_other_parts_is_none_of_ours() -> None:
    assert said(RUST_LOG="hyper=trace") == "a warning\n"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_script_with_logging_of_its_own_has_all_of_it_there(when: str) -> None:
    """Also if it is set up after our classes were made, as `after` is, which runs before `main` does."""
    made = "TrainingOrchestrator(coordinator_url='local')\n" if when == "after" else ""
    told = said(**{when: f"{made}logging.basicConfig(format='mine %(message)s')"}, RUST_LOG="info")
    lines = told.splitlines()
    assert lines
    assert all(line.startswith("mine ") for line in lines)
    assert sum(REGISTERED in line for line in lines) == 1


def test_a_level_that_the_script_has_set_stays() -> None:
    told = said(before="logging.getLogger('unified').setLevel(logging.ERROR)", RUST_LOG="info")
    assert told == ""

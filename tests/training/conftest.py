"""Runs of the training program with the frameworks of extras; skipped where those are missing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.s3 import bucket, s3_environment, s3_server  # noqa: F401 - fixtures
from tests.support.training_api import service  # noqa: F401 - a fixture
from tests.support.training_runs import TrainingRuns

NEEDS = {"hf": ["transformers", "accelerate"], "nemo": ["lightning"]}


def needs(framework: str) -> str:
    """Skip the test where a package of the framework is missing; return the framework."""
    for module in NEEDS.get(framework, []):
        pytest.importorskip(module, reason=f"framework {framework}: pip install 'unified-runtime[{framework}]'")
    return framework


@pytest.fixture(params=[*NEEDS])
def framework(request: pytest.FixtureRequest) -> str:
    return needs(request.param)


@pytest.fixture
def runs(framework: str, tmp_path: Path) -> Iterator[TrainingRuns]:
    """Runs of each framework in turn."""
    runs = TrainingRuns(framework, tmp_path)
    yield runs
    runs.close()


@pytest.fixture
def hf(tmp_path: Path) -> Iterator[TrainingRuns]:
    runs = TrainingRuns(needs("hf"), tmp_path)
    yield runs
    runs.close()


@pytest.fixture
def nemo(tmp_path: Path) -> Iterator[TrainingRuns]:
    runs = TrainingRuns(needs("nemo"), tmp_path)
    yield runs
    runs.close()

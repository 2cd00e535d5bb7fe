"""An agent for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.workers import Agent, Forker


@pytest.fixture
def agent(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    run_dir = tmp_path_factory.mktemp("r")
    run_dir.chmod(0o700)
    agent = Agent(tmp_path, run_dir)
    yield agent
    agent.close()


@pytest.fixture
def forker(agent: Agent) -> Iterator[Forker]:
    forker = Forker(agent)
    yield forker
    forker.close()

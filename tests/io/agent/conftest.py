"""Agents of a test, which it ends."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import AgentProcess, eventually


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[AgentProcess]]:
    """Those that the test has started: at the end they are stopped, and have left nothing behind."""
    agents: list[AgentProcess] = []
    yield agents
    for agent in agents:
        if agent.process.poll() is None:
            agent.process.terminate()
            agent.wait()
    if agents:
        eventually(lambda: not agents[0].descendants(), message="an agent left processes behind")
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()] if (tmp_path / "run").exists() else []
    assert not left or any(agent.process.returncode == -signal.SIGKILL for agent in agents)

"""Golden transcripts of the master's decisions. ``REWRITE=1`` writes them anew; commit only what you understand."""

import os
from pathlib import Path

import pytest

from tests.support.sim.transcript import LINE, SCENARIOS, Transcript, split

PATHS = sorted(SCENARIOS.glob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    commands, expected = split(path)
    found = Transcript().play(commands)
    if os.environ.get("REWRITE") == "1":
        path.write_text("".join(f"{line}\n" for line in commands) + f"{LINE}\n{found}")
        return
    assert found == expected


def test_there_are_scenarios() -> None:
    assert len(PATHS) >= 12

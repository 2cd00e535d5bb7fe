"""What the launch benchmark says of its figures."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch import run


def result(launch: float, plain: float, ddp: float, running: float = 0.5) -> dict[str, Any]:
    """Figures in which torchrun takes 6 s for everything."""

    def rows(**seconds: float) -> dict[str, Any]:
        return {key: {"title": key, "seconds": [taken], "failures": 0} for key, taken in seconds.items()}

    return {
        "repeats": 1,
        "launch_s": rows(running=running, embedded=launch, torchrun=6.0),
        "recovery_s": rows(running=running, torchrun=6.0),
        "plain_s": rows(embedded=plain, torchrun=6.0),
        "ddp_s": rows(embedded=ddp, torchrun=6.0),
    }


@pytest.mark.parametrize(
    ("seconds", "missed"),
    [((3.75, 6.0, 4.0), set()), ((3.76, 6.1, 4.1), {"command", "a script", "a step"}), ((3.0, 7.0, 3.0), {"a script"})],
)
def test_a_missed_floor_is_said_and_is_the_exit_code(
    seconds: tuple[float, float, float], missed: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.check(result(*seconds)) == (1 if missed else 0)
    failed = [line for line in capsys.readouterr().out.splitlines() if line.endswith("FAIL")]
    assert {" ".join(line.split()[:2]).removesuffix(" to") for line in failed} == missed


def test_a_running_cluster_has_floors_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.check(result(1.0, 1.0, 1.0, running=0.76)) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.endswith("FAIL")]
    assert [", running cluster: 7.89 × torchrun (≥ 8)" in line for line in failed] == [True, True]


def test_a_contender_without_figures_misses_its_floor() -> None:
    found = result(1.0, 1.0, 1.0)
    found["ddp_s"]["embedded"]["seconds"] = []
    assert run.check(found) == 1


def test_each_measurement_has_its_lines_and_scripts() -> None:
    lines = list(run.lines(result(3.0, 3.0, 3.0)))
    assert [line.times for line in lines if line.how == "embedded"] == ["2.0×"] * 3
    assert len(lines) == 3 + 2 + 2 + 2
    for script in ("rank.py", "plain.py", "ddp.py"):
        assert (Path(run.__file__).parent / script).is_file()

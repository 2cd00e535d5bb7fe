"""The table of `make test-all`: every suite has its row, whatever the others did."""

import json
from pathlib import Path

import pytest

from scripts import test_all

SKIPPED = """<testsuites><testsuite><testcase classname="tests.slurm.test_a" name="test_b">
<skipped message="SLURM cannot be installed here"/></testcase></testsuite></testsuites>"""


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, dict[str, float]]]:
    """Exit code and counts of suites that do not run here; a suite without them ends with 2 and leaves nothing."""
    found: dict[str, tuple[int, dict[str, float]]] = {}

    def make(suite: str, target: list[str]) -> int:
        if suite not in found:
            return 2
        code, numbers = found[suite]
        if numbers:
            (tmp_path / suite).mkdir(parents=True, exist_ok=True)
            (tmp_path / suite / "counts.json").write_text(json.dumps(numbers))
            (tmp_path / suite / "tests.xml").write_text(SKIPPED)
        return code

    monkeypatch.setattr(test_all, "OUT", tmp_path)
    monkeypatch.setattr(test_all, "make", make)
    return found


def numbers(passed: int, failed: int, skipped: int = 0) -> dict[str, float]:
    return {"passed": passed, "failed": failed, "flaky": 0, "skipped": skipped, "seconds": 1.0}


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    rows = capsys.readouterr().out.strip().splitlines()[1:]
    return {row.split()[0]: " ".join(row.split()[1:]) for row in rows}


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["test_all.py", "--seed", "17", *words])
    return test_all.main()


def test_a_suite_that_fails_does_not_end_the_others(
    counts: dict[str, tuple[int, dict[str, float]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts.update(slow=(1, numbers(5, 1)), netns=(0, numbers(3, 0)), soak=(1, {}), random=(0, numbers(9, 0)))
    assert run(monkeypatch, "slow", "netns", "training", "soak", "random") == 1
    rows = lines(capsys)
    assert list(rows) == ["slow", "netns", "training", "soak", "random"]
    assert rows["slow"] == "5 1 0 0 0"
    assert rows["netns"] == "3 0 0 0 0"
    assert rows["training"] == "0 0 0 0 0 did not run here: see out/test-all/training.log"
    assert rows["soak"] == "0 1 0 0 0 make soak SECONDS=60 ended with exit code 1"
    assert rows["random"].endswith("make test-random SEED=17")


def test_one_of_which_no_test_could_run_says_why_and_does_not_count_as_passed(
    counts: dict[str, tuple[int, dict[str, float]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts.update(slurm=(0, numbers(0, 0, 26)), netns=(0, numbers(3, 0)))
    assert run(monkeypatch, "slurm", "netns") == 1
    assert lines(capsys)["slurm"] == "0 0 0 26 0 did not run here: SLURM cannot be installed here"
    assert run(monkeypatch, "netns") == 0


def test_too_many_flaky_tests_do_not_count_as_passed(
    counts: dict[str, tuple[int, dict[str, float]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts["netns"] = (1, numbers(9, 0))
    assert run(monkeypatch, "netns") == 1
    assert lines(capsys)["netns"] == "9 0 0 0 0 ended with exit code 1, see out/test-all/netns.log"

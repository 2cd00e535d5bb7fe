"""The judge of `benchmarks/link/run.py`: medians of the rounds' own ratios, and no pass without a peer."""

import pytest

from benchmarks.link.run import Readings, check

ROW = "argument of 64 MiB"
HELD: dict[str, list[float]] = {
    "without a key": [1.0, 1.0, 0.1],
    "with a key": [0.8, 0.8, 0.2],
    "Ray with TLS": [0.7, 0.7, 0.3],
}


def judged(capsys: pytest.CaptureFixture[str], **more: list[float]) -> tuple[int, list[str]]:
    rates: Readings = {ROW: HELD | {name.replace("_", " "): each for name, each in more.items()}}
    return check(rates), capsys.readouterr().out.splitlines()


def test_each_row_is_held_against_each_floor(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = judged(capsys)
    assert code == 0
    assert lines == [
        "argument of 64 MiB, with ÷ without: 0.80 (≥ 0.75): pass",
        "argument of 64 MiB, with ÷ Ray with TLS: 1.14 (≥ 1): pass",
    ]


@pytest.mark.parametrize(
    ("more", "missed"),
    [
        ({"with_a_key": [0.74, 0.74, 0.2]}, "argument of 64 MiB, with ÷ without: 0.74 (≥ 0.75): FAIL"),
        ({"Ray_with_TLS": [0.9, 0.9, 0.1]}, "argument of 64 MiB, with ÷ Ray with TLS: 0.89 (≥ 1): FAIL"),
        ({"Ray_with_TLS": []}, "argument of 64 MiB, with ÷ Ray with TLS: not measured (≥ 1): FAIL"),
    ],
    ids=["slow with a key", "slower than Ray", "no Ray"],
)
def test_a_floor_that_is_missed_is_a_failure(
    more: dict[str, list[float]], missed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = judged(capsys, **more)
    assert code == 1
    assert missed in lines

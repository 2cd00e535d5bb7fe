"""Texts of `unified metrics`: a row a name, and a curve."""

from unified.cli.metrics import CURVE_CHARS, curve, newest_lines
from unified.client.reports import KeptReports
from unified.protocol.records import WorkerReport

REPORTS = [
    WorkerReport(at=1000.0, step=3, total=6, metrics={"loss": 0.25, "phase": "fit"}, number=3),
    WorkerReport(at=1001.0, step=6, total=6, metrics={"loss": None, "\x1bname": "a\nb"}, number=6),
    WorkerReport(at=1002.0, step=7, total=None, metrics={"loss": 0.75}, incarnation=1),
]


def test_a_row_has_the_newest_value_of_a_name() -> None:
    lines = newest_lines({"w-0": KeptReports(REPORTS, ["node n2 is away"])})
    assert [line.split()[:7] for line in lines[:4]] == [
        ["WORKER", "NAME", "STEP", "LAST", "LOWEST", "HIGHEST", "POINTS"],
        ["w-0", "loss", "7", "0.75", "0.25", "0.75", "3"],
        ["w-0", "phase", "3", "fit", "-", "-", "1"],
        ["w-0", r"\x1bname", "6", r"a\nb", "-", "-", "1"],
    ]
    assert lines[4:] == ["2 points between these were thinned out", "node n2 is away"]
    assert newest_lines({"w-0": KeptReports([], ["no node"])}) == ["nothing was reported", "no node"]
    assert newest_lines({"w-0": KeptReports(REPORTS, [])}, 200)[1].endswith("▁█")


def test_a_curve_is_short_and_bears_any_number() -> None:
    assert curve([1.0]) == "▁"
    assert curve([0.0, 1.0, 2.0]) == "▁▅█"
    assert curve([-1e308, 1e308]) == "▁█"
    assert len(curve([float(step) for step in range(1000)])) <= CURVE_CHARS

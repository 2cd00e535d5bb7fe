"""What the coordinator's benchmark says of its figures, and the floors that it holds them against."""

from benchmarks.coordinator import report
from benchmarks.program import check


def words(**ours: float) -> list[str]:
    return [str(verdict).rpartition(": ")[2] for verdict in report.verdicts({"unified": ours})]


def test_a_rate_has_to_be_high_and_anything_else_low() -> None:
    assert words(heartbeats=20_000, look_ups=15_000, barrier_p99=20, assign=50)[:4] == ["pass"] * 4
    assert words(heartbeats=19_999, look_ups=14_999, barrier_p99=20.1, assign=50.1)[:4] == ["FAIL"] * 4
    assert set(words()) == {"not measured"}


def test_a_missed_floor_is_the_exit_code() -> None:
    assert check(report.verdicts({"unified": {"heartbeats": 20_000.0}})) == 0
    assert check(report.verdicts({"unified": {"heartbeats": 20_000.0, "moved": 1.2}})) == 1


def test_a_line_has_each_figure_beside_the_others() -> None:
    found = {"unified": {"heartbeats": 23_000.0, "barrier_p99": 12.0}, "zmq": {"heartbeats": 46_000.0}}
    heartbeats, barrier = report.lines(found)
    assert heartbeats[1:] == ["23 000", "11 500", "2.00", "≥ 20000", "46 000", "0.50"]
    assert barrier[1:] == ["12.0", "48.0", "4.00", "≤ 20", "–", "–"]
    assert len(heartbeats) == len(report.HEADINGS)

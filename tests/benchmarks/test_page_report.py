"""What the page's benchmark says of its figures, and its stand-in agents before a real master."""

from pathlib import Path

from benchmarks.page import report
from benchmarks.page.cluster import PER_NODE, cluster


def words(**found: dict[str, float]) -> dict[str, str]:
    return {str(verdict).partition(":")[0]: verdict.word for verdict in report.verdicts(found)}


def test_a_floor_is_a_value_or_a_multiple_of_another_column() -> None:
    browser = {"first_s": 2.0, "elements": 1500}
    held = words(
        browser=browser, twenty={"beat_p99": 12, "master_kb_s": 11}, none={"beat_p99": 10}, one={"master_kb_s": 10}
    )
    assert sorted(held.values()) == ["not measured"] * 6 + ["pass"] * 4
    missed = words(browser={"first_s": 2.1}, twenty={"beat_p99": 12.1}, none={"beat_p99": 10})
    assert [word for word in missed.values() if word != "not measured"] == ["FAIL"] * 2
    assert set(words().values()) == {"not measured"}


def test_a_line_has_a_cell_for_each_column() -> None:
    found = {"none": {"master_cpu": 20.0}, "twenty": {"master_cpu": 25.0}, "ray": {"master_cpu": 3.0}}
    (line,) = report.lines(found)
    assert line[1:] == ["20.0", "–", "25.0", "–", "3.00", "≤ 1.1 × 1 viewer"]
    assert len(line) == len(report.HEADINGS)


def test_jobs_of_the_stand_ins_end_or_run_and_report(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, 2, changes=400) as paper:
        paper.read_heartbeats()
        before = paper.told()["changes"]
        paper.say("probe")
        while (told := paper.read_heartbeats())["changes"] < before + 100:
            assert told["running"] == 3 * PER_NODE
        assert 0 < told["beat_p50"] <= told["beat_p99"]

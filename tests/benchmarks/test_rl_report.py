"""The benchmark of what a loop of reinforcement learning asks for: its table, its checks, and one small run of each."""

import pytest

from benchmarks.bus.run import is_installed
from benchmarks.rl import report, run, work

SMALL = work.Sizes(mib=1, calls=40, workers=2, imports="csv.writer,json.JSONDecoder", settle_s=0.1)
NO_RAY = pytest.mark.skipif(not is_installed("ray"), reason="Ray is not installed: make peers")


def test_a_line_has_both_figures_and_a_row_of_ours_alone_ray_s_plain_one() -> None:
    found = {"unified": {"queue": 8.0, "start": 6.0, "start_preload": 2.0}, "ray": {"queue": 4.0, "start": 12.0}}
    lines = {line[0].partition(",")[0]: line[1:-1] for line in report.lines(found)}
    assert [*lines.values()] == [
        ["8.00", "4.00", "–", "2.00"],
        ["6.00", "12.0", "–", "2.00"],
        ["2.00", "12.0", "–", "6.00"],
    ]
    assert {len(line) for line in report.lines(found)} == {len(report.HEADINGS)}


def test_a_floor_is_a_ratio_to_ray_in_the_same_run() -> None:
    ray = {row.name: 10.0 for row in work.ROWS}
    rates = {row.name for row in work.ROWS if row.is_rate}

    def words(change: float) -> set[str]:
        ours = {
            row: 10.0 * (floor * change if row in rates else 1 / floor / change) for row, floor in report.FLOORS.items()
        }
        return {verdict.word for verdict in report.verdicts({"unified": ours, "ray": ray})}

    assert (words(1.01), words(0.99)) == ({"pass"}, {"FAIL"})
    assert {verdict.word for verdict in report.verdicts({"unified": {}, "ray": ray})} == {"not measured"}


def test_a_dictionary_that_is_not_the_one_that_was_sent_ends_the_measurement() -> None:
    arrays = work.dictionary(1)
    work.check(arrays, 1, True)
    assert sum(array.nbytes for array in arrays.values()) == 1 << 20
    damaged = arrays | {"layers.7": arrays["layers.7"].copy()}
    damaged["layers.7"][0] += 1
    work.check(damaged, 1, False)
    with pytest.raises(AssertionError, match="array 7"):
        work.check(damaged, 1, True)
    del arrays["layers.7"]
    with pytest.raises(AssertionError, match="63 arrays"):
        work.check(arrays, 1, False)


@pytest.mark.parametrize(("calls", "most"), [(5, 5), (100, work.IN_FLIGHT)])
def test_so_many_calls_are_open_at_a_time_and_each_is_answered(calls: int, most: int) -> None:
    opened: list[int] = []
    ended: list[int] = []
    num_open: list[int] = []

    def begin() -> int:
        opened.append(len(opened))
        num_open.append(len(opened) - len(ended))
        return opened[-1]

    def end(number: int) -> object:
        ended.append(number)
        return work.ANSWER

    work.in_flight(calls, begin, end)
    assert (ended, max(num_open)) == ([*range(calls)], most)


def test_a_wrong_answer_of_the_engine_ends_the_measurement() -> None:
    with pytest.raises(AssertionError, match="answered None"):
        work.in_flight(3, lambda: None, lambda call: call)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["unified", "bare", pytest.param("ray", marks=[NO_RAY, pytest.mark.slow])])
def test_a_small_run_has_a_figure_for_each_row(name: str) -> None:
    ways, versions, _ = run.chosen([name], SMALL)
    found = ways[name]([])
    rows = [row.name for row in work.ROWS if name == "unified" or not row.plain]
    assert (found.errors, sorted(found.values)) == ([], sorted(rows))
    assert all(value > 0 for value in found.values.values())
    assert "numpy" in versions

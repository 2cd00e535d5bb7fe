"""The floors that the benchmark of checkpoints is held against, and its table."""

import pytest

from benchmarks.checkpoint import report, work

FOUND = {
    "unified": {"stall": 150.0, "local": 900.0, "peak": 1.1, "s3": 60.0, "s3_peak": 1.1},
    "bare": {"stall": 100.0, "local": 1000.0, "peak": 1.0, "s3": 60.0},
    "dcp": {"stall": 150.0, "local": 800.0, "peak": 1.0},
}


def words(**ours: float) -> dict[tuple[str, str], str]:
    found = report.judged({**FOUND, "unified": {**FOUND["unified"], **ours}})
    return {(each.floor.row, each.floor.peer): each.word for each in found}


def test_what_just_reaches_every_floor_passes() -> None:
    assert set(words().values()) == {"pass"}


@pytest.mark.parametrize(
    ("row", "value", "peers"),
    [
        ("stall", 151.0, {"bare", "dcp"}),
        ("local", 899.0, {"bare"}),
        ("peak", 1.11, {"state"}),
        ("s3_peak", 1.11, {"state"}),
        ("s3", 59.0, {"bare"}),
    ],
)
def test_what_is_a_little_worse_fails(row: str, value: float, peers: set[str]) -> None:
    assert {peer for (name, peer), word in words(**{row: value}).items() if word == "FAIL"} == peers
    assert all(name == row for (name, _), word in words(**{row: value}).items() if word == "FAIL")


def test_what_was_not_measured_is_no_pass() -> None:
    assert {each.word for each in report.judged({"unified": FOUND["unified"]})} == {"pass", "not measured"}


def test_every_floor_is_on_a_row_that_is_measured() -> None:
    assert {name for floor in work.FLOORS for name in (floor.row, floor.peer_row)} <= set(work.NAMES)
    assert {*work.ON_DISK, *work.IN_STORE} == set(work.NAMES)


def test_the_table_has_what_is_published_and_how_many_times_better_ours_is() -> None:
    table = {line[0]: line[1:] for line in report.lines(FOUND)}
    assert table["to disk, from `save` to the manifest, MB/s"] == [
        "900",
        "1 000",
        "800",
        "–",
        "500",
        "0.90",
        "1.12",
        "–",
    ]
    assert len(table) == 5


@pytest.mark.parametrize("mib", [1, 16, 63, 64, 200])
def test_a_state_has_the_size_that_was_asked_for(mib: int) -> None:
    pytest.importorskip("torch")
    tensors = work.state(mib)
    assert work.nbytes_of(tensors) == pytest.approx(mib << 20, rel=0.002)
    assert len(tensors) == (1 if mib < 64 else 13 if mib == 64 else 37)

"""What the benchmark of thousands of inboxes says of its figures."""

from benchmarks.bus import scale

CALM = {"inboxes": 0, "nodes": 0, "run_s": 0.21, "master_cpu": 0.8, "p99_us": 151.0}
LOADED = {"inboxes": 5000, "nodes": 625, "register_s": 1.5, "run_s": 9.0, "master_cpu": 61.2, "p99_us": 1234.0}


def test_each_run_is_a_column_and_what_it_has_not_a_dash() -> None:
    runs = [CALM, LOADED]
    assert scale.headings(runs) == ["", "0 inboxes", "5 000 inboxes"]
    rows = {title: cells for title, *cells in scale.lines(runs)}
    assert rows["agents on paper"] == ["0", "625"]
    assert rows["all registered, s"] == ["–", "1.50"]
    assert rows["CPU of the master, % of a core"] == ["0.80", "61.2"]
    assert rows["call p99, µs"] == ["151", "1 234"]
    assert len(rows) == len(scale.MEASURES)


def test_the_readme_has_a_place_for_the_table() -> None:
    _, mark, rest = scale.README.read_text().partition(scale.MARK)
    assert mark
    assert "<!-- end of the filled part -->" in rest

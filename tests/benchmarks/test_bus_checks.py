"""The floors that a benchmark of the bus is held against."""

from benchmarks.bus import checks, work


def words(ours: dict[str, float], ray: dict[str, float]) -> dict[str, str]:
    found = checks.verdicts({"direct": ours, "ray": ray})
    return {
        each.floor.row: each.word for each in found if each.floor.contender == "direct" and each.floor.peer == "ray"
    }


def test_less_is_better_for_times_and_more_for_rates() -> None:
    ray = {"sync_p50": 600.0, "async_1_1": 5000.0, "rss_children": 1600.0}
    found = words({"sync_p50": 150.0, "async_1_1": 29_999.0, "memory_idle": 200.0}, ray)
    assert (found["sync_p50"], found["async_1_1"], found["memory_idle"]) == ("pass", "FAIL", "pass")
    found = words({"sync_p50": 151.0, "async_1_1": 30_000.0, "memory_idle": 201.0}, ray)
    assert (found["sync_p50"], found["async_1_1"], found["memory_idle"]) == ("FAIL", "pass", "FAIL")
    assert found["queue_single"] == "not measured"


def test_a_floor_between_two_different_things_says_so() -> None:
    ours, ray = {"memory_idle": 200.0}, {"memory_idle": 400.0, "rss_children": 3000.0}
    lines = [str(each) for each in checks.verdicts({"direct": ours, "ray": ray}) if each.ratio is not None]
    assert [line.partition(" (two different things: ours is PSS without workers")[0] for line in lines] == [
        "direct against ray: memory_idle ÷ rss_children 15.00× (floor 8×): pass"
    ]
    unlike = [floor for floor in checks.FLOORS if floor.row != floor.peer_row]
    assert all(floor.note for floor in unlike)


def test_every_floor_is_on_a_row_that_is_measured() -> None:
    rows = {name for floor in checks.FLOORS for name in (floor.row, floor.peer_row)}
    assert rows <= set(work.NAMES)


def test_a_copy_at_the_machine_s_own_rate_passes_however_quick_the_peer_is() -> None:
    found = {"direct": {"arg_256MiB": 15.0, "arg_1MiB": 15.0}, "ray": {"arg_256MiB": 3.0, "arg_1MiB": 3.0}}
    limits = {"arg_256MiB": 20.0, "arg_1MiB": 20.0}
    lines = [str(each) for each in checks.verdicts({**found, "memory": limits}) if each.ratio is not None]
    assert "direct against ray: arg_256MiB 5.00× (floor 8×, or 0.75 of memcpy: 0.75): pass" in lines
    assert "direct against ray: arg_1MiB 5.00× (floor 8×): FAIL" in lines, "a small copy is more call than copy"
    slower = [each.word for each in checks.verdicts({**found, "memory": {"arg_256MiB": 20.1}}) if each.ratio == 5.0]
    assert slower == ["FAIL", "FAIL"]

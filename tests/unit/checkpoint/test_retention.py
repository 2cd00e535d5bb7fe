"""Sweeps: the objects that one may delete, those that it may not, and who may write a step that is there already."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified.checkpoint.location import Resolution, WriterIdentity, resolve
from unified.checkpoint.manifest import Manifest, Part, make_manifest, manifest_name, part_name
from unified.checkpoint.retention import ORPHANED_AFTER_S, SaveHistory, StoredObject, SweepPlan, plan_sweep

NOW = 10_000.0
OLD = NOW - ORPHANED_AFTER_S - 1


def checkpoint(step: int, *, stored: int | None = 10) -> tuple[Manifest, list[StoredObject]]:
    """A checkpoint and its objects; `stored` is how many bytes are there of its part, None: it is gone."""
    part = Part(key=part_name(step, "t"), size_bytes=10, checksum="crc32:00000000")
    objects = [StoredObject(key=manifest_name(step), size_bytes=100, modified_at=OLD)]
    if stored is not None:
        objects.append(StoredObject(key=part.key, size_bytes=stored, modified_at=OLD))
    return make_manifest([part], step=step), objects


def sweep(
    *checkpoints: tuple[Manifest, list[StoredObject]], more: list[StoredObject] | None = None, **options: object
) -> SweepPlan:
    stored = [each for _, objects in checkpoints for each in objects] + (more or [])
    manifests = {manifest.step: manifest for manifest, _ in checkpoints}
    return plan_sweep(stored, manifests, now=NOW, **{"keep_last_n": 2, **options})  # type: ignore[arg-type]


def test_older_checkpoints_go_manifest_and_parts() -> None:
    plan = sweep(*map(checkpoint, range(4)))
    assert (plan.steps, plan.manifests) == ([0, 1], ["step-000000.json", "step-000001.json"])
    assert plan.parts == ["step-000000.t.bin", "step-000001.t.bin"]


def test_none_keeps_all_and_damaged_ones_do_not_count_so_that_the_only_good_one_stays() -> None:
    assert sweep(*map(checkpoint, range(4)), keep_last_n=None) == SweepPlan()
    assert sweep(checkpoint(1), checkpoint(2, stored=3), checkpoint(3, stored=None), keep_last_n=1) == SweepPlan()
    assert sweep(checkpoint(1), checkpoint(2), keep_last_n=1, known_bad={2}) == SweepPlan()


def test_a_protected_step_stays_whatever_is_newer() -> None:
    assert sweep(*map(checkpoint, range(4)), protected={0}).steps == [1]


def test_parts_without_a_manifest_go_when_they_are_old_and_nobody_writes_them() -> None:
    left = StoredObject(key=part_name(9, "dead"), size_bytes=5, modified_at=OLD)
    fresh = StoredObject(key=part_name(9, "young"), size_bytes=5, modified_at=NOW)
    mine = StoredObject(key=part_name(9, "mine"), size_bytes=5, modified_at=OLD)
    theirs = StoredObject(key="README", size_bytes=5, modified_at=OLD)
    plan = sweep(checkpoint(1), more=[left, fresh, mine, theirs], writing={"mine"})
    assert plan == SweepPlan(parts=[left.key])


def test_parts_of_a_manifest_that_cannot_be_read_stay() -> None:
    broken = StoredObject(key=manifest_name(9), size_bytes=5, modified_at=OLD)
    part = StoredObject(key=part_name(9, "t"), size_bytes=5, modified_at=OLD)
    assert sweep(checkpoint(1), more=[broken, part]) == SweepPlan()


@settings(max_examples=200)
@given(
    st.dictionaries(st.integers(0, 30), st.sampled_from([10, 10, 3, None]), max_size=12),
    st.integers(1, 4),
    st.sets(st.integers(0, 30), max_size=4),
)
def test_the_newest_good_ones_always_stay(found: dict[int, int | None], keep: int, known_bad: set[int]) -> None:
    plan = sweep(
        *(checkpoint(step, stored=size) for step, size in found.items()), keep_last_n=keep, known_bad=known_bad
    )
    good = sorted(step for step, size in found.items() if size == 10 and step not in known_bad)
    assert not set(plan.steps) & set(good[-keep:])
    left = [step for step in good if step not in plan.steps]
    assert len(left) == min(keep, len(good))
    kept_parts = {part_name(step, "t") for step in found if step not in plan.steps}
    assert not kept_parts & set(plan.parts)


US = WriterIdentity(name="us", rank=1, world_size=2)


@pytest.mark.parametrize(
    ("existing", "is_older", "expected"),
    [
        (None, False, "write"),
        (Manifest(step=1, writer="us", rank=1, world_size=2), False, "write"),
        (Manifest(step=1, writer="peer", rank=0, world_size=2), False, "leave"),
        (Manifest(step=1, writer="peer", rank=0, world_size=2, saved_at=9e9), True, "write"),
        (Manifest(step=1, writer="other", rank=1, world_size=2), False, "refuse"),
        (Manifest(step=1, writer="other", rank=1, world_size=2, saved_at=9e9), True, "write"),
        (Manifest(step=1, writer="other", rank=0, world_size=4), False, "refuse"),
    ],
)
def test_what_was_there_at_the_first_look_is_replaced_whatever_the_clocks_say(
    existing: Manifest | None, is_older: bool, expected: Resolution
) -> None:
    assert resolve(existing, US, is_older=is_older) == expected


def test_an_incarnation_keeps_what_it_saved_last_in_the_order_of_its_saves() -> None:
    history = SaveHistory()
    assert [history.saved(step, 2) for step in (9, 3, 4, 3)] == [[9], [9, 3], [3, 4], [4, 3]]
    history.rolled_back(3)
    assert history.saved(5, 2) == [3, 5]
    assert history.saved(6, None) == [6], "all stay, and nothing needs to be kept in mind"

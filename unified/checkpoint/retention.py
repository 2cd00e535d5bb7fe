"""Retention. Selects what to delete: checkpoints beyond the number to keep, and orphans of crashed saves. Pure.

The order of deletion matters: a manifest goes before its parts. A crash between them then leaves parts without a
manifest, which the next sweep finds, and never a manifest without its parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from unified.checkpoint.manifest import Manifest, manifest_name, part_of, step_of
from unified.values import Value

ORPHANED_AFTER_S = 600.0
"""Age at which a part without a manifest is an orphan. A save writes its manifest right after its parts, or after some
tries. If another writer takes longer than this between the two, a sweep deletes its parts."""


class StoredObject(Value, frozen=True, kw_only=True):
    key: str
    """Key relative to the place of the manifests."""
    size_bytes: int
    modified_at: float
    """Time in seconds since 1970."""
    etag: str = ""
    """Entity tag, a new one after each write."""


class SweepPlan(Value, frozen=True, kw_only=True):
    """Keys to delete, in this order."""

    manifests: list[str] = []
    parts: list[str] = []
    steps: list[int] = []
    """Steps of the checkpoints that go."""


def plan_sweep(
    stored: Iterable[StoredObject],
    manifests: Mapping[int, Manifest],
    *,
    keep_last_n: int | None,
    now: float,
    protected: Collection[int] = (),
    known_bad: Collection[int] = (),
    writing: Collection[str] = (),
) -> SweepPlan:
    """Plan what to delete.

    Only checkpoints that look whole count towards the number to keep: the manifest can be read, and every part is
    there with its size. So a newer one that is damaged never pushes out the last good one.

    Args:
        stored: everything at the place of the manifests.
        manifests: those that could be read, by step.
        keep_last_n: how many good ones to keep; None: all.
        now: seconds since 1970.
        protected: steps that stay: those just saved.
        known_bad: steps whose checksum did not match.
        writing: tokens of saves that are under way here.
    """
    stored = list(stored)
    sizes = {each.key: each.size_bytes for each in stored}
    steps = {step for each in stored if (step := step_of(each.key)) is not None}
    good = sorted((step for step in steps if step in manifests and is_whole(manifests[step], sizes)), reverse=True)
    good = [step for step in good if step not in known_bad]
    going: list[int] = []
    if keep_last_n is not None and len(good) > keep_last_n:
        oldest_kept = good[keep_last_n - 1]
        # Damaged checkpoints newer than the oldest kept one stay for inspection; older ones go with the rest.
        going = sorted(step for step in steps if step < oldest_kept and step not in protected)
    gone = set(going)
    unreadable = {step for step in steps if step not in manifests and step not in gone}
    in_use = {part.key for step, manifest in manifests.items() if step not in gone for part in manifest.parts}
    named_by_gone = {part.key for step in going if step in manifests for part in manifests[step].parts}
    parts = []
    for each in stored:
        found = part_of(each.key)
        if found is None or each.key in in_use or found[1] in writing:
            continue
        # The unreadable manifest of this step may name the part, which then is no orphan.
        if found[0] in unreadable:
            continue
        if each.key in named_by_gone or now - each.modified_at > ORPHANED_AFTER_S:
            parts.append(each.key)
    return SweepPlan(manifests=[manifest_name(step) for step in going], parts=sorted(parts), steps=going)


def is_whole(manifest: Manifest, sizes: Mapping[str, int]) -> bool:
    """Return whether every part is there with its size; the bytes are not checked."""
    return all(sizes.get(part.key) == part.size_bytes for part in manifest.parts)


class SaveHistory:
    """The steps that this incarnation of a manager has saved. Pure. Not safe for threads."""

    def __init__(self) -> None:
        self._saved: list[int] = []

    def saved(self, step: int, keep_last_n: int | None) -> list[int]:
        """Note that a checkpoint was written.

        Returns:
            The last `keep_last_n` steps of this incarnation; for None, the last one. A sweep must keep them, even if an
            earlier incarnation has higher steps.
        """
        saved = [*(each for each in self._saved if each != step), step]
        self._saved = saved[-(keep_last_n or 1) :]
        return self._saved

    def rolled_back(self, step: int) -> None:
        """Note that later checkpoints were discarded."""
        self._saved = [each for each in self._saved if each <= step]

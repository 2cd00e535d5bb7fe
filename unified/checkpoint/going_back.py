"""Training that goes back to an older checkpoint: what was saved since then is discarded, or warned of."""

from __future__ import annotations

from collections.abc import Iterable

from unified.checkpoint.manifest import Manifest, manifest_name
from unified.checkpoint.retention import is_whole
from unified.checkpoint.store import CheckpointStore
from unified.errors import CheckpointCorruptError, CheckpointNotFoundError


def discard_after(store: CheckpointStore, step: int) -> tuple[Manifest, list[int]]:
    """Delete every checkpoint after that of `step`, the newest first: a crash on the way leaves those before.

    Returns:
        The manifest of `step`, and the steps that were deleted, in order.

    Raises:
        CheckpointNotFoundError: there is none of `step`. Nothing was deleted, nor after the next.
        CheckpointCorruptError: it is damaged, as far as can be seen without reading all of it.
    """
    manifest = store.manifest(step)
    if not is_whole(manifest, {each.key: each.size_bytes for each in store.stored()}):
        raise CheckpointCorruptError(
            f"Parts of the checkpoint of step {step} in {store.place} are gone or cut short; those after it were kept."
        )
    later = [each for each in store.steps() if each > step]
    for each in reversed(later):
        try:
            parts = [part.key for part in store.manifest(each).parts]
        except (CheckpointNotFoundError, CheckpointCorruptError):
            parts = []  # a sweep takes them for left over
        store.delete([manifest_name(each), *parts])
    return manifest, later


class Course:
    """What one life of a manager has saved, beside what others have. Pure. Not safe for threads."""

    def __init__(self) -> None:
        self._saved: list[int] = []
        self._has_told_of_later = self._has_told_of_replaced = False

    def saved(self, step: int, keep_last_n: int | None) -> list[int]:
        """A checkpoint was written.

        Returns:
            The last so many of this life. They stay, even if an earlier life's are of higher steps.
        """
        saved = [*(each for each in self._saved if each != step), step]
        self._saved = saved[-(keep_last_n or 1) :]
        return self._saved

    def went_back_to(self, step: int) -> None:
        """What is later was discarded."""
        self._saved = [each for each in self._saved if each <= step]

    def remarks(self, step: int, others: Iterable[Manifest]) -> list[str]:
        """What somebody should be told after the save of `step`, in log lines; of each kind once.

        Args:
            others: the checkpoints there that an earlier life or another run has written.
        """
        others, found = list(others), list[str]()
        latest = max((each.step for each in others), default=-1)
        if latest > step and not self._has_told_of_later:
            self._has_told_of_later = True
            found.append(
                f"event=checkpoint-below-latest step={step}: there is one of step {latest}, not saved by this run, and "
                "the next load takes it for the latest. If training went back, say so once, before it saves: "
                "discard_after(STEP), with the step that was loaded."
            )
        replaced = [each for each in others if each.step in self._saved]
        if replaced and not self._has_told_of_replaced:
            self._has_told_of_replaced = True
            found.append(
                f"event=checkpoint-replaced step={replaced[0].step}: {replaced[0].writer} has saved this step again. "
                "Another run writes in the same place; give each a storage_path of its own."
            )
        return found

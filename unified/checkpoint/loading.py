"""Which checkpoint a load ends up with: the one that was asked for, or the newest before it that is not damaged."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from unified.checkpoint.compression import Chunk
from unified.checkpoint.manifest import Kind, Manifest, check_step
from unified.checkpoint.store import CheckpointStore, describe
from unified.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, UsageError

logger = logging.getLogger(__name__)

Wanted = int | Literal["latest"] | None


class CheckpointFallbackWarning(UserWarning):
    """A checkpoint is damaged, and an older one was loaded instead of it."""


@dataclass(frozen=True)
class LoadReport:
    """How a load went."""

    step: int
    """That was loaded."""
    manifest: Manifest
    skipped: tuple[tuple[int, str], ...] = ()
    """Newer ones that are damaged: their steps, and what is wrong with them."""


def load(
    store: CheckpointStore, step: Wanted, *, kinds: Collection[Kind], exact: bool = False
) -> tuple[Chunk, LoadReport]:
    """Read a checkpoint's data.

    Args:
        step: None, ``"latest"`` and 0 (as the reference document has it): the newest.
        kinds: that will do. Newer ones of other kinds are passed over, unless one of them was asked for.
        exact: `step` and no other: 0 is step 0, and one that is damaged is an error.

    Raises:
        CheckpointNotFoundError: there is none, or none of that step.
        CheckpointCorruptError: it is damaged, and so are all before it.
        CheckpointError: it is of another kind.
    """
    wanted = wanted_step(step, exact=exact)
    skipped: list[tuple[int, str]] = []
    for candidate in candidates(store, wanted, exact=exact):
        try:
            manifest, data = _read(store, candidate, kinds)
        except CheckpointNotFoundError:  # swept since it was listed
            continue
        except CheckpointCorruptError as error:
            if exact:
                raise CheckpointCorruptError(f"The checkpoint of step {candidate} is damaged: {error}.") from error
            store.known_bad.add(candidate)
            skipped.append((candidate, str(error)))
            continue
        if data is not None:
            if skipped:
                tell_of_damage(skipped, f"Loaded that of step {candidate} instead.")
            return data, LoadReport(candidate, manifest, tuple(skipped))
        if candidate == wanted:
            raise CheckpointError(
                f"The checkpoint of step {candidate} is of kind {manifest.kind!r}, which this call does not load: use "
                f"{HOW_TO_LOAD[manifest.kind]}."
            )
    if skipped:
        raise CheckpointCorruptError(f"No checkpoint can be loaded. {_words(skipped)}")
    raise CheckpointNotFoundError(f"There is no checkpoint to load in {store.place}.")


HOW_TO_LOAD: dict[Kind, str] = {
    "bytes": "load(step) or load_bytes(step)",
    "state": "load_state(step)",
    "sharded": "load_sharded(state, step)",
    "files": "materialize_checkpoint(step)",
    "metadata": "latest_checkpoint() or checkpoint(step), and read its metadata",
}


def wanted_step(step: Wanted, *, exact: bool) -> int | None:
    """A step as users give it; None: the newest."""
    if step is None or step == "latest":
        if exact:
            raise UsageError("exact=True needs the number of a step.")
        return None
    if isinstance(step, str):
        raise UsageError(f"A checkpoint's step is a number or 'latest', not {step!r}.")
    return check_step(step) if exact or step else None


def candidates(store: CheckpointStore, wanted: int | None, *, exact: bool) -> list[int]:
    """Steps to try, in this order.

    Raises:
        CheckpointNotFoundError: the one that is wanted is not there.
    """
    steps = store.steps()
    if wanted is None:
        return steps[::-1]
    if wanted not in steps:
        raise CheckpointNotFoundError(f"There is no checkpoint of step {wanted}: {describe(steps)}.")
    return [wanted] if exact else [step for step in reversed(steps) if step <= wanted]


def _read(store: CheckpointStore, step: int, kinds: Collection[Kind]) -> tuple[Manifest, Chunk | None]:
    """A checkpoint and its data; None: it is of another kind."""
    manifest = store.manifest(step)
    while manifest.kind in kinds:
        try:
            return manifest, store.read(manifest)
        except CheckpointCorruptError:
            again = store.manifest(step)  # it was replaced between the two reads, if it is another one now
            if again == manifest:
                raise
            manifest = again
    return manifest, None


def tell_of_damage(skipped: list[tuple[int, str]], instead: str) -> None:
    """Warn of newer checkpoints that are not used."""
    text = f"{_words(skipped)} {instead}"
    logger.warning("event=checkpoint-damaged: %s", text)
    warnings.warn(text, CheckpointFallbackWarning, stacklevel=4)


def _words(skipped: list[tuple[int, str]]) -> str:
    return " ".join(f"The checkpoint of step {step} is damaged: {reason}." for step, reason in skipped)

"""Which checkpoint a load ends up with: the one that was asked for, or the newest before it that is not damaged."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from unified.checkpoint.manifest import Kind, Manifest, check_step
from unified.checkpoint.store import CheckpointStore, describe
from unified.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, UsageError
from unified.worker.rank_group import Alone, Ranks, lead

logger = logging.getLogger(__name__)

T = TypeVar("T")
Wanted = int | Literal["latest"] | None
RANK_ERRORS = (CheckpointError, CheckpointCorruptError, CheckpointNotFoundError, UsageError)
"""Errors of rank 0 that the other ranks raise as they are."""


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
    store: CheckpointStore,
    step: Wanted,
    readers: Mapping[Kind, Callable[[Manifest], T]],
    *,
    exact: bool = False,
    ranks: Ranks | None = None,
) -> tuple[T, LoadReport]:
    """Read a checkpoint.

    Args:
        step: None, ``"latest"`` and 0 (as the reference document has it): the newest.
        readers: of the kinds that will do. Newer ones of other kinds are passed over, unless one of them was asked for.
            A reader raises CheckpointCorruptError for what is damaged.
        exact: `step` and no other: 0 is step 0, and one that is damaged is an error.
        ranks: who load together, and so the same one: this is a collective then, and so is every reader, which raises
            the same on every rank. None: this process by itself.

    Raises:
        CheckpointNotFoundError: there is none, or none of that step.
        CheckpointCorruptError: it is damaged, and so are all before it.
        CheckpointError: it is of another kind.
    """
    ranks = ranks or Alone()
    wanted = wanted_step(step, exact=exact)
    skipped: list[tuple[int, str]] = []
    for candidate in lead(ranks, lambda: candidates(store, wanted, exact=exact), RANK_ERRORS):
        try:
            manifest, found = _read(store, candidate, readers, ranks)
        except CheckpointNotFoundError:  # swept since it was listed
            continue
        except CheckpointCorruptError as error:
            if exact:
                raise CheckpointCorruptError(f"The checkpoint of step {candidate} is damaged: {error}.") from error
            store.known_bad.add(candidate)
            skipped.append((candidate, str(error)))
            continue
        if found:
            if skipped:
                tell_of_damage(store, skipped, f"Loaded that of step {candidate} instead.")
            return found[0], LoadReport(candidate, manifest, tuple(skipped))
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
    "sharded": "load_state_into(state, step) or load_state(step)",
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
        raise CheckpointNotFoundError(f"There is no checkpoint of step {wanted} in {store.place}: {describe(steps)}.")
    return [wanted] if exact else [step for step in reversed(steps) if step <= wanted]


def _read(
    store: CheckpointStore, step: int, readers: Mapping[Kind, Callable[[Manifest], T]], ranks: Ranks
) -> tuple[Manifest, list[T]]:
    """A checkpoint and what was read of it; nothing, if it is of another kind."""
    manifest = lead(ranks, lambda: store.manifest(step), RANK_ERRORS)
    while manifest.kind in readers:
        try:
            return manifest, [readers[manifest.kind](manifest)]
        except CheckpointCorruptError:
            # It was replaced between the two reads, if it is another one now.
            again = lead(ranks, lambda: store.manifest(step), RANK_ERRORS)
            if again == manifest:
                raise
            manifest = again
    return manifest, []


def tell_of_damage(store: CheckpointStore, skipped: list[tuple[int, str]], instead: str) -> None:
    """Warn of newer checkpoints that are not used, and tell whoever wants to know."""
    text = f"{_words(skipped)} {instead}"
    logger.warning("event=checkpoint-damaged: %s", text)
    store.on_damage(f"{text} (in {store.place})")
    warnings.warn(text, CheckpointFallbackWarning, stacklevel=4)


def _words(skipped: list[tuple[int, str]]) -> str:
    return " ".join(f"The checkpoint of step {step} is damaged: {reason}." for step, reason in skipped)

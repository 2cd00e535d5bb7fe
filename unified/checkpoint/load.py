"""Loading: the requested checkpoint, or if it is damaged the newest undamaged one before it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from unified.checkpoint.coordinator_notify import CoordinatorNotifier
from unified.checkpoint.manifest import Kind, Manifest, check_step
from unified.checkpoint.retention import is_whole
from unified.checkpoint.store import RANK_ERRORS, CheckpointStore, describe
from unified.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, UsageError
from unified.rounds.rank_group import Alone, Ranks, lead

logger = logging.getLogger(__name__)

T = TypeVar("T")
Wanted = int | Literal["latest"] | None
HOW_TO_LOAD: dict[Kind, str] = {
    "bytes": "load(step) or load_bytes(step)",
    "state": "load_state(step)",
    "sharded": "load_state_into(state, step) or load_state(step)",
    "files": "materialize_checkpoint(step)",
    "metadata": "latest_checkpoint() or checkpoint(step), and read its metadata",
}


class CheckpointFallbackWarning(UserWarning):
    """A checkpoint is damaged, and an older one was loaded instead of it."""


@dataclass(frozen=True)
class LoadReport:
    """The result of a load."""

    step: int
    """The step that was loaded."""
    manifest: Manifest
    skipped: tuple[tuple[int, str], ...] = ()
    """Newer checkpoints that are damaged: their steps, and their damage in words."""


class CheckpointReader:
    """Loads the checkpoints of a store. Methods take steps and raise errors as those of `CheckpointManager` do."""

    def __init__(self, store: CheckpointStore, notifier: CoordinatorNotifier) -> None:
        self.last: LoadReport | None = None
        self._store = store
        self._notifier = notifier

    def load_bytes(self, step: Wanted, *, exact: bool) -> bytes:
        """Load the data of a checkpoint of one part."""
        return bytes(self.load(step, {"bytes": self._store.read, "state": self._store.read}, exact=exact))

    def load_state(self, step: Wanted, *, exact: bool, map_location: Any, weights_only: bool) -> Any:
        """Load a state dict, also one that several ranks saved."""

        def of_one(manifest: Manifest) -> Any:
            from unified.checkpoint.state_stream import load_state

            return load_state(self._store.read(manifest), map_location=map_location, weights_only=weights_only)

        def of_many(manifest: Manifest) -> Any:
            from unified.checkpoint.sharded.load import whole_state

            return whole_state(self._store, manifest, map_location=map_location, weights_only=weights_only)

        return self.load(step, {"bytes": of_one, "state": of_one, "sharded": of_many}, exact=exact)

    def load_into(
        self, state: dict[str, Any], step: Wanted, *, exact: bool, weights_only: bool, ranks: Ranks, of_rank: int | None
    ) -> LoadReport:
        """Fill a state dict in place. A collective of `ranks`."""
        from unified.checkpoint.sharded.load import load_into

        readers = load_into(self._store, state, ranks, weights_only=weights_only, of_rank=of_rank)
        self.load(step, readers, exact=exact, ranks=ranks)
        assert self.last is not None
        return self.last

    def load(
        self,
        step: Wanted,
        readers: Mapping[Kind, Callable[[Manifest], T]],
        *,
        exact: bool = False,
        ranks: Ranks | None = None,
    ) -> T:
        """Read a checkpoint.

        Args:
            step: None, ``"latest"`` and 0 (as the reference document has it): the newest.
            readers: functions for the kinds that this call loads. Newer checkpoints of other kinds are skipped; it is
                an error if `step` is of another kind. A reader raises CheckpointCorruptError for damage.
            exact: load `step` and no other: 0 is step 0, and damage is an error.
            ranks: the ranks that load the same step together. This call and every reader are then collectives, and a
                reader raises the same error on every rank. None: this process by itself.
        """
        ranks = ranks or Alone()
        wanted = wanted_step(step, exact=exact)
        skipped: list[tuple[int, str]] = []
        for candidate in lead(ranks, lambda: self._candidates(wanted, exact=exact), RANK_ERRORS):
            try:
                manifest, found = self._read(candidate, readers, ranks)
            except CheckpointNotFoundError:  # swept since it was listed
                continue
            except CheckpointCorruptError as error:
                if exact:
                    raise CheckpointCorruptError(f"The checkpoint of step {candidate} is damaged: {error}.") from error
                self._store.known_bad.add(candidate)
                skipped.append((candidate, str(error)))
                continue
            if found:
                if skipped:
                    self._warn(skipped, f"Loaded the checkpoint of step {candidate} instead.")
                self.last = LoadReport(candidate, manifest, tuple(skipped))
                return found[0]
            if candidate == wanted:
                raise CheckpointError(
                    f"The checkpoint of step {candidate} is of kind {manifest.kind!r}, which this call does not load: "
                    f"use {HOW_TO_LOAD[manifest.kind]}."
                )
        if skipped:
            raise CheckpointCorruptError(f"No checkpoint can be loaded. {_words(skipped)}")
        raise CheckpointNotFoundError(f"There is no checkpoint to load in {self._store.place}.")

    def latest(self) -> Manifest | None:
        """Return the newest checkpoint that looks whole; None: there is none."""
        sizes = {each.key: each.size_bytes for each in self._store.stored()}
        skipped: list[tuple[int, str]] = []
        for step in self._store.steps()[::-1]:
            try:
                manifest = self._store.manifest(step)
            except CheckpointNotFoundError:
                continue
            except CheckpointCorruptError as error:
                skipped.append((step, str(error)))
                continue
            if not is_whole(manifest, sizes):
                skipped.append((step, "parts of it are gone or cut short"))
                continue
            if skipped:
                self._warn(skipped, f"The newest complete checkpoint is that of step {step}.")
            return manifest
        if skipped:
            self._warn(skipped, "There is no older checkpoint.")
        return None

    def find(self, checkpoint: Manifest | Wanted) -> Manifest:
        """Return the given manifest, the manifest of a step, or for None the latest that looks whole."""
        if checkpoint is None or checkpoint == "latest":
            checkpoint = self.latest()
            if checkpoint is None:
                steps = describe(self._store.steps())
                raise CheckpointNotFoundError(f"There is no complete checkpoint in {self._store.place}: {steps}.")
        return checkpoint if isinstance(checkpoint, Manifest) else self._store.manifest(check_step(checkpoint))

    def _candidates(self, wanted: int | None, *, exact: bool) -> list[int]:
        steps = self._store.steps()
        if wanted is None:
            return steps[::-1]
        if wanted not in steps:
            raise CheckpointNotFoundError(
                f"There is no checkpoint of step {wanted} in {self._store.place}: {describe(steps)}."
            )
        return [wanted] if exact else [step for step in reversed(steps) if step <= wanted]

    def _read(
        self, step: int, readers: Mapping[Kind, Callable[[Manifest], T]], ranks: Ranks
    ) -> tuple[Manifest, list[T]]:
        """Return a checkpoint and its value as read; no value, if no reader takes its kind."""
        manifest = lead(ranks, lambda: self._store.manifest(step), RANK_ERRORS)
        while manifest.kind in readers:
            try:
                return manifest, [readers[manifest.kind](manifest)]
            except CheckpointCorruptError:
                # If the manifest differs now, the checkpoint was replaced between the two reads.
                again = lead(ranks, lambda: self._store.manifest(step), RANK_ERRORS)
                if again == manifest:
                    raise
                manifest = again
        return manifest, []

    def _warn(self, skipped: list[tuple[int, str]], instead: str) -> None:
        """Warn of newer checkpoints that are not used, and notify the coordinator."""
        text = f"{_words(skipped)} {instead}"
        logger.warning("event=checkpoint-damaged: %s", text)
        self._notifier.event("checkpoint-damaged", f"{text} (in {self._store.place})")
        warnings.warn(text, CheckpointFallbackWarning, stacklevel=4)


def wanted_step(step: Wanted, *, exact: bool) -> int | None:
    """Return the number of the step that a user wants; None: the newest."""
    if step is None or step == "latest":
        if exact:
            raise UsageError("exact=True needs the number of a step.")
        return None
    if isinstance(step, str):
        raise UsageError(f"A checkpoint's step is a number or 'latest', not {step!r}.")
    return check_step(step) if exact or step else None


def _words(skipped: list[tuple[int, str]]) -> str:
    return " ".join(f"The checkpoint of step {step} is damaged: {reason}." for step, reason in skipped)

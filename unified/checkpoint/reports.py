"""What becomes known of saves that were not written: lines in the log, and the error of the next call."""

from __future__ import annotations

import logging
from typing import Any

from unified.checkpoint.coordinator_notify import Announcer
from unified.checkpoint.save_queue import Failure, Save
from unified.errors import CheckpointSaveError

logger = logging.getLogger(__name__)


def tell_of_given_way(save: Save[Any]) -> None:
    """Log that a save gave way to newer ones."""
    logger.warning("event=checkpoint-skipped step=%d: a newer one came before it could be written", save.step)


def tell_of_failed(failure: Failure, place: str, announcer: Announcer) -> None:
    """Log that a save is not tried again, and tell the coordinator."""
    announcer.event(
        "checkpoint-failed",
        f"step {failure.step} was not saved in {place} (tries: {failure.num_tries}): "
        f"{type(failure.error).__name__}: {failure.error}",
    )
    logger.error(
        "event=checkpoint-failed step=%d tries=%d error=%s: %s",
        failure.step,
        failure.num_tries,
        type(failure.error).__name__,
        failure.error,
    )


def report(failures: list[Failure], place: str) -> None:
    """Raise for saves that failed since the last report, if any did.

    Raises:
        CheckpointSaveError: some did; it knows their steps, and its cause is the last one's error.
    """
    if not failures:
        return
    what = "; ".join(
        f"step {each.step} (tries: {each.num_tries}): {type(each.error).__name__}: {each.error}" for each in failures
    )
    raise CheckpointSaveError(
        f"Checkpoints were not saved in {place}: {what}. Those before them are as they were.",
        [each.step for each in failures],
    ) from failures[-1].error

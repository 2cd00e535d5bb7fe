"""Saving: a save is queued with its copy of the data and written in the background; retention follows."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from unified.checkpoint.background import BackgroundSaver, close_at_exit, forget, raise_failures
from unified.checkpoint.coordinator_notify import CoordinatorNotifier
from unified.checkpoint.manifest import Kind, Manifest, check_step, checked_metadata
from unified.checkpoint.options import CheckpointOptions
from unified.checkpoint.payload import Payload, check_compression
from unified.checkpoint.retention import SaveHistory
from unified.checkpoint.save_queue import QueuedSave, SaveQueue
from unified.checkpoint.store import RANK_ERRORS, CheckpointStore, SaveRequest
from unified.errors import UsageError
from unified.rounds.rank_group import Ranks, lead

if TYPE_CHECKING:
    from unified.checkpoint.sharded.save import ShardedSaver

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves checkpoints, by one rank or by several together, and applies retention. Safe for threads.

    Attributes:
        keep_last_n, interval_steps: see `CheckpointManager`.
        is_closed: no save is accepted any more.
    """

    def __init__(self, store: CheckpointStore, options: CheckpointOptions, notifier: CoordinatorNotifier) -> None:
        self.keep_last_n = options["keep_last_n"]
        self.interval_steps = options["interval_steps"]
        self._store = store
        self._options = options
        self._compression = check_compression(options["compression"])
        self._notifier = notifier
        self._history = SaveHistory()
        self._sweeping = threading.Lock()
        """Guards `_history` and every deletion of checkpoints."""
        queue: SaveQueue[SaveRequest] = SaveQueue(
            max_waiting=options["max_waiting"],
            max_waiting_bytes=options["max_waiting_bytes"],
            when_full=options["when_full"],
            max_tries=options["max_tries"],
            backoff=options["backoff"],
            rng=SystemRandom(),
        )
        self._alone = BackgroundSaver(queue, self, notifier, store.place)
        self._together: ShardedSaver | None = None
        self._asking = threading.Lock()
        self._has_passed_over = self.is_closed = False
        close_at_exit(self)

    @property
    def is_idle(self) -> bool:
        """No save is being written, and none waits."""
        return not any(saver.steps for saver in self._savers)

    def should_save(self, step: int) -> bool:
        """Return whether `step` is at `interval_steps`."""
        return self.interval_steps is None or check_step(step) % self.interval_steps == 0

    def save(
        self,
        kind: Kind,
        step: int,
        nbytes: int,
        make: Callable[[], Payload],
        *,
        metadata: Mapping[str, Any] | None,
        force: bool,
    ) -> bool:
        """Queue a save by this rank. For the rest see `CheckpointManager.save`.

        Args:
            nbytes: the size of its payload.
            make: copies the data, once there is room.
        """
        step = check_step(step)
        if not force and self._passes_over(step):
            return False
        kept = checked_metadata(step, metadata)
        with self._asking:
            self._check_open(step)
            # Before the copy, which then reuses the memory of the superseded saves.
            self._alone.make_room(step, nbytes)
            payload = make()
            request = SaveRequest(step, secrets.token_hex(6), {"": payload}, kind, self._compression, kept)
            failures = self._alone.take_failures()  # of earlier saves only
            self._alone.submit(QueuedSave(step, payload.nbytes, request))
        raise_failures(failures, self._store.place)
        return True

    def save_together(self, state: Any, step: int, *, metadata: Mapping[str, Any] | None, force: bool) -> bool:
        """Queue this rank's share of a save by all ranks. A collective. For the rest see `CheckpointManager.save`."""
        step = check_step(step)
        if not force and self._passes_over(step):
            return False

        def prepare() -> dict[str, Any]:
            self._check_open(step)
            return checked_metadata(step, metadata)

        with self._asking:
            if self._together is None:
                from unified.checkpoint.sharded.save import ShardedSaver

                self._together = ShardedSaver(self._store, self._options, self._notifier, self.after_save)
            failures = self._together.save(state, step, prepare)
        raise_failures(failures, self._store.place)
        return True

    def write(self, request: SaveRequest) -> Manifest:
        """Write a checkpoint of this rank now, and apply retention."""
        started_at = time.monotonic()
        manifest = self._store.write(request)
        seconds = time.monotonic() - started_at
        logger.info("event=checkpoint-saved step=%d bytes=%d seconds=%.3f", request.step, manifest.size_bytes, seconds)
        self.after_save(manifest)
        return manifest

    def release(self, request: SaveRequest) -> None:
        """Give back the memory of a save."""
        for payload in request.payloads.values():
            payload.release()

    def after_save(self, manifest: Manifest) -> None:
        """Report a written checkpoint, and delete the checkpoints beyond `keep_last_n`."""
        self._notifier.written(manifest)
        try:
            if (on_saved := self._options["on_saved"]) is not None:
                on_saved(manifest)
        except Exception as error:  # the checkpoint is safe
            logger.warning("event=on-saved-failed step=%d error=%s", manifest.step, error)
        try:
            with self._sweeping:
                self._store.sweep(self.keep_last_n, self._history.saved(manifest.step, self.keep_last_n))
        except Exception as error:  # the next save sweeps again
            logger.warning("event=checkpoint-sweep-failed step=%d error=%s", manifest.step, error)

    def discard_after(self, step: int, ranks: Ranks) -> list[int]:
        """Delete all checkpoints after that of `step`; see `CheckpointManager.discard_after`. A collective."""
        ranks.gather(None)  # a barrier: after it, no rank has a save under way
        with self._sweeping:
            manifest, gone = lead(ranks, lambda: self._store.discard_after(step), RANK_ERRORS)
            self._history.rolled_back(step)
        if ranks.rank == 0:
            self._notifier.rolled_back(manifest)
        return gone

    def finish(self, timeout: float | None = None) -> None:
        """Wait until every save that was accepted is written or failed, or for `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for saver in self._savers:
            saver.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def wait(self, timeout: float | None = None) -> None:
        """Wait as `finish` does, and raise CheckpointSaveError if saves failed since the last report."""
        self.finish(timeout)
        self.report()

    def report(self) -> None:
        """Raise CheckpointSaveError if saves failed since the last report."""
        raise_failures([each for saver in self._savers for each in saver.take_failures()], self._store.place)

    def close(self, timeout: float | None = None) -> None:
        """Accept no save from now on, wait as `wait` does, and give memory and threads back."""
        with self._asking:
            was_closed, self.is_closed = self.is_closed, True
        try:
            self.wait(timeout)
        finally:
            if not was_closed:
                forget(self)
                self._notifier.close()
                if self._together is not None:
                    self._together.clear()

    @property
    def _savers(self) -> list[BackgroundSaver[Any]]:
        return [self._alone] if self._together is None else [self._together.saver, self._alone]

    def _passes_over(self, step: int) -> bool:
        """Return whether `step` is not at `interval_steps`; log the first such step."""
        if self.should_save(step):
            return False
        if not self._has_passed_over:
            self._has_passed_over = True
            logger.warning(
                "event=checkpoint-passed-over step=%d: it is not saved: only multiples of interval_steps=%d "
                "are, and steps with force=True",
                step,
                self.interval_steps,
            )
        self.report()
        return True

    def _check_open(self, step: int) -> None:
        if self.is_closed:
            manager = f"CheckpointManager({self._store.place!r}, keep_last_n={self.keep_last_n})"
            raise UsageError(f"{manager} is closed; the checkpoint of step {step} was not saved.")

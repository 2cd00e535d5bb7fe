"""`CheckpointManager`: the class that users meet. It wires the parts of this package together and decides nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from random import SystemRandom
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from unified.checkpoint.background import (
    BackgroundSaver,
    close_at_exit,
    forget,
    report,
    tell_of_failed,
    tell_of_given_way,
)
from unified.checkpoint.coordinator_notify import Announcer
from unified.checkpoint.going_back import Course
from unified.checkpoint.load import LoadReport
from unified.checkpoint.loads import Loads
from unified.checkpoint.location import is_local, open_place, this_writer
from unified.checkpoint.manifest import Kind, Manifest, check_step
from unified.checkpoint.options import FROM_SETTINGS, FromSettings, check_counts
from unified.checkpoint.payload import BytesPayload, Payload, check_compression
from unified.checkpoint.retention import LEFTOVER_AFTER_S
from unified.checkpoint.run_directory import checked_metadata
from unified.checkpoint.save_queue import Save, SaveQueue, WhenFull
from unified.checkpoint.store import Order
from unified.config.runtime import RuntimeSettings
from unified.core.backoff import Backoff
from unified.data.coordinator_client import Coordinator
from unified.errors import UsageError
from unified.extras import needed_by

if TYPE_CHECKING:
    from unified.checkpoint.sharded.save import ShardSaves
    from unified.memory.host_buffers import BufferPool
    from unified.storage.backend import StorageBackend

logger = logging.getLogger(__name__)

BACKOFF = Backoff(first_s=0.5, limit_s=10.0)
MAX_TRIES = 4
MAX_WAITING = 64
MAX_WAITING_BYTES = 256 << 20
RANK_TIMEOUT_S = 300.0

Listener = Callable[[Manifest], object]


class CheckpointManager(Loads):
    """Saves checkpoints in the background, and loads them. Safe for threads.

    A save returns when its data are in memory of the manager's; writing goes on meanwhile, one save after another. A
    checkpoint exists when its manifest does, which is written last, so that a crash at any moment leaves the one before
    as the latest. Saves under way are finished by `wait`, by `close` and at the program's end.

    Args:
        storage_path: a directory, made when needed; or ``s3://bucket/prefix``.
        backend: ``"local"``; ``"s3"``, for which `storage_path` may also be a prefix in `bucket`; or a storage.
            Default: as ``[storage]`` of the settings says, or ``"local"``.
        keep_last_n: how many good checkpoints stay; None: all. Default: as ``[checkpoint]`` of the settings says, or 5.
        compression: ``"gzip"``, ``"zstd"`` (extra ``zstd``) or None. Default: the settings', or None.
        interval_steps: save at multiples of it alone; at other steps only with ``force=True``, as for the last one. A
            warning in the log tells of the first that is not saved. None: whenever asked. Default: the settings', or
            None.
        run_id, framework: keep everything under ``<storage_path>/<run_id>/framework=<framework>/``, checkpoints in its
            ``checkpoints/``, as the training service does.
        bucket: for S3, where `storage_path` names none. Default: the settings'; and its region is always theirs.
        max_waiting, max_waiting_bytes: how much may wait to be written beside what is being written. One save of any
            size may always wait, so a large state is in memory twice where it is saved faster than it is written.
        when_full: ``"newest"``: the oldest waiting save gives way to a new one, which a warning in the log tells.
            ``"wait"``: the new one waits.
        max_tries, backoff: of a save that the storage does not take.
        rank, world_size: of this process. Default: as in the job, else ``RANK`` and ``WORLD_SIZE``, else 0 and 1.
        process_group: of torch.distributed: the ranks that save and load together; by default all.
        rank_timeout: seconds that a save by several ranks waits for the others' parts after this rank's was written;
            below ten minutes.
        coordinator_url: who is told of each checkpoint, and of saves that failed: ``tcp://HOST:PORT``,
            ``http://HOST:PORT`` or ``HOST:PORT`` of a master, or ``local`` for a coordinator in this process. Default:
            inside a job its master, else ``COORDINATOR_URL``, else nobody. It is done in the background; no save or
            load fails or waits because nobody answers.
        series: under which the coordinator knows the latest of these checkpoints; in a job, one for each thing that is
            saved.
        on_saved: called from the saving thread with the manifest of each checkpoint that was written.

    Attributes:
        last_load: how the last load of this manager went: which step, and what was skipped because it is damaged.

    Raises:
        UsageError: an argument that cannot be, or a setting (an OptionError).
        ImportError: S3 or the compression needs an extra.
    """

    def __init__(
        self,
        storage_path: str | os.PathLike[str],
        backend: Literal["local", "s3"] | StorageBackend | FromSettings = FROM_SETTINGS,
        *,
        keep_last_n: int | FromSettings | None = FROM_SETTINGS,
        compression: str | FromSettings | None = FROM_SETTINGS,
        interval_steps: int | FromSettings | None = FROM_SETTINGS,
        run_id: str | None = None,
        framework: str | None = None,
        bucket: str | None = None,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        when_full: WhenFull = "newest",
        max_tries: int = MAX_TRIES,
        backoff: Backoff = BACKOFF,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        rank_timeout: float = RANK_TIMEOUT_S,
        coordinator_url: str | Coordinator | None = None,
        series: str = "default",
        on_saved: Listener | None = None,
    ) -> None:
        runtime = RuntimeSettings.load_shared()
        settings = runtime.checkpoint
        keep_last_n = settings.keep_last_n if keep_last_n is FROM_SETTINGS else keep_last_n
        compression = settings.compression if compression is FROM_SETTINGS else compression
        interval_steps = settings.interval_steps if interval_steps is FROM_SETTINGS else interval_steps
        check_counts(keep_last_n=keep_last_n, interval_steps=interval_steps, max_tries=max_tries)
        if when_full not in ("newest", "wait"):
            raise UsageError(f"when_full is 'newest' or 'wait', not {when_full!r}.")
        if not 0 < rank_timeout < LEFTOVER_AFTER_S:
            raise UsageError(f"rank_timeout is above 0 and below {LEFTOVER_AFTER_S:g} s, not {rank_timeout!r}.")
        self.keep_last_n = keep_last_n
        self.interval_steps = interval_steps
        self.last_load: LoadReport | None = None
        self._compression = check_compression(compression)
        self._on_saved = on_saved
        writer = this_writer(rank, world_size)
        place = open_place(storage_path, backend, bucket, run_id, framework, runtime.storage)
        self._owns_storage = place.is_own
        super().__init__(place, writer, is_run=run_id is not None)
        announcer = self._announcer = Announcer(coordinator_url, series, writer, self.store.place)
        self.store.on_damage = partial(announcer.event, "checkpoint-damaged")
        self._course = Course()
        self._sweeping = threading.Lock()
        queue: SaveQueue[Order] = SaveQueue(
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
            when_full=when_full,
            max_tries=max_tries,
            backoff=backoff,
            rng=SystemRandom(),
        )
        on_failed = partial(tell_of_failed, place=self.store.place, announcer=announcer)
        self._saver = BackgroundSaver(queue, self._write, _release, on_given_way=tell_of_given_way, on_failed=on_failed)
        self._process_group = process_group
        self._rank_timeout_s = rank_timeout
        self._retries: dict[str, Any] = {"max_tries": max_tries, "backoff": backoff, "on_failed": on_failed}
        self._shards: ShardSaves | None = None
        self._pool: BufferPool | None = None
        self._asking = threading.Lock()
        self._has_passed_over = self._is_closed = False
        if is_local(place.storage):  # a bucket is looked at when it is used: to make a manager asks no network
            with suppress(OSError):
                self.store.stored()
        close_at_exit(self)

    def __repr__(self) -> str:
        return f"CheckpointManager({self.store.place!r}, keep_last_n={self.keep_last_n})"

    # --- saving

    async def save_async(self, data: bytes, step: int, *, force: bool = False) -> None:
        """Save bytes as the checkpoint of `step`, in the background.

        Args:
            data: what `load` will return. Bytes are referred to until they were written; a bytearray is copied.
            force: also if `step` is not at `interval_steps`.

        Raises:
            UsageError: `data` are no bytes, or none at all; or `step` is no step.
            CheckpointSaveError: earlier saves failed. This one is accepted nevertheless.
        """
        await asyncio.to_thread(self.save_bytes, data, step, force=force)

    def save_bytes(
        self, data: bytes, step: int, *, metadata: Mapping[str, Any] | None = None, force: bool = False
    ) -> bool:
        """As `save_async`, for code that is not async. False: it is not at `interval_steps`, and nothing was done."""
        payload = BytesPayload(data)
        return self._save("bytes", step, lambda: payload, payload.nbytes, metadata, force)

    @needed_by("CheckpointManager.save()")
    def save(
        self,
        state: Any,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        sharded: bool | None = None,
        force: bool = False,
    ) -> bool:
        """Save a state dict as the checkpoint of `step`: copied now into memory that is used again, written later.

        Training may change the tensors as soon as this returns. What is stored is what ``torch.save`` writes, so
        `load_state` reads it, and so does ``torch.load(io.BytesIO(await manager.load(step)))``; tensors off a GPU
        are loaded to the CPU.

        A state with DTensors, as FSDP2 makes them, is saved by all ranks of the process group together, each of which
        calls this: it copies and writes its own share, and there is one checkpoint when all have written theirs.

        Args:
            state: a dict, or any nest of containers, with tensors on the CPU or on GPUs.
            metadata: kept in the manifest; plain numbers, text, lists and dicts.
            sharded: by all ranks together, also a state without DTensors, of which each then writes a part; it is a
                dict, and may hold modules and optimizers themselves. False: by this rank, all of it.
            force: also if `step` is not at `interval_steps`; the same on all ranks that save together.

        Returns:
            False: `step` is not at `interval_steps`, and nothing was done.

        Raises:
            UsageError: `step` is no step, or the ranks do not fit together.
            CheckpointError: another rank could not save, so none did.
            CheckpointSaveError: earlier saves failed. This one is accepted nevertheless.
        """
        from unified.checkpoint.state_stream import StatePayload, is_sharded
        from unified.memory.host_buffers import BufferPool, nbytes_of, stage_state

        if sharded or (sharded is None and is_sharded(state)):
            return self._save_together(state, step, metadata, force)
        pool = self._pool = self._pool or BufferPool(one_size=True)
        return self._save(
            "state", step, lambda: StatePayload(stage_state(state, pool)), nbytes_of(state), metadata, force
        )

    def should_save(self, step: int) -> bool:
        """Whether `step` is at `interval_steps`, so that a state is to be gathered for it."""
        return self.interval_steps is None or check_step(step) % self.interval_steps == 0

    def wait(self, timeout: float | None = None) -> None:
        """Until every save that was accepted is written.

        Args:
            timeout: seconds; None: as long as it takes, which `max_tries` bounds.

        Raises:
            CheckpointSaveError: some failed; each is reported once.
            CheckpointTimeoutError: it took longer than `timeout`. The saves go on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for saver in self._savers:
            saver.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._report()

    async def wait_async(self) -> None:
        """As `wait`."""
        await asyncio.to_thread(self.wait)

    def close(self, timeout: float | None = None) -> None:
        """`wait`, and save nothing from now on. Can be called twice."""
        with self._asking:
            was_closed, self._is_closed = self._is_closed, True
        try:
            self.wait(timeout)
        finally:
            if not was_closed:
                forget(self)
                self._announcer.close()
                if self._pool is not None:
                    self._pool.trim()
                if self._shards is not None:
                    self._shards.clear()
                if self._owns_storage and not any(saver.steps for saver in self._savers):
                    self.store.backend.close()

    # --- life

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # --- inside

    def _save(
        self,
        kind: Kind,
        step: int,
        make: Callable[[], Payload],
        nbytes: int,
        metadata: Mapping[str, Any] | None,
        force: bool,
    ) -> bool:
        step = check_step(step)
        if not force and self._passes_over(step):
            return False
        kept = checked_metadata(step, metadata)
        with self._asking:
            self._check_open(step)
            # Before the copy is made, so that it takes the memory of those that give way.
            self._saver.make_room(step, nbytes)
            payload = make()
            order = Order(
                step=step,
                token=secrets.token_hex(6),
                payloads={"": payload},
                kind=kind,
                compression=self._compression,
                metadata=kept,
            )
            failures = self._saver.take_failures()  # of earlier saves alone
            self._saver.submit(Save(step, payload.nbytes, order))
        report(failures, self.store.place)
        return True

    def _save_together(self, state: Any, step: int, metadata: Mapping[str, Any] | None, force: bool) -> bool:
        step = check_step(step)
        if not force and self._passes_over(step):
            return False

        def prepare() -> dict[str, Any]:
            self._check_open(step)
            return checked_metadata(step, metadata)

        with self._asking:
            if self._shards is None:
                from unified.checkpoint.sharded.save import ShardSaves

                self._shards = ShardSaves(
                    self.store,
                    process_group=self._process_group,
                    compression=self._compression,
                    rank_timeout_s=self._rank_timeout_s,
                    after_save=self._after_save,
                    **self._retries,
                )
            failures = self._shards.save(state, step, prepare)
        report(failures, self.store.place)
        return True

    def _passes_over(self, step: int) -> bool:
        """Whether it is not at `interval_steps`: the first time that is said."""
        if self.should_save(step):
            return False
        if not self._has_passed_over:
            self._has_passed_over = True
            logger.warning(
                "event=checkpoint-passed-over step=%d: it is not saved, nor is any that is no multiple of "
                "interval_steps=%d, unless with force=True",
                step,
                self.interval_steps,
            )
        self._report()
        return True

    def _check_open(self, step: int) -> None:
        if self._is_closed:
            raise UsageError(f"{self!r} is closed; the checkpoint of step {step} was not saved.")

    @property
    def _savers(self) -> list[BackgroundSaver[Any]]:
        return [self._saver] if self._shards is None else [self._shards.saver, self._saver]

    def _report(self) -> None:
        report([each for saver in self._savers for each in saver.take_failures()], self.store.place)

    def _write(self, save: Save[Order]) -> None:
        started_at = time.monotonic()
        manifest = self.store.write(save.item)
        logger.info(
            "event=checkpoint-saved step=%d bytes=%d seconds=%.3f",
            save.step,
            manifest.size_bytes,
            time.monotonic() - started_at,
        )
        self._after_save(manifest)

    def _after_save(self, manifest: Manifest) -> None:
        self._announcer.written(manifest)
        try:
            if self._on_saved is not None:
                self._on_saved(manifest)
        except Exception as error:  # the checkpoint is safe
            logger.warning("event=on-saved-failed step=%d error=%s", manifest.step, error)
        try:
            with self._sweeping:
                kept = self._course.saved(manifest.step, self.keep_last_n)
                others = self.store.sweep(self.keep_last_n, kept)
                for remark in self._course.remarks(manifest.step, others):
                    logger.warning(remark)
        except Exception as error:  # it is tried again with the next one
            logger.warning("event=checkpoint-sweep-failed step=%d error=%s", manifest.step, error)

    def _before_load(self) -> None:
        for saver in self._savers:
            saver.wait()


def _release(order: Order) -> None:
    for payload in order.payloads.values():
        payload.release()

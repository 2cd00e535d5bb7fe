"""`CheckpointManager`: the class that users meet. It wires the parts of this package together and decides nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from unified.checkpoint.at_exit import close_at_exit, forget
from unified.checkpoint.background import BackgroundSaver
from unified.checkpoint.compression import Chunk, check_compression
from unified.checkpoint.loading import LoadReport, Wanted, load
from unified.checkpoint.manifest import Kind, Manifest, check_step
from unified.checkpoint.options import FROM_SETTINGS, FromSettings, check_counts, this_writer
from unified.checkpoint.payloads import BytesPayload, Payload
from unified.checkpoint.places import open_place
from unified.checkpoint.reports import report, tell_of_failed, tell_of_given_way
from unified.checkpoint.run_files import RunFiles, checked_metadata
from unified.checkpoint.save_queue import Save, SaveQueue, WhenFull
from unified.checkpoint.store import Order
from unified.core.backoff import Backoff
from unified.errors import UsageError
from unified.runtime_settings import RuntimeSettings

if TYPE_CHECKING:
    from unified.checkpoint.staging import Stager
    from unified.storage.backend import StorageBackend

logger = logging.getLogger(__name__)

BACKOFF = Backoff(first_s=0.5, limit_s=10.0)
MAX_TRIES = 4
MAX_WAITING = 64
MAX_WAITING_BYTES = 256 << 20

Listener = Callable[[Manifest], object]


class CheckpointManager(RunFiles):
    """Saves checkpoints in the background, and loads them. Safe for threads.

    A save returns when its data are in memory of the manager's; writing goes on meanwhile, one save after another. A
    checkpoint exists when its manifest does, which is written last, so that a crash at any moment leaves the one before
    as the latest. Saves under way are finished by `wait`, by `close` and at the program's end.

    Args:
        storage_path: a directory, made when needed; or ``s3://bucket/prefix``.
        backend: ``"local"``; ``"s3"``, for which `storage_path` may also be a prefix in `bucket`; or a storage.
        keep_last_n: how many good checkpoints stay; None: all. Default: as ``[checkpoint]`` of the settings says, or 5.
        compression: ``"gzip"``, ``"zstd"`` (extra ``zstd``) or None. Default: the settings', or None.
        interval_steps: save at multiples of it alone, and do nothing at other steps; None: whenever asked. Default: the
            settings', or None.
        run_id, framework: keep everything under ``<storage_path>/<run_id>/framework=<framework>/``, checkpoints in its
            ``checkpoints/``, as the training service does.
        bucket: for S3, where `storage_path` names none; by default the environment's ``UNIFIED_STORAGE_BUCKET``.
        max_waiting, max_waiting_bytes: how much may wait to be written beside what is being written. One save of any
            size may always wait.
        when_full: ``"newest"``: the oldest waiting save gives way to a new one, which a warning in the log tells.
            ``"wait"``: the new one waits.
        max_tries, backoff: of a save that the storage does not take.
        rank, world_size: of this process; by default the environment's ``RANK`` and ``WORLD_SIZE``, else 0 and 1.
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
        backend: Literal["local", "s3"] | StorageBackend = "local",
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
        on_saved: Listener | None = None,
    ) -> None:
        settings = RuntimeSettings.load_shared().checkpoint
        keep_last_n = settings.keep_last_n if keep_last_n is FROM_SETTINGS else keep_last_n
        compression = settings.compression if compression is FROM_SETTINGS else compression
        interval_steps = settings.interval_steps if interval_steps is FROM_SETTINGS else interval_steps
        check_counts(keep_last_n=keep_last_n, interval_steps=interval_steps, max_tries=max_tries)
        if when_full not in ("newest", "wait"):
            raise UsageError(f"when_full is 'newest' or 'wait', not {when_full!r}.")
        self.keep_last_n = keep_last_n
        self.interval_steps = interval_steps
        self.last_load: LoadReport | None = None
        self._compression = check_compression(compression)
        self._on_saved = on_saved
        writer = this_writer(rank, world_size)
        place = open_place(storage_path, backend, bucket, run_id, framework)
        self._owns_storage = place.is_own
        super().__init__(place, writer, is_run=run_id is not None)
        queue: SaveQueue[Order] = SaveQueue(
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
            when_full=when_full,
            max_tries=max_tries,
            backoff=backoff,
        )
        self._saver = BackgroundSaver(
            queue, self._write, _release, on_given_way=tell_of_given_way, on_failed=tell_of_failed
        )
        self._stager: Stager | None = None
        self._asking = threading.Lock()
        self._is_closed = False
        close_at_exit(self)

    def __repr__(self) -> str:
        return f"CheckpointManager({self.store.place!r}, keep_last_n={self.keep_last_n})"

    # --- saving

    async def save_async(self, data: bytes, step: int) -> None:
        """Save bytes as the checkpoint of `step`, in the background.

        Args:
            data: what `load` will return. Bytes are referred to until they were written; a bytearray is copied.

        Raises:
            UsageError: `data` are no bytes, or none at all; or `step` is no step.
            CheckpointSaveError: earlier saves failed. This one is accepted nevertheless.
        """
        await asyncio.to_thread(self.save_bytes, data, step)

    def save_bytes(self, data: bytes, step: int, *, metadata: Mapping[str, Any] | None = None) -> bool:
        """As `save_async`, for code that is not async. False: it is not at `interval_steps`, and nothing was done."""
        payload = BytesPayload(data)
        return self._save("bytes", step, lambda: payload, payload.nbytes, metadata)

    def save(self, state: Any, step: int, *, metadata: Mapping[str, Any] | None = None) -> bool:
        """Save a state dict as the checkpoint of `step`: copied now into memory that is used again, written later.

        Training may change the tensors as soon as this returns. What is stored is what ``torch.save`` writes, so
        `load_state` reads it, and so does ``torch.load(io.BytesIO(await manager.load(step)))``; tensors off a GPU
        are loaded to the CPU.

        Args:
            state: a dict, or any nest of containers, with tensors on the CPU or on GPUs.
            metadata: kept in the manifest; plain numbers, text, lists and dicts.

        Returns:
            False: `step` is not at `interval_steps`, and nothing was done.

        Raises:
            UsageError: `step` is no step.
            CheckpointSaveError: earlier saves failed. This one is accepted nevertheless.
        """
        from unified.checkpoint.staging import Stager, nbytes_of
        from unified.checkpoint.state_stream import StatePayload

        if self._stager is None:
            self._stager = Stager()
        stager = self._stager
        return self._save("state", step, lambda: StatePayload(stager.stage(state), stager), nbytes_of(state), metadata)

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
        self._saver.wait(timeout)
        report(self._saver.take_failures(), self.store.place)

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
                if self._stager is not None:
                    self._stager.clear()
                if self._owns_storage and not self._saver.steps:
                    self.store.backend.close()

    # --- loading

    async def load(self, step: Wanted = None, *, exact: bool = False) -> bytes:
        """The data of a checkpoint; saves under way here are awaited first.

        Args:
            step: None, ``"latest"``, and 0 too, as the reference document has it: the newest.
            exact: that step and no other: 0 means step 0, and no older one is loaded instead of one that is damaged.

        Raises:
            CheckpointNotFoundError: there is none, or none of that step (a FileNotFoundError).
            CheckpointCorruptError: it is damaged, and so are all before it. Where only it is damaged, the newest good
                one before it is loaded, with a `CheckpointFallbackWarning`, and `last_load` says so.
        """
        return await asyncio.to_thread(self.load_bytes, step, exact=exact)

    def load_bytes(self, step: Wanted = None, *, exact: bool = False) -> bytes:
        """As `load`, for code that is not async."""
        return bytes(self._load(step, ("bytes", "state"), exact=exact))

    def load_state(
        self, step: Wanted = None, *, exact: bool = False, map_location: Any = "cpu", weights_only: bool = True
    ) -> Any:
        """A state dict that `save` saved, or ``torch.save`` into bytes that were saved. Steps and errors as for `load`.

        Args:
            map_location, weights_only: as for ``torch.load``.

        Raises:
            CheckpointError: torch cannot load it.
        """
        from unified.checkpoint.state_stream import load_state

        data = self._load(step, ("bytes", "state"), exact=exact)
        return load_state(data, map_location=map_location, weights_only=weights_only)

    async def list_checkpoints(self) -> list[int]:
        """The steps of all checkpoints there are, in order; saves under way here are awaited first."""
        return await asyncio.to_thread(self.steps)

    def steps(self) -> list[int]:
        """As `list_checkpoints`, for code that is not async."""
        self._saver.wait()
        return self.store.steps()

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
        self, kind: Kind, step: int, make: Callable[[], Payload], nbytes: int, metadata: Mapping[str, Any] | None
    ) -> bool:
        step = check_step(step)
        if not self.should_save(step):
            report(self._saver.take_failures(), self.store.place)
            return False
        kept = checked_metadata(step, metadata)
        with self._asking:
            if self._is_closed:
                raise UsageError(f"{self!r} is closed; the checkpoint of step {step} was not saved.")
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
        try:
            self.store.sweep(self.keep_last_n, {manifest.step})
            if self._on_saved is not None:
                self._on_saved(manifest)
        except Exception as error:  # the checkpoint is safe; what comes after it is tried again with the next one
            logger.warning("event=checkpoint-sweep-failed step=%d error=%s", manifest.step, error)

    def _before_load(self) -> None:
        self._saver.wait()

    def _load(self, step: Wanted, kinds: tuple[Kind, ...], *, exact: bool) -> Chunk:
        self._before_load()
        data, self.last_load = load(self.store, step, kinds=kinds, exact=exact)
        return data


def _release(order: Order) -> None:
    for payload in order.payloads.values():
        payload.release()

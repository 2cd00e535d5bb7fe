"""The checkpoint manager, the class for users: it composes saver, reader and run directory."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from unified.checkpoint.coordinator_notify import CoordinatorNotifier
from unified.checkpoint.load import CheckpointReader, LoadReport, Wanted
from unified.checkpoint.location import joined, open_location, this_writer
from unified.checkpoint.manifest import Kind, Manifest, check_step, checked_metadata
from unified.checkpoint.options import CheckpointOptions, completed, with_options
from unified.checkpoint.payload import BytesPayload
from unified.checkpoint.run_directory import CONFIG_NAME, RunDirectory, file_payloads
from unified.checkpoint.save import CheckpointSaver
from unified.checkpoint.store import CheckpointStore, SaveRequest
from unified.config.runtime import RuntimeSettings
from unified.lazy import needed_by
from unified.rounds.rank_group import Alone, ranks_here
from unified.values import ClosedOnExit

if TYPE_CHECKING:
    from unified.storage.backend import StorageBackend
    from unified.tensors.host_buffers import BufferPool

logger = logging.getLogger(__name__)


class CheckpointManager(ClosedOnExit):
    """Saves checkpoints in the background, and loads them. Safe for threads.

    A save returns once the manager holds the data; a thread writes the saves, one after another. A checkpoint exists
    once its manifest does, which is written last: after a crash at any moment, the checkpoint before is the latest.
    `wait`, `close` and the end of the program finish the saves under way.

    Args:
        storage_path: a directory, made when needed; or ``s3://bucket/prefix``.
        backend: ``"local"``; ``"s3"``, for which `storage_path` may also be a prefix in `bucket`; or a storage.
            Default: as ``[storage]`` of the settings says, or ``"local"``.
        keep_last_n: how many good checkpoints stay; None: all. Default: as ``[checkpoint]`` of the settings says, or 5.
        compression: ``"gzip"``, ``"zstd"`` (extra ``zstd``) or None. Default: the settings', or None.
        interval_steps: save only at multiples of this number; at other steps, such as the last one, only with
            ``force=True``. The log warns of the first step that is not saved. None: save every step that is asked for.
            Default: the settings', or None.
        run_id, framework: keep everything under ``<storage_path>/<run_id>/framework=<framework>/``, checkpoints in its
            ``checkpoints/``, as the training service does.
        bucket: for S3, if `storage_path` names none. Default: the settings'. The region always comes from the settings.
        max_waiting, max_waiting_bytes: limits on the saves that wait, beside the one that is being written. One save of
            any size may always wait, so a large state is in memory twice if it is saved faster than it is written.
        when_full: ``"newest"``: a new save supersedes the oldest waiting one, and the log warns of it. ``"wait"``: the
            new save waits.
        max_tries, backoff: number of tries of a save that fails, and the delays between them.
        rank, world_size: of this process. Default: as in the job, else ``RANK`` and ``WORLD_SIZE``, else 0 and 1.
        process_group: of torch.distributed: the ranks that save and load together; by default all.
        rank_timeout: seconds that a rank waits for the other ranks' parts after it wrote its own; below ten minutes.
        coordinator_url: the coordinator that is notified of each checkpoint and each failed save: ``tcp://HOST:PORT``,
            ``http://HOST:PORT`` or ``HOST:PORT`` of a master, or ``local`` for a coordinator in this process. Default:
            inside a job its master, else ``COORDINATOR_URL``, else none. A thread sends the notifications: no save or
            load fails or waits because the coordinator does not answer.
        series: name under which the coordinator knows the latest of these checkpoints. In a job, each thing that is
            saved needs its own.
        on_saved: called from the saving thread with the manifest of each checkpoint that was written.

    Raises:
        UsageError: an argument is invalid, or a setting (then an OptionError).
        ImportError: S3 or the compression needs an extra.
    """

    def __init__(
        self,
        storage_path: str | os.PathLike[str],
        backend: Literal["local", "s3"] | StorageBackend | None = None,
        **options: Unpack[CheckpointOptions],
    ) -> None:
        settings = RuntimeSettings.load_shared()
        options = self._options = completed(options, settings.checkpoint)
        writer = this_writer(options["rank"], options["world_size"])
        location = open_location(storage_path, backend, options, settings.storage)
        within = "checkpoints" if options["run_id"] is not None else ""
        place = joined(location.text, within)
        self.store = CheckpointStore(location.storage, joined(location.prefix, within), writer, place=place)
        self._owns_storage = location.is_own
        self._notifier = CoordinatorNotifier(options["coordinator_url"], options["series"], writer, place)
        self._saver = CheckpointSaver(self.store, options, self._notifier)
        self._reader = CheckpointReader(self.store, self._notifier)
        self._run = RunDirectory(self.store, location.prefix)
        self._pool: BufferPool | None = None
        if location.is_local:  # not a bucket: making a manager must not use the network
            with suppress(OSError):
                self.store.stored()

    def __repr__(self) -> str:
        return f"CheckpointManager({self.store.place!r}, keep_last_n={self.keep_last_n})"

    @property
    def keep_last_n(self) -> int | None:
        """The number of good checkpoints that stay; None: all."""
        return self._saver.keep_last_n

    @keep_last_n.setter
    def keep_last_n(self, number: int | None) -> None:
        self._saver.keep_last_n = number

    @property
    def interval_steps(self) -> int | None:
        """The interval of steps that are saved; None: whenever asked."""
        return self._saver.interval_steps

    @interval_steps.setter
    def interval_steps(self, steps: int | None) -> None:
        self._saver.interval_steps = steps

    @property
    def last_load(self) -> LoadReport | None:
        """The report of the last load: its step, and the newer ones that were skipped because they are damaged."""
        return self._reader.last

    # --- saving

    async def save_async(self, data: bytes, step: int, *, force: bool = False) -> None:
        """Save bytes as the checkpoint of `step`, in the background.

        Args:
            data: what `load` will return. Bytes are kept by reference until they are written; a bytearray is copied.
            force: save even if `step` is not at `interval_steps`.

        Raises:
            UsageError: `data` are not bytes, or are empty; or `step` is invalid.
            CheckpointSaveError: earlier saves failed. This one is accepted nevertheless.
        """
        await asyncio.to_thread(self.save_bytes, data, step, force=force)

    def save_bytes(
        self, data: bytes, step: int, *, metadata: Mapping[str, Any] | None = None, force: bool = False
    ) -> bool:
        """Save bytes as `save_async` does, from code that is not async.

        Returns:
            False: `step` is not at `interval_steps`, and nothing was done.
        """
        payload = BytesPayload(data)
        return self._saver.save("bytes", step, payload.nbytes, lambda: payload, metadata=metadata, force=force)

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
        """Save a state dict as the checkpoint of `step`: copy it now into reused memory, and write it later.

        Training may change the tensors as soon as this returns. The stored bytes are those of ``torch.save``, so
        `load_state` reads them, and so does ``torch.load(io.BytesIO(await manager.load(step)))``. Tensors from a GPU
        are loaded to the CPU.

        A state with DTensors, as FSDP2 makes them, is saved by all ranks of the process group together. Each rank calls
        this, and copies and writes its own share. The checkpoint exists once all ranks have written their shares.

        Args:
            state: a dict, or any nest of containers, with tensors on the CPU or on GPUs.
            metadata: kept in the manifest; plain numbers, text, lists and dicts.
            sharded: True: all ranks save together, also a state without DTensors, of which each rank writes a part. The
                state is then a dict, and may hold modules and optimizers themselves. False: this rank saves all of it.
            force: save even if `step` is not at `interval_steps`; the same on all ranks that save together.

        Returns:
            False: `step` is not at `interval_steps`, and nothing was done.

        Raises:
            UsageError: `step` is invalid, or the states of the ranks do not fit together.
            CheckpointError: another rank could not save, so none did.
            CheckpointSaveError: earlier saves failed. This one is accepted nevertheless.
        """
        from unified.checkpoint.state_stream import StatePayload, is_sharded
        from unified.tensors.host_buffers import BufferPool, nbytes_of, stage_state

        if sharded or (sharded is None and is_sharded(state)):
            return self._saver.save_together(state, step, metadata=metadata, force=force)
        pool = self._pool = self._pool or BufferPool(one_size=True)
        return self._saver.save(
            "state",
            step,
            nbytes_of(state),
            lambda: StatePayload(stage_state(state, pool)),
            metadata=metadata,
            force=force,
        )

    def should_save(self, step: int) -> bool:
        """Return whether `step` is at `interval_steps`, so that a state is to be gathered for it."""
        return self._saver.should_save(step)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save that was accepted is written.

        Args:
            timeout: seconds; None: as long as it takes, which `max_tries` bounds.

        Raises:
            CheckpointSaveError: some failed; each is reported once.
            CheckpointTimeoutError: it took longer than `timeout`. The saves go on.
        """
        self._saver.wait(timeout)

    async def wait_async(self) -> None:
        """Wait as `wait` does."""
        await asyncio.to_thread(self.wait)

    def close(self, timeout: float | None = None) -> None:
        """Wait as `wait` does, and save nothing from now on. Can be called twice."""
        was_closed = self._saver.is_closed
        try:
            self._saver.close(timeout)
        finally:
            if not was_closed and self._pool is not None:
                self._pool.trim()
            if not was_closed and self._owns_storage and self._saver.is_idle:
                self.store.backend.close()

    # --- loading

    async def load(self, step: Wanted = None, *, exact: bool = False) -> bytes:
        """Load the data of a checkpoint; saves under way here are awaited first.

        Args:
            step: None, ``"latest"``, and 0 too, as the reference document has it: the newest.
            exact: load that step and no other: 0 means step 0, and no older one is loaded if it is damaged.

        Raises:
            CheckpointNotFoundError: there is none, or none of that step (a FileNotFoundError).
            CheckpointCorruptError: it and all before it are damaged. If an older one is good, the newest good one is
                loaded, with a `CheckpointFallbackWarning`, and `last_load` says so.
        """
        return await asyncio.to_thread(self.load_bytes, step, exact=exact)

    def load_bytes(self, step: Wanted = None, *, exact: bool = False) -> bytes:
        """Load bytes as `load` does, from code that is not async."""
        self._before_load()
        return self._reader.load_bytes(step, exact=exact)

    @needed_by("CheckpointManager.load_state()")
    def load_state(
        self, step: Wanted = None, *, exact: bool = False, map_location: Any = "cpu", weights_only: bool = True
    ) -> Any:
        """Load a state dict that `save` saved, or ``torch.save`` into saved bytes. Steps and errors: those of `load`.

        If several ranks saved it, this process gets all of it: whole tensors, in dicts whose keys are text. A value
        that differed by rank is a list with the value of each rank.

        Args:
            map_location, weights_only: as for ``torch.load``.

        Raises:
            CheckpointError: torch cannot load it.
        """
        self._before_load()
        return self._reader.load_state(step, exact=exact, map_location=map_location, weights_only=weights_only)

    @needed_by("CheckpointManager.load_state_into()")
    def load_state_into(
        self,
        state: dict[str, Any],
        step: Wanted = None,
        *,
        exact: bool = False,
        weights_only: bool = True,
        sharded: bool | None = None,
        of_rank: int | None = None,
    ) -> int:
        """Fill a state dict in place from what any number of ranks saved: each rank reads what its tensors need.

        If torch.distributed is set up, all ranks call this together, with the same arguments, and load the same step.

        Args:
            state: tensors are filled, everything else is replaced; modules and optimizers at the top level load their
                state. The checkpoint must contain every name in `state`.
            weights_only: as for ``torch.load``, for objects other than tensors.
            sharded: False: this rank loads by itself.
            of_rank: the rank whose values are loaded where the values differed by rank and this rank has none.

        Returns:
            The step that was loaded.

        Raises:
            CheckpointError: the checkpoint does not fit `state`, or another rank failed. `state` may be filled in part
                after this and after a CheckpointCorruptError. Steps and other errors as for `load`.
        """
        self._before_load()
        ranks = Alone() if sharded is False else ranks_here(self._options["process_group"])
        return self._reader.load_into(
            state, step, exact=exact, weights_only=weights_only, ranks=ranks, of_rank=of_rank
        ).step

    def discard_after(self, step: int) -> list[int]:
        """Delete all checkpoints after that of `step`: after a rollback to it, the next save is then the latest.

        Without this the later checkpoints stay, and a load without a step takes the highest of them. Saves under way
        here are awaited first. If torch.distributed is set up, all ranks call this together; otherwise one process
        calls it, before any process saves.

        Returns:
            The steps that were deleted, in order.

        Raises:
            CheckpointNotFoundError: there is no checkpoint of `step`; nothing was deleted.
            CheckpointCorruptError: it is damaged, as far as its manifest and sizes show; nothing was deleted.
        """
        check_step(step)
        self._before_load()
        ranks = ranks_here(self._options["process_group"]) if "torch" in sys.modules else Alone()
        return self._saver.discard_after(step, ranks)

    async def list_checkpoints(self) -> list[int]:
        """Return the steps of all checkpoints, in order; saves under way here are awaited first."""
        return await asyncio.to_thread(self.steps)

    def steps(self) -> list[int]:
        """Return the steps as `list_checkpoints` does, from code that is not async."""
        self._before_load()
        return self.store.steps()

    # --- runs

    def save_checkpoint(
        self,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
    ) -> Manifest:
        """Record that there is a checkpoint of `step`: ``step-000001.json`` and, if given, the files of a directory.

        Args:
            metadata: kept in the manifest; plain numbers, text, lists and dicts.
            directory: its files belong to the checkpoint. `materialize_checkpoint` brings them back.

        Raises:
            UsageError: JSON cannot hold the metadata, or `directory` is no directory or is empty.
            CheckpointExistsError: another run writes the same step here.
            OSError: the storage does not take it.
        """
        kept = checked_metadata(check_step(step), metadata)
        payloads = {} if directory is None else file_payloads(directory, step)
        kind: Kind = "files" if payloads else "metadata"
        request = SaveRequest(int(step), secrets.token_hex(6), payloads, kind, metadata=kept)
        return self._saver.write(request)

    def checkpoint(self, step: int) -> Manifest:
        """Return the manifest of one checkpoint.

        Raises:
            CheckpointNotFoundError: there is none of that step.
            CheckpointCorruptError: its manifest cannot be read.
        """
        self._before_load()
        return self.store.manifest(check_step(step))

    def latest_checkpoint(self) -> Manifest | None:
        """Return the newest checkpoint that looks whole: readable, its parts there in full size; else None."""
        self._before_load()
        return self._reader.latest()

    @needed_by("CheckpointManager.materialize_checkpoint()")
    def materialize_checkpoint(
        self, checkpoint: Manifest | Wanted = None, directory: str | os.PathLike[str] | None = None
    ) -> Path:
        """Bring a checkpoint to the local disk.

        Args:
            checkpoint: as `latest_checkpoint` gives it, or a step; None: the latest that is whole.
            directory: where to make ``checkpoint-<step>``; by default a new temporary one, which the caller owns.

        Returns:
            The directory of the checkpoint: its files, or ``data.bin`` or ``state.pt``, and its manifest. It is made
            whole or not at all, and replaces an existing one.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointCorruptError: it is damaged.
        """
        self._before_load()
        return self._run.materialize(self._reader.find(checkpoint), directory)

    def persist_config(self, config: object, name: str = CONFIG_NAME) -> str:
        """Keep the configuration of a run as ``config/run.json``, and make ``logs/``.

        Args:
            config: a mapping, a pydantic or dataclass object, an OmegaConf config, or an argparse namespace. Values
                that JSON cannot hold are kept as text.

        Returns:
            Its key in the storage.
        """
        return self._run.persist_config(config, name)

    def sync_directory(self, directory: str | os.PathLike[str], name: str | None = None) -> list[str]:
        """Copy the files of a local directory to the run's storage, except those unchanged since the last time.

        Args:
            name: name of the directory there, such as ``"logs"``; by default that of `directory`.

        Returns:
            The keys that were written. Files that are gone here stay there.

        Raises:
            UsageError: `directory` is no directory.
            OSError: a file cannot be read, or the storage does not take it.
        """
        return self._run.sync(directory, name)

    # --- opening and closing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _before_load(self) -> None:
        self._saver.finish()


CheckpointManager.__init__.__signature__ = with_options(CheckpointManager.__init__)  # type: ignore[attr-defined]

"""Checkpoints of a run in its layout: files first, then ``step-XXXXXX.json``, the mark that makes them one.

A process that is killed at any moment leaves the older steps complete: a step counts when its mark can be read and
every file that the mark names is there with the size that it says.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from shutil import copyfileobj
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from unified.errors import CheckpointNotFoundError, NotFoundError, UsageError
from unified.storage import open_storage
from unified.training.layout import CONFIG_NAME, KEEP_NAME, RunLayout, step_key, step_of
from unified.values import ClosedOnExit

if TYPE_CHECKING:
    from unified.storage.backend import StorageBackend

NUM_PARALLEL = 4
COPY_NBYTES = 32 << 20
"""Bytes that are asked for at a time: a bucket gives them in parts, several at once."""
FileSource = Path | bytes


class MarkedFile(msgspec.Struct, frozen=True):
    """One file of a checkpoint, by its name below ``checkpoints/``."""

    name: str
    nbytes: int


class CheckpointMark(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``step-XXXXXX.json``."""

    step: int
    framework: str = ""
    run_id: str = ""
    saved_at: str = ""
    """UTC, by ISO 8601."""
    world_size: int = 1
    files: list[MarkedFile] = []
    metrics: dict[str, Any] = {}
    state: dict[str, Any] = {}
    """Position of the training, for its framework: epoch, batches done, …"""

    def nbytes(self) -> int:
        """Return the size of all files together."""
        return sum(file.nbytes for file in self.files)


class _RunFolder(NamedTuple):
    backend: StorageBackend
    prefix: str

    @classmethod
    def open(cls, uri: str) -> _RunFolder:
        backend, prefix = open_storage(uri)
        return cls(backend, f"{prefix}/" if prefix else "")


class RunCheckpointManager(ClosedOnExit):
    """Writes and reads the checkpoints and the configuration of one run. Safe to use from any thread of one process.

    Args:
        layout: folders of the run.
        world_size: number of ranks, as marks say it.
        save_total_limit: checkpoints that are kept, the newest ones; 0: all.

    Every method that reaches the store may raise `StorageError`.
    """

    def __init__(self, layout: RunLayout, *, world_size: int = 1, save_total_limit: int = 0) -> None:
        self.layout = layout
        self._world_size = world_size
        self._limit = save_total_limit
        self._checkpoints = _RunFolder.open(layout.checkpoints_uri)
        self._config = _RunFolder.open(layout.config_uri)
        self._logs = _RunFolder.open(layout.logs_uri)

    def close(self) -> None:
        """Let go of connections. Another use opens them again."""
        for folder in (self._checkpoints, self._config, self._logs):
            folder.backend.close()

    def prepare(self) -> None:
        """Make ``logs/.keep``, unless it is there."""
        backend, prefix = self._logs
        if not backend.exists(f"{prefix}{KEEP_NAME}"):
            backend.write(f"{prefix}{KEEP_NAME}", b"")

    def persist_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config/run.json``."""
        data = json.dumps(config, indent=2, default=str) + "\n"
        self._config.backend.write(f"{self._config.prefix}{CONFIG_NAME}", data.encode())

    def read_config(self) -> dict[str, Any] | None:
        """Return ``config/run.json``; None if there is none that can be read."""
        try:
            found = json.loads(self._config.backend.read(f"{self._config.prefix}{CONFIG_NAME}"))
        except (NotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def save_checkpoint(
        self,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, FileSource] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> CheckpointMark:
        """Save a checkpoint: the files, several at a time, and then its mark. Older ones beyond the limit are deleted.

        Args:
            step: optimizer steps done.
            metadata: metrics, such as the loss.
            files: contents, or local files, by the name below ``checkpoints/``; a name may have slashes.
            state: position of the training, which JSON can say.

        Raises:
            UsageError: a name that is taken by marks.
        """
        self.discard(step)
        return self.commit(step, self.upload(files or {}), metadata, state=state)

    def discard(self, step: int) -> None:
        """Delete the mark of a step, if there is one: files of an earlier attempt may then be replaced, since a kill in
        the middle leaves no mixture that counts."""
        if self._checkpoints.backend.exists(self._key(step_key(step))):  # else no right to delete is needed
            self._delete([step_key(step)])

    def upload(self, files: Mapping[str, FileSource]) -> list[MarkedFile]:
        """Write files of a checkpoint, which several ranks may do, between `discard` and `commit` of rank 0.

        Raises:
            UsageError: a name that is taken by marks.
        """
        if taken := [name for name in files if step_of(name) is not None]:
            raise UsageError(f"a file of a checkpoint cannot be called {taken[0]!r}: marks of checkpoints are.")
        with ThreadPoolExecutor(NUM_PARALLEL, thread_name_prefix="unified-upload") as threads:
            sizes = list(threads.map(self._upload, files, files.values()))
        return [MarkedFile(name, nbytes) for name, nbytes in zip(files, sizes, strict=True)]

    def commit(
        self,
        step: int,
        files: Sequence[MarkedFile],
        metadata: Mapping[str, Any] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> CheckpointMark:
        """Write the mark that makes uploaded files a checkpoint, and delete older ones beyond the limit."""
        mark = CheckpointMark(
            step=step,
            framework=self.layout.framework,
            run_id=self.layout.run_id,
            saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            world_size=self._world_size,
            files=list(files),
            metrics=dict(metadata or {}),
            state=dict(state or {}),
        )
        self._upload(step_key(step), msgspec.json.format(msgspec.json.encode(mark), indent=2))
        if self._limit:
            for old in self.complete_steps()[: -self._limit]:
                self.delete(old)
        return mark

    def complete_steps(self) -> list[int]:
        """Return the steps that can be resumed from, the lowest first."""
        sizes = self._sizes()
        with ThreadPoolExecutor(NUM_PARALLEL, thread_name_prefix="unified-marks") as threads:
            complete = threads.map(partial(self._is_complete, sizes=sizes), steps := _steps(sizes))
            return [step for step, is_complete in zip(steps, complete, strict=True) if is_complete]

    def latest(self) -> int | None:
        """Return the highest complete step, None if there is none."""
        sizes = self._sizes()
        return next((step for step in reversed(_steps(sizes)) if self._is_complete(step, sizes)), None)

    def read_mark(self, step: int) -> CheckpointMark:
        """Return the mark of a step.

        Raises:
            CheckpointNotFoundError: there is none, or it cannot be read.
        """
        name = step_key(step)
        try:
            mark = msgspec.json.decode(self._checkpoints.backend.read(self._key(name)), type=CheckpointMark)
        except NotFoundError as error:
            raise CheckpointNotFoundError(f"{self.layout.checkpoints_uri} has no {name}.") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointNotFoundError(
                f"{self.layout.checkpoints_uri}/{name} is no mark of a checkpoint: {error}"
            ) from error
        if mark.step != step:
            raise CheckpointNotFoundError(f"{self.layout.checkpoints_uri}/{name} says that it is of step {mark.step}.")
        return mark

    def fetch(self, step: int, folder: Path) -> dict[str, Path]:
        """Copy the files of a checkpoint to a local folder; return them by their names.

        Raises:
            CheckpointNotFoundError: the step has no mark.
            NotFoundError: a file that the mark names is gone.
        """
        names = [file.name for file in self.read_mark(step).files]
        with ThreadPoolExecutor(NUM_PARALLEL, thread_name_prefix="unified-download") as threads:
            return dict(zip(names, threads.map(partial(self._download, folder=folder), names), strict=True))

    def delete(self, step: int) -> None:
        """Delete a checkpoint: its mark first, so that no half of it counts."""
        names = [file.name for file in self.read_mark(step).files]
        self._delete([step_key(step), *names])

    def _is_complete(self, step: int, sizes: Mapping[str, int]) -> bool:
        try:
            mark = self.read_mark(step)
        except CheckpointNotFoundError:
            return False
        return all(sizes.get(file.name) == file.nbytes for file in mark.files)

    def _sizes(self) -> dict[str, int]:
        """Return the size of everything below ``checkpoints/``, by name."""
        backend, prefix = self._checkpoints
        return {stat.key.removeprefix(prefix): stat.nbytes for stat in backend.list(prefix)}

    def _key(self, name: str) -> str:
        return f"{self._checkpoints.prefix}{name}"

    def _upload(self, name: str, source: FileSource) -> int:
        if isinstance(source, bytes):
            return self._checkpoints.backend.write(self._key(name), source).nbytes
        with source.open("rb") as file:
            return self._checkpoints.backend.write(self._key(name), file).nbytes

    def _download(self, name: str, folder: Path) -> Path:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"a checkpoint in {self.layout.checkpoints_uri} names a file {name!r}, outside of itself.")
        path.parent.mkdir(parents=True, exist_ok=True)
        making = path.with_name(f".{path.name}.part")
        with self._checkpoints.backend.open_read(self._key(name)) as source, making.open("wb") as file:
            copyfileobj(source, file, COPY_NBYTES)
        os.replace(making, path)
        return path

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._checkpoints.backend.delete(self._key(name))


CheckpointManager = RunCheckpointManager
"""The name in the reference documents."""


def _steps(names: Iterable[str]) -> list[int]:
    return sorted(step for name in names if (step := step_of(name)) is not None)

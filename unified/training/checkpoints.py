"""Checkpoints of a run in its layout: files first, then ``step-XXXXXX.json``, the mark that makes them a checkpoint.

A kill at any moment leaves the older steps complete. A step is complete if its mark can be read, and if every file in
the mark exists with the size in the mark. `fetch` checks the checksums, too.
"""

from __future__ import annotations

import datetime
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from unified.checkpoint.manifest import Checksum, Part, check_part
from unified.checkpoint.payload import CHUNK_BYTES
from unified.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, NotFoundError, UsageError
from unified.storage import open_storage
from unified.training.layout import CONFIG_NAME, KEEP_NAME, RunLayout, step_key, step_of
from unified.values import ClosedOnExit

if TYPE_CHECKING:
    from unified.storage.backend import StorageBackend

NUM_PARALLEL = 4
COPY_NBYTES = 32 << 20
"""Bytes of one read: from a bucket, several parts of it come at once."""
FileSource = Path | bytes


class MarkedFile(msgspec.Struct, frozen=True):
    """One file of a checkpoint, by its name below ``checkpoints/``."""

    name: str
    nbytes: int
    checksum: str = ""
    """Checksum as `unified.checkpoint.manifest.Checksum` writes it; empty in a mark of an older version."""


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
        world_size: number of ranks, for the marks.
        save_total_limit: number of newest checkpoints that are kept; 0: all.

    Every method that reaches the store may raise `StorageError`.
    """

    def __init__(self, layout: RunLayout, *, world_size: int = 1, save_total_limit: int = 0) -> None:
        self.layout = layout
        self._world_size = world_size
        self._limit = save_total_limit
        self._checkpoints = _RunFolder.open(layout.checkpoints_uri)
        self._config = _RunFolder.open(layout.config_uri)
        self._logs = _RunFolder.open(layout.logs_uri)
        self._fetched: dict[Path, MarkedFile] = {}
        self.moved_at = 0.0
        """Time (`time.monotonic`) at which the store last took a part of a save."""

    def close(self) -> None:
        """Close the connections. The next use opens them again."""
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
        """Return ``config/run.json``; None if it is missing or invalid."""
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
            state: position of the training, in types of JSON.

        Raises:
            UsageError: a file has the name of a mark.
        """
        self.discard(step)
        return self.commit(step, self.upload(files or {}), metadata, state=state)

    def discard(self, step: int) -> None:
        """Delete the mark of a step, if there is one. Then a kill, while files of an earlier attempt are replaced,
        leaves no mixture that counts as a checkpoint."""
        if self._checkpoints.backend.exists(self._key(step_key(step))):  # a new step needs no right to delete
            self._delete([step_key(step)])

    def upload(self, files: Mapping[str, FileSource]) -> list[MarkedFile]:
        """Write files of a checkpoint. Several ranks may do this between `discard` and `commit` of rank 0.

        Raises:
            UsageError: a file has the name of a mark.
        """
        if taken := [name for name in files if step_of(name) is not None]:
            raise UsageError(f"a file of a checkpoint cannot be called {taken[0]!r}: it is the name of a mark.")
        with ThreadPoolExecutor(NUM_PARALLEL, thread_name_prefix="unified-upload") as threads:
            return list(threads.map(self._upload, files, files.values()))

    def commit(
        self,
        step: int,
        files: Sequence[MarkedFile],
        metadata: Mapping[str, Any] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> CheckpointMark:
        """Write the mark that makes uploaded files a checkpoint, and delete older ones beyond the limit, except `keep`.

        Args:
            keep: step that stays.
        """
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
            # Steps above this one are damaged, since the run went on from an older one: they do not count here.
            for old in [each for each in self.complete_steps() if each <= step][: -self._limit]:
                if old != keep:
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

    def fetch_latest(self, folder: Path) -> int | None:
        """Copy the files of the highest complete step to a local folder; return the step, None if there is none.

        A step with a missing file, or with another size or checksum, is skipped, with a line on stderr.
        """
        sizes = self._sizes()
        for step in reversed(_steps(sizes)):
            try:
                self._check_sizes(step, sizes)
                self.fetch(step, folder)
                return step
            except (CheckpointError, NotFoundError) as error:
                text = f"checkpoint {step} in {self.layout.checkpoints_uri} is damaged, and passed over: {error}"
                print(f"unified-train: warning: {text}", file=sys.stderr, flush=True)
        return None

    def fetch(self, step: int, folder: Path, *, endings: tuple[str, ...] = ("",)) -> dict[str, Path]:
        """Copy the files of a checkpoint to a local folder, unless it has copied them before; return them by name.

        Args:
            endings: ends of the names of the files to copy; default: all.

        Raises:
            CheckpointNotFoundError: the step has no mark.
            CheckpointCorruptError: a file differs from the mark in size or checksum.
            NotFoundError: a file that the mark names is gone.
        """
        files = [file for file in self.read_mark(step).files if file.name.endswith(endings)]
        with ThreadPoolExecutor(NUM_PARALLEL, thread_name_prefix="unified-download") as threads:
            paths = threads.map(partial(self._download, folder=folder), files)
            return {file.name: path for file, path in zip(files, paths, strict=True)}

    def delete(self, step: int) -> None:
        """Delete a checkpoint: its mark first, so that the rest does not count as one."""
        names = [file.name for file in self.read_mark(step).files]
        self._delete([step_key(step), *names])

    def _is_complete(self, step: int, sizes: Mapping[str, int]) -> bool:
        try:
            self._check_sizes(step, sizes)
        except CheckpointError:
            return False
        return True

    def _check_sizes(self, step: int, sizes: Mapping[str, int]) -> None:
        for file in self.read_mark(step).files:
            if (nbytes := sizes.get(file.name)) != file.nbytes:
                raise CheckpointCorruptError(f"{file.name} has {nbytes or 'no'} bytes, {file.nbytes} were saved")

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of all files below ``checkpoints/``, by name."""
        backend, prefix = self._checkpoints
        return {stat.key.removeprefix(prefix): stat.nbytes for stat in backend.list(prefix)}

    def _key(self, name: str) -> str:
        return f"{self._checkpoints.prefix}{name}"

    def _upload(self, name: str, source: FileSource) -> MarkedFile:
        checksum = Checksum()

        def chunks() -> Iterator[bytes]:
            with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
                while chunk := file.read(CHUNK_BYTES):
                    checksum.update(chunk)
                    yield chunk
                    self.moved_at = time.monotonic()

        nbytes = self._checkpoints.backend.write(self._key(name), chunks()).nbytes
        self.moved_at = time.monotonic()
        return MarkedFile(name, nbytes, checksum.text)

    def _download(self, file: MarkedFile, folder: Path) -> Path:
        path = folder / file.name
        if not path.resolve().is_relative_to(folder.resolve()):
            where = self.layout.checkpoints_uri
            raise UsageError(f"a checkpoint in {where} names a file {file.name!r}, outside of itself.")
        if self._fetched.get(path) == file and path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        making = path.with_name(f".{path.name}.part")
        checksum = Checksum(file.checksum)
        with self._checkpoints.backend.open_read(self._key(file.name)) as source, making.open("wb") as target:
            while chunk := source.read(COPY_NBYTES):
                checksum.update(chunk)
                target.write(chunk)
        saved = Part(key=file.name, size_bytes=file.nbytes, checksum=file.checksum)
        check_part(saved, checksum.nbytes, checksum.text if file.checksum else "")
        os.replace(making, path)
        self._fetched[path] = file
        return path

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._checkpoints.backend.delete(self._key(name))


CheckpointManager = RunCheckpointManager
"""The name in the reference documents."""


def _steps(names: Iterable[str]) -> list[int]:
    return sorted(step for name in names if (step := step_of(name)) is not None)

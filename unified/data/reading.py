"""Reads the samples of a dataset by their numbers, from its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from unified.data.files import DataFile, DataFiles, Order, format_of
from unified.data.formats import open_format
from unified.errors import DatasetError, UsageError
from unified.protocol.coordinator import FileRun, ShardAssignment
from unified.values import ClosedOnExit

_FILES_AT_ONCE = 8


def find_runs(path: str, format: str, *, order: Order = "natural") -> list[FileRun]:  # noqa: A002
    """Find the files of a dataset in order, each with its own number of samples.

    Args:
        path: a file, a directory or a glob, here or ``s3://``; see `DataFiles.find`.
        format: ``parquet``, ``csv``, ``tfrecord``, ``jsonl``, ``arrow`` or ``orc``.
        order: ``"natural"`` or ``"lexical"``, by the files' paths.

    Returns:
        For each file its absolute path and its number of samples, which may be 0.

    Raises:
        DataFileNotFoundError: there is no file.
        DatasetError: a file is empty, unreadable, or not of this format; or no file has a sample.
        UsageError: there is no such format.
    """
    rows = open_format(format)
    with DataFiles() as files:
        paths = files.find(path, format, order)
        with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(paths)), "data-count") as threads:
            futures = [threads.submit(lambda each: rows.count(files.file(each)), each) for each in paths]
            try:
                counts = [future.result() for future in futures]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
    if not sum(counts):
        raise DatasetError(f"{path} has no sample in any of its {len(paths)} {format} files: write them again.")
    return [FileRun(path=each, num_samples=count) for each, count in zip(paths, counts, strict=True)]


class ShardReader(ClosedOnExit):
    """Reads shards, and remembers facts about their files that help to find rows. For one thread at a time.

    Args:
        format: the files' format; None: the format that each name shows.
        columns: names of the columns to read, in this order; None: all. Not for ``tfrecord``.
        verify: check the checksums of ``tfrecord`` samples. Checksums of their lengths are always checked.

    Raises:
        UsageError: there is no such format, or it has no columns.
    """

    def __init__(
        self,
        format: str | None = None,  # noqa: A002
        *,
        columns: Sequence[str] | None = None,
        verify: bool = False,
    ) -> None:
        self._format = format
        self._columns = columns
        self._verify = verify
        self._files = DataFiles()
        self._known: dict[str, DataFile] = {}
        if format is not None:
            open_format(format, columns, verify=verify)  # raises for wrong arguments now

    def close(self) -> None:
        """End the connections."""
        self._files.close()

    def iter_samples(self, assignment: ShardAssignment, skip: int = 0) -> Iterator[Any]:
        """Yield the samples of a shard in their order: dicts, or bytes of ``tfrecord``.

        Args:
            skip: the number of first samples to leave out.

        Raises:
            DatasetError: a file cannot be read, or has fewer rows than when the dataset was registered.
        """
        start, wanted = assignment.first_row, assignment.end_sample - assignment.start_sample
        if wanted > 0 and not assignment.file_paths:
            raise DatasetError(
                f"shard {assignment.shard_id} names no files: register the dataset where its files can be seen, so "
                "that they can be counted."
            )
        given = skip
        for path in assignment.file_paths:
            if given >= wanted:
                return
            file = self._known.setdefault(path, self._files.file(path))
            rows = open_format(self._format or format_of(path), self._columns, verify=self._verify)
            if skip and len(assignment.file_paths) > 1 and (there := rows.count(file) - start) <= skip:
                skip, start = skip - there, 0
                continue
            for sample in rows.rows(file, start + skip, start + skip + wanted - given):
                given += 1
                yield sample
            start = skip = 0
        if given < wanted:
            raise DatasetError(
                f"{', '.join(assignment.file_paths)} end {wanted - given} samples before shard {assignment.shard_id} "
                "does: they were changed after the dataset was registered. Register it anew, under another name."
            )


def iter_samples(
    assignment: ShardAssignment | Iterable[ShardAssignment],
    format: str | None = None,  # noqa: A002
    *,
    columns: Sequence[str] | None = None,
    verify: bool = False,
) -> Iterator[Any]:
    """Yield exactly the samples of one or several shards, in order: dicts, or bytes of ``tfrecord``.

    Args:
        assignment: the result of `DatasetRegistry.get_assignment`, or one of its shards.
        format: the files' format; None: the format that each name shows.
        columns: names of the columns to read, in this order; None: all. Not for ``tfrecord``.
        verify: check the checksums of ``tfrecord`` samples. Checksums of their lengths are always checked.

    Raises:
        DatasetError: a file cannot be read, is of another format, or has changed; names the file.
        UsageError: there is no such format, or it has no columns.
    """
    with ShardReader(format, columns=columns, verify=verify) as reader:
        for each in [assignment] if isinstance(assignment, ShardAssignment) else assignment:
            yield from reader.iter_samples(each)


def dataset_files(path: str, format: str, total_samples: int | None) -> list[FileRun]:  # noqa: A002
    """Find the files of a dataset in order, with their counts. A single file that would have to be read through is not
    counted if `total_samples` is given."""
    rows = open_format(format)
    if total_samples is not None and total_samples > 0 and not rows.is_counted:
        with DataFiles() as files:
            found = files.find(path, format)
            if len(found) == 1:  # the begin of each shard is known without a count
                rows.check(files.file(found[0]))
                return [FileRun(path=found[0], num_samples=total_samples)]
    runs = find_runs(path, format)
    counted = sum(run.num_samples for run in runs)
    if total_samples not in (None, counted):
        raise UsageError(
            f"the {len(runs)} {format} files of {path} hold {counted} samples, not total_samples={total_samples}: "
            "give the right number, or none to have them counted."
        )
    return runs

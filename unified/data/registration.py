"""What has to be found out before a dataset is registered."""

from __future__ import annotations

from unified.errors import UsageError
from unified.protocol.coordinator import DatasetStatus, FileRun

Values = tuple[str, str, int, bool, int, dict[str, str]]


def is_registered_as(known: DatasetStatus, asked: Values, total_samples: int | None) -> bool:
    """Whether a dataset that is known has these values: path, format, shard size, shuffle, seed, metadata."""
    there = (known.path, known.format, known.shard_size, known.shuffle, known.seed, known.metadata)
    return there == asked and total_samples in (None, known.total_samples)


def dataset_files(path: str, format: str, total_samples: int | None) -> list[FileRun]:  # noqa: A002
    """The files of a dataset in order, counted unless there is one alone that would have to be read through.

    Raises:
        DataFileNotFoundError: nothing is there.
        DatasetError: a file is empty, unreadable, or of another format.
        UsageError: no such format; or the files, so far as they are counted, do not hold `total_samples`.
    """
    from unified.data.files import DataFiles
    from unified.data.formats import open_format
    from unified.data.reading import find_runs

    rows = open_format(format)
    if total_samples is not None and total_samples > 0 and not rows.is_counted:
        with DataFiles() as files:
            found = files.find(path, format)
            if len(found) == 1:  # where each shard begins in it is known without a count
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

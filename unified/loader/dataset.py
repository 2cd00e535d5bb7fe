"""`Dataset`: a source and the operators on its items, carried out when it is iterated over.

The operators are a few lines of `itertools` each. Existing packages do not fit: torchdata is no longer developed, and
Hugging Face `datasets`, though well maintained, brings a dozen packages and gives its shards to workers in its own
order. A `datasets.Dataset`, like anything with a length and an index, is a source here; files are read as in
`unified.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from unified.data.files import DataFiles, formats_of
from unified.data.formats import open_format
from unified.errors import UsageError
from unified.loader.execution import (
    Batch,
    Filter,
    FlatMap,
    Map,
    Operator,
    PipelineRun,
    Repeat,
    Shuffle,
    Spread,
    Take,
    has_index,
)

T = TypeVar("T")
U = TypeVar("U")
_NAMES = {"json": "jsonl", "feather": "arrow", "ipc": "arrow"}
"""Other names of formats."""


class Dataset(Generic[T]):
    """A source of items and the operators on them. Only an iteration does any work, and each iteration gives the same
    items. Every method returns a new `Dataset`; this one stays unchanged.

        lines = Dataset(range(1000)).shuffle(seed=1).map(load).filter(is_good).batch(32).spread(4)
        for batch in lines: ...

    Args:
        source: a sequence, or anything else with a length and an index (a map-style torch dataset, a
            `datasets.Dataset`); or an iterable that can be iterated over again; or a function without arguments that
            returns an iterator. Workers read the first kind, this process reads the others.
    """

    def __init__(self, source: Sequence[T] | Iterable[T] | Callable[[], Iterator[T]]) -> None:
        self._source: Any = source
        self._operators: tuple[Operator, ...] = ()
        self._spread: Spread | None = None
        if isinstance(source, Iterator):
            raise UsageError(
                f"a Dataset is iterated over many times, and {type(source).__name__} is an iterator, which can be used "
                "only once: give it a sequence, an iterable, or a function that returns an iterator."
            )
        if not (callable(source) or hasattr(source, "__iter__") or has_index(source)):
            raise UsageError(f"a Dataset cannot read items from a {type(source).__name__}.")

    @staticmethod
    def from_files(
        paths: str | Sequence[str], kind: str | None = None, columns: Sequence[str] | None = None
    ) -> Dataset[dict[str, Any]]:
        """Read rows of files as dicts, part by part where they are needed; records of ``tfrecord`` as bytes.

        Files, formats, compression and order are those of `unified.data.DatasetRegistry.register`.

        Args:
            paths: a file, a folder or a glob, here or as ``s3://bucket/…``, or several of them. The files of a folder
                or a glob come in natural order (``part-2`` before ``part-10``), several paths in the order given.
            kind: ``parquet``, ``csv``, ``jsonl`` (or json), ``arrow`` (or feather), ``orc`` or ``tfrecord``; None: by
                the names of the files.
            columns: their names, in this order; None: all. Not for ``tfrecord``.

        Raises:
            DataFileNotFoundError: there is no such file.
            DatasetError: a file is empty, unreadable or of another format; or its name tells no format.
            UsageError: there is no such format or column.
            ImportError: pyarrow is not installed; names the extra.
        """
        return Dataset(find_parts(paths, kind, columns)).flat_map(lambda piece: piece.rows())

    def map(self, function: Callable[[T], U]) -> Dataset[U]:
        """Apply `function` to each item."""
        return self._with(Map(function))

    def filter(self, predicate: Callable[[T], Any]) -> Dataset[T]:
        """Keep the items for which `predicate` is true."""
        return self._with(Filter(predicate))

    def flat_map(self, function: Callable[[T], Iterable[U]]) -> Dataset[U]:
        """Replace each item by the items that `function` returns for it."""
        return self._with(FlatMap(function))

    def batch(
        self, size: int, *, drop_last: bool = False, collate: Callable[[list[T]], U] | None = None
    ) -> Dataset[Any]:
        """Make lists of `size` items, or the results of `collate` on these lists (such as torch's ``default_collate``).

        Args:
            drop_last: leave out the last list if it is shorter.
        """
        return self._with(Batch(_positive("the size of a batch", size), drop_last, collate))

    def shuffle(self, seed: int = 0, buffer: int = 10_000) -> Dataset[T]:
        """Change the order, in the same way for the same seed; each pass of a later `repeat` has another order.

        Args:
            buffer: items held back to choose among. A shuffle that is the first operator on a source with a length and
                an index needs none: any order is possible then.
        """
        return self._with(Shuffle(seed, _positive("the buffer of a shuffle", buffer)))

    def repeat(self, times: int | None = None) -> Dataset[T]:
        """Repeat all items, `times` times; None: without an end."""
        return self._with(Repeat(times))

    def take(self, number: int) -> Dataset[T]:
        """Keep the first `number` items."""
        return self._with(Take(number))

    def spread(
        self,
        num_workers: int | None = None,
        *,
        chunk: int | None = None,
        depth: int = 2,
        role: str | None = None,
        local: bool = False,
    ) -> Dataset[T]:
        """Run `map`, `filter` and `flat_map` in other processes: the workers of the job's loader role, or helper
        processes on this node, as `DataLoaderIter` chooses. The items come in the same order.

        A `batch` and its `collate` run there, too, if each item of the batch comes from one item of the source.

        Args:
            num_workers: None: as many as the role has, or 1.
            chunk: items that are sent at once; None: the size of such a batch, 1 with a `flat_map`, else 16.
            depth: chunks of each worker that may be under way or wait here.
            role, local: as `DataLoaderIter` takes them.
        """
        made: Dataset[T] = self._with()
        made._spread = Spread(num_workers, chunk, depth, role, local)
        return made

    def __iter__(self) -> Iterator[T]:
        run = PipelineRun(self._source, self._operators, self._spread)
        try:
            yield from run.items()
        finally:
            run.close()

    def __repr__(self) -> str:
        chain = "".join(f".{type(operator).__name__.lower()}(…)" for operator in self._operators)
        return f"Dataset({type(self._source).__name__}){chain}"

    def _with(self, *operators: Operator) -> Dataset[Any]:
        made: Dataset[Any] = Dataset.__new__(Dataset)
        made._source, made._operators, made._spread = self._source, (*self._operators, *operators), self._spread
        return made


def _positive(what: str, number: int) -> int:
    if type(number) is not int or number < 1:
        raise UsageError(f"{what} is a number from 1 up, not {number!r}.")
    return number


class FilePart(NamedTuple):
    """A part of a file that can be read by itself: a row group if the format has them, else the file."""

    path: str
    format: str
    start: int
    """The first row."""
    end: int
    """The row after the last one."""
    columns: list[str] | None

    def rows(self) -> Iterator[Any]:
        """Yield its rows, with only some of them in memory at a time."""
        with DataFiles() as files:
            yield from open_format(self.format, self.columns).rows(files.file(self.path), self.start, self.end)


def find_parts(
    paths: str | Sequence[str], kind: str | None = None, columns: Sequence[str] | None = None
) -> list[FilePart]:
    """Return the parts of these files, in the order of their names and rows; see `Dataset.from_files`."""
    names = list(columns) if columns is not None else None
    pieces: list[FilePart] = []
    with DataFiles() as files:
        for path in [paths] if isinstance(paths, str) else paths:
            if kind is None:
                found = formats_of(path, files)
            else:
                format_ = _NAMES.get(kind, kind)
                found = dict.fromkeys(files.find(path, format_), format_)
            for each, format_ in found.items():
                rows = open_format(format_, names)
                file = files.file(each)
                if names is not None and not pieces:
                    _check_columns(names, next(open_format(format_).rows(file, 0, 1), None))
                pieces += [FilePart(each, format_, start, end, names) for start, end in rows.pieces(file)]
    return pieces


def _check_columns(columns: list[str], row: dict[str, Any] | None) -> None:
    if row is not None and (unknown := set(columns) - set(row)):
        raise UsageError(f"the files have no column {min(unknown)!r}; they have {', '.join(row)}.")

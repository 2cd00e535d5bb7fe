"""The dataset of a run: JSON lines anywhere, checked in one pass, and their texts as rows that are read when needed.

Memory stays flat for a dataset of any size. A plain local file is read in place; any other file (in a bucket, or
compressed) is copied to a local file of the node while it is checked. An index has the offset of a row about every
16 KiB, so that a row takes one read of about 16 KiB.
"""

from __future__ import annotations

import io
import json
import math
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple, cast, overload

import msgspec

from unified.data.files import DataFile, DataFiles
from unified.errors import DatasetError, UnifiedError, nearest

if TYPE_CHECKING:
    from unified.training.run import TrainingRun
    from unified.training.tokenizer import Tokenizer

BLOCK_NBYTES = 16 << 10
READ_NBYTES = 32 << 20
"""Bytes of one read: from a bucket, several parts of it come at once."""
LONGEST_LINE = 64 << 20
FEWEST_ROWS = 20
"""A dataset of fewer rows holds none out."""
MOST_HELD_OUT = 1000
"""Most rows that are held out by default, so that evaluations stay short."""
IGNORED = -100
"""Label of a position without a target."""


class DataPart(NamedTuple):
    """One file of a dataset, local and plain."""

    path: str
    name: str
    """Name that the user knows."""
    num_rows: int
    index_file: str
    """File with row and offset of each block, alternately."""


def load_rows(run: TrainingRun) -> tuple[TextSplit, TextSplit]:
    """Return the rows to train on, and those that are held out. A collective.

    Raises:
        DatasetError: a row is invalid, or there is none.
        StorageError: the bucket cannot be read.
    """
    field, folder = run.arguments.dataset_text_field, run.scratch / "dataset"
    parts = run.work.on_each_node(lambda: copy_dataset(run.options.dataset_uri, field, folder))
    rows = TextRows(parts, field)
    every = round(1 / run.arguments.eval_fraction) if run.arguments.eval_fraction and len(rows) >= FEWEST_ROWS else 0
    if every and "eval_fraction" not in run.arguments.given:
        every = max(every, math.ceil(len(rows) / MOST_HELD_OUT))
    return TextSplit(rows, every, is_held_out=False), TextSplit(rows, every, is_held_out=True)


def copy_dataset(uri: str, field: str, folder: Path) -> list[DataPart]:
    """Check every row of a dataset, copy files that cannot be read in place to `folder`, and index all files there.

    Args:
        uri: a file, a folder or a glob: local, ``file://`` or ``s3://``.
        field: name of the field with the text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parse = row_parser(field)
    with DataFiles() as files:
        paths = files.find(uri, "jsonl")
        parts = [_copy_part(files.file(path), folder / f"{number}", parse) for number, path in enumerate(paths)]
    if not any(part.num_rows for part in parts):
        raise DatasetError(f"{uri} holds no row: write one JSON object a line, such as {{{json.dumps(field)}: ...}}.")
    return parts


def row_parser(field: str) -> Callable[[bytes], str]:
    """Return the function that returns the text of a line.

    The message of its DatasetError is the end of a sentence about the line, such as ``is not JSON``.
    """
    text = Annotated[str, msgspec.Meta(min_length=1)]
    decoder = msgspec.json.Decoder(msgspec.defstruct("Row", [("text", text)], rename={"text": field}))

    def parse(line: bytes) -> str:
        try:
            row: Any = decoder.decode(line)
            return cast(str, row.text)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # The slow way explains the error, and accepts what only Python's JSON allows (NaN, a byte order mark).
            return _parse_slowly(line, field)

    return parse


def _parse_slowly(line: bytes, field: str) -> str:
    encoding = json.detect_encoding(line)
    if not encoding.startswith("utf-8"):
        raise DatasetError(f"is {encoding.upper()} and not UTF-8: save the file as UTF-8")
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DatasetError(f"is no JSON object but {type(row).__name__}")
    if field not in row:
        has = ", ".join(map(repr, list(row)[:10])) or "none"
        raise DatasetError(
            f"has no field {field!r}; its fields: {has}.{nearest(field, row)} "
            "extra_args.dataset_text_field names the field with the text"
        )
    if not isinstance(row[field], str):
        raise DatasetError(f"has a {type(row[field]).__name__} and no text in its field {field!r}")
    if not row[field]:
        raise DatasetError(f"has an empty text in its field {field!r}: leave the row out, or write a text")
    return cast(str, row[field])


def _copy_part(file: DataFile, target: Path, parse: Callable[[bytes], str]) -> DataPart:
    index = array("Q")
    row = offset = 0
    end_of_block = 0
    try:
        with ExitStack() as stack:
            source = stack.enter_context(io.BufferedReader(cast(io.RawIOBase, file.open()), READ_NBYTES))
            copy = None if file.is_mappable else stack.enter_context(open(f"{target}.jsonl", "wb"))
            for number, line in enumerate(_lines(source, file.path), 1):
                if not line.isspace():
                    _check(parse, line, f"line {number} of {file.path}")
                    if offset >= end_of_block:
                        index.extend((row, offset))
                        end_of_block = offset + BLOCK_NBYTES
                    row += 1
                offset += len(line)
                if copy is not None:
                    copy.write(line)
    except UnifiedError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{file.path} cannot be read, or copied to {target.parent}: {error}") from error
    index.extend((row, offset))
    with open(f"{target}.index", "wb") as written:
        index.tofile(written)
    return DataPart(file.path if file.is_mappable else f"{target}.jsonl", file.path, row, f"{target}.index")


def _lines(source: BinaryIO | io.BufferedReader, path: str) -> Iterator[bytes]:
    number = 0
    while line := source.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE:
            raise DatasetError(f"line {number} of {path} is longer than {LONGEST_LINE >> 20} MiB: is it JSON lines?")
        yield line


def _check(parse: Callable[[bytes], str], line: bytes, where: str) -> str:
    try:
        return parse(line)
    except DatasetError as error:
        raise DatasetError(f"{where} {error}.") from None


class TextRows:
    """Texts of all rows of a dataset, by number. Safe to use in several threads, and in forked processes."""

    def __init__(self, parts: Sequence[DataPart], field: str) -> None:
        self._parts = [part for part in parts if part.num_rows]
        self._field = field
        self._firsts: list[int] = []
        """Number of the first row of each part."""
        self._blocks: list[tuple[array[int], array[int]]] = []
        """Rows and offsets at which the blocks of each part begin, and those of its end."""
        self._num_rows = 0
        for part in self._parts:
            self._firsts.append(self._num_rows)
            self._num_rows += part.num_rows
            index = array("Q", Path(part.index_file).read_bytes())
            self._blocks.append((index[::2], index[1::2]))
        self._parse = row_parser(field)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_parse"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._parse = row_parser(self._field)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> str:
        if not 0 <= row < self._num_rows:
            raise IndexError(row)
        number = bisect_right(self._firsts, row) - 1
        part, (rows, offsets) = self._parts[number], self._blocks[number]
        row -= self._firsts[number]
        block = bisect_right(rows, row) - 1
        try:
            with open(part.path, "rb", buffering=0) as file:
                data = os.pread(file.fileno(), offsets[block + 1] - offsets[block], offsets[block])
            lines = [line for line in data.split(b"\n") if line and not line.isspace()]
            line = lines[row - rows[block]]
        except (OSError, IndexError) as error:
            raise DatasetError(f"row {row} of {part.name} is not there any more: was the file changed?") from error
        return _check(self._parse, line, f"row {row} of {part.name}")


class TextSplit(Sequence[str]):
    """Rows to train on, or held-out rows: the last one of every `every` rows; 0: none is held out."""

    def __init__(self, rows: TextRows, every: int, *, is_held_out: bool) -> None:
        self._rows = rows
        self._every = every
        self._is_held_out = is_held_out

    def __len__(self) -> int:
        held_out = len(self._rows) // self._every if self._every else 0
        return held_out if self._is_held_out else len(self._rows) - held_out

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._is_held_out:
            return self._rows[index * self._every + self._every - 1]
        return self._rows[index + index // (self._every - 1) if self._every else index]


class TokenRows:
    """Rows as tokens, computed on access: a dataset of `torch.utils.data`."""

    def __init__(self, texts: TextSplit, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self._texts = texts
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.tokens(self._texts[index], self._max_seq_len)}


class PaddingCollator:
    """Makes batches of rows of unequal length: padded on the right to the longest, without targets there."""

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
        """Return ``input_ids``, ``attention_mask`` and ``labels``, each of shape (rows, longest)."""
        import torch

        tokens = [torch.tensor(row["input_ids"]) for row in rows]

        def padded(parts: list[torch.Tensor], value: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

        return {
            "input_ids": padded(tokens, self._pad_id),
            "attention_mask": padded([torch.ones_like(each) for each in tokens], 0),
            "labels": padded(tokens, IGNORED),
        }

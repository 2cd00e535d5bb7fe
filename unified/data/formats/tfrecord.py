"""TFRecord files, read without TensorFlow; samples are bytes.

A record is: length (8 bytes, little endian), masked CRC-32C of these 8 bytes, data, masked CRC-32C of the data.
"""

from __future__ import annotations

import functools
import importlib
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO

from unified.data.files import DataFile
from unified.data.formats.row_format import RowFormat
from unified.errors import DatasetError

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")


class TFRecordFormat(RowFormat):
    """Skips records by their lengths; checksums of lengths are always checked.

    Args:
        verify: check the checksums of the data, too: about a millisecond per megabyte.
    """

    name = "tfrecord"

    def __init__(self, *, verify: bool = False) -> None:
        super().__init__()
        self._verify = verify

    def _count(self, file: DataFile) -> int:
        with file.open() as opened:
            row = offset = 0
            while (length := self._length(opened, file, row, offset)) is not None:
                file.row_offsets.note(row, offset)
                opened.seek(offset + _HEAD.size + length)
                if len(opened.read(_CRC.size)) < _CRC.size:  # a seek past the end raises no error
                    raise _cut_short(file, row)
                offset += _HEAD.size + length + _CRC.size
                row += 1
            return row

    def _rows(self, file: DataFile, start: int, end: int) -> Iterator[bytes]:
        row, offset = file.row_offsets.before(start)
        with file.open() as opened:
            opened.seek(offset)
            while row < end and (length := self._length(opened, file, row, offset)) is not None:
                file.row_offsets.note(row, offset)
                offset += _HEAD.size + length + _CRC.size
                if row < start:
                    opened.seek(offset)
                else:
                    yield self._data(opened, file, row, length)
                row += 1

    def _length(self, opened: BinaryIO, file: DataFile, row: int, offset: int) -> int | None:
        """Return the length of the record that begins here; None at the end of the file."""
        head = opened.read(_HEAD.size)
        if not head:
            return None
        if len(head) < _HEAD.size:
            raise _cut_short(file, row)
        length, crc = _HEAD.unpack(head)
        if masked_crc32c(head[:8]) != crc:
            if row == 0:
                raise DatasetError(
                    f"{file.path} is not a tfrecord file, or is damaged: its first 12 bytes are not the head of a "
                    "record. Give the right format, or write it again (compressed ones need a name that ends in .gz)."
                )
            raise DatasetError(
                f"{file.path} is damaged: the checksum of record {row}'s length, at byte {offset}, is wrong. Write it "
                "again, or copy it again."
            )
        return int(length)

    def _data(self, opened: BinaryIO, file: DataFile, row: int, length: int) -> bytes:
        data = opened.read(length)
        tail = opened.read(_CRC.size)
        if len(data) < length or len(tail) < _CRC.size:
            raise _cut_short(file, row)
        if self._verify and masked_crc32c(data) != _CRC.unpack(tail)[0]:
            raise DatasetError(f"{file.path} is damaged: the checksum of record {row} is wrong. Write the file again.")
        return data


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C of the data, masked as in TFRecord files."""
    crc = crc32c()(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def crc32c() -> Callable[[bytes], int]:
    """Return a function for the Castagnoli CRC: zlib has another polynomial."""
    try:
        module = importlib.import_module("google_crc32c")
    except ImportError as error:
        raise ImportError(
            f"tfrecord files need google-crc32c: pip install 'unified-runtime[data]' ({error})."
        ) from error
    function: Callable[[bytes], int] = module.value
    return function


def _cut_short(file: DataFile, row: int) -> DatasetError:
    return DatasetError(f"{file.path} is cut short: it ends within record {row}. Write it again, or copy it again.")

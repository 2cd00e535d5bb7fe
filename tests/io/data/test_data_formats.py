"""Counting and reading real files of each format, and what is said of bad ones."""

import gzip
import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.data_files import WRITERS, plain, record, samples, write_jsonl, write_parquet, write_tfrecord
from unified.data.files import DataFile, DataFiles
from unified.data.formats import open_format, tfrecord
from unified.data.formats.tfrecord import crc32c, masked_crc32c
from unified.errors import DataFileNotFoundError, DatasetError, UsageError

SIZE = 600
"""Rows; more than there are between two marks of a file."""


def data_file(path: Path) -> DataFile:
    return DataFiles().file(str(path))


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_of_any_range_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    format_, suffix, write = WRITERS[kind]
    path = tmp_path / f"data{suffix}"
    written = samples(0, SIZE)
    write(path, written)
    rows = open_format(format_)
    fresh, used = data_file(path), data_file(path)

    assert rows.count(used) == SIZE
    for start, end in [(0, SIZE), (0, 1), (599, 600), (255, 258), (300, 300), (550, 9999), (600, 700), (6, 8)]:
        for file in (used, fresh):  # with marks from counting, and from what was read before
            assert [plain(format_, row) for row in rows.rows(file, start, end)] == written[start:end]


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if not kind.startswith("tfrecord")])
def test_columns_are_those_that_were_asked_for_in_that_order(kind: str, tmp_path: Path) -> None:
    format_, suffix, write = WRITERS[kind]
    write(tmp_path / f"data{suffix}", samples(0, 20))

    rows = list(open_format(format_, ["half", "number"]).rows(data_file(tmp_path / f"data{suffix}"), 11, 13))

    assert [list(row.items()) for row in rows] == [[("half", 5.5), ("number", 11)], [("half", 6.0), ("number", 12)]]
    with pytest.raises(DatasetError, match=r"has no column 'numbr'; it has number, text, half"):
        list(open_format(format_, ["numbr"]).rows(data_file(tmp_path / f"data{suffix}"), 0, 1))


@pytest.mark.parametrize("kind", WRITERS)
def test_an_empty_file_is_named(kind: str, tmp_path: Path) -> None:
    format_, suffix, _ = WRITERS[kind]
    path = tmp_path / f"data{suffix}"
    path.write_bytes(gzip.compress(b"") if suffix.endswith(".gz") else b"")
    with pytest.raises(DatasetError, match=f"{path} is empty: write it again"):
        open_format(format_).count(data_file(path))
    with pytest.raises(DatasetError, match=f"{path} is empty: write it again"):
        list(open_format(format_).rows(data_file(path), 0, 0))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "csv.gz", "arrow", "arrow stream", "tfrecord"])
def test_a_file_that_was_cut_short_is_named(kind: str, tmp_path: Path) -> None:
    format_, suffix, write = WRITERS[kind]
    path = tmp_path / f"data{suffix}"
    write(path, samples(0, SIZE))
    path.write_bytes(path.read_bytes()[:-21])
    with pytest.raises(DatasetError, match=f"{path}.*cut short"):
        open_format(format_).count(data_file(path))


@pytest.mark.parametrize("format_", ["parquet", "arrow", "jsonl", "tfrecord"])
def test_a_file_of_no_format_at_all_is_named(format_: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 20)
    for use in (
        lambda: open_format(format_).count(data_file(path)),
        lambda: list(open_format(format_).rows(data_file(path), 0, 9)),
    ):
        with pytest.raises(DatasetError, match=str(path)):
            use()


@pytest.mark.parametrize("format_", ["csv", "jsonl", "tfrecord", "arrow"])
def test_a_file_of_another_format_says_which(format_: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "data", samples(0, 9))
    with pytest.raises(DatasetError, match=f"is not {format_} but parquet: give format='parquet'"):
        open_format(format_).count(data_file(tmp_path / "data"))


def test_a_compressed_file_whose_name_does_not_say_so_is_told(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "a.tfrecord.gz", samples(0, 3))
    shutil.move(tmp_path / "a.tfrecord.gz", tmp_path / "a.tfrecord")
    with pytest.raises(DatasetError, match=r"is not tfrecord but gzip: end its name in \.gz"):
        open_format("tfrecord").count(data_file(tmp_path / "a.tfrecord"))


def test_an_unreadable_file_is_named() -> None:
    with pytest.raises(DatasetError, match=r"/proc/self/mem cannot be read as jsonl"):  # opens, but reading fails
        open_format("jsonl").count(data_file(Path("/proc/self/mem")))


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", samples(0, 3))
    file, rows = data_file(tmp_path / "a.jsonl"), open_format("jsonl")
    assert rows.count(file) == 3
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl is not there") as raised:
        list(rows.rows(file, 0, 3))
    assert isinstance(raised.value, DataFileNotFoundError)


def test_crc32c_is_the_castagnoli_one() -> None:
    assert crc32c()(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert crc32c()(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert masked_crc32c(b"") == 0xA282EAD8


def test_a_damaged_length_of_a_record_is_found_and_a_damaged_record_if_asked(tmp_path: Path) -> None:
    one = record(b"x" * 100)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(one + b"\x01" + one[1:])
    with pytest.raises(DatasetError, match=r"record 1's length, at byte 116"):
        open_format("tfrecord").count(data_file(path))

    path.write_bytes(one + one[:50] + b"y" + one[51:])
    assert open_format("tfrecord").count(data_file(path)) == 2
    with pytest.raises(DatasetError, match="checksum of record 1 is wrong"):
        list(open_format("tfrecord", verify=True).rows(data_file(path), 0, 2))


def test_who_reads_tfrecords_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tfrecord(tmp_path / "a.tfrecord", samples(0, 3))
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    tfrecord.crc32c.cache_clear()
    with pytest.raises(ImportError, match=r"google-crc32c: pip install 'unified-runtime\[data\]'"):
        open_format("tfrecord").count(data_file(tmp_path / "a.tfrecord"))
    monkeypatch.undo()
    assert open_format("tfrecord").count(data_file(tmp_path / "a.tfrecord")) == 3


def test_json_lines_are_read_by_msgspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", samples(0, 3))
    monkeypatch.setattr(json, "loads", None)
    assert list(open_format("jsonl").rows(data_file(tmp_path / "a.jsonl"), 0, 3)) == samples(0, 3)


def test_a_tfrecord_may_hold_empty_records(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(record(b"") * 3)
    file = data_file(path)
    assert open_format("tfrecord").count(file) == 3
    assert list(open_format("tfrecord", verify=True).rows(file, 1, 3)) == [b"", b""]


@pytest.mark.parametrize("columns", [[], "number"])
def test_columns_are_a_list_of_names(columns: list[str]) -> None:
    with pytest.raises(UsageError, match="at least one name"):
        open_format("csv", columns)


def test_tfrecords_have_no_columns() -> None:
    with pytest.raises(UsageError, match="no columns"):
        open_format("tfrecord", ["a"])
    with pytest.raises(UsageError, match=r"no format 'parket'.*Did you mean 'parquet'"):
        open_format("parket")


def test_json_rows_must_be_objects_and_blank_lines_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": NaN}\r\n[1]')
    rows = open_format("jsonl")
    assert [row["a"] for row in rows.rows(data_file(path), 0, 1)] == [1]
    with pytest.raises(DatasetError, match=r"row 2 of .*a\.jsonl is no JSON object but list"):
        rows.count(data_file(path))


def test_json_that_is_none_by_the_letter_is_read_as_python_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": 18446744073709551617}']
    path.write_text("".join(f"{line}\n" for line in [*lines, '{"a": 0.1, "a": [1, null]}']))
    read = [row["a"] for row in open_format("jsonl").rows(data_file(path), 0, 9)]
    assert repr(read) == repr([float("nan"), -float("inf"), float("inf"), "\ud800", 2**64 + 1, [1, None]])
    path.write_text('{"a": 1}\n{"a": }\n')
    with pytest.raises(DatasetError, match=r"row 1 of .*a\.jsonl is not JSON: Expecting value"):
        open_format("jsonl").count(data_file(path))


def test_csv_with_odd_ends_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbf\r\na,b\r\n\r\n1,"x\r\ny"\r\n2,\r\n\n3,z')
    file, rows = data_file(path), open_format("csv")
    assert rows.count(file) == 3
    assert list(rows.rows(file, 0, 9)) == [{"a": 1, "b": "x\r\ny"}, {"a": 2, "b": ""}, {"a": 3, "b": "z"}]


def test_a_csv_of_names_alone_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b")
    assert open_format("csv").count(data_file(tmp_path / "a.csv")) == 0


def test_types_of_csv_columns_are_the_same_in_every_range(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,\n" * 5000 + "2.5,\n")
    file = data_file(path)
    assert list(open_format("csv").rows(file, 0, 1)) == [{"a": 1.0, "b": ""}]
    assert isinstance(next(open_format("csv").rows(file, 4000, 4001))["a"], float)


def test_a_csv_value_that_does_not_fit_is_found_when_the_file_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\n" + "1000000\n" * 200_000 + "x\n")
    with pytest.raises(DatasetError, match=r"rows \d+ to 200001 of .*a\.csv cannot be read as csv.*'x'"):
        open_format("csv").count(data_file(path))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a,b\n1,2\n3\n", "cannot be read as csv"),
        ('a\n1\n"2\n3\n', r"a\.csv has a quote that does not end, .* b'\"2"),
        ("a,a\n1,2\n", "two columns of one name"),
    ],
)
def test_malformed_csv_is_named(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DatasetError, match=error):
        open_format("csv").count(data_file(tmp_path / "a.csv"))


def test_arrow_ranges_after_the_first_are_found_without_what_is_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"a": list(range(100))})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    file, rows = data_file(path), open_format("arrow")
    assert [row["a"] for row in rows.rows(file, 55, 57)] == [55, 56]
    assert file.notes["batch-ends"] == [10, 20, 30, 40, 50, 60]
    assert [row["a"] for row in rows.rows(file, 42, 43)] == [42]
    assert [row["a"] for row in rows.rows(file, 95, 100)] == [95, 96, 97, 98, 99]

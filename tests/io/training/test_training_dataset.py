"""Rows of a training dataset: wherever it is, checked with line numbers, read one by one, in flat memory."""

import gzip
import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from unified.errors import DataFileNotFoundError, DatasetError, StorageDeniedError
from unified.storage import open_storage
from unified.training.dataset import TextRows, TextSplit, copy_dataset
from unified.training.tokenizer import BOS, EOS, ByteTokenizer


def rows_of(uri: str, folder: Path, field: str = "text") -> TextRows:
    return TextRows(copy_dataset(uri, field, folder), field)


def texts(count: int, seed: int = 0) -> list[str]:
    """Of very different lengths, so that blocks of the index hold one row or many."""
    chance = random.Random(seed)
    return [f"{number} " + "é" * int(chance.paretovariate(0.5)) for number in range(count)]


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text, "more": [1, {}]}) + "\n" for text in texts).encode()


def test_every_row_is_found(tmp_path: Path) -> None:
    wanted = [text[:100_000] for text in texts(2000)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(wanted))
    rows = rows_of(str(tmp_path / "a.jsonl"), tmp_path / "copy")
    order = list(range(len(wanted)))
    random.Random(1).shuffle(order)
    assert {number: rows[number] for number in order} == dict(enumerate(wanted))
    assert pickle.loads(pickle.dumps(rows))[7] == wanted[7]
    with pytest.raises(IndexError):
        rows[len(wanted)]
    assert not list((tmp_path / "copy").glob("*.jsonl")), "a plain local file is read in place"


def test_blank_lines_and_a_missing_end_of_line_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}\n\n{"text": "\\ud800"}')
    rows = rows_of(f"file://{tmp_path}/a.jsonl", tmp_path / "copy")
    assert [rows[number] for number in range(len(rows))] == ["a", "b", "\ud800"]


def test_files_of_a_folder_in_a_bucket_compressed_or_not(bucket: str, tmp_path: Path) -> None:
    parts = [texts(50, seed) for seed in range(3)]
    backend, _ = open_storage(f"s3://{bucket}")
    with backend:
        backend.write("data/part-1.jsonl", json_lines(parts[0]))
        backend.write("data/part-2.jsonl.gz", gzip.compress(json_lines(parts[1])))
        backend.write("data/part-10.jsonl", json_lines(parts[2]))
        backend.write("data/notes.txt", b"not a part of it")
    rows = rows_of(f"s3://{bucket}/data", tmp_path)
    assert [rows[number] for number in range(len(rows))] == parts[0] + parts[1] + parts[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"text": "a"}\n\n{"txt": "b", "id": 1}\n',
            "line 3 of .*a.jsonl has no field 'text'; its fields: 'txt', 'id'",
        ),
        (b'{"text": "a"}\n{"text": "b"\n', "line 2 of .*a.jsonl is not JSON"),
        (b'{"text": "a"}\n["b"]\n', "line 2 of .*a.jsonl is no JSON object but list"),
        (b'{"text": 5}\n', "line 1 of .*a.jsonl has a int and no text in its field 'text'"),
        (b'{"text": "a"}\n{"text": ""}\n', "line 2 of .*a.jsonl has an empty text in its field 'text'"),
        ('{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"), "line 1 of .*a.jsonl is UTF-16 and not UTF-8: save"),
        ('{"text": "a"}\n'.encode("utf-16-be"), "line 1 of .*a.jsonl is UTF-16-BE and not UTF-8: save"),
        (b"PAR1\0\1\2\xff\xfe\xfd", "line 1 of .*a.jsonl is not JSON"),
        (b"[" * 200_000, "line 1 of .*a.jsonl is not JSON"),
        (b"", "a.jsonl holds no row"),
        (b"\n \n", "a.jsonl holds no row"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DatasetError, match=message) as caught:
        rows_of(str(tmp_path / "a.jsonl"), tmp_path / "copy")
    assert "\n" not in str(caught.value)


def test_another_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"body.html": "a"}\n')
    assert rows_of(str(tmp_path), tmp_path / "copy", "body.html")[0] == "a"
    with pytest.raises(DatasetError, match=r"Did you mean 'body.html'"):
        rows_of(str(tmp_path), tmp_path / "copy", "body_html")


def test_a_damaged_archive(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(texts(100)))[:-30])
    with pytest.raises(DatasetError, match=r"a.jsonl.gz cannot be read"):
        rows_of(str(tmp_path / "a.jsonl.gz"), tmp_path / "copy")


def test_nothing_there(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(DataFileNotFoundError):
        rows_of(f"s3://{bucket}/none.jsonl", tmp_path)
    with pytest.raises(DataFileNotFoundError):
        rows_of("/nowhere/none.jsonl", tmp_path)


def test_no_permission(s3_environment: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(StorageDeniedError, match="credentials"):
        rows_of("s3://some-bucket/a.jsonl", tmp_path)


def test_a_file_that_was_changed_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts(1000)))
    rows = rows_of(str(tmp_path / "a.jsonl"), tmp_path / "copy")
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"row 999 of .*a.jsonl is not there any more"):
        rows[999]


@pytest.mark.parametrize("every", [0, 2, 3, 20])
def test_each_row_is_trained_on_or_held_out(tmp_path: Path, every: int) -> None:
    wanted = [str(number) for number in range(47)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(wanted))
    rows = rows_of(str(tmp_path / "a.jsonl"), tmp_path / "copy")
    train, held_out = TextSplit(rows, every, is_held_out=False), TextSplit(rows, every, is_held_out=True)
    assert sorted([*train, *held_out], key=int) == wanted
    assert list(held_out) == (wanted[every - 1 :: every] if every else [])


def test_bytes_are_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.tokens("é", 10) == [BOS, 0xC3, 0xA9, EOS]
    assert len(tokenizer.tokens("a" * 100, 10)) == 10
    assert tokenizer.text(tokenizer.tokens("für", 10)) == "für"
    assert tokenizer.tokens("\ud800", 10) == [BOS, ord("?"), EOS]


@pytest.mark.slow
def test_memory_stays_flat(tmp_path: Path) -> None:
    """300 MB compressed and plain, read through with less than a fifth of that."""
    text = "x" * 1000
    line = json.dumps({"text": text}).encode() + b"\n"
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(line * 1000)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from unified.training.dataset import TextRows, copy_dataset\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"rows = TextRows(copy_dataset({str(tmp_path)!r}, 'text', Path({str(tmp_path / 'copy')!r})), 'text')\n"
        f"assert len(rows) == 300_000 and rows[299_999] == rows[150_000] == {text!r}\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 60e6

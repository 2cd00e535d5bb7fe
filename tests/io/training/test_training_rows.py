"""Rows of a training dataset: of any form, in any format, wherever they are; read once, in flat memory."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unified.errors import DataFileNotFoundError, DatasetError, OptionError, StorageDeniedError
from unified.storage import open_storage
from unified.training.dataset import split_rows
from unified.training.rows import DatasetPart, parse_parts, write_rows

datasets = pytest.importorskip("datasets", reason="rows of a run: pip install 'unified-runtime[hf]'")

ASKED = {"role": "user", "content": "How much is 2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}


def rows_of(where: str | Path | list[Any], folder: Path, field: str = "text", *allowed: str) -> tuple[str, Any]:
    """The name of the form of all rows, and the rows."""
    parts = parse_parts(where if isinstance(where, list) else str(where))
    form = write_rows(parts, folder / "rows.arrow", text_field=field, allowed=allowed)
    return form, datasets.Dataset.from_file(str(folder / "rows.arrow"))


def json_lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text": ("text", {"text": "a", "id": 3}, {"text": "a"}),
    "completion": ("completion", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}),
    "completion in messages": (
        "completion",
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"prompt": [ASKED], "completion": [ANSWERED], "tools": None},
    ),
    "label": (
        "label",
        {"prompt": "a", "completion": "b", "label": 0},
        {"prompt": "a", "completion": "b", "label": False},
    ),
    "messages": ("messages", {"messages": [ASKED, ANSWERED]}, {"messages": [ASKED, ANSWERED], "tools": None}),
    "messages with tools": (
        "messages",
        {"messages": [ASKED, {**CALLED, "content": None}], "tools": [TOOL]},
        {"messages": [ASKED, CALLED], "tools": [TOOL]},
    ),
    "messages of parts": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}, ANSWERED]},
        {"messages": [{"role": "user", "content": "ab"}, ANSWERED], "tools": None},
    ),
    "ShareGPT's": (
        "messages",
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": None},
    ),
    "preference": (
        "preference",
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ),
    "preference with the prompt in it": (
        "preference",
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG], "prompt": None},
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG], "tools": None},
    ),
    "OpenAI's preference": (
        "preference",
        {
            "input": {"messages": [ASKED], "tools": [TOOL]},
            "preferred_output": [ANSWERED],
            "non_preferred_output": [WRONG],
        },
        {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [WRONG], "tools": [TOOL]},
    ),
}


@pytest.mark.parametrize(("form", "row", "wanted"), FORMS.values(), ids=FORMS)
def test_a_form_of_rows(form: str, row: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(row, row))
    assert rows_of(tmp_path / "a.jsonl", tmp_path)[0] == form
    assert rows_of(tmp_path / "a.jsonl", tmp_path)[1][1] == wanted


def test_messages_of_one_dataset_have_other_fields_each(tmp_path: Path) -> None:
    """Arrow's own types would give each message the fields of all, or refuse them."""
    calls = [{**CALLED, "tool_calls": [{"arguments": arguments}]} for arguments in ({"a": 1}, {"b": ["c"]}, {"a": "d"})]
    (tmp_path / "a.jsonl").write_bytes(json_lines(*({"messages": [ASKED, call, ANSWERED]} for call in calls)))
    assert [row["messages"][1] for row in rows_of(tmp_path, tmp_path)[1]] == calls


BAD: dict[str, tuple[bytes, str]] = {
    "no known field": (
        json_lines({"text": "a"}) + b"\n" + json_lines({"txt": "b", "id": 1}),
        r"row 1 of .*a.jsonl has none of the forms text, prompt/completion, .*; its fields: 'txt', 'id'. "
        r"Did you mean 'text'\?",
    ),
    "JSON that is cut short": (b'{"text": "a"}\n{"text": "b"\n', "row 1 of .*a.jsonl is not JSON"),
    "no object": (b'{"text": "a"}\n["b"]\n', "row 1 of .*a.jsonl is no JSON object but list"),
    "no text": (b'{"text": 5}\n', "row 0 of .*a.jsonl has a int and no text in its field 'text'"),
    "an empty text": (
        json_lines({"text": "a"}, {"text": ""}),
        "row 1 of .*a.jsonl has an empty text in its field 'text'",
    ),
    "no UTF-8": ('{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"), "row 0 of .*a.jsonl is not JSON"),
    "parquet under another name": (b"PAR1\0\1\2\xff\xfe\xfd", "a.jsonl is not jsonl but parquet"),
    "no end": (b"[" * 200_000, "row 0 of .*a.jsonl is not JSON"),
    "an empty file": (b"", "a.jsonl is empty"),
    "blank lines alone": (b"\n \n", "a.jsonl holds no row: write one JSON object a line"),
    "two forms": (
        json_lines({"text": "a", "messages": [ASKED, ANSWERED]}),
        "row 0 of .*a.jsonl fits two forms, text and messages",
    ),
    "another form later": (
        json_lines({"text": "a"}, {"messages": [ASKED, ANSWERED]}),
        "row 1 of .*a.jsonl has the form messages, and rows before it have the form text",
    ),
    "a text for messages": (
        json_lines({"prompt": [ASKED], "completion": [ANSWERED]}, {"prompt": "a", "completion": "b"}),
        "row 1 of .*a.jsonl has a text in its field 'prompt', and rows before it have messages",
    ),
    "a prompt that comes later": (
        json_lines({"chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "a", "rejected": "b"}),
        "row 1 of .*a.jsonl has the field 'prompt', and rows before it have not",
    ),
    "an unknown role": (
        json_lines({"messages": [{"role": "bot", "content": "a"}]}),
        r"row 0 of .*a.jsonl has the role 'bot' in messages\[0\]: roles are system, ",
    ),
    "nothing to learn": (json_lines({"messages": [ASKED]}), "row 0 of .*a.jsonl has no message of the assistant"),
    "an image": (
        json_lines({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWERED]}),
        r"row 0 of .*a.jsonl has a list and no text in messages\[0\]; images",
    ),
    "no messages": (
        json_lines({"messages": "a"}),
        "row 0 of .*a.jsonl has no list of messages in its field 'messages'",
    ),
    "no label": (
        json_lines({"prompt": "a", "completion": "b", "label": "good"}),
        "row 0 of .*a.jsonl has the label 'good': true is a good completion",
    ),
    "no prompt of OpenAI's": (
        json_lines({"input": "a", "preferred_output": [ANSWERED], "non_preferred_output": [WRONG]}),
        "row 0 of .*a.jsonl has no messages in its field 'input'",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_a_bad_row_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DatasetError, match=message) as caught:
        rows_of(tmp_path / "a.jsonl", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_form_that_the_method_does_not_take(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines({"chosen": "a", "rejected": "b"}))
    with pytest.raises(
        DatasetError, match=r"row 0 of .* has the form chosen/rejected, and this run takes text, prompt"
    ):
        rows_of(tmp_path, tmp_path, "text", "text", "completion")


def test_a_method_chooses_between_two_forms(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines({"text": "a", "messages": [ASKED, ANSWERED]}))
    assert rows_of(tmp_path, tmp_path, "text", "text")[1][0] == {"text": "a"}


def test_another_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"body.html": "a"}\n')
    assert rows_of(tmp_path / "a.jsonl", tmp_path, "body.html")[1][0] == {"text": "a"}
    with pytest.raises(DatasetError, match=r"Did you mean 'body_html'"):
        rows_of(tmp_path / "a.jsonl", tmp_path, "body_html")


def test_formats(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"a{number}", "completion": "b, c", "label": number == 1} for number in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_bytes(json_lines(*rows))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (tmp_path / "d.csv").write_text('prompt,completion,label\na0,"b, c",false\na1,"b, c",true\na2,"b, c",false\n')
    (tmp_path / "e.txt").write_bytes(json_lines(*rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "f.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert list(rows_of(path, tmp_path / "copy")[1]) == rows, path
    assert list(rows_of(tmp_path / "*.json*", tmp_path / "copy")[1]) == rows * 3


def test_an_array_of_no_objects(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, 5]')
    with pytest.raises(DatasetError, match=r"a.json is an array that holds a int"):
        rows_of(tmp_path, tmp_path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DatasetError, match=r"holds no row"):
        rows_of(tmp_path, tmp_path)


def test_parts_have_weights(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines(*({"text": f"{name}{number}"} for number in range(4))))
    given = [{"uri": str(tmp_path / "a.jsonl"), "weight": 0.5}, {"uri": str(tmp_path / "b.jsonl"), "weight": 1.5}]
    assert rows_of(given, tmp_path)[1]["text"][:] == ["a1", "a3", "b0", "b1", "b1", "b2", "b3", "b3"]
    assert parse_parts(json.dumps(given))[0] == DatasetPart(str(tmp_path / "a.jsonl"), 0.5)
    assert parse_parts("s3://a") == [DatasetPart("s3://a")]


@pytest.mark.parametrize("given", [[], [5], [{"uri": 5}], [{"uri": "a", "weight": 0}], [{"uri": "a", "wight": 1}], {}])
def test_parts_that_are_none(given: Any) -> None:
    with pytest.raises(OptionError, match="dataset"):
        parse_parts(given)


def test_files_of_a_folder_in_a_bucket_compressed_or_not(bucket: str, tmp_path: Path) -> None:
    parts = [[{"text": f"{part} {number}"} for number in range(50)] for part in range(3)]
    backend, _ = open_storage(f"s3://{bucket}")
    with backend:
        backend.write("data/part-1.jsonl", json_lines(*parts[0]))
        backend.write("data/part-2.jsonl.gz", gzip.compress(json_lines(*parts[1])))
        backend.write("data/part-10.jsonl", json_lines(*parts[2]))
        backend.write("data/notes.txt", b"not a part of it")
    assert list(rows_of(f"s3://{bucket}/data", tmp_path)[1]) == parts[0] + parts[1] + parts[2]


def test_texts_that_are_hard_to_store(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}\n\n{"text": "\\ud800"}')
    assert rows_of(f"file://{tmp_path}/a.jsonl", tmp_path)[1]["text"][:] == ["a", "b", "?"]


def test_a_damaged_archive(tmp_path: Path) -> None:
    rows = ({"text": f"{random.Random(number).random()}"} for number in range(100))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(*rows))[:-30])
    with pytest.raises(DatasetError, match=r"a.jsonl.gz cannot be read"):
        rows_of(tmp_path / "a.jsonl.gz", tmp_path)


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


@pytest.mark.parametrize("every", [0, 2, 3, 20])
def test_each_row_is_trained_on_or_held_out(every: int) -> None:
    wanted = [str(number) for number in range(47)]
    train, held_out = split_rows(datasets.Dataset.from_dict({"text": wanted}), every)
    assert sorted([*train["text"], *held_out["text"]], key=int) == wanted
    assert list(held_out["text"]) == (wanted[every - 1 :: every] if every else [])


@pytest.mark.slow
def test_memory_stays_flat(tmp_path: Path) -> None:
    """300 MB compressed, read through with less than a third of that."""
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(line * 1000)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from datasets import Dataset\n"
        "from unified.training.rows import DatasetPart, write_rows\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"write_rows([DatasetPart({str(tmp_path)!r})], Path({str(tmp_path / 'rows.arrow')!r}), text_field='text')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
        f"rows = Dataset.from_file({str(tmp_path / 'rows.arrow')!r})\n"
        "assert len(rows) == 300_000 and rows[299_999] == rows[150_000] == {'text': 'x' * 1000}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 100e6

"""Rows of a run's datasets: read in any format, checked, and written once a node as one Arrow file, in TRL's forms.

A row is a text; a prompt with its completion, which may have a label; a conversation; or two answers, of which one is
preferred. Where other names are common for these fields, they are converted to TRL's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from unified.data.files import DataFile, DataFiles, formats_of
from unified.data.formats import open_format
from unified.data.formats.row_format import named
from unified.errors import DatasetError, OptionError, nearest
from unified.training.method_fields import METHODS

Row = Mapping[str, Any]
EVERY_ROW = 1 << 62
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool", "function")}
ROLES |= {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
"""Roles of messages, by their names; the last four are ShareGPT's."""


class DatasetPart(NamedTuple):
    """A file, a folder or a glob, and how many times its rows come in an epoch."""

    uri: str
    weight: float = 1.0


class RowForm(NamedTuple):
    """A form of rows: the fields that a row of it has, and their conversion into TRL's."""

    name: str
    fields: tuple[str, ...]
    convert: Callable[[Row], dict[str, Any]]

    @property
    def title(self) -> str:
        return "/".join(self.fields)


def parse_parts(given: object) -> list[DatasetPart]:
    """Return the parts of a dataset, which is given as a URI, or as a list of URIs and ``{"uri": …, "weight": …}``.

    Raises:
        OptionError: the list is empty, a part is none of these, or a weight is not above 0.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.startswith("[") else [given]
        except ValueError as error:
            raise OptionError(f"a dataset that begins with [ is a JSON list, which this is not: {error}.") from None
    parts = []
    for number, each in enumerate(given if isinstance(given, list) else []):
        part = each if isinstance(each, dict) else {"uri": each}
        uri, weight = part.get("uri"), part.get("weight", 1)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not isinstance(uri, str) or part.keys() - {"uri", "weight"} or not is_number or not 0 < weight < EVERY_ROW:
            raise OptionError(f'a dataset is a URI, or {{"uri": URI, "weight": number above 0}}: part {number} is not.')
        parts.append(DatasetPart(uri, float(weight)))
    if not parts:
        raise OptionError("dataset_uri names no dataset: give a URI, or a list of them.")
    return parts


def write_rows(parts: Sequence[DatasetPart], target: Path, *, text_field: str, allowed: Sequence[str] = ()) -> str:
    """Check all rows, and write them into an Arrow file, which `datasets.Dataset.from_file` maps.

    Args:
        parts: their rows follow one another. Of a part with weight 0.5, every second row is taken; with weight 2, each
            row is there twice.
        text_field: name of the field that has the text of a row that is a text.
        allowed: names of the forms that may be read; empty: all.

    Returns:
        Name of the form of all rows: ``text``, ``completion``, ``label``, ``messages`` or ``preference``.

    Raises:
        DatasetError: a row has no form, or several, or another form than the row before; or there is no row.
    """
    from datasets.arrow_writer import ArrowWriter

    target.parent.mkdir(parents=True, exist_ok=True)
    name, kinds, writer = "", dict[str, type](), None
    with DataFiles() as files:
        for part in parts:
            share = 0.0
            for where, row in _read(files, part.uri):
                try:
                    found, converted = convert_row(row, text_field, allowed)
                    if writer is None:
                        name, kinds = found, {field: type(value) for field, value in converted.items()}
                        writer = ArrowWriter(path=str(target), features=_features(kinds))
                    _check_alike(converted, found, name, kinds)
                except DatasetError as error:
                    raise DatasetError(f"{where} {error}.") from None
                share += part.weight
                for _ in range(int(share)):
                    writer.write(converted)
                share -= int(share)
    if writer is None or not writer.finalize()[0]:
        uris = " and ".join(part.uri for part in parts)
        raise DatasetError(
            f"{uris} holds no row: write one JSON object a line, such as {{{json.dumps(text_field)}: …}}."
        )
    return name


def _features(kinds: Mapping[str, type]) -> Any:
    """Return the columns of an Arrow file. Messages are JSON in it, as each may have other fields."""
    from datasets import Features, Json, List, Value

    features = {str: Value("string"), bool: Value("bool"), list: List(Json())}
    return Features({field: Json() if field == "tools" else features[kind] for field, kind in kinds.items()})


def _check_alike(row: Row, form: str, first_form: str, kinds: Mapping[str, type]) -> None:
    """Raise DatasetError if a row differs from the first one in its form, or has messages where that has a text."""
    if form != first_form:
        raise DatasetError(f"has the form {form}, and rows before it have the form {first_form}")
    for field, kind in kinds.items():
        if field in row and field != "tools" and not isinstance(row[field], kind):
            names = {str: "a text", list: "messages", bool: "a label"}
            raise DatasetError(
                f"has {names[type(row[field])]} in its field {field!r}, and rows before it have {names[kind]}"
            )
    if odd := kinds.keys() ^ row.keys():
        has, had = ("has", "have not") if odd & row.keys() else ("has not", "have")
        raise DatasetError(f"{has} the field {min(odd)!r}, and rows before it {had}")


def _read(files: DataFiles, uri: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a part, each with its name in errors."""
    for path, kind in formats_of(uri, files, default="jsonl").items():
        file = files.file(path)
        rows = _array(file)
        for number, row in enumerate(open_format(kind).rows(file, 0, EVERY_ROW) if rows is None else rows):
            yield f"row {number} of {path}", row


def _array(file: DataFile) -> list[Row] | None:
    """Return the rows of a file that is one JSON array; else None."""
    if not file.path.removesuffix(".gz").endswith(".json"):
        return None
    with named(file, "json"), file.open() as opened:
        if opened.read(1 << 10).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"[":
            return None
        opened.seek(0)
        rows: list[Row] = json.load(opened)
    if wrong := next((row for row in rows if not isinstance(row, dict)), None):
        raise DatasetError(f"{file.path} is an array that holds a {type(wrong).__name__}, and not objects alone.")
    return rows


def convert_row(row: Row, text_field: str, allowed: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Return the name of the only form that a row has, and the row in TRL's form.

    Raises:
        DatasetError: the row has no allowed form, or several, or a field is wrong. The message is the end of a sentence
            about the row, such as ``has an empty text in its field 'text'``.
    """
    forms = _forms(text_field)
    there = {field for field, value in row.items() if value is not None}
    found = [form for form in forms if there.issuperset(form.fields)]
    if any(form.name == "label" for form in found):
        found = [form for form in found if form.name != "completion"]  # whose fields it has, too
    fitting = [form for form in found if not allowed or form.name in allowed]
    if len(fitting) == 1:
        return fitting[0].name, fitting[0].convert(row)
    if fitting:
        raise DatasetError(f"fits two forms, {fitting[0].title} and {fitting[1].title}: take the fields of one out")
    wanted = [form.title for form in forms if not allowed or form.name in allowed]
    if found:
        methods = " or ".join(method for method, takes in METHODS.items() if found[0].name in takes.forms)
        raise DatasetError(
            f"has the form {found[0].title}, and this run takes {', '.join(wanted)} (hf takes {found[0].title} with "
            f"the method {methods})"
        )
    hint = next(
        (hint for field in row if (hint := nearest(field, [each for form in forms for each in form.fields]))), ""
    )
    lacks = f"no field {wanted[0]!r}" if len(wanted) == 1 else f"none of the forms {', '.join(wanted)}"
    raise DatasetError(
        f"has {lacks}; its fields: {', '.join(map(repr, list(row)[:10])) or 'none'}.{hint} "
        "extra_args.dataset_text_field names the field with the text"
    )


@cache
def _forms(text_field: str) -> tuple[RowForm, ...]:
    return (
        RowForm("text", (text_field,), lambda row: {"text": _text(row, text_field)}),
        RowForm("completion", ("prompt", "completion"), lambda row: _answers(row, "completion")),
        RowForm("label", ("prompt", "completion", "label"), _labelled),
        RowForm("messages", ("messages",), lambda row: _conversation(row, "messages")),
        RowForm("messages", ("conversations",), lambda row: _conversation(row, "conversations")),  # ShareGPT's
        RowForm("preference", ("chosen", "rejected"), lambda row: _answers(row, "chosen", "rejected")),
        RowForm("preference", ("input", "preferred_output", "non_preferred_output"), _openai_preference),
    )


def _text(row: Row, field: str) -> str:
    text = row[field]
    if not isinstance(text, str):
        raise DatasetError(f"has a {type(text).__name__} and no text in its field {field!r}")
    if not text:
        raise DatasetError(f"has an empty text in its field {field!r}: leave the row out, or write a text")
    return text.encode(errors="replace").decode()  # half a surrogate pair is no text for Arrow


def _answers(row: Row, *answers: str) -> dict[str, Any]:
    """Return prompt and answers, which all are texts, or all messages. Answers of a pair may include the prompt."""
    fields = [field for field in ("prompt", *answers) if row.get(field) is not None]
    if any(isinstance(row[field], str) for field in fields):
        return {field: _text(row, field) for field in fields}
    return {**{field: _messages(row[field], field) for field in fields}, "tools": row.get("tools")}


def _labelled(row: Row) -> dict[str, Any]:
    label = row["label"]
    if label not in (True, False):
        raise DatasetError(f"has the label {label!r}: true is a good completion, false is a bad one")
    return {**_answers(row, "completion"), "label": bool(label)}


def _conversation(row: Row, field: str) -> dict[str, Any]:
    messages = _messages(row[field], field)
    if not any(message["role"] == "assistant" for message in messages):
        raise DatasetError(f"has no message of the assistant in its field {field!r}")
    return {"messages": messages, "tools": row.get("tools")}


def _openai_preference(row: Row) -> dict[str, Any]:
    given = row["input"]
    if not isinstance(given, dict) or not given.get("messages"):
        raise DatasetError("has no messages in its field 'input'")
    chosen, rejected = (_messages(row[field], field) for field in ("preferred_output", "non_preferred_output"))
    prompt = _messages(given["messages"], "input.messages")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": given.get("tools")}


def _messages(given: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise DatasetError(f"has no list of messages in its field {field!r}")
    return [_message(each, f"{field}[{number}]") for number, each in enumerate(given)]


def _message(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message with the fields that are not None, its content as one text."""
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if role not in ROLES:
        raise DatasetError(f"has the role {role!r} in {where}: roles are {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(each, dict) and "text" in each for each in content):
        content = "".join(each["text"] for each in content)
    if not isinstance(content, str) and not (content is None and given.get("tool_calls")):
        raise DatasetError(
            f"has a {type(content).__name__} and no text in {where}; images and sound are not trained on"
        )
    rest = {name: value for name, value in given.items() if name not in ("from", "value") and value is not None}
    return {**rest, "role": ROLES[role], "content": (content or "").encode(errors="replace").decode()}

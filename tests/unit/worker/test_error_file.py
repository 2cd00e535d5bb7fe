"""What a worker wrote of its own end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unified import error_file
from unified.error_file import WrittenError
from unified.protocol.records import Failure
from unified.worker.failure import with_written


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"message": "no luck"}, WrittenError("no luck")),
        (
            {
                "message": {
                    "message": "ValueError: x\nmore",
                    "extraInfo": {"py_callstack": "Traceback", "timestamp": "1"},
                }
            },
            WrittenError("ValueError: x", "Traceback"),
        ),
        ({"message": {"message": "m", "extraInfo": None}}, WrittenError("m")),
        ({"message": {"message": 3}}, None),
        ({"message": " "}, None),
        ([1], None),
        ({}, None),
    ],
)
def test_a_reason_is_read_in_the_forms_that_torch_writes(
    tmp_path: Path, said: object, expected: WrittenError | None
) -> None:
    path = tmp_path / "0.error.json"
    path.write_text(json.dumps(said))
    assert error_file.read(str(path)) == expected


def test_no_file_and_a_broken_one_say_nothing(tmp_path: Path) -> None:
    assert error_file.read(str(tmp_path / "none")) is None
    (tmp_path / "half").write_text('{"message": ')
    assert error_file.read(str(tmp_path / "half")) is None


def test_it_lies_beside_the_log() -> None:
    assert error_file.beside("/logs/job/w-0/3.err") == "/logs/job/w-0/3.error.json"
    assert error_file.beside("") == ""


def test_the_written_reason_is_the_one_that_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "0.error.json"
    exited = Failure(summary="exited with code 3", category="user", exit_code=3)
    assert with_written(exited, str(path)) == exited
    path.write_text(json.dumps({"message": {"message": "ValueError: bad batch"}}))
    assert with_written(exited, str(path)).summary == "ValueError: bad batch (exited with code 3)"
    raised = Failure(summary="ValueError: bad batch", category="user")
    assert with_written(raised, str(path)) == raised

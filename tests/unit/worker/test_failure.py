"""Exceptions and error files become records that say what happened, without the runtime's own frames."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unified import error_file
from unified.error_file import WrittenError
from unified.errors import RemoteError, WorkerDiedError
from unified.protocol.framing import check_sendable
from unified.protocol.records import Failure
from unified.worker.failure import describe, exit_code, with_written


class DistBackendError(RuntimeError):
    """Stands in for torch's, by its name and module."""

    __module__ = "torch.distributed"


class DistNetworkError(RuntimeError):
    __module__ = "torch.distributed"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_summary_is_one_line() -> None:
    failure = describe(raised(ValueError("\n  first\nsecond")))
    assert (failure.summary, failure.category) == ("ValueError: first", "user")
    assert failure.exception_type == "ValueError"
    assert "raise error" in failure.traceback
    assert not failure.is_collateral


def test_summary_of_a_very_long_message_is_clipped() -> None:
    failure = describe(raised(ValueError("x" * 5000)))
    assert len(failure.summary) <= 300
    kept = failure.summary.count("x")
    assert failure.summary.endswith(f" … {5000 - kept} more characters")


def test_lines_of_a_traceback_are_clipped() -> None:
    lines = describe(raised(ValueError("x" * 5000 + "\nsecond"))).traceback.splitlines()
    assert max(map(len, lines)) <= 500
    assert lines[-2].startswith("ValueError: xxx")
    assert lines[-2].endswith(" more characters")
    assert lines[-1] == "second"


class MuteError(Exception):
    def __str__(self) -> str:
        raise KeyError("no")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "^KeyboardInterrupt$"),
        (MuteError(), "cannot be shown"),
    ],
)
def test_summary_of_odd_exceptions(error: BaseException, said: str) -> None:
    assert re.search(said, describe(raised(error)).summary)


def test_cause_is_part_of_the_traceback() -> None:
    failure = describe(raised(ValueError("outer"), cause=raised(KeyError("inner"))))
    assert "KeyError: 'inner'" in failure.traceback
    assert failure.traceback.rstrip().endswith("ValueError: outer")


def test_long_traceback_is_cut_in_the_middle() -> None:
    failure = describe(raised(ValueError("begin " + "x\n" * 50_000 + " end")))
    assert len(failure.traceback) < 25_000
    assert "left out" in failure.traceback
    assert failure.traceback.rstrip().endswith("end")


def test_remote_error_carries_the_far_traceback() -> None:
    error = raised(RemoteError("KeyError: 3", traceback="Traceback: far away", worker="actor-0"))
    assert "worker actor-0:\nTraceback: far away" in describe(error).traceback


@pytest.mark.parametrize(
    ("code", "summary", "number"), [(3, "exited with code 3", 3), ("no data", "exited with code 1: no data", 1)]
)
def test_system_exit(code: object, summary: str, number: int) -> None:
    error = SystemExit(code)
    assert describe(error) == Failure(
        summary=summary, exception_type="SystemExit", exit_code=number, traceback=describe(error).traceback
    )


@pytest.mark.parametrize("code", [10**20, -(10**20), 2**63 - 1, -1, 256, 257, 2**32])
def test_exit_codes_are_those_of_the_interpreter(code: int) -> None:
    ended = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.exit({code})"], check=False)
    assert exit_code(SystemExit(code)) == ended.returncode


def test_a_failure_whose_text_has_half_a_surrogate_can_be_sent() -> None:
    failure = describe(ValueError("a\ud800b"))
    check_sendable(failure)
    assert failure.summary == r"ValueError: a\ud800b"
    assert r"ValueError: a\ud800b" in failure.traceback


def test_exit_codes_that_are_success() -> None:
    assert exit_code(SystemExit()) == exit_code(SystemExit(0)) == exit_code(SystemExit(None)) == 0
    assert exit_code(SystemExit(False)) == 0


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31999"
NCCL = "NCCL error in: NCCLUtils.hpp:133, remote process exited or there was a network error, NCCL version 2.21"


@pytest.mark.parametrize(
    ("error", "has_group", "expected"),
    [
        (RuntimeError(GLOO), True, True),
        (RuntimeError(GLOO), False, False),
        (DistBackendError(NCCL), False, True),
        (DistBackendError("NCCL error: unhandled cuda error, out of memory"), True, False),
        (DistNetworkError("anything"), False, True),
        (RuntimeError("shape mismatch"), True, False),
        (ConnectionResetError("Connection reset by peer"), True, False),
        (WorkerDiedError("actor-1 died"), False, True),
        # behind a wrapper
        (raised(ValueError("training step 7 failed"), cause=raised(RuntimeError(GLOO))), True, True),
    ],
)
def test_collateral(error: BaseException, has_group: bool, expected: bool) -> None:
    assert describe(error, has_process_group=has_group).is_collateral is expected


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

"""Failures: the record of an exception that tells a person what went wrong."""

from __future__ import annotations

import asyncio
import importlib
import os
import traceback
from pathlib import Path
from types import TracebackType

import msgspec

from unified import error_file
from unified.errors import EntryPointError, RemoteError, WorkerDiedError
from unified.protocol.records import Failure

_RUNTIME = str(Path(__file__).parent) + os.sep
_MACHINERY = (
    _RUNTIME,
    "<frozen importlib",
    importlib.__file__,
    str(Path(asyncio.__file__).parent) + os.sep,
)
_MAX_SUMMARY = 300
_MAX_LINE = 500
_MAX_TRACEBACK = 24_000

_BROKEN_PEER = (
    # gloo
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "connectfullmesh failed",
    "timed out waiting",
    "third_party/gloo",
    # NCCL, and torch's watchdog over it
    "remote process exited",
    "ncclremoteerror",
    "nccl communicator was aborted",
    "connection closed by remote peer",
    "watchdog caught collective operation timeout",
    # the round's store
    "failed to recv, got 0 bytes",
    "store is not available",
)
"""Parts of torch's messages, in lower case, when a collective broke because another rank is gone."""


def describe(error: BaseException, *, category: str = "user", has_process_group: bool = False) -> Failure:
    """Return the failure record of an exception; `category` holds unless the exception implies another.

    In a torch.distributed group an error of a collective probably means that another rank died.
    """
    if isinstance(error, SystemExit):
        return _exit(error)
    shown: BaseException | None = error
    if isinstance(error, EntryPointError):
        category = "setup"
        shown = error.__cause__  # the user's exception, if any: ours says all in its message
    return Failure(
        summary=first_words(error),
        category=category,
        exception_type=_type_name(type(shown or error)),
        traceback="" if shown is None else render(shown),
        is_collateral=is_collateral(error, has_process_group),
    )


def with_written(failure: Failure, path: str) -> Failure:
    """Return the failure with the reason from the worker's error file, if there is one."""
    written = error_file.read(path) if path else None
    if written is None or written.message == failure.summary:
        return failure
    code = f" (exited with code {failure.exit_code})" if failure.exit_code is not None else ""
    return msgspec.structs.replace(failure, summary=_clip(f"{written.message}{code}", _MAX_SUMMARY))


def exit_code(error: SystemExit) -> int:
    """Return the code with which the interpreter would exit."""
    if error.code is None:
        return 0
    if not isinstance(error.code, int):
        return 1
    return error.code & 0xFF if -(2**63) <= error.code < 2**63 else 0xFF


def where(error: BaseException) -> str:
    """Return the place where the error was raised, `` in train, train.py:12``; empty if unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def render(error: BaseException) -> str:
    """Return the error's traceback without our frames, plus a remote one if any; cut in the middle if long."""
    frames = _skip_ours(error.__traceback__)
    if frames is None and not isinstance(error, SyntaxError):  # a SyntaxError names its place itself
        frames = error.__traceback__
    lines = traceback.TracebackException(type(error), error, frames, compact=True).format()
    text = "".join(lines)
    if isinstance(error, RemoteError) and error.traceback and error.traceback not in text:
        text += f"\nIt was raised in worker {error.worker or '?'}:\n{error.traceback}"
    text = "\n".join(_clip(line, _MAX_LINE) for line in text.split("\n"))
    if len(text) > _MAX_TRACEBACK:
        half = _MAX_TRACEBACK // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return text


def _exit(error: SystemExit) -> Failure:
    code = exit_code(error)
    said = f": {_first_line(error.code)}" if isinstance(error.code, str) else ""
    return Failure(
        summary=_clip(f"exited with code {code}{said}", _MAX_SUMMARY),
        category="user",
        exception_type="SystemExit",
        traceback=render(error),
        exit_code=code,
    )


def first_words(error: BaseException) -> str:
    """Return the exception's type and the first line of its message; for an EntryPointError only the line."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its message cannot be shown: {broken})"
    text = _first_line(text)
    if isinstance(error, EntryPointError):
        return _clip(text, _MAX_SUMMARY)
    name = type(error).__qualname__
    return _clip(f"{name}: {text}" if text else name, _MAX_SUMMARY)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _clip(line: str, limit: int) -> str:
    """Cut a line to `limit` characters, with the number of dropped ones at its end; escape what UTF-8 cannot hold."""
    line = line.encode("utf-8", "backslashreplace").decode()
    if len(line) <= limit:
        return line
    kept = limit - len(f" … {len(line)} more characters")
    return f"{line[:kept]} … {len(line) - kept} more characters"


def _type_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _skip_ours(frames: TracebackType | None) -> TracebackType | None:
    """Drop the leading frames: of the runtime, importlib and asyncio."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_MACHINERY):
        frames = frames.tb_next
    return frames


def is_collateral(error: BaseException | None, has_process_group: bool) -> bool:
    """Return True if this error, or what caused it, looks like the death of another worker."""
    while error is not None and not _is_of_peer(error, has_process_group):
        error = error.__cause__
    return error is not None


def _is_of_peer(error: BaseException, has_process_group: bool) -> bool:
    if isinstance(error, WorkerDiedError):
        return True
    kind = type(error)
    is_torch = kind.__module__.startswith("torch") and kind.__name__.startswith("Dist")
    if is_torch and kind.__name__ == "DistNetworkError":
        return True
    if not isinstance(error, RuntimeError) or not (is_torch or has_process_group):
        return False
    text = str(error).lower()
    return any(sign in text for sign in _BROKEN_PEER)

"""torch's error file, which `torch.distributed.elastic`'s `@record` writes where ``TORCHELASTIC_ERROR_FILE`` says.

A worker that fails may write its reason there: ``{"message": {"message": ..., "extraInfo": {"py_callstack": ...}}}``,
or a plain ``{"message": "..."}``, in JSON. Its agent shows that reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

MAX_BYTES = 1024 * 1024
MAX_MESSAGE = 300
MAX_TRACEBACK = 24_000


class WrittenError(NamedTuple):
    message: str
    """One line."""
    traceback: str = ""


def beside(log_file: str) -> str:
    """Return the path of the error file of the incarnation with this log: ``…/0.error.json`` for ``…/0.err``."""
    return f"{log_file.removesuffix('.err')}.error.json" if log_file else ""


def read(path: str) -> WrittenError | None:
    """Return the error that was written to `path`; None if there is none, or none that can be read."""
    try:
        with Path(path).open("rb") as file:
            said = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None
    message: Any = said.get("message") if isinstance(said, dict) else None
    traceback: Any = ""
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        traceback = extra.get("py_callstack") if isinstance(extra, dict) else ""
        message = message.get("message")
    if not isinstance(message, str) or not message.strip():
        return None
    line = message.strip().splitlines()[0][:MAX_MESSAGE]
    return WrittenError(line, traceback[-MAX_TRACEBACK:] if isinstance(traceback, str) else "")

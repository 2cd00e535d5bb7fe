"""Real text that is on every machine: the source of Python's own standard library, or any files that you name."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path

HELD_OUT_EVERY = 10
SUFFIXES = frozenset({".py", ".txt", ".md", ".rst"})


def prepare(source: Path | None, folder: Path, context: int, limit_mb: float) -> int:
    """Cut text into windows, and write them as a dataset: ``train.jsonl`` and ``held_out.jsonl``, one window a line.

    Every tenth file is held out; a single file is split by position instead. Windows are in random order, so that any
    run of lines is a fair sample of all text; the order is the same each time.

    Args:
        source: a file, or a folder that is searched for .py, .txt, .md and .rst files; None means the standard
            library's top-level modules.
        folder: where the two files go; made when needed.
        context: bytes that the model sees; a window has one more, which it is to predict.
        limit_mb: read no more than this many MiB.

    Returns:
        How many windows there are to learn from.

    Raises:
        FileNotFoundError: there is no text there.
    """
    root = source or Path(sysconfig.get_paths()["stdlib"])
    if root.is_file():
        whole = root.read_bytes()[: int(limit_mb * 2**20)]
        cut = len(whole) - len(whole) // HELD_OUT_EVERY
        train, held_out = whole[:cut], whole[cut:]
    else:
        train, held_out = _read(root, "*.py" if source is None else "**/*", int(limit_mb * 2**20))
    if min(len(train), len(held_out)) < 4096:
        raise FileNotFoundError(
            f"{root} holds {len(train) + len(held_out)} bytes of text ({', '.join(sorted(SUFFIXES))}); "
            "at least 4096 are needed to learn from and 4096 to be judged by: name another file or folder with --data."
        )
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "held_out.jsonl", held_out, context)
    return _write(folder / "train.jsonl", train, context)


def _read(root: Path, pattern: str, limit: int) -> tuple[bytes, bytes]:
    train, held_out = bytearray(), bytearray()
    files = (file for file in sorted(root.glob(pattern)) if file.suffix in SUFFIXES and file.is_file())
    for number, file in enumerate(files):
        (held_out if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).extend(file.read_bytes())
        if len(train) + len(held_out) > limit:
            break
    return bytes(train), bytes(held_out)


def _write(file: Path, data: bytes, context: int) -> int:
    starts = list(range(0, len(data) - context, context))
    random.Random(0).shuffle(starts)
    windows: Iterable[bytes] = (data[start : start + context + 1] for start in starts)
    # Latin-1 has a character for each value of a byte, so that any byte goes into JSON and out again.
    file.write_text("".join(json.dumps({"text": window.decode("latin-1")}) + "\n" for window in windows))
    return len(starts)

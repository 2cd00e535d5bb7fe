"""Real text that is on every machine: the source of Python's own standard library, or any files that you name."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

HELD_OUT_EVERY = 10
SUFFIXES = frozenset({".py", ".txt", ".md", ".rst"})


class Text(NamedTuple):
    """Bytes to learn from, and bytes of other files to be judged by; both one-dimensional uint8."""

    train: Tensor
    held_out: Tensor


def load(source: str | None, limit_mb: float) -> Text:
    """Read text and split it by file: every tenth file is held out.

    Args:
        source: a file, or a folder that is searched for .py, .txt, .md and .rst files; None means the standard
            library's top-level modules. A single file is split by position instead.
        limit_mb: read no more than this many MiB.

    Raises:
        FileNotFoundError: there is no text there.
    """
    root = Path(source or sysconfig.get_paths()["stdlib"])
    if root.is_file():
        whole = root.read_bytes()[: int(limit_mb * 2**20)]
        cut = len(whole) - len(whole) // HELD_OUT_EVERY
        return _checked(root, whole[:cut], whole[cut:])
    files = sorted(root.glob("*.py") if source is None else (f for f in root.rglob("*") if f.suffix in SUFFIXES))
    train, held_out = bytearray(), bytearray()
    for number, file in enumerate(file for file in files if file.is_file()):
        (held_out if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).extend(file.read_bytes())
        if len(train) + len(held_out) > limit_mb * 2**20:
            break
    return _checked(root, bytes(train), bytes(held_out))


def batch(data: Tensor, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`size` random windows and the same windows one byte later, both ``(size, context)`` int64."""
    starts = torch.randint(len(data) - context - 1, (size, 1), generator=generator)
    windows = data[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _checked(root: Path, train: bytes, held_out: bytes) -> Text:
    if min(len(train), len(held_out)) < 4096:
        raise FileNotFoundError(
            f"{root} holds {len(train) + len(held_out)} bytes of text ({', '.join(sorted(SUFFIXES))}); "
            "at least 4096 are needed to learn from and 4096 to be judged by: name another file or folder with --data."
        )
    return Text(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)))

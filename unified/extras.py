"""Packages that some parts need and the core does not: which extra of the distribution has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRA_OF = {
    "torch": "torch",
    "numpy": "torch",
    "pyarrow": "data",
    "google_crc32c": "data",
    "botocore": "s3",
    "backports": "zstd",
    "xxhash": "xxhash",
}
"""Module → extra."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Have the error about a missing package say which extra brings it. Also a decorator, of functions.

    Args:
        what: what needs it, for the message.

    Raises:
        ModuleNotFoundError: a module was imported that is not there, with that advice if an extra has it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRA_OF:
            raise
        advice = f"pip install 'unified-runtime[{EXTRA_OF[module]}]'"
        raise ModuleNotFoundError(f"{what} needs {module}, which is not installed: {advice}.", name=module) from error

"""Late imports: public names at first use, so that `import unified` is fast, and packages of extras."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from unified.errors import nearest

EXTRA_OF = {
    "torch": "torch",
    "numpy": "torch",
    "pyarrow": "data",
    "google_crc32c": "data",
    "botocore": "s3",
    **dict.fromkeys(("accelerate", "datasets", "peft", "transformers", "trl"), "hf"),
    "lightning": "nemo",
    "backports": "zstd",
    "xxhash": "xxhash",
    "unified_simulator": "simulator",
    **dict.fromkeys(("tensorboard", "mlflow", "wandb", "trackio"), "trackers"),
}
"""Extra of the distribution that installs each module."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Name the extra to install in the error about a missing package that `what` needs. Also a decorator."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRA_OF:
            raise
        advice = f"pip install 'unified-runtime[{EXTRA_OF[module]}]'"
        raise ModuleNotFoundError(f"{what} needs {module}, which is not installed: {advice}.", name=module) from error


def exports(
    package: str, names_by_module: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are in other modules.

    Args:
        package: the package's `__name__`.
        names_by_module: names that are imported from each module.
    """
    home_of = {name: module for module, names in names_by_module.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            hint = "" if name.startswith("_") else nearest(name, home_of)
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}", name=name)
        with needed_by(f"{package}.{name}"):
            value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)  # the next look-up does not come here
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return find, names

"""Late imports: public names at first use, so that `import unified` costs next to nothing; packages of extras."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from unified.errors import nearest

EXTRA_OF = {
    "torch": "torch",
    "numpy": "torch",
    "pyarrow": "data",
    "google_crc32c": "data",
    "botocore": "s3",
    "backports": "zstd",
    "xxhash": "xxhash",
}
"""Extra of the distribution that has a module."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Let the error about a package that `what` needs, and that is missing, say which extra brings it. Also a decorator
    of functions."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRA_OF:
            raise
        advice = f"pip install 'unified-runtime[{EXTRA_OF[module]}]'"
        raise ModuleNotFoundError(f"{what} needs {module}, which is not installed: {advice}.", name=module) from error


def exports(
    package: str, homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names, and `__all__` with them, are there at first use.

    Args:
        package: the package's `__name__`.
        homes: ``module:name`` of each name. By default what the package imports for type checkers with
            ``from module import name as name``, which is how these know an import that is meant to be public.
    """

    @cache
    def home_of() -> Mapping[str, str]:
        return _typed_exports(package) if homes is None else homes

    def find(name: str) -> Any:
        if name == "__all__":
            return sorted(home_of())
        if name not in home_of():
            hint = "" if name.startswith("_") else nearest(name, home_of())
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")
        module, _, attribute = home_of()[name].partition(":")
        with needed_by(f"{package}.{name}"):
            value = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)  # the next look-up does not come here
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of()})

    return find, names


def _typed_exports(package: str) -> dict[str, str]:
    import ast  # not before a name is asked for

    module = vars(sys.modules[package])
    source: bytes = module["__loader__"].get_data(module["__file__"])
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if alias.name == "*":
                    found |= {name: f"{node.module}:{name}" for name in import_module(node.module).__all__}
                elif alias.asname:
                    found[alias.asname] = f"{node.module}:{alias.name}"
    return found

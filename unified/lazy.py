"""Packages whose public names are imported at first use, so that `import unified` costs next to nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from unified.errors import nearest
from unified.extras import needed_by


def exports(package: str, homes: Mapping[str, Iterable[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names live elsewhere.

    Args:
        package: the package's `__name__`.
        homes: module → the names that are imported from it.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            hint = "" if name.startswith("_") else nearest(name, home_of)
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")
        with needed_by(f"{package}.{name}"):
            value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)  # the next look-up does not come here
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return find, names

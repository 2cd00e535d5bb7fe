"""The import finder that answers for upstream's module names with our modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, NamespaceLoader
from types import ModuleType
from typing import cast

from unified.compat.children import FOLDER

_UPSTREAM = "dlrover.python.unified"
_API = f"{_UPSTREAM}.api"
ROOTS = ("dlrover", "dtruntime")
ALIASES = {
    _API: "unified.api",
    f"{_API}.builder.base": "unified.api.builder",
    f"{_API}.runtime.ray_dataloader_iter": "unified.api.runtime",
    **{f"{_UPSTREAM}.common.{name}": "unified.job" for name in ("config", "workload_desc", "enums", "constant")},
    "dtruntime": "unified.compat.dtruntime",
}
"""Upstream's module → ours. Every other module below ``…unified.api`` is ours of the same name below `unified.api`."""
_PACKAGES = {"dlrover", "dlrover.python", _UPSTREAM, f"{_UPSTREAM}.common"}
"""They lead to an alias, and hold nothing else."""


class AliasFinder(MetaPathFinder):
    """Finds the aliases, before any other finder: theirs would load our files a second time, under another name.

    Args:
        is_forced: also where the real package is installed. What the real one has beside the aliases stays importable.
    """

    def __init__(self, is_forced: bool) -> None:
        self.is_forced = is_forced
        self._names: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in ROOTS or (not self.is_forced and installed(root) is not None):
            return None
        loader: Loader
        if (ours := _ours(fullname)) is not None:
            loader = _AliasLoader(ours)
        elif fullname in _PACKAGES:
            if (theirs := _elsewhere(fullname, path)) is not None:
                return theirs
            loader = _EmptyLoader()
        else:
            return None
        self._names.add(fullname)
        return ModuleSpec(fullname, loader, is_package=fullname in _PACKAGES)

    def forget(self) -> None:
        """Drop what was imported, so that the names mean nothing, or the real packages, again."""
        for name in self._names:
            sys.modules.pop(name, None)
        self._names.clear()


class _AliasLoader(Loader):
    def __init__(self, ours: str) -> None:
        self._ours = ours

    def exec_module(self, module: ModuleType) -> None:
        # What a loader leaves in sys.modules is what is imported. To return ours from `create_module` would not do:
        # the import system would write the alias's name and spec into it.
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = importlib.import_module(self._ours)


class _EmptyLoader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def installed(root: str) -> str | None:
    """Where a real package of that name is, None if there is none. A bare folder of that name is no package: it is what
    a clone, a run's output or an example happens to be called.
    """
    module = sys.modules.get(root)
    if module is not None and module.__name__ == ALIASES.get(root):
        return None
    spec = _elsewhere(root, None) if module is None else module.__spec__
    if module is not None and spec is None:
        return getattr(module, "__file__", None) or "this process"  # somebody's own making
    if spec is None or spec.loader is None or isinstance(spec.loader, NamespaceLoader | _AliasLoader | _EmptyLoader):
        return None
    return spec.origin or "this process"


def _ours(name: str) -> str | None:
    if name in ALIASES:
        return ALIASES[name]
    if not name.startswith(f"{_API}."):
        return None
    ours = "unified.api" + name.removeprefix(_API)
    try:
        return ours if importlib.util.find_spec(ours) is not None else None
    except ModuleNotFoundError:  # its parent is a module without modules
        return None


def _elsewhere(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """What the other finders have under that name, our stand-ins excepted."""
    if path is None and FOLDER in sys.path:
        path = [each for each in sys.path if each != FOLDER]
    for finder in sys.meta_path:
        find = None if isinstance(finder, AliasFinder) else getattr(finder, "find_spec", None)
        if find is not None and (spec := find(name, path)) is not None:
            return cast(ModuleSpec, spec)
    return None

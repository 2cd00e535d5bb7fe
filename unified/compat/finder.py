"""The import finder that finds our modules under upstream's module names.

Processes that a script starts have the aliases too, whichever module they import first: see `unified.compat.stand_in`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, NamespaceLoader
from types import CodeType, ModuleType
from typing import Any, cast

from unified.compat.names import ALIASES, COUNTERPARTS, PACKAGES, Counterpart, advice

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stand_in")


def hand_on(env: MutableMapping[str, str]) -> None:
    """Put the stand-ins last on the module path of processes that this process starts.

    Spawned processes take over `sys.path`; others inherit `env`.
    """
    sys.path[:] = [*(path for path in sys.path if path != FOLDER), FOLDER]
    before = env.get("PYTHONPATH", "")
    if FOLDER not in before.split(os.pathsep):
        env["PYTHONPATH"] = f"{before}{os.pathsep}{FOLDER}" if before else FOLDER


def take_back(env: MutableMapping[str, str]) -> None:
    """Undo `hand_on`."""
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    before = env.get("PYTHONPATH", "").split(os.pathsep)
    if set(before) == {FOLDER}:
        del env["PYTHONPATH"]
    elif FOLDER in before:
        env["PYTHONPATH"] = os.pathsep.join(path for path in before if path != FOLDER)


ROOTS = ("dlrover", "dtruntime")
_API = "dlrover.python.unified.api"


class AliasFinder(MetaPathFinder):
    """Finder of the aliases. It comes first: other finders would load our files a second time, under another name.

    If forced, it also answers for an installed real package, whose modules beside the aliases stay importable.
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
        theirs = _real(fullname)
        loader: Loader
        if (ours := _ours(fullname)) is not None:
            loader = _AliasLoader(ours)
        elif theirs is not None and (fullname not in COUNTERPARTS or COUNTERPARTS[fullname].is_kept):
            return theirs
        elif fullname in COUNTERPARTS:
            loader = _CounterpartLoader(COUNTERPARTS[fullname], theirs)
        elif fullname in PACKAGES:
            loader = _EmptyLoader()
        elif (instead := advice(fullname)) is not None:
            raise ModuleNotFoundError(f"unified has no counterpart of {fullname!r}: {instead}.", name=fullname)
        else:
            return None
        self._names.add(fullname)
        return ModuleSpec(fullname, loader, is_package=fullname in PACKAGES)

    def forget(self) -> None:
        """Drop the imported aliases: the names mean the real packages, or nothing, again."""
        for name in self._names:
            sys.modules.pop(name, None)
        self._names.clear()


class _AliasLoader(InspectLoader):
    def __init__(self, ours: str) -> None:
        self._ours = ours

    def exec_module(self, module: ModuleType) -> None:
        # The import takes the module that the loader leaves in sys.modules. `create_module` must not return our module:
        # the import system would write the alias's name and spec into it.
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = importlib.import_module(self._ours)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of our module, for ``python -m``."""
        spec = importlib.util.find_spec(self._ours)
        return cast(InspectLoader, spec.loader).get_code(self._ours) if spec is not None else None

    def get_source(self, fullname: str) -> str | None:
        spec = importlib.util.find_spec(self._ours)
        return cast(InspectLoader, spec.loader).get_source(self._ours) if spec is not None else None


class _CounterpartLoader(Loader):
    """Loader of a module that imports our names at first use. If the aliases are forced, the real module, `theirs`,
    has the other names."""

    def __init__(self, counterpart: Counterpart, theirs: ModuleSpec | None) -> None:
        self._of = counterpart
        self._theirs = theirs
        self._loaded: ModuleType | None = None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Counterparts, in `unified`, of the names of {module.__name__}."
        module.__dict__["__all__"] = self._all()
        module.__dict__["__dir__"] = self._all
        module.__dict__["__getattr__"] = lambda name: self._find(module, name)

    def _all(self) -> list[str]:
        rest = getattr(importlib.import_module(self._of.rest), "__all__", None) if self._of.rest else []
        if rest is None:
            rest = [name for name in dir(importlib.import_module(self._of.rest)) if not name.startswith("_")]
        return sorted({*self._of.names, *rest})

    def _find(self, module: ModuleType, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}.")
        value = self._value(module.__name__, name)
        setattr(module, name, value)  # the next look-up does not come here
        return value

    def _value(self, module: str, name: str) -> Any:
        if name in self._of.names:
            ours, _, attribute = self._of.names[name].partition(":")
            return getattr(importlib.import_module(ours), attribute)
        if self._of.rest and hasattr(rest := importlib.import_module(self._of.rest), name):
            return getattr(rest, name)
        if self._theirs is not None and hasattr(self._real(), name):
            return getattr(self._real(), name)
        if name in self._of.instead:
            raise ImportError(
                f"cannot import name {name!r} from {module!r}: unified has no counterpart of it. "
                f"Instead: {self._of.instead[name]}.",
                name=module,
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}, as far as unified knows it.")

    def _real(self) -> ModuleType:
        """Return the real module, outside `sys.modules`."""
        assert self._theirs is not None
        assert self._theirs.loader is not None
        if self._loaded is None:
            self._loaded = importlib.util.module_from_spec(self._theirs)
            self._theirs.loader.exec_module(self._loaded)
        return self._loaded


class _EmptyLoader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is empty."""


def installed(root: str) -> str | None:
    """Return the place of a real package of that name, None if there is none. A folder without `__init__.py` does not
    count: a clone, a run's output or an example may have that name.
    """
    module = sys.modules.get(root)
    if module is not None and module.__name__ == ALIASES.get(root):
        return None
    spec = _elsewhere(root, None) if module is None else module.__spec__
    if module is not None and spec is None:
        return getattr(module, "__file__", None) or "this process"  # a module that user code made
    if spec is None or spec.loader is None or isinstance(spec.loader, NamespaceLoader | _AliasLoader | _EmptyLoader):
        return None
    return spec.origin or "this process"


def _ours(name: str) -> str | None:
    if name in ALIASES:
        return ALIASES[name]
    if name in COUNTERPARTS or not name.startswith(f"{_API}."):
        return None
    ours = "unified.api" + name.removeprefix(_API)
    try:
        return ours if importlib.util.find_spec(ours) is not None else None
    except ModuleNotFoundError:  # its parent is a module, not a package
        return None


def _real(name: str) -> ModuleSpec | None:
    """Return the other finders' spec of `name`, also if its parents are aliases. Nothing is imported."""
    parent = name.rpartition(".")[0]
    if not parent:
        return _elsewhere(name, None)
    of_parent = _real(parent)
    path = None if of_parent is None else of_parent.submodule_search_locations
    return None if path is None else _elsewhere(name, path)


def _elsewhere(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec of that name from the other finders, without our stand-ins."""
    if path is None and FOLDER in sys.path:
        path = [each for each in sys.path if each != FOLDER]
    for finder in sys.meta_path:
        find = None if isinstance(finder, AliasFinder) else getattr(finder, "find_spec", None)
        if find is not None and (spec := find(name, path)) is not None:
            return cast(ModuleSpec, spec)
    return None

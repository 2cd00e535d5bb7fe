"""Upstream's import paths for scripts that were written against them: ``dlrover.python.unified`` and ``dtruntime``.

    python -m unified.compat script.py [args]

runs a script (with ``-m`` a module) with the aliases in place. The workers of its job have them too, and so have the
processes that it starts. With ``UNIFIED_COMPAT=1`` in the environment, ``unified_compat.pth`` brings the aliases at the
interpreter's start if `unified` is installed; otherwise the first import of `unified` does. An alias is our module
itself, or a module with our names, so that a class is one class under both names. An installed `dlrover` or `dtruntime`
is left alone unless the aliases are forced (``UNIFIED_COMPAT=force``, ``--force``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Literal

from unified.compat.finder import ROOTS, AliasFinder, hand_on, installed, take_back
from unified.errors import OptionError

__all__ = ["VARIABLE", "apply", "found_installed", "install", "is_installed", "mode", "uninstall"]

VARIABLE = "UNIFIED_COMPAT"
_WORDS: dict[str, Literal["off", "on", "force"]] = {
    **dict.fromkeys(("", "0", "false", "off"), "off"),
    **dict.fromkeys(("1", "true", "on"), "on"),
    "force": "force",
}


def mode(env: Mapping[str, str]) -> Literal["off", "on", "force"]:
    """Return the meaning of ``UNIFIED_COMPAT``; OptionError if it has none."""
    word = env.get(VARIABLE, "")
    if word.lower() not in _WORDS:
        raise OptionError(f"{VARIABLE}={word!r} is none of 1, 0 and force.")
    return _WORDS[word.lower()]


def apply(env: MutableMapping[str, str]) -> None:
    """Install or remove the aliases, as the environment says, also for processes that inherit it."""
    match mode(env):
        case "off":
            uninstall()
            take_back(env)
        case wanted:
            install(force=wanted == "force")
            hand_on(env)


def install(*, force: bool = False) -> None:
    """Put the aliases in place for all later imports; with `force` also in front of an installed `dlrover` or
    `dtruntime`. A second call changes only `force`."""
    if (finder := _finder()) is None:
        sys.meta_path.insert(0, AliasFinder(force))
    else:
        finder.is_forced = force


def uninstall() -> None:
    """Remove the aliases, and the modules that were imported through them."""
    if (finder := _finder()) is not None:
        sys.meta_path.remove(finder)
        finder.forget()


def is_installed() -> bool:
    """Return True if the aliases are in place."""
    return _finder() is not None


def found_installed() -> dict[str, str]:
    """Return the real packages that the aliases stand for and that are installed, each with its place."""
    return {root: where for root in ROOTS if (where := installed(root)) is not None}


def _finder() -> AliasFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, AliasFinder)), None)

"""Processes that a script starts have the aliases too, whatever they import first: see `unified.compat.stand_in`."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stand_in")


def hand_on(env: MutableMapping[str, str]) -> None:
    """Let processes that are started from here find the stand-ins, after all that they find themselves.

    Spawned ones take over `sys.path`, and others inherit `env`.
    """
    sys.path[:] = [*(path for path in sys.path if path != FOLDER), FOLDER]
    before = env.get("PYTHONPATH")
    if before is None or FOLDER not in before.split(os.pathsep):
        env["PYTHONPATH"] = f"{before}{os.pathsep}{FOLDER}" if before else FOLDER


def take_back(env: MutableMapping[str, str]) -> None:
    """Undo `hand_on`."""
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    before = env.get("PYTHONPATH")
    if before is not None and FOLDER in before.split(os.pathsep):
        left = [path for path in before.split(os.pathsep) if path != FOLDER]
        if left:
            env["PYTHONPATH"] = os.pathsep.join(left)
        else:
            del env["PYTHONPATH"]

"""The `@rpc` functions of a script: exported while it runs, as each of them is defined.

A function that is being decorated has no name yet, and outer decorators may still wrap it. So the names of the script
are searched when a call asks for an unregistered function, and again until it is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from unified.bus.calls.registry import RPC_REGISTRY, MethodRegistry, export_rpc_module, is_runtimes, marked_functions
from unified.threads import start_thread

DEFINED_WITHIN_S = 30.0
"""Seconds from a script's start for which calls wait for functions that it has not defined yet."""
POLL_S = 0.02


class LateExports:
    """Exports the functions that a script (the module `__main__`) defines, from now until `close`. Calls that come too
    early wait, until `within_s` seconds from now."""

    def __init__(
        self, module: ModuleType, *, registry: MethodRegistry = RPC_REGISTRY, within_s: float = DEFINED_WITHIN_S
    ) -> None:
        self._module = module
        self._registry = registry
        self._until = time.monotonic() + within_s
        self._found: dict[str, Callable[..., Any]] = {}
        self._waiting: list[tuple[str, Callable[[], object]]] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        registry.on_missing = self.keep

    def keep(self, name: str, again: Callable[[], object]) -> bool:
        """Keep a call of an unregistered function. True: `again` is called when it is there, or never will be."""
        with self._lock:
            self._look()
            is_over = self._closed.is_set() or time.monotonic() >= self._until
            if is_over or name in self._registry or is_runtimes(name):
                return False
            self._waiting.append((name, again))
            if len(self._waiting) == 1:
                start_thread("unified-late-exports", self._poll)
        return True

    def close(self) -> None:
        """Export all functions of the ended script, and release waiting calls. ValueError: two have one name."""
        with self._lock:
            self._closed.set()
            self._look()
            self._registry.on_missing = None
        export_rpc_module(self._module, self._registry)

    def _poll(self) -> None:
        while True:
            is_over = self._closed.wait(POLL_S) or time.monotonic() >= self._until
            with self._lock:
                self._look()
                ready = [each for each in self._waiting if is_over or each[0] in self._registry]
                self._waiting = [each for each in self._waiting if each not in ready]
                is_done = not self._waiting
            for _, again in ready:
                again()
            if is_done:
                return

    def _look(self) -> None:
        """Export the functions that are defined by now, under the lock. A name that now refers to another function is
        exported again: the script has redefined or wrapped it."""
        names: Mapping[str, Any] = vars(self._module)
        seen: set[str] = set()
        for function, mark in marked_functions(names):
            if mark.name not in seen and self._registry.get(mark.name) is self._found.get(mark.name):
                self._registry[mark.name] = self._found[mark.name] = function
            seen.add(mark.name)

"""Variables that a program sets before its first ``import torch``, though the process has imported torch already.

In a plain interpreter torch would read them at that import. Here the import statement applies them as far as possible;
a line on stderr names the others, which have no effect.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import FrameType

from unified.job.driver import is_read_at_start
from unified.worker.environment import thread_count
from unified.worker.fork_setup import settle_libraries

_OF_THE_INTERPRETER = ("PYTHON", "LD_", "MALLOC_", "GLIBC_")
"""Prefixes of variables that have no effect in a running plain interpreter either."""
_READERS = {"TORCHDYNAMO_": "torch._dynamo", "TORCHINDUCTOR_": "torch._inductor", "TORCH_COMPILE_": "torch._dynamo"}
"""Prefix of variables → module of torch that reads them at its import."""


def apply_at_import() -> None:
    """Apply later changes of the environment when the program first imports torch.

    An import of a module that is there asks its spec whether the module is complete. A function in the place of
    `__import__` would be seen in the traceback of each import that fails.
    """
    before = dict(os.environ)

    class WatchedSpec(ModuleSpec):
        @property
        def _initializing(self) -> bool:
            if not _is_ours(sys._getframe(1)):
                for spec in watched:
                    spec.__class__ = ModuleSpec
                apply(before, os.environ)
            return False

    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    watched = [spec for spec in (getattr(each, "__spec__", None) for each in modules) if type(spec) is ModuleSpec]
    for spec in watched:
        spec.__class__ = WatchedSpec


def _is_ours(importer: FrameType) -> bool:
    return str(importer.f_globals.get("__name__", "")).partition(".")[0] in ("unified", "torch", "importlib")


def apply(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Apply the variables that differ, and print which have no effect."""
    changed = {name for name in (*now, *before) if now.get(name) != before.get(name)}
    if changed & _THREADS:
        settle_libraries(thread_count(now))
    for name in changed & _APPLIED.keys():
        _APPLIED[name](now.get(name, ""))
    late = sorted(name for name in changed - _APPLIED.keys() if _is_late(name))
    if late:
        given = " ".join(f"--env {name}={now.get(name, '')}" for name in late)
        print(
            f"unified: {', '.join(late)} changed after torch was imported in this process, and has no effect. Give it "
            f"to the job, so that the process starts with it: {given}, or env() of the role.",
            file=sys.stderr,
        )


def _is_late(name: str) -> bool:
    reader = next((module for beginning, module in _READERS.items() if name.startswith(beginning)), "torch")
    return is_read_at_start(name) and not name.startswith(_OF_THE_INTERPRETER) and reader in sys.modules


def _set_logs(value: str) -> None:
    from torch._logging import _internal

    _internal._init_logs()


def _set_tf32(value: str) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = value == "1"


def _set_debug_level(value: str) -> None:
    import torch.distributed as distributed

    if distributed.is_available():
        distributed.set_debug_level_from_env()  # type: ignore[attr-defined]  # torch exports it without saying so


_THREADS = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
_APPLIED: dict[str, Callable[[str], None]] = {
    "TORCH_LOGS": _set_logs,
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _set_tf32,
    "TORCH_DISTRIBUTED_DEBUG": _set_debug_level,
}

"""What a zygote imports before it forks, so that no worker pays for it."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

LATER = (
    "mpmath",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.fsdp",
    "torch._inductor.utils",
    "torch._dynamo",
)
"""What torch itself imports when a model is first wrapped in DDP or an optimizer takes its first step: 800 modules,
more than a second, in every rank anew. In pieces of some tenths of a second, since no worker is forked meanwhile."""

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def warm_up(entry_module: str) -> None:
    """Import the entry's module, and what it names in `PRELOAD` as far as that is installed.

    Raises:
        ImportError: the entry's module itself cannot be imported; nothing else is fatal.
    """
    with _single_threaded():
        entry = importlib.import_module(entry_module)
        for name in getattr(entry, "PRELOAD", ()):
            _try_import(name)


def for_later(entry_module: str) -> list[str]:
    """Modules worth importing when there are jobs and nobody waits: what `PRELOAD_LATER` names, else torch's own."""
    return list(getattr(sys.modules[entry_module], "PRELOAD_LATER", LATER if "torch" in sys.modules else ()))


def import_one(name: str) -> None:
    """Import a module if it is there; whatever is wrong with it is no reason not to fork."""
    with _single_threaded():
        _try_import(name)


def _try_import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            traceback.print_exc()  # it is installed, and something that it needs is not
    except Exception:  # a broken installation of a library that the job may not even use
        traceback.print_exc()


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Keep libraries from starting thread pools while they are imported; a pool does not survive a fork."""
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

"""What a forked worker inherits of the zygote's libraries, put right: threads, random numbers, exit functions."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import weakref
from pathlib import Path

_SET_BLAS_THREADS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def disown_finalizers() -> None:
    """Finalizers that a fork inherits are the zygote's to run; torch's alone would take 35 ms of each worker's exit."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):  # there is no public way to list them
        finalizer.atexit = False


def settle_libraries(threads: int) -> None:
    """What numpy and torch decided when the zygote imported them, with one thread, is decided anew in each fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # else all workers of a node would draw the same "random" numbers
        own = os.environ.get("OPENBLAS_NUM_THREADS", "")
        _set_blas_threads(int(own) if own.isdigit() and int(own) > 0 else threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _set_blas_threads(threads: int) -> None:
    """For the OpenBLAS that numpy's wheels bring; it has read its variables when it was loaded. Any other is left."""
    folder = Path(str(sys.modules["numpy"].__file__)).parent.parent / "numpy.libs"
    for path in folder.glob("*openblas*"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(path))
            for name in _SET_BLAS_THREADS:
                if hasattr(library, name):
                    getattr(library, name)(ctypes.c_int(threads))
                    return

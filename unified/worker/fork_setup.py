"""What a forked worker inherits of the zygote's libraries, put right: threads, random numbers, exit functions."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import random
import sys
import tempfile
import weakref
from pathlib import Path

LIBRARY_GENERATORS = {"sympy.core.random": ("rng", "_assumptions_rng"), "sympy.core.symbol": ("Dummy._prng",)}
"""Generators that libraries, which a zygote has imported, keep beside those of `random`, numpy and torch."""
_SET_BLAS_THREADS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def disown_finalizers() -> None:
    """Finalizers that a fork inherits are the zygote's to run; torch's alone would take 35 ms of each worker's exit."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):  # there is no public way to list them
        finalizer.atexit = False


def settle_libraries(threads: int) -> None:
    """What numpy and torch decided when the zygote imported them, with one thread, is decided anew in each fork."""
    if "numpy" in sys.modules:
        own = os.environ.get("OPENBLAS_NUM_THREADS", "")
        _set_blas_threads(int(own) if own.isdigit() and int(own) > 0 else threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def renew_randomness() -> None:
    """Seed anew, from the kernel, all that a zygote seeded once: else every fork would draw the same random numbers.

    What needs no help: the names of `tempfile` (it looks at the pid), whatever reads the kernel's entropy each time
    (`secrets`, `uuid4`, `ssl`, `numpy.random.default_rng`), and the generators of accelerators, which are made and
    seeded when CUDA and its like are initialised; no zygote does that. The hash seed belongs to the interpreter.
    """
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # not torch.seed(), which gives the accelerators' generators this very seed
    for module, names in LIBRARY_GENERATORS.items():
        for name in names if module in sys.modules else ():
            with contextlib.suppress(AttributeError):  # of another release of the library
                operator.attrgetter(name)(sys.modules[module]).seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)  # a secret of this process and its children
    tempfile.tempdir = None  # it was found by the zygote's TMPDIR


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

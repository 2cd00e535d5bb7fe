"""Set-up of processes around the fork: modules that a zygote preloads, and fix-ups of a new worker's process.

The fix-ups: threads, random numbers and exit functions of the zygote's libraries, memory, standard streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import operator
import os
import pkgutil
import random
import sys
import tempfile
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unified import process
from unified.config import settings
from unified.errors import OptionError, listed

if TYPE_CHECKING:
    from unified.protocol.worker_agent import Launch

LIBRARY_GENERATORS = {
    "sympy.core.random": ("rng", "_assumptions_rng"),
    "sympy.core.symbol": ("Dummy._prng",),
    "datasets.fingerprint": ("fingerprint_rng",),  # of names of cache files; transformers and trl import it
}
"""Random generators of libraries that a zygote imports, besides those of `random`, numpy and torch."""
_SET_BLAS_THREADS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")
VARIABLE = "UNIFIED_KEEP_FREED_MB"
DEFAULT_MB = 512
_MADV_DONTNEED = 4
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
LATER = (
    "mpmath",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.fsdp",
    "torch._inductor.utils",
    "torch._dynamo",
)
"""Modules that torch imports when a model is first wrapped in DDP or an optimizer takes its first step: 800 in all,
more than a second, in every rank. In pieces of some tenths of a second, since no worker is forked meanwhile."""
OPENED: list[str] = []
"""Lines on preloads that left files open in this zygote."""
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable with which `torch.cuda.is_available` asks NVML, and does not initialise CUDA."""
AS_NEW = "So workers start as new interpreters and import everything again: take it out of the preload."


def disown_finalizers() -> None:
    """Leave inherited finalizers to the zygote; torch's alone would take 35 ms of each worker's exit."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):  # there is no public way to list them
        finalizer.atexit = False


def settle_libraries(threads: int) -> None:
    """Give numpy and torch their number of threads, which was one when the zygote imported them."""
    if "numpy" in sys.modules:
        own = os.environ.get("OPENBLAS_NUM_THREADS", "")
        _set_blas_threads(int(own) if own.isdigit() and int(own) > 0 else threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def enter(directory: Path) -> None:
    """Change the working directory, also in settings of torch that the zygote read from its own (`debug_dir_root`)."""
    zygotes = os.getcwd()
    os.chdir(directory)
    for name in ("torch._dynamo.config", "torch._inductor.config"):
        config: Any = sys.modules.get(name)
        for key, value in config.get_config_copy().items() if config is not None else ():
            if isinstance(value, str) and f"{value}/".startswith(f"{zygotes}/"):
                setattr(config, key, os.getcwd() + value.removeprefix(zygotes))


def renew_randomness() -> None:
    """Seed again, from the kernel, all generators that a zygote seeded: otherwise all forks draw the same numbers.

    Not needed for the names of `tempfile` (it looks at the pid), for sources that read the kernel's entropy each time
    (`secrets`, `uuid4`, `ssl`, `numpy.random.default_rng`), and for the generators of accelerators: these are seeded
    when CUDA and the like are initialised, and no zygote does that. The hash seed belongs to the interpreter.
    """
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # not torch.seed(), which gives the accelerators' generators the same seed
    for module, names in LIBRARY_GENERATORS.items():
        for name in names if module in sys.modules else ():
            with contextlib.suppress(AttributeError):  # another release of the library lacks it
                operator.attrgetter(name)(sys.modules[module]).seed()
    for name in ("multiprocessing.process", "multiprocess.process"):  # the latter is a copy that `datasets` uses
        if (processes := sys.modules.get(name)) is not None:
            processes.current_process().authkey = os.urandom(32)  # a secret of this process and its children
    tempfile.tempdir = None  # the zygote chose it by its own TMPDIR


def _set_blas_threads(threads: int) -> None:
    """Set the threads of the OpenBLAS in numpy's wheels, which read its variables when loaded; skip any other."""
    folder = Path(str(sys.modules["numpy"].__file__)).parent.parent / "numpy.libs"
    for path in folder.glob("*openblas*"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(path))
            for name in _SET_BLAS_THREADS:
                if hasattr(library, name):
                    getattr(library, name)(ctypes.c_int(threads))
                    return


def keep_freed(env: Mapping[str, str]) -> int:
    """Have this process keep up to ``UNIFIED_KEEP_FREED_MB`` (512) MiB of freed memory for its next arrays; 0: none.

    glibc gives an array of 32 MiB back to the system when it is freed. The next array then gets pages that must be
    cleared first, which takes longer than filling them. Threads share one arena afterwards, since only the first arena
    can hold large arrays; so call this before there are threads. With another C library this does nothing. Returns the
    kept MiB.
    """
    given = env.get(VARIABLE, str(DEFAULT_MB))
    if not given.isdecimal():
        raise OptionError(f"{VARIABLE}={given!r} is not a number of MiB (0: as the system does it).")
    kept_mb = int(given)
    if kept_mb == 0 or not _has_glibc():
        return 0
    mallopt = ctypes.CDLL(None).mallopt
    nbytes = min(kept_mb * 1024 * 1024, 2**31 - 1)  # mallopt takes an int
    mallopt(_M_MMAP_THRESHOLD, nbytes)
    mallopt(_M_TRIM_THRESHOLD, nbytes)
    mallopt(_M_TOP_PAD, nbytes)  # otherwise all is given back once it exceeds the threshold
    mallopt(_M_ARENA_MAX, 1)
    return kept_mb


def give_back_idle() -> None:
    """Give back to the system what only imports needed: freed memory, and pages of libraries' files.

    Loading torch's libraries reads 70 MB, most of it only once. The system reads a page again, from its file cache, if
    it is needed after all. Only pages that equal their file are given back. Children miss nothing: a fork does not pass
    such pages on.
    """
    libc = ctypes.CDLL(None)
    if _has_glibc():
        libc.malloc_trim(0)
    advise = libc.madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with contextlib.suppress(OSError, ValueError):
        for start, end in list(_unchanged_pages()):
            advise(start, end - start, _MADV_DONTNEED)


def _unchanged_pages() -> Iterator[tuple[int, int]]:
    """Yield the addresses of read-only mappings of files of which no page was changed."""
    start = end = 0
    is_fixed_file = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, *rest = line.split()
            if not first.endswith(":"):  # "7f00-7f80 r-xp 00000000 08:01 1234 /lib/libc.so.6"
                start, end = (int(number, 16) for number in first.split("-"))
                is_fixed_file = len(rest) > 4 and rest[4].startswith("/") and "w" not in rest[0] and "p" in rest[0]
            elif first == "Anonymous:" and rest[0] == "0" and is_fixed_file:
                yield start, end


def _has_glibc() -> bool:
    return "CS_GNU_LIBC_VERSION" in os.confstr_names and bool(os.confstr("CS_GNU_LIBC_VERSION"))


def preload(entry_module: str) -> None:
    """Import the entry's module, and the modules of its `PRELOAD` that are installed and not broken.

    The variable `settings.PRELOAD` of a job's own cluster may ask for fewer of them, or for `PRELOAD_LATER`, too.
    """
    wanted = os.environ.get(settings.PRELOAD, "")
    with _guarded():
        entry = importlib.import_module(entry_module)
        for name in getattr(entry, "PRELOAD", ()):
            if wanted not in ("torch", "none") or (wanted == "torch" and name.partition(".")[0] in ("numpy", "torch")):
                _try_import(name)
        for name in preload_later(entry_module) if wanted == "all" else ():
            _try_import(name)


def preload_named(name: str) -> tuple[str, bool]:
    """Import a module, or an attribute such as ``transformers.Trainer``.

    Returns a line on what went wrong, or an empty text, and True if the import started threads.
    """
    before, files, note = process.num_threads(), _open_files(), ""
    with _guarded(is_named=True):
        try:
            _resolve(name)
        except BaseException as error:  # also SystemExit, which the module may raise
            traceback.print_exc()
            note = f"preload of {name!r} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if (num := process.num_threads() - before) > 0:
        note = f"preload of {name!r} started {num} thread(s), which a fork lacks. {AS_NEW}"
    elif opened := _open_files() - files:
        OPENED.append(f"preload of {name!r} left {listed(sorted(opened))} open, which a fork lacks. {AS_NEW}")
    return note, num > 0


def _open_files() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def _resolve(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name or "." not in name:
            raise
        pkgutil.resolve_name(name)


def preload_later(entry_module: str) -> list[str]:
    """Return modules to import when there are jobs and nobody waits: `PRELOAD_LATER`, else torch's own."""
    return list(getattr(sys.modules[entry_module], "PRELOAD_LATER", LATER if "torch" in sys.modules else ()))


def import_if_there(name: str) -> None:
    """Import a module if it is there; a broken one must not prevent a fork."""
    with _guarded():
        _try_import(name)


def _try_import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            traceback.print_exc()  # the module is installed, but not one that it needs
    except Exception:  # a broken installation of a library that the job may not even use
        traceback.print_exc()


@contextmanager
def _guarded(*, is_named: bool = False) -> Iterator[None]:
    """Keep libraries from starting thread pools and CUDA while they are imported; neither survives a fork.

    Variables that the libraries set are undone: a library sets them again where a worker uses it. Those of a module
    that was named (`is_named`) stay, as after the import in a worker.
    """
    before = dict(os.environ)
    guards = {**dict.fromkeys(_ONE_THREAD, "1"), _CUDA_CHECK: before.get(_CUDA_CHECK, "1")}
    os.environ.update(guards)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a fork could not use the descriptors that NVML has open
            nvml = ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_NOLOAD)
            any(nvml.nvmlShutdown() for _ in range(100))  # it counts its users, and fails when it has none
        for name in (guards if is_named else os.environ).keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


class _UnbufferedWriter(io.BufferedWriter):
    """A writer without a buffer. (The file of ``python -u`` loses the rest of a write that a signal cut short.)"""

    def write(self, data: io._WriteBuffer, /) -> int:  # type: ignore[name-defined]  # typeshed's own name for bytes
        count = super().write(data)
        self.flush()
        return count


def open_output() -> None:
    """Set up stdout and stderr as in torchrun's workers, which run with ``python -u``.

    A `print` has written all its text when it returns, even an unfinished line: it is visible at once, and is not lost
    when the process ends. No character is an error.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(descriptor, "w", closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            _UnbufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
        )
        stream.mode = "w"  # type: ignore[misc]  # as in plain Python
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def take_stdin(launch: Launch) -> None:
    """Give rank 0 of the job's first role the driver's stdin if both are on one host; other workers read nothing.

    The file behind the driver's stdin is opened again. The kernel allows this for terminals, pipes and files, and
    refuses it for sockets and for other users' processes: the worker then reads nothing either.
    """
    given = launch.spec.stdin
    is_first = launch.kind == "worker" and launch.place.rank == 0 and launch.role == launch.spec.roles[0].name
    if given is None or not is_first or given.pid_space != settings.pid_space():
        return
    try:
        descriptor = os.open(f"/proc/{given.pid}/fd/0", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return
    os.dup2(descriptor, 0)
    os.close(descriptor)
    stream = open(0, closefd=False)  # noqa: SIM115  # stays open
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, stream)

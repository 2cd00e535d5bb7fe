"""Facts and environment variables that workers take from the process that submits their job.

A variable reaches the workers on a cluster unless it is a fact of the submitter's host or session, a decision of the
cluster, or a credential. (The workers of an embedded cluster are its descendants, and have all of its environment.)
"""

from __future__ import annotations

import os
import pwd
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from unified.errors import UsageError
from unified.job.report_to import REPORT_RUN

WORKING_DIR = "DLROVER_WORKING_DIR"
DEBUGPY = "UNIFIED_DEBUGPY"
"""Port at which the first worker of a job waits for a client of debugpy."""
STORY_FOLDER = "UNIFIED_STORY_FOLDER"
"""Folder for the decisions about the job, if its cluster ends with the driver, as in an allocation of SLURM."""
INHERITED = ("UNIFIED_COMPAT", DEBUGPY, REPORT_RUN)
"""Variables of this process that its job's workers have too, wherever they run; the job's own environment wins."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_HOST = frozenset(
    """
    _ HOME USER LOGNAME USERNAME SHELL SHLVL PWD OLDPWD HOSTNAME HOST HOSTTYPE MACHTYPE OSTYPE TMPDIR TMP TEMP
    MAIL TERM COLORTERM COLUMNS LINES TMUX STY WINDOW WINDOWID EDITOR VISUAL PAGER MANPAGER BROWSER DISPLAY
    XAUTHORITY PS1 PS2 PS3 PS4 IFS PROMPT_COMMAND LS_COLORS LSCOLORS VIRTUAL_ENV VIRTUAL_ENV_PROMPT PYTHONHOME
    PYTHONEXECUTABLE PYTHONSTARTUP PYTHONUSERBASE PYTHONPLATLIBDIR CUDA_HOME CUDA_ROOT ROCM_HOME JAVA_HOME
    INVOCATION_ID JOURNAL_STREAM NOTIFY_SOCKET MAINPID MANAGERPID
    """.split()  # noqa: SIM905
)
_HOST_PREFIXES = (
    *("SSH_", "SUDO_", "GPG_", "DBUS_", "XDG_", "WAYLAND_", "KRB5", "TERM_", "VSCODE_", "BASH", "ZSH", "LESS", "LD_"),
    *("DYLD_", "CONDA", "_CONDA", "_CE_", "PYENV", "NVM_", "SYSTEMD_", "LISTEN_", "KUBERNETES_"),
    *("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "PMI", "OMPI_", "PRTE_", "HYDRA_", "PBS_", "LSB_", "LSF_", "SGE_"),
)
_CLUSTER = frozenset(
    """
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME
    NODE_RANK MASTER_ADDR MASTER_PORT ACCELERATE_TORCH_DEVICE CUDA_DEVICE_ORDER DLROVER_WORKING_DIR WORKER_ID
    COORDINATOR_URL
    """.split()  # noqa: SIM905
)
_CLUSTER_PREFIXES = ("UNIFIED_", "DLROVER_UNIFIED_", "TORCHELASTIC_", "PET_")
_OF_JOBS = ("UNIFIED_COMPAT", "UNIFIED_LOG_LEVEL", "UNIFIED_KEEP_FREED_MB", "UNIFIED_BUS_ROUTE", "UNIFIED_TRACE")
_OF_JOBS_PREFIXES = ("UNIFIED_STORAGE_", "UNIFIED_CHECKPOINT_", "UNIFIED_DATASET_")
_CREDENTIAL_WORDS = frozenset(
    """
    TOKEN SECRET SECRETS PASSWORD PASSWD PASSPHRASE CREDENTIAL CREDENTIALS KEY APIKEY AUTH
    """.split()  # noqa: SIM905
)
_READ_AT_START = (
    *("PYTHON", "TORCH", "PYTORCH_", "LD_", "MALLOC_", "GLIBC_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "NPY_", "ATEN_"),
)
"""Prefixes of names. Variables that are read later need no interpreter of their own, which costs seconds."""
_READ_LATER_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_CUDA_", "TORCH_FR_")
_READ_LATER = frozenset(
    """
    PYTHONPATH PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONIOENCODING PYTHONBREAKPOINT PYTHONFAULTHANDLER
    OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS TORCH_HOME TORCH_EXTENSIONS_DIR
    """.split()  # noqa: SIM905
)
"""Variables such as `PYTHONPATH`, which a forked worker reads again, and numbers of threads, which it sets again."""
_OF_IMAGES = re.compile(r"PYTHON_(?!GIL|JIT|CPU_COUNT|FROZEN_MODULES|PERF)|.*_(VERSION|SHA256|URL|BUILD\w*)\Z")
"""Variables by which container images describe themselves; no library reads them."""
_USER_AND_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


class Driver(NamedTuple):
    """Facts that workers take from the process that submits: its directory, and its import path."""

    working_dir: str
    sys_path: list[str]
    submitted_by: str
    """user@host:pid, for people."""
    env: Mapping[str, str] = {}
    """Variables of `INHERITED` that are set."""

    @classmethod
    def here(cls, env: Mapping[str, str] | None = None) -> Driver:
        """Return the facts of this process."""
        env = os.environ if env is None else env
        cwd = os.getcwd()
        script_dir = cwd if not sys.path or sys.path[0] == "" else sys.path[0]
        paths = [cwd] if sys.flags.safe_path else [script_dir, cwd]
        return cls(
            working_dir=env.get(WORKING_DIR) or cwd,
            sys_path=list(dict.fromkeys(str(Path(path).absolute()) for path in paths)),
            submitted_by=submitter(),
            env={name: env[name] for name in INHERITED if env.get(name)},
        )


class Passed(NamedTuple):
    """Environment that is passed on, and names that are not."""

    env: dict[str, str]
    withheld: list[str]
    """Names that look like credentials: they are passed on only if asked for."""


def passed_on(env: Mapping[str, str]) -> Passed:
    """Return the part of the submitter's environment that its workers have on a cluster."""
    found = {name: value for name, value in env.items() if _is_for_workers(name, value)}
    withheld = sorted(name for name, value in found.items() if is_credential(name, value))
    return Passed({name: value for name, value in found.items() if name not in withheld}, withheld)


def asked_for(words: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``--env NAME=VALUE``, and of ``--env NAME``, which takes the value from `env`.

    UsageError: a name is not valid, or `env` does not have it.
    """
    found: dict[str, str] = {}
    for word in words:
        name, is_given, value = word.partition("=")
        if not _NAME.match(name):
            raise UsageError(f"--env {word}: {name!r} is no name of a variable. Write --env NAME=VALUE, or --env NAME.")
        if not is_given and name not in env:
            raise UsageError(f"--env {name}: this process has no such variable. Give its value: --env {name}=VALUE.")
        found[name] = value if is_given else env[name]
    return found


def is_credential(name: str, value: str) -> bool:
    """Return True if the name, or a password in an address, marks the value as a credential."""
    return not _CREDENTIAL_WORDS.isdisjoint(name.upper().split("_")) or bool(_USER_AND_PASSWORD.search(value))


def _is_for_workers(name: str, value: str) -> bool:
    if not _NAME.match(name) or not is_text(value):
        return False
    if name in _OF_JOBS or name.startswith(_OF_JOBS_PREFIXES):
        return True
    if name in _HOST or name in _CLUSTER or name.startswith((*_HOST_PREFIXES, *_CLUSTER_PREFIXES)):
        return False
    return name == "PYTHONPATH" or not name.upper().endswith(("PATH", "VISIBLE_DEVICES"))


def is_read_at_start(name: str) -> bool:
    """Return True if only a process that starts with this variable sees it."""
    return (
        name.startswith(_READ_AT_START)
        and not name.startswith(_READ_LATER_PREFIXES)
        and name not in _READ_LATER
        and not _OF_IMAGES.match(name)
    )


def is_text(value: str) -> bool:
    """Return True if the value can be encoded as UTF-8; other values cannot be sent."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def submitter() -> str:
    """Return this process as user@host:pid, for people."""
    return f"{user()}@{os.uname().nodename}:{os.getpid()}"


def user() -> str:
    """Return the name of this process's user; its number where it has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under a uid without a name
        return str(os.getuid())

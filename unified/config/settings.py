"""Settings of this installation: places and intervals, each from one environment variable.

Options of a job are elsewhere (`unified.job.config.JobConfig`); options of a daemon are its flags.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from unified.errors import UsageError

DEFAULT_PORT = 7077
PRELOAD = "UNIFIED_PRELOAD"
"""Variable of a job's own cluster: the guess of `unified.client.preload`."""
MAX_SOCKET_PATH = 107
"""Bytes of the path of a Unix socket."""
BELOW_AGENT = "/a-01234567/snapshots"
BELOW_CLUSTER = f"/e4194304-abcdef{BELOW_AGENT}"
"""Paths, in the folder of sockets, of the socket that every agent has: alone, and in a user's own cluster."""
LONGEST_BELOW = f"/e4194304-abcdef/a-01234567/{'0' * 24}"
"""Longest path of a worker's socket. If it does not fit, workers of a host use TCP."""
LEAST_DESCRIPTORS = 64
"""Fewest open files with which an agent runs four workers; each further worker needs some more."""


class Intervals(NamedTuple):  # no msgspec record: its import would delay an early zygote
    """Intervals and time limits, in seconds. The master sends them to agents; tests use shorter ones."""

    heartbeat_s: float = 1.0
    lease_s: float = 15.0
    """Silence after which an agent is lost. An agent whose process ends is lost at once."""
    away_s: float = 300.0
    """Time for which agents keep their workers after the master has stopped in order, even if its host is gone."""
    settle_s: float = 0.5
    """Time for which a failure that looks like collateral waits for its root cause."""
    connect_s: float = 10.0
    """Time for which a client or an agent tries to reach its master before it says so."""
    start_s: float = 120.0
    """Time that a worker's process may take to start, from its placement to its hello."""
    fork_s: float = 30.0
    """Silence after which a zygote that has to report a fork or a worker's end is replaced."""
    replace_s: float = 5.0
    """Time for which a role with a range of nodes waits for a node that replaces a lost one."""
    grow_settle_s: float = 3.0
    """Time for which a role with a range of nodes lets more nodes come before it grows."""
    grow_every_s: float = 30.0
    """Least time from one round of a role to a next one that only adds nodes."""
    change_s: float = 30.0
    """Time for workers to leave their round before a planned change of its members."""
    vacate_s: float = 10.0
    """Time for workers to move elsewhere when their agent is asked to stop; then it stops them."""


def python_path(env: Mapping[str, str], directory: str | Path | None = None) -> dict[str, str]:
    """Return ``PYTHONPATH``, if `env` has it, with absolute entries. An empty entry is the directory, as for Python.

    Without `directory` it is that of this process; for its own variable that in which it started, if `sys.path` still
    shows it.
    """
    found, is_own = [], directory is None and env.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    for entry in env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else ():
        path = os.path.abspath(os.path.join(directory or os.getcwd(), entry))
        if is_own and not os.path.isabs(entry) and path not in sys.path:
            others = (other for other in sys.path[1:] if isinstance(other, str))
            path = next((other for other in others if other.endswith(f"/{os.path.normpath(entry)}")), path)
        found.append(path)
    return {"PYTHONPATH": os.pathsep.join(found)} if found else {}


def intervals() -> Intervals:
    """Return the intervals, each overridden by ``UNIFIED_HEARTBEAT_S``, ``UNIFIED_LEASE_S`` and so on.

    Raises:
        UsageError: a variable that is not a positive number.
    """
    given: dict[str, float] = {}
    for field in Intervals._fields:
        name = f"UNIFIED_{field.upper()}"
        if (text := os.environ.get(name)) is not None:
            try:
                given[field] = float(text)
            except ValueError:
                raise UsageError(f"{name}={text!r} is not a number of seconds.") from None
            if given[field] <= 0:
                raise UsageError(f"{name}={text!r} must be above 0 seconds.")
    return Intervals(**given)


def worker_nice() -> int:
    """Return the niceness of workers, by which daemons are scheduled before them: ``$UNIFIED_WORKER_NICE``, or 1.

    Raises:
        UsageError: a variable that is no number from 0 to 19.
    """
    text = os.environ.get("UNIFIED_WORKER_NICE", "1")
    if not text.isdecimal() or int(text) > 19:
        raise UsageError(f"UNIFIED_WORKER_NICE={text!r} is not a number from 0 to 19.")
    return int(text)


def home() -> Path:
    """Return the state and log folder: ``$UNIFIED_HOME``, ``$XDG_STATE_HOME/unified`` or ``~/.local/state/unified``.

    If this user has no home, or may not write there, it is a private folder below the system's temporary one. A line on
    stderr says so.
    """
    usual = user_state()
    if usual is None:
        why = f"uid {os.getuid()} has no home folder (HOME is not set)"
    elif os.environ.get("UNIFIED_HOME") or _may_make(usual):
        return usual
    else:
        why = f"{usual} cannot be written"
    chosen = make_private(_temporary()) / "home"
    _say(f"state and logs are in {chosen}, because {why}; set UNIFIED_HOME to use another place.")
    return chosen


def user_state() -> Path | None:
    """Return the folder that `home` prefers, whether or not it can be written. None: this user has no home."""
    given = os.environ.get("UNIFIED_HOME")
    return Path(given) if given else user_folder("XDG_STATE_HOME", ".local/state")


def user_folder(variable: str, usual: str, env: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder ``unified`` in the folder of an XDG variable, else in `usual` of the user's home.

    None: this user has no home, as in a container that runs under a uid without a name.
    """
    env = os.environ if env is None else env
    try:
        return Path(env.get(variable) or Path.home() / usual) / "unified"
    except RuntimeError:
        return None


def _may_make(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return os.access(there, os.W_OK | os.X_OK)


@functools.cache
def _say(text: str) -> None:
    """Print a line once in this process."""
    print(f"unified: {text}", file=sys.stderr)


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"unified-{os.getuid()}"


def run_root() -> Path:
    """Return the folder of sockets: ``$UNIFIED_RUN_DIR``, else ``$XDG_RUNTIME_DIR/unified`` if that exists, else
    ``unified-UID`` in the temporary folder, or in ``/tmp`` if these are too long for the path of a Unix socket.
    `make_run_root` makes it.
    """
    if given := os.environ.get("UNIFIED_RUN_DIR"):
        return Path(given)
    found, given = [_temporary()], os.environ.get("XDG_RUNTIME_DIR", "")
    if given and os.access(given, os.W_OK | os.X_OK):  # SLURM hands on the variable of a login node
        found.insert(0, Path(given) / "unified")
    short = [path for path in found if len(os.fsencode(path)) + len(LONGEST_BELOW) <= MAX_SOCKET_PATH]
    return short[0] if short else Path("/tmp", _temporary().name)


def make_run_root(below: str = BELOW_CLUSTER) -> Path:
    """Make the folder of sockets, which only this user may enter.

    Args:
        below: path of a socket that must fit in it.

    Raises:
        UsageError: ``UNIFIED_RUN_DIR`` is too long.
        PermissionError: the folder exists and is somebody else's, or a symbolic link.
    """
    root, most = run_root(), MAX_SOCKET_PATH - len(below)
    if (length := len(os.fsencode(root))) > most:
        raise UsageError(
            f"UNIFIED_RUN_DIR={root} has {length} bytes, but at most {most} fit: the path of a socket has "
            f"at most {MAX_SOCKET_PATH}. Name a shorter folder."
        )
    return make_private(root)


def make_private(directory: Path) -> Path:
    """Make a directory that only this user may enter.

    Raises:
        PermissionError: it exists and is somebody else's, or a symbolic link, which could lead anywhere.
    """
    make_folder(directory)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise PermissionError(f"{directory} is a symbolic link, which is not followed: set UNIFIED_RUN_DIR.") from None
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            raise PermissionError(
                f"{directory} belongs to uid {found.st_uid}, not to uid {os.getuid()}: set UNIFIED_RUN_DIR."
            )
        if found.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return directory


def for_user_alone(path: str, flags: int) -> int:
    """Open a file; one that is made is for this user alone. The `opener` of `open`."""
    return os.open(path, flags, 0o600)


def make_folder(directory: Path) -> None:
    """Make a directory and its parents with mode 0700, for any umask; an existing directory stays as it is.

    Raises:
        UsageError: its name is not UTF-8, so that no message can name it.
    """
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"the folder {str(directory)!r} cannot be used: its name is not UTF-8. UNIFIED_HOME, UNIFIED_RUN_DIR, "
            "--state-dir and --log-dir choose another."
        ) from None
    for folder in (*reversed(directory.parents), directory):
        is_new = not folder.exists()
        if is_new or folder == directory:
            folder.mkdir(mode=0o700, exist_ok=True)
        if is_new and folder.stat().st_mode & 0o700 != 0o700:  # the umask removed the user's own rights
            folder.chmod(0o700)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, even folders that are not writable."""
    import shutil  # only few processes remove folders

    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def check_descriptors() -> None:
    """Raise UsageError if this process may open too few descriptors: ZeroMQ would abort."""
    import resource  # only needed to open sockets

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < LEAST_DESCRIPTORS:
        raise UsageError(
            f"`ulimit -n` is {limit}, which is too few open files: at least {LEAST_DESCRIPTORS} are needed."
        )


def unusable(what: str, directory: Path, error: OSError, flag: str) -> str:
    """Return an error text: a daemon cannot keep its files in this folder."""
    return f"{what} {directory} cannot be used: {error.strerror}. Choose one with {flag}."


def host_id() -> str:
    """Return an id that processes of one boot and one network namespace share: they can use ``ipc`` sockets."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux: one host is one node name
        return os.uname().nodename
    return f"{boot}-{namespace}"


def pid_space() -> str:
    """Return an id that processes of one boot and one pid namespace share: they know each other by the same pids.

    Raises:
        OSError: the system has no /proc.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.readlink('/proc/self/ns/pid')}"


def python() -> str:
    """Return the interpreter for our own child processes."""
    return sys.executable


def command_line() -> list[str]:
    """Return the words that run this installation's ``unified``, on any host that has it at the same path."""
    return [python(), "-P", "-m", "unified"]

"""A host of its own with systemd as PID 1: a root tree in a cache, which systemd-nspawn boots.

Never boot systemd on the root of the machine itself: it cleans the folders of everybody.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support import packages
from tests.support.deadlines import met
from unified import process
from unified.testing import eventually

ROOT = Path(__file__).parents[2]
PACKAGES = ["systemd", "systemd-sysv", "dbus", "libpython3-stdlib", "libstdc++6"]
"""Packages of the tree; the last two bring the libraries that our own interpreter needs."""
TOOLS = {"mmdebstrap": "mmdebstrap", "systemd-nspawn": "systemd-container", "nsenter": "util-linux"}
"""Programs, with their Debian packages."""
MAKE_S, COMMAND_S = 600, 120


class NoTreeError(Exception):
    """A reason why there can be no such host here."""


def tree() -> Path:
    """Return the tree of this machine's release, made if it is not there; NoTreeError: it cannot be."""
    if os.geteuid() != 0:
        raise NoTreeError("to boot systemd in a root tree of its own needs root")
    if ROOT.is_relative_to("/tmp"):
        raise NoTreeError("the units have a /tmp of their own (PrivateTmp), which hides a checkout below /tmp")
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    if not release or shutil.which("apt-get") is None:
        raise NoTreeError("the root tree is made of packages of Debian or Ubuntu, which this is not")
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing and (why := packages.install(missing)):
        raise NoTreeError(f"{' and '.join(missing)} cannot be installed: {why}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unified-tests"
    made = cache / f"{release}-{hashlib.sha256(' '.join(PACKAGES).encode()).hexdigest()[:8]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            included = ",".join(PACKAGES)
            _run("mmdebstrap cannot make a root tree", "mmdebstrap", "--variant=essential", f"--include={included}",
                 release, str(part))  # fmt: skip
            (part / "root").chmod(0o755)  # our interpreter may be mounted below it
            part.rename(made)
    return made


def _run(what_failed: str, *command: str) -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_S, env=env)
    if done.returncode:
        raise NoTreeError(f"{what_failed}: {[*done.stdout.splitlines(), *done.stderr.splitlines(), 'no output'][-1]}")


class Host:
    """The booted host. Our programs are on its path; ``/shared`` is a folder of the test's."""

    def __init__(self, init: int, shared: Path) -> None:
        self.shared = shared
        self._init = init
        self._env = {"PATH": f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}

    def run(self, *command: str, codes: tuple[int, ...] = (0,), env: Mapping[str, str] | None = None) -> str:
        """Run a command on the host; return what it printed. AssertionError: it ends with another exit code."""
        entered = ["nsenter", f"--target={self._init}", "--all", "--root", "--wd", *command]
        done = subprocess.run(
            entered, capture_output=True, text=True, timeout=met(COMMAND_S), env={**self._env, **(env or {})}
        )
        assert done.returncode in codes, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def is_up(self) -> bool:
        return self.run("systemctl", "is-system-running", codes=(0, 1, 4)).strip() == "running"

    def signal(self, pid: str, name: str) -> None:
        self.run("sh", "-c", f"kill -{name} {pid}")

    def show(self, unit: str) -> dict[str, str]:
        """Return the properties of a unit; empty where there is none of the name."""
        lines = self.run("systemctl", "show", unit).splitlines()
        return defaultdict(str, ((line.partition("=")[0], line.partition("=")[2]) for line in lines))

    def journal(self, unit: str) -> str:
        return self.run("journalctl", "--no-pager", "-u", unit)

    def write(self, path: str, text: str) -> None:
        """Write a file of the host's own."""
        self.run("mkdir", "-p", str(Path(path).parent))
        file = self.shared / "to-copy"
        file.write_text(text)
        self.run("cp", "/shared/to-copy", path)


@contextlib.contextmanager
def booted(folder: Path) -> Iterator[Host]:
    """Boot a host until the end of the block. NoTreeError: there can be none here."""
    root, log, name = tree(), folder / "console", f"unified-{os.getpid()}"
    folder.chmod(0o755)
    shared = Path(tempfile.mkdtemp(prefix="shared-", dir=folder))
    shared.chmod(0o777)
    code = {Path(sys.base_prefix), Path(sys.prefix), ROOT}
    # The pids of the container die with nspawn, which alone would leave PID 1 behind where it is killed.
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command += ["systemd-nspawn", "-q", f"--directory={root}", f"--machine={name}"]
    command += ["--boot", "--register=no", "--keep-unit", "--volatile=overlay", "--private-network", "--console=pipe"]
    command += [f"--bind={shared}:/shared", *(f"--bind-ro={place}" for place in sorted(code))]
    with log.open("wb") as output:
        container = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            preexec_fn=lambda: process.die_with_parent(signal.SIGKILL),
        )
    try:
        init = eventually(
            lambda: _init_of(container.pid) or container.poll() is not None,
            timeout=met(100),
            message="systemd does not boot",
        )
        if init is True:
            lines = log.read_text(errors="replace").splitlines()
            raise NoTreeError(f"systemd-nspawn cannot boot it here: {lines[-1] if lines else 'no output'}")
        host = Host(init, shared)
        eventually(host.is_up, timeout=met(120), message="the boot does not end")
        yield host
        host.run("systemctl", "poweroff")
        container.wait(met(100))
    finally:
        container.kill()
        container.wait()
        for group in Path("/sys/fs/cgroup").glob("**/payload"):  # nspawn leaves these, empty
            _remove_folders(group)
            _remove_folders(group.with_name("supervisor"))
        _remove_folders(Path("/run/systemd/nspawn/propagate") / name)


def _init_of(container: int) -> int:
    """Return the pid of PID 1 of a container, a child of nspawn, a child of `container`; 0 if it is not there yet."""
    parents = {each.pid: each.parent for each in process.every_process()}
    for pid, parent in parents.items():
        if parents.get(parent) == container:
            with contextlib.suppress(OSError):
                return pid if os.readlink(f"/proc/{pid}/exe").endswith("/systemd") else 0
    return 0


def _remove_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):  # it is in use: another host is up
            os.rmdir(folder)

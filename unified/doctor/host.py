"""Checks of this host, which find the facts. Each has a deadline, because a name server or file system may hang."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import platform
import re
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from unified import devices, process
from unified.bus.shm.files import DIRECTORY
from unified.bus.transport.routes import ipc_address
from unified.config import clusters, settings
from unified.config.cgroups import limits, read_text
from unified.config.mounts import file_system
from unified.config.ports import bind_free
from unified.config.runtime import SECTIONS, VARIABLES, variable_of
from unified.doctor import judgement
from unified.doctor.judgement import Finding, fine, note, wrong
from unified.errors import listed, nearest
from unified.job.config import JobConfig
from unified.job.description import field_of
from unified.security.keys import find_key
from unified.threads import start_thread

RDMA = Path("/sys/class/infiniband")
SYSTEMD = Path("/etc/systemd")
OTHER_SETTINGS = """
    AGENT_INCARNATION AGENT_NODE AGENT_SNAPSHOTS ALLOCATION_ENDS_AT BUS_ROUTE CLUSTER_ID COMPAT CONFIG CONTROL_FD
    DEBUGPY FOLD HOME INCARNATION INSECURE JOB_ID KEEP_FREED_MB KEY_FILE LOG_LEVEL MASTER NODE PORT_RANGE PRELOAD
    PROGRESS REPORT_RUN RUN_DIR SHIP_LIMIT SHM_LIMIT SLURM_GROUPS STORY_FOLDER TRACE WORKER WORKER_NICE
"""
"""Variables, without ``UNIFIED_``, that no table lists: for users, or from one of our processes to another."""
USUAL_DESCRIPTORS, CAP_IPC_LOCK, FIRST_ORDINARY_UID = 1024, 14, 1000
LATE, NAME_S = "no answer", 6.0
_TORCH = """
import json, sys, warnings
from unified import process
process.die_with_parent(9, int(sys.argv[1]))
warnings.showwarning = lambda text, *_: print(text, file=sys.stderr)
import torch
print(json.dumps([torch.__version__, torch.version.cuda or torch.version.hip or "", torch.cuda.is_available()]))
"""


class Check(NamedTuple):
    """A check, and the advice if it does not end in time. An error that it raises is `wrong`, and says what to do."""

    name: str
    look: Callable[[], Finding]
    advice: str = "A file system or a device hangs: `dmesg` may say which."
    within_s: float = 20.0


def examine_host(folders: Sequence[Path] = (), master: str = "*") -> list[Finding]:
    """Check this host alone. This takes some seconds, and at most 90 s.

    Args:
        folders: folders that daemons have as ``--state-dir`` and ``--log-dir``; none: the one of ``UNIFIED_HOME``.
        master: address by which the cluster key is found; by default an address on another host.
    """
    return run(
        [
            Check("settings", _settings),
            Check("cluster key", lambda: fine(key.fingerprint if (key := find_key(master)) else "there is none")),
            name_check("own name", socket.gethostname(), is_own=True),
            Check("own ports", _ports),
            Check("shared memory", lambda: judgement.shared_memory(*_space(Path(DIRECTORY)))),
            Check("run folder", _run_root),
            *(Check("folder", partial(_folder, each)) for each in folders or [settings.home()]),
            Check("open files", _open_files),
            Check("locked memory", _locked_memory),
            Check("memory", _memory),
            Check("RemoveIPC", _remove_ipc),
            Check("killed agents", _killed_agents),
            Check("NVIDIA driver", _driver),
            Check("Python", lambda: fine(platform.python_version())),
            Check("torch", _torch, within_s=90.0),
        ]
    )


def run(checks: Sequence[Check]) -> list[Finding]:
    """Do all checks at once. The thread of a late check goes on until this process ends."""
    began = time.monotonic()
    found = [wrong(f"{LATE} within {check.within_s:g} s", check.advice, check.name) for check in checks]

    def look(number: int, check: Check) -> None:
        try:
            found[number] = msgspec.structs.replace(check.look(), check=check.name)
        except Exception as error:  # on a strange host a library may raise anything
            found[number] = wrong(str(error) or repr(error), check=check.name)

    threads = [start_thread("doctor", look, *each) for each in enumerate(checks)]
    for check, thread in zip(checks, threads, strict=True):
        thread.join(max(0.0, began + check.within_s - time.monotonic()))
    return found.copy()


def name_check(check: str, name: str, *, is_own: bool = False) -> Check:
    """Return a check of the lookup of a name: this host's own, or the master's."""
    return Check(check, lambda: judgement.name_lookup(*_lookup(name), is_own=is_own), judgement.SLOW_NAMES, NAME_S)


def _lookup(name: str) -> tuple[str, list[str], float, str]:
    """Look up a name, then the name of its address, as torch's TCPStore does. Return the time and any error, too."""
    began, addresses, problem = time.monotonic(), list[str](), ""
    try:
        addresses = list(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, None)))
        socket.getnameinfo((addresses[0], 0), 0)
    except OSError as error:
        problem = error.strerror or str(error)
    return name, addresses, time.monotonic() - began, problem


def unknown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with ``UNIFIED_`` that are no setting, each with a hint at the nearest setting."""
    known = {f"UNIFIED_{each.upper()}" for each in (*field_of(JobConfig), *settings.Intervals._fields)}
    known |= {f"UNIFIED_{each}" for each in OTHER_SETTINGS.split()} | set(VARIABLES.values())
    known |= {variable_of(name, key) for name, kind in SECTIONS.items() for key in kind.__struct_fields__}
    return {name: nearest(name, known) for name in sorted(env) if name.startswith("UNIFIED_") and name not in known}


def _settings() -> Finding:
    if unknown := [f"{name} is no setting.{hint}" for name, hint in unknown_variables(os.environ).items()]:
        return note(" ".join(unknown), "It has no effect: correct or unset it. docs/options.md has all that there are.")
    return fine("every UNIFIED_ variable is a known setting")


def _ports() -> Finding:
    with bind_free(lambda port: socket.create_server(("", port))) as listener:
        return fine(f"{listener.getsockname()[1]} is free")


def _space(path: Path) -> tuple[str, str, bool, int, int, int]:
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    found = os.statvfs(there)
    sizes = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, found.f_favail or not found.f_files
    return str(path), file_system(path), os.access(there, os.W_OK | os.X_OK), *sizes


def _folder(path: Path) -> Finding:
    return judgement.folder(*_space(path))


def _run_root() -> Finding:
    root = settings.run_root()
    if os.path.lexists(root):
        settings.make_private(root)  # raises what an agent would
    _, why_not = ipc_address(f"{root}{settings.LONGEST_BELOW.rpartition('/')[0]}", "0" * 24)
    if why_not or not _space(root)[2]:
        return wrong(f"{root}: {why_not or 'it cannot be written: set UNIFIED_RUN_DIR'}.")
    return fine(str(root))


def _open_files() -> Finding:
    settings.check_descriptors()  # raises what a daemon would
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < USUAL_DESCRIPTORS:
        return note(f"`ulimit -n` is {limit}", "Raise it: `ulimit -n 65536`, LimitNOFILE= of a unit, or limits.conf.")
    return fine(f"`ulimit -n` is {limit if limit >= 0 else 'unlimited'}")


def _locked_memory() -> Finding:
    rights = re.search(r"CapEff:\s*(\w+)", read_text(Path("/proc/self/status")))
    is_privileged = rights is not None and bool(int(rights[1], 16) & 1 << CAP_IPC_LOCK)
    rdma = sorted(os.listdir(RDMA)) if RDMA.is_dir() else []
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return judgement.locked_memory(limit, rdma, is_privileged=is_privileged)


def _memory() -> Finding:
    limit, total = limits().memory_bytes, psutil.virtual_memory().total
    if limit is None or limit >= total:
        return fine(judgement.size(total))
    advice = (
        "An agent offers at most this by default. The kernel kills processes that take more; files in /dev/shm count, "
        "too."
    )
    return note(f"control groups allow this process {judgement.size(limit)} of {judgement.size(total)}", advice)


def _remove_ipc() -> Finding:
    files = [SYSTEMD / "logind.conf", *sorted((SYSTEMD / "logind.conf.d").glob("*.conf"))]
    said = re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", "\n".join(map(read_text, files)), re.MULTILINE)
    removes = Path("/run/systemd/seats").exists() and (said or ["yes"])[-1].lower() in ("yes", "true", "on", "1")
    lingers = Path("/var/lib/systemd/linger", psutil.Process().username()).exists()
    if not removes or lingers or os.getuid() < FIRST_ORDINARY_UID:
        return fine("no logout removes shared memory")
    advice = "Jobs that go on lose payloads: `loginctl enable-linger`, or RemoveIPC=no in /etc/systemd/logind.conf."
    return note("this user's last logout removes their files in /dev/shm (RemoveIPC=yes)", advice)


def _killed_agents() -> Finding:
    agents, pids = list[str](), list[int]()
    for path in sorted((settings.run_root() / "agents").glob("*.lock")):
        if (descriptor := clusters.lock(path, os.O_RDONLY, fcntl.LOCK_SH)) is not None:  # None: its agent runs
            os.close(descriptor)
            record = json.loads(path.read_bytes() or "{}")
            agents.append(f"node {record.get('node')}, pid {record.get('pid')}")
            mark = f"UNIFIED_AGENT_INCARNATION={record.get('incarnation')}"
            pids += [one.pid for one in process.every_process() if process.has_environment(one.pid, mark)]
    if not agents:
        return fine("none left anything")
    advice = "The next agent of this user on this host ends and removes that."
    text = f"killed agents ({listed(agents, 3)}) left"
    return wrong(f"{text} processes: {listed(pids)}", advice) if pids else note(f"{text} their locks", advice)


def _driver() -> Finding:
    found, problems = devices.ask_nvml()
    if not (found or problems) and list(Path("/dev").glob("nvidia[0-9]*")):
        problems = ["there are devices, and libnvidia-ml.so.1 is missing"]
    advice = "`nvidia-smi` and `dmesg | grep Xid` say more. An agent leaves such devices out: reset them, or reboot."
    return wrong("; ".join(problems), advice) if problems else fine(f"{len(found) or 'no'} NVIDIA GPUs")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return note("it is not installed for this Python", "Workers need it, unless the job names another python=.")
    command = [settings.python(), "-c", _TORCH, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    last_word = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode:
        return wrong(f"it cannot be imported: {last_word}", "Install it anew: workers of this Python fail alike.")
    version, toolkit, is_available = json.loads(done.stdout.splitlines()[-1])
    return judgement.torch(version, toolkit, is_available, len(devices.cuda_devices()), last_word)

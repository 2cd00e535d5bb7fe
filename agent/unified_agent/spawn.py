"""Start of the agent's helpers, including zygotes: their folder, environment, and the socket to each.

The first zygote of a cluster waits for these imports, so they are few, and none of them needs msgspec.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from unified.config import settings
from unified.config.cgroups import read_text

MARKER_NODE = "UNIFIED_AGENT_NODE"
MARKER_INCARNATION = "UNIFIED_AGENT_INCARNATION"
"""Markers in the environment of all processes of an agent: the next agent finds orphans by them."""
MARKER_SNAPSHOTS = "UNIFIED_AGENT_SNAPSHOTS"
"""Further marker, of the snapshot server and its children: snapshots outlive workers."""
TUNABLES = "GLIBC_TUNABLES"
_PAST_CACHES = "glibc.cpu.x86_non_temporal_threshold"
RUN_DIR_PREFIX = "a-"
ENTRY_FLAG, ENTRY = "--worker-entry", "unified.worker.main:main"
PRELOAD_FLAG = "--preload"


class Spawned(NamedTuple):
    """A helper that was started."""

    python: str
    process: subprocess.Popen[bytes]
    socket: socket.socket
    """The agent's end."""
    log: Path
    began_at: float
    """On the monotonic clock."""


class EarlyStart(NamedTuple):
    """The incarnation of an agent that has no flags yet, and its zygote."""

    incarnation: str
    zygote: Spawned


def run_folder(run_root: Path, incarnation: str) -> Path:
    """Make the folder of an agent's incarnation, for sockets and the like, and return it."""
    return settings.make_private(run_root / f"{RUN_DIR_PREFIX}{incarnation[:8]}")


def child_environment(env: Mapping[str, str], node: str, incarnation: str) -> dict[str, str]:
    """Return the environment of all processes that an agent starts, from the agent's own."""
    found = tunables(env.get(TUNABLES, ""), last_cache_bytes())
    return {**env, **settings.python_path(env), TUNABLES: found, MARKER_NODE: node, MARKER_INCARNATION: incarnation}


def tunables(given: str, cache_bytes: int) -> str:
    """Return ``GLIBC_TUNABLES`` of an interpreter, with which large copies write past the caches.

    A copy through the caches that does not fit in them first reads what it overwrites: a third more memory traffic.
    glibc avoids that, but on some processors it counts the caches of all cores as one (384 MiB where a core has 32).

    `given` stays, and takes precedence. Nothing is added if the size of one core's last cache is not known (0).
    """
    if not cache_bytes or _PAST_CACHES in given:
        return given
    return f"{given}:{_PAST_CACHES}={cache_bytes // 2}".removeprefix(":")


def last_cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the size of a core's last cache before memory, shared or not; 0 if it is not known."""
    sizes = [read_text(size).removesuffix("K") for size in caches.glob("index*/size")]
    return max((int(size) * 1024 for size in sizes if size.isdecimal()), default=0)


def spawn_zygote(
    python: str, entry: str, run_dir: Path, env: Mapping[str, str], number: int, preload: Sequence[str] = ()
) -> Spawned:
    """Start a zygote, whose workers run `entry`. OSError: the interpreter cannot be started."""
    arguments = ["--entry", entry, *(["--preload", ",".join(preload)] if preload else [])]
    return spawn(python, "unified.worker.zygote", arguments, log=run_dir / f"zygote-{number}.log", env=env)


def spawn(
    python: str,
    module: str,
    arguments: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str],
    descriptors: Sequence[int] = (),
) -> Spawned:
    """Start ``python -m module SOCKET arguments``, in the folder of its log.

    Args:
        descriptors: further descriptors that it inherits beside its socket.

    Raises:
        OSError: the interpreter cannot be started.
    """
    began_at = time.monotonic()
    ours, theirs = socket.socketpair()
    try:
        with log.open("wb") as output:
            started = subprocess.Popen(
                [python, "-m", module, str(theirs.fileno()), *arguments, "--parent", str(os.getpid())],
                pass_fds=[theirs.fileno(), *descriptors],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=env,
                start_new_session=True,  # Ctrl-C in the agent's terminal is for the agent only
            )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return Spawned(python, started, ours, log, began_at)

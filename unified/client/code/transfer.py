"""Transfer of a job's code: from the submitter to the master, and from there to a node, once each.

    python -m unified.client.code.transfer FD --master ADDRESS --digest HEX --into FOLDER

The agent of a node starts this to fetch and unpack an archive; the last line of its output says what failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unified import process
from unified.client.code.archive import CodeArchive, unpack
from unified.client.connection import MasterConnection, connect_to
from unified.config.clusters import lock
from unified.config.settings import remove_folder
from unified.errors import UnifiedError, listed
from unified.protocol.client_master import CodePart, CodeState, FindCode, PutCode, ReadCode

KEPT_BYTES = 4 << 30
"""Bytes of unpacked archives that a node keeps beside those in use."""
IDLE_S = 3600.0
"""Seconds since its last use after which an archive may be removed."""
MASTER_AWAY_S = 300.0
POLL_S = 0.05


def upload(connection: MasterConnection, archive: CodeArchive) -> int:
    """Send the missing part of an archive to the master; return the number of bytes that were sent.

    RefusedError: it is larger than the master takes, or the master cannot keep it.
    """
    code, num_sent = archive.code, 0
    state = connection.ask(FindCode(digest=code.digest), CodeState)
    if not state.is_whole and sys.stderr is not None:
        size = f"{code.size / (1 << 20):.1f} MiB"
        print(f"ships {archive.num_files} files of {code.root} ({size} packed)", file=sys.stderr)
    if archive.left_out and sys.stderr is not None:
        sends = f"submit(…, ship={['.', archive.left_out[0]]}) sends a file that it names."
        print(f"does not ship {listed(archive.left_out)}, which may hold secrets; {sends}", file=sys.stderr)
    while not state.is_whole:
        data = archive.read(state.num_bytes)
        num_sent += len(data)
        state = connection.ask(
            PutCode(digest=code.digest, size=code.size, offset=state.num_bytes, data=data), CodeState, timeout_s=60.0
        )
    return num_sent


def fetch(connection: MasterConnection, digest: str, folder: Path) -> None:
    """Fetch an archive from the master and unpack it into a folder, unless another process does.

    Raises:
        RefusedError: the master does not have it.
        UsageError: an entry of it leads out of its folder.
        UnifiedError: its bytes do not match the digest.
        OSError: the file system is full, or may not be written.
    """
    while not folder.is_dir():
        with holding(folder.parent, folder.name) as is_held:
            if not is_held:
                time.sleep(POLL_S)
            elif not folder.is_dir():  # no other process was faster
                _make(connection, digest, folder)
    os.utime(folder)


def _make(connection: MasterConnection, digest: str, folder: Path) -> None:
    make_room(folder.parent)
    name = f".{folder.name}.{socket.gethostname()}-{os.getpid()}"  # unique: file systems of many hosts may lack locks
    part, unpacked = folder.with_name(f"{name}.part"), folder.with_name(f"{name}.new")
    try:
        _download(connection, digest, part)
        unpack(part, unpacked)
        try:
            unpacked.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        part.unlink(missing_ok=True)
        if unpacked.exists():
            remove_folder(unpacked)


def _download(connection: MasterConnection, digest: str, path: Path) -> None:
    with path.open("w+b") as file:
        while True:
            request = ReadCode(digest=digest, offset=file.tell())
            part = connection.ask(request, CodePart, timeout_s=MASTER_AWAY_S)
            file.write(part.data)
            if file.tell() >= part.size or not part.data:
                break
        file.seek(0)
        if (found := hashlib.file_digest(file, "sha256").hexdigest()) != digest:
            raise UnifiedError(f"the archive of the job's code came with other bytes: {found[:12]}, not {digest[:12]}.")


@contextmanager
def holding(into: Path, digest: str) -> Iterator[bool]:
    """Hold the lock of a folder to make or remove it. False: another process holds it, or an agent uses the folder.

    A file system without locks always gives True.
    """
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = lock(into / f"{digest}.lock")
    except OSError:
        yield True
        return
    is_held = descriptor is not None and os.fstat(descriptor).st_nlink > 0  # 0: another process has removed the file
    try:
        yield is_held
    finally:
        if is_held and not (into / digest).exists():  # it could not be made, or was removed
            (into / f"{digest}.lock").unlink(missing_ok=True)
        if descriptor is not None:
            os.close(descriptor)


def make_room(into: Path, kept_bytes: int = KEPT_BYTES, idle_s: float = IDLE_S) -> None:
    """Remove the archives that were used longest ago, and not for `idle_s`, until at most `kept_bytes` are left."""
    found: dict[Path, float] = {}
    for path in into.iterdir():
        with suppress(FileNotFoundError):  # other processes make and remove folders meanwhile
            used_at = path.stat().st_mtime
            if not path.name.startswith(".") and path.is_dir():
                found[path] = used_at
            elif path.suffix != ".lock" and not path.with_suffix("").is_dir() and time.time() - used_at > idle_s:
                remove_folder(path) if path.is_dir() else path.unlink()  # left by a process that was killed or failed
    sizes = {path: _size(path) for path in found}
    total = sum(sizes.values())
    for path in sorted(found, key=lambda path: found[path]):
        if total <= kept_bytes or time.time() - found[path] < idle_s:
            break
        with holding(into, path.name) as is_held:
            if is_held:
                remove_folder(path)
                (into / f"{path.name}.log").unlink(missing_ok=True)
                total -= sizes[path]


def _size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m unified.client.code.transfer", description="Fetches a job's code.")
    parser.add_argument("fd", type=int, metavar="FD", help="socket to the agent, which stays unused")
    parser.add_argument("--parent", type=int, help="pid of the agent")
    parser.add_argument("--master", required=True, metavar="tcp://HOST:PORT")
    parser.add_argument("--digest", required=True, metavar="HEX")
    parser.add_argument("--into", required=True, type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    process.die_with_parent(signal.SIGKILL, arguments.parent)
    try:
        with connect_to(arguments.master) as connection:
            fetch(connection, arguments.digest, arguments.into)
    except UnifiedError as error:
        print(str(error))
        return 1
    except OSError as error:
        print(f"the job's code cannot be put into {arguments.into.parent}: {error.strerror or error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

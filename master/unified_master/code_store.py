"""The code of jobs in the master's state directory: archives by their digest, kept up to a bound."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import assert_never

from unified.protocol import client_master
from unified.protocol.records import Stage
from unified.values import Value
from unified_master.core.master import MasterCore

MAX_BYTES = 1 << 30
"""Largest archive that the master takes; submitters have a limit of their own (`UNIFIED_SHIP_LIMIT`)."""
KEPT_BYTES = 8 << 30
"""Most bytes of all archives. Beyond it, archives without an unfinished job go, the least recently found first."""
BLOCK = 1 << 20


class CodeReceived(Value, frozen=True, kw_only=True):
    """A request about the code of a job; the answer goes to `peer`."""

    peer: bytes
    request_id: int
    request: client_master.ClientToCodeStore


class CodeStore:
    """A folder of archives: `DIGEST` is a whole archive, `DIGEST.part` one that is still being received."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES, kept_bytes: int = KEPT_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._kept_bytes = kept_bytes

    def answer(self, request: client_master.ClientToCodeStore, master: MasterCore) -> client_master.MasterAnswer:
        """Return the answer to a request; the archives of the master's unfinished jobs are kept."""
        try:
            match request:
                case client_master.FindCode():
                    return self._state(request.digest)
                case client_master.PutCode():
                    return self._put(request, master)
                case client_master.ReadCode():
                    return self._read(request)
                case _:
                    assert_never(request)
        except OSError as error:
            reason = f"the master cannot keep the code of jobs in {self._folder}: {error.strerror}."
            return client_master.Refused(code="unavailable", reason=reason)

    def _state(self, digest: str) -> client_master.CodeState:
        whole = self._folder / digest
        if whole.is_file():
            os.utime(whole)
            return client_master.CodeState(num_bytes=whole.stat().st_size, is_whole=True)
        part = self._part(digest)
        return client_master.CodeState(num_bytes=part.stat().st_size if part.is_file() else 0)

    def _put(self, request: client_master.PutCode, master: MasterCore) -> client_master.MasterAnswer:
        """Append a part that begins where the archive ends; for any other part, return how much is there."""
        if not 0 < request.size <= self._max_bytes:
            reason = f"an archive of {request.size / (1 << 20):.0f} MiB is refused: at most {self._max_bytes >> 20}."
            return client_master.Refused(code="bad-request", reason=reason)
        state = self._state(request.digest)
        if state.is_whole or request.offset != state.num_bytes:
            return state
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if request.offset == 0:
            self._make_room(request.size, master)
        with self._part(request.digest).open("ab") as file:
            file.write(request.data)
            num_bytes = file.tell()
        if num_bytes < request.size and request.data:
            return client_master.CodeState(num_bytes=num_bytes)
        return self._finish(request.digest)

    def _finish(self, digest: str) -> client_master.MasterAnswer:
        part = self._part(digest)
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        if found != digest:
            part.unlink()
            reason = f"the archive has other bytes than announced ({found[:12]}, not {digest[:12]}): send it again."
            return client_master.Refused(code="bad-request", reason=reason)
        part.rename(self._folder / digest)
        return self._state(digest)

    def _read(self, request: client_master.ReadCode) -> client_master.MasterAnswer:
        whole = self._folder / request.digest
        if not whole.is_file():
            reason = f"the master has no code {request.digest[:12]} (any more): submit the job again."
            return client_master.Refused(code="not-found", reason=reason)
        with whole.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = os.pread(file.fileno(), BLOCK, max(0, request.offset)) if request.offset < size else b""
        return client_master.CodePart(data=data, size=size)

    def _make_room(self, nbytes: int, master: MasterCore) -> None:
        jobs = master.cluster.jobs.values()
        used = {job.spec.code.digest for job in jobs if job.spec.code is not None and job.stage is not Stage.STOPPED}
        there = {path: path.stat() for path in self._folder.iterdir()}
        unused = [path for path in there if path.name.removesuffix(".part") not in used]
        total = nbytes + sum(stat.st_size for stat in there.values())
        for path in sorted(unused, key=lambda path: there[path].st_mtime):
            if total <= self._kept_bytes:
                break
            path.unlink()
            total -= there[path].st_size

    def _part(self, digest: str) -> Path:
        return self._folder / f"{digest}.part"

"""Descriptions of jobs in memory that all processes of a node share: the agent's copy is that of every worker.

A description lies in a file in memory, encoded once. Whoever maps it reads it into records of its own, but the bytes
of users in it (`Blob`), which may be megabytes, are views of the file. The memory is free again when the last process
that has it mapped has ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import msgspec

from unified.job.spec import JobSpec

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_decoder = msgspec.msgpack.Decoder(JobSpec)


class SharedSpec:
    """A description in a file in memory that nobody can change any more.

    Raises:
        OSError: there is no memory, or no descriptor left.
    """

    def __init__(self, spec: JobSpec) -> None:
        encoded = msgspec.msgpack.encode(spec)
        self.num_bytes = len(encoded)
        self.descriptor = os.memfd_create("unified-job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(self.descriptor, "wb", closefd=False) as file:
                file.write(encoded)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.spec = map_spec(self.descriptor, self.num_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptor; what is mapped stays."""
        os.close(self.descriptor)


def map_spec(descriptor: int, num_bytes: int) -> JobSpec:
    """Return the description in such a file, which the caller may close then.

    Raises:
        OSError: it cannot be mapped.
        msgspec.DecodeError: it is no description.
    """
    return _decoder.decode(mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ))

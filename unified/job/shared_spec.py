"""Descriptions of jobs in memory that the agent shares with all workers of its node.

A description is encoded once, in a file in memory. A process that maps it decodes records of its own, but the bytes of
users (`Blob`), which may be megabytes, are views of the file. The memory is free when the last such process has ended.
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
        OSError: no memory or no descriptor is left.
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
        """Close the descriptor; mappings stay."""
        os.close(self.descriptor)


def map_spec(descriptor: int, num_bytes: int) -> JobSpec:
    """Return the description in the file of a `SharedSpec`; the caller may close the descriptor then.

    Raises:
        OSError: it cannot be mapped.
        msgspec.DecodeError: it is no description.
    """
    return _decoder.decode(mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ))

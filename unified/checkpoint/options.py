"""What a manager is made with: checked, and taken from the environment where it was not given."""

from __future__ import annotations

import os
import secrets
import socket
from enum import Enum
from typing import Final

from unified.checkpoint.writers import Writer
from unified.data.worker_identity import check_rank, discover
from unified.errors import UsageError


class FromSettings(Enum):
    """A type of its own, since None says something else."""

    FROM_SETTINGS = "as the settings have it"

    def __repr__(self) -> str:
        return self.name


FROM_SETTINGS: Final = FromSettings.FROM_SETTINGS
"""Not given: `unified.config.runtime` decides."""


def check_counts(**counts: int | None) -> None:
    """Raise UsageError for a number that is given and is not a whole one from 1 up."""
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UsageError(f"{name} is a whole number from 1 up, or None, not {count!r}.")


def this_writer(rank: int | None, world_size: int | None) -> Writer:
    """A new life of a manager in this process. What is not given is as in the job, else as ``RANK`` and ``WORLD_SIZE``
    say, else 0 and 1.

    Raises:
        UsageError: a rank that the world has not.
    """
    identity = discover()
    rank = next(each for each in (rank, identity.rank, 0) if each is not None)
    world_size = next(each for each in (world_size, identity.world_size, 1) if each is not None)
    check_rank(rank, world_size)
    return Writer(
        name=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
        rank=rank,
        world_size=world_size,
    )

"""What a manager is made with: checked, and taken from the environment where it was not given."""

from __future__ import annotations

import os
import secrets
import socket
import time
from enum import Enum
from typing import Final

from unified.checkpoint.writers import Writer
from unified.errors import UsageError


class FromSettings(Enum):
    """A type of its own, since None says something else."""

    FROM_SETTINGS = "as the settings have it"

    def __repr__(self) -> str:
        return self.name


FROM_SETTINGS: Final = FromSettings.FROM_SETTINGS
"""Not given: `unified.runtime_settings.CheckpointSettings` decides."""


def check_counts(**counts: int | None) -> None:
    """Raise UsageError for a number that is given and is not a whole one from 1 up."""
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UsageError(f"{name} is a whole number from 1 up, or None, not {count!r}.")


def this_writer(rank: int | None, world_size: int | None) -> Writer:
    """A new life of a manager in this process; ``RANK`` and ``WORLD_SIZE`` say what is not given, else 0 and 1.

    Raises:
        UsageError: a rank that the world has not.
    """
    rank = _from_environment("RANK", 0) if rank is None else rank
    world_size = _from_environment("WORLD_SIZE", 1) if world_size is None else world_size
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"There is no rank {rank} in a world of {world_size}; set RANK and WORLD_SIZE, or give both.")
    return Writer(
        name=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
        rank=rank,
        world_size=world_size,
        opened_at=time.time(),
    )


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default

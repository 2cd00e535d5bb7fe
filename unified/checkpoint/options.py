"""What a manager is made with: checked, and taken from the environment where it was not given."""

from __future__ import annotations

from enum import Enum
from typing import Final

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

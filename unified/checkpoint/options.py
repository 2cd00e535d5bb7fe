"""The options of a `CheckpointManager`: their types and defaults, completed from the settings and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

from unified.checkpoint.retention import ORPHANED_AFTER_S
from unified.checkpoint.save_queue import WhenFull
from unified.core.backoff import Backoff
from unified.errors import UsageError, nearest

if TYPE_CHECKING:
    from unified.checkpoint.manifest import Manifest
    from unified.config.runtime import CheckpointSettings
    from unified.coordinator.client import Coordinator


class CheckpointOptions(TypedDict, total=False):
    """Keyword arguments of `CheckpointManager`, which describes them."""

    keep_last_n: int | None
    compression: str | None
    interval_steps: int | None
    run_id: str | None
    framework: str | None
    bucket: str | None
    max_waiting: int
    max_waiting_bytes: int
    when_full: WhenFull
    max_tries: int
    backoff: Backoff
    rank: int | None
    world_size: int | None
    process_group: Any
    rank_timeout: float
    coordinator_url: str | Coordinator | None
    series: str
    on_saved: Callable[[Manifest], object] | None


DEFAULTS: CheckpointOptions = {
    "keep_last_n": 5,
    "compression": None,
    "interval_steps": None,
    "run_id": None,
    "framework": None,
    "bucket": None,
    "max_waiting": 64,
    "max_waiting_bytes": 256 << 20,
    "when_full": "newest",
    "max_tries": 4,
    "backoff": Backoff(first_s=0.5, limit_s=10.0),
    "rank": None,
    "world_size": None,
    "process_group": None,
    "rank_timeout": 300.0,
    "coordinator_url": None,
    "series": "default",
    "on_saved": None,
}


def completed(options: CheckpointOptions, settings: CheckpointSettings) -> CheckpointOptions:
    """Return all options: the given ones, else those of the settings, else the defaults."""
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(
                f"CheckpointManager() got an unexpected keyword argument {name!r}.{nearest(name, list(DEFAULTS))}"
            )
    found: CheckpointOptions = {
        **DEFAULTS,
        "keep_last_n": settings.keep_last_n,
        "compression": settings.compression,
        "interval_steps": settings.interval_steps,
        **options,
    }
    for name in ("keep_last_n", "interval_steps", "max_tries"):
        count = found[name]  # type: ignore[literal-required]  # one of these three
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UsageError(f"{name} is a whole number from 1 up, or None, not {count!r}.")
    if found["when_full"] not in ("newest", "wait"):
        raise UsageError(f"when_full is 'newest' or 'wait', not {found['when_full']!r}.")
    if not 0 < found["rank_timeout"] < ORPHANED_AFTER_S:
        raise UsageError(f"rank_timeout is above 0 and below {ORPHANED_AFTER_S:g} s, not {found['rank_timeout']!r}.")
    return found


def with_options(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function with the options in the place of its ``**options``, for `help`."""
    signature = inspect.signature(function)
    kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    types = CheckpointOptions.__annotations__
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in DEFAULTS.items()
    ]
    return signature.replace(parameters=[*kept, *added])

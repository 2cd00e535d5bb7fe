"""Callbacks by which trainers of other libraries report to the job: `.transformers` (for TRL, too) and `.lightning`."""

from typing import Any

from unified.errors import NotInWorkerError
from unified.worker.context import current_worker


def report(step: int, total: int | None, logged: dict[str, Any]) -> None:
    """Report the numbers of a trainer's log as this worker's, and no other values; outside a worker, do nothing."""
    try:
        worker = current_worker()
    except NotInWorkerError:
        return
    plain = {name: each.item() if getattr(each, "ndim", 1) == 0 else each for name, each in logged.items()}
    numbers = {name: each for name, each in plain.items() if isinstance(name, str) and isinstance(each, int | float)}
    refused = {"self", "step", "total", *(name for name in numbers if len(name) > 200)}  # by `Worker.report`
    worker.report(step, total, **{name: each for name, each in numbers.items() if name not in refused})

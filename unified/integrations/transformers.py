"""Callback for the Trainer of transformers and those of TRL: ``trainer.add_callback(TransformersCallback())``."""

from typing import Any

from unified.integrations import report
from unified.lazy import needed_by

with needed_by(__name__):
    from transformers import TrainerCallback


class TransformersCallback(TrainerCallback):
    """Reports each step, the number of steps, and all numbers that the Trainer logs under their names, in every rank.

    Outside a job's worker this does nothing.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        report(state.global_step, state.max_steps, {})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        report(state.global_step, state.max_steps, logs or {})

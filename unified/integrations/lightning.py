"""Callback for the Trainer of Lightning: ``Trainer(…, callbacks=[LightningCallback()])``."""

import importlib
import math
import sys
from typing import Any

from unified.integrations import report
from unified.lazy import needed_by

with needed_by(__name__):
    _own = "pytorch_lightning"  # the other name of the library, which the script may use
    Callback: Any = importlib.import_module(_own if _own in sys.modules else "lightning.pytorch").Callback


class LightningCallback(Callback):
    """Reports each step and the number of steps, in every rank; outside a job's worker this does nothing.

    Every `log_every_n_steps` steps of the Trainer it also reports ``loss`` (of this rank's last batch),
    ``learning_rate``, and all that the module has logged; after a validation, what that has logged.
    """

    _total: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        steps = trainer.estimated_stepping_batches
        self._total = int(steps) if 0 < steps < math.inf else None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged: dict[str, Any] = {}
        if trainer.global_step % trainer.log_every_n_steps == 0:
            if isinstance(outputs, dict) and "loss" in outputs:
                logged["loss"] = outputs["loss"] * trainer.accumulate_grad_batches  # by which Lightning has divided it
            if trainer.optimizers:
                logged["learning_rate"] = trainer.optimizers[0].param_groups[0]["lr"]
            logged |= trainer.callback_metrics
        report(trainer.global_step, self._total, logged)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            report(trainer.global_step, self._total, trainer.callback_metrics)

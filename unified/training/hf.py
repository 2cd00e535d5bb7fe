"""The hf framework: transformers' `Trainer`, whose checkpoints go to the store as it makes them.

On each rank, the Trainer writes into a separate folder, which has only this rank's files. Rank 0 writes the model, the
optimizer and the state; every rank writes its random number generators, and its shards if FSDP saves shards. All ranks
upload; then rank 0 writes the mark. No files stay on the disk.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import accelerate  # noqa: F401 - without it Trainer raises an error that names no extra of ours
import datasets
import transformers

from unified.errors import OptionError, UsageError
from unified.training.adapters import RESTORED, Origin, find_origin, loading_options, restore
from unified.training.arguments import HfArguments, values_in_force
from unified.training.dataset import load_rows
from unified.training.hf_arguments import fields_of, training_arguments
from unified.training.method_fields import METHODS
from unified.training.methods import RunTrainer, make_trainer
from unified.training.models import find_model, load_tokenizer, make_model, sequence_length
from unified.training.sampling import check_rows
from unified.training.stopping import TrainingStopped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from unified.training.run import TrainingRun


def run(run: TrainingRun) -> None:
    """Train from `run.resume_step`, or from the beginning, to the end.

    Raises:
        OptionError: an argument that `TrainingArguments` does not take.
        TrainingStopped: a stop was asked for, and the checkpoint is saved.
    """
    arguments = cast(HfArguments, run.arguments)
    rows = load_rows(run, METHODS[arguments.method or "sft"].forms)  # which has that of pretrain, too
    method = arguments.method or ("pretrain" if rows.form == "text" else "sft")
    given = training_arguments(run, method, run.scratch / "trainer")
    values, store = values_in_force(arguments, method, fields_of(type(given))), run.checkpoints
    run.work.on_first(lambda: store.persist_config({**(store.read_config() or {}), "arguments": values}))
    if given.disable_tqdm:
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    if not rows.held_out:
        given.eval_strategy = transformers.IntervalStrategy.NO
    if given.eval_strategy == "no" and (arguments.early_stopping_patience or given.load_best_model_at_end):
        raise UsageError(
            "early_stopping_patience and load_best_model_at_end need evaluations: give eval_steps, and rows."
        )
    options, origin = loading_options(run), find_origin(run)
    source = find_model(run)
    tokenizer = load_tokenizer(run, source)
    if origin is not None:
        source = restore(run, origin, source, tokenizer, method)
    model = make_model(run, source, tokenizer, has_score=method == "reward", **options)
    length = sequence_length(run, model)
    rows_per_step = given.per_device_train_batch_size * given.gradient_accumulation_steps * run.world_size
    sizes = RunSizes(len(rows.train), rows_per_step, given.max_steps)
    callback = RunCallback(run, sizes, origin, evaluates=bool(rows.held_out))
    try:
        trainer = make_trainer(run, method, rows, model, tokenizer, length, given, callback)
    except (ValueError, ImportError) as error:  # arguments that do not go together
        raise OptionError(f"extra_args: {' '.join(str(error).split())}") from error
    callback.trainer = trainer
    try:
        trainer.train(resume_from_checkpoint=callback.resumed_from)
    except _NothingLeftError:
        run.log(f"step {run.resume_step} was the last one: nothing is left to train")
        return
    if callback.is_stopped:
        raise TrainingStopped(trainer.state.global_step)
    if trainer.state.best_global_step and given.load_best_model_at_end:
        run.log(f"step {trainer.state.best_global_step} is the best one", eval_loss=trainer.state.best_metric)


class RunSizes(NamedTuple):
    """Sizes that give a step its meaning: the Trainer finds its place again only by the number of steps."""

    num_rows: int
    rows_per_step: int
    """Rows of all ranks together."""
    max_steps: int
    """Below 1: as many as the epochs have."""

    def check(self, step: int, before: Mapping[str, Any]) -> None:
        """Raise UsageError if a run cannot go on from a step whose mark has `before` as its state."""
        num_rows, rows_per_step = before.get("num_rows"), before.get("rows_per_step")
        check_rows(step, num_rows, self.num_rows)
        if rows_per_step not in (None, self.rows_per_step) and self.max_steps < 1:
            raise UsageError(
                f"checkpoint {step} is of a run whose steps had {rows_per_step} rows, and they have "
                f"{self.rows_per_step} now, so that its epochs would end elsewhere: resume it with the same number of "
                "ranks, batch_size and gradient_accumulation, or give max_steps."
            )


class RunCallback(transformers.TrainerCallback):
    """Makes the Trainer save at the end and at a stop, uploads all checkpoints, and reports progress.

    Args:
        sizes: sizes of this run, which its marks store.
        origin: checkpoint of another run that this one began with, which its marks store.
        evaluates: evaluate held-out rows at the end in any case.

    Attributes:
        trainer: the Trainer that calls this callback.
        resumed_from: local folder of the checkpoint to go on from, deleted after the first step.
        is_stopped: all ranks agreed to stop before the last step.
    """

    trainer: RunTrainer

    def __init__(self, run: TrainingRun, sizes: RunSizes, origin: Origin | None, evaluates: bool) -> None:
        self._run = run
        self._sizes = sizes
        self._origin = origin
        self._patience = cast(HfArguments, run.arguments).early_stopping_patience
        self._evaluates = evaluates
        self._metrics: dict[str, float] = {}
        self._saved_step: int | None = None
        self._logged_step = 0
        self._logged_at = 0.0
        self.resumed_from = fetch(run, sizes)
        self.is_stopped = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        # Trainer would do one step more
        if state.global_step >= state.max_steps or self._is_past_best(state):
            raise _NothingLeftError
        state.compute_steps(args, state.max_steps)  # a resumed state has the intervals of the run before
        self._start_clock(state)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if self.trainer.order is not None:  # accelerate hides it from the Trainer after skipping batches
            self.trainer.order.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.resumed_from is not None:  # after a step, every rank has read it
            shutil.rmtree(self.resumed_from, ignore_errors=True)
            self.resumed_from = None
        shutil.rmtree(self._run.scratch / RESTORED, ignore_errors=True)
        self._metrics.pop("eval_loss", None)  # a mark has only the eval_loss of its own step
        self._run.report(step=state.global_step, total=state.max_steps)
        is_last = state.global_step >= state.max_steps
        self.is_stopped = self._run.stop.agreed() and not is_last
        if self.is_stopped:
            control.should_training_stop = True
            control.should_evaluate = False
        if self.is_stopped or is_last:
            control.should_save = True
        if is_last:
            control.should_evaluate = self._evaluates
        # so that `on_log` checks the loss before a save, which an evaluation may cause
        control.should_log |= control.should_save or (self._patience > 0 and control.should_evaluate)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._is_past_best(state):  # on all ranks, which have the same loss
            self._run.log(f"step {state.global_step} is the last one: {self._patience} evaluations were no better")
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.is_stopped:
            control.should_evaluate = False
        if state.global_step == self._saved_step:
            control.should_save = False
        control.should_log |= control.should_save

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        place = {"epoch": state.epoch, "total": state.max_steps}
        place |= {"num_rows": self._sizes.num_rows, "rows_per_step": self._sizes.rows_per_step}
        place |= {"from_run": self._origin} if self._origin else {}
        if args.load_best_model_at_end:
            place["best_step"] = state.best_global_step
        state.best_model_checkpoint = None  # else the Trainer looks for it on this disk
        save(self._run, state.global_step, folder, self._metrics, place)
        shutil.rmtree(folder)
        self._saved_step = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        """Report the logged loss, or the loss of the held-out rows."""
        logs = logs or {}
        found: dict[str, float] = {name: logs[name] for name in ("loss", "grad_norm", "eval_loss") if name in logs}
        if not found:
            return
        self._metrics |= found
        if "loss" in logs:
            found |= {"lr": logs["learning_rate"], **self._rates(args, state)}
            self._start_clock(state)
        self._run.report(step=state.global_step, total=state.max_steps, **found)
        self._run.check_losses(state.global_step, found)
        if "loss" in found and (summed := getattr(self.trainer, "_tr_loss", None)) is not None:
            summed.zero_()  # the Trainer subtracts the sum from itself, which does not clear a NaN

    def _is_past_best(self, state: TrainerState) -> bool:
        """Return True if the newest evaluations, as many as the patience, were no better than one before them."""
        losses = [each["eval_loss"] for each in state.log_history if "eval_loss" in each]
        return bool(losses) and 0 < self._patience < len(losses) - losses.index(min(losses))

    def _start_clock(self, state: TrainerState) -> None:
        self._logged_at = time.monotonic()
        self._logged_step = state.global_step
        self.trainer.num_tokens = 0

    def _rates(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Return samples and tokens per second of all ranks since the last log, as if all were as fast as this rank."""
        past_s = time.monotonic() - self._logged_at
        rows = args.train_batch_size * args.gradient_accumulation_steps * (state.global_step - self._logged_step)
        return {
            "samples_per_s": rows * args.world_size / past_s,
            "tokens_per_s": float(self.trainer.num_tokens) * args.world_size / past_s,
        }


def save(run: TrainingRun, step: int, folder: Path, metrics: dict[str, float], state: dict[str, Any]) -> None:
    """Upload the folders of all ranks as one checkpoint, below ``checkpoints/<folder's name>/``. A collective.

    Raises:
        UnifiedError: a rank could not upload; older checkpoints are unchanged.
    """
    store = run.checkpoints
    files = {f"{folder.name}/{path.relative_to(folder)}": path for path in sorted(folder.rglob("*")) if path.is_file()}
    with run.saving(step):
        run.work.on_first(lambda: store.discard(step))
        uploaded = run.work.on_all(lambda: store.upload(files))
        everything = [file for files in run.work.ranks.gather(uploaded) for file in files]
        run.work.on_first(lambda: store.commit(step, everything, metrics, state=state, keep=state.get("best_step")))


def fetch(run: TrainingRun, sizes: RunSizes) -> str | None:
    """Copy the checkpoint to go on from to this node; return its folder. A collective.

    Raises:
        UsageError: the run has other sizes now.
    """
    step = run.resume_step
    if step is None:
        return None

    def copy() -> str:
        sizes.check(step, run.checkpoints.read_mark(step).state)
        run.checkpoints.fetch(step, run.scratch)
        return str(run.scratch / f"checkpoint-{step}")

    return run.work.on_each_node(copy)


class _NothingLeftError(Exception):
    """The checkpoint is of the last step."""

"""The nemo framework: Lightning's `Trainer` around the model of the run, or around a model of NeMo's toolkit.

Lightning sees one endless epoch: to resume within an epoch, it would need a loader that keeps its state. `sampling`
decides the order of the rows, and the mark of a checkpoint holds the position to go on from.
"""

from __future__ import annotations

import itertools
import logging
import math
import signal
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from shutil import copyfileobj
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import lightning.pytorch as lightning
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Sampler

from unified.data.files import DataFiles, absolute, is_remote
from unified.errors import CheckpointCorruptError, OptionError, UsageError, nearest
from unified.storage import open_storage
from unified.training.arguments import NemoArguments
from unified.training.checkpoints import COPY_NBYTES
from unified.training.dataset import PaddingCollator, TokenRows, load_rows
from unified.training.evaluation import Batch, HeldOutRows, count_targets, sum_losses
from unified.training.layout import step_key
from unified.training.meta import lr_factor
from unified.training.models import load_model, sequence_length
from unified.training.rows import parse_parts
from unified.training.sampling import Position, ResumableSampler, TrainingPlan, check_rows
from unified.training.stopping import TrainingStopped

if TYPE_CHECKING:
    from unified.training.run import TrainingRun

PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}
STRATEGIES = ("auto", "ddp", "fsdp")
FILE_KIND = "ckpt"
TOOLKIT_SUFFIX = ".nemo"
_TOOLKIT = ("nemo.core.classes", "nemo.utils.exp_manager")
"""Modules of the toolkit. None of our extras installs it, since it needs a torch of its own."""


class _Begin(NamedTuple):
    """Place in a run to begin at, and the checkpoint that was saved there."""

    step: int = 0
    position: Position = Position()
    checkpoint: str | None = None


def run(run: TrainingRun) -> None:
    """Train to the end; see `FrameworkModule`."""
    arguments = cast(NemoArguments, run.arguments)
    _quieten()
    check_strategy(arguments)
    if run.options.model_id.endswith(TOOLKIT_SUFFIX):
        train_toolkit_model(run)
        return
    _, texts, held_out = load_rows(run)
    model, tokenizer = load_model(run)
    torch.manual_seed(arguments.seed + run.rank)  # the weights are the same everywhere; dropout is not
    length = sequence_length(run, model)
    begin = _begin(run, len(texts))
    sizes = (len(texts), run.world_size, arguments.batch_size)
    plan = TrainingPlan(*sizes, accumulation=1, num_epochs=arguments.num_epochs, max_steps=arguments.max_steps)
    total = arguments.max_steps
    if total <= 0:
        total = begin.step + math.ceil(plan.total_steps(0, begin.position) / arguments.gradient_accumulation)
    run.log("training", rows=len(texts), held_out=len(held_out), steps=total)
    if begin.step >= total:
        return

    rows, kept = (TokenRows(each, tokenizer, length) for each in (texts, held_out))
    collate = PaddingCollator(tokenizer.pad_id)
    batches: DataLoader[Batch] = DataLoader(
        rows,  # type: ignore[arg-type]  # torch asks for less than its type says
        batch_sampler=EpochBatches(run, plan, begin.position),
        num_workers=arguments.dataloader_workers,
        collate_fn=collate,
        pin_memory=run.device.type == "cuda",
    )
    progress = LightningProgress(run, plan, begin, total, HeldOutRows(run, kept, collate, arguments.batch_size))
    module = LanguageModule(model, arguments, total)
    make_trainer(run, total, progress).fit(module, batches, ckpt_path=begin.checkpoint)


def _quieten() -> None:
    """Silence what Lightning says about our choices, and about its own use of torch."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (".*does not have many workers", ".*no `val_dataloader`", ".*LeafSpec"):
        warnings.filterwarnings("ignore", message=message)


def check_strategy(arguments: NemoArguments) -> None:
    """Raise OptionError for a strategy that starts processes or writes checkpoints of more than one file."""
    name = arguments.strategy
    if name not in STRATEGIES:
        hint = nearest(name, STRATEGIES)
        raise OptionError(f"extra_args: strategy {name!r} is none of {', '.join(STRATEGIES)}.{hint}")
    if name == "fsdp" and arguments.max_grad_norm and "max_grad_norm" in arguments.given:
        raise OptionError("extra_args: strategy 'fsdp' does not clip gradients: leave max_grad_norm away, or give 0.")


def make_trainer(run: TrainingRun, total: int, progress: LightningProgress) -> lightning.Trainer:
    """Return a Trainer of `total` steps on this rank's device, which saves, logs and shows nothing by itself."""
    arguments = cast(NemoArguments, run.arguments)
    is_gpu = run.device.type == "cuda"
    try:
        return lightning.Trainer(
            accelerator="gpu" if is_gpu else "cpu",
            devices=[run.device.index or 0] if is_gpu else 1,
            num_nodes=run.world_size,
            strategy="ddp" if arguments.strategy == "auto" and run.world_size > 1 else arguments.strategy,
            plugins=[RankEnvironment(run.rank, run.world_size)],
            precision=PRECISIONS[run.precision],
            max_steps=total,
            max_epochs=-1,
            accumulate_grad_batches=arguments.gradient_accumulation,
            gradient_clip_val=arguments.max_grad_norm or None if arguments.strategy != "fsdp" else None,
            limit_val_batches=0,
            callbacks=[progress],
            default_root_dir=run.scratch,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
    except (ValueError, ImportError, MisconfigurationException) as error:  # a strategy that does not fit the rest
        raise OptionError(f"extra_args: strategy {arguments.strategy!r}: {' '.join(str(error).split())}") from error


class RankEnvironment(ClusterEnvironment):
    """Ranks of the run for Lightning, with a process group that exists. Each rank is a node with one device.

    Lightning would number the devices of a node, but a worker sees only its own device.
    """

    main_address = ""
    """Empty: nobody connects to it."""
    main_port = 0
    creates_processes_externally = True

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank = rank
        self._world_size = world_size

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the run knows the size."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the run knows the rank."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self._rank


class EpochBatches(Sampler[list[int]]):
    """Batches of one rank from a position to the end of the last epoch, one epoch after the other."""

    def __init__(self, run: TrainingRun, plan: TrainingPlan, position: Position) -> None:
        self._plan = plan
        self._position = position
        self._rows = ResumableSampler(plan.num_rows, rank=run.rank, world_size=run.world_size, seed=run.arguments.seed)

    def __iter__(self) -> Iterator[list[int]]:
        position = self._position
        while num_rows := self._plan.rows_of(position.epoch):
            self._rows.set_position(position, num_rows)
            rows = iter(self._rows)
            while batch := list(itertools.islice(rows, self._plan.batch_size)):
                yield batch
            position = Position(position.epoch + 1)


class LanguageModule(lightning.LightningModule):
    """A causal language model with its optimizer, as Lightning trains it."""

    def __init__(self, model: nn.Module, arguments: NemoArguments, total: int) -> None:
        super().__init__()
        self.model = model
        self._arguments = arguments
        self._total = total

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        return sum_losses(self.model, batch) / count_targets(batch).clamp(min=1)

    def validation_step(self, batch: Batch, index: int) -> torch.Tensor:
        """Return the sum of the losses of all tokens."""
        return sum_losses(self.model, batch)

    def configure_optimizers(self) -> Any:
        arguments = self._arguments
        optimizer = torch.optim.AdamW(self.parameters(), arguments.lr, weight_decay=arguments.weight_decay)
        schedule = LambdaLR(optimizer, self._factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _factor(self, step: int) -> float:
        return lr_factor(step, self._total, self._arguments.warmup_steps, self._arguments.lr_scheduler_type)


class LightningProgress(lightning.Callback):
    """Reports, evaluates and saves after the steps where it is due; ends the training when all ranks agree to stop.

    Create it in the main thread before Lightning handles SIGTERM: it restores the earlier handler. Lightning's handler
    would begin a collective wherever it interrupts the program, also within another collective.

    Args:
        total: steps to do.
        held_out: rows to evaluate; None: there are none.
    """

    def __init__(
        self, run: TrainingRun, plan: TrainingPlan, begin: _Begin, total: int, held_out: HeldOutRows | None
    ) -> None:
        self._run = run
        self._arguments = cast(NemoArguments, run.arguments)
        self._plan = plan
        self._step, self._position, self._resumed_from = begin
        self._total = total
        self._held_out = held_out
        self._sigterm = signal.getsignal(signal.SIGTERM)
        self._metrics: dict[str, float] = {}
        self._lr = self._arguments.lr
        self._loss = self._num_tokens = torch.zeros(())
        self._passes_of_step = 0
        self._begin_interval()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        signal.signal(signal.SIGTERM, self._sigterm)
        self._begin_interval()

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._lr = float(optimizer.param_groups[0]["lr"])
        missing = self._arguments.gradient_accumulation / (self._passes_of_step + 1)
        if missing == 1:
            return
        for parameter in pl_module.parameters():  # a short last step: Lightning has divided by the full number
            if parameter.grad is not None:
                parameter.grad *= missing

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a forward pass; after the last one of a step, do what is due."""
        self._position = self._plan.after(self._position, 1)
        self._passes += 1
        self._passes_of_step += 1
        self._loss = self._loss + outputs["loss"]  # Lightning has divided it by the number of passes of a step
        if isinstance(batch, dict) and "attention_mask" in batch:
            self._num_tokens = self._num_tokens + batch["attention_mask"].sum()
        if trainer.global_step == self._step:
            return
        self._step = step = trainer.global_step
        self._passes_of_step = 0
        if self._resumed_from is not None:  # after a step, every rank has read it
            Path(self._resumed_from).unlink(missing_ok=True)
            self._resumed_from = None
        is_last = step >= self._total
        is_stopped = self._run.stop.agreed() and not is_last
        save_steps = self._arguments.save_steps
        is_saved = is_last or is_stopped or _is_due(step, save_steps)
        if is_saved or step % self._arguments.logging_steps == 0:
            self._measure(trainer)
        else:
            self._run.report(step=step, total=self._total)
        if not is_stopped and (is_last or _is_due(step, self._arguments.eval_steps or save_steps)):
            self._evaluate(trainer, pl_module)
        if is_saved:
            self._save(trainer)
        self._metrics.pop("eval_loss", None)  # a mark has only the eval_loss of its own step
        if is_stopped:
            raise TrainingStopped(step)

    def _measure(self, trainer: lightning.Trainer) -> None:
        """Report loss and speed since the last report. A collective."""
        steps = self._passes / self._arguments.gradient_accumulation
        sums = [each.to(trainer.strategy.root_device, torch.float64) for each in (self._loss / steps, self._num_tokens)]
        loss, num_tokens = trainer.strategy.reduce(torch.stack(sums)).tolist()
        past_s = time.monotonic() - self._since
        num_rows = self._passes * self._arguments.batch_size
        self._metrics |= {
            "loss": loss,
            "lr": self._lr,
            "tokens_per_s": num_tokens * self._run.world_size / past_s,
            "samples_per_s": num_rows * self._run.world_size / past_s,
        }
        self._tell(self._metrics)
        self._begin_interval()

    def _evaluate(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Report the mean loss of the held-out tokens. A collective."""
        if not self._held_out:
            return
        step = cast(Any, trainer.strategy).validation_step
        self._metrics["eval_loss"] = self._held_out.evaluate(
            module, lambda batch: (step(batch, 0), count_targets(batch))
        )
        self._tell({"eval_loss": self._metrics["eval_loss"]})

    def _save(self, trainer: lightning.Trainer) -> None:
        """Save a checkpoint, and upload it. A collective."""
        path = self._run.scratch / step_key(self._step, FILE_KIND)
        trainer.save_checkpoint(path)
        state = {"epoch": self._position.epoch, "row": self._position.row, "num_rows": self._plan.num_rows}

        def upload() -> None:
            with self._run.saving(self._step):
                self._run.checkpoints.save_checkpoint(self._step, self._metrics, {path.name: path}, state=state)
            path.unlink()

        self._run.work.on_first(upload)

    def _tell(self, metrics: dict[str, float]) -> None:
        self._run.report(step=self._step, total=self._total, **metrics)
        self._run.log(f"step {self._step}/{self._total}", **metrics)
        self._run.check_losses(self._step, metrics)

    def _begin_interval(self) -> None:
        self._since = time.monotonic()
        self._passes = 0
        self._loss = torch.zeros((), dtype=torch.float64)
        self._num_tokens = torch.zeros((), dtype=torch.int64)


def train_toolkit_model(run: TrainingRun) -> None:
    """Train a model of NeMo's toolkit: a ``.nemo`` file, which brings its own loss, data loader and optimizer.

    NeMo's experiment manager gets the run's temporary folder, and makes neither loggers nor checkpoints: the run has
    its own. The dataset becomes the model's ``train_ds.manifest_filepath``. A resumed run does the right number of
    steps, but the toolkit decides the order of the rows. The toolkit cannot be installed beside our torch: this code
    follows the source of NeMo 2, and tests run it only with a stand-in.
    """
    from omegaconf import OmegaConf, open_dict

    name, arguments = run.options.model_id, cast(NemoArguments, run.arguments)
    try:
        classes, manager = (import_module(module) for module in _TOOLKIT)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"model_id {name} is a model of NeMo's toolkit, which is not installed ({error}): "
            "pip install 'unified-runtime[nemo]' nemo_toolkit, or give a model that transformers can load."
        ) from error
    path = run.work.on_each_node(lambda: _local_file(name, run.scratch))
    parts = run.work.on_each_node(lambda: _plain_files(run.options.dataset_uri, run.scratch))
    model = classes.ModelPT.restore_from(path, map_location="cpu")
    data = {
        "manifest_filepath": ",".join(parts),
        "batch_size": arguments.batch_size,
        "num_workers": arguments.dataloader_workers,
        "shuffle": True,
    }
    with open_dict(model.cfg):
        model.cfg.optim = {"name": "adamw", "lr": arguments.lr, "weight_decay": arguments.weight_decay}
        model.cfg.train_ds = OmegaConf.merge(model.cfg.get("train_ds") or {}, data)
    model.setup_training_data(model.cfg.train_ds)
    passes = math.ceil(len(model.train_dataloader()) * arguments.num_epochs)
    total = arguments.max_steps if arguments.max_steps > 0 else math.ceil(passes / arguments.gradient_accumulation)
    sizes = (passes * arguments.batch_size * run.world_size, run.world_size, arguments.batch_size)
    plan, begin = TrainingPlan(*sizes, accumulation=1, num_epochs=1, max_steps=total), _begin(run, None)
    trainer = make_trainer(run, total, LightningProgress(run, plan, begin, total, None))
    model.set_trainer(trainer)
    neither = {"create_tensorboard_logger": False, "create_checkpoint_callback": False}
    manager.exp_manager(trainer, {"explicit_log_dir": str(run.scratch / "nemo"), **neither})
    trainer.fit(model, ckpt_path=begin.checkpoint)


def _begin(run: TrainingRun, num_rows: int | None) -> _Begin:
    """Return the place to begin at; copy its checkpoint to this node. A collective.

    Raises:
        UsageError: the checkpoint is of a run on another number of rows.
    """
    step = run.resume_step
    if step is None:
        return _Begin()

    def fetch() -> tuple[int, int, str]:
        state = run.checkpoints.read_mark(step).state
        if num_rows is not None:
            check_rows(step, state.get("num_rows"), num_rows)
        path = run.checkpoints.fetch(step, run.scratch).get(step_key(step, FILE_KIND))
        if path is None:
            raise CheckpointCorruptError(
                f"checkpoint {step} of {run.layout.checkpoints_uri} has no file {step_key(step, FILE_KIND)}."
            )
        return int(state.get("epoch", 0)), int(state.get("row", 0)), str(path)

    epoch, row, path = run.work.on_each_node(fetch)
    return _Begin(step, Position(epoch, row), path)


def _local_file(name: str, folder: Path) -> str:
    if not is_remote(name):
        return absolute(name)
    backend, key = open_storage(name)
    path = folder / Path(key).name
    with backend, backend.open_read(key) as source, path.open("wb") as file:
        copyfileobj(source, file, COPY_NBYTES)
    return str(path)


def _plain_files(uri: str, folder: Path) -> list[str]:
    """Return local files with the rows of a dataset, which are copied if they are in a bucket, or compressed."""
    paths = []
    with DataFiles() as files:
        parts = parse_parts(uri)
        if any(part.weight != 1 for part in parts):
            raise UsageError("dataset_uri has a weight, and the NeMo toolkit reads each row once: leave weights out.")
        found = [path for part in parts for path in files.find(part.uri, "jsonl")]
        for number, path in enumerate(found):
            file = files.file(path)
            paths.append(path if file.is_mappable else str(folder / f"rows-{number}.jsonl"))
            if not file.is_mappable:
                with file.open() as source, open(paths[-1], "wb") as target:
                    copyfileobj(source, target, COPY_NBYTES)
    return paths


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

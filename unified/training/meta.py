"""The meta framework: a training loop of our own, sharded by FSDP2 if there are several ranks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from unified.errors import CheckpointCorruptError, UsageError
from unified.training.arguments import MetaArguments
from unified.training.dataset import PaddingCollator, RunRows, TokenRows, load_rows
from unified.training.evaluation import Batch, HeldOutRows, count_targets, sum_losses
from unified.training.layout import step_key
from unified.training.models import load_model, sequence_length
from unified.training.run import TrainingRun
from unified.training.sampling import Position, ResumableSampler, TrainingPlan, check_rows
from unified.training.stopping import TrainingStopped
from unified.training.tokenizer import Tokenizer

FILE_KIND = "pt"


def run(run: TrainingRun) -> None:
    """Train to the end; see `FrameworkModule`."""
    if run.precision == "fp16":
        raise UsageError("the meta framework trains in bf16 or fp32: give precision 'auto', 'bf16' or 'fp32'.")
    rows = load_rows(run)
    model, tokenizer = load_model(run)
    MetaTrainer(run, model, tokenizer, rows).train()


class MetaTrainer:
    """One rank's model, optimizer and position."""

    def __init__(self, run: TrainingRun, model: nn.Module, tokenizer: Tokenizer, rows: RunRows) -> None:
        assert isinstance(run.arguments, MetaArguments)
        self._run = run
        self._arguments = arguments = run.arguments
        self._collate = PaddingCollator(tokenizer.pad_id)
        length = sequence_length(run, model)
        self._train_rows = TokenRows(rows.train, tokenizer, length)
        self._held_out = HeldOutRows(
            run, TokenRows(rows.held_out, tokenizer, length), self._collate, arguments.batch_size
        )
        self._model = self._shard(model)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=arguments.lr, weight_decay=arguments.weight_decay
        )
        self._plan = TrainingPlan(
            num_rows=len(rows.train),
            world_size=run.world_size,
            batch_size=arguments.batch_size,
            accumulation=arguments.gradient_accumulation,
            num_epochs=arguments.num_epochs,
            max_steps=arguments.max_steps,
        )
        self._step = 0
        self._position = Position()
        self._total = 0
        self._metrics: dict[str, float] = {}
        self._saver = UploadingSaver(run)
        torch.manual_seed(arguments.seed + run.rank)  # the weights are the same everywhere; dropout is not

    def train(self) -> None:
        """Train from the run's resume step to the end, and save the last step.

        Raises:
            TrainingStopped: a stop was asked for, and the checkpoint is saved.
        """
        with self._saver:
            if self._run.resume_step is not None:
                self._restore(self._run.resume_step)
            self._total = self._plan.total_steps(self._step, self._position)
            self._run.log("training", rows=len(self._train_rows), held_out=len(self._held_out), steps=self._total)
            sampler = ResumableSampler(
                len(self._train_rows),
                rank=self._run.rank,
                world_size=self._run.world_size,
                seed=self._arguments.seed,
            )
            meter = _Meter(self._run)
            while self._step < self._total:
                sampler.set_position(self._position, self._plan.rows_of(self._position.epoch))
                for batches in _groups(self._loader(self._train_rows, sampler), self._arguments.gradient_accumulation):
                    self._do_step(batches, meter)
                    if self._step == self._total:
                        break

    def _do_step(self, batches: list[Batch], meter: _Meter) -> None:
        lr = self._arguments.lr * lr_factor(
            self._step, self._total, self._arguments.warmup_steps, self._arguments.lr_scheduler_type
        )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._update(batches, meter)
        self._step += 1
        self._position = self._plan.after(self._position, len(batches))
        is_last, is_stopping = self._step == self._total, self._run.stop.agreed()
        is_saved = is_last or is_stopping or _is_due(self._step, self._arguments.save_steps)
        if is_saved or self._step % self._arguments.logging_steps == 0:
            measured = {**meter.take(), "lr": lr}
            self._metrics |= measured
            self._run.log(f"step {self._step}/{self._total}", **measured)
            self._run.report(step=self._step, total=self._total, **measured)
            self._run.check_losses(self._step, measured)
        else:
            self._run.report(step=self._step, total=self._total)
        every = self._arguments.eval_steps or self._arguments.save_steps
        if len(self._held_out) and not is_stopping and (is_last or _is_due(self._step, every)):
            self._metrics["eval_loss"] = self._held_out.evaluate(
                self._model, lambda batch: (self._loss(batch), count_targets(batch))
            )
            self._run.log(f"step {self._step}/{self._total}", eval_loss=self._metrics["eval_loss"])
            self._run.report(eval_loss=self._metrics["eval_loss"])
            self._run.check_losses(self._step, self._metrics)
        if is_saved:
            self._save()
        self._metrics.pop("eval_loss", None)  # a mark has only the eval_loss of its own step
        if is_stopping and not is_last:
            self._saver.finish()
            raise TrainingStopped(self._step)

    def _update(self, batches: list[Batch], meter: _Meter) -> None:
        """Make one step of the optimizer, for the mean loss of all tokens of all ranks."""
        num_tokens = sum(map(count_targets, batches))
        assert isinstance(num_tokens, torch.Tensor)
        meter.num_tokens += num_tokens
        everywhere = num_tokens.clone()
        if self._run.world_size > 1:
            distributed.all_reduce(everywhere)
        for batch in batches:
            loss = self._loss(batch)
            meter.loss += loss.detach()
            # FSDP averages the gradients of all ranks.
            (loss * self._run.world_size / everywhere.clamp(min=1)).backward()  # type: ignore[no-untyped-call]
        if self._arguments.max_grad_norm:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._arguments.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, batch: Batch) -> torch.Tensor:
        with self._autocast():
            return sum_losses(self._model, batch)

    def _loader(self, rows: TokenRows, sampler: ResumableSampler) -> Iterator[Batch]:
        loader: DataLoader[Any] = DataLoader(
            rows,  # type: ignore[arg-type]  # torch asks for less than its type says
            self._arguments.batch_size,
            sampler=sampler,
            collate_fn=self._collate,
            generator=torch.Generator(),  # else each iterator draws from the generator of dropout
            pin_memory=self._run.device.type == "cuda",
        )
        return map(self._to_device, loader)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: values.to(self._run.device, non_blocking=True) for name, values in batch.items()}

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast of one rank; several ranks compute in FSDP's precision instead."""
        if self._run.precision == "fp32" or self._run.world_size > 1:
            return contextlib.nullcontext()
        return torch.autocast(self._run.device.type, torch.bfloat16)

    def _shard(self, model: nn.Module) -> nn.Module:
        """Move the model to the device. With several ranks, shard it block by block."""
        if self._run.world_size == 1:
            return model.to(self._run.device)
        mesh = init_device_mesh(self._run.device.type, (self._run.world_size,))
        policy = MixedPrecisionPolicy()
        if self._run.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def _save(self) -> None:
        """Save this step. A collective; rank 0 uploads it while all go on."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self._model, self._optimizer, options=options)
        randomness = self._run.work.ranks.gather(_randomness(self._run.device))
        if self._run.rank == 0:
            state = {
                "model": model,
                "optimizer": optimizer,
                "randomness": randomness,
                "step": self._step,
                "position": tuple(self._position),
                "num_rows": self._plan.num_rows,
            }
            self._saver.save(self._step, state, self._metrics)

    def _restore(self, step: int) -> None:
        shapes = {name: tuple(values.shape) for name, values in self._model.state_dict().items()}
        state = self._run.work.on_first(lambda: self._saver.load(step, shapes))
        check_rows(step, state.get("num_rows"), self._plan.num_rows)
        sizes = self._run.world_size
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sizes > 1)
        held = self._saver.take_loaded()
        # Not `set_state_dict`: it skips the model on ranks that have no state.
        set_optimizer_state_dict(self._model, self._optimizer, held.get("optimizer", {}), options=options)
        set_model_state_dict(self._model, held.get("model", {}), options=options)
        self._step, self._position = state["step"], Position(*state["position"])
        if len(state["randomness"]) == sizes:  # otherwise the saved states belong to other ranks
            _set_randomness(self._run.device, state["randomness"][self._run.rank])


class UploadingSaver:
    """Writes checkpoints of rank 0 to a file, and from there to the store while the training goes on."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="unified-checkpoint")
        self._upload: Future[None] | None = None
        self._loaded: dict[str, Any] = {}

    def __enter__(self) -> UploadingSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._threads.shutdown(wait=True)

    def save(self, step: int, state: dict[str, Any], metrics: dict[str, float]) -> None:
        """Write a file now, and upload it in a thread; raise an error of the previous upload."""
        path = self._run.scratch / step_key(step, FILE_KIND)
        torch.save(state, path)
        self.finish()
        self._upload = self._threads.submit(self._send, step, path, dict(metrics), state["position"])

    def finish(self) -> None:
        """Wait until the last saved checkpoint is in the store."""
        if self._upload is not None:
            self._upload.result()
            self._upload = None

    def load(self, step: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read a checkpoint; return the part that all ranks need. `take_loaded` returns the rest.

        Args:
            shapes: shapes of the model's whole parameters.

        Raises:
            UsageError: the checkpoint is of another model.
            CheckpointCorruptError: the file is no checkpoint of this framework.
        """
        path = self._run.checkpoints.fetch(step, self._run.scratch).get(step_key(step, FILE_KIND))
        if path is None:
            raise CheckpointCorruptError(f"checkpoint {step} of {self._run.layout.checkpoints_uri} has no step file.")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self._loaded = {name: state.pop(name) for name in ("model", "optimizer")}
        except Exception as error:  # of pickle, of zipfile, of torch
            raise CheckpointCorruptError(f"{path.name} of step {step} cannot be read: {error}") from error
        path.unlink()
        saved = {name: tuple(values.shape) for name, values in self._loaded["model"].items()}
        if differing := sorted(name for name in saved.keys() | shapes.keys() if saved.get(name) != shapes.get(name)):
            name = differing[0]
            raise UsageError(
                f"checkpoint {step} is of another model: the shape of {name} is {saved.get(name)} there and "
                f"{shapes.get(name)} here. Resume with the model_id that the run began with."
            )
        return dict(state)

    def take_loaded(self) -> dict[str, Any]:
        """Return model and optimizer as `load` read them; nothing on other ranks."""
        loaded, self._loaded = self._loaded, {}
        return loaded

    def _send(self, step: int, path: Path, metrics: dict[str, float], position: tuple[int, int]) -> None:
        state = {"epoch": position[0], "row": position[1]}
        with self._run.saving(step):
            self._run.checkpoints.save_checkpoint(step, metrics, {step_key(step, FILE_KIND): path}, state=state)
        path.unlink()


class _Meter:
    """Loss and tokens since the last `take`."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._begin()

    def _begin(self) -> None:
        self.loss = torch.zeros((), device=self._run.device)
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=self._run.device)
        self._since = time.monotonic()

    def take(self) -> dict[str, float]:
        """Return the mean loss of all ranks' tokens, and tokens per second; reset both. A collective."""
        totals = torch.stack((self.loss.double(), self.num_tokens.double()))
        if self._run.world_size > 1:
            distributed.all_reduce(totals)
        loss, num_tokens = totals.tolist()
        passed_s = max(1e-9, time.monotonic() - self._since)
        self._begin()
        return {"loss": loss / max(1.0, num_tokens), "tokens_per_s": num_tokens / passed_s}


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model, to be sharded one by one: the elements of its longest list."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def lr_factor(step: int, total: int, warmup: int, kind: str) -> float:
    """Return the factor of the learning rate after `step` steps: a linear warm-up, then the schedule `kind`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}.get(kind, 1.0)


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    rest = iter(batches)
    while group := list(islice(rest, size)):
        yield group


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _randomness(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_randomness(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)

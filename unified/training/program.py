"""The main of the training program: options, ranks, layout and the decision to resume; then a framework trains.

It runs as a worker of an elastic role, under torchrun, or alone. A mistake in options or data ends it with one line,
which is also the reason of the job's failure. It is not restarted, since the error would happen again.
"""

from __future__ import annotations

import datetime
import importlib
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from unified.errors import (
    DatasetError,
    EntryPointError,
    NonFiniteLossError,
    NotFoundError,
    StorageDeniedError,
    StorageError,
    StorageUnavailableError,
    UnifiedError,
    UsageError,
)
from unified.lazy import needed_by
from unified.rounds import process_group
from unified.training.options import TrainingOptions
from unified.training.rows import parse_parts
from unified.worker.context import Worker, worker_here

if TYPE_CHECKING:
    import torch

    from unified.rounds.rank_group import Ranks
    from unified.training.run import FrameworkModule, TrainingRun

NAME = "unified-train"
EXIT_USAGE = 2
FILE_WORK_WITHIN = datetime.timedelta(days=1)
"""Time for which ranks wait for a rank that copies data, or that reads or writes a checkpoint."""
REACH_WITHIN_S = 10.0
"""Seconds for each of two tries to reach a store, before the training begins."""
_FINAL = (UsageError, DatasetError, StorageDeniedError, NotFoundError, NonFiniteLossError)
"""Errors that would happen again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; return its exit code.

    Args:
        argv: command line without the program's name; None: this process's.

    Raises:
        EntryPointError: in a worker, with one line: the run cannot be done as requested.
        SystemExit: with 143 after a stop, its checkpoint saved.
    """
    from unified.training.stopping import TrainingStopped, exit_stopped

    worker = worker_here()
    try:
        options = TrainingOptions.of_job(worker.job_info.user_config) if worker is not None else None
        options = options or TrainingOptions.parse(argv)
        _train(options, worker)
    except TrainingStopped as stopped:
        print(f"{NAME}: {stopped}", flush=True)
        exit_stopped()
    except (UnifiedError, ModuleNotFoundError) as error:
        is_missing_extra = isinstance(error, ModuleNotFoundError) and "unified-runtime[" in str(error)
        is_final = isinstance(error, _FINAL) or is_missing_extra
        if not is_final and (worker is not None or isinstance(error, ModuleNotFoundError)):
            raise
        line = " ".join(str(error).split())
        if worker is not None:
            raise EntryPointError(line) from None
        print(f"{NAME}: {line}", file=sys.stderr, flush=True)
        return EXIT_USAGE if is_final else 1
    return 0


class _RankPlace(NamedTuple):
    device: torch.device
    node: int
    local_rank: int


class _RunStart(NamedTuple):
    """Decisions of rank 0."""

    resume_step: int | None
    log_folder: str


def _train(options: TrainingOptions, worker: Worker | None) -> None:
    with needed_by(NAME):
        import torch  # noqa: F401

    from unified.rounds.rank_group import ranks_here
    from unified.rounds.together import RankWork
    from unified.training.checkpoints import RunCheckpointManager
    from unified.training.log_upload import LogUploader
    from unified.training.run import TrainingRun
    from unified.training.scratch import scratch_folder
    from unified.training.stopping import StopFlag

    with ExitStack() as stack:
        place = _of_worker(worker, stack) if worker is not None else _of_environment(stack)
        ranks = ranks_here()
        work = RankWork(_patient(ranks), place.node, place.local_rank)
        checkpoints = stack.enter_context(
            RunCheckpointManager(
                options.layout, world_size=ranks.size, save_total_limit=options.arguments.save_total_limit
            )
        )
        run = TrainingRun(
            options=options,
            work=work,
            local_rank=place.local_rank,
            device=place.device,
            checkpoints=checkpoints,
            resume_step=None,
            stop=stack.enter_context(StopFlag(ranks.size, place.device)),
            report=worker.report if worker is not None and ranks.rank == 0 else _no_report,
            scratch=stack.enter_context(scratch_folder()),
        )
        is_restart = worker is not None and worker.incarnation > 0
        start = work.on_first(lambda: prepare(run, is_restart=is_restart))
        run = run.resuming(start.resume_step)
        stack.enter_context(LogUploader(f"{options.layout.logs_uri}/{start.log_folder}", f"rank-{ranks.rank}"))
        # A line of each rank, so that each has a log.
        print(f"{NAME}: rank {ranks.rank} of {ranks.size} on {socket.gethostname()}, {place.device}", flush=True)
        run.log(
            f"{NAME}: run {options.run_id}",
            framework=options.framework,
            model=options.model_id,
            ranks=ranks.size,
            precision=run.precision,
            resume_step=start.resume_step,
        )
        with needed_by(f"framework {options.framework}"):
            module = cast("FrameworkModule", importlib.import_module(f"unified.training.{options.framework}"))
        module.run(run)


def _patient(ranks: Ranks) -> Ranks:
    """Return the same ranks in a group with a long timeout, for work on files."""
    from torch import distributed

    from unified.rounds.rank_group import ranks_here

    if ranks.size == 1:
        return ranks
    return ranks_here(distributed.new_group(backend="gloo", timeout=FILE_WORK_WITHIN))


def prepare(run: TrainingRun, *, is_restart: bool = False) -> _RunStart:
    """Find the checkpoint to go on from, copy it to this process's folder, and make the layout.

    Raises:
        UsageError: there are checkpoints, but the run is not to resume; or a store does not answer.
        StorageUnavailableError: a store does not answer at a restart, which may be tried again.
        StorageError: a store refuses.
    """
    options, checkpoints = run.options, run.checkpoints
    rows = parse_parts(options.dataset_uri)
    rows += parse_parts(options.arguments.eval_dataset_uri) if options.arguments.eval_dataset_uri else []
    others = [options.model_id, options.layout.prefix, options.layout.logs_uri, options.config_path]
    _check_reachable([*(part.uri for part in rows), *others], is_restart=is_restart)
    latest = checkpoints.latest()
    before = checkpoints.read_config() or {}
    is_same_attempt = bool(options.attempt_id) and before.get("attempt_id") == options.attempt_id
    if latest is not None and not options.resume and not is_same_attempt:
        raise UsageError(
            f"run {options.run_id!r} already has checkpoints up to step {latest} in {options.layout.checkpoints_uri}: "
            "resume it (resume_from_checkpoint, --resume), or give the new run another run_id."
        )
    latest = checkpoints.fetch_latest(run.scratch)
    checkpoints.prepare()
    checkpoints.persist_config({**options.as_config(), "world_size": run.world_size, "resumed_from_step": latest})
    now = datetime.datetime.now(datetime.UTC)
    return _RunStart(latest, now.strftime("%Y%m%dT%H%M%SZ"))


def _check_reachable(uris: Sequence[str], *, is_restart: bool) -> None:
    """Raise UsageError soon if a bucket's store does not answer; later requests would wait for minutes."""
    from unified.data.files import is_remote
    from unified.storage import S3Backend

    for bucket in dict.fromkeys(uri.removeprefix("s3://").partition("/")[0] for uri in uris if is_remote(uri)):
        with S3Backend(bucket, max_attempts=2, timeout_s=REACH_WITHIN_S) as backend:
            try:
                backend.exists(NAME)
            except StorageUnavailableError as error:
                if is_restart:
                    raise
                raise UsageError(str(error)) from error
            except StorageError:  # the store answers; each later request shows whether it is allowed
                pass


def _of_worker(worker: Worker, stack: ExitStack) -> _RankPlace:
    import torch

    me = worker.actor_info
    if me.world_size > 1 and not process_group.is_set_up():
        if "MASTER_ADDR" in os.environ:  # `unified run` leaves the process group to its script, as torchrun does
            return _of_environment(stack)
        raise UsageError(
            f"role {me.role} has {me.world_size} workers and no process group: the training program runs as an elastic "
            "role, DLJobBuilder().train(...)."
        )
    return _RankPlace(torch.device(worker.device), me.node_rank, me.local_rank)


def _of_environment(stack: ExitStack) -> _RankPlace:
    """Read the variables of torchrun, and join its process group. Without variables, this is the only rank."""
    import torch
    from torch import distributed

    local_rank, node = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("GROUP_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed.is_initialized():
        backend = process_group.choose_backend("auto", device.type)
        distributed.init_process_group(backend, device_id=device if backend == "nccl" else None)
        stack.callback(process_group.destroy)
    return _RankPlace(device, node, local_rank)


def _no_report(step: int | None = None, total: int | None = None, **metrics: Any) -> None:
    """Report nothing."""

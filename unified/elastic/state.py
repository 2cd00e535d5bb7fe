"""State of a training loop that outlives the rounds in which it is trained."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from unified.elastic import randomness, transfer
from unified.elastic.core.agreement import Holding, StepAgreement
from unified.elastic.sampler import ElasticSampler
from unified.errors import ElasticError, UsageError
from unified.protocol.agent_master import RoundNotice
from unified.worker.context import Worker, worker_here
from unified.worker.rounds import RoundEnded

Kind = Literal["model", "optimizer", "other", "value"]


class ElasticState:
    """The objects and values of a training loop, with the last step that it has committed.

    Attributes are the objects, by the names they were given: ``state.model``. Plain values can be set: ``state.best =
    0.3``. A model goes in unwrapped: `DistributedDataParallel` belongs to one round, so the loop wraps it.

    When a step is taken back, models and optimizers are not restored from a copy, as there is mostly no memory for one.
    They hold the last commit until an optimizer begins to update, which a hook notes. From then until the next commit
    this process has no valid state, and takes it from another rank. Each commit copies buffers, schedulers, samplers,
    plain values (so keep them small) and the random generators.

    Args:
        restore: called by every rank if no rank has the state: at the start of a job, or when all were hit between an
            update and its commit. It loads a checkpoint into the objects, and returns its step, or None if there is
            none.
        snapshot_every: commits from one `current_worker().snapshot` to the next; 0: none. `restore` is called only
            without a snapshot.
        objects: modules, optimizers, other objects with `state_dict` and `load_state_dict`, and plain values.

    Attributes:
        step: steps committed.
    """

    step: int
    _restore: Callable[[], int | None] | None
    _snapshot_every: int
    _objects: dict[str, Any]
    _kinds: dict[str, Kind]
    _buffers: dict[str, list[Any]]
    """Buffers of each model; finding them takes long."""
    _of_round: set[str]
    """Names of the objects that were made only for the present round."""
    _committed: _Commit | None
    _is_touched: bool
    """True if an optimizer has begun to update since the last commit."""
    _worker: Worker | None
    _on_ready: Callable[[], None]
    """Called when all objects are at the agreed step."""
    _is_boundary: Callable[[int], bool]
    """Returns True, in a round that is to end as planned, if all ranks leave it after this step."""

    def __init__(
        self, *, restore: Callable[[], int | None] | None = None, snapshot_every: int = 0, **objects: Any
    ) -> None:
        self.__dict__.update(
            step=0,
            _restore=restore,
            _snapshot_every=snapshot_every,
            _objects={},
            _kinds={},
            _buffers={},
            _of_round=set(),
            _committed=None,
            _is_touched=False,
            _worker=worker_here(),
            _on_ready=lambda: None,
            _is_boundary=lambda step: True,
        )
        self._add(objects)

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name not in objects:
            raise AttributeError(f"this ElasticState has no {name!r}; it has {', '.join(objects) or 'nothing'}.")
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        elif name in self._objects and name not in self._named("value"):
            raise UsageError(f"state.{name} is set once: make another ElasticState, or register() it in the loop.")
        else:
            self._add({name: value})

    def register(self, **objects: Any) -> None:
        """Add objects made only for this round, such as a sharded model and its optimizer, and bring them to the step
        from which the ranks go on: from a snapshot, or by `restore`. A collective.

        Raises:
            ElasticError: steps were trained, and neither a snapshot nor `restore` has them.
        """
        self._add(objects)
        self._of_round.update(objects)
        self._configure_snapshots(is_sharded=True)
        self._load()
        self._on_ready()

    def commit(self, *, batches: int = 1) -> None:
        """End a step: if the round breaks, training goes on from the present state. Local and quick.

        Call it right after the last optimizer's `step()`: if a peer dies in between, while this rank is in a
        collective, this rank is left with a half-finished step.

        Args:
            batches: batches of an `ElasticSampler` that this step has trained, the same number on all ranks.
        """
        self.step += 1
        for each in self._objects.values():
            if isinstance(each, ElasticSampler):
                each.on_commit(batches)
            elif hasattr(each, "on_commit"):
                each.on_commit()
        self._keep()
        notice = self._notice()
        is_last = notice is not None and notice.kind == "planned" and self._is_boundary(self.step)
        if self._snapshot_every and self._worker is not None:
            is_due = self.step % self._snapshot_every == 0
            if is_due or (is_last and self._of_round):  # the round's own objects go with it
                self._worker.snapshot(self._snapshot(), self.step)
        if is_last or (notice is not None and notice.kind == "broken"):
            raise RoundEnded

    # What the loop does with it

    def _holding(self, rank: int, reason: str) -> Holding:
        kept = self._committed
        is_whole = kept is not None and not self._is_touched and self._has_model()
        return Holding(rank=rank, step=0 if kept is None else kept.step, is_whole=is_whole, reason=reason)

    def _begin(self, agreement: StepAgreement, rank: int) -> None:
        """Take part in a round from the agreed step on."""
        if not self._has_model():  # the model comes with register()
            return
        self._configure_snapshots(is_sharded=False)
        if agreement.step is None:
            self._load()
        elif rank not in agreement.sources:
            self._roll_back()
            for receiver in agreement.receivers(rank):
                transfer.send(self._named("model"), self._outgoing(), receiver)
        else:
            self.__dict__["_is_touched"] = True  # torn until all is received: this round may break, too
            self._take_in(transfer.receive(self._named("model"), agreement.sources[rank]))
        self._keep()
        self._on_ready()

    def _end_round(self) -> None:
        """Drop the objects that were made for the round, and what was read ahead of the last commit."""
        for each in self._objects.values():
            if isinstance(each, ElasticSampler):
                each.rewind()
        for name in self._of_round:
            del self._objects[name], self._kinds[name]
            self._buffers.pop(name, None)
        self._of_round.clear()

    # Commits

    def _keep(self) -> None:
        self.__dict__["_is_touched"] = False
        self.__dict__["_committed"] = _Commit(
            step=self.step,
            copies=pickle.dumps(
                (self._named("value"), {name: each.state_dict() for name, each in self._named("other").items()})
            ),
            buffers={name: [each.detach().clone() for each in found] for name, found in self._buffers.items()},
            generators=randomness.capture(),
        )

    def _roll_back(self) -> None:
        """Go back to the last commit; models and optimizers are there, still untouched."""
        import torch

        kept = self._committed
        assert kept is not None
        self.step = kept.step
        values, states = pickle.loads(kept.copies)
        self._objects.update(values)
        for name, each in self._named("other").items():
            each.load_state_dict(states[name])
        with torch.no_grad():
            for name, buffers in self._buffers.items():
                for buffer, saved in zip(buffers, kept.buffers[name], strict=True):
                    buffer.copy_(saved)
        randomness.restore(kept.generators)
        self._drop_gradients()

    def _outgoing(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "values": self._named("value"),
            "states": {name: each.state_dict() for name, each in self._named("optimizer", "other").items()},
            "generators": randomness.capture(),
        }

    def _take_in(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self._objects.update(state["values"])
        for name, inner in state["states"].items():
            self._objects[name].load_state_dict(inner)
        randomness.adopt(state["generators"], self.step)
        self._drop_gradients()

    # Snapshots and checkpoints

    def _configure_snapshots(self, *, is_sharded: bool) -> None:
        """Tell if all ranks have the same state; also on ranks that take theirs from another rank."""
        if self._worker is not None and self._snapshot_every:
            self._worker.snapshots.configure(replicated=not is_sharded)

    def _load(self) -> None:
        """Bring all objects to the newest step that is kept outside of the ranks' processes."""
        step = self._from_snapshot() if self._snapshot_every else None
        if step is None and self._restore is not None:
            step = self._restore()
        if step is None and (self.step > 0 or self._is_touched):
            raise ElasticError(
                f"no rank has the state of step {self.step} whole, and neither a snapshot nor a checkpoint has it: "
                "all ranks were hit between an optimizer's step() and commit(), or the state is sharded. Call commit() "
                "right after step(), and give ElasticState snapshot_every= or restore=."
            )
        self.step = step or 0
        self._drop_gradients()
        self._keep()

    def _from_snapshot(self) -> int | None:
        if self._worker is None:
            return None
        restored = self._worker.restore(self._snapshot())
        if restored is None:
            return None
        self._objects.update(restored.state["unified/values"])
        randomness.restore(restored.state["unified/generators"])
        return int(restored.step)

    def _snapshot(self) -> dict[str, Any]:
        stateful = self._named("model", "optimizer", "other")
        return {**stateful, "unified/values": self._named("value"), "unified/generators": randomness.capture()}

    # Objects

    def _add(self, objects: dict[str, Any]) -> None:
        for name, each in objects.items():
            if name.startswith("_") or hasattr(type(self), name) or name in self.__dict__:
                raise UsageError(f"an ElasticState cannot have something named {name!r}: choose another name.")
            if _is_wrapped(each):
                raise UsageError(
                    f"{name} is wrapped in {type(each).__name__}, which belongs to one round: give ElasticState the "
                    "module inside, and wrap it in the loop."
                )
            self._objects[name] = each
            self._kinds[name] = kind = _kind(each)
            if kind == "optimizer":
                each.register_step_pre_hook(self._before_update)
            elif kind == "model":
                self._buffers[name] = list(each.buffers())

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Keep an optimizer from an update with the remains of an aborted collective.

        On a GPU wait for collectives first, as an aborted one raises nothing.
        """
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        notice = self._notice()
        if notice is not None and notice.kind == "broken":
            raise RoundEnded
        self._is_touched = True

    def _notice(self) -> RoundNotice | None:
        rounds = self._worker.rounds if self._worker is not None else None
        return rounds.notice if rounds is not None else None

    def _named(self, *kinds: Kind) -> dict[str, Any]:
        return {name: each for name, each in self._objects.items() if self._kinds[name] in kinds}

    def _has_model(self) -> bool:
        return bool(self._named("model", "optimizer"))

    def _drop_gradients(self) -> None:
        for each in self._named("model", "optimizer").values():
            each.zero_grad(set_to_none=True)


class _Commit(NamedTuple):
    step: int
    copies: bytes
    """Plain values, and the states of objects that are neither models nor optimizers."""
    buffers: dict[str, list[Any]]
    generators: dict[str, Any]


def _kind(value: Any) -> Kind:
    from torch import nn, optim

    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, optim.Optimizer):
        return "optimizer"
    return "other" if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else "value"


def _is_wrapped(value: Any) -> bool:
    from torch.nn import parallel

    return isinstance(value, parallel.DistributedDataParallel)

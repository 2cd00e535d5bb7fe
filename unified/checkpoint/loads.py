"""The part of `CheckpointManager` that loads, and goes back to what was loaded."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from unified.checkpoint.coordinator_notify import Announcer
from unified.checkpoint.going_back import Course, discard_after
from unified.checkpoint.load import RANK_ERRORS, LoadReport, Wanted, load
from unified.checkpoint.manifest import Kind, Manifest, check_step
from unified.checkpoint.run_directory import RunFiles
from unified.extras import needed_by
from unified.worker.rank_group import Alone, Ranks, lead, ranks_here

T = TypeVar("T")


class Loads(RunFiles):
    """See `CheckpointManager`."""

    last_load: LoadReport | None
    _process_group: Any
    """Of the ranks that load together; None: all."""
    _announcer: Announcer
    _course: Course
    _sweeping: threading.Lock
    """Held while checkpoints are deleted, and for `_course`."""

    async def load(self, step: Wanted = None, *, exact: bool = False) -> bytes:
        """The data of a checkpoint; saves under way here are awaited first.

        Args:
            step: None, ``"latest"``, and 0 too, as the reference document has it: the newest.
            exact: that step and no other: 0 means step 0, and no older one is loaded instead of one that is damaged.

        Raises:
            CheckpointNotFoundError: there is none, or none of that step (a FileNotFoundError).
            CheckpointCorruptError: it is damaged, and so are all before it. Where only it is damaged, the newest good
                one before it is loaded, with a `CheckpointFallbackWarning`, and `last_load` says so.
        """
        return await asyncio.to_thread(self.load_bytes, step, exact=exact)

    def load_bytes(self, step: Wanted = None, *, exact: bool = False) -> bytes:
        """As `load`, for code that is not async."""
        return bytes(self._load(step, {"bytes": self.store.read, "state": self.store.read}, exact=exact))

    @needed_by("CheckpointManager.load_state()")
    def load_state(
        self, step: Wanted = None, *, exact: bool = False, map_location: Any = "cpu", weights_only: bool = True
    ) -> Any:
        """A state dict that `save` saved, or ``torch.save`` into bytes that were saved. Steps and errors as for `load`.

        Of one that several ranks saved, this process gets all of it: whole tensors, in dicts whose keys are text.

        Args:
            map_location, weights_only: as for ``torch.load``.

        Raises:
            CheckpointError: torch cannot load it.
        """

        def of_one(manifest: Manifest) -> Any:
            from unified.checkpoint.state_stream import load_state

            return load_state(self.store.read(manifest), map_location=map_location, weights_only=weights_only)

        def of_many(manifest: Manifest) -> Any:
            from unified.checkpoint.sharded.load import whole_state

            return whole_state(self.store, manifest, map_location=map_location, weights_only=weights_only)

        return self._load(step, {"bytes": of_one, "state": of_one, "sharded": of_many}, exact=exact)

    @needed_by("CheckpointManager.load_state_into()")
    def load_state_into(
        self,
        state: dict[str, Any],
        step: Wanted = None,
        *,
        exact: bool = False,
        weights_only: bool = True,
        sharded: bool | None = None,
    ) -> int:
        """Fill a state dict in place from what any number of ranks saved: each rank reads what its tensors need.

        Where torch.distributed is set up all ranks call this together, with the same arguments, and load the same step.

        Args:
            state: tensors are filled, everything else is replaced; modules and optimizers at the top are given their
                state. All that it names must be in the checkpoint.
            weights_only: as for ``torch.load``, of what is no tensor.
            sharded: False: this rank loads by itself.

        Returns:
            The step that was loaded.

        Raises:
            CheckpointError: the checkpoint does not fit `state`, or another rank failed. `state` may be filled in part
                after this and after a CheckpointCorruptError. Steps and other errors as for `load`.
        """
        from unified.checkpoint.sharded.load import load_into

        ranks = Alone() if sharded is False else ranks_here(self._process_group)
        self._load(step, load_into(self.store, state, ranks, weights_only=weights_only), exact=exact, ranks=ranks)
        assert self.last_load is not None
        return self.last_load.step

    def discard_after(self, step: int) -> list[int]:
        """Delete all checkpoints after that of `step`: training goes back to it, and what it saves now is the latest.

        Without this they stay, and the next load without a step takes the highest of them. Saves under way here are
        awaited first. Where torch.distributed is set up all ranks call this together; otherwise one process does,
        before any of them saves.

        Returns:
            The steps that were deleted, in order.

        Raises:
            CheckpointNotFoundError: there is no checkpoint of `step`. Nothing was deleted, nor after the next.
            CheckpointCorruptError: it is damaged, as far as can be seen without reading all of it.
        """
        check_step(step)
        self._before_load()
        ranks = ranks_here(self._process_group) if "torch" in sys.modules else Alone()
        ranks.gather(None)  # nobody's save is under way any more
        with self._sweeping:
            manifest, gone = lead(ranks, lambda: discard_after(self.store, step), RANK_ERRORS)
            self._course.went_back_to(step)
        if ranks.rank == 0:
            self._announcer.went_back_to(manifest)
        return gone

    async def list_checkpoints(self) -> list[int]:
        """The steps of all checkpoints there are, in order; saves under way here are awaited first."""
        return await asyncio.to_thread(self.steps)

    def steps(self) -> list[int]:
        """As `list_checkpoints`, for code that is not async."""
        self._before_load()
        return self.store.steps()

    def _load(
        self,
        step: Wanted,
        readers: Mapping[Kind, Callable[[Manifest], T]],
        *,
        exact: bool,
        ranks: Ranks | None = None,
    ) -> T:
        self._before_load()
        found, self.last_load = load(self.store, step, readers, exact=exact, ranks=ranks)
        return found

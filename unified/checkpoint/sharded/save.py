"""Saves by several ranks together: they agree and copy while training stands still, and write while it goes on."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from random import SystemRandom
from typing import Any, NamedTuple

from unified.checkpoint.background import BackgroundSaver
from unified.checkpoint.manifest import Compression, Manifest
from unified.checkpoint.rank_group import ranks_here
from unified.checkpoint.reports import tell_of_given_way
from unified.checkpoint.save_queue import Failure, Save, SaveQueue
from unified.checkpoint.shard_commit import ShardCommit, SharedSave
from unified.checkpoint.sharded.payload import ShardPayload
from unified.checkpoint.sharded.plan import ShardPlanner
from unified.checkpoint.store import CheckpointStore, Order
from unified.core.backoff import Backoff
from unified.errors import CheckpointError, UsageError
from unified.memory.host_buffers import Stager
from unified.worker.rank_group import Ranks


class _Hello(NamedTuple):
    """What the ranks tell each other at the beginning of a save."""

    step: int
    token: str
    plan: int | None
    problem: str | None


class ShardSaves:
    """The queue of such saves. None gives way to a newer one, as another rank may have written it already: one is
    being written, one waits, and the next waits for that.

    Args:
        process_group: of the ranks; None: the default one.
        rank_timeout_s, after_save: as of `ShardCommit`.
        on_failed: as of `BackgroundSaver`.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        process_group: Any,
        compression: Compression | None,
        rank_timeout_s: float,
        max_tries: int,
        backoff: Backoff,
        after_save: Callable[[Manifest], object],
        on_failed: Callable[[Failure], object],
    ) -> None:
        queue: SaveQueue[SharedSave] = SaveQueue(
            max_waiting=1,
            max_waiting_bytes=0,
            when_full="wait",
            max_tries=max_tries,
            backoff=backoff,
            rng=SystemRandom(),
        )
        self._commit = ShardCommit(store, rank_timeout_s=rank_timeout_s, max_tries=max_tries, after_save=after_save)
        self.saver = BackgroundSaver(
            queue,
            lambda save: self._commit.write(save.item),
            partial(_release, store),
            on_given_way=tell_of_given_way,
            on_failed=on_failed,
        )
        self._store = store
        self._process_group = process_group
        self._compression: Compression | None = compression
        self._stager = Stager()
        self._planner = ShardPlanner()

    def save(self, state: Mapping[str, Any], step: int, prepare: Callable[[], dict[str, Any]]) -> list[Failure]:
        """Plan and copy a state. A collective.

        Args:
            prepare: gives the metadata, or raises, and then no rank saves.

        Returns:
            Earlier saves that failed, of which nobody was told.
        """
        ranks = ranks_here(self._process_group)
        try:
            order = self._agree(state, step, prepare, ranks)
            share = self._share(order, ranks)
        finally:
            self._planner.forget_state()
        failures = self.saver.take_failures()
        self._store.begin(share.order.token)
        self.saver.submit(Save(step, share.payload.nbytes, share))
        return failures

    def clear(self) -> None:
        """Give memory back."""
        self._stager.clear()

    def _agree(self, state: Mapping[str, Any], step: int, prepare: Callable[[], dict[str, Any]], ranks: Ranks) -> Order:
        """Raises on every rank where it raises on one."""
        error: Exception | None = None
        plan, metadata = None, dict[str, Any]()
        try:
            metadata = prepare()
            plan = self._planner.look_at(state, ranks)
        except Exception as caught:
            error = caught
        problem = f"{type(error).__name__}: {error}" if error is not None else None
        hellos: list[_Hello] = ranks.gather(_Hello(step, secrets.token_hex(6), plan, problem))
        if error is not None:
            raise error
        for rank, hello in enumerate(hellos):
            if hello.problem is not None:
                raise CheckpointError(f"Rank {rank} could not save step {step}, so no rank does: {hello.problem}")
        if len({hello.step for hello in hellos}) > 1:
            steps = ", ".join(f"rank {rank} {hello.step}" for rank, hello in enumerate(hellos))
            raise UsageError(f"All ranks save the same step together, and these are different: {steps}.")
        try:
            self._planner.settle([hello.plan for hello in hellos], ranks)
        except (ValueError, AssertionError) as wrong:  # on every rank the same
            raise UsageError(f"What the ranks have does not make up one state: {wrong}") from wrong
        return Order(
            step=step,
            token=hellos[0].token,
            kind="sharded",
            compression=self._compression,
            metadata=metadata,
            world_size=ranks.size,
        )

    def _share(self, order: Order, ranks: Ranks) -> SharedSave:
        try:
            # Before the copy is made, so that it takes the memory of the save before.
            self.saver.make_room(order.step, 0)
            payload = ShardPayload(self._planner.pieces(), ranks.rank, self._stager, self._compression)
            entries = self._planner.entries() if ranks.rank == 0 else {}
            return SharedSave(order, ranks.rank, ranks.size, payload, entries)
        except BaseException as error:
            self._commit.give_up(order, ranks.rank, ranks.size, error)
            raise


def _release(store: CheckpointStore, share: SharedSave) -> None:
    store.end(share.order.token)
    share.payload.release()

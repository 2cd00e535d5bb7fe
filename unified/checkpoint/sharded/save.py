"""Saves by several ranks together: they agree and copy while training stands still, and write while it goes on.

In the background each rank writes its part, then rank 0 writes the manifest. The ranks coordinate through files in the
store, which a save needs anyway. So no process group is used from a second thread, or after the program destroyed it.
The note of a dead rank does not come, and the save fails after a timeout.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any, NamedTuple

import msgspec

from unified.checkpoint.background import BackgroundSaver, is_final
from unified.checkpoint.coordinator_notify import CoordinatorNotifier
from unified.checkpoint.manifest import Manifest, Part, part_name
from unified.checkpoint.options import CheckpointOptions
from unified.checkpoint.payload import BytesPayload, check_compression
from unified.checkpoint.save_queue import FailedSave, QueuedSave, SaveQueue
from unified.checkpoint.sharded.index import (
    INDEX,
    IndexEntry,
    RankNote,
    SaveProgress,
    decode_note,
    is_of,
    progress_of,
    rank_file,
    with_shards,
)
from unified.checkpoint.sharded.payload import ShardPayload
from unified.checkpoint.sharded.plan import PlanWords, ShardPlanner
from unified.checkpoint.store import CheckpointStore, SaveRequest
from unified.core.backoff import Backoff
from unified.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointRankError,
    UsageError,
    listed,
)
from unified.rounds.rank_group import Ranks, ranks_here
from unified.tensors.host_buffers import BufferPool

logger = logging.getLogger(__name__)

POLL = Backoff(first_s=0.02, limit_s=1.0)
"""Delays between two looks at the parts of the other ranks."""
MAX_NAMED = 8


@dataclass(eq=False)
class RankShare:
    request: SaveRequest
    """The save, without payloads: the same on every rank."""
    rank: int
    size: int
    payload: ShardPayload
    entries: dict[str, IndexEntry] = field(default_factory=dict)
    """Entries of the whole state; on rank 0 alone."""
    num_tries: int = 0
    part: Part | None = None
    """The part of this rank, once it is written."""
    deadline: float = 0.0
    is_published: bool = False
    """The write of the manifest has begun, so a manifest may name the parts."""
    notes: dict[int, RankNote] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ShardedCommit:
    """Writes shares; see `SaveWriter`."""

    store: CheckpointStore
    rank_timeout_s: float
    """Time to wait for the other ranks after this one's part was written."""
    max_tries: int
    """Number of times that `write` is called for one share."""
    after_save: Callable[[Manifest], object]
    """Called with the manifest, on rank 0."""

    def write(self, share: RankShare) -> None:
        """Write a share, and return when the checkpoint exists. Can be called again after it failed."""
        try:
            self._write(share)
        except Exception as error:
            share.num_tries += 1
            if is_final(error) or share.num_tries >= self.max_tries:
                self.give_up(share.request, share.rank, share.size, error, is_published=share.is_published)
            raise

    def release(self, share: RankShare) -> None:
        """Give back the memory of a share."""
        self.store.end(share.request.token)
        share.payload.release()

    def give_up(
        self, request: SaveRequest, rank: int, size: int, error: BaseException, *, is_published: bool = False
    ) -> None:
        """Tell the other ranks that this save failed; rank 0 removes the parts, unless a manifest may name them."""
        if size > 1:
            with contextlib.suppress(Exception):  # without this file the other ranks time out
                self._write_word(request, rank_file(rank, "failed"), f"{type(error).__name__}: {error}".encode())
        if rank == 0 and not is_published:
            with contextlib.suppress(Exception):  # they are swept when they are old
                self.store.delete(
                    part_name(request.step, request.token, rank_file(each, "bin")) for each in range(size)
                )

    def _write(self, share: RankShare) -> None:
        leads = share.rank == 0
        existing = self.store.replaceable(share.request.step) if leads else None
        if share.part is None:
            share.part = self.store.write_part(share.request, rank_file(share.rank, "bin"), share.payload)
            share.deadline = time.monotonic() + self.rank_timeout_s
        note = RankNote(part=share.part, shards=share.payload.shards)
        if not leads:
            self._write_word(share.request, rank_file(share.rank, "note"), msgspec.msgpack.encode(note))
            self._wait(share, lambda found: found.has_manifest and self._is_done(share))
            return
        share.notes[0] = note
        self._wait(share, lambda found: self._has_all(share, found))
        notes = [share.notes[rank] for rank in range(share.size)]
        index = msgspec.msgpack.encode(with_shards(share.entries, notes))
        part = self.store.write_part(share.request, INDEX, BytesPayload(index))
        share.is_published = True
        manifest = self.store.publish(share.request, [*(each.part for each in notes), part], existing)
        if not is_of(manifest, share.request.token):
            raise CheckpointExistsError(
                f"The checkpoint of step {manifest.step} in {self.store.place} was saved meanwhile by another rank."
            )
        with contextlib.suppress(OSError):  # they are swept when they are old
            names = [rank_file(rank, "note") for rank in range(1, share.size)]
            self.store.delete(part_name(share.request.step, share.request.token, name) for name in names)
        logger.info("event=checkpoint-saved step=%d bytes=%d ranks=%d", manifest.step, manifest.size_bytes, share.size)
        self.after_save(manifest)

    def _wait(self, share: RankShare, is_done: Callable[[SaveProgress], bool]) -> None:
        """Poll the store until `is_done`; raise CheckpointRankError if another rank failed or time is up."""
        num_looks = 0
        while True:
            keys = [each.key for each in self.store.stored(f"step-{share.request.step:06d}.")]
            found = progress_of(keys, share.request.step, share.request.token)
            if is_done(found):
                return
            if failed := sorted(found.failed - {share.rank}):
                raise CheckpointRankError(f"rank {failed[0]} failed: {self._reason(share, failed[0])}")
            if time.monotonic() >= share.deadline:
                raise CheckpointRankError(self._who_is_missing(share, found))
            num_looks += 1
            time.sleep(POLL.delay_s(num_looks, SystemRandom()))

    def _has_all(self, share: RankShare, found: SaveProgress) -> bool:
        for rank in sorted(found.written - share.notes.keys()):
            share.notes[rank] = decode_note(self._read_word(share.request, rank_file(rank, "note")))
        return len(share.notes) == share.size

    def _is_done(self, share: RankShare) -> bool:
        try:
            return is_of(self.store.manifest(share.request.step), share.request.token)
        except (CheckpointNotFoundError, CheckpointCorruptError):
            return False

    def _who_is_missing(self, share: RankShare, found: SaveProgress) -> str:
        missing = sorted(set(range(share.size)) - found.written - {0, share.rank})
        if share.rank and not missing:
            return f"rank 0 did not write the manifest within {self.rank_timeout_s:g} s; is it alive?"
        names = listed(missing, MAX_NAMED)
        return f"ranks {names} did not write their parts within {self.rank_timeout_s:g} s; are they alive?"

    def _reason(self, share: RankShare, rank: int) -> str:
        try:
            return self._read_word(share.request, rank_file(rank, "failed")).decode(errors="replace")
        except OSError as error:
            return f"its reason cannot be read: {error}"

    def _write_word(self, request: SaveRequest, name: str, data: bytes) -> None:
        self.store.backend.write(self.store.key(part_name(request.step, request.token, name)), data)

    def _read_word(self, request: SaveRequest, name: str) -> bytes:
        return self.store.backend.read(self.store.key(part_name(request.step, request.token, name)))


class _Proposal(NamedTuple):
    """A rank's message to the others at the beginning of a save."""

    step: int
    token: str
    plan: PlanWords | None
    problem: str | None


class ShardedSaver:
    """Saves together with the other ranks. A newer save never supersedes an older one: another rank may have written
    that already. So one save is being written, one waits, and the caller of a third waits for room.
    """

    def __init__(
        self,
        store: CheckpointStore,
        options: CheckpointOptions,
        notifier: CoordinatorNotifier,
        after_save: Callable[[Manifest], object],
    ) -> None:
        queue: SaveQueue[RankShare] = SaveQueue(
            max_waiting=1,
            max_waiting_bytes=0,
            when_full="wait",
            max_tries=options["max_tries"],
            backoff=options["backoff"],
            rng=SystemRandom(),
        )
        self._commit = ShardedCommit(store, options["rank_timeout"], options["max_tries"], after_save)
        self.saver = BackgroundSaver(queue, self._commit, notifier, store.place)
        self._store = store
        self._process_group = options["process_group"]
        self._compression = check_compression(options["compression"])
        self._pool = BufferPool(one_size=True)
        self._planner = ShardPlanner(self._pool)

    def save(self, state: Mapping[str, Any], step: int, prepare: Callable[[], dict[str, Any]]) -> list[FailedSave]:
        """Plan and copy a state. A collective.

        Args:
            prepare: returns the metadata; if it raises, no rank saves.

        Returns:
            Earlier saves that failed and were not reported yet.
        """
        ranks = ranks_here(self._process_group)
        try:
            request = self._agree(state, step, prepare, ranks)
            share = self._share(request, ranks)
        finally:
            self._planner.forget_state()
        failures = self.saver.take_failures()
        self._store.begin(share.request.token)
        self.saver.submit(QueuedSave(step, share.payload.nbytes, share))
        return failures

    def clear(self) -> None:
        """Give idle memory back."""
        self._pool.trim()

    def _agree(
        self, state: Mapping[str, Any], step: int, prepare: Callable[[], dict[str, Any]], ranks: Ranks
    ) -> SaveRequest:
        """Agree on a save. A collective: if it raises on one rank, it raises on every rank."""
        error: Exception | None = None
        plan, metadata = None, dict[str, Any]()
        try:
            metadata = prepare()
            plan = self._planner.look_at(state, ranks)
        except Exception as caught:
            error = caught
        problem = f"{type(error).__name__}: {error}" if error is not None else None
        proposals: list[_Proposal] = ranks.gather(_Proposal(step, secrets.token_hex(6), plan, problem))
        if error is not None:
            raise error
        for rank, proposal in enumerate(proposals):
            if proposal.problem is not None:
                raise CheckpointError(f"Rank {rank} could not save step {step}, so no rank does: {proposal.problem}")
        if len({proposal.step for proposal in proposals}) > 1:
            steps = ", ".join(f"rank {rank} {proposal.step}" for rank, proposal in enumerate(proposals))
            raise UsageError(f"All ranks must save the same step, but the steps differ: {steps}.")
        try:
            self._planner.settle([proposal.plan for proposal in proposals], ranks)
        except (ValueError, AssertionError) as wrong:  # the same error on every rank
            raise UsageError(f"The states of the ranks do not fit together: {wrong}") from wrong
        return SaveRequest(
            step=step,
            token=proposals[0].token,
            kind="sharded",
            compression=self._compression,
            metadata=metadata,
            world_size=ranks.size,
        )

    def _share(self, request: SaveRequest, ranks: Ranks) -> RankShare:
        try:
            # Before the copy, which then reuses the memory of the previous save.
            self.saver.make_room(request.step, 0)
            payload = ShardPayload(self._planner.pieces(), ranks.rank, self._pool, self._compression)
            entries = self._planner.entries() if ranks.rank == 0 else {}
            return RankShare(request, ranks.rank, ranks.size, payload, entries)
        except BaseException as error:
            self._commit.give_up(request, ranks.rank, ranks.size, error)
            raise

"""`current_worker().snapshot()` and `.restore()`: the state of a rank, in memory that outlives its process and node."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from unified.config.logging import LogOnce
from unified.errors import SnapshotError, SnapshotQuotaError, UsageError
from unified.protocol import snapshots as protocol
from unified.protocol.worker_agent import Launch
from unified.rounds.snapshot_agreement import RoundAgreement, RoundPlace
from unified.snapshot.core.agreement import CopyVotes, agree, describe_source, partner_of
from unified.snapshot.storage import SnapshotStorage, target_of
from unified.snapshot.worker.client import SnapshotClient
from unified.threads import start_thread

if TYPE_CHECKING:
    from unified.snapshot.worker.image import StateImage

logger = logging.getLogger(__name__)
LATE_S = 0.5
"""A longer wait for the last snapshot, on its way to its partner or to storage, is worth a warning."""


@dataclass(frozen=True)
class Restored:
    """A state that was restored."""

    step: int
    """Step of the snapshot, as it was given to `snapshot`."""
    source: str
    """Source of this rank's part: ``memory`` (of this node), ``partner`` (memory of another) or ``storage``."""
    state: Any = field(repr=False)
    """The state that was given to be filled; else a new one, in host memory."""


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """Options of `Snapshots.configure`, with their defaults."""

    partner_every: int = 1
    storage: str = ""
    storage_every: int = 0
    is_replicated: bool = False

    def is_due(self, every: int, count: int) -> bool:
        """Return True if snapshot number `count` is a multiple of `every`; never if `every` is 0."""
        return every > 0 and count % every == 0


@dataclass(kw_only=True)
class _RoundState:
    """State of the snapshots of one round, since its last agreement."""

    place: RoundPlace
    agreement: RoundAgreement
    number: int
    """Number of the agreement in its round."""
    own: protocol.ServerAddress
    partner: protocol.ServerAddress | None
    is_first: bool
    """True if no lower rank is on this node."""
    is_alone: bool
    """True if all ranks are on this node, so that copies go to the job's copy node, if there is one."""
    has_copies: bool
    """True if snapshots are copied. A rank without a partner, whose node cannot be reached, then keeps its own."""
    client: SnapshotClient
    votes: CopyVotes
    count: int = 0
    """Snapshots since the agreement."""


class Snapshots:
    """Snapshots of one worker. Made by the runtime; used through `current_worker().snapshots`."""

    def __init__(self, launch: Launch, place: Callable[[], RoundPlace]) -> None:
        self._launch = launch
        self._place_now = place
        self._options = SnapshotOptions()
        self._using = threading.RLock()
        self._client: SnapshotClient | None = None
        self._state: _RoundState | None = None
        self._warned = LogOnce()
        self._pid = os.getpid()

    def configure(
        self,
        *,
        partner_every: int | None = None,
        storage: str | os.PathLike[str] | None = None,
        storage_every: int | None = None,
        replicated: bool | None = None,
    ) -> None:
        """Set how snapshots are kept. All ranks call this with the same options, before their first snapshot or restore
        of a round. Options that are not given stay as they are.

        Args:
            partner_every: one in this many snapshots is copied to another node, in the background; 0: none. Default: 1.
            storage: a directory that all nodes share, or ``s3://bucket/prefix``: an agent that is asked to stop writes
                its snapshots there, and `restore` looks there last.
            storage_every: one in this many snapshots is written there too, in the background; 0, the default: none.
            replicated: all ranks have the same state (data-parallel training), so that one rank of each node takes
                snapshots, no copies are made, and any number of ranks can restore.
        """
        for name, every in (("partner_every", partner_every), ("storage_every", storage_every)):
            if every is not None and every < 0:
                raise UsageError(f"{name}={every} is no number of snapshots: 1 or more, or 0 for none.")
        with self._using:
            last = self._options
            options = SnapshotOptions(
                partner_every=last.partner_every if partner_every is None else partner_every,
                storage=last.storage if storage is None else os.fspath(storage),
                storage_every=last.storage_every if storage_every is None else storage_every,
                is_replicated=last.is_replicated if replicated is None else replicated,
            )
            if options.storage_every and not options.storage:
                raise UsageError(
                    "storage_every needs storage=, a directory that all nodes share or s3://bucket/prefix."
                )
            self._options = options

    def take(self, state: Any, step: int) -> None:
        """Copy a state into memory of the node's snapshot server; see `Worker.snapshot`."""
        self._check_process()
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"The step of a snapshot is a whole number from 0 up, not {step!r}.")
        from unified.snapshot.worker.image import StateImage

        with self._using:
            here = self._here()
            if here is None:
                here, _ = self._agree()
            here.count += 1
            if self._options.is_replicated and not here.is_first:
                return
            image = StateImage(state)
            try:
                self._write(here, image, step)
            except SnapshotQuotaError:
                raise
            except SnapshotError as error:  # the server died: the agent starts another when a worker connects
                logger.warning("event=snapshot-retried step=%d reason=%r", step, str(error))
                here.client.attach()
                self._write(here, image, step)

    def restore(self, state: Any = None, *, step: int | None = None) -> Restored | None:
        """Return the newest state that all ranks have; see `Worker.restore`."""
        self._check_process()
        with self._using:
            here, agreement = self._agree(step, is_restoring=True)
            found = agreement.snapshot
            if found is None:
                if step is not None:
                    why = agreement.note or "none is held"
                    raise SnapshotError(f"No snapshot of step {step} can be restored: {why}.")
                if agreement.note or self._launch.incarnation:
                    note = agreement.note or "no node holds one: training begins at its start"
                    logger.warning("event=snapshot-not-restored reason=%r", note)
                self._settle(here)
                return None
            restored = self._load(here, state, found, agreement.sources[here.place.rank])
            self._settle(here)
            if agreement.note:
                logger.warning("event=snapshot-older step=%d reason=%r", restored.step, agreement.note)
            logger.info("event=snapshot-restored step=%d source=%s", restored.step, restored.source)
            return restored

    def close(self) -> None:
        """Give back the node's memory: the worker has done its work."""
        with self._using:
            if self._client is not None:
                try:
                    self._client.end()
                except SnapshotError:
                    return  # the server is gone, and its memory, too

    # Taking

    def _write(self, here: _RoundState, image: StateImage, step: int) -> None:
        options, votes = self._options, here.votes
        stamp = protocol.SnapshotStamp(here.place.round, step)
        is_copied = here.has_copies and stamp > votes.last and options.is_due(options.partner_every, here.count)
        to_storage = options.is_due(options.storage_every, here.count) and not (
            options.is_replicated and here.place.rank
        )
        # Different states of ranks all have to arrive. One replica is enough, so training waits for none.
        is_voted = is_copied and not options.is_replicated
        if votes.pending:
            votes.settle(here.agreement.settled())
        target = here.client.begin(image.length, (votes.floor, *votes.pending), is_sent=is_voted or to_storage)
        self._report_sent(target.waited_s, target.complaint)
        if is_voted:
            votes.end_copy(target.confirmed if here.partner is not None or here.is_alone else votes.last)
        if is_copied and not votes.has_room:
            is_copied = False
            self._report_sent(0.0, f"rank {here.place.rank} is ahead of others, or takes snapshots of other steps")
        image.write(target.buffer.memory)
        attached = here.client.commit(
            protocol.CommitSnapshot(
                buffer=target.number,
                stamp=stamp,
                length=image.length,
                partner=here.partner if is_copied else None,
                to_copy_node=is_copied and here.is_alone,
                to_storage=to_storage,
            )
        )
        if options.is_replicated:
            votes.floor = stamp  # all nodes have this one before any begins the next
        elif not here.has_copies or (here.is_alone and attached.copy_node is None):
            votes.floor = protocol.NO_STAMP
        elif is_voted:
            if votes.last != protocol.NO_STAMP:
                here.agreement.vote(votes.last, votes.last in votes.pending)
            votes.begin_copy(stamp)
        if target.num_buffers == 1:
            start_thread("unified-snapshot", self._prepare, image.length)

    def _prepare(self, nbytes: int) -> None:
        """Prepare the second buffer before it is needed: finding its pages takes longer than a copy into them."""
        try:
            with self._using:
                if self._client is not None:
                    self._client.prepare(nbytes)
        except (SnapshotError, OSError) as error:
            logger.warning("event=snapshot-buffer-late reason=%r", str(error))

    def _report_sent(self, waited_s: float, complaint: str) -> None:
        now = time.monotonic()
        if complaint and self._warned.is_new(now, complaint):
            logger.warning("event=snapshot-not-sent reason=%r", complaint)
        elif waited_s > LATE_S and self._warned.is_new(now, "late"):
            logger.warning(
                "event=snapshot-waited seconds=%.1f reason=%r",
                waited_s,
                "the last one was still on its way to the partner or to storage: a larger partner_every or "
                "storage_every sends fewer",
            )

    # Restoring

    def _load(
        self, here: _RoundState, state: Any, found: protocol.StoredSnapshot, source: protocol.SnapshotSource
    ) -> Restored:
        from unified.snapshot.worker.image import read_state

        if source.server is None:
            with self._storage(here.place) as storage:
                image = storage.read(found)
        else:
            image = here.client.open(source, found.stamp, here.own)
        return Restored(found.stamp.step, describe_source(source, here.own), read_state(image, state))

    def _settle(self, here: _RoundState) -> None:
        """Drop later snapshots on all ranks, before any rank goes on and takes them again."""
        here.client.go_back(here.votes.floor)
        here.agreement.wait_for_all()

    # Rounds

    def _here(self) -> _RoundState | None:
        """Return the state of the round that the worker is in; None: its ranks have not agreed on anything yet."""
        state = self._state
        return state if state is not None and state.place[:4] == self._place_now()[:4] else None

    def _agree(
        self, step: int | None = None, *, is_restoring: bool = False
    ) -> tuple[_RoundState, protocol.SnapshotAgreement]:
        """Agree with the other ranks on a snapshot, and learn where their servers are."""
        place, last = self._place_now(), self._here()
        attached = self._attach(place)
        number = 0 if last is None else last.number + 1
        agreement = RoundAgreement(place, number)
        is_first = self._launch.place.local_rank == 0 or place.connect is None
        stored: list[protocol.StoredSnapshot] = []
        if self._options.storage:
            with self._storage(place) as storage:
                stored = storage.steps()
        assert self._client is not None
        report = protocol.RankReport(
            server=attached.address,
            held=attached.held if is_first else [],
            elsewhere=self._client.held_elsewhere() if is_restoring and place.rank == 0 else [],
            stored=stored,
        )
        decide = partial(
            agree,
            job_id=self._launch.job_id,
            role=place.role,
            step=step,
            is_replicated=self._options.is_replicated,
        )
        found = agreement.reach(report, decide)
        copies = self._options.partner_every and not self._options.is_replicated
        nodes = [server.node for server in found.servers]
        is_alone = place.connect is not None and len(set(nodes)) == 1
        partners = {server.node for server in found.servers if server.url}
        ours = found.snapshot if found.snapshot and found.snapshot.job_id == self._launch.job_id else None
        self._state = _RoundState(
            place=place,
            agreement=agreement,
            number=number,
            own=attached.address,
            partner=partner_of(place.rank, found.servers) if copies else None,
            is_first=place.connect is None or nodes.index(attached.address.node) == place.rank,
            is_alone=is_alone,
            has_copies=is_alone or (bool(copies) and len(partners) > 1),
            client=self._client,
            votes=CopyVotes(ours.stamp if ours else protocol.NO_STAMP),
        )
        return self._state, found

    def _attach(self, place: RoundPlace) -> protocol.Attached:
        series = protocol.SnapshotSeries(self._launch.job_id, place.role, place.world_size, place.rank)
        storage = self._target(place) if self._options.storage else None
        attach = protocol.AttachSeries(token=self._launch.snapshot_token, series=series, storage=storage)
        if self._client is None:
            self._client = SnapshotClient(self._launch.run_dir, attach)
        return self._client.attach(attach)

    def _target(self, place: RoundPlace) -> protocol.StorageTarget:
        series = protocol.SnapshotSeries(self._launch.job_id, place.role, place.world_size, place.rank)
        return target_of(self._options.storage, series, os.environ, is_replicated=self._options.is_replicated)

    def _storage(self, place: RoundPlace) -> SnapshotStorage:
        target = self._target(place)
        return SnapshotStorage(target.location, target.folder)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"the snapshots of worker {self._launch.name} belong to process {self._pid}: this one ({os.getpid()}) "
                "was forked from it. Take them in the worker itself."
            )

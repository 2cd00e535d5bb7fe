"""All errors that users and daemons can meet, in one tree below `UnifiedError`.

Each message says what happened, to which job, worker or node, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class UnifiedError(Exception):
    """Root of every error of this package."""


class UsageError(UnifiedError, ValueError):
    """A request that cannot be carried out as asked."""


class JobNameError(UsageError):
    """A job name that cannot be a file name, a label and a word on a command line."""


class JobError(UsageError):
    """An invalid description of a job: the message names the role and the field, and says what to do."""


class OptionError(UsageError):
    """An option that does not exist, or has a value of the wrong kind; the message names the nearest one."""


class EntryPointError(UsageError):
    """An entry point that cannot be found, imported or called."""


class KeyFileError(UsageError):
    """A cluster key that cannot be read or written, that other users may read, or that is invalid."""


class NotInWorkerError(UsageError, RuntimeError):
    """`current_worker()` was asked for outside a worker process."""


class ClusterError(UnifiedError, RuntimeError):
    """The cluster could not do what was asked."""


class RoundMeetingError(ClusterError):
    """Ranks of a round waited for other ranks in vain: to begin the round, to agree on a state, or to end the round.

    Attributes:
        missing: ranks that did not come; empty if the round's store is gone.
    """

    def __init__(self, message: str, missing: Iterable[int]) -> None:
        super().__init__(message)
        self.missing = list(missing)


class MasterUnreachableError(ClusterError, ConnectionError):
    """Nobody answered at the master's address before the deadline."""


class RefusedError(ClusterError):
    """The master or an agent refused a request.

    Attributes:
        code: a short word for programs, such as ``"name-taken"`` or ``"does-not-fit"``.
        reason: the message.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class KeyRefusedError(RefusedError):
    """The handshake with the master ended because the two have different cluster keys."""

    def __init__(self, reason: str) -> None:
        super().__init__("key", reason)


class ProtocolError(UnifiedError):
    """Bytes from a peer that are not a message of this protocol."""


class VersionMismatchError(ProtocolError):
    """The peer speaks another version of the protocol."""


class RpcError(UnifiedError, RuntimeError):
    """A call ended without a result."""

    retryable: ClassVar[bool] = False
    """True if the call failed on its way, not because of its content. A retry may succeed; the handler may have run."""


class RemoteError(RpcError):
    """The handler raised an exception. `type_name`, `message` and `traceback` are those of that exception.

    If its class can be imported here, the error is an instance of both that class and this one, so
    that `except KeyError` works across processes.
    """

    retryable = False  # also if the far class, the second base of the error, is retryable

    def __init__(
        self, message: str, *, type_name: str = "", traceback: str = "", worker: str = "", node: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.type_name = type_name
        self.traceback = traceback
        self.worker = worker
        self.node = node


class WorkerDiedError(RpcError):
    """The incarnation of the worker that was called ended before it answered.

    Attributes:
        is_final: True if no other incarnation will follow, so that another call is useless.
    """

    retryable = True

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class RouteLostError(RpcError):
    """The connection of an open call broke: the handler may or may not have run."""

    retryable = True


class RpcTimeoutError(RpcError, TimeoutError):
    """The deadline of a call passed before its answer came."""


class RpcCancelledError(RpcError):
    """The caller cancelled the call."""


class RpcNotFoundError(RpcError, LookupError, ValueError):
    """The worker that was called has no such method; the message names its methods."""


class BusOverloadedError(RpcError):
    """More bytes are in flight to one peer than the limit allows, and the caller would not wait."""

    retryable = True


class SnapshotError(UnifiedError, RuntimeError):
    """A snapshot was not taken, or cannot be restored; the message says which, and why."""


class SnapshotQuotaError(SnapshotError):
    """The snapshots of a node would be larger than the node's quota for them."""


class QueueError(UnifiedError, RuntimeError):
    """A data queue could not do what was asked."""


class QueueClosedError(QueueError):
    """The queue was closed: nothing more can be put, and a consumer that sees this has seen the last item. If an entry
    point does not catch it, it ends the entry point like a `return`.

    Attributes:
        num_put: how many items of the refused put, counted from the first, had gone in.
    """

    def __init__(self, message: str, num_put: int = 0) -> None:
        super().__init__(message)
        self.num_put = num_put


class QueueFullError(QueueError, TimeoutError):
    """A put found no room for all its items within its timeout.

    Attributes:
        num_put: how many of its items, counted from the first, went in.
    """

    def __init__(self, message: str, num_put: int = 0) -> None:
        super().__init__(message)
        self.num_put = num_put


class QueueNotFoundError(QueueError, TimeoutError):
    """No worker made the queue, or its owner could not be reached or did not answer, within the caller's timeout."""


class QueueTakenError(QueueError, UsageError):
    """The queue has an owner already, and cannot have a second one."""


class QueueLostError(QueueError, WorkerDiedError):
    """The queue's owner ended, and the queue's items are gone; or this worker's own incarnation is over."""

    retryable = False


class QueueJournalError(QueueError):
    """The journal of a durable queue cannot be read or written: the disk is full, or another process uses the file."""


class LoaderError(UnifiedError, RuntimeError):
    """A data loader cannot go on: its processes were lost too often, or no worker serves it."""


class LoaderTimeoutError(LoaderError, TimeoutError):
    """The next batch did not come within the loader's `timeout`."""


class EngineError(UnifiedError, RuntimeError):
    """The engine of a worker has failed or was not ready in time, or has refused a request."""


class WeightsError(UnifiedError, RuntimeError):
    """Weights did not reach a receiver, or their transfer was given up; the message says why."""


class WeightsVersionError(WeightsError):
    """A version was refused: a worker has a newer one, or gets the same one from another sender."""


class WeightsTimeoutError(WeightsError, TimeoutError):
    """A version was not sent, or did not come, within its timeout."""


class WeightsMismatchError(WeightsError, ValueError):
    """Weights do not fit the model: keys that are missing or unexpected, or shapes that differ. Nothing was changed."""


class DatasetError(UnifiedError, ValueError):
    """A dataset cannot be read, or does not match its description: the message names the file, and says what to do."""


class DataFileNotFoundError(DatasetError, FileNotFoundError):
    """A file of a dataset is missing, or was removed."""


class CoordinatorError(UnifiedError, RuntimeError):
    """The coordinator of data, barriers and checkpoints refused, or cannot go on; the message says why.

    Attributes:
        code: a short word for programs, such as ``"not-found"``; empty if there is none.
    """

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class WorkerUnknownError(CoordinatorError):
    """The coordinator does not count this worker as alive: it was silent for too long, or was replaced."""


class EpochTimeoutError(CoordinatorError, TimeoutError):
    """A reader waited for the end of an epoch, and the readers of its remaining shards made no progress."""


class BarrierError(CoordinatorError):
    """A barrier was released before all workers had arrived.

    Attributes:
        arrived: workers that had arrived.
        missing: workers that had not arrived, as far as the expected workers are known.
        lost: workers that were lost, so that waiting for them was useless.
    """

    def __init__(
        self,
        message: str,
        *,
        arrived: Iterable[str] = (),
        missing: Iterable[str] = (),
        lost: Iterable[str] = (),
        code: str = "",
    ) -> None:
        super().__init__(message, code=code)
        self.arrived = list(arrived)
        self.missing = list(missing)
        self.lost = list(lost)


class BarrierTimeoutError(BarrierError, TimeoutError):
    """Not all workers arrived at a barrier within the timeout of one that waited."""


class NonFiniteLossError(UnifiedError, ArithmeticError):
    """The loss of a training run is NaN or infinite; the message says at which step, and what to do."""


class CheckpointError(UnifiedError, RuntimeError):
    """A checkpoint was not saved, or cannot be loaded; the message says which, and why."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint of that step exists, or none at all; the message names the existing ones."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """A stored checkpoint is damaged: a checksum or a size does not match, or a manifest cannot be read."""


class CheckpointSaveError(CheckpointError):
    """Saves that an earlier call accepted have failed, and all their tries are used up.

    Attributes:
        steps: steps of the checkpoints that were not saved.
    """

    def __init__(self, message: str, steps: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.steps = tuple(steps)


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Another writer has saved a checkpoint of that step in the same place; nothing of it was changed."""


class CheckpointRankError(CheckpointError):
    """A checkpoint of several ranks was not made: some ranks did not write their parts; the message says which."""


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """Accepted saves did not end within the timeout; they go on."""


class ElasticError(UnifiedError, RuntimeError):
    """A training loop cannot go on in another round: its state is lost, or the ranks' states do not fit."""


class StorageError(UnifiedError, OSError):
    """An object of a store could not be read, written, listed or deleted; the message says which and why."""


class NotFoundError(StorageError, FileNotFoundError):
    """No object has this key, or its bucket or folder does not exist."""


class AlreadyExistsError(StorageError, FileExistsError):
    """An object with this key exists, and must not be replaced."""


class StorageDeniedError(StorageError, PermissionError):
    """The store refused: no credentials, wrong ones, or no right to do this."""


class StorageFullError(StorageError):
    """The disk is full, or a quota is reached."""


class StorageUnavailableError(StorageError, ConnectionError):
    """The store did not answer, or said that it is unavailable, also after retries."""


class InvariantError(UnifiedError):
    """A core reached a state that its own rules forbid: a defect of this package, not of the user."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ``" Did you mean 'rollout'?"``, or an empty text if no word is close. Case is ignored."""
    by_lower = {name.lower(): name for name in sorted(known, reverse=True)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def listed(items: Iterable[object], most: int = 10) -> str:
    """Return ``a, b, c`` for a message; of many items the first ones, and the number of the others."""
    found = [str(item) for item in items]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more

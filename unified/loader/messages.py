"""Messages between the consumer of a loader and the processes that fetch for it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from unified.bus.calls import remote_errors
from unified.errors import RpcError


class BringParts(NamedTuple):
    """The packed `LoaderParts` of the loader `key`."""

    key: str
    packed: bytes


class OpenStream(NamedTuple):
    """Begin an epoch of a stream.

    Attributes:
        base_seed: the epoch's; the stream's own seed is this plus its id.
        epoch: from 0, as the consumer counts.
        skip: batches of this epoch that were answered elsewhere: an iterable dataset skips them.
    """

    key: str
    stream: int
    num_streams: int
    base_seed: int
    epoch: int
    skip: int


class FetchBatch(NamedTuple):
    """Make one batch; the answer is a `FetchedBatch`, `StreamEnd` or `FetchFailure`."""

    key: str
    stream: int
    batch: int
    task: Any


class DropLoader(NamedTuple):
    """The consumer is done with this loader."""

    key: str


LoaderMessage = BringParts | OpenStream | FetchBatch | DropLoader


class FetchedBatch(NamedTuple):
    """A batch as the dataset and `collate_fn` made it."""

    value: Any


class StreamEnd(NamedTuple):
    """The stream of an iterable dataset has ended."""


class FetchFailure(NamedTuple):
    """The user's code raised.

    Attributes:
        what: the batch and sample, in words.
        raised: the exception, as `unified.bus.calls.remote_errors.describe` writes it down.
    """

    what: str
    raised: bytes

    def error(self) -> RpcError:
        """Return the error to raise at the consumer: of the raised class, with the remote traceback in a note."""
        return remote_errors.rebuild(self.raised, self.what)


FetchReply = FetchedBatch | StreamEnd | FetchFailure


class StreamLostError(LookupError):
    """A process was asked to fetch from a stream that it does not have: it was restarted since the stream opened."""


class LoaderWorkers(Protocol):
    """Processes that serve streams. Each of them handles its messages in the order of sending.

    Attributes:
        is_restarted: a lost worker is replaced at once, under its number.
    """

    is_restarted: bool

    def __len__(self) -> int: ...

    def initial_workers(self, num_streams: int) -> list[int]:
        """Return the worker at which each stream begins."""

    def open(self, worker: int, message: OpenStream) -> None:
        """Make a stream; an error of it is the answer to its first fetch."""

    def fetch(self, worker: int, message: FetchBatch) -> Future[FetchReply]:
        """Ask for a batch."""

    def lost(self, worker: int, error: BaseException) -> str:
        """Return the reason, in words, if `error` of a fetch means that the worker is gone, and make the worker ready
        for new streams; else return an empty string."""

    def close(self) -> None:
        """Release the processes, or their data for this loader."""

"""Every error a user or a daemon can meet, in one tree.

    UnifiedError
    ├── UsageError                 you: the call, the option, the job description
    │   ├── JobNameError
    │   ├── OptionError            an option that does not exist; names the nearest one
    │   ├── EntryPointError        an entry point that cannot be imported or called
    │   └── NotInWorkerError       current_worker() outside a worker
    ├── ClusterError               the cluster: what it cannot do, and what would help
    │   ├── MasterUnreachableError
    │   └── RefusedError           the master or an agent said no; carries its code and reason
    ├── ProtocolError              a peer sent what this version cannot read
    │   └── VersionMismatchError
    ├── RpcError                   a call on the bus that did not end in a result
    │   ├── RemoteError            the handler raised; has its type, message and traceback
    │   ├── WorkerDiedError        the callee's life ended before it answered
    │   ├── RpcTimeoutError        the deadline passed
    │   ├── RpcCancelledError
    │   ├── RpcNotFoundError       no such method; names what is registered
    │   └── BusOverloadedError     too many bytes in flight to one peer
    └── InvariantError             us: a core found its own state broken

Each message says what happened, to whom (job, worker, node), and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnifiedError(Exception):
    """Root of every error of this package."""


class UsageError(UnifiedError, ValueError):
    """The caller asked for something that cannot be done as asked."""


class JobNameError(UsageError):
    """A job name that cannot be a file name, a label and a word on a command line."""


class OptionError(UsageError):
    """An option that does not exist, or has a value of the wrong kind."""


class EntryPointError(UsageError):
    """An entry point that cannot be found, imported or called."""


class NotInWorkerError(UsageError, RuntimeError):
    """`current_worker()` was asked for outside a worker process."""


class ClusterError(UnifiedError, RuntimeError):
    """The cluster could not do what was asked."""


class MasterUnreachableError(ClusterError, ConnectionError):
    """Nobody answered at the master's address before the deadline."""


class RefusedError(ClusterError):
    """The master or an agent answered, and the answer was no.

    Attributes:
        code: a short word for programs, such as ``"name-taken"`` or ``"does-not-fit"``.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class ProtocolError(UnifiedError):
    """Bytes from a peer that are not a message of this protocol."""


class VersionMismatchError(ProtocolError):
    """The peer speaks another version of the protocol."""


class RpcError(UnifiedError, RuntimeError):
    """A call ended without a result."""


class RemoteError(RpcError):
    """The handler raised. `type_name`, `message` and `traceback` are the far side's own.

    Where the far exception's class can be imported here, the error that is raised is an instance
    of both that class and this one, so that `except KeyError` works across processes.
    """

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
    """The life of the worker that was called ended before it answered."""


class RpcTimeoutError(RpcError, TimeoutError):
    """The deadline of a call passed before its answer came."""


class RpcCancelledError(RpcError):
    """The caller cancelled the call."""


class RpcNotFoundError(RpcError, LookupError):
    """The worker that was called has no such method; the message names those it has."""


class BusOverloadedError(RpcError):
    """More bytes are in flight to one peer than the limit allows, and the caller would not wait."""


class InvariantError(UnifiedError):
    """A core reached a state that its own rules forbid: a defect of this package, not of the user."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint such as ``" Did you mean 'rollout'?"``, or an empty string when nothing is close. Case does not matter."""
    by_lower = {name.lower(): name for name in sorted(known, reverse=True)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""

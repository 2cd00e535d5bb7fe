"""What a coordinator's core asks its shell to do.

What a step persists and forgets is one transaction, and on disk before any of the step's answers goes.
"""

from __future__ import annotations

from unified.core.coordinator.messages import Token
from unified.protocol.client_master import MasterAnswer
from unified.values import Value

Row = tuple[str, str, bytes]
"""Kind, key, data: as in the master's store. Kind and key together are unique; kinds begin with ``coordinator-``."""


class Persist(Value, frozen=True, kw_only=True):
    """Keep these, each in the place of what is there under its kind and key. At most one of these a step."""

    rows: list[Row]


class Forget(Value, frozen=True, kw_only=True):
    """Drop what is kept under these kinds and keys. At most one of these a step, with other keys than `Persist`."""

    keys: list[tuple[str, str]]


class Answer(Value, frozen=True, kw_only=True):
    """Answer a question. All whom a barrier releases are given the same object, so it need be encoded but once."""

    token: Token
    answer: MasterAnswer


class Report(Value, frozen=True, kw_only=True):
    """A fact or a decision with its reason, for the log and for `unified explain`."""

    event: str
    """A word such as ``worker-lost`` or ``barrier-broken``."""
    reason: str
    space: str
    worker_id: str = ""


Action = Persist | Forget | Answer | Report

"""What the master's core asks its shell to do. All `Save`s and `Report`s of a step are on disk before a `Send` goes."""

from __future__ import annotations

from unified.protocol.agent_master import MasterToAgent
from unified.protocol.client_master import MasterAnswer
from unified.protocol.records import EventRecord
from unified.values import Value


class Save(Value, frozen=True, kw_only=True):
    """Keep these bytes under (kind, key); None forgets them."""

    kind: str
    key: str
    data: bytes | None


class Report(Value, frozen=True, kw_only=True):
    """A fact or a decision with its reason: into the event log and the daemon's log."""

    record: EventRecord


class Send(Value, frozen=True, kw_only=True):
    """A message to a connection; lost if it is gone, which is no error."""

    peer: bytes
    request_id: int = 0
    message: MasterToAgent | MasterAnswer


MasterAction = Save | Report | Send

"""Events and actions of the master's core. All saves and reports of a step are on disk before a `Send` goes.

There are two events: a message came, or time passed.
"""

from __future__ import annotations

from unified.protocol.agent_master import AgentToMaster, MasterToAgent
from unified.protocol.client_master import ClientToMaster, MasterAnswer
from unified.protocol.records import EventRecord
from unified.values import Value


class SaveRecord(Value, frozen=True, kw_only=True):
    """Keep `data` under (kind, key); None forgets it."""

    kind: str
    key: str
    data: bytes | None


class ReportEvent(Value, frozen=True, kw_only=True):
    """Write a fact or a decision with its reason into the event log and the daemon's log."""

    record: EventRecord


class Send(Value, frozen=True, kw_only=True):
    """Send a message to a connection; if that is gone, the message is lost, which is no error."""

    peer: bytes
    request_id: int = 0
    message: MasterToAgent | MasterAnswer


MasterAction = SaveRecord | ReportEvent | Send


class Received(Value, frozen=True, kw_only=True):
    """A valid message came. `peer` is where answers go; it names a connection, not an agent or a client."""

    peer: bytes
    request_id: int = 0
    message: AgentToMaster | ClientToMaster


class MasterTick(Value, frozen=True, kw_only=True):
    """`MasterCore.next_deadline` has come. Too early or too often does no harm."""

    is_behind: bool = False
    """True if messages are still unread: no lease is judged before they are read."""


MasterEvent = Received | MasterTick

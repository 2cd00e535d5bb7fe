"""What can happen to the master. Two things: somebody said something, or time passed."""

from __future__ import annotations

from unified.protocol.agent_master import AgentToMaster
from unified.protocol.client_master import ClientToMaster
from unified.values import Value


class Received(Value, frozen=True, kw_only=True):
    """A valid message came. `peer` is where answers go; it names a connection, not an agent or a client."""

    peer: bytes
    request_id: int = 0
    message: AgentToMaster | ClientToMaster


class TimePassed(Value, frozen=True, kw_only=True):
    """`MasterCore.next_deadline` has come. Too early or too often does no harm."""


MasterEvent = Received | TimePassed

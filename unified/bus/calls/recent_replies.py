"""Recent replies: calls answered through ZeroMQ, whose answers may be lost with a connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from unified.bus.calls.inbound import InboundCall
from unified.bus.calls.remote_errors import describe_ours
from unified.bus.codec.codec import Encoded
from unified.errors import RouteLostError
from unified.protocol.envelope import Kind

MAX_KEPT = 10_000
"""Number of messages that may wait in a ZeroMQ socket, and be lost with its connection."""


class RecentReplies:
    """The newest calls that this worker answered.

    Args:
        worker: this worker, for messages.
        tell: answers a call with an error.
    """

    def __init__(self, worker: str, tell: Callable[[InboundCall, Kind, Encoded, bool], object]) -> None:
        self._worker = worker
        self._tell = tell
        self._calls: deque[InboundCall] = deque(maxlen=MAX_KEPT)

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: InboundCall) -> None:
        """Remember a call that is being answered, without the value that its handler made."""
        self._calls.append(
            InboundCall(call.call_id, call.sender, call.worker, call.method, None, b"", [], is_relayed=call.is_relayed)
        )

    def lost(self, known: Iterable[InboundCall], is_concerned: Callable[[str], bool], where: str) -> None:
        """End the calls whose answers or items may have been lost with a connection: their callers would wait for them.
        A caller that has had its answer ignores that.

        Args:
            known: calls that are not answered yet.
            is_concerned: True if messages to this inbox took that connection.
            where: the far end of the connection, in words.
        """
        streams = [
            call for call in known if call.link is None and call.stream is not None and is_concerned(call.sender)
        ]
        for stream in streams:
            if stream.stream is not None:
                stream.stream.close()
        for call in [*streams, *(each for each in list(self._calls) if is_concerned(each.sender))]:
            error = RouteLostError(
                f"the connection of worker {self._worker} to {where} broke, and the answer to {call.method!r} "
                "may have been lost with it; its handler has run, or begun to. Call again if it may run twice."
            )
            self._tell(call, Kind.ERROR, Encoded(describe_ours(error), []), False)

"""The daemon's poll loop: sockets, descriptors and channels, each with a callback for when it is ready."""

from __future__ import annotations

import math
from collections.abc import Callable

import zmq

from unified_agent.child_channel import ChildChannel

Call = Callable[[], None]


class PollLoop:
    """A poller with one callback for each source."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._calls: dict[object, Call] = {}
        self._links: dict[int, ChildChannel] = {}

    def watch(self, source: zmq.Socket[bytes] | int, call: Call) -> None:
        """Have `call` called when there is something to read."""
        self._calls[source] = call
        self._poller.register(source, zmq.POLLIN)

    def watch_link(self, link: ChildChannel, call: Call) -> None:
        """Watch a channel; bytes that wait in it are sent as soon as its socket takes them."""
        self._links[link.descriptor] = link
        self.watch(link.descriptor, call)

    def unwatch(self, source: zmq.Socket[bytes] | int) -> None:
        """Forget a source, before its descriptor number can belong to another."""
        if self._calls.pop(source, None) is not None:
            self._poller.unregister(source)

    def unwatch_link(self, link: ChildChannel) -> None:
        """Forget a channel; once it has closed, another may have its descriptor's number, and is left alone."""
        if self._links.get(link.descriptor) is link:
            del self._links[link.descriptor]
            self.unwatch(link.descriptor)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until something is ready, or for `timeout_s`, and make the calls."""
        for descriptor, link in self._links.items():
            self._poller.modify(descriptor, zmq.POLLIN | (zmq.POLLOUT if link.has_waiting else 0))
        for source, flags in self._poller.poll(None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))):
            if flags & zmq.POLLOUT and isinstance(source, int) and source in self._links:
                self._links[source].flush()
            call = self._calls.get(source)  # an earlier call of this turn may have ended it
            if call is not None and flags & ~zmq.POLLOUT:
                call()

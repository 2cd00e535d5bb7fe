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
        self._channels: dict[int, ChildChannel] = {}

    def watch(self, source: zmq.Socket[bytes] | int, call: Call) -> None:
        """Call `call` whenever there is something to read."""
        self._calls[source] = call
        self._poller.register(source, zmq.POLLIN)

    def watch_channel(self, channel: ChildChannel, call: Call) -> None:
        """Watch a channel; bytes that wait in it are sent as soon as its socket takes them."""
        self._channels[channel.descriptor] = channel
        self.watch(channel.descriptor, call)

    def unwatch(self, source: zmq.Socket[bytes] | int) -> None:
        """Forget a source, before its descriptor number can belong to another."""
        if self._calls.pop(source, None) is not None:
            self._poller.unregister(source)

    def unwatch_channel(self, channel: ChildChannel) -> None:
        """Forget a channel; another channel that has its descriptor's number by now is left alone."""
        if self._channels.get(channel.descriptor) is channel:
            del self._channels[channel.descriptor]
            self.unwatch(channel.descriptor)

    def wait(self, timeout_s: float) -> None:
        """Wait until something is ready, or for `timeout_s`, and make the calls."""
        for descriptor, channel in self._channels.items():
            self._poller.modify(descriptor, zmq.POLLIN | (zmq.POLLOUT if channel.has_waiting else 0))
        for source, flags in self._poller.poll(max(0, math.ceil(timeout_s * 1000))):
            if flags & zmq.POLLOUT and isinstance(source, int) and source in self._channels:
                self._channels[source].flush()
            call = self._calls.get(source)  # an earlier call of this turn may have unwatched it
            if call is not None and flags & ~zmq.POLLOUT:
                call()

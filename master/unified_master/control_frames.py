"""Whole messages in and out of the master's ROUTER, at the least price: it takes in and sends thousands a second."""

from __future__ import annotations

import logging

import zmq

_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # `|` of enum members costs more than a send
_COPIED_BYTES = 65_536
"""Below this size a copy is cheaper than to keep the memory until ZeroMQ is done with it."""
_log = logging.getLogger("unified.master")


def receive(router: zmq.Socket[bytes]) -> tuple[bytes, list[bytes]] | None:
    """The next message: the connection that it came on, and its frames. None if none is there."""
    try:
        peer = router.recv(_NOBLOCK)
    except zmq.Again:
        return None
    frames: list[bytes] = []
    has_more = True
    while has_more:
        frame = router.recv(_NOBLOCK, copy=False)  # it knows whether it is the last; to ask the socket costs as much
        frames.append(frame.bytes)
        has_more = frame.more
    return peer, frames


def send(router: zmq.Socket[bytes], peer: bytes, header: bytes, body: bytes) -> None:
    """Queue a message to a connection. If its peer is gone or does not read, the message is dropped."""
    try:
        router.send(peer, _MORE)
        router.send(header, _MORE)
        router.send(body, _NOBLOCK, copy=len(body) < _COPIED_BYTES)
    except zmq.ZMQError as error:  # agents and clients ask again, so nothing is lost for good
        _log.debug("event=not-sent reason=%r", str(error))

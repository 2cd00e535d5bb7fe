"""Bound of the frames on tcp, and the pieces into which larger ones are cut.

ZeroMQ takes a frame in whole, and gives it memory as its bytes come, also before the handshake, which is what a frame
can be refused for. So no frame is longer than a piece; what is larger is cut, and joined by its receiver.

The pieces of a control message are frames of it, and nothing is added: a piece that is full is not the last. Those of a
bus message, which is large more often, are messages of their own (`unified.bus.transport.pieces`): they are handed on
while later ones are still to come.
"""

from __future__ import annotations

from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview
PIECE_BYTES = 4 * 1024 * 1024
"""Size of the pieces of a larger frame; only the last is shorter. Smaller ones would cost more time."""
MAX_FRAME_BYTES = PIECE_BYTES + 1024
"""Longest frame that a tcp socket takes: a piece, and what encryption adds to it."""


def cut(frame: Buffer) -> list[Buffer]:
    """Return the pieces of a frame, which are views of it.

    The last is shorter than `PIECE_BYTES`, and may be empty, so that a receiver knows it for the last; the others are
    not. A frame that is shorter is its only piece.
    """
    view = memoryview(frame)
    if view.nbytes < PIECE_BYTES:
        return [frame]
    view = view.cast("B")
    return [view[start : start + PIECE_BYTES] for start in range(0, view.nbytes + 1, PIECE_BYTES)]


def join(pieces: Sequence[Buffer]) -> Buffer:
    """Return the frame of which these are all pieces, without a copy if it is one.

    For control messages, which are seldom large: all pieces are held until the last is there.
    """
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)

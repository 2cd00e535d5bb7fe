"""Bound of the frames on tcp, and the pieces into which larger frames are cut.

ZeroMQ receives a frame as a whole, and allocates memory as its bytes come, even before the handshake. It can only
refuse a frame for its size. So no frame is longer than a piece: a larger one is cut, and its receiver joins it.

The pieces of a control message are its frames, and nothing is added: a full piece is not the last. Bus messages are
large more often, so their pieces are messages of their own (`unified.bus.transport.pieces`): these are passed on before
later ones come.
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

    Only the last piece is shorter than `PIECE_BYTES` (it may be empty), so that a receiver recognizes it. A shorter
    frame is its only piece.
    """
    view = memoryview(frame)
    if view.nbytes < PIECE_BYTES:
        return [frame]
    view = view.cast("B")
    return [view[start : start + PIECE_BYTES] for start in range(0, view.nbytes + 1, PIECE_BYTES)]


def join(pieces: Sequence[Buffer]) -> Buffer:
    """Return the frame that these pieces make; a single piece is not copied.

    For control messages, which are seldom large: all pieces are held until the last is there.
    """
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)

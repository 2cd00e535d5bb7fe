"""Arguments on their way to one worker or to several."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unified.bus.codec.codec import Encoded
from unified.bus.codec.cuda import DeviceTensor, settle
from unified.bus.shm.export import Granted, Staged
from unified.bus.shm.pool import SharedPool

_staging = threading.Lock()


class Parcel:
    """A value encoded once, and laid into shared memory once, however many it goes to.

    Args:
        num_readers: how many it goes to.
    """

    __slots__ = ("_is_staged", "_num_readers", "_staged", "content", "nbytes")

    def __init__(self, content: Encoded, num_readers: int = 1) -> None:
        self.content = content
        self.nbytes = content.nbytes
        self._num_readers = num_readers
        self._staged: Staged | None = None
        self._is_staged = False

    def settled(self, devices: Sequence[str], is_same_process: bool) -> Parcel:
        """With its CUDA tensors made into frames for one reader, which sees these devices; itself if it has none."""
        if not has_device_tensors(self.content.buffers):
            return self
        frames = settle(self.content.buffers, devices, is_same_process=is_same_process)
        return Parcel(self.content._replace(buffers=frames))

    def grant(self, pool: SharedPool, reader: str) -> Granted | None:
        """How its buffers reach the inbox `reader` of this host; None: as frames, all of them."""
        if self._num_readers == 1:
            staged = pool.stage(self.content.buffers)
            granted = None if staged is None else staged.grant(reader)
            if staged is not None:
                staged.release()
            return granted
        with _staging:
            if not self._is_staged:
                self._staged = pool.stage(self.content.buffers, self._num_readers)
                self._is_staged = True
        return None if self._staged is None else self._staged.grant(reader)  # let go of when this parcel is


def has_device_tensors(buffers: Sequence[object]) -> bool:
    """Whether some of what is to be sent lies on a device."""
    return any(isinstance(buffer, DeviceTensor) for buffer in buffers)

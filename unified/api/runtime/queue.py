"""A queue that workers of a job share: `DataQueue`, and its statistics."""

from unified.queue.client import DataQueue
from unified.queue.core.state import QueueStats

__all__ = ["DataQueue", "QueueStats"]

"""A queue that workers of a job share: `DataQueue`, and what it says of itself."""

from unified.queue.client import DataQueue
from unified.queue.core.state import QueueStats

__all__ = ["DataQueue", "QueueStats"]

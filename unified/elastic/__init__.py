"""In-place recovery of training loops: `ElasticState`, `elastic`, `ElasticSampler`; see docs/elastic.md.

Importing it tells NCCL's watchdog not to end a process whose peer has died, for process groups made after that.
"""

import os
from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.elastic.loop import elastic
    from unified.elastic.sampler import ElasticSampler
    from unified.elastic.state import ElasticState

__all__ = ["ElasticSampler", "ElasticState", "elastic"]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "unified.elastic.loop": ["elastic"],
        "unified.elastic.sampler": ["ElasticSampler"],
        "unified.elastic.state": ["ElasticState"],
    },
)

os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")

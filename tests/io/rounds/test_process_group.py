"""Leaving process groups: what a round that broke leaves behind in torch must not reach the next one."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from tests.support.deadlines import missed
from unified.rounds.process_group import leave


def test_a_group_that_never_came_up_does_not_number_the_next_one() -> None:
    """A new process, which numbers its groups from 0, would wait for other keys of the store than this one."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
    with pytest.raises(RuntimeError):  # there is no rank 1
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=missed(0.2)))
    leave()
    assert _world.group_count == 0

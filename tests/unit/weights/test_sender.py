"""`sync_weights` refuses what makes no sense before it does anything."""

from typing import Any

import pytest
import torch

from unified.errors import NotInWorkerError, UsageError
from unified.weights.handshake import SyncOptions
from unified.weights.sender import ranks_for, sync_weights
from unified.weights.state_dict import OutgoingStateDict
from unified.worker.context import ActorInfo

GOOD = SyncOptions(version=None, dtype=None, bucket_bytes=1, timeout=1.0, wait=True, force=False, collective=None)


def call(actors: list[ActorInfo], **order: Any) -> None:
    sync_weights("rollout", actors, {}, "default", GOOD._replace(**order))


def actor() -> ActorInfo:
    spec: Any = None
    return ActorInfo(
        name="r", role="r", rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, role_spec=spec
    )


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"version": 0}, "version=0: it must be a whole number from 1 up"),
        ({"version": "7"}, "version='7'"),
        ({"version": True}, "version=True"),
        ({"bucket_bytes": 0}, "bucket_bytes and timeout must be above zero"),
        ({"timeout": 0}, "bucket_bytes and timeout must be above zero"),
        ({"require": 0}, "require=0: the group has 1 workers"),
        ({"require": 2}, "require=2: the group has 1 workers"),
    ],
)
def test_orders_that_make_no_sense(order: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call([actor()], **order)


def test_a_group_without_actors() -> None:
    with pytest.raises(UsageError, match=r"No actors in the role group\."):
        call([])


def test_outside_a_worker() -> None:
    with pytest.raises(NotInWorkerError):
        call([actor()])


def test_together_without_a_process_group() -> None:
    with pytest.raises(UsageError, match="this process is in no process group"):
        ranks_for(OutgoingStateDict({"w": torch.ones(1)}), together=True)

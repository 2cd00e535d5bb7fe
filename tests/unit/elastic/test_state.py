"""State of an elastic loop, without a process group."""

from typing import Any

import torch

from unified.elastic import ElasticState
from unified.elastic.core.agreement import StepAgreement


def test_gradients_of_a_window_that_a_round_cuts_are_dropped() -> None:
    model = torch.nn.Linear(2, 1)
    loose = torch.nn.Parameter(torch.ones(1))  # in no model
    optimizer = torch.optim.SGD([*model.parameters(), loose])
    state: Any = ElasticState(model=model, optimizer=optimizer)
    state.commit()
    (model(torch.ones(1, 2)) * loose).sum().backward()
    state._begin(StepAgreement(step=1), rank=0)
    assert [each.grad for each in [*model.parameters(), loose]] == [None] * 3


class Counter:
    def __init__(self) -> None:
        self.commits = 0

    def on_commit(self) -> None:
        self.commits += 1


def test_objects_of_the_user_are_told_of_commits() -> None:
    state: Any = ElasticState(counter=Counter())
    state.commit(batches=4)
    assert (state.counter.commits, state.step) == (1, 1)

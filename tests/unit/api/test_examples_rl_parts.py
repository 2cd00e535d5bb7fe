"""The parts of examples/rl that decide what is learnt."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "examples" / "rl"


@pytest.fixture
def rl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its modules, which have names that others may want afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("model", "task", "grpo")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


def test_score_is_the_share_of_digits_in_place(rl: Any) -> None:
    separator = rl.model.SEPARATOR
    texts = torch.tensor(
        [[3, 1, 2, 2, separator, 1, 2, 2, 3], [3, 1, 2, 2, separator, 1, 2, 3, 3], [5, 6, 7, 8, separator, 8, 7, 6, 5]]
    )
    assert rl.task.score(texts).tolist() == [1.0, 0.75, 0.0]


def test_advantages_compare_within_a_group(rl: Any) -> None:
    found = rl.grpo.advantages(torch.tensor([0.0, 1.0, 0.5, 0.5]), group=2)
    assert found[0] == -found[1] < 0
    assert found[2:].tolist() == [0.0, 0.0], "a group of equals has nothing to learn from"


def test_answers_and_their_log_probabilities(rl: Any) -> None:
    policy, same = rl.model.Policy(3, seed=1), rl.model.Policy(3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), same.parameters(), strict=True))
    torch.nn.init.normal_(policy.head.weight)
    prompts = rl.task.draw_prompts(5, 3, seed=2)
    texts = policy.answer(prompts, torch.Generator().manual_seed(3))
    assert torch.equal(texts[:, :3], prompts)
    assert torch.equal(texts, policy.answer(prompts, torch.Generator().manual_seed(3)))
    expected = policy.logits(texts[:, :4])[:, -1].log_softmax(-1)[range(5), texts[:, 4]]
    assert torch.allclose(policy(texts)[:, 0], expected)


def test_loss_makes_the_better_answer_likelier_up_to_the_clip(rl: Any) -> None:
    old = torch.full((2, 1), -2.0)
    for step, is_clipped in ((0.0, False), (0.5, True)):
        new = (old + torch.tensor([[step], [-step]])).requires_grad_()
        rl.grpo.loss(new, old, old, torch.tensor([1.0, -1.0]), clip=0.2, kl_weight=0.0).backward()
        assert new.grad is not None
        assert (new.grad.abs().sum() == 0) == is_clipped
        assert is_clipped or new.grad[0] < 0 < new.grad[1], "descent raises the first and lowers the second"


def test_loss_is_dearer_far_from_the_reference(rl: Any) -> None:
    new, flat = torch.full((1, 1), -1.0), torch.zeros(1)
    near, far = (rl.grpo.loss(new, new, new + gap, flat, clip=0.2, kl_weight=1.0) for gap in (0.0, 1.0))
    assert near == 0 < far

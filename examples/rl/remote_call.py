"""Every call between the roles of this job, in one typed place: see examples/actors for the pattern."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple

from torch import Tensor

from unified import FutureSequence, RoleGroup


class Answers(NamedTuple):
    """A group of answers to one prompt."""

    texts: Tensor
    """``(group, 2 * length + 1)``: prompt, separator, answer."""
    log_probabilities: Tensor
    """``(group, length)``, of the answers' digits, under the policy that wrote them."""


def generate(prompts: Tensor, seeds: list[int], group: int, version: int) -> FutureSequence[Answers]:
    """`group` answers to each prompt, from policy `version` or a newer one. Each rollout worker gets a run of prompts.

    Writing them again does no harm, so that a rollout worker that dies on the way is forgiven three times.
    """
    rollouts = RoleGroup("ROLLOUT").with_options(retries=3)
    return rollouts.call_batch(generate, len(prompts), prompts, seeds, group, version)


def score(texts: Tensor) -> Future[Tensor]:
    """The reward of each text, 0 to 1."""
    return RoleGroup("REWARD").call_rank0("score", texts)


def refer(texts: Tensor) -> Future[Tensor]:
    """Log-probabilities of the answers' digits under the reference policy."""
    return RoleGroup("REFERENCE").call_rank0("refer", texts)


def send_weights() -> None:
    """Have the actor send its policy to the rollouts again. Nobody waits for that here."""
    RoleGroup("ACTOR").call_rank0("send_weights")

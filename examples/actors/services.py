"""Two kinds of service: they hold state, answer calls, and live until the driver is done."""

from __future__ import annotations

import random
import string

import remote_call

from unified import current_worker, rpc

LETTERS = string.ascii_letters + string.punctuation + " "


class Generator:
    """Changes letters at random. There are several, and each has its own random numbers."""

    def __init__(self) -> None:
        self.random = random.Random(current_worker().actor_info.rank)
        self.rate = 0.1
        self.made = 0

    @rpc(name=remote_call.mutate)
    def mutate(self, parents: list[str]) -> list[str]:
        self.made += len(parents)
        return ["".join(self._maybe_changed(letter) for letter in parent) for parent in parents]

    @rpc(name=remote_call.cool_down)
    def set_rate(self, rate: float) -> None:
        self.rate = rate

    @rpc(name=remote_call.num_mutated)
    def get_made(self) -> int:
        return self.made

    def _maybe_changed(self, letter: str) -> str:
        return self.random.choice(LETTERS) if self.random.random() < self.rate else letter


class Judge:
    """Knows the goal, which the driver never sees."""

    def __init__(self) -> None:
        self.goal: str = current_worker().job_info.user_config.goal

    @rpc(name=remote_call.judge)
    def score(self, texts: list[str]) -> list[float]:
        return [sum(map(str.__eq__, text, self.goal)) / len(self.goal) for text in texts]

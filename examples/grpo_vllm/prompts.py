"""The prompts, each of which is used once, and the reward of an answer."""

from __future__ import annotations

import random

THINGS = """fruit color planet animal country sport metal city river tool tree language bird fish flower vegetable drink
dance game job season month day shape number letter ocean mountain lake island desert continent vehicle instrument song
book film writer painter poet king queen scientist inventor insect spice cheese soup bread dessert nut grain gem fabric
hat shoe coat toy room chair machine engine bridge tower museum""".split()  # noqa: SIM905
ASKED_TWICE = ["Name a fruit.", "Name a planet."]
"""Prompts whose likeliest answers are written down before and after the training."""
MAX_TOKENS = 24


def in_order(seed: int) -> list[str]:
    """Return all prompts in the order in which they are used."""
    asked = [f"Name {'an' if thing[0] in 'aeiou' else 'a'} {thing}." for thing in THINGS]
    return random.Random(seed).sample(asked, len(asked))


def reward(num_tokens: int, *, has_ended: bool) -> float:
    """Return what an answer is worth, 0 to 1: it should end, and be short. A rule takes the place of a judge."""
    return 1 - num_tokens / MAX_TOKENS if has_ended else 0.0

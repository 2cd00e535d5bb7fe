"""The policy: a tiny causal transformer that reads digits and writes digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

DIGITS = 10
SEPARATOR = 10
"""Token between the prompt and the answer."""


class Block(nn.Module):
    """Causal attention, then a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.query_key_value(self.attention_norm(x))
        query, key, value = packed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.mlp(x)
        return out


class Policy(nn.Module):
    """Writes as many digits as it was given.

    A whole text is ``[prompt … separator answer …]``: ``2 * length + 1`` tokens.

    Args:
        length: digits in a prompt, and in its answer.
        width: of the residual stream; a multiple of `heads`.
        layers, heads: blocks, and attention heads in each.
        seed: of the initial weights: every role that makes a policy of one seed has the same one.
    """

    def __init__(self, length: int, width: int = 64, layers: int = 2, heads: int = 4, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.length = length
            self.tokens = nn.Embedding(DIGITS + 1, width)
            self.positions = nn.Embedding(2 * length + 1, width)
            self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, DIGITS)
        nn.init.zeros_(self.head.weight)  # the first policy writes every digit with the same probability
        nn.init.zeros_(self.head.bias)

    def logits(self, texts: Tensor) -> Tensor:
        """``(batch, any length)`` tokens to ``(batch, any length, 10)`` scores of the digit after each."""
        x = self.tokens(texts) + self.positions.weight[: texts.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores

    def forward(self, texts: Tensor) -> Tensor:
        """Log-probability of each digit of the answers: whole texts to ``(batch, length)``."""
        scores = self.logits(texts[:, :-1])[:, self.length :]
        chosen = texts[:, self.length + 1 :, None]
        return scores.log_softmax(-1).gather(-1, chosen).squeeze(-1)

    @torch.no_grad()
    def answer(self, prompts: Tensor, generator: torch.Generator) -> Tensor:
        """Whole texts for ``(batch, length)`` prompts: each digit drawn from what the policy thinks of it."""
        texts = torch.cat([prompts, torch.full((len(prompts), 1), SEPARATOR)], dim=1)
        for _ in range(self.length):  # texts this short need no cache of keys and values
            probabilities = self.logits(texts)[:, -1].softmax(-1)
            texts = torch.cat([texts, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
        return texts

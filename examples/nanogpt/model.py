"""A small GPT over bytes: the vocabulary is the 256 values of a byte, so there is no tokenizer to train or to ship.

Attention needs thousands of steps before it learns to look at the byte just before; a causal convolution over the
last few bytes, in front of the blocks, gives it that from the first step and makes a half-minute run worth watching.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
NEAR = 4
"""Bytes that the convolution sees, the present one included."""


class Block(nn.Module):
    """Causal attention, then a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.query_key_value(self.attention_norm(x))
        query, key, value = packed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))
        return x + hidden


class GPT(nn.Module):
    """Predicts the next byte.

    Args:
        layers: number of blocks.
        width: size of the residual stream; a multiple of `heads`.
        heads: attention heads in each block.
        context: longest input, in bytes.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.near = nn.Conv1d(width, width, NEAR)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)
        self.head.weight = self.bytes.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats a byte, of `targets` given `inputs`, both ``(batch, length)`` int64."""
        logits = self.logits(inputs)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def logits(self, inputs: Tensor) -> Tensor:
        """``(batch, length)`` bytes to ``(batch, length, 256)`` scores of the byte after each."""
        x = self.bytes(inputs)
        x = x + self.near(functional.pad(x.transpose(1, 2), (NEAR - 1, 0))).transpose(1, 2)
        x = x + self.positions.weight[: inputs.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores

    @torch.no_grad()
    def write(self, prompt: bytes, length: int, temperature: float, generator: torch.Generator) -> bytes:
        """`prompt` and the `length` bytes that the model puts after it."""
        device = self.bytes.weight.device
        written = list(prompt)
        for _ in range(length):
            window = torch.tensor([written[-self.context :]], device=device)
            probabilities = (self.logits(window)[0, -1] / temperature).softmax(-1).cpu()
            written.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(written)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)

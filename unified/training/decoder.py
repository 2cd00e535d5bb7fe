"""A decoder of the Llama family in plain torch: the model from scratch for runs without transformers.

RMS norms before each part (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), grouped-query attention
(Ainslie et al. 2023), a SwiGLU feed-forward part (Shazeer 2020), and no biases.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, cast

import msgspec
import torch
from msgspec import Meta
from torch import nn
from torch.nn import functional

from unified.errors import UsageError, nearest
from unified.training.tokenizer import BYTE_VOCAB_SIZE

INIT_STD = 0.02
_Size = Annotated[int, Meta(ge=1)]


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, by the names of Llama's configuration in transformers."""

    vocab_size: _Size = BYTE_VOCAB_SIZE
    hidden_size: _Size = 256
    intermediate_size: _Size = 688
    num_hidden_layers: _Size = 4
    num_attention_heads: _Size = 4
    num_key_value_heads: _Size | None = None
    """None: as many as `num_attention_heads`."""
    max_position_embeddings: _Size = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False

    @classmethod
    def parse(cls, given: dict[str, Any], name: str) -> DecoderConfig:
        """Check a configuration. If it has a `model_type`, it may have keys that are not used here.

        Args:
            name: name of the configuration, for errors.
        """
        unknown = [key for key in given if key not in cls.__struct_fields__ and key != "model_type"]
        if unknown and "model_type" not in given:
            raise UsageError(
                f"{name}: there is no key {unknown[0]!r}.{nearest(unknown[0], cls.__struct_fields__)} "
                f"There are {', '.join(cls.__struct_fields__)}, and model_type."
            )
        try:
            config = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"{name}: {str(error).replace('`', '')}.") from None
        heads, groups = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        if config.hidden_size % (2 * heads) or heads % groups:
            raise UsageError(
                f"{name}: hidden_size {config.hidden_size} must be a multiple of twice num_attention_heads {heads}, "
                f"and that one of num_key_value_heads {groups}."
            )
        return config


class DecoderOutput(NamedTuple):
    """Result of a forward pass, as models of transformers name it."""

    logits: torch.Tensor
    """Shape (rows, positions, vocab_size)."""


class Decoder(nn.Module):
    """A causal language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INIT_STD)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> DecoderOutput:
        """Return the logits of the token after each position.

        Args:
            input_ids: shape (rows, positions).
            attention_mask: ignored: rows are padded on the right, and earlier positions do not see the padding.
        """
        hidden = self.embed_tokens(input_ids)
        rotation = _rotation(self.config, input_ids.shape[1], hidden)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        return DecoderOutput(self.lm_head(self.norm(hidden)))


class DecoderLayer(nn.Module):
    """Attention and a feed-forward part, each added to its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_attention_heads
        self.num_groups = config.num_key_value_heads or self.num_heads
        self.head_size = size // self.num_heads
        self.attention_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, self.num_groups * self.head_size, bias=False)
        self.v_proj = nn.Linear(size, self.num_groups * self.head_size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.mlp_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden), rotation)
        inner = self.mlp_norm(hidden)
        fed: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(inner)) * self.up_proj(inner))
        return hidden + fed

    def _attend(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows, positions, size = hidden.shape

        def heads(values: torch.Tensor, count: int) -> torch.Tensor:
            return values.view(rows, positions, count, self.head_size).transpose(1, 2)

        queries = _rotate(heads(self.q_proj(hidden), self.num_heads), rotation)
        keys = _rotate(heads(self.k_proj(hidden), self.num_groups), rotation)
        values = heads(self.v_proj(hidden), self.num_groups)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=self.num_groups != self.num_heads
        )
        merged = attended.transpose(1, 2).reshape(rows, positions, size)
        return cast(torch.Tensor, self.o_proj(merged))


def _rotation(config: DecoderConfig, positions: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of each position's angles, each of shape (positions, half a head)."""
    half = config.hidden_size // config.num_attention_heads // 2
    exponents = torch.arange(half, device=like.device, dtype=torch.float32) / half
    angles = torch.outer(torch.arange(positions, device=like.device), config.rope_theta**-exponents)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

"""Our decoder computes what transformers' Llama computes with the same weights."""

import pytest
import torch
import transformers

from unified.training.decoder import Decoder, DecoderConfig

NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def their_name(name: str) -> str:
    """The name of one of our parameters there."""
    if name.startswith("lm_head"):
        return name
    for ours, theirs in NAMES.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return f"model.{name}"


@pytest.mark.parametrize("groups", [None, 2])
def test_it_is_llama(groups: int | None) -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    ours = Decoder(DecoderConfig(num_key_value_heads=groups, **sizes))  # type: ignore[arg-type]
    config = transformers.LlamaConfig(vocab_size=259, num_key_value_heads=groups or 4, **sizes)
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict({their_name(name): values for name, values in ours.state_dict().items()}, strict=True)
    tokens = torch.randint(0, 259, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)

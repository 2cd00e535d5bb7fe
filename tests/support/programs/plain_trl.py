"""A plain script of TRL, to compare runs with: it prints the losses of its steps, from rank 0, as a JSON line.

``plain_trl.py METHOD MODEL ROWS ARGUMENTS``; the rows are in TRL's form, and the arguments are those of TRL's class,
and ``lora``: those of PEFT's `LoraConfig`.
"""

import json
import os
import sys
import tempfile

import peft
import torch
import transformers
import trl
from datasets import Dataset

CLASSES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}


def main(method: str, model: str, rows: str, arguments: str) -> None:
    torch.set_num_threads(1)
    given = json.loads(arguments)
    lora = given.pop("lora", None)
    auto = transformers.AutoModelForSequenceClassification if method == "reward" else transformers.AutoModelForCausalLM
    torch.manual_seed(42)
    loaded = auto.from_pretrained(model, **({"num_labels": 1} if method == "reward" else {}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    with open(rows) as file, tempfile.TemporaryDirectory() as folder:
        dataset = Dataset.from_list([json.loads(line) for line in file])
        config = getattr(trl, f"{CLASSES[method]}Config")(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", logging_steps=1, save_strategy="no", **given
        )
        trainer = getattr(trl, f"{CLASSES[method]}Trainer")(
            model=loaded.float(),
            args=config,
            train_dataset=dataset,
            processing_class=tokenizer,
            peft_config=None if lora is None else peft.LoraConfig(**lora),
        )
        trainer.train()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps([each["loss"] for each in trainer.state.log_history if "loss" in each]))


main(*sys.argv[1:])

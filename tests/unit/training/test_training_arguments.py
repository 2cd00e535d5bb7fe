"""`extra_args`: names, types and limits, each error naming what is wrong."""

from typing import Any

import pytest

from unified.errors import OptionError
from unified.training.arguments import HfArguments, MetaArguments, parse_arguments


def test_the_documents_payload() -> None:
    arguments = parse_arguments("hf", {"max_steps": 50000, "lr": 3e-5, "batch_size": 128})
    assert (arguments.max_steps, arguments.lr, arguments.batch_size) == (50000, 3e-5, 128)
    assert arguments.given == {"max_steps", "lr", "batch_size"}
    assert arguments.dataset_text_field == "text"


def test_names_of_transformers_mean_the_same() -> None:
    arguments = parse_arguments("meta", {"learning_rate": 1, "gradient_accumulation_steps": 4, "num_train_epochs": 2})
    assert isinstance(arguments, MetaArguments)
    assert (arguments.lr, arguments.gradient_accumulation, arguments.num_epochs) == (1.0, 4, 2.0)


def test_hf_leaves_the_rest_to_transformers() -> None:
    arguments = parse_arguments("hf", {"lr": 1e-4, "adam_beta2": 0.95})
    assert isinstance(arguments, HfArguments)
    assert arguments.rest == {"adam_beta2": 0.95}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": "fast"}, "lr='fast'.*Expected float, got str"),
        ({"lr": -1}, "lr=-1.*>= 0"),
        ({"batch_size": 0}, "batch_size=0.*>= 1"),
        ({"batch_size": 1.5}, "batch_size=1.5.*Expected int, got float"),
        ({"batch_size": True}, "batch_size=True.*Expected int, got bool"),
        ({"allow_non_finite_loss": 1}, "allow_non_finite_loss=1.*Expected bool, got int"),
        ({"max_steps": [1]}, r"max_steps=\[1\]"),
        ({"save_steps": None}, "save_steps=None"),
        ({"precision": "int8"}, "precision='int8'"),
        ({"eval_fraction": 0.9}, "eval_fraction=0.9"),
        ({"dataset_text_field": 3}, "dataset_text_field=3.*Expected str"),
        ({"save_step": 3}, "meta has no argument 'save_step'. Did you mean 'save_steps'"),
        ({"given": ["lr"]}, "no argument 'given'"),
        ({"lr": 1, "learning_rate": 1}, "both 'lr' and another name of the same, 'learning_rate'"),
    ],
)
def test_a_wrong_argument_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_arguments("meta", given)
    assert "\n" not in str(caught.value)

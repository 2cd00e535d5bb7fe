"""Methods of the hf framework, and the fields of their classes, as ``method_fields.json`` has them.

``make docs`` makes that file from transformers and TRL, so that a gateway checks arguments without them. A run checks
its arguments again, with the fields of the classes that are installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

import msgspec

from unified.errors import OptionError, nearest
from unified.training.aliases import ALIASES, REFUSED, VALUES


class TrainingMethod(NamedTuple):
    """A method of training."""

    forms: tuple[str, ...]
    """Forms of rows that it takes."""
    title: str
    """Class of its arguments."""


METHODS = {
    "pretrain": TrainingMethod(("text",), "transformers.TrainingArguments"),
    "sft": TrainingMethod(("text", "completion", "messages"), "trl.SFTConfig"),
    "dpo": TrainingMethod(("preference",), "trl.DPOConfig"),
    "kto": TrainingMethod(("label", "preference"), "trl.KTOConfig"),
    "reward": TrainingMethod(("preference",), "trl.RewardConfig"),
}
"""Methods of the hf framework."""
FILE = Path(__file__).with_name("method_fields.json")
Fields = Mapping[str, tuple[str, Any]]
"""Type and default of each field. A type is a name such as ``float``, a text in quotes, or several with ``|``."""
_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "dict": dict[str, Any], "None": None}
_TYPES |= {"list[str]": list[str], "list[float]": list[float]}


@cache
def fields_of(*methods: str) -> Fields:
    """Return the fields of the classes of methods; a field that several have is that of the last one."""
    found: dict[str, dict[str, tuple[str, Any]]] = json.loads(FILE.read_text())
    return {**found["pretrain"], **{name: field for method in methods for name, field in found[method].items()}}


def check_rest(rest: Mapping[str, Any], methods: Iterable[str], fields: Fields, ours: Iterable[str]) -> dict[str, Any]:
    """Return arguments that are none of our own, checked.

    Args:
        methods: methods that the run may have.
        fields: fields of their classes.
        ours: names of our own arguments, for errors.

    Raises:
        OptionError: an unknown name, a name that is refused, or a value of the wrong type.
    """
    checked = {}
    for name, value in rest.items():
        if name in REFUSED:
            raise OptionError(f"extra_args: {name!r} cannot be given: {REFUSED[name]}.")
        if name not in fields:
            hint = nearest(name, {*fields, *ours, *ALIASES, *VALUES} - REFUSED.keys())
            classes = " or ".join(METHODS[method].title for method in methods)
            own = ", ".join(sorted(ours))
            raise OptionError(f"extra_args: hf has no argument {name!r}.{hint} It has {own} and those of {classes}.")
        checked[name] = convert(name, value, _type_of(fields[name][0]), fields[name][0])
    return checked


def convert(name: str, value: Any, wanted: Any, spelled: str = "") -> Any:
    """Return a value of an argument as the wanted type; raise OptionError if it is none."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value  # YAML and jq write 50.0
    try:
        return msgspec.convert(whole, wanted)
    except msgspec.ValidationError as error:
        reason = f"it must be {spelled}" if spelled else str(error).replace("`", "")
        raise OptionError(f"extra_args: {name}={value!r} is not allowed: {reason}.") from None


@cache
def _type_of(spelled: str) -> Any:
    texts = re.findall(r"'([^']*)'", spelled)
    types = [_TYPES[each] for each in spelled.split("|") if not each.startswith("'")]
    return Union[(*types, *([Literal[tuple(texts)]] if texts else []))]

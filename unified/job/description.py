"""Base of the models of a job's description: an unknown name is an error that says the nearest known one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from unified.errors import nearest

EnvValue = Annotated[str, Field(coerce_numbers_to_str=True)]
"""Value of an environment variable; numbers are taken as well: ``{"OMP_NUM_THREADS": 4}``."""

Envs = Annotated[dict[str, EnvValue], BeforeValidator(lambda value: {} if value is None else value)]
"""Environment variables."""

Seconds = Annotated[
    float, BeforeValidator(lambda value: value.total_seconds() if isinstance(value, timedelta) else value)
]
"""A duration: a number of seconds, or a `timedelta`."""


def plain_config(value: Any) -> Any:
    """Return the config of a role as a plain dict: of a DictConfig, with interpolations resolved; of an
    argparse.Namespace; of None, empty. Anything else is left for its field to refuse."""
    if value is None:
        return {}
    if isinstance(value, argparse.Namespace):
        return vars(value)
    omegaconf = sys.modules.get("omegaconf")  # if nobody imported it, this is none of its objects
    if omegaconf is not None and isinstance(value, omegaconf.DictConfig):
        try:
            return omegaconf.OmegaConf.to_container(value, resolve=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            raise ValueError(f"the config cannot be resolved: {error}") from None
    return value


PlainConfig = Annotated[dict[str, Any], BeforeValidator(plain_config)]
"""A config of a role; see `plain_config`."""


class Description(BaseModel):
    """Base of the models. A field may have several names (aliases); one of them may be given."""

    model_config = ConfigDict(populate_by_name=True, extra="forbid", defer_build=True)

    thing: ClassVar[str] = "description"
    """Name of the thing in error messages."""
    input_names: ClassVar[frozenset[str]] = frozenset()
    """Names that are taken as input, though no field has them."""
    hint: ClassVar[str] = ""
    """Hint that is added when an unknown name is met."""

    @model_validator(mode="before")
    @classmethod
    def _names_must_exist(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        names = field_of(cls)
        given: dict[str, str] = {}
        for key in data:
            if key not in names:
                known = sorted({*names, *cls.input_names})
                raise ValueError(
                    f"a {cls.thing} has no {key!r}.{nearest(str(key), known)} There are: {', '.join(known)}.{cls.hint}"
                )
            if names[key] in given:
                raise ValueError(f"{given[names[key]]!r} and {key!r} are two names of one field: give one of them.")
            given[names[key]] = key
        return data


def field_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the field's own name by every name that may be given for it."""
    found: dict[str, str] = {}
    for field, info in model.model_fields.items():
        found[field] = field
        if isinstance(info.validation_alias, AliasChoices):
            found.update({str(alias): field for alias in info.validation_alias.choices})
    return found

"""Base of the models of a job's description: an unknown name is an error that says the nearest known one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from unified.errors import JobError, nearest
from unified.job.driver import is_text
from unified.job.names import num_ports

if TYPE_CHECKING:
    Checked = type
else:

    class Checked(type(BaseModel)):
        """Metaclass of models whose constructor raises `JobError`. Models within models are built without it."""

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                raise job_error(error) from None


MAX_ERRORS = 10
"""Errors of one description that are listed; the rest are counted."""
_MAX_VALUE = 80
_CALLS = {
    "node_number": "node_num",
    "accelerator_type": "device_type",
    "user_config": "config",
    "global_envs": "global_env",
    "envs": "env",
}
"""Methods of a builder by the field that they set, where the names differ."""

EnvValue = Annotated[str, Field(coerce_numbers_to_str=True)]
"""Value of an environment variable; numbers are taken as well: ``{"OMP_NUM_THREADS": 4}``."""


def _check_envs(envs: dict[str, str]) -> dict[str, str]:
    for name, value in envs.items():
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"{name!r} is no name of a variable: it is empty, or has '=' or NUL in it.")
        if "\0" in value:
            raise ValueError(f"the value of {name} has the character NUL.")  # it may be a secret: not repeated
        if not is_text(name + value):
            raise ValueError(f"the variable {name!r} or its value is not UTF-8.")
    num_ports(envs.values())
    return envs


Envs = Annotated[
    dict[str, EnvValue],
    BeforeValidator(lambda value: {} if value is None else value),
    AfterValidator(_check_envs),
]
"""Environment variables."""

Seconds = Annotated[
    float, BeforeValidator(lambda value: value.total_seconds() if isinstance(value, timedelta) else value)
]
"""A duration: a number of seconds, or a `timedelta`."""


def plain_config(value: Any) -> Any:
    """Return the config of a role as a plain dict, from a DictConfig (interpolations are resolved), an
    argparse.Namespace or None (empty). Other values are returned as they are, for the field to check."""
    if value is None:
        return {}
    if isinstance(value, argparse.Namespace):
        return vars(value)
    omegaconf = sys.modules.get("omegaconf")  # if it is not imported, the value is none of its objects
    if omegaconf is not None and isinstance(value, omegaconf.DictConfig):
        try:
            return omegaconf.OmegaConf.to_container(value, resolve=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            raise ValueError(f"the config cannot be resolved: {error}") from None
    return value


PlainConfig = Annotated[dict[str, Any], BeforeValidator(plain_config)]
"""A config of a role; see `plain_config`."""


class DescriptionError(JobError, ValidationError):
    """An invalid description of a job, as `JobError` and as the error of pydantic that scripts of upstream expect."""

    def __str__(self) -> str:
        """Return one sentence per line, which names role and field; of many errors, only the first."""
        lines = [line for item in self.errors() for line in _lines(item)]
        rest = [f"and {len(lines) - MAX_ERRORS} more errors."] if len(lines) > MAX_ERRORS else []
        return "\n".join([*lines[:MAX_ERRORS], *rest])

    def __repr__(self) -> str:  # pydantic's shows values, which may be secrets
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> Any:  # the values of the user in it may refuse a pickle
        return JobError, (str(self),)


def job_error(error: ValidationError) -> JobError:
    """Return an error of pydantic as one that is a `JobError`, too."""
    return cast(JobError, DescriptionError.from_exception_data(error.title, cast(Any, error.errors())))


def _lines(item: Any) -> list[str]:
    names = [str(part) for part in item["loc"]]
    where = ""
    if len(names) > 1 and names[0] == "workloads":  # the third is the kind of role
        where, names = f"role {names[1]!r}: ", names[3:]
    names[:1] = [_CALLS.get(name, name) for name in names[:1]]
    field = ".".join(names)
    if item["type"] == "value_error":  # our own sentences: without a field, one per line
        said = str(item["ctx"]["error"])
        return [f"{where}{field}: {' '.join(said.split())}"] if field else [where + line for line in said.split("\n")]
    if item["type"] == "union_tag_invalid":
        return [f"{where}backend is {item['ctx']['tag']!r}: it must be one of {item['ctx']['expected_tags']}."]
    if item["type"] == "missing":
        return [f"{where}{field} is missing: it has to be given."]
    if not field:
        return [f"{where}{item['msg']}."]
    value = repr(item["input"])
    value = value if len(value) <= _MAX_VALUE else f"{value[:_MAX_VALUE]}…"
    return [f"{where}{field} is {value}: {item['msg'].replace('Input should be', 'it must be')}."]


class Description(BaseModel, metaclass=Checked):
    """Base of the models, which raise `JobError`. A field may have several names (aliases); only one may be given."""

    model_config = ConfigDict(populate_by_name=True, extra="forbid", defer_build=True)

    thing: ClassVar[str] = "description"
    """Name of the thing in error messages."""
    input_names: ClassVar[frozenset[str]] = frozenset()
    """Names that are accepted as input and are no fields."""
    hint: ClassVar[str] = ""
    """Hint that is added when an unknown name is met."""

    @classmethod
    def model_validate(cls, *args: Any, **options: Any) -> Self:
        try:
            return super().model_validate(*args, **options)
        except ValidationError as error:
            raise job_error(error) from None

    @classmethod
    def model_validate_json(cls, *args: Any, **options: Any) -> Self:
        try:
            return super().model_validate_json(*args, **options)
        except ValidationError as error:
            raise job_error(error) from None

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
    """Return the fields' own names, by every name that may be given for them."""
    found: dict[str, str] = {}
    for field, info in model.model_fields.items():
        found[field] = field
        if isinstance(info.validation_alias, AliasChoices):
            found.update({str(alias): field for alias in info.validation_alias.choices})
    return found

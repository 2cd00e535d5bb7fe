"""Counterpart of ``dlrover.python.unified.util.config_util``: OmegaConf, argparse and the environment."""

from __future__ import annotations

import argparse
import os
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf


def args_2_omega_conf(args: argparse.Namespace) -> DictConfig:
    return OmegaConf.create(vars(args))


def omega_conf_2_args(conf: DictConfig) -> argparse.Namespace:
    """Return a namespace of the first level of a config; the levels below stay configs."""
    return argparse.Namespace(**{str(key): value for key, value in conf.items()})


def convert_str_values(config: Any, convert_none: bool = True, convert_digit: bool = True) -> None:
    """Replace texts in a config, and in all configs in it, by the values that they spell.

    Args:
        config: changed in place.
        convert_none: ``"None"`` becomes None.
        convert_digit: ``"12"`` becomes an int, ``"1e-3"`` a float.
    """
    if not isinstance(config, DictConfig | ListConfig):
        return
    keys: Any = list(config) if isinstance(config, DictConfig) else range(len(config))
    for key in keys:
        value = config[key]
        if isinstance(value, str):
            config[key] = _meant(value, convert_none, convert_digit)
        else:
            convert_str_values(value, convert_none, convert_digit)


def read_dict_from_envs(prefix: str) -> dict[str, str]:
    """The environment variables that begin with `prefix`, by the rest of their names in small letters."""
    return {name.removeprefix(prefix).lower(): value for name, value in os.environ.items() if name.startswith(prefix)}


def _meant(text: str, convert_none: bool, convert_digit: bool) -> Any:
    if convert_none and text == "None":
        return None
    if convert_digit:
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    return text

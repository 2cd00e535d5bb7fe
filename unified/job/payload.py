"""Values of users that travel in a job's description. The driver encodes them; only the job's own workers decode them.

Plain data travels as MessagePack, a DictConfig as the plain data in it, and any other object as a pickle. Lambdas,
local classes and objects of the driver's script need a cloudpickle. The value comes back equal and of the same type, or
`encode` says why it cannot.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import msgspec

from unified.errors import JobError, UsageError
from unified.job.by_value import dump_code, dumps
from unified.job.spec import Blob

_SCALARS = (type(None), bool, int, float, str, bytes)


def encode(value: object, what: str = "config") -> Blob:
    """Return the bytes of a value, named `what` in error messages; JobError: it cannot be pickled."""
    if value is None:
        return Blob()
    if (packed := _pack(value)) is not None:
        return Blob(codec="msgpack", data=packed)
    if _is_plain_config(value):
        from omegaconf import OmegaConf

        if (packed := _pack(OmegaConf.to_container(value, resolve=True))) is not None:
            return Blob(codec="omegaconf", data=packed)
    try:
        return Blob(codec="pickle", data=dumps(value))
    except Exception as error:
        raise JobError(
            f"the {what}, of type {type(value).__qualname__}, cannot be sent to workers: {error}."
        ) from error


def encode_code(value: object, what: str) -> Blob:
    """Return the bytes of a function or class whose module workers cannot import; JobError: it cannot be pickled."""
    try:
        return Blob(codec="pickle", data=dump_code(value))
    except Exception as error:
        raise JobError(
            f"the {what} cannot be sent to workers: {error}. Make such objects inside of it, or put it in a module "
            "that workers can import."
        ) from error


def decode(blob: Blob, what: str = "config") -> Any:
    """Return the value that was encoded. For workers only: a pickle runs code of its author.

    UsageError: the value's class cannot be imported here, or refuses its bytes.
    """
    try:
        match blob.codec:
            case "none":
                return None
            case "msgpack":
                return msgspec.msgpack.decode(blob.data)
            case "omegaconf":
                from omegaconf import DictConfig

                return DictConfig(msgspec.msgpack.decode(blob.data))
            case "pickle":
                return pickle.loads(blob.data)
    except Exception as error:
        raise UsageError(
            f"the {what} of this job cannot be read in a worker: {type(error).__name__}: {error}. "
            f"The modules its classes come from must be importable on every node."
        ) from error


def _pack(value: object) -> bytes | None:
    try:
        return msgspec.msgpack.encode(value) if _is_plain(value) else None
    except (OverflowError, RecursionError, UnicodeEncodeError):  # beyond 64 bits, refers to itself, lone surrogates
        return None


def _is_plain(value: object) -> bool:
    """Return True if MessagePack keeps the value: a tuple would come back as a list, an enum as its value."""
    kind = type(value)
    if kind is list:
        return all(map(_is_plain, value))  # type: ignore[call-overload]  # `kind` says that it is a list
    if kind is dict:
        return all(type(k) in _SCALARS and _is_plain(v) for k, v in value.items())  # type: ignore[attr-defined]
    return kind in _SCALARS


def _is_plain_config(value: object) -> bool:
    """Return True for a DictConfig without flags, which plain data would lose."""
    omegaconf = sys.modules.get("omegaconf")  # if it is not imported, the value is none of its objects
    if omegaconf is None or not isinstance(value, omegaconf.DictConfig):
        return False
    return not (omegaconf.OmegaConf.is_struct(value) or omegaconf.OmegaConf.is_readonly(value))

"""Settings of data, barriers and checkpoints: the reference document's TOML file, and its environment variables.

A file has the sections ``[coordinator]``, ``[storage]``, ``[checkpoint]`` and ``[dataset]``, whose keys are the fields
of the classes below. The file is given to `load`, or named by ``UNIFIED_CONFIG``. The environment overrides it:
``UNIFIED_<SECTION>_<KEY>`` for each key, such as ``UNIFIED_CHECKPOINT_KEEP_LAST_N=3``. A worker's own place comes from
``COORDINATOR_URL``, ``UNIFIED_SPACE``, ``WORKER_ID``, ``RANK`` and ``WORLD_SIZE``. An empty variable counts as unset.

The log level is that of ``UNIFIED_LOG_LEVEL``, else of ``DLROVER_LOG_LEVEL``, else of ``RUST_LOG``.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, get_args, get_type_hints

import msgspec

from unified.config.addresses import parse_coordinator, split_address
from unified.config.logging import VARIABLES as LOG_VARIABLES
from unified.config.logging import Level, asked_level
from unified.errors import OptionError, UsageError, nearest

FILE_VARIABLE = "UNIFIED_CONFIG"
VARIABLES = {
    "coordinator_url": "COORDINATOR_URL",
    "space": "UNIFIED_SPACE",
    "worker_id": "WORKER_ID",
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
}
"""Variables of a worker's own place, which no file can set."""

Positive = Annotated[int, msgspec.Meta(ge=1)]


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the coordinator, and the times by which it notices that a worker is lost."""

    address: str = "127.0.0.1:7077"
    """Address of the master: ``host:port``; port 0: any that is free."""
    heartbeat_interval_ms: Positive = 1000
    """Interval of a worker's heartbeats. The master's interval and time-out are the defaults of all workers."""
    heartbeat_timeout_ms: Positive = 30_000
    """Silence after which a worker is lost; above the interval."""


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Place of checkpoints, if a `CheckpointManager` is given none."""

    backend: Literal["local", "s3"] = "local"
    bucket: str = ""
    """Bucket, required for S3."""
    region: str = ""
    """Region of the bucket. Empty: the one that the standard chain of S3 clients finds."""


Compression = Literal["gzip", "zstd"]
"""Compressions of checkpoints; `unified.checkpoint.payload.COMPRESSIONS` has them."""


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Interval, number and compression of checkpoints."""

    interval_steps: Positive | None = None
    """Steps between saves: a save at another step does nothing. None: every save counts."""
    keep_last_n: Positive = 5
    compression: Compression | None = None
    """Compression; in a file or a variable, ``none`` means that there is none."""


class DatasetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Shard size and read-ahead of datasets."""

    default_shard_size: Positive = 10_000
    """Samples of a shard, if `register` is given no number."""
    prefetch_shards: Annotated[int, msgspec.Meta(ge=0)] = 2
    """Shards that are read ahead of the one in use."""


SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "coordinator": CoordinatorSettings,
    "storage": StorageSettings,
    "checkpoint": CheckpointSettings,
    "dataset": DatasetSettings,
}


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, checked."""

    coordinator: CoordinatorSettings = CoordinatorSettings()
    storage: StorageSettings = StorageSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    dataset: DatasetSettings = DatasetSettings()
    coordinator_url: str = "local"
    """Coordinator outside a job: ``http://host:port``, ``tcp://host:port``, ``host:port``, or ``local`` for one in this
    process. Several workers have to name one."""
    space: str = ""
    """Space of one training outside a job: workers, datasets, barriers and checkpoints of one space are invisible
    in others."""
    worker_id: str = ""
    """Id of this worker; empty: ``worker-RANK``."""
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Rank of this worker; below the world size, if that is given."""
    world_size: Positive = 1
    """Number of workers."""
    log_level: Level = "info"
    """Log level of the daemons; if it is set, also of the ``unified`` loggers of scripts and workers, in a job too. Not
    set: ``DLROVER_LOG_LEVEL``, then ``RUST_LOG``."""
    given: frozenset[tuple[str, str]] = frozenset()
    """Section and key of all settings from the file or a variable; the section of a worker's own place is empty."""

    def says(self, section: str, key: str) -> bool:
        """Return True if a setting was given, rather than being the default."""
        return (section, key) in self.given

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None) -> Self:
        """Read the settings of this process.

        Args:
            path: TOML file; None: the one that ``UNIFIED_CONFIG`` names, if any.
            env: environment; by default this process's.

        Raises:
            OptionError: the file cannot be read, or something is not known or not allowed; the message names it.
        """
        env = os.environ if env is None else env
        file = path or env.get(FILE_VARIABLE)
        return cls.parse(_read(Path(file)), env, str(file)) if file else cls.parse("", env)

    @classmethod
    def load_shared(cls) -> Self:
        """Read the settings that all processes share. It ignores variables of a worker's own place, even bad ones."""
        own = set(VARIABLES.values())
        return cls.load(env={name: text for name, text in os.environ.items() if name not in own})

    @classmethod
    def load_own(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read the settings of this process alone: its id, its coordinator, its log level."""
        env = os.environ if env is None else env
        own = (*VARIABLES.values(), *LOG_VARIABLES)
        return cls.parse("", {name: env[name] for name in own if name in env})

    @classmethod
    def parse(cls, text: str, env: Mapping[str, str], name: str = "the settings") -> Self:
        """Return the settings of a file's text and an environment; `name` names the file in error messages."""
        given = _from_text(text, name)
        for section, values in _from_env(env).items():
            given.setdefault(section, {}).update(values)
        own = {
            key: _Given(env[name], f"{name}={env[name]!r}", True) for key, name in VARIABLES.items() if env.get(name)
        }
        sections: dict[str, Any] = {name: _section(kind, given.get(name, {})) for name, kind in SECTIONS.items()}
        said = {(section, key) for section, values in {**given, "": own}.items() for key in values}
        place = _checked(cls, own)
        if level := asked_level(env):
            place["log_level"] = level
            said.add(("", "log_level"))
        found = cls(**sections, **place, given=frozenset(said))
        if "world_size" in own and found.rank >= found.world_size:
            raise OptionError(
                f"RANK={found.rank} and WORLD_SIZE={found.world_size}: rank {found.rank} is not in a world of "
                f"{found.world_size}: its ranks are 0 to {found.world_size - 1}."
            )
        return found if found.worker_id else msgspec.structs.replace(found, worker_id=f"worker-{found.rank}")


def variable_of(section: str, key: str) -> str:
    return f"UNIFIED_{section}_{key}".upper()


class _Given(NamedTuple):
    """A value, and its name in error messages. `is_text`: numbers are written in digits."""

    value: Any
    what: str
    is_text: bool


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"settings {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"settings {path} are not TOML: {error}.") from error


def _from_text(text: str, file: str) -> dict[str, dict[str, _Given]]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{file}: this is not TOML: {error}.") from None
    found: dict[str, dict[str, _Given]] = {}
    for name, content in document.items():
        if name not in SECTIONS:
            raise OptionError(f"{file}: there is no section [{name}].{nearest(name, SECTIONS)} {_there_are(SECTIONS)}")
        if not isinstance(content, dict):
            raise OptionError(f"{file}: {name} is a section, to be written as [{name}] with its keys below.")
        keys = SECTIONS[name].__struct_fields__
        values = found[name] = {}
        for key, value in content.items():
            if key not in keys:
                raise OptionError(f"{file}: [{name}] has no key {key!r}.{_nearest_key(name, key)} {_there_are(keys)}")
            values[key] = _Given(value, f"{file}: [{name}] {key} = {value!r}", False)
    return found


def _from_env(env: Mapping[str, str]) -> dict[str, dict[str, _Given]]:
    known = {variable_of(name, key): (name, key) for name, kind in SECTIONS.items() for key in kind.__struct_fields__}
    prefixes = tuple(variable_of(name, "") for name in SECTIONS)
    found: dict[str, dict[str, _Given]] = {}
    for variable, text in sorted(env.items()):
        if text == "" or not variable.startswith(prefixes):
            continue
        if variable not in known:
            raise OptionError(f"environment variable {variable} is no setting.{nearest(variable, known)}")
        name, key = known[variable]
        found.setdefault(name, {})[key] = _Given(text, f"{variable}={text!r}", True)
    return found


def _section(kind: type[msgspec.Struct], given: Mapping[str, _Given]) -> msgspec.Struct:
    section = kind(**_checked(kind, given))
    if isinstance(section, CoordinatorSettings) and section.heartbeat_timeout_ms <= section.heartbeat_interval_ms:
        raise OptionError(
            f"[coordinator] heartbeat_timeout_ms is {section.heartbeat_timeout_ms}, and the interval "
            f"{section.heartbeat_interval_ms}: a worker would be lost between two heartbeats."
        )
    if isinstance(section, StorageSettings) and section.backend == "s3" and not section.bucket:
        raise OptionError(
            f"[storage] backend is s3 and there is no bucket: set bucket, or {variable_of('storage', 'bucket')}."
        )
    return section


def _checked(kind: type[msgspec.Struct], given: Mapping[str, _Given]) -> dict[str, Any]:
    """Return the values, converted to the types of their fields."""
    if not given:
        return {}
    types = get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    for key, (value, what, is_text) in given.items():
        if key == "compression" and isinstance(value, str) and value.lower() == "none":
            values[key] = None
            continue
        try:
            values[key] = msgspec.convert(value, types[key], strict=not is_text)
        except msgspec.ValidationError as error:
            raise OptionError(f"{what}: {_sentence(error, types[key], value)}") from None
        if key == "address":
            _check_address(values[key], what)
        elif key == "coordinator_url":
            _check_url(values[key], what)
    return values


def _check_address(address: str, what: str) -> None:
    try:
        found = split_address(address, schemes=())
    except ValueError as error:
        raise OptionError(f"{what}: {error}") from None
    if found.port is None:
        raise OptionError(f"{what}: host:port is expected.")


def _check_url(url: str, what: str) -> None:
    try:
        parse_coordinator(url)
    except UsageError as error:
        raise OptionError(f"{what}: {error}") from None


def _sentence(error: msgspec.ValidationError, kind: Any, value: object) -> str:
    text = str(error)
    if "enum value" in text or "`str | null`" in text:
        words = [*re.findall(r"'(\w+)'", str(kind)), *(["none"] if type(None) in get_args(kind) else [])]
        return f"there is no such choice.{nearest(str(value), words)} {_there_are(words)}"
    if at_least := re.match(r"Expected `int` >= (\d+)", text):
        return f"it must be at least {at_least[1]}."
    for kind_name, expected in (("int", "a whole number"), ("str", "text in quotes")):
        if text.startswith((f"Expected `{kind_name}`", f"Expected `{kind_name} | null`")):
            return f"{expected} is expected."
    return f"{text}."


def _nearest_key(section: str, key: str) -> str:
    """Return a hint at the nearest key of this section, else of any other."""
    if hint := nearest(key, SECTIONS[section].__struct_fields__):
        return hint
    for name, kind in SECTIONS.items():
        if key in kind.__struct_fields__:
            return f" It belongs in [{name}]."
    return ""


def _there_are(words: Iterable[str]) -> str:
    return f"There are: {', '.join(words)}."

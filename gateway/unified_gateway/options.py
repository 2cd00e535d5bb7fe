"""Options of a gateway, from its environment; the flags of `unified-gateway` replace them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, get_args

from unified.config.addresses import MASTER_VARIABLE
from unified.errors import UsageError

BackendName = Literal["master", "kubeflow"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
PREFIX = "TRAINER_API_"


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """Options of one gateway. Each field has a variable ``TRAINER_API_…``; that of `master` is ``UNIFIED_MASTER``."""

    master: str | None = None
    """Address of the master; None: a cluster on this host alone, for as long as the gateway runs."""
    backend: BackendName = "master"
    token_file: Path | None = None
    namespaces: tuple[str, ...] = ("default",)
    """Namespaces of Kubernetes that the kubeflow backend works in; the first is a payload's default."""
    nodes: int = 1
    """Agents of the cluster of this host."""
    devices: int | None = None
    """Virtual devices of each agent; None: the host's accelerators, or 8 if it has none or `nodes` is above 1."""
    writes_per_s: float = 50.0
    """Requests per second of one client that submit, stop or resume; ten times as many in a burst. 0: no limit."""
    reads_per_s: float = 0.0
    """The same limit for all other requests of one client."""
    head_within_s: float = 15.0
    """Seconds within which a connection has to send the whole head of a request."""
    grpc_bind: str | None = None
    """``HOST:PORT`` of the coordinator's gRPC service; None: there is none."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> GatewayOptions:
        """Return the options that the environment gives.

        Raises:
            UsageError: a variable has a value of the wrong kind.
        """
        env = os.environ if env is None else env
        given = {name.removeprefix(PREFIX): text for name, text in env.items() if name.startswith(PREFIX) and text}
        backend = given.get("BACKEND", "master")
        if backend not in BACKENDS:
            raise UsageError(f"{PREFIX}BACKEND={backend!r} is no backend; there are {', '.join(BACKENDS)}.")
        return cls(
            master=env.get(MASTER_VARIABLE) or None,
            backend="kubeflow" if backend == "kubeflow" else "master",
            token_file=Path(given["TOKEN_FILE"]) if "TOKEN_FILE" in given else None,
            namespaces=_words(given, "NAMESPACES", "default"),
            nodes=_count(given, "NODES") or 1,
            devices=_count(given, "DEVICES"),
            grpc_bind=given.get("GRPC_BIND"),
            writes_per_s=_number(given, "WRITES_PER_S", cls.writes_per_s),
            reads_per_s=_number(given, "READS_PER_S", cls.reads_per_s),
            head_within_s=_number(given, "HEAD_WITHIN_S", cls.head_within_s),
        )


def release() -> str:
    """Return the installed release, such as ``0.1.0``."""
    try:
        return version("unified-runtime")
    except PackageNotFoundError:  # run from a folder, without an installation
        return "0"


def _words(given: Mapping[str, str], name: str, default: str) -> tuple[str, ...]:
    found = tuple(given.get(name, default).replace(",", " ").split())
    if not found:
        raise UsageError(f"{PREFIX}{name}={given[name]!r} names none.")
    return found


def _count(given: Mapping[str, str], name: str) -> int | None:
    if name not in given:
        return None
    if not given[name].isdecimal() or int(given[name]) < 1:
        raise UsageError(f"{PREFIX}{name}={given[name]!r} is no whole number from 1 upwards.")
    return int(given[name])


def _number(given: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise UsageError(f"{PREFIX}{name}={given[name]!r} is no number from 0 upwards.")
    return value

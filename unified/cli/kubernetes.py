"""``unified kubernetes``: manifests of a cluster or of one run, and the command that the pods of a run start."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any, get_args, get_origin, get_type_hints

from unified.cli.options import at_least
from unified.errors import UsageError
from unified.kubernetes import render
from unified.kubernetes.options import ClusterOptions, PodOptions, RunOptions


def cluster_arguments(parser: ArgumentParser) -> None:
    _add_fields(parser, ClusterOptions)


def cluster(**given: Any) -> None:
    """Print the manifests of a cluster that stays: `| kubectl apply -f -`."""
    options = _options(ClusterOptions, given)
    print(render.to_yaml(render.cluster(options), options), end="")


def run_arguments(parser: ArgumentParser) -> None:
    _add_fields(parser, RunOptions)


def run(**given: Any) -> None:
    """Print the manifests of one run, which has agents of its own: `-- unified submit job.py | kubectl apply -f -`."""
    options = _options(RunOptions, given)
    print(render.to_yaml(render.run(options), options), end="")


def pod_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--node-id", required=True, metavar="NAME", help="Name of the agent, and host name of the pod.")
    add("--address", required=True, metavar="ADDRESS", help="At which the other pods reach this one.")
    add(
        "--master-host",
        required=True,
        metavar="NAME",
        help="NAME.SERVICE of the first pod, which has the master and the driver, too.",
    )
    add("--health-bind", required=True, metavar="HOST:PORT", help="Where the agent answers probes.")
    add("--grace", type=at_least(0.0), default=60.0, metavar="S", help="Seconds that workers have to save.")
    add("command", nargs="+", metavar="COMMAND", help="What the driver runs, after --.")


def pod(grace: float, command: Sequence[str], **place: Any) -> int:
    """Run one pod of `unified kubernetes render run`; its manifest calls this, and nobody else has to.

    The exit code is the driver's, and 143 after SIGTERM.
    """
    from unified.config import settings
    from unified.kubernetes.pod import PodPlace, RunPod

    settings.make_folder(settings.home())
    return RunPod(PodPlace(**place, grace_s=grace), command, settings.home() / "master-address").run()


def _add_fields(parser: ArgumentParser, kind: type[PodOptions]) -> None:
    """Add an argument for each field of the options; without it the field has its default."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is None:  # an attribute that msgspec adds
            continue
        typed, text = get_args(hint)[0], get_args(hint)[1].description
        default = getattr(kind(), name)
        help_text = f"{text.removesuffix('.')} ({default})." if default and isinstance(default, str | int) else text
        flag: dict[str, Any] = {"dest": name, "help": help_text, "default": None}
        if typed is bool:
            parser.add_argument(_flag(name), action="store_true", **flag)
        elif get_origin(typed) is dict:
            text = f"{text} Several times if need be."
            parser.add_argument(_flag(name), action="append", metavar="NAME=VALUE", **{**flag, "help": text})
        elif get_origin(typed) is tuple:
            parser.add_argument(name, nargs="*", metavar=name.upper(), help=text)
        elif choices := [each for each in get_args(typed) if isinstance(each, str)]:
            parser.add_argument(_flag(name), choices=choices, **flag)
        else:
            number = int in (typed, *get_args(typed))
            parser.add_argument(_flag(name), type=int if number else str, metavar="N" if number else "TEXT", **flag)


def _options(kind: type[Any], given: dict[str, Any]) -> Any:
    """Return the options; all ``NAME=VALUE`` of one flag become one mapping."""
    fields = {name: value for name, value in given.items() if value not in (None, [])}
    for name, default in ((name, getattr(kind(), name)) for name in fields):
        if isinstance(default, dict):
            fields[name] = dict(_pair(_flag(name), text, is_number=name == "resource") for text in fields[name])
        elif isinstance(default, tuple):
            fields[name] = tuple(fields[name])
    return kind(**fields)


def _pair(flag: str, text: str, *, is_number: bool) -> tuple[str, str | int]:
    name, equals, value = text.partition("=")
    if not name or not equals or (is_number and not value.isdecimal()):
        raise UsageError(f"{flag} {text!r} is not NAME={'NUMBER' if is_number else 'VALUE'}.")
    return name, int(value) if is_number else value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

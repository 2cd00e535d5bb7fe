"""Trackers that workers report to: the text of ``UNIFIED_REPORT_TO``, and the run there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from unified.errors import UsageError, nearest

REPORT_TO = "UNIFIED_REPORT_TO"
REPORT_RUN = "UNIFIED_REPORT_RUN"
"""Variable with the id of the run in the trackers; without the variable, the id is that of the job."""
FORMS = {name: f"{name}[:{argument}]" for name, argument in (("mlflow", "URI"), ("wandb", "PROJECT"))}
FORMS |= {"tensorboard": "tensorboard:DIR", "trackio": "trackio[:PROJECT]"}


class Target(NamedTuple):
    """A tracker that a worker reports to, with its folder, address or project; empty: the default."""

    tracker: str
    argument: str


def parse_targets(text: str) -> list[Target]:
    """Return what ``tensorboard:DIR,mlflow[:URI],wandb[:PROJECT],trackio[:PROJECT]`` names.

    UsageError: there is no such tracker, it is named twice, or TensorBoard has no folder.
    """
    targets: dict[str, Target] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, argument = word.partition(":")
        if name not in FORMS:
            known = ", ".join(FORMS.values())
            raise UsageError(f"{REPORT_TO}={text!r}: {name!r} is no tracker.{nearest(name, FORMS)} There are {known}.")
        if name in targets:
            raise UsageError(f"{REPORT_TO}={text!r} names {name} twice: give it once.")
        if name == "tensorboard" and not argument:
            raise UsageError(f"{REPORT_TO}={text!r}: tensorboard needs a folder: tensorboard:DIR.")
        targets[name] = Target(name, argument)
    return list(targets.values())


def check_report_to(envs: Mapping[str, str]) -> dict[str, str]:
    """Return a role's environment. UsageError: its trackers are wrong, as in `parse_targets`."""
    parse_targets(envs.get(REPORT_TO, ""))
    return dict(envs)

"""The layout of a run in a store: names of its folders and of its checkpoints' commit marks, and rules for run ids.

    <base>/<run_id>/framework=<framework>/
        checkpoints/step-000001.json    commit mark of a checkpoint, written last
        logs/.keep
        config/run.json

The gateway and the training program share this module, so it loads the standard library alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unified.errors import UsageError, nearest

FRAMEWORKS = ("nemo", "hf", "meta")
CONFIG_NAME = "run.json"
KEEP_NAME = ".keep"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_STEP = re.compile(r"step-(\d{6,})\.json")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class RunLayout:
    """Folders of one run of one framework.

    Raises:
        UsageError: a base that cannot hold checkpoints, an invalid run id, or an unknown framework.
    """

    base_uri: str
    """``s3://bucket/prefix``, ``file:///path`` or an absolute path; slashes at its end are dropped."""
    run_id: str
    framework: str
    own_prefix: str = ""
    """Prefix of the run, instead of the one made of base, run id and framework."""
    own_logs_uri: str = ""
    own_config_uri: str = ""

    def __post_init__(self) -> None:
        check_framework(self.framework)
        check_run_id(self.run_id)
        for name in ("base_uri", "own_prefix", "own_logs_uri", "own_config_uri"):
            given = getattr(self, name)
            if given or (name == "base_uri" and not self.own_prefix):
                object.__setattr__(self, name, check_uri(given, name.removeprefix("own_")))

    @property
    def prefix(self) -> str:
        """Folder of all objects of this run and framework."""
        return self.own_prefix or f"{self.base_uri}/{self.run_id}/framework={self.framework}"

    @property
    def checkpoints_uri(self) -> str:
        return f"{self.prefix}/checkpoints"

    @property
    def logs_uri(self) -> str:
        return self.own_logs_uri or f"{self.prefix}/logs"

    @property
    def config_uri(self) -> str:
        return self.own_config_uri or f"{self.prefix}/config"


def step_key(step: int, kind: str = "json") -> str:
    """Return the name of a commit mark, ``step-000001.json`` (or more digits), or of another kind of file beside it."""
    if step < 0:
        raise UsageError(f"a step is 0 or more, not {step}.")
    return f"step-{step:06}.{kind}"


def step_of(name: str) -> int | None:
    """Return the step of a commit mark's name, None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_key(int(found[1])) == name else None


def check_run_id(text: str) -> str:
    """Return the same run id; raise UsageError if it is invalid, or could leave its folder."""
    if not _RUN_ID.fullmatch(text) or ".." in text:
        raise UsageError(
            f"run_id {text[:120]!r} is not allowed: up to 100 letters, digits and . _ - that begin with a letter or a "
            "digit, without '..'."
        )
    return text


def check_framework(text: str) -> str:
    """Return the same framework; raise UsageError if it is unknown."""
    if text not in FRAMEWORKS:
        raise UsageError(
            f"there is no framework {text!r}; there are {', '.join(FRAMEWORKS)}.{nearest(text, FRAMEWORKS)}"
        )
    return text


def check_uri(text: str, name: str) -> str:
    """Return a URI or path without slashes at its end; raise UsageError if it is invalid, or goes up in the tree.

    Args:
        name: name of the field, for the error.
    """
    scheme, separator, rest = text.partition("://")
    uri = text.rstrip("/")
    if not separator:
        scheme, rest = "", text
    parts = (rest.rstrip("/") if scheme == "s3" else rest.strip("/")).split("/")
    if _CONTROL.search(text):
        reason = "it has a control character"
    elif scheme not in ("", "file", "s3"):
        reason = f"{scheme}:// is not supported"
    elif scheme == "s3" and not _BUCKET.fullmatch(parts[0]):
        reason = "it names no bucket"
    elif scheme != "s3" and (not rest.startswith("/") or not rest.strip("/")):
        reason = "a local path is absolute, and not the root"
    elif any(part in ("", ".", "..") for part in parts):
        reason = "a part of it is empty, '.' or '..'"
    else:
        return uri
    raise UsageError(f"{name} {text[:200]!r} is not allowed: {reason}; give s3://bucket/prefix or file:///path.")

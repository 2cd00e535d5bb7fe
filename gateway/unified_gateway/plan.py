"""From a payload to an attempt at a run: the job's name, its environment and labels, and the stored payload. Pure.

An annotation of the job stores the payload, to compare later payloads with it and to resume from it. Values of `env`
may be secrets: the annotation has salted digests in their place, which show only whether two values are equal. A reader
of the job can test guesses against a digest, so a secret should be longer than a word.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from unified.training.layout import RunLayout
from unified.training.options import TrainingOptions
from unified_gateway import backend
from unified_gateway.schemas import MAX_NAME, ResumeRequest, TrainingRequest

RESUME = "resume_from_checkpoint"
NEEDED_TO_RESUME = ("framework", "model_id", "checkpoint_base_uri", "dataset_uri")
"""Fields that a resume may not change."""
_PREFIX = "train-"
_HASH_DIGITS = 6


class StoredRequest(msgspec.Struct, frozen=True):
    """The payload of an attempt, as its annotation has it."""

    fields: dict[str, Any]
    """All fields but `env`."""
    env: dict[str, str]
    """Digests of the values, by name."""
    salt: str

    @classmethod
    def of(cls, request: TrainingRequest, salt: str, kept: Mapping[str, str] | None = None) -> StoredRequest:
        """Return what is stored of a payload.

        Args:
            kept: digests, with this salt, of variables whose values are not known.
        """
        fields = request.model_dump(mode="json", exclude={"env"})
        env = {name: _digest(salt, name, value) for name, value in request.env.items()}
        return cls(fields=fields, env={**(kept or {}), **env}, salt=salt)

    @classmethod
    def read(cls, annotations: Mapping[str, str]) -> StoredRequest | None:
        """Return what a job's annotations hold; None if it is no job of a gateway, or of a later release."""
        try:
            return msgspec.json.decode(annotations.get(backend.REQUEST_ANNOTATION, ""), type=cls)
        except msgspec.DecodeError:
            return None

    def text(self) -> str:
        return json.dumps(msgspec.to_builtins(self), sort_keys=True, separators=(",", ":"))

    def differences(self, request: TrainingRequest) -> dict[str, Difference]:
        """Return the fields in which a payload differs; variables as ``env.NAME``, without their values.

        `resume_from_checkpoint` is left out: it says how a run begins, not what it is.
        """
        asked = request.model_dump(mode="json", exclude={"env"})
        defaults = {name: field.get_default(call_default_factory=True) for name, field in _FIELDS.items()}
        found: dict[str, Difference] = {}
        for name, value in asked.items():
            earlier = self.fields.get(name, defaults[name])
            if name != RESUME and earlier != value:
                found[name] = Difference(earlier, value)
        for name in sorted(self.env.keys() | request.env.keys()):
            value = request.env.get(name)
            digest = None if value is None else _digest(self.salt, name, value)
            if name not in self.env:
                found[f"env.{name}"] = Difference("not set", "set")
            elif digest is None:
                found[f"env.{name}"] = Difference("set", "not set")
            elif not hmac.compare_digest(digest, self.env[name]):
                found[f"env.{name}"] = Difference("set", "set to another value")
        return found

    def resumed(self, changes: ResumeRequest) -> tuple[TrainingRequest, dict[str, str]]:
        """Return the payload of a resume, and the digests of variables that keep the earlier job's values.

        Raises:
            ValidationError: of pydantic; the changes do not fit the rest of the payload.
        """
        extra_args = {**self.fields.get("extra_args", {}), **changes.extra_args}
        known = {name: value for name, value in self.fields.items() if name in _FIELDS}
        request = TrainingRequest.model_validate({**known, "extra_args": extra_args, "env": changes.env, RESUME: True})
        return request, {name: digest for name, digest in self.env.items() if name not in changes.env}


class Difference(NamedTuple):
    """Values of a field that differs between two payloads of one run id."""

    submitted: Any
    requested: Any


_FIELDS = {name: field for name, field in TrainingRequest.model_fields.items() if name != "env"}


def job_name(request: TrainingRequest) -> str:
    """Return the name of a run's job: a DNS label, different for each run id.

    A run id that is no DNS label, or is too long, is converted to one that ends with digits of the run id's digest.
    """
    if request.job_name is not None:
        return request.job_name
    word = re.sub(r"[^a-z0-9-]", "-", request.run_id.lower())
    name = f"{_PREFIX}{word}"
    if word == request.run_id and len(name) <= MAX_NAME and not word.endswith("-"):
        return name
    digest = hashlib.sha256(request.run_id.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: MAX_NAME - _HASH_DIGITS - 1].rstrip('-')}-{digest}"


def plan_run(
    request: TrainingRequest, *, attempt_id: str, salt: str, namespace: str, kept: Mapping[str, str] | None = None
) -> backend.RunPlan:
    """Return the attempt that a payload asks for.

    Args:
        attempt_id: id of this submission.
        salt: salt of the digests of `env`; the earlier attempt's, if variables are kept.
        namespace: used if the payload names none.
        kept: digests of variables that keep the values of the job that this attempt follows.
    """
    stored = StoredRequest.of(request, salt, kept)
    options = TrainingOptions(
        layout=RunLayout(request.checkpoint_base_uri, request.run_id, request.framework),
        model_id=request.model_id,
        dataset_uri=request.dataset_uri if isinstance(request.dataset_uri, str) else json.dumps(request.dataset_uri),
        config_path=request.config_path or "",
        resume=request.resume_from_checkpoint,
        extra_args=request.extra_args,
        arguments=request.arguments,
        attempt_id=attempt_id,
    )
    return backend.RunPlan(
        request=request,
        name=job_name(request),
        options=options,
        environment=request.env,
        labels={
            **request.labels,
            backend.KIND_LABEL: backend.KIND,
            backend.FRAMEWORK_LABEL: request.framework,
            backend.RUN_ID_LABEL: request.run_id,
            backend.NAMESPACE_LABEL: request.namespace or namespace,
        },
        annotations={
            **request.annotations,
            backend.REQUEST_ANNOTATION: stored.text(),
            backend.ATTEMPT_ANNOTATION: attempt_id,
        },
        kept_env=tuple(sorted(kept or ())),
    )


def user_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of the payload, without the gateway's own."""
    own = (backend.KIND_LABEL, backend.FRAMEWORK_LABEL, backend.RUN_ID_LABEL, backend.NAMESPACE_LABEL)
    return {name: value for name, value in labels.items() if name not in own}


def _digest(salt: str, name: str, value: str) -> str:
    return hmac.new(salt.encode(), f"{name}={value}".encode(), hashlib.sha256).hexdigest()

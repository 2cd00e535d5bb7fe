"""Bodies of requests and answers: the payload of ``POST /train``, and the status of a run."""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

from unified.errors import UsageError
from unified.job.description import Envs
from unified.job.driver import is_credential
from unified.training.arguments import Arguments, parse_arguments
from unified.training.layout import check_run_id, check_uri
from unified.training.rows import parse_parts

MAX_NAME = 52
"""Most characters of a job's name: Kubeflow appends ``-worker-9999``, and allows 63."""
MAX_URI_CHARS, MAX_PARTS = 1024, 100
MAX_EXTRA_ARGS_BYTES = 64 * 1024
MAX_ENV_CHARS = 256 * 1024
MAX_VALUE_BYTES = 100_000
"""Most bytes of one variable, below Linux's limit of 128 KiB."""
MAX_ANNOTATION_CHARS = 256 * 1024
MAX_LABELS, MAX_LABEL_CHARS = 64, 4096
"""Labels are sent with each list, so they are few and short."""
JOB_VARIABLES = ("UNIFIED_LOG_LEVEL", "UNIFIED_STORAGE_", "UNIFIED_DATASET_", "UNIFIED_CHECKPOINT_")
"""Prefixes of the runtime's variables that `env` may set."""
RESERVED_PREFIX = "unified/"
"""Prefix of labels and annotations that the gateway itself sets."""
RESERVED_VARIABLES = frozenset(
    """
    FRAMEWORK RUN_ID CHECKPOINT_BASE_URI CHECKPOINT_PREFIX DATASET_URI LOGS_URI CONFIG_URI MODEL_ID CONFIG_PATH
    RESUME_FROM_CHECKPOINT EXTRA_ARGS_JSON ATTEMPT_ID
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT
    """.split()  # noqa: SIM905
)
"""Variables that come from the payload or a rank's placement, so that `env` may not set them."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")

_TEXT_TOKENS = ("eos_token", "pad_token")  # tokens of a text, not of an account
Framework = Literal["nemo", "hf", "meta"]
RunState = Literal["submitted", "running", "failed", "succeeded"]


def _plain(text: str) -> str:
    """Return the text if it has no control characters, which an environment cannot hold, and no password."""
    if _CONTROL.search(text):
        raise ValueError("control characters are not allowed")
    if is_credential("", text):
        raise ValueError("it has a password in it, and is shown to others: give credentials in env")
    return text


def _base_uri(text: str) -> str:
    if re.search(r"[*?\[\]#]", text):
        raise ValueError("none of *?[]# may stand in it")
    return _uri(text)


def _uri(text: str) -> str:
    try:
        return check_uri(text, "it")
    except UsageError as error:
        raise ValueError(without_value(str(error))) from None


def _dataset(given: str | list[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    try:
        parts = [part._replace(uri=_uri(_plain(part.uri))) for part in parse_parts(given)]
    except UsageError as error:
        raise ValueError(str(error)) from None
    if any(not part.uri or len(part.uri) > MAX_URI_CHARS for part in parts) or len(parts) > MAX_PARTS:
        raise ValueError(f"it has at most {MAX_PARTS} parts, each of 1 to {MAX_URI_CHARS} characters")
    return parts[0].uri if parts == [(parts[0].uri, 1.0)] else [part._asdict() for part in parts]


def without_value(text: str) -> str:
    """Return an error text without the wrong value, which may be a secret."""
    return re.sub(r"(=| ')[^\n]*? is not allowed: ", " is not allowed: ", text, count=1)


def _extra_args(extra_args: dict[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(extra_args, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:  # also for a lone surrogate
        raise ValueError("it has a number that is not finite, or a text that is not valid Unicode") from None
    if len(text) > MAX_EXTRA_ARGS_BYTES:
        raise ValueError(f"it has {len(text)} bytes of JSON, and at most {MAX_EXTRA_ARGS_BYTES} are taken")
    for name, value in extra_args.items():
        if is_credential("" if name in _TEXT_TOKENS else name, str(value)):
            raise ValueError(f"{name[:100]} looks like a credential, and is shown to others: give it in env")
    return extra_args


def _env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name[:100]!r} is no name of a variable")
        if name in RESERVED_VARIABLES:
            raise ValueError(f"{name} is set by the service, from a field of the payload or the place of a rank")
        if name.startswith("UNIFIED_") and not name.startswith(JOB_VARIABLES):
            raise ValueError(f"{name} is reserved for the runtime; env may set {', '.join(JOB_VARIABLES)}…")
        if "\0" in value or _nbytes(value) > MAX_VALUE_BYTES:
            raise ValueError(f"the value of {name} has the character NUL, or more than {MAX_VALUE_BYTES} bytes")
    if sum(len(name) + len(value) for name, value in env.items()) > MAX_ENV_CHARS:
        raise ValueError(f"at most {MAX_ENV_CHARS} characters are taken")
    return env


def _metadata(pairs: dict[str, str]) -> dict[str, str]:
    """Check labels or annotations by the rules of Kubernetes, for every backend."""
    for key in pairs:
        prefix, slash, word = key.rpartition("/")
        if not _WORD.fullmatch(word) or (slash and not _DOMAIN.fullmatch(prefix)):
            raise ValueError(f"{key[:100]!r} is no key: write name or domain/name, as Kubernetes has it")
        if key.startswith(RESERVED_PREFIX):
            raise ValueError(f"{key!r} begins with {RESERVED_PREFIX}, which the service keeps for itself")
    if sum(_nbytes(key) + _nbytes(value) for key, value in pairs.items()) > MAX_ANNOTATION_CHARS:
        raise ValueError(f"at most {MAX_ANNOTATION_CHARS} bytes are taken")
    return pairs


def _nbytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError("it has a text that is not valid Unicode") from None


def _labels(labels: dict[str, str]) -> dict[str, str]:
    if len(labels) > MAX_LABELS or sum(len(key) + len(value) for key, value in labels.items()) > MAX_LABEL_CHARS:
        raise ValueError(f"at most {MAX_LABELS} labels of {MAX_LABEL_CHARS} characters together are taken")
    for key, value in labels.items():
        if value and not _WORD.fullmatch(value):
            raise ValueError(
                f"the value of {key[:100]!r} is more than 63 letters, digits and ._- that begin and end with a letter "
                "or a digit"
            )
    return labels


Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URI_CHARS), AfterValidator(_plain)]
DnsLabel = Annotated[str, StringConstraints(min_length=1, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
ExtraArgs = Annotated[dict[str, JsonValue], AfterValidator(_extra_args)]
RunEnv = Annotated[Envs, AfterValidator(_env)]
Metadata = Annotated[dict[str, str], AfterValidator(_metadata)]


class TrainingRequest(BaseModel):
    """A training run: what to train, on which data, and with how much of the cluster."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),  # the API has the field `model_id`, and pydantic reserves `model_`
        json_schema_extra={
            "examples": [
                {
                    "framework": "hf",
                    "model_id": "meta-llama/Llama-3-8B",
                    "run_id": "aml_ruleset_v4",
                    "gpus_per_node": 8,
                    "cpus_per_node": 48,
                    "memory_per_node_gb": 512,
                    "checkpoint_base_uri": "s3://deepfinery-training/runs",
                    "dataset_uri": "s3://deepfinery-datasets/fraud/aml_ruleset.jsonl",
                    "resume_from_checkpoint": True,
                    "extra_args": {"max_steps": 50000, "lr": 3e-5, "batch_size": 128},
                }
            ]
        },
    )

    framework: Framework = Field(description="Trainer that runs it.")
    model_id: Annotated[str, StringConstraints(min_length=1, max_length=16384), AfterValidator(_plain)] = Field(
        description="Hub id, local directory, s3:// prefix, config:{…} or a config file."
    )
    run_id: Annotated[str, StringConstraints(min_length=1, max_length=100), AfterValidator(check_run_id)] = Field(
        description="Unique id of the run; its objects are below checkpoint_base_uri/run_id."
    )
    checkpoint_base_uri: Annotated[Text, AfterValidator(_base_uri)] = Field(
        description="Prefix of all runs: s3://bucket/prefix, or a folder that all nodes share."
    )
    dataset_uri: Annotated[str | list[str | dict[str, JsonValue]], AfterValidator(_dataset)] = Field(
        description="File, folder or glob with rows; or a list of them, some as {uri, weight}."
    )
    image: Text | None = Field(default=None, description="Container of the run; used by the Kubeflow backend alone.")
    num_nodes: int = Field(default=1, ge=1, le=10_000)
    gpus_per_node: int = Field(default=1, ge=1, le=256, description="Devices of the cluster's kind, one a rank.")
    cpus_per_node: int = Field(default=32, ge=1, le=8192)
    memory_per_node_gb: int = Field(default=256, ge=1, le=1_000_000)
    config_path: Text | None = Field(default=None, description="YAML or JSON file of defaults below extra_args.")
    resume_from_checkpoint: bool = Field(default=False, description="Go on from the highest complete step.")
    extra_args: ExtraArgs = Field(default_factory=dict, description="Settings of the framework.")
    env: RunEnv = Field(default_factory=dict, description="More environment of the run's processes.")
    labels: Annotated[Metadata, AfterValidator(_labels)] = Field(
        default_factory=dict, description="Labels of the job, by which GET /train filters."
    )
    annotations: Metadata = Field(default_factory=dict)
    namespace: Annotated[DnsLabel, StringConstraints(max_length=63)] | None = None
    job_name: Annotated[DnsLabel, StringConstraints(max_length=MAX_NAME)] | None = Field(
        default=None, description="Name of the job; made of run_id without."
    )

    @cached_property
    def arguments(self) -> Arguments:
        """`extra_args`, checked as far as this needs no library of the framework: the arguments of the ranks."""
        return parse_arguments(self.framework, self.extra_args, has_more=bool(self.config_path))

    @model_validator(mode="after")
    def _arguments_are_known(self) -> Self:
        try:
            if self.arguments.eval_dataset_uri:
                _dataset(self.arguments.eval_dataset_uri)
        except UsageError as error:
            raise ValueError(without_value(str(error))) from None
        return self


class ResumeRequest(BaseModel):
    """Changes to a run that is resumed. All other settings stay as they were submitted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    extra_args: ExtraArgs = Field(default_factory=dict, description="Settings that replace earlier ones.")
    env: RunEnv = Field(default_factory=dict, description="Variables that replace earlier ones.")


class TrainingJobStatus(BaseModel):
    """State of a run, and of the job that it is on the cluster."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    name: str
    namespace: str
    run_id: str
    framework: str
    status: RunState
    detail: str | None = Field(default=None, description="Why it waits, or the reason of the first failure. One line.")
    job_id: str = Field(description="Id of this attempt on the cluster.")
    submitted_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    exit_code: int | None = None
    num_restarts: int = 0
    labels: dict[str, str] = Field(default_factory=dict)


class RunList(BaseModel):
    """A page of runs, newest first."""

    items: list[TrainingJobStatus]
    total: int = Field(description="Runs that the filter lets pass, on all pages.")
    next: str | None = Field(default=None, description="`cursor` of the next page; null on the last.")


class RunEventInfo(BaseModel):
    """One decision about a run, with its reason."""

    at: datetime
    event: str
    reason: str
    worker: str = ""
    node: str = ""


class RunEvents(BaseModel):
    """Decisions about a run, oldest first."""

    items: list[RunEventInfo]


class MetricsInfo(BaseModel):
    """Metrics that rank 0 reported with one step."""

    at: datetime
    step: int | None = None
    total: int | None = None
    metrics: dict[str, float | int | str | None]
    incarnation: int = Field(default=0, description="Incarnation of rank 0, counted from 0.")


class RunMetrics(BaseModel):
    """Metrics of a run, oldest first."""

    items: list[MetricsInfo]
    num_thinned: int = Field(default=0, description="Old points between these that were thinned out.")


class CheckpointInfo(BaseModel):
    """A complete checkpoint."""

    step: int
    uri: str = Field(description="Its commit mark.")
    saved_at: datetime | None = None
    world_size: int
    nbytes: int
    files: list[str]
    metrics: dict[str, Any]


class RunCheckpoints(BaseModel):
    """Complete checkpoints of a run, the lowest step first."""

    prefix: str
    items: list[CheckpointInfo]


class DryRun(BaseModel):
    """Job that a payload would become."""

    name: str
    backend: str
    namespace: str
    job: dict[str, Any] = Field(description="Description of the job, or the manifest, without values of env.")
    arguments: dict[str, dict[str, JsonValue]] = Field(
        description="Values of all arguments, by method. Without extra_args.method, rows choose between two of hf."
    )


class ErrorBody(BaseModel):
    """Reason why a request was not carried out."""

    detail: str


class ConflictBody(ErrorBody):
    """The run that a payload is in conflict with."""

    run: TrainingJobStatus
    differences: dict[str, dict[str, Any]] = Field(description="submitted and requested value of each field.")


class FieldError(BaseModel):
    """A field of a request that is wrong."""

    loc: list[str | int]
    msg: str
    type: str


class ValidationBody(BaseModel):
    """Fields of a request that are wrong."""

    detail: list[FieldError] | str

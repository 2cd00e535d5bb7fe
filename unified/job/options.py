"""Options of a submission, from defaults, environment and keywords."""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict

from pydantic import TypeAdapter, ValidationError

from unified.errors import OptionError, nearest
from unified.job.config import DLConfig, JobConfig
from unified.job.description import field_of
from unified.job.enums import FailoverExec, FailoverTrigger, MasterStateBackendType
from unified.job.names import check_job_name


class SubmitOptions(TypedDict, total=False):
    """Keywords of `DLJob.submit`, for type checkers: all names of the fields of `JobConfig`, which explains them."""

    job_name: str
    master: str | None
    wait: bool
    master_cpu: float
    master_mem: int
    master_memory: int
    master_create_timeout: float | timedelta
    timeout: float | timedelta
    node_max_restart: int
    job_max_restart: int
    master_max_restart: int
    master_isolation_schedule_resource: str
    worker_isolation_schedule_resource: str
    failover_trigger_strategy: Literal[0, 1, 2] | FailoverTrigger
    failover_exec_strategy: Literal[0, 1, 2] | FailoverExec
    restart_window: float | timedelta | None
    restart_backoff: float | timedelta
    hang_timeout: float | timedelta | None
    master_state_backend_type: MasterStateBackendType | str
    master_state_backend_config: dict[str, Any]
    stop_grace_s: float | timedelta
    save_grace_s: float | timedelta
    call_timeout_s: float | timedelta | None
    python: str | None
    start_method: Literal["fork", "spawn"]
    ship: bool | str | list[str]
    exclude: list[str]
    requirements: str | list[str]
    working_dir: str | None
    report_to: str | list[str]


_OLD, _NEW = "DLROVER_UNIFIED_", "UNIFIED_"
_SURE = 0.9  # from this similarity on a name counts as a typing error, not as a setting of this installation


def submit_options(job: DLConfig, keywords: Mapping[str, Any], env: Mapping[str, str]) -> JobConfig:
    """Put the options of a submission together.

    In rising order: defaults, ``DLROVER_UNIFIED_*``, ``UNIFIED_*`` (the rest of the name is the option's, in capitals;
    empty counts as unset), keywords. A job without a name is called ``unified-`` and four hexadecimal digits.

    Raises:
        OptionError: an option that does not exist, or a value of the wrong kind; the message names its source.
        JobNameError: the name is not allowed.
    """
    names = {name: field for name, field in field_of(JobConfig).items() if field != "dl_config"}
    values: dict[str, Any] = {"job_name": f"unified-{secrets.token_hex(2)}"}
    sources: dict[str, str] = {}
    for prefix in (_OLD, _NEW):
        for field, (variable, value) in _from_env(prefix, env, names).items():
            values[field], sources[field] = value, f"{variable}={value!r}"
    for field, (keyword, value) in _from_keywords(keywords, names).items():
        values[field], sources[field] = value, f"{keyword}={value!r}"
    if isinstance(values["job_name"], str):
        check_job_name(values["job_name"])
    try:
        return TypeAdapter(JobConfig).validate_python({"dl_config": job, **values})
    except ValidationError as error:
        raise OptionError("\n".join(_sentence(item, sources) for item in error.errors())) from None


def _from_env(prefix: str, env: Mapping[str, str], names: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for variable, text in sorted(env.items()):
        if not variable.startswith(prefix) or text == "":
            continue
        name = variable.removeprefix(prefix).lower()
        if name in names:
            _once(names[name], variable, found)
            found[names[name]] = (variable, _json(variable, text) if names[name].endswith("_config") else text)
        elif prefix == _OLD or difflib.get_close_matches(name, names, n=1, cutoff=_SURE):
            # UNIFIED_ also begins names of settings of this installation (UNIFIED_HOME), so only a near miss counts
            known = [f"{prefix}{name.upper()}" for name in names]
            raise OptionError(f"environment variable {variable} is no option of a job.{nearest(variable, known)}")
    return found


def _from_keywords(keywords: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for keyword, value in keywords.items():
        if keyword not in names:
            raise OptionError(
                f"submit has no option {keyword!r}.{nearest(keyword, names)} There are: {', '.join(sorted(names))}."
            )
        _once(names[keyword], keyword, found)
        found[names[keyword]] = (keyword, value)
    return found


def _once(field: str, name: str, found: Mapping[str, tuple[str, Any]]) -> None:
    if field in found:
        raise OptionError(f"{found[field][0]} and {name} are two names of one option: give one of them.")


def _json(variable: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"{variable}={text!r} is not JSON: {error}.") from None


def _sentence(item: Any, sources: Mapping[str, str]) -> str:
    field = str(item["loc"][0]) if item["loc"] else ""
    return f"option {sources.get(field, field)}: {item['msg']}."

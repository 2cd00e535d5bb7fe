"""Options of one training run: given by the gateway, or by the command line and the environment.

Ranks of our own master get the options as a record in the config of their job. Pods of Kubeflow get variables.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import msgspec

from unified.errors import OptionError, UsageError
from unified.training.aliases import own_names
from unified.training.arguments import TABLES, Arguments, argument_types, parse_arguments, values_in_force
from unified.training.layout import FRAMEWORKS, RunLayout


class _TrainOption(NamedTuple):
    variable: str
    help: str
    metavar: str = "URI"


OPTIONS = {
    "framework": _TrainOption("FRAMEWORK", "what trains: nemo, hf or meta", "NAME"),
    "run-id": _TrainOption("RUN_ID", "unique id of the run", "ID"),
    "checkpoint-base-uri": _TrainOption(
        "CHECKPOINT_BASE_URI", "where all runs are kept: s3://bucket/prefix or file:///path"
    ),
    "checkpoint-prefix": _TrainOption(
        "CHECKPOINT_PREFIX", "where this run is kept; default: BASE/RUN_ID/framework=FRAMEWORK"
    ),
    "dataset-uri": _TrainOption(
        "DATASET_URI", "rows: a file, a folder or a glob, s3://, file:// or a path; or a JSON list of them"
    ),
    "logs-uri": _TrainOption("LOGS_URI", "where logs go; default: PREFIX/logs"),
    "config-uri": _TrainOption("CONFIG_URI", "where the final configuration goes; default: PREFIX/config"),
    "model-id": _TrainOption(
        "MODEL_ID", "hub id, local folder, s3://bucket/prefix, config:{...} or a config file", "MODEL"
    ),
    "config": _TrainOption("CONFIG_PATH", "YAML or JSON file with defaults of extra_args", "FILE"),
    "extra-args-json": _TrainOption("EXTRA_ARGS_JSON", "arguments of the framework, a JSON object", "JSON"),
}
"""Options with a value, and the environment variable that stands in for each."""
JOB_CONFIG = "training_run"
"""Key of the record in the config of a gateway's job."""
RESUME = "RESUME_FROM_CHECKPOINT"
ATTEMPT = "ATTEMPT_ID"
"""Id of one submission of the run. A process that finds its own id in config/run.json is a restart of it."""
_NEEDED = ("framework", "run-id", "dataset-uri", "model-id")
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "": False, "0": False, "false": False, "no": False}
_BOOLEANS["off"] = False


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of one run, checked."""

    layout: RunLayout
    model_id: str
    dataset_uri: str
    """A URI, or a JSON list, as `unified.training.rows.parse_parts` reads it."""
    config_path: str = ""
    resume: bool = False
    extra_args: Mapping[str, Any]
    """Arguments as they were given, for ``config/run.json``; they override the defaults in `config_path`."""
    arguments: Arguments
    """`extra_args`, checked, with defaults. A gateway has none of `config_path`, which may exist on the nodes alone."""
    attempt_id: str = ""

    @property
    def framework(self) -> str:
        return self.layout.framework

    @property
    def run_id(self) -> str:
        return self.layout.run_id

    @classmethod
    def parse(cls, argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> TrainingOptions:
        """Read the command line and the environment; ``--help`` prints and exits.

        Args:
            argv: without the program's name; None: this process's.
            env: None: this process's.

        Raises:
            OptionError: an option or argument that is missing, unknown or of the wrong kind.
            UsageError: a framework, run id or place that is not allowed.
        """
        env = os.environ if env is None else env
        given = vars(build_parser().parse_args(argv))
        values = {name: given[name.replace("-", "_")] or env.get(each.variable, "") for name, each in OPTIONS.items()}
        missing = [name for name in _NEEDED if not values[name]]
        if not values["checkpoint-base-uri"] and not values["checkpoint-prefix"]:
            missing.append("checkpoint-base-uri")
        if missing:
            names = ", ".join(f"--{name} ({OPTIONS[name].variable})" for name in missing)
            raise OptionError(f"missing: {names}; give the option, or the variable in brackets.")
        resume = env.get(RESUME, "") if given["resume"] is None else given["resume"]
        layout = RunLayout(
            values["checkpoint-base-uri"],
            values["run-id"],
            values["framework"],
            own_prefix=values["checkpoint-prefix"],
            own_logs_uri=values["logs-uri"],
            own_config_uri=values["config-uri"],
        )
        is_resumed = _boolean(resume)
        extra_args = _with_file(layout.framework, parse_extra_args(values["extra-args-json"]), values["config"])
        return cls(
            layout=layout,
            model_id=values["model-id"],
            dataset_uri=values["dataset-uri"],
            config_path=values["config"],
            resume=is_resumed,
            extra_args=extra_args,
            arguments=parse_arguments(layout.framework, extra_args),
            attempt_id=env.get(ATTEMPT, ""),
        )

    @classmethod
    def of_job(cls, config: object) -> TrainingOptions | None:
        """Return the options that a gateway put into a job's config; None: there are none.

        Raises:
            OptionError: the gateway is of another release, or the file of `config_path` is wrong.
        """
        record = config.get(JOB_CONFIG) if isinstance(config, Mapping) else None
        if record is None:
            return None
        try:
            options = msgspec.convert(record, cls)
        except msgspec.ValidationError as error:
            raise OptionError(f"the gateway's options: {error}; install its release of unified-runtime here.") from None
        if not options.config_path:
            return options
        extra_args = _with_file(options.framework, options.extra_args, options.config_path)
        return replace(options, extra_args=extra_args, arguments=parse_arguments(options.framework, extra_args))

    def as_job_config(self) -> dict[str, Any]:
        """Return the config of a job, from which `of_job` reads these options."""
        return {JOB_CONFIG: msgspec.to_builtins(self)}

    def as_environment(self) -> dict[str, str]:
        """Return the variables from which `parse` reads these options."""
        values = {
            "framework": self.framework,
            "run-id": self.run_id,
            "checkpoint-base-uri": self.layout.base_uri,
            "checkpoint-prefix": self.layout.prefix,
            "dataset-uri": self.dataset_uri,
            "logs-uri": self.layout.logs_uri,
            "config-uri": self.layout.config_uri,
            "model-id": self.model_id,
            "config": self.config_path,
            "extra-args-json": json.dumps(self.extra_args, ensure_ascii=False),
        }
        variables = {OPTIONS[name].variable: value for name, value in values.items()}
        return {**variables, RESUME: "true" if self.resume else "false", ATTEMPT: self.attempt_id}

    def as_config(self) -> dict[str, Any]:
        """Return the final configuration, as ``config/run.json`` keeps it."""
        return {
            "framework": self.framework,
            "run_id": self.run_id,
            "model_id": self.model_id,
            "dataset_uri": self.dataset_uri,
            "checkpoint_base_uri": self.layout.base_uri,
            "checkpoint_prefix": self.layout.prefix,
            "logs_uri": self.layout.logs_uri,
            "config_uri": self.layout.config_uri,
            "config_path": self.config_path,
            "resume_from_checkpoint": self.resume,
            "extra_args": dict(self.extra_args),
            "arguments": values_in_force(self.arguments),
            "attempt_id": self.attempt_id,
        }


def parse_extra_args(text: str) -> dict[str, Any]:
    """Return the object that a JSON text holds; for an empty text, an empty object."""
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"--extra-args-json (EXTRA_ARGS_JSON) is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise OptionError(f"--extra-args-json (EXTRA_ARGS_JSON) is a JSON {type(found).__name__}, not an object.")
    return found


def _with_file(framework: str, extra_args: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Return arguments by our names, with values from a file, if `place` names one, for those that were not given."""
    if not place:
        return extra_args
    known = argument_types(TABLES[framework])
    said, given = (own_names(each, known) for each in (read_config_file(place), extra_args))
    return {own: value for own, (_, value) in {**said, **given}.items()}


def read_config_file(place: str) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file, local or in a bucket.

    Raises:
        OptionError: the file cannot be read, or holds no mapping.
    """
    from unified.data.files import DataFiles, absolute

    try:
        with DataFiles() as files, files.open(absolute(place)) as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError, UsageError) as error:
        raise OptionError(f"--config {place} cannot be read: {error}") from error
    return parse_config(text, f"--config {place}")


def parse_config(text: str, name: str) -> dict[str, Any]:
    """Return the mapping that a YAML or JSON text holds.

    Args:
        name: name of the text, for errors.
    """
    from omegaconf import OmegaConf

    if "${" in text:  # omegaconf would insert variables of this process, such as the store's credentials
        raise OptionError(f"{name} has a reference, ${{…}}: write the value itself.")
    try:
        found = OmegaConf.to_container(OmegaConf.create(text))
    except Exception as error:  # of yaml, omegaconf or Python: one line is enough
        raise OptionError(f"{name} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise OptionError(f"{name} holds a {type(found).__name__}, not names with values.")
    return {str(key): value for key, value in found.items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} (unified-train --help lists all options)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, which raises OptionError for a wrong one."""
    parser = _Parser(
        prog="unified-train",
        description="Train a model: one rank of a run whose checkpoints, logs and configuration are kept in a store.",
        epilog=f"Each option may be given by the environment variable in brackets instead. Frameworks: "
        f"{', '.join(FRAMEWORKS)}.",
        allow_abbrev=False,
    )
    for name, option in OPTIONS.items():
        parser.add_argument(f"--{name}", metavar=option.metavar, help=f"{option.help} [{option.variable}]")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="true",
        metavar="BOOL",
        help=f"go on from the highest complete checkpoint [{RESUME}]",
    )
    return parser


def _boolean(text: str) -> bool:
    try:
        return _BOOLEANS[text.strip().lower()]
    except KeyError:
        raise OptionError(f"--resume ({RESUME}) is true or false, not {text!r}.") from None

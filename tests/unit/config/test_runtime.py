"""The runtime's TOML and its environment variables: each key, each variable, and what is wrong with a wrong one."""

import logging
import tomllib
from typing import Any

import msgspec
import pytest

from unified.api.builder import DLJobBuilder
from unified.config.logging import LEVELS, log_level, logging_level
from unified.config.runtime import SECTIONS, RuntimeSettings, variable_of
from unified.config.settings import DEFAULT_PORT
from unified.errors import OptionError, UsageError
from unified.job.options import submit_options

# Document 5, "Runtime Configuration (TOML)".
DOCUMENT = """
[coordinator]
address = "0.0.0.0:50051"
heartbeat_interval_ms = 1000
heartbeat_timeout_ms = 30000

[storage]
backend = "s3"
bucket = "my-training-checkpoints"
region = "us-west-2"

[checkpoint]
interval_steps = 1000
keep_last_n = 5
compression = "gzip"

[dataset]
default_shard_size = 10000
prefetch_shards = 2
"""

# Document 5, "Environment Variables", its example.
VARIABLES = {
    "COORDINATOR_URL": "http://coordinator:50051",
    "WORKER_ID": "worker-0",
    "RANK": "0",
    "WORLD_SIZE": "8",
    "RUST_LOG": "info",
}

# Of each key: a value that is not its default, in the file and in a variable.
OTHER: dict[tuple[str, str], Any] = {
    ("coordinator", "address"): "[::1]:7000",
    ("coordinator", "heartbeat_interval_ms"): 500,
    ("coordinator", "heartbeat_timeout_ms"): 9000,
    ("storage", "backend"): "s3",
    ("storage", "bucket"): "elsewhere",
    ("storage", "region"): "eu-north-1",
    ("checkpoint", "interval_steps"): 10,
    ("checkpoint", "keep_last_n"): 1,
    ("checkpoint", "compression"): "zstd",
    ("dataset", "default_shard_size"): 7,
    ("dataset", "prefetch_shards"): 0,
}


def parse(text: str = "", **env: str) -> RuntimeSettings:
    return RuntimeSettings.parse(text, env, "run.toml")


def error_of(text: str = "", **env: str) -> str:
    with pytest.raises(OptionError) as caught:
        parse(text, **env)
    assert isinstance(caught.value, UsageError)
    return str(caught.value)


def toml(section: str, key: str, value: object) -> str:
    """A file with this key; s3 is not allowed without a bucket."""
    extra = 'bucket = "b"\n' if (section, key) == ("storage", "backend") else ""
    return f"[{section}]\n{extra}{key} = {msgspec.json.encode(value).decode()}"


def test_file_of_the_document() -> None:
    settings = parse(DOCUMENT)
    assert {name: msgspec.to_builtins(getattr(settings, name)) for name in SECTIONS} == tomllib.loads(DOCUMENT)


def test_variables_of_the_document() -> None:
    settings = parse(**VARIABLES)
    assert (settings.coordinator_url, settings.worker_id) == ("http://coordinator:50051", "worker-0")
    assert (settings.rank, settings.world_size, settings.log_level) == (0, 8, "info")


def test_without_anything_there_are_defaults() -> None:
    assert parse() == RuntimeSettings(worker_id="worker-0")
    assert parse().coordinator.address == f"127.0.0.1:{DEFAULT_PORT}", "other hosts are let in by choice alone"


def test_what_was_said_is_known_even_where_it_is_the_default() -> None:
    settings = parse("[checkpoint]\nkeep_last_n = 5", UNIFIED_DATASET_PREFETCH_SHARDS="2", RANK="0")
    assert settings.given == {("checkpoint", "keep_last_n"), ("dataset", "prefetch_shards"), ("", "rank")}
    assert settings.says("checkpoint", "keep_last_n")
    assert not settings.says("coordinator", "address")
    assert not parse().given


def test_every_key_is_tried_here() -> None:
    assert set(OTHER) == {(name, key) for name, kind in SECTIONS.items() for key in kind.__struct_fields__}


@pytest.mark.parametrize(("section", "key"), OTHER)
def test_each_key_is_read_from_the_file_and_has_a_variable_above_it(section: str, key: str) -> None:
    variable, value = variable_of(section, key), OTHER[section, key]
    assert getattr(getattr(parse(), section), key) != value
    assert getattr(getattr(parse(toml(section, key, value)), section), key) == value
    assert variable == f"UNIFIED_{section.upper()}_{key.upper()}"
    settings = parse(DOCUMENT, **{variable: str(value)})
    assert getattr(getattr(settings, section), key) == value
    rest = msgspec.to_builtins({name: getattr(settings, name) for name in SECTIONS})
    rest[section][key] = tomllib.loads(DOCUMENT)[section][key]
    assert rest == tomllib.loads(DOCUMENT), "and changes nothing else"


@pytest.mark.parametrize(
    "name",
    [
        *(variable_of(section, key) for section, key in OTHER),
        "COORDINATOR_URL",
        "UNIFIED_SPACE",
        "WORKER_ID",
        "RANK",
        "WORLD_SIZE",
        "UNIFIED_LOG_LEVEL",
        "DLROVER_LOG_LEVEL",
        "RUST_LOG",
    ],
)
def test_an_empty_variable_is_as_unset(name: str) -> None:
    assert parse(**{name: ""}) == parse()
    assert parse(DOCUMENT, **{name: ""}) == parse(DOCUMENT)


def test_no_compression_has_a_word() -> None:
    assert parse(DOCUMENT, UNIFIED_CHECKPOINT_COMPRESSION="none").checkpoint.compression is None
    assert parse('[checkpoint]\ncompression = "none"').checkpoint.compression is None


def test_worker_is_called_after_its_rank() -> None:
    assert parse(RANK="3").rank == 3, "it may be said without its world"
    assert parse(RANK="3", WORLD_SIZE="4").worker_id == "worker-3"
    assert parse(RANK="3", WORLD_SIZE="4", WORKER_ID="me").worker_id == "me"


@pytest.mark.parametrize(
    "url",
    ["http://a:1", "HTTP://a:1/", "http://a", "tcp://10.0.0.1:50051", "host:7", "host", "[::1]:7", "local", "LOCAL"],
)
def test_forms_of_a_coordinators_url(url: str) -> None:
    assert parse(COORDINATOR_URL=url).coordinator_url == url


def test_settings_are_no_options_of_a_job() -> None:
    """Their variables begin as those of a submission do, which refuses what is nearly one of its own."""
    job = DLJobBuilder().workload("a", "m.f").resource(cpu=1).build()
    variables = {variable_of(*key): str(value) for key, value in OTHER.items()}
    assert submit_options(job, {}, {**variables, "UNIFIED_CONFIG": "run.toml", "UNIFIED_LOG_LEVEL": "debug"}).job_name


# Not known


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[chekpoint]", "run.toml: there is no section [chekpoint]. Did you mean 'checkpoint'? There are: coor"),
        ("[logging]\nlevel = 3", "run.toml: there is no section [logging]. There are: coordinator, storage,"),
        ("keep_last_n = 3", "run.toml: there is no section [keep_last_n]. There are"),
        ("checkpoint = 3", "run.toml: checkpoint is a section, to be written as [checkpoint] with its keys below."),
        ("[checkpoint]\nkeep_last = 3", "[checkpoint] has no key 'keep_last'. Did you mean 'keep_last_n'? There"),
        ("[storage]\ninterval_steps = 3", "[storage] has no key 'interval_steps'. It belongs in [checkpoint]."),
        ("[dataset]\nnonsense = 3", "has no key 'nonsense'. There are: default_shard_size, prefetch_shards."),
        ("[dataset", "run.toml: this is not TOML: Expected ']'"),
    ],
)
def test_what_is_not_known_is_told_its_neighbour(text: str, told: str) -> None:
    assert told in error_of(text)


def test_variable_that_is_not_known_is_told_its_neighbour_and_others_are_nobodys_business() -> None:
    assert error_of(UNIFIED_DATASET_PREFETCH="3") == (
        "environment variable UNIFIED_DATASET_PREFETCH is no setting. Did you mean 'UNIFIED_DATASET_PREFETCH_SHARDS'?"
    )
    assert parse(UNIFIED_HOME="/x", STORAGE_BACKEND="nfs", CHECKPOINT="3") == parse()


# Not allowed


WRONG = [
    ("coordinator", "address", "0.0.0.0", "host:port is expected."),
    ("coordinator", "address", "tcp://0.0.0.0:1", "host:port is expected."),
    ("coordinator", "address", "a:70000", "a port is at most 65535."),
    ("coordinator", "heartbeat_interval_ms", 0, "it must be at least 1."),
    ("coordinator", "heartbeat_timeout_ms", "soon", "a whole number is expected."),
    ("storage", "backend", "s4", "there is no such choice. There are: local, s3."),
    ("storage", "backend", "locl", "there is no such choice. Did you mean 'local'? There are: local, s3."),
    ("checkpoint", "interval_steps", -1, "it must be at least 1."),
    ("checkpoint", "keep_last_n", 0, "it must be at least 1."),
    ("checkpoint", "compression", "gz", "there is no such choice. Did you mean 'gzip'? There are: gzip, zstd, none."),
    ("dataset", "default_shard_size", 0, "it must be at least 1."),
    ("dataset", "prefetch_shards", -1, "it must be at least 0."),
]


@pytest.mark.parametrize(("section", "key", "value", "told"), WRONG)
def test_wrong_value_in_the_file_or_in_a_variable(section: str, key: str, value: object, told: str) -> None:
    assert error_of(toml(section, key, value)) == f"run.toml: [{section}] {key} = {value!r}: {told}"
    variable = variable_of(section, key)
    assert error_of(DOCUMENT, **{variable: str(value)}) == f"{variable}={str(value)!r}: {told}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[checkpoint]\nkeep_last_n = true", "keep_last_n = True: a whole number is expected."),
        ('[checkpoint]\nkeep_last_n = "5"', "keep_last_n = '5': a whole number is expected."),
        ("[checkpoint]\ncompression = 3", "compression = 3: there is no such choice. There are: gzip, zstd, none."),
        ("[storage]\nregion = 3", "region = 3: text in quotes is expected."),
        ('[checkpoint]\ninterval_steps = "5"', "interval_steps = '5': a whole number is expected."),
    ],
)
def test_value_of_the_wrong_kind(text: str, told: str) -> None:
    assert error_of(text).endswith(told)


def test_s3_needs_a_bucket_from_wherever() -> None:
    assert "[storage] backend is s3 and there is no bucket" in error_of('[storage]\nbackend = "s3"')
    assert parse('[storage]\nbackend = "s3"', UNIFIED_STORAGE_BUCKET="b").storage.bucket == "b"


@pytest.mark.parametrize("timeout", ["1", "1000"])
def test_timeout_is_above_the_interval(timeout: str) -> None:
    told = error_of(UNIFIED_COORDINATOR_HEARTBEAT_TIMEOUT_MS=timeout)
    assert told == (
        f"[coordinator] heartbeat_timeout_ms is {timeout}, and the interval 1000: "
        "a worker would be lost between two heartbeats."
    )


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"RANK": "two"}, "RANK='two': a whole number is expected."),
        ({"RANK": "-1"}, "RANK='-1': it must be at least 0."),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0': it must be at least 1."),
        (
            {"RANK": "8", "WORLD_SIZE": "8"},
            "RANK=8 and WORLD_SIZE=8: rank 8 is not in a world of 8: its ranks are 0 to 7.",
        ),
        ({"COORDINATOR_URL": "https://a:1"}, "COORDINATOR_URL='https://a:1': "),
        ({"COORDINATOR_URL": "tcp://a:99999"}, "COORDINATOR_URL='tcp://a:99999': "),
    ],
)
def test_wrong_place_of_a_worker(env: dict[str, str], told: str) -> None:
    assert error_of(**env).startswith(told)


# Log level


@pytest.mark.parametrize(("word", "number"), {"trace": 5, "debug": 10, "info": 20, "warn": 30, "error": 40}.items())
def test_each_level_of_rust_log(word: str, number: int) -> None:
    assert (parse(RUST_LOG=word).log_level, LEVELS[parse(RUST_LOG=word.upper()).log_level]) == (word, number)
    assert parse(RUST_LOG=word).says("", "log_level")


@pytest.mark.parametrize(
    ("env", "level"),
    [
        ({"RUST_LOG": "hyper=trace"}, None),
        ({"RUST_LOG": ","}, None),
        ({"RUST_LOG": "debug,hyper=warn"}, "debug"),
        ({"RUST_LOG": "hyper, warning"}, "warn"),
        ({"RUST_LOG": "off"}, "off"),
        ({"DLROVER_LOG_LEVEL": "DEBUG"}, "debug"),
        ({"DLROVER_LOG_LEVEL": "INFO"}, "info"),
        ({"DLROVER_LOG_LEVEL": "WARNING"}, "warn"),
        ({"DLROVER_LOG_LEVEL": "ERROR"}, "error"),
        ({"DLROVER_LOG_LEVEL": "CRITICAL"}, "error"),
        ({"DLROVER_LOG_LEVEL": "10"}, "debug"),
        ({"DLROVER_LOG_LEVEL": "DEBUG", "RUST_LOG": "error"}, "debug"),
        ({"DLROVER_LOG_LEVEL": "of another program", "RUST_LOG": "error"}, "error"),
        ({"DLROVER_LOG_LEVEL": "DEBUG", "RUST_LOG": "error", "UNIFIED_LOG_LEVEL": "warn"}, "warn"),
        ({"RUST_LOG": "error", "UNIFIED_LOG_LEVEL": "debug"}, "debug"),
    ],
)
def test_level_of_the_environment(env: dict[str, str], level: str | None) -> None:
    assert log_level(env) == (level or "info")
    assert parse(**env).says("", "log_level") == (level is not None)


def test_flag_of_a_daemon_is_above_all() -> None:
    assert logging_level("warning", {"UNIFIED_LOG_LEVEL": "debug"}) == logging.WARNING
    assert logging_level(None, {"UNIFIED_LOG_LEVEL": "debug"}) == logging.DEBUG
    assert logging_level(None, {}) == logging.INFO


def test_level_that_is_none() -> None:
    assert error_of(RUST_LOG="inof") == "RUST_LOG='inof': 'inof' is no log level. Did you mean 'info'?"
    assert error_of(DLROVER_LOG_LEVEL="DEBGU") == "DLROVER_LOG_LEVEL='DEBGU' is no log level. Did you mean 'debug'?"
    assert error_of(UNIFIED_LOG_LEVEL="loud") == (
        "UNIFIED_LOG_LEVEL='loud' is no log level. There are: trace, debug, info, warn, error, off."
    )

"""What users put into a job comes out of a worker's decode equal, and of the same type."""

import enum
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from unified.errors import UsageError
from unified.job.payload import decode, encode
from unified.job.spec import Blob


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: int
    y: list[int]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(plain)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize(
    ("value", "codec"),
    [
        (None, "none"),
        ({}, "msgpack"),
        ({"a": [1, 2.5, "x", b"y", None, True]}, "msgpack"),
        ({1: "int keys"}, "msgpack"),
        ((1, 2), "pickle"),
        ({"a": (1, 2)}, "pickle"),
        ({1, 2}, "pickle"),
        (2**70, "pickle"),
        ("\ud800", "pickle"),
        (Colour.RED, "pickle"),
        (PurePosixPath("/x"), "pickle"),
        (complex(1, 2), "pickle"),
    ],
)
def test_each_value_takes_the_plainest_form_that_keeps_it(value: Any, codec: str) -> None:
    blob = encode(value)
    back = decode(blob)
    assert blob.codec == codec
    assert back == value
    assert type(back) is type(value)


def test_a_config_stays_a_config() -> None:
    blob = encode(OmegaConf.create({"a": {"b": [1, 2]}, "c": "${a.b}", "missing": "???"}))
    back = decode(blob)
    assert blob.codec == "omegaconf"
    assert isinstance(back, DictConfig)
    assert (back.a.b, back.c) == ([1, 2], [1, 2])
    assert OmegaConf.is_missing(back, "missing")


def test_a_config_with_flags_or_objects_keeps_them() -> None:
    strict = OmegaConf.create({"a": 1})
    OmegaConf.set_struct(strict, True)
    assert OmegaConf.is_struct(decode(encode(strict)))
    assert decode(encode(OmegaConf.create({"a": Colour.RED}))).a is Colour.RED


def test_a_list_that_holds_itself_survives() -> None:
    value: list[Any] = [1]
    value.append(value)
    back = decode(encode(value))
    assert back[0] == 1
    assert back[1] is back


def test_what_cannot_be_pickled_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"the user config, of type lock, cannot be sent to workers"):
        encode(threading.Lock(), "user config")


def test_lambdas_and_local_classes_are_sent() -> None:
    class Local:
        factor = 3

    scale = 2
    config = decode(encode({"f": lambda x: x * scale, "c": Local}))
    assert config["f"](4) == 8
    assert config["c"].factor == 3


def test_bytes_of_an_unknown_class_are_an_error_that_says_what_to_do() -> None:
    broken = Blob(codec="pickle", data=b"cno_such_module\nThing\n.")
    with pytest.raises(UsageError, match=r"no_such_module.*importable on every node"):
        decode(broken)


@pytest.mark.parametrize("has_file", [True, False])
def test_a_class_of_the_drivers_script_is_sent(tmp_path: Path, has_file: bool) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys\n"
        "from dataclasses import dataclass\n"
        "from unified.job.payload import encode\n"
        "STEP = 5\n"
        "@dataclass\nclass Config:\n    rate: float\n    def next(self): return self.rate + STEP\n"
        "sys.stdout.buffer.write(encode({'c': Config(2.0)}).data)\n"
    )
    program = [str(script)] if has_file else ["-c", script.read_text()]
    ran = subprocess.run([sys.executable, *program], capture_output=True, timeout=100, check=True)
    config = decode(Blob(codec="pickle", data=ran.stdout))["c"]
    assert (config.rate, config.next()) == (2.0, 7.0)
    again = decode(encode([config, type(config)]))
    assert type(again[0]) is again[1] is type(config)  # it travels on

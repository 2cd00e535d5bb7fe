"""What a script defines, read by whoever runs that script and by whoever does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from unified.bus.codec.codec import decode
from unified.errors import ProtocolError

SCRIPT = """
import sys, threading
from dataclasses import dataclass

from unified.bus.codec.codec import decode, encode
from unified.job import by_value

LOCK = threading.Lock()
STEP = 5

@dataclass
class Sample:
    score: float

    @staticmethod
    def step():
        return STEP

class Guarded:
    def lock(self):
        return LOCK

def double(x):
    return 2 * x

if "alone" in sys.argv:
    by_value.all_run_this_script()
if "write" in sys.argv:
    content = [Guarded()] if "guarded" in sys.argv else [Sample(0.5), Sample, double, {"a": Sample(1.0)}]
    encoded = encode(content)
    assert not encoded.buffers
    sys.stdout.buffer.write(encoded.body)
elif "read" in sys.argv:
    sample, cls, function, more = decode(sys.stdin.buffer.read())
    assert sample == Sample(0.5) and more == {"a": Sample(1.0)}, (sample, more)
    assert cls is Sample and function is double
    print("my own")
elif "guard" in sys.argv:
    (guarded,) = decode(sys.stdin.buffer.read())
    assert type(guarded) is Guarded
    print("my own")
elif "pass" in sys.argv:  # one that has another class of that name
    Other = Sample
    value = decode(sys.stdin.buffer.read())
    sample, cls, function, more = value
    assert type(sample) is cls is type(more["a"]) and cls is not Other
    assert (sample.score, cls.step(), function(4)) == (0.5, 5, 8)
    sys.stdout.buffer.write(encode(value).body)
"""


@pytest.fixture
def scripts(tmp_path: Path) -> tuple[Path, Path]:
    """Two programs of the same text."""
    paths = tmp_path / "train.py", tmp_path / "other.py"
    for path in paths:
        path.write_text(SCRIPT)
    return paths


def run(script: Path, *words: str, given: bytes = b"") -> bytes:
    ran = subprocess.run([sys.executable, str(script), *words], input=given, capture_output=True, timeout=100)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout


def test_whoever_runs_the_script_has_its_own_classes_and_others_build_them(scripts: tuple[Path, Path]) -> None:
    train, other = scripts
    written = run(train, "write")
    assert run(train, "read", given=written) == b"my own\n"
    assert run(train, "read", given=run(other, "pass", given=written)) == b"my own\n"


def test_where_all_run_one_script_no_code_is_sent(scripts: tuple[Path, Path]) -> None:
    train, _ = scripts
    written, alone = run(train, "write"), run(train, "write", "alone")
    assert len(alone) < len(written) / 4
    assert run(train, "read", "alone", given=alone) == b"my own\n"


def test_code_that_cannot_be_sent_is_missed_only_where_it_is_needed(scripts: tuple[Path, Path]) -> None:
    written = run(scripts[0], "write", "guarded")
    message = r"Guarded is defined in the script .*train\.py, which this process does not run, and its code could not"
    with pytest.raises(ProtocolError, match=message):
        decode(written)
    assert run(scripts[0], "guard", given=written) == b"my own\n"

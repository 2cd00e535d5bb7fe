"""Seeds of random jobs under every fault, with the real cores of master and agents: 400, or `UNIFIED_TEST_SEEDS`."""

import hashlib
import os
import subprocess
import sys

import pytest

from tests.support.sim.chaos import play
from tests.support.sim.transcript import Transcript

CHUNK = 10
QUICK = 1
NUM_SEEDS = int(os.environ.get("UNIFIED_TEST_SEEDS", "400"))
"""A thousand were more than a quarter of the slow suite; play them after a change of the cores."""


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(number * CHUNK, marks=() if number < QUICK else pytest.mark.slow)
        for number in range(NUM_SEEDS // CHUNK)
    ],
)
def test_seeds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        try:
            play(seed)
        except Exception as error:
            error.add_note(
                f"This was seed {seed}. `make sim SEED={seed}` plays it and prints its transcript; "
                f"with WRITE=NAME that becomes tests/sim/scenarios/NAME.txt."
            )
            raise


def test_a_seed_gives_the_same_transcript_in_every_process() -> None:
    code = "from tests.support.sim.transcript import Transcript; import hashlib, sys; "
    code += "print(hashlib.sha256(Transcript().play(['seed 3']).encode()).hexdigest())"
    found = {hashlib.sha256(Transcript().play(["seed 3"]).encode()).hexdigest()}
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
        found.add(done.stdout.strip())
    assert len(found) == 1

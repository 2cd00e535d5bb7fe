"""Entry points of the jobs that the page's tests look at. They print and report what could do harm in a browser."""

from __future__ import annotations

import os
import sys
import time

from unified import RoleGroup, current_worker

MARKUP = "<img src=x onerror=\"document.title='harmed'\">"
LINK = "\x1b]8;;javascript:document.title='harmed'\x07a link\x1b]8;;\x07"
HOSTILE_NAMES = (MARKUP, LINK, "\u202egnp.exe", "long" * 50)
HOSTILE = f"{MARKUP} {LINK} \u202egnp.exe nul\x00end \x1b[31mred\x1b[0m"


def train() -> None:
    worker, rank = current_worker(), int(os.environ["RANK"])
    print(HOSTILE, flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    sys.stdout.buffer.write(b"not UTF-8: \xff\xfe\n" + b"long " * 4_000 + b"\n")
    sys.stdout.flush()
    step = 0
    while not worker.should_stop:
        worker.report(step=step, total=100_000, loss=4 / (step + 1) + rank / 10, **dict.fromkeys(HOSTILE_NAMES, 1.0))
        print(f"step {step}", flush=True)
        step += 1
        sum(range(500_000))  # some milliseconds of work, or a profile of ten seconds may be without a sample of it
        time.sleep(0.2)


def fail() -> None:
    for step in range(5):
        current_worker().report(step=step, total=5, loss=1.0)
        time.sleep(0.1)
    if int(os.environ["RANK"]) == 1:
        raise ValueError(f"{MARKUP} is no sample")
    time.sleep(600)


def flood() -> None:
    """Print ten megabytes without the end of a line, and that when it is asked to stop."""
    print("y" * 10_000_000, end="", flush=True)
    while not current_worker().should_stop:
        time.sleep(0.1)
    print("\nthe end", flush=True)


def tell_time() -> None:
    for _ in range(20):
        print(f"it is {time.time():.6f}", flush=True)
        time.sleep(0.25)


def send_weights() -> None:
    import torch

    RoleGroup("rollout").sync_weights({"weight": torch.ones(3)}, version=7)
    time.sleep(600)

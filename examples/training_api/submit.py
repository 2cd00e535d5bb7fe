"""Posts a training run to the HTTP service, follows it, and shows what it left in S3: `python
examples/training_api/submit.py`, with `--master` for a cluster of yours."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import local_s3
import rules
from client import TrainingClient
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from unified.client.daemons import Daemon
from unified.client.embedded import EmbeddedCluster
from unified.storage import open_storage

LIVING = ("submitted", "running")
START_S = 30.0


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in order: everything below is stopped
    args.out.mkdir(parents=True, exist_ok=True)
    payload = json.loads(args.payload.read_text())
    with contextlib.ExitStack() as stack:
        buckets = sorted({payload[field].split("/")[2] for field in ("checkpoint_base_uri", "dataset_uri")})
        s3 = stack.enter_context(local_s3.running(args.out / "s3.log", buckets))
        os.environ.update(s3)  # the gateway, a cluster of this script's own, and its workers inherit them
        store, key = open_storage(payload["dataset_uri"])
        store.write(key, rules.make(2000))
        if args.master is None:
            args.master = stack.enter_context(EmbeddedCluster(nodes=2, devices_per_node=1)).address
        else:
            payload["env"] = s3  # agents of a cluster of yours know their own store, and not this one
        client = stack.enter_context(gateway(args.master, args.out.resolve()))
        name = client.submit(payload)["name"]
        print(f"POST /train: {name}", flush=True)
        try:
            status = follow(client, name, payload["extra_args"]["max_steps"])
        except BaseException:
            client.stop(name)
            raise
        show(client, name, payload)
    print(f"{name} has {status['status']}" + (f": {status['detail']}" if status.get("detail") else ""))
    return 0 if status["status"] == "succeeded" else 1


@contextlib.contextmanager
def gateway(master: str, out: Path) -> Iterator[TrainingClient]:
    """The HTTP service on a free port of this host, and a client of it."""
    token = secrets.token_urlsafe()
    address = out / "gateway.address"
    address.unlink(missing_ok=True)
    daemon = Daemon(
        "unified_gateway",
        ["--master", master, "--port", "0", "--address-file", str(address), "--die-with-parent", str(os.getpid())],
        out / "gateway.log",
        {**os.environ, "TRAINER_API_TOKEN": token},
    )
    try:
        deadline = time.monotonic() + START_S
        while not address.exists():
            if daemon.wait(0.05) or time.monotonic() > deadline:
                raise RuntimeError(f"the gateway did not start: {daemon.last_words()}")
        url = address.read_text().strip()
        urllib.request.urlopen(f"{url}/healthz", timeout=START_S).close()
        print(f"the training API listens at {url}")
        yield TrainingClient(url, token)
    finally:
        Daemon.end_all([daemon], timeout_s=5.0)


def follow(client: TrainingClient, name: str, max_steps: int) -> dict[str, Any]:
    """Show log and progress until the run has ended; return its last status."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("submitted", total=max_steps)
        reader = threading.Thread(target=show_log, args=(client, name, progress), daemon=True)
        reader.start()
        status = client.status(name)
        while status["status"] in LIVING:
            time.sleep(0.3)
            status = client.status(name)
            if points := client.metrics(name):
                last = points[-1]
                progress.update(bar, completed=last["step"], description=f"loss {last['metrics'].get('loss', 0):.3f}")
        reader.join(timeout=10.0)
    return status


def show_log(client: TrainingClient, name: str, progress: Progress) -> None:
    """Print the log of the run above the progress bar."""
    for line in client.logs(name):
        progress.console.print(line, soft_wrap=True, markup=False, highlight=False)


def show(client: TrainingClient, name: str, payload: dict[str, Any]) -> None:
    """Print the loss by step as a chart, and what the run has written."""
    losses = {point["step"]: point["metrics"]["loss"] for point in client.metrics(name) if "loss" in point["metrics"]}
    draw(list(losses), list(losses.values()))
    run = f"{payload['checkpoint_base_uri']}/{payload['run_id']}"
    store, prefix = open_storage(run)
    print(f"{run}/")
    for each in store.list(f"{prefix}/"):
        print(f"  {each.key.removeprefix(f'{prefix}/'):<50} {each.nbytes:>10,} bytes")


def draw(steps: list[int], losses: list[float]) -> None:
    """Print a curve."""
    import plotext

    chart = plotext.figure
    chart.plot_size(76, 15)
    chart.title("loss (nats a byte) by step")
    chart.draw(chart.signal(steps, losses, marker="braille").lines())
    chart.show(colorless=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--master", default=os.environ.get("UNIFIED_MASTER"), help="of a running cluster (default: one here)"
    )
    parser.add_argument(
        "--payload",
        type=Path,
        default=Path(__file__).parent / "payload.json",
        help="what is posted (default: payload.json beside this script)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/training_api"), help="for logs (default: out/training_api)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

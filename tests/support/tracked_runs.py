"""What trackers hold of a run, read by their own readers; the steps and values of a name, in their order."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path

Held = list[tuple[int, float]]


def in_tensorboard(folder: Path, name: str) -> Held:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.exists():
        return []
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)] if name in reader.Tags()["scalars"] else []


def in_mlflow(folder: Path, name: str) -> Held:
    """Of the only run of the only experiment."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=folder.as_uri())
    experiments = [each.experiment_id for each in client.search_experiments() if each.name != "Default"]
    runs = client.search_runs(experiments)
    if not runs:
        return []
    [run] = runs
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def in_wandb(folder: Path, name: str) -> Held:
    """Of the offline folders of the only run, the earliest first. W&B has no reader of them in Python: records of
    LevelDB, of messages of its own schema."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) <= 1, files
    held: Held = []
    for file in files:
        data, at, message = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            room = 32768 - at % 32768
            if room < 7:
                at += room
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            part = data[at + 7 : at + 7 + length]
            if kind == 0 or len(part) < length:
                break
            at += 7 + length
            message = part if kind in (1, 2) else message + part
            if kind in (1, 4):
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in Record.FromString(message).history.item
                }
                if name in items:
                    held.append((items["_step"], items[name]))
    return held


def in_trackio(folder: Path, project: str, name: str) -> Held:
    """Of the only run."""
    import sqlite3

    file = folder / f"{project}.db"
    if not file.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    found = [(step, json.loads(metrics)) for step, metrics in rows]
    return [(step, metrics[name]) for step, metrics in found if name in metrics]

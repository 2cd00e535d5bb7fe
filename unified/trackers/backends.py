"""The four trackers, each over its own library, which is imported when the tracker is opened."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unified.trackers.points import Point, TrackedRun, Tracker, Value

_NOT_MLFLOW = re.compile(r"[^\w.\-:/ ]")
"""Characters that MLflow does not accept in a name."""
_MLFLOW_BATCH = 1000
_WANDB_BLOCK = 2**15


class TensorBoard:
    """A folder of event files below the named folder. Repeated steps replace earlier values."""

    rewinds = True

    def __init__(self, folder: str, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(Path(folder, run.name)))
        self._mark = Path(folder, run.name, ".last-step")
        self.highest = int(self._mark.read_text() or -1) if self._mark.exists() else -1

    def write(self, points: list[Point]) -> None:
        """Write numbers; texts make no curve, and are left out."""
        for point in points:
            if point.rewinds:  # readers drop earlier values of this step and of later steps
                self._add(point, session_log=self._events.SessionLog(status=self._events.SessionLog.START))
            values = [self._summaries.Summary.Value(tag=n, simple_value=v) for n, v in _numbers(point.values)]
            self._add(point, summary=self._summaries.Summary(value=values))
        self._writer.flush()
        self._mark.write_text(str(points[-1].step))

    def _add(self, point: Point, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=point.at, step=point.step, **what))

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of MLflow, found again by its tag. The last value of each text becomes a tag."""

    rewinds = False

    def __init__(self, uri: str, run: TrackedRun) -> None:
        if uri and "://" not in uri and not uri.startswith("file:"):
            uri = Path(uri).absolute().as_uri()
        if uri.startswith("file:"):  # MLflow 3 refuses folders without this variable
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient, entities

        self._entities, self._client = entities, (client := MlflowClient(tracking_uri=uri or None))
        named = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.job
        experiment = client.get_experiment_by_name(named)
        where = experiment.experiment_id if experiment else client.create_experiment(named)
        found = client.search_runs([where], f"tags.`unified.run` = '{run.id}'", max_results=1)
        opened = found[0] if found else client.create_run(where, run_name=run.name, tags={"unified.run": run.id})
        self._id = opened.info.run_id
        client.update_run(self._id, status="RUNNING")
        histories = (client.get_metric_history(self._id, name) for name in opened.data.metrics)
        self.highest = max((metric.step for history in histories for metric in history), default=-1)

    def write(self, points: list[Point]) -> None:
        """Send metrics, a thousand values at a time, and texts."""
        metrics = [
            self._entities.Metric(_NOT_MLFLOW.sub("_", name), value, int(point.at * 1000), point.step)
            for point in points
            for name, value in _numbers(point.values)
        ]
        for begin in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics[begin : begin + _MLFLOW_BATCH])
        texts = {n: v for point in points for n, v in point.values.items() if isinstance(v, str)}
        for name, text in texts.items():
            self._client.set_tag(self._id, _NOT_MLFLOW.sub("_", name), text)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class WandB:
    """A run of Weights & Biases. Offline, each incarnation of the worker has its own folder, with the same run id."""

    rewinds = False

    def __init__(self, project: str, run: TrackedRun) -> None:
        # By default, a kill would lose the values of 15 s.
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1.0")
        import wandb

        entity, _, name = project.rpartition("/")
        self._run = wandb.init(
            entity=entity or None,
            project=name or os.environ.get("WANDB_PROJECT") or run.job,
            id=run.id,
            name=run.name,
            resume="allow",
            reinit="create_new",  # a script may have runs of its own
            settings=wandb.Settings(console="off"),
        )
        earlier = Path(self._run.settings.wandb_dir).glob(f"offline-run-*-{run.id}/run-{run.id}.wandb")
        self.highest = max([self._run.starting_step - 1, *map(_last_step, earlier)])

    def write(self, points: list[Point]) -> None:
        """Pass points to the library's own process or thread."""
        for point in points:
            self._run.log(point.values, step=point.step)

    def close(self) -> None:
        self._run.finish()


class Trackio(WandB):
    """A run of trackio, whose own thread writes twice a second."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(project=project or run.job, name=run.id, resume="allow", embed=False)
        self.highest = self._run._next_step - 1  # there is no public name for it


TRACKERS: dict[str, Callable[[str, TrackedRun], Tracker]]
TRACKERS = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB, "trackio": Trackio}


def _numbers(values: dict[str, Value]) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in values.items() if not isinstance(value, str)]


def _last_step(file: Path) -> int:
    """Return the highest step in an offline file of W&B, for which W&B has no reader in Python; -1: there is none.

    The file is a log of LevelDB: blocks of records. A record is 7 bytes, with length and kind, and a part of a message.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message, highest = file.read_bytes(), 7, b"", -1
    while at + 7 <= len(data):
        if (padding := -at % _WANDB_BLOCK) < 7 and padding:
            at += padding
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        at += 7 + length
        if not kind or at > len(data):  # an incomplete record
            break
        message = (b"" if kind in (1, 2) else message) + data[at - length : at]
        if kind in (1, 4):  # not by summaries: their step may have no values yet
            for item in Record.FromString(message).history.item:
                if (item.key or "/".join(item.nested_key)) == "_step":
                    highest = max(highest, int(item.value_json))
    return highest

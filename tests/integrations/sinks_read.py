"""The loggers' own readers: what they hold of a run, as metrics by step, and the texts of its alarms."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Metrics = dict[int, dict[str, float]]


def needs(module: str) -> Any:
    """Import a logger, or skip the test and say what is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return pytest.skip(f"{module} is not installed ({error}): pip install {module}")


@dataclass(frozen=True)
class Reader:
    """How one logger is set up and read; `single`: it keeps float32."""

    module: str
    sink: Callable[[Path], str]
    metrics: Callable[[Path], Metrics]
    alarms: Callable[[Path], list[str]]
    single: bool = False
    prepare: Callable[[Path, pytest.MonkeyPatch], None] = lambda path, patch: None


def _put(found: Metrics, step: int, name: str, value: float) -> None:
    assert name not in found.setdefault(step, {}), f"{name} is there twice at step {step}"
    found[step][name] = value


def _in_order(found: Metrics) -> Metrics:
    return dict(sorted(found.items()))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "a.jsonl").read_text().splitlines()]


def _jsonl(path: Path) -> Metrics:
    found: Metrics = {}
    for line in lines_of(path):
        for name, value in line.get("metrics", {}).items():
            _put(found, line["step"], name, value)
    return found


def _events(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = path / "tb" if (path / "tb").is_dir() else path
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def _tensorboard(path: Path) -> Metrics:
    events, found = _events(path), {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name) if name.startswith("attention/") else ():
            _put(found, event.step, name, event.value)
    return _in_order(found)


def _tensorboard_alarms(path: Path) -> list[str]:
    events = _events(path)
    texts = events.Tensors("attention/alarms/text_summary")
    return [event.tensor_proto.string_val[0].decode().partition(": ")[2] for event in texts]


def _log_records(content: bytes) -> Iterator[bytes]:
    """Of a log of 32 KiB blocks, where each piece has its checksum, length and kind (1 whole, 2 first, 4 last)."""
    at, whole, block = 7, b"", 1 << 15  # 7: the file's own header
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def _wandb_records(path: Path) -> Iterator[Any]:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes on a while after a run was finished
    for file in sorted(path.glob("wandb/*run-*/*.wandb")):
        for content in _log_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            yield record


def _wandb(path: Path) -> Metrics:
    found: Metrics = {}
    for record in _wandb_records(path):
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if "attention/step" in items:
            for name in items.keys() - {"attention/step"}:
                if name.startswith("attention/"):
                    _put(found, items["attention/step"], name, items[name])
    return _in_order(found)


def _wandb_alarms(path: Path) -> list[str]:
    return [record.alert.text for record in _wandb_records(path) if record.HasField("alert")]


def _wandb_here(path: Path, patch: pytest.MonkeyPatch) -> None:
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
        patch.setenv(f"WANDB_{name}", str(path))
    patch.setenv("WANDB_SILENT", "true")
    importlib.import_module("wandb").teardown()  # it reads the environment once


def _mlflow_runs(path: Path) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{path}/ml.db")
    (run,) = client.search_runs([client.get_experiment_by_name("attention").experiment_id])
    return client, run


def _mlflow(path: Path) -> Metrics:
    client, run = _mlflow_runs(path)
    found: Metrics = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            _put(found, metric.step, name, metric.value)
    return _in_order(found)


def _mlflow_alarms(path: Path) -> list[str]:
    tags = _mlflow_runs(path)[1].data.tags
    return [text.partition(": ")[2] for tag, text in tags.items() if tag.startswith("attention.alarm.")]


def _trackio_here(path: Path, patch: pytest.MonkeyPatch) -> None:
    for module in ("sqlite_storage", "utils"):
        patch.setattr(f"trackio.{module}.TRACKIO_DIR", path / "trackio")


def _trackio(path: Path) -> Metrics:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("p")
    found: Metrics = {}
    for row in SQLiteStorage.get_logs("p", run):
        for name in row.keys() - {"step", "timestamp"}:
            _put(found, row["step"], name, row[name])
    return _in_order(found)


def _trackio_alarms(path: Path) -> list[str]:
    from trackio import Api

    return [alert["text"] for alert in Api().alerts("p")]


def _swanlab_records(path: Path) -> Iterator[tuple[Path, Any]]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for file in sorted((path / "sw").glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for content in reader:
            record = Record()
            record.ParseFromString(content)
            yield file.parent, record
        reader.close()


def _swanlab(path: Path) -> Metrics:
    found: Metrics = {}
    for _, record in _swanlab_records(path):
        if record.HasField("scalar"):
            _put(found, record.scalar.step, record.scalar.key, record.scalar.value.number)
    return _in_order(found)


def _swanlab_alarms(path: Path) -> list[str]:
    records = [(folder, record.media) for folder, record in _swanlab_records(path) if record.HasField("media")]
    files = [folder / "media" / "text" / item.filename for folder, media in records for item in media.value.items]
    return [file.read_text().partition(": ")[2] for file in files]


READERS = {
    "jsonl": Reader(
        "json",
        lambda path: f"jsonl:{path}/a.jsonl",
        _jsonl,
        lambda path: [line["alarm"]["text"] for line in lines_of(path) if "alarm" in line],
    ),
    "tensorboard": Reader(
        "tensorboard", lambda path: f"tensorboard:{path}/tb", _tensorboard, _tensorboard_alarms, single=True
    ),
    "wandb": Reader("wandb", lambda path: "wandb:p", _wandb, _wandb_alarms, prepare=_wandb_here),
    "mlflow": Reader("mlflow", lambda path: f"mlflow:sqlite:///{path}/ml.db", _mlflow, _mlflow_alarms),
    "trackio": Reader("trackio", lambda path: "trackio:p", _trackio, _trackio_alarms, prepare=_trackio_here),
    "swanlab": Reader("swanlab", lambda path: f"swanlab:{path}/sw", _swanlab, _swanlab_alarms),
}

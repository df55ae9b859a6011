"""Results on disk: one file a checkpoint, written whole as soon as it is there, so that none is computed twice.

A file's key is a hash of all that decides its numbers: where the checkpoint lies, size and time of each of its files,
the options, and the code and versions. One of another key, or one that is damaged, is computed again and replaced.
"""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqrtdk import _json
from sqrtdk._environment import numbers_from
from sqrtdk._stranger import parse_json
from sqrtdk.audit.records import SEVERITIES, Finding
from sqrtdk.errors import RunFolderError
from sqrtdk.monitor import disk
from sqrtdk.monitor.checkpoints._find import Checkpoint
from sqrtdk.monitor.checkpoints._measure import transformers_version
from sqrtdk.monitor.disk import Lock
from sqrtdk.monitor.folder import CHECKPOINTS
from sqrtdk.monitor.samples import CallSample, StepSample

MAX_BYTES = 2**28
_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a checkpoint: a hash of their names, sizes and times, and the newest time, in seconds."""

    digest: str
    time: float


@dataclass(frozen=True, slots=True)
class Result:
    """What one checkpoint gave; see `_measure.measure`."""

    loss: float | None
    state: str
    reason: str | None
    sample: StepSample | None = None
    findings: tuple[Finding, ...] = ()
    model: Any = None
    inputs: str = ""
    notes: tuple[str, ...] = ()


class Kept:
    """The directory of the results, held against other processes while the context is open."""

    def __init__(self, output: Path) -> None:
        self._folder = output / CHECKPOINTS

    def __enter__(self) -> Kept:
        disk.make(self._folder)
        self._lock = Lock(self._folder)
        disk.tidy(self._folder, "*")
        return self

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def get(self, one: Checkpoint, key: str) -> Result | None:
        """The result of a checkpoint; None where there is none of this key."""
        try:
            content = disk.take(self._path(one), MAX_BYTES)
            document = parse_json(content, "the result", RunFolderError, "")
            return read_result(document["result"]) if document["key"] == key else None
        except (OSError, RunFolderError, ValueError, KeyError, TypeError):  # not there, or damaged
            return None

    def put(self, one: Checkpoint, key: str, document: dict[str, Any]) -> None:
        """Keep a result.

        Raises:
            OutputError: it can't be written.
        """
        text = _json.document({"checkpoint": str(one.path), "key": key, "result": document})
        disk.put(self._path(one), text.encode())

    def _path(self, one: Checkpoint) -> Path:
        return self._folder / f"step-{one.step}-{hashlib.sha256(str(one.path).encode()).hexdigest()[:16]}.json"


def files_of(directory: Path) -> Files:
    """The state of a checkpoint's files, by which a change of them is seen."""
    told, newest = [], 0
    with suppress(OSError):
        newest = directory.stat().st_mtime_ns
    with suppress(OSError):  # one that can't be listed can't be loaded either, which is told then
        found = sorted(path for path in directory.iterdir() if path.is_file())
        states = [(path.name, path.stat()) for path in found]
        told = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
        newest = max((state.st_mtime_ns for _, state in states), default=newest)
    return Files(_hash(told), newest / 1e9)


def key_of(one: Checkpoint, files: Files, measured_with: Any) -> str:
    """Name of a result: equal where the numbers are."""
    return _hash([str(one.path), one.step, files.digest, measured_with, dict(numbers_from()), transformers_version()])


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode(errors="surrogateescape")).hexdigest()[:32]


def read_result(document: dict[str, Any]) -> Result:
    """A result from the JSON data that `_measure.measure` returned, also as it comes back from a file.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    sample = document.get("sample")
    return Result(
        loss=next(map(_number, document["loss"]), None),
        state=str(document["state"]),
        reason=document.get("reason"),
        sample=None if sample is None else _read_sample(sample),
        findings=tuple(_read_finding(finding) for finding in document.get("findings", ())),
        model=document.get("model"),
        inputs=str(document.get("inputs", "")),
        notes=tuple(map(str, document.get("notes", ()))),
    )


def _read_sample(document: dict[str, Any]) -> StepSample:
    calls = tuple(_read_call(call) for call in document["calls"])
    return StepSample(**document | {"calls": calls, "not_measured": tuple(document["not_measured"])})


def _read_call(document: dict[str, Any]) -> CallSample:
    columns = {name: [_number(value) for value in values] for name, values in document["columns"].items()}
    ratio = document["scale_ratio"]
    more = {"columns": columns, "scale_ratio": None if ratio is None else _number(ratio)}
    return CallSample(**document | more | {"factors": tuple(document["factors"])})


def _read_finding(document: dict[str, Any]) -> Finding:
    finding = Finding(**document | {name: _value(document[name]) for name in ("value", "threshold")})
    if finding.severity not in SEVERITIES:
        raise ValueError(finding.severity)
    return finding


def _value(value: Any) -> float | str | None:
    if isinstance(value, str):
        return _INFINITIES.get(value, value)
    return None if value is None or value != value else value


def _number(value: Any) -> float:
    """As `_json` writes it: null is NaN, and infinities are words."""
    return math.nan if value is None else _INFINITIES[value] if isinstance(value, str) else float(value)

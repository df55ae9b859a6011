"""The record of a run on a GPU, where there is one, and the sentence that README, docs and `sqrtdk bench` say of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError

NAME = "gpu.json"
# In a wheel beside this file (scripts/hatch_build.py), in a checkout where all records are.
PLACES = (Path(__file__).with_name(NAME), Path(__file__).parents[3] / "benchmarks" / "results" / NAME)
NOT_MEASURED = "Not measured on a GPU: every figure and test of this repository is from a CPU."
SCHEMA_VERSION = 1


def read(places: Sequence[Path] = PLACES) -> Mapping[str, Any] | None:
    """The record of the first file that exists, as benchmarks/gpu.py wrote it; None: nothing was measured.

    Raises:
        InvalidValueError: the file holds something else, or a dry run on a CPU.

    Example:
        >>> read([]) is None
        True
    """
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version, dry = record["schema_version"], record["check"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(f"{path.name} is no record of a GPU", hint="make gpu writes one.") from error
    if version != SCHEMA_VERSION or dry:
        what = "of a dry run, which measures nothing" if dry else f"of version {version}, not {SCHEMA_VERSION}"
        raise InvalidValueError(f"{path.name} is a record {what}", hint="make gpu writes one.")
    return record  # type: ignore[no-any-return]


def sentence(record: Mapping[str, Any] | None) -> str:
    """What was measured on a GPU, with the figures of every target; or that nothing was.

    Example:
        >>> sentence(None)
        'Not measured on a GPU: every figure and test of this repository is from a CPU.'
    """
    if record is None:
        return NOT_MEASURED
    targets = record["targets"]
    parts = [f"{target['text']}: {figure_text(target)}" for target in targets]
    met = sum(target["met"] is True for target in targets)
    return (
        f"Measured on one {record['device']['name']} in bfloat16, torch {record['versions']['torch']}: "
        f"{'; '.join(parts)}. {met} of {len(targets)} targets are met."
    )


def figure_text(target: Mapping[str, Any]) -> str:
    """The figure of a target and whether it is met.

    Example:
        >>> figure_text({"figure": 412.3, "unit": "TFLOP/s", "met": True, "missing": []})
        '412.3 TFLOP/s, met'
        >>> figure_text({"figure": None, "unit": "times", "met": None, "missing": ["all"]})
        'not measured'
    """
    if target["figure"] is None:
        return "not measured"
    verdict = {True: "met", False: "missed", None: "not measured everywhere"}[target["met"]]
    return f"{target['figure']:.4g} {target['unit']}, {verdict}"

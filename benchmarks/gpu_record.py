"""The GPU that a measurement runs on, the record of benchmarks/gpu.py, and the sentence that README and docs say of it.

The machine is told by name, driver, clocks, versions and the commit of the code.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sqrtdk._environment import environment
from sqrtdk.errors import InvalidValueError

RECORD = Path(__file__).parent / "results" / "gpu.json"
NOT_MEASURED = "Not measured on a GPU: every figure and test of this repository is from a CPU."
SCHEMA_VERSION = 1

CLOCKS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
    "pstate": "state",
}
LIMITS = {
    "driver_version": "driver",
    "clocks.max.sm": "largest_sm_mhz",
    "clocks.max.mem": "largest_memory_mhz",
    "power.limit": "largest_watts",
}
PATIENCE = 20.0  # seconds for a program that tells of the machine


def machine(device: torch.device, root: Path) -> dict[str, Any]:
    """Device, versions and commit, ready for JSON.

    Args:
        device: that is measured.
        root: of the checkout.
    """
    around = environment()
    return {
        "device": described(device),
        "versions": around["versions"] | {"triton": _triton(), "cuda": torch.version.cuda, "cudnn": _cudnn(device)},
        "platform": around["platform"],
        "cpu": around["cpu"],
        "cpus": around["cpus"],
        "commit": commit(root),
    }


def described(device: torch.device) -> dict[str, Any]:
    """Name, size and limits of a device; a CPU has its name alone."""
    if device.type != "cuda":
        return {"name": environment()["cpu"], "kind": device.type}
    its = torch.cuda.get_device_properties(device)
    return {
        "name": its.name,
        "kind": "cuda",
        "capability": f"{its.major}.{its.minor}",
        "processors": its.multi_processor_count,
        "memory_gib": round(its.total_memory / 2**30, 1),
        "l2_mib": round(getattr(its, "L2_cache_size", 0) / 2**20, 1),
        **asked(LIMITS, device),
    }


def clocks(device: torch.device) -> dict[str, Any]:
    """Clocks, power and temperature of now, each with the time; a CPU tells none."""
    now = {"at": datetime.now(UTC).isoformat(timespec="seconds")}
    return now | (asked(CLOCKS, device) if device.type == "cuda" else {})


def asked(fields: dict[str, str], device: torch.device) -> dict[str, str | None]:
    """Fields of nvidia-smi by names of ours; None where it does not tell."""
    nothing: dict[str, str | None] = dict.fromkeys(fields.values())
    if shutil.which("nvidia-smi") is None:
        return nothing
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")).removeprefix("GPU-")
    which = ["-i", f"GPU-{uuid}"] if uuid else []
    told = _told("nvidia-smi", *which, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    values = [value.strip() for value in told.splitlines()[0].split(",")] if told else []
    return dict(zip(fields.values(), values, strict=True)) if len(values) == len(fields) else nothing


def commit(root: Path) -> dict[str, Any]:
    """The commit of a checkout, and whether tracked files differ from it; None where git does not tell."""
    name = _told("git", "-C", str(root), "rev-parse", "HEAD")
    if not name:
        return {"id": None, "changed": None}
    return {"id": name, "changed": bool(_told("git", "-C", str(root), "status", "--porcelain", "-uno"))}


def _told(*command: str) -> str:
    """What a program prints; nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _triton() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def _cudnn(device: torch.device) -> int | None:
    return torch.backends.cudnn.version() if device.type == "cuda" else None


def read(path: Path = RECORD) -> Mapping[str, Any] | None:
    """The record that benchmarks/gpu.py wrote; None if there is no such file: nothing was measured.

    Raises:
        InvalidValueError: the file holds something else, or a dry run on a CPU.
    """
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version, dry = record["schema_version"], record["check"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(f"{path.name} is no record of a GPU", hint="make gpu writes one.") from error
    if version != SCHEMA_VERSION or dry:
        what = "of a dry run, which measures nothing" if dry else f"of version {version}, not {SCHEMA_VERSION}"
        raise InvalidValueError(f"{path.name} is a record {what}", hint="make gpu writes one.")
    return record


def sentence(record: Mapping[str, Any] | None) -> str:
    """What was measured on a GPU, with the figures of every target; or that nothing was."""
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
    """The figure of a target and whether it is met."""
    if target["figure"] is None:
        return "not measured"
    verdict = {True: "met", False: "missed", None: "not measured everywhere"}[target["met"]]
    return f"{target['figure']:.4g} {target['unit']}, {verdict}"

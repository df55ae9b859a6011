"""The GPU that a measurement runs on: name, driver, clocks, versions, and the commit of the code."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sqrtdk._environment import environment

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
    return torch.backends.cudnn.version() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

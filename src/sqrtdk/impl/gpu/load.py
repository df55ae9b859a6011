"""Whether Triton can run here."""

from __future__ import annotations

import os

import torch


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable(device: torch.device) -> str | None:
    """Why the kernel can't run on a device; None where it can."""
    return None if interpreted() or device.type in ("cuda", "xpu") else "it runs on GPUs"

"""The Triton kernel of `impl="triton"`: `forward` and `backward` do the arithmetic, `load` knows whether it can run."""

from __future__ import annotations

import torch

GPUS = ("cuda", "xpu")  # "cuda" includes AMD's GPUs


def gpu_count(kind: str) -> int:
    """Return how many GPUs of a kind of `GPUS` ("cuda" or "xpu") torch can use; 0 if it has no support for it."""
    module = torch.get_device_module(kind)
    return int(module.device_count()) if module.is_available() else 0

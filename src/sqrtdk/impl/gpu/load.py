"""Whether Triton can run a call, and why not. Triton is imported only if a GPU or its interpreter may use it.

`torch.compile` traces through here, so what it can't follow runs once, when `look` is imported, and is kept as values.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from sqrtdk.impl.gpu import GPUS, gpu_count
from sqrtdk.messages import Message

YES = ("1", "true", "yes", "on", "y")  # the values that Triton accepts as true


@dataclass(frozen=True, slots=True)
class State:
    """Whether the Triton kernel can be used in this process.

    Attributes:
        interpreted: whether Triton's interpreter would run it, on a CPU.
        reason: why it can't be used; None if it can.
    """

    interpreted: bool
    reason: str | None


def state() -> State:
    """Return whether the Triton kernel can be used in this process.

    With several GPUs the reason is None if one of them can run it. Triton is imported only if there is a GPU, or if its
    interpreter is enabled.
    """
    if interpreted():
        return State(True, unavailable(torch.device("cpu")))
    seen = [torch.device(kind, i) for kind in GPUS for i in range(gpu_count(kind))]
    reasons = [unavailable(device) for device in seen] or [Message("machine.triton.no_gpu")]
    return State(False, None if None in reasons else reasons[0])


def interpreted() -> bool:
    """Return whether TRITON_INTERPRET is set, so that Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in YES


def unavailable(device: torch.device) -> str | None:
    """Return the reason, a sentence, why the kernel can't run on a device; None if it can."""
    if device.type not in GPUS and not interpreted():
        return f"Triton runs on GPUs, and the tensors are on {device.type}"
    from sqrtdk.impl.gpu import look

    if look.REASON is not None or interpreted():
        return look.REASON
    return look.DEVICES.get((device.type, device.index or 0), f"torch can't use {device.type} {device.index or 0} here")

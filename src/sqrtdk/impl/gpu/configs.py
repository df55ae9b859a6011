"""Sizes of tiles and programs, by architecture; nothing is tuned at run time.

Chosen by what `scripts/gpu_kernels.py` says of the compiled kernels (docs/gpu-kernel.md): shared memory, registers,
spills, instructions a logit. `python benchmarks/gpu_configs.py` times other ones on the GPU that is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is cut: rows and keys of a tile, warps and pipeline stages, whether loads go by descriptor.

    In the backward kernels block_m is what a program keeps (keys or rows), block_n what it sweeps.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool = False


class Forward(NamedTuple):
    """Configurations of the forward kernel for one architecture, kind of number and width."""

    full: Config
    causal: Config
    full_statistics: Config
    causal_statistics: Config


class Backward(NamedTuple):
    """Those of the backward kernels."""

    keys: Config
    rows: Config


INTERPRETER = Config(64, 32, 4, 1)  # a block costs it 20 ms, whatever its size
FP_FUSION = True  # Triton's default of today, said so that another one changes no digit
WIDTHS = (64, 128, 256)  # a width counts as the next of these

# How products of float32 are made; plain tf32 would keep 10 bits.
PRECISION = {"sm_80": "tf32x3", "sm_90": "tf32x3", "sm_100": "tf32x3", "gfx942": "ieee", "interpreter": "ieee"}

A = Config(128, 64, 4, 2)
B = Config(128, 128, 8, 2)
C = Config(64, 64, 4, 2)
D = Config(128, 64, 8, 2)
T64 = Config(128, 64, 8, 3, True)
T128 = Config(128, 128, 8, 2, True)
N64 = Config(128, 64, 8, 2, True)
S = Config(64, 32, 4, 2)
M = Config(128, 64, 4, 1)

FORWARD = {
    ("sm_80", "half", 64): Forward(A, A, D, D),
    ("sm_80", "half", 128): Forward(D, D, D, D),
    ("sm_80", "half", 256): Forward(D, D, S, S),
    ("sm_80", "single", 64): Forward(S, S, S, S),
    ("sm_80", "single", 128): Forward(S, S, S, S),
    ("sm_80", "single", 256): Forward(S, S, S, S),
    ("sm_90", "half", 64): Forward(T128, T128, T128, T128),
    ("sm_90", "half", 128): Forward(T128, T128, N64, N64),
    ("sm_90", "half", 256): Forward(N64, N64, N64, N64),
    ("sm_90", "single", 64): Forward(S, S, S, S),
    ("sm_90", "single", 128): Forward(S, S, S, S),
    ("sm_90", "single", 256): Forward(S, S, S, S),
    ("sm_100", "half", 64): Forward(T128, T128, T128, T128),
    ("sm_100", "half", 128): Forward(T128, T128, N64, N64),
    ("sm_100", "half", 256): Forward(N64, N64, N64, N64),
    ("sm_100", "single", 64): Forward(S, S, S, S),
    ("sm_100", "single", 128): Forward(S, S, S, S),
    ("sm_100", "single", 256): Forward(S, S, S, S),
    ("gfx942", "half", 64): Forward(M, M, M, M),
    ("gfx942", "half", 128): Forward(M, M, M, M),
    ("gfx942", "half", 256): Forward(C, C, C, C),
    ("gfx942", "single", 64): Forward(S, S, S, S),
    ("gfx942", "single", 128): Forward(S, S, S, S),
    ("gfx942", "single", 256): Forward(S, S, S, S),
}

BACKWARD = {
    (target, kind, width): Backward(C, C) if kind == "half" and width < 256 else Backward(S, S)
    for target, kind, width in FORWARD
}


def nearest(target: str) -> str:
    """The architecture whose configurations serve `target`: itself or the next older one of its maker."""
    if target in PRECISION:
        return target
    if target.startswith("sm_"):
        number = int("".join(c for c in target.removeprefix("sm_") if c.isdigit()))
        return "sm_100" if 100 <= number < 120 else "sm_90" if 90 <= number < 100 else "sm_80"
    return "gfx942" if target.startswith("gfx") else "sm_80"


def _key(target: str, dtype: torch.dtype, width: int) -> tuple[str, str, int]:
    kind = "single" if dtype == torch.float32 else "half"
    return nearest(target), kind, next(w for w in WIDTHS if width <= w)


def forward_config(target: str, dtype: torch.dtype, width: int, causal: bool, statistics: bool) -> Config:
    """The configuration of the forward kernel; `width` is the larger of the padded E and Ev."""
    if target == "interpreter":
        return INTERPRETER
    return FORWARD[_key(target, dtype, width)][causal + 2 * statistics]


def backward_config(target: str, dtype: torch.dtype, width: int) -> Backward:
    """The configurations of the backward kernels, of keys and of rows."""
    if target == "interpreter":
        return Backward(Config(32, 32, 4, 1), Config(32, 32, 4, 1))
    return BACKWARD[_key(target, dtype, width)]


def precision(target: str) -> str:
    """How products of float32 are made, for `tl.dot`."""
    return PRECISION[nearest(target)]

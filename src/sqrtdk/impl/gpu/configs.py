"""Sizes of tiles and programs, by architecture; nothing is tuned at run time.

Chosen from what `scripts/gpu_kernels.py` reports of the compiled kernels (docs/en/kernels.md): shared memory,
registers, spills, instructions per logit. `python benchmarks/gpu_configs.py` times other sizes on the present GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one kernel.

    Attributes:
        block_m: Rows of a tile; in the backward kernels, the keys or rows that a program keeps.
        block_n: Keys of a tile; in the backward kernels, the rows or keys that a program sweeps at a time.
        warps: Warps of a program.
        stages: Stages of the software pipeline.
        descriptors: Whether loads use tensor descriptors.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool = False


class Forward(NamedTuple):
    """Configurations of the forward kernel for one architecture, dtype kind and width.

    Attributes:
        full: Without statistics, all keys are seen.
        causal: Without statistics, later keys are hidden.
        full_statistics: With statistics, all keys are seen.
        causal_statistics: With statistics, later keys are hidden.
    """

    full: Config
    causal: Config
    full_statistics: Config
    causal_statistics: Config


class Backward(NamedTuple):
    """Configurations of the backward kernels.

    Attributes:
        keys: Of the kernel for the gradients of key and value.
        rows: Of the kernel for the gradient of the query.
    """

    keys: Config
    rows: Config


INTERPRETER = Config(64, 32, 4, 1)  # a block costs the interpreter 20 ms, whatever its size
FP_FUSION = True  # Triton's present default, fixed so that another default changes no digit
FEW_ROWS = 64
WIDTHS = (64, 128, 256)  # a width is rounded up to one of these

# How products of float32 are computed; plain tf32 would keep 10 bits.
PRECISION = {"sm_80": "tf32x3", "sm_90": "tf32x3", "sm_100": "tf32x3", "gfx942": "ieee", "interpreter": "ieee"}

# Names: rows x keys of a tile, warps, stages, D for descriptors.
W4 = Config(64, 64, 4, 2)
W4_32 = Config(64, 32, 4, 2)
W4_128 = Config(128, 64, 4, 2)
W8_64 = Config(128, 64, 8, 2)
W8_SQUARE = Config(64, 64, 8, 2)
SQUARE_ONE = Config(64, 64, 8, 1)
D8_32 = Config(128, 32, 8, 2, True)
D8_64 = Config(128, 64, 8, 2, True)
D8_128 = Config(128, 128, 8, 2, True)
AMD_128 = Config(128, 64, 4, 1)
AMD_64 = Config(64, 32, 4, 1)
D8_THIN = Config(64, 16, 8, 2, True)
D8_NARROW = Config(64, 32, 8, 2, True)
W8_NARROW = Config(64, 32, 8, 2)
THIN = Config(64, 16, 4, 1)
SMALL = Config(32, 32, 4, 2)
SMALL_64 = Config(32, 64, 4, 2)
SMALL_ONE = Config(32, 32, 4, 1)
SMALL8_ONE = Config(32, 32, 8, 1)
NARROW_ONE = Config(64, 32, 8, 1)
THIN_SMALL = Config(32, 16, 4, 1)
# tf32x3 keeps two numbers per float32, so that the registers hold only few rows.
FLAT4_32 = Config(16, 32, 4, 1)
FLAT8_32 = Config(16, 32, 8, 1)
FLAT8_64 = Config(16, 64, 8, 1)

FORWARD = {
    ("sm_80", "half", 64): Forward(W4_128, W4_128, W8_64, W8_64),
    ("sm_80", "half", 128): Forward(W8_64, W8_64, W8_64, W8_64),
    ("sm_80", "half", 256): Forward(SQUARE_ONE, SQUARE_ONE, SMALL, SMALL),
    ("sm_90", "half", 64): Forward(D8_128, D8_128, D8_128, D8_128),
    ("sm_90", "half", 128): Forward(D8_128, D8_128, D8_128, D8_128),
    ("sm_90", "half", 256): Forward(D8_64, D8_64, D8_32, D8_32),
    ("sm_100", "half", 64): Forward(D8_128, D8_128, D8_64, D8_64),
    ("sm_100", "half", 128): Forward(D8_128, D8_128, D8_64, D8_64),
    ("sm_100", "half", 256): Forward(D8_64, D8_64, D8_32, D8_32),
    ("gfx942", "half", 64): Forward(AMD_128, AMD_128, AMD_128, AMD_128),
    ("gfx942", "half", 128): Forward(AMD_128, AMD_128, AMD_128, AMD_128),
    ("gfx942", "half", 256): Forward(AMD_64, AMD_64, AMD_64, AMD_64),
    ("sm_80", "single", 64): Forward(SMALL_ONE, SMALL_ONE, SMALL_ONE, SMALL_ONE),
    ("sm_90", "single", 64): Forward(W4_32, W4_32, W4_32, W4_32),
    ("sm_100", "single", 64): Forward(SMALL_ONE, SMALL_ONE, SMALL_ONE, SMALL_ONE),
    ("sm_80", "single", 128): Forward(FLAT4_32, FLAT4_32, FLAT4_32, FLAT4_32),
    ("sm_90", "single", 128): Forward(W4_32, W4_32, FLAT4_32, FLAT4_32),
    ("sm_100", "single", 128): Forward(FLAT4_32, FLAT4_32, FLAT4_32, FLAT4_32),
    **{
        (target, "single", 256): Forward(FLAT8_64, FLAT8_64, FLAT8_64, FLAT8_64)
        for target in ("sm_80", "sm_90", "sm_100")
    },
    ("gfx942", "single", 64): Forward(W4_32, W4_32, W4_32, W4_32),
    ("gfx942", "single", 128): Forward(W4_32, W4_32, W4_32, W4_32),
    ("gfx942", "single", 256): Forward(SMALL, SMALL, SMALL, SMALL),
}

# Few rows against many keys: tiles of 16 to 64 rows. For 16-bit numbers only, as for the extras: float32 uses FORWARD.
FEW = {
    "sm_80": {64: W4, 128: SMALL_64, 256: SMALL},
    "sm_90": {64: W4, 128: W4, 256: W4_32},
    "sm_100": {64: W4, 128: W4_32, 256: W8_NARROW},
    "gfx942": {64: W4, 128: W4, 256: W4_32},
}
FORWARD_EXTRAS = {(target, width): W4_32 for target, _, width in FORWARD} | {
    ("sm_80", 256): W8_NARROW,
    ("sm_90", 256): W8_NARROW,
    ("sm_100", 256): W8_NARROW,
}
WIDE_BACKWARD_EXTRAS = {  # at a width above 128, if not BACKWARD
    "sm_90": Backward(D8_THIN, W8_NARROW),
    "sm_100": Backward(D8_THIN, W8_NARROW),
    "gfx942": Backward(SMALL_ONE, AMD_64),
}
BACKWARD_EXTRAS = {  # up to a width of 128
    "sm_80": Backward(SMALL, W4_32),
    "sm_90": Backward(W8_NARROW, W4_32),
    "sm_100": Backward(W8_NARROW, W4_32),
    "gfx942": Backward(AMD_64, AMD_64),
}

BACKWARD = {
    ("sm_80", "half", 64): Backward(W4, W8_64),
    ("sm_80", "half", 128): Backward(W8_SQUARE, W8_64),
    ("sm_80", "half", 256): Backward(SMALL8_ONE, NARROW_ONE),
    ("sm_90", "half", 64): Backward(D8_64, D8_64),
    ("sm_90", "half", 128): Backward(D8_32, D8_64),
    ("sm_90", "half", 256): Backward(D8_THIN, D8_32),
    ("sm_100", "half", 64): Backward(D8_64, D8_64),
    ("sm_100", "half", 128): Backward(D8_32, D8_64),
    ("sm_100", "half", 256): Backward(D8_NARROW, D8_32),
    ("gfx942", "half", 64): Backward(AMD_64, AMD_64),
    ("gfx942", "half", 128): Backward(AMD_64, AMD_64),
    ("gfx942", "half", 256): Backward(AMD_64, AMD_64),
    ("sm_80", "single", 64): Backward(THIN_SMALL, SMALL_ONE),
    ("sm_90", "single", 64): Backward(THIN, W4_32),
    ("sm_100", "single", 64): Backward(FLAT8_64, FLAT8_64),
    ("sm_80", "single", 128): Backward(FLAT8_64, FLAT8_64),
    ("sm_90", "single", 128): Backward(FLAT8_64, FLAT8_64),
    ("sm_100", "single", 128): Backward(FLAT8_32, FLAT8_64),
    ("sm_80", "single", 256): Backward(FLAT8_32, FLAT8_32),
    ("sm_90", "single", 256): Backward(FLAT8_64, FLAT8_64),
    ("sm_100", "single", 256): Backward(FLAT8_64, FLAT8_64),
    ("gfx942", "single", 64): Backward(W4_32, W4_32),
    ("gfx942", "single", 128): Backward(THIN_SMALL, SMALL),
    ("gfx942", "single", 256): Backward(FLAT4_32, FLAT4_32),
}


def nearest(target: str) -> str:
    """Return the architecture in the tables whose configurations serve another one.

    Args:
        target: As named by `launch.target_of`.

    Returns:
        A key of PRECISION: `target` itself if it is one, otherwise one of the same maker; "sm_80" for unknown ones.
    """
    if target in PRECISION:
        return target
    if target.startswith("sm_"):
        number = int("".join(c for c in target.removeprefix("sm_") if c.isdigit()))
        return "sm_100" if 100 <= number < 120 else "sm_90" if 90 <= number < 100 else "sm_80"
    return "gfx942" if target.startswith("gfx") else "sm_80"


def _key(target: str, dtype: torch.dtype, width: int) -> tuple[str, str, int]:
    kind = "single" if dtype == torch.float32 else "half"
    return nearest(target), kind, next(w for w in WIDTHS if width <= w)


def forward_config(
    target: str,
    dtype: torch.dtype,
    width: int,
    causal: bool,
    statistics: bool,
    rows: int = FEW_ROWS + 1,
    extras: bool = False,
) -> Config:
    """Return the configuration of the forward kernel.

    Args:
        target: as named by `launch.target_of`.
        dtype: of query, key and value.
        width: the larger of the padded E and Ev.
        causal: whether later keys are bounded.
        statistics: whether any statistic is requested.
        rows: of a key head; up to FEW_ROWS a smaller tile may be used.
        extras: whether there is a softcap, a bias or a bool mask, which take registers.
    """
    if target == "interpreter":
        return INTERPRETER
    key = _key(target, dtype, width)
    if key[1] == "half" and rows <= FEW_ROWS:
        return FEW[key[0]][key[2]]
    if key[1] == "half" and extras:
        return FORWARD_EXTRAS[key[0], key[2]]
    return FORWARD[key][causal + 2 * (statistics or extras)]


def backward_config(target: str, dtype: torch.dtype, width: int, extras: bool = False) -> Backward:
    """Return the configurations of the backward kernels.

    Args:
        target: As named by `launch.target_of`.
        dtype: Of query, key and value.
        width: The larger of the padded E and Ev.
        extras: Whether there is a softcap, a bias or a bool mask, which take registers.
    """
    if target == "interpreter":
        return Backward(Config(32, 32, 4, 1), Config(32, 32, 4, 1))
    key = _key(target, dtype, width)
    if extras and key[1] == "half" and width <= 128:
        return BACKWARD_EXTRAS[key[0]]
    if extras and key[1] == "half":
        return WIDE_BACKWARD_EXTRAS.get(key[0], BACKWARD[key])
    return BACKWARD[key]


def precision(target: str) -> str:
    """Return the `input_precision` of `tl.dot` for float32 on an architecture, "tf32x3" or "ieee"."""
    return PRECISION[nearest(target)]

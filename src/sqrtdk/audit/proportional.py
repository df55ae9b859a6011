"""Proportional attention: the scale `sqrt(log_b(n) / head_dim)` for n tokens, of a model that was trained on b tokens.

Jin et al. 2023, "Training-free Diffusion Model Adaptation for Variable-Sized Text-to-Image Synthesis"; Lumina-T2X. The
base b is a field of the config, an attribute of the module, or an argument of the call, whose value no record holds.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import nn

from sqrtdk.audit.configs import field, held, number
from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.tolerance import close, inverse_root, matches, scales_of
from sqrtdk.tracing.records import AttentionCall

BASE_LENGTHS = ("base_sequence_length", "base_seqlen")  # diffusers' and Lumina-T2X's names for b
SINGLE = 2.0**-23  # relative rounding of a factor that was held in float32
LEAST_BASE = 16  # nobody trains on fewer tokens; a wrong factor of 2 gives the fourth root of a real base
BLUR = 0.05  # of a whole number: beyond it any value would be near one


def length_factors(call: AttentionCall, module: nn.Module | None, config: Any) -> tuple[tuple[float, ...], str] | None:
    """The declared factors on 1/sqrt(head_dim), and what declares them, or None if no base is known.

    `proportional_attn` switches it on for self-attention; where that is not said the textbook's scale is right as well.
    """
    for holder, kind in ((config, "config."), (module, "attribute ")):
        for name in BASE_LENGTHS:
            base = number(holder, name)
            if base is None or base <= 1 or call.query_len < 2:
                continue
            switch = field(holder, "proportional_attn")
            if switch is False:
                return None
            factor = math.sqrt(math.log(call.query_len) / math.log(base))
            text = f"{kind}{name} = {base:g} (proportional attention: sqrt(log_{base:g}({call.query_len})))"
            return (factor,) if switch is True and call.self_attention is not False else (factor, 1.0), text
    return None


def by_argument(call: AttentionCall, module: nn.Module | None) -> str | None:
    """What declares a proportional scale whose base is an argument of the attention, or None.

    The base is a count of tokens, so the scale as it was read must give back a whole number: a constant does not.
    """
    name = next((name for name in BASE_LENGTHS if name in _arguments(module)), None)
    values = [factor.value for factor in call.scale.factors if factor.value is not None]
    if name is None or call.query_len < 2 or not values or len(values) < len(call.scale.factors):
        return None
    applied = math.prod(values)
    if call.scale.effective is None or not matches(scales_of(call), (applied,)):
        return None
    signatures = (value for mistake in MISTAKES.values() for value in mistake.values(call))
    if any(close(applied, value, 4 * SINGLE) for value in signatures):
        return None
    base = _whole_base(applied / inverse_root(call.head_dim), call.query_len)
    if base is None:
        return None
    return f"argument {name} = {base} (proportional attention: sqrt(log_{base}({call.query_len})/head_dim))"


def _whole_base(ratio: float, length: int) -> int | None:
    """The whole number b for which `ratio` is `sqrt(log_b(length))`, or None."""
    log_base = math.log(length) / ratio**2 if ratio > 0 else math.inf
    if log_base > 50:
        return None
    base = math.exp(log_base)
    error = base * log_base * 2 * SINGLE  # d b = b log(b) 2 d r / r
    whole = round(base)
    return whole if whole >= LEAST_BASE and error <= BLUR and abs(base - whole) <= error else None


def _arguments(module: nn.Module | None) -> set[str]:
    """Names of the arguments of the module's forward and of the processor that it may call (diffusers)."""
    names: set[str] = set()
    if module is None:
        return names
    processor = held(module).get("processor")
    for function in (field(type(module), "forward"), None if processor is None else field(type(processor), "__call__")):
        try:
            names.update(inspect.signature(function).parameters)  # type: ignore[arg-type]
        except Exception:  # no signature, or one that a user's class breaks
            continue
    return names

"""Numbers on a module that look like its scale: which there are, and which reading of them gives a value.

They are weak declarations: `self.scale = num_heads ** -0.5` holds the mistake itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sqrtdk.audit.tolerance import matches

Form = tuple[str, Callable[[float, int], float]]


def _inverse(value: float, head_dim: int) -> float:
    return 1.0 / value if value else math.inf


def _exp(value: float, head_dim: int) -> float:
    return math.exp(min(value, 700.0))


PLAIN: Form = ("{}", lambda value, head_dim: value)
INVERSE: Form = ("1/{}", _inverse)
EXP: Form = ("exp({})", _exp)
OVER_SQRT: Form = ("{}/sqrt(head_dim)", lambda value, head_dim: value / math.sqrt(head_dim))
INVERSE_OVER_SQRT: Form = ("1/({} sqrt(head_dim))", lambda value, head_dim: _inverse(value, 1) / math.sqrt(head_dim))

# Name of the attribute -> the readings that its users give it (seen in transformers, timm, x-transformers, MPT, GPT-J).
SCALE_ATTRIBUTES: dict[str, tuple[Form, ...]] = {
    "scale": (PLAIN,),
    "scaling": (PLAIN,),
    "softmax_scale": (PLAIN,),
    "attn_scale": (PLAIN,),
    "attention_scale": (PLAIN,),
    "sm_scale": (PLAIN,),
    "qk_scale": (PLAIN,),
    "q_scale": (PLAIN,),
    "scale_factor": (PLAIN,),
    "scale_qk": (PLAIN,),
    "softmax_scaling": (PLAIN,),
    "scaling_factor": (PLAIN,),
    "attention_multiplier": (PLAIN,),
    "qk_norm_scale": (PLAIN,),
    "inv_norm_factor": (PLAIN,),
    "normalize_fact": (PLAIN,),
    "sqrt_d": (INVERSE,),
    "sqrt_dk": (INVERSE,),
    "sqrt_head_dim": (INVERSE,),
    "norm_factor": (INVERSE, PLAIN),
    "scale_attn": (INVERSE, PLAIN),
    "normalizer": (INVERSE, PLAIN),
    "temperature": (INVERSE, PLAIN, OVER_SQRT, INVERSE_OVER_SQRT),
    "tau": (INVERSE, PLAIN, OVER_SQRT, INVERSE_OVER_SQRT),
    "gain": (PLAIN, OVER_SQRT),
    "alpha": (PLAIN, OVER_SQRT),
    "qk_scale_factor": (PLAIN, OVER_SQRT),
    "logit_scale": (PLAIN, EXP),
}


@dataclass(frozen=True, slots=True, eq=False)
class ScaleAttribute:
    """One scale-like number: `owner.name`, at `path` from the site; `values` is None on the meta device."""

    owner: nn.Module
    name: str
    path: str
    values: tuple[float, ...] | None
    learned: bool


def _read(raw: Any, heads: int) -> tuple[tuple[float, ...] | None, bool] | None:
    """The values of a Python number, a 0-d or per-head tensor; None when it is none of these."""
    if isinstance(raw, torch.Tensor):
        if raw.numel() not in (1, heads) or not raw.is_floating_point():
            return None
        learned = isinstance(raw, nn.Parameter)
        if raw.is_meta:
            return None, learned
        return tuple(raw.detach().double().flatten().tolist()), learned
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    return (float(raw),), False


def scale_attributes(module: nn.Module | None, heads: int) -> tuple[ScaleAttribute, ...]:
    """The scale-like attributes of a module and of its direct children, normalisation layers excepted."""
    if module is None:
        return ()
    owners = [("", module)] + [
        (name, child)
        for name, child in module.named_children()
        if "norm" not in name.lower() and "norm" not in type(child).__name__.lower()
    ]
    found = []
    for prefix, owner in owners:
        for name in SCALE_ATTRIBUTES:
            raw = vars(owner).get(name)
            if raw is None:
                raw = owner._parameters.get(name)
            if raw is None:
                raw = owner._buffers.get(name)
            read = None if raw is None else _read(raw, heads)
            if read is not None:
                path = f"{prefix}.{name}" if prefix else name
                found.append(ScaleAttribute(owner, name, path, read[0], read[1]))
    return tuple(found)


def readings(attribute: ScaleAttribute, head_dim: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Every reading of the attribute as an effective scale, with its text."""
    if attribute.values is None:
        return
    for text, function in SCALE_ATTRIBUTES[attribute.name]:
        yield text.format(attribute.path), tuple(function(value, head_dim) for value in attribute.values)


def holding(
    attributes: tuple[ScaleAttribute, ...], effective: tuple[float, ...], head_dim: int
) -> tuple[ScaleAttribute, str] | None:
    """The first attribute that has a reading equal to the effective scale, with the text of that reading."""
    for attribute in attributes:
        for text, values in readings(attribute, head_dim):
            if matches(effective, values):
                return attribute, text
    return None

"""Proportional attention: a scale that grows with the log of the length, from a base length on.

The base is a field of the config or of the module, or an argument of the attention's call; if it is neither, the scale
itself may give it back.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from sqrtdk._wrappers import named_modules, submodule
from sqrtdk.audit.configs import as_number, field, number_at, own_fields
from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.tolerance import are_close, inverse_root, is_close, scales_of
from sqrtdk.messages import Message
from sqrtdk.models.modules import forward_arguments
from sqrtdk.modules.calls import CallPlace, hooked
from sqrtdk.tracing.records import AttentionCall

# By name, the number that each call of a module got, in order; `NO_BASE` where it got none.
Arguments = Mapping[str, tuple[float, ...]]
NO_BASE = 1.0
NO_ARGUMENTS: Arguments = MappingProxyType({})
BASE_LENGTHS = ("base_sequence_length", "base_seqlen")  # names for b in diffusers and Lumina-T2X
FLOAT32_ROUNDING = 2.0**-23  # relative rounding of a factor that was held in float32
# Nobody trains on fewer tokens; a scale that is twice too large would read as the fourth root of a real base.
LEAST_BASE = 16
MOST_BASE_ERROR = 0.05  # largest error of a base that still identifies a whole number


@contextmanager
def watch_base_lengths(model: nn.Module) -> Iterator[dict[str, Arguments]]:
    """Record within the block the base lengths of proportional attention that modules are called with.

    Yields a dict that fills during the block: from the path of each module whose forward takes such an argument to the
    values by argument name. TorchScript modules are not watched.
    """
    modules = {
        path: module
        for path, module in named_modules(model, remove_duplicate=False)
        if not isinstance(module, torch.jit.ScriptModule) and not _named_arguments(module).isdisjoint(BASE_LENGTHS)
    }
    passed: dict[str, dict[str, tuple[float, ...]]] = {path: {} for path in modules}

    def begins(place: CallPlace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _note_base_lengths(passed[place[0]], modules[place[0]], args, kwargs)

    try:
        with hooked(modules, begins):
            yield passed  # type: ignore[misc]
    finally:
        for path, bases in passed.items():
            # A processor's argument that no call of the module shows: its base may stand in the scale (`by_scale`).
            takes = forward_arguments(submodule(model, path))
            for name in [name for name in bases if name not in takes and set(bases[name]) == {NO_BASE}]:
                del bases[name]


def _note_base_lengths(
    passed: dict[str, tuple[float, ...]], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    takes = forward_arguments(module)
    given = dict(zip(takes, args, strict=False)) | kwargs
    for name in BASE_LENGTHS:
        value = given.get(name)
        base = as_number(value.item() if isinstance(value, torch.Tensor) and _has_one_number(value) else value)
        passed[name] = (*passed.get(name, ()), base if base is not None and base > 1 else NO_BASE)


def _has_one_number(value: torch.Tensor) -> bool:
    return value.numel() == 1 and not value.is_meta and type(value) in (torch.Tensor, nn.Parameter)


def by_base_length(
    call: AttentionCall, module: nn.Module | None, config: Any, arguments: Arguments
) -> tuple[tuple[float, ...], str] | None:
    """Return the factor of proportional attention, sqrt(log_b(n)) for n tokens after training on b, or None.

    The scale is then sqrt(log_b(n) / head_dim): Jin et al. 2023, "Training-free Diffusion Model Adaptation for
    Variable-Sized Text-to-Image Synthesis"; Lumina-T2X.

    Args:
        call: The attention, with n its number of queries.
        module: Its module, or None.
        config: The config that governs it.
        arguments: Values of b that the module was called with, by argument name. They come before fields of config and
            module.

    Returns:
        The admissible factors, and the words of a report on what declares them. 1.0 is among the factors where the
        declaration may not apply: in cross-attention, or if a switch is not known to be on.
    """
    for name, bases in arguments.items():
        # One base for each call of the module, in order; any may be that of an attention beyond their number.
        own = bases[call.index : call.index + 1] or tuple(dict.fromkeys(bases))
        stated = [base for base in own if base > 1]
        if stated and call.query_len > 1:
            factors = [math.sqrt(math.log(call.query_len) / math.log(base)) for base in stated]
            formula = f"sqrt(log_{stated[0]:g}({call.query_len}))"
            by = Message("sources.declared.proportional_argument", name=name, value=f"{stated[0]:g}", formula=formula)
            sure = call.self_attention is not False and len(stated) == len(own)
            return (tuple(factors) if sure else (*factors, 1.0)), by
    for holder in (config, module):
        for name in BASE_LENGTHS:
            base = number_at(holder, name)
            if base is None or base <= 1 or call.query_len < 2:  # log 1 = 0
                continue
            switch = field(holder, "proportional_attn")
            if switch is False:
                return None
            factor = math.sqrt(math.log(call.query_len) / math.log(base))
            of = {"value": f"{base:g}", "formula": f"sqrt(log_{base:g}({call.query_len}))"}
            if holder is config:
                by = Message("sources.declared.proportional_config", field=name, **of)
            else:
                by = Message("sources.declared.proportional_attribute", name=name, **of)
            sure = switch is True and call.self_attention is not False
            return ((factor,) if sure else (factor, 1.0)), by
    return None


def by_scale(call: AttentionCall, module: nn.Module | None, arguments: Arguments) -> str | None:
    """Return what declares a proportional scale whose base b is an argument that could not be observed, or None.

    A processor of the module takes the argument. b is a number of tokens, so the scale must give back a whole number,
    and must not be the value of a known mistake.

    Args:
        call: The attention, with the factors of its scale.
        module: Its module, whose forward or processor names the argument.
        arguments: The base lengths that were observed, by argument name.
    """
    takes = _named_arguments(module)
    name = next((name for name in BASE_LENGTHS if name in takes and name not in arguments), None)
    values = [factor.value for factor in call.scale.factors if factor.value is not None]
    if name is None or call.query_len < 2 or not values or len(values) < len(call.scale.factors):
        return None
    applied = math.prod(values)
    if call.scale.effective is None or not are_close(scales_of(call), (applied,)):
        return None
    # A mistake's value may give back a whole number by chance: it stays a mistake.
    signatures = (value for mistake in MISTAKES.values() for value in mistake.values(call))
    if any(is_close(applied, value, 4 * FLOAT32_ROUNDING) for value in signatures):
        return None
    base = _whole_base(applied / inverse_root(call.head_dim), call.query_len)
    if base is None:
        return None
    formula = f"sqrt(log_{base}({call.query_len}))"
    return Message("sources.declared.proportional_argument", name=name, value=base, formula=formula)


def _whole_base(ratio: float, length: int) -> int | None:
    """Return the whole number b for which `ratio` is `sqrt(log_b(length))`, or None."""
    log_base = math.log(length) / ratio**2 if ratio > 0 else math.inf
    if log_base > 50:  # nobody trains on e^50 tokens, and exp() of much more overflows
        return None
    base = math.exp(log_base)
    error = base * log_base * 2 * FLOAT32_ROUNDING  # d b = b log(b) 2 d r / r
    whole = round(base)
    return whole if whole >= LEAST_BASE and error <= MOST_BASE_ERROR and abs(base - whole) <= error else None


def _named_arguments(module: nn.Module | None) -> set[str]:
    """Return the argument names of the module's forward and of the processor that it may call (diffusers)."""
    names: set[str] = set()
    if module is None:
        return names
    processor = own_fields(module).get("processor")
    for function in (field(type(module), "forward"), None if processor is None else field(type(processor), "__call__")):
        try:
            names.update(inspect.signature(function).parameters)  # type: ignore[arg-type]
        except Exception:  # no signature, or one that a user's class breaks
            continue
    return names

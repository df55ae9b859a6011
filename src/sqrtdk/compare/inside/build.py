"""Builds the program of a call from its tensors and terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.infer.fit import fit_norm, fit_rotation
from sqrtdk.compare.inside.call_numbers import ObservedVector
from sqrtdk.compare.inside.compute import MOST_STORED, dtype_by_name, follow_path, round_to
from sqrtdk.compare.inside.program import (
    Affine,
    Formula,
    LogitPrecision,
    NormStep,
    OpaqueStep,
    PathStep,
    Program,
    Rotation,
    RoundingStep,
    VectorPath,
)
from sqrtdk.compare.rounding.precision import LEAST_STORED, stored_in
from sqrtdk.tracing.tensors import CallTensors, Term, Waypoint

_UNIT, _YARN = 1e-3, 1.6  # amplitudes of rotations: from 1 up to rounding, to YaRN's 0.1 log(factor) + 1
_CAST_ROUNDINGS = 4.0  # roundings by casts and factors between the projection and the product
ONE_INPUT_ROUNDINGS = 128.0  # roundings between two projections of one input
# axes of (B, H, L, E) that share a scale: all, a head, row, channel
SCALE_AXES = ((0, 1, 2, 3), (0, 2, 3), (3,), (0, 2))


def program_of(call: CallTensors, seen: Mapping[str, ObservedVector]) -> Program:
    """Return the program of a call. Unknown parts are listed in `unknown`, and are `OpaqueStep` steps of a path.

    Args:
        call: tensors of the call.
        seen: result of `observe(call)`.
    """
    dtype = dtype_by_name(call.dtype)
    paths = {name: fit_path(vector, dtype) for name, vector in seen.items()}
    formula = formula_of(call, seen)
    unknown = [
        f"{name}: {step.name}" for name, path in paths.items() for step in path.steps if isinstance(step, OpaqueStep)
    ]
    if formula is None:
        unknown.append("formula")
    return Program(paths["query"], paths["key"], paths["value"], formula, tuple(unknown), dtype)


# -- q, k and v --------------------------------------------------------------------------------------------------------


def fit_path(seen: ObservedVector, dtype: torch.dtype) -> VectorPath:
    """Return the path of q, k or v, with each step fitted to the values before and after it.

    A path without recorded projected values has a single `OpaqueStep` named "not recorded".

    Args:
        seen: what was recorded of the vector.
        dtype: dtype in which the side computed.
    """
    affine = None
    if seen.weight is not None and seen.features is not None:
        affine = Affine(seen.name, seen.weight, seen.bias, seen.features)
    if seen.projected is None:
        return VectorPath(steps=(OpaqueStep("not recorded"),), heads=seen.heads, scaled=seen.scaled)
    steps: list[PathStep] = []
    before, known = seen.projected, seen.projected
    for point in seen.steps:
        steps.append(_step(before, point, dtype, seen.rounded_by))
        if point is seen.steps[-1] and isinstance(steps[-1], OpaqueStep):
            steps[-1:] = _rounded_step(before, point, seen, dtype) or steps[-1:]
        if point.values is None:
            break
        before = point.values
        known = before if not any(isinstance(step, OpaqueStep) for step in steps) else known
    # Several or unknown steps may be one rotation, or a cache: both are tried before the path counts as unknown.
    steps = _one_rotation(steps, seen, dtype)
    path = VectorPath(affine, tuple(steps), seen.heads, seen.scaled)
    lost = next((place for place, step in enumerate(steps) if isinstance(step, OpaqueStep)), None)
    if lost is None and (steps or _gives(path, seen, dtype)):
        return path
    is_cache = all(isinstance(step, OpaqueStep | RoundingStep) for step in steps[lost:])
    cached = cache_rounding(known, seen) if is_cache else None
    if cached is not None:
        return replace(path, steps=(*steps[:lost], cached))
    return path if steps else replace(path, steps=(OpaqueStep("not recorded"),), scaled=1.0)


def cache_rounding(before: Tensor, seen: ObservedVector) -> RoundingStep | None:
    """Return the rounding of a quantised cache of k or v, stored in few bits under a scale and read back; else None.

    Candidates for the scale are the user's, 1, and those that map the largest number before or after storage to the
    largest number of the dtype (after storage, larger ones were cut off). Each is shared by all, or by head, row or
    channel. A number halfway between two stored ones may be either.
    """
    x, y = before.double() * seen.scaled, seen.used
    if x.shape != y.shape or y.numel() < LEAST_STORED or not bool(x.isfinite().all() and y.any()):
        return None
    slack = (ONE_INPUT_ROUNDINGS if seen.borrowed else _CAST_ROUNDINGS) * torch.finfo(torch.float32).eps
    moved = slack * torch.maximum(x.abs(), x.square().mean().sqrt())
    lesser = stored_in(y, torch.float32) if stored_in(x, torch.float32) is None else None
    if lesser is not None and not isinstance(seen.scaled, Tensor) and seen.scaled == 1.0:
        read = (round_to(x + path * moved, str(lesser)) for path in (0.0, 1.0, -1.0))
        if not bool(torch.stack([one - y for one in read]).abs().amin(0).any()):
            return RoundingStep(str(lesser).removeprefix("torch."), by_values=True)
    for dtype, most in MOST_STORED.items():
        sizes = [size.abs().amax(axes, keepdim=True) / most for axes in SCALE_AXES for size in (y, x)]
        fixed = [number for number in (seen.kv_scale, 1.0) if number is not None]
        for scale in (*(x.new_tensor(number) for number in fixed), *sizes):
            scale = torch.where(scale > 0, scale, 1.0)
            read = (round_to((x + path * moved) / scale, dtype) * scale for path in (0.0, 1.0, -1.0))
            off = torch.stack([(one - y).abs() for one in read]).amin(0)
            if bool((off <= slack * y.abs()).all()) and not torch.equal(x, y):
                by = seen.scaled / scale
                return RoundingStep(dtype, float(by) if by.numel() == 1 else by)
    return None


def _one_rotation(steps: list[PathStep], seen: ObservedVector, dtype: torch.dtype) -> list[PathStep]:
    """Return the steps with one rotation for the last ones, if these are several or unknown and one rotation fits.

    This covers cached and new keys that were rotated separately, cat(turn(past), turn(k)), and q rotated twice.
    """
    first = next((i for i, step in enumerate(steps) if isinstance(step, Rotation | OpaqueStep)), len(steps))
    if len(steps) - first < 2 and not any(isinstance(step, OpaqueStep) for step in steps):
        return steps
    before = seen.projected if first == 0 else seen.steps[first - 1].values
    if before is None or before.shape != seen.used.shape:
        return steps
    whole = fit_rotation(before, seen.used, dtype=dtype)
    if whole is None or (whole.amplitude is not None and not 1 - _UNIT < whole.amplitude < _YARN):
        return steps  # includes a factor that the trace could not separate; the other side may be able to
    return [*steps[:first], whole.rotation]


def _gives(path: VectorPath, seen: ObservedVector, dtype: torch.dtype) -> bool:
    """Return whether a path without steps is complete: a side may tell values before its steps but not the steps."""
    assert seen.projected is not None
    if seen.projected.shape != seen.used.shape:
        return not seen.borrowed
    got = follow_path(path, seen.projected)[-1]
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return bool((got - seen.used).norm() <= _CAST_ROUNDINGS * unit * seen.used.norm())


def _step(before: Tensor, point: Waypoint, dtype: torch.dtype, rounded_by: Tensor | float) -> PathStep:
    label = f"{point.name} {point.detail}".strip()
    if point.values is None:
        return OpaqueStep(label)
    if point.name == "norm" and (norm := fit_norm(before, point.values, point.detail, dtype=dtype)) is not None:
        return replace(norm.norm, eps=_plain(norm.norm.eps, norm.eps_low, norm.eps_high))
    if point.name == "rope" and (turned := fit_rotation(before, point.values, dtype=dtype)) is not None:
        return turned.rotation
    return RoundingStep(point.detail, rounded_by) if point.name == "rounded" else OpaqueStep(label)


def _rounded_step(
    before: Tensor, point: Waypoint, seen: ObservedVector, dtype: torch.dtype
) -> tuple[PathStep, RoundingStep] | None:
    """Return the last step of a vector and the rounding behind it; None if there is no such pair.

    The values behind both are those of the step, or those at the product: a file may tell the steps of k by name, and k
    itself as its cache in float16 holds it.
    """
    used = (seen.used * seen.factor).float()
    every = (rounded_step(before, after, point.name, point.detail, dtype) for after in (point.values, used))
    return next((found for found in every if found is not None), None)


def rounded_step(
    before: Tensor, after: Tensor | None, name: str, detail: str, dtype: torch.dtype
) -> tuple[PathStep, RoundingStep] | None:
    """Return a norm or a rotation, and the rounding that gives the values, (B, H, L, E), of a side with dtype `dtype`.

    Returns None if there is no such pair of steps.

    Example:
        >>> x = torch.randn(2, 4, 16, 8)
        >>> y = torch.nn.functional.rms_norm(x, (8,), eps=1e-6).bfloat16().float()
        >>> norm, rounding = rounded_step(x, y, "norm", "rms", torch.float32)
        >>> norm.kind, rounding.dtype
        ('rms', 'bfloat16')
    """
    lesser = None if after is None or after.shape != before.shape else stored_in(after, dtype)
    if lesser is None:
        return None
    step = _step(before, Waypoint(name, detail, after), lesser, 1.0)
    if isinstance(step, NormStep | Rotation):
        # a cast behind a norm is a part of that step in a trace: the code says it
        return step, RoundingStep(str(lesser).removeprefix("torch."), by_values=name != "norm")
    return None


def _plain(value: float, low: float, high: float) -> float:
    """Return the plainest number between two bounds, powers of ten first, then 5 and 2 times one; else `value`.

    Example:
        >>> _plain(9.3e-7, 4.2e-7, 1.4e-6), _plain(5.1e-6, 4.8e-6, 5.4e-6)
        (1e-06, 5e-06)
    """
    if value <= 0.0:
        return value
    power = math.floor(math.log10(value))
    near = [[float(f"{digit}e{exponent}") for exponent in (power, power + 1)] for digit in (1, 5, 2)]
    plain = (number for pair in near for number in sorted(pair, key=lambda one: abs(math.log(one / value))))
    return next((number for number in plain if low <= number <= high), value)


# -- from the product to the softmax -----------------------------------------------------------------------------------


def formula_of(call: CallTensors, seen: Mapping[str, ObservedVector]) -> Formula | None:
    """Return the formula of a call from its recorded terms and the factors of q and k.

    Args:
        call: tensors of the call.
        seen: result of `observe(call)`.

    Returns:
        The formula; None if no terms were recorded, or one is unknown or does not fit a formula.
    """
    if call.terms is None:
        return None
    query, key = (_as_4d(seen[name].factor) for name in ("query", "key"))
    if isinstance(key, Tensor):
        key = (key[:, seen["key"].heads] if key.shape[1] > 1 else key).mT
    formula: Formula | None = Formula(scale=query * key, kept=call.kept, dropout=call.dropout)
    for term in call.terms:
        formula = None if formula is None else _with_term(formula, term)
    if formula is None:
        return None
    lesser = torch.finfo(dtype_by_name(call.dtype)).eps
    for name in ("logits_dtype", "weights_dtype"):
        if torch.finfo(dtype_by_name(getattr(call, name))).eps > lesser:
            formula = replace(formula, **{name: getattr(call, name)}, own=LogitPrecision(call.dtype, query, key))
    return formula


def _with_term(formula: Formula, term: Term) -> Formula | None:
    """Return the formula with one more term after the others; None if a formula can't express it."""
    value, added = term.value, formula.bias is not None or formula.visible is not None
    if term.name == "scale" and value is not None:
        return _scaled(formula, _as_4d(value))
    if term.name == "softcap" and value is not None and formula.softcap is None:
        at = "masked" if added else "scaled"
        return replace(formula, softcap=float(value), softcap_at=at, softcap_by_logits=bool(term.detail))
    if not isinstance(value, Tensor):
        return None
    if term.name == "bias" and formula.softcap_at != "masked":
        if formula.bias is not None:
            value = formula.bias * formula.bias_by + value
            formula = replace(formula, bias_by=1.0)
        return replace(formula, bias=value.double(), bias_name=term.detail)
    if term.name == "mask":
        return _masked(formula, term, value)
    return replace(formula, sinks=value) if term.name == "sinks" else None


def _scaled(formula: Formula, by: Tensor | float) -> Formula:
    """Return the formula times a factor: of the product, of the sum with bias and mask, or of the softcap's result."""
    # (q @ k.mT + bias) * scale multiplies the bias too; after a softcap at the end, cap * tanh(z / cap) * scale.
    if formula.softcap is not None and formula.softcap_at == "masked":
        return replace(formula, after=formula.after * by)
    if isinstance(by, Tensor):
        formula = formula if formula.bias is None else replace(formula, bias=formula.bias * by)
    elif formula.bias is not None or formula.visible is not None:
        filled = formula.visible is not None and math.isfinite(formula.fill)
        fill_by = formula.fill_by * (by if filled else 1.0)
        formula = replace(formula, bias_by=formula.bias_by * by, fill_by=fill_by)
    if formula.softcap is not None:
        return replace(formula, after=formula.after * by, softcap_at="product")
    return replace(formula, scale=formula.scale * by)


def _masked(formula: Formula, term: Term, visible: Tensor) -> Formula:
    fill, added, kind = term.fill, term.added, term.detail
    # two mask terms, such as causal and padding: a key is visible if both show it
    if formula.visible is not None:
        visible = formula.visible & visible
        fill = min(formula.fill, fill)
        added = added and formula.fill_added
        kind = formula.mask if formula.mask == kind else "mask"
    return replace(formula, visible=visible, fill=fill, fill_added=added, mask=kind)


def _as_4d(factor: Tensor | float) -> Tensor | float:
    if not isinstance(factor, Tensor):
        return factor
    return float(factor) if factor.numel() == 1 else factor.double()[(None,) * (4 - factor.dim())]

"""The same weights and inputs through eager and through sdpa attention must give the same.

Small logits hide a lost softcap or scale, so q is enlarged at each product until the logits' standard deviation is
about 4 (between 3 and 5). Compared for every call: effective scale (1%), softcap (1%), kind of mask, root mean square
of the output (relative difference up to sqrt(eps) of the dtype: half of its digits, since logits of this size turn one
rounding into several), and the model's outputs (relative to their root mean square, up to 4 sqrt(eps)).
The first site that differs is reported. Rows that see no key are 0 in one and an average in the other, and both are
right: where there are any (left padding), outputs are not compared, and that is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sqrtdk.audit.context import Context, Rerun
from sqrtdk.audit.records import Finding
from sqrtdk.audit.tolerance import close
from sqrtdk.trace.records import AttentionCall, NotMeasured

TARGET_STD = 4.0
LEAST_STD = 3.0
OUTPUT_FACTOR = 4.0
SOURCE = "one formula, two implementations; sqrt(eps) of the dtype"


def _sub_configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        sub = getattr(config, name, None)
        if sub is not None:
            yield from _sub_configs(sub)


def supports_both(model: nn.Module) -> bool:
    """Whether the model is transformers' and every part of it has both an eager and an sdpa implementation."""
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        return False
    parts = [module for module in model.modules() if hasattr(module, "_supports_sdpa")]
    return bool(parts) and all(module._supports_sdpa for module in parts)


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Switch a transformers model to an attention implementation for the time of the block."""
    configs = {id(c): c for m in model.modules() if hasattr(m, "config") for c in _sub_configs(m.config)}
    before = [(c, c.__dict__.get("_attn_implementation_internal")) for c in configs.values()]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, value in before:
            if "_attn_implementation_internal" in config.__dict__:
                config.__dict__["_attn_implementation_internal"] = value


def enlargement(context: Context) -> dict[tuple[str, int], float]:
    """The factor on q that brings each call's logits to a standard deviation of 4; calls above 3 stay."""
    factors = {}
    for judged in context.calls:
        stats = judged.call.stats
        finite = [value for value in stats.std_logit if math.isfinite(value) and value > 0] if stats else []
        if finite:
            mean = sum(finite) / len(finite)
            if mean < LEAST_STD:
                factors[judged.call.site, judged.call.index] = TARGET_STD / mean
    return factors


def _tolerance(dtype: str) -> float:
    kind = getattr(torch, dtype, torch.float32)
    return math.sqrt(torch.finfo(kind).eps) if isinstance(kind, torch.dtype) and kind.is_floating_point else 1e-3


def _blind(calls: Iterable[AttentionCall]) -> bool:
    """Whether some row sees no key."""
    return any(call.mask is not None and (call.mask.blind_rows or call.mask.uniform_rows) for call in calls)


def _difference(eager: AttentionCall, sdpa: AttentionCall, *, outputs: bool) -> tuple[str, float | None, float] | None:
    """(what differs, value, threshold) of two calls, or None."""
    one, two = eager.scale.effective, sdpa.scale.effective
    if one and two and not close(two, one):
        return f"effective scale {one:.6g} against {two:.6g}", two / one, 0.01
    if (eager.softcap is None) != (sdpa.softcap is None) and not eager.unknown and not sdpa.unknown:
        return f"softcap {eager.softcap} against {sdpa.softcap}", sdpa.softcap, eager.softcap or 0.0
    if eager.softcap and sdpa.softcap and not close(sdpa.softcap, eager.softcap):
        return f"softcap {eager.softcap:g} against {sdpa.softcap:g}", sdpa.softcap, eager.softcap
    if (eager.mask is None) != (sdpa.mask is None):
        names = [call.mask.kind if call.mask else "none" for call in (eager, sdpa)]
        return f"mask {names[0]} against {names[1]}", None, 0.0
    tolerance = _tolerance(eager.dtype)
    first, second = eager.output_rms, sdpa.output_rms
    if not outputs or first is None or second is None:
        return None
    relative = abs(first - second) / max(abs(first), abs(second), 1e-30)
    if relative > tolerance:
        return f"output root mean square {first:.6g} against {second:.6g}", relative, tolerance
    return None


def _outputs(eager: Rerun, sdpa: Rerun, dtype: str) -> tuple[float, float] | None:
    """(largest relative difference, threshold) of the models' outputs when it is above the threshold."""
    tolerance = OUTPUT_FACTOR * _tolerance(dtype)
    worst = 0.0
    for one, two in zip(eager.outputs, sdpa.outputs, strict=False):
        if one.shape == two.shape:
            size = float(one.double().square().mean().sqrt())
            gap = float((one.double() - two.double()).square().mean().sqrt())
            worst = max(worst, gap / size if size > 0 else gap)
    return (worst, tolerance) if worst > tolerance else None


def check(context: Context) -> Iterable[Finding | NotMeasured]:
    """At most one finding: the first site that differs, else the model's outputs."""
    if context.rerun is None or not context.compare or not context.calls:
        return
    if not supports_both(context.model):
        return
    factors = enlargement(context)
    runs: dict[str, Rerun] = {}
    for name in ("eager", "sdpa"):
        try:
            with implementation(context.model, name):
                runs[name] = context.rerun(False, factors)
        except Exception as error:
            yield NotMeasured("", f"eager against sdpa: {name} raised {type(error).__name__}: {error}")
            return
    eager, sdpa = runs["eager"], runs["sdpa"]
    fix = "use the eager implementation, or one that applies scale, softcap and mask of this model"
    others = {(call.site, call.index): call for call in sdpa.calls}
    outputs = not _blind((*(judged.call for judged in context.calls), *eager.calls, *sdpa.calls))
    whole = not eager.missed and not sdpa.missed
    for call in eager.calls:
        other = others.get((call.site, call.index))
        if other is not None:
            found = _difference(call, other, outputs=outputs)
        else:
            found = ("an attention in eager that sdpa does not run", None, 0.0) if whole else None
        if found is not None:
            message, value, threshold = found
            yield Finding(
                "eager_vs_sdpa", "fail", call.site, value, threshold, f"eager and sdpa differ: {message}", fix, SOURCE
            )
            return
    if not outputs:
        yield NotMeasured("", "eager against sdpa: outputs not compared, some rows see no key")
        return
    gap = _outputs(eager, sdpa, context.dtype or context.calls[0].call.dtype)
    if gap is not None:
        message = f"eager and sdpa differ in the model's outputs by {gap[0]:.3g} of their size"
        yield Finding("eager_vs_sdpa", "fail", "", gap[0], gap[1], message, fix, SOURCE)

"""Rule `eager_vs_sdpa`: the same weights and inputs must give the same through eager and through sdpa attention.

If the model runs another implementation (flash, flex, a registered function), that one is compared instead of sdpa.

Small logits hide a lost softcap or scale, so q is enlarged at each product until the logits' standard deviation is
about 4 (between 3 and 5). Compared for every call: effective scale (1%), softcap (1%), kind of mask, root mean square
of the output (relative difference up to sqrt(eps) of the dtype: half of its digits, since logits of this size turn one
rounding into several). Compared for the model: its outputs (relative to their root mean square, up to 4 sqrt(eps)).
The first site that differs is reported. Inputs that were made for the model are cut to their first tokens; unless all
agrees there, the whole inputs are compared. A row that sees no key gives 0 in one implementation and an average in the
other, and both are right; if there are such rows (left padding), outputs are not compared. If the two forward passes
are too costly to run unasked (offloaded weights, more than 2e9 parameters), they are left out. Both cases are reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from sqrtdk.audit.context import Context, Rerun
from sqrtdk.audit.guard import current, fixed_when_built, implementation, offers_choice, refusal, supports_sdpa
from sqrtdk.audit.records import Finding
from sqrtdk.audit.tolerance import SCALE_TOLERANCE, is_close
from sqrtdk.errors import kind_and_text
from sqrtdk.messages import Message
from sqrtdk.models.options import ATTN
from sqrtdk.tracing.records import AttentionCall, NotMeasured

TARGET_STD = 4.0
LEAST_STD = 3.0
OUTPUT_FACTOR = 4.0
LARGE_MODEL = 2_000_000_000  # parameters

_Rerun = Callable[[Mapping[tuple[str, int], float] | None], Rerun]


def enlargement(context: Context) -> dict[tuple[str, int], float]:
    """Return the factors on q that make a difference between implementations visible.

    Returns:
        A dict from (site, index) to 4 / s, where s is the mean over heads of the standard deviation of the logits.
        Calls with s of at least 3, or without statistics, have no entry.
    """
    factors = {}
    for judged in context.calls:
        stats = judged.call.stats
        finite = [value for value in stats.std_logit if math.isfinite(value) and value > 0] if stats else []
        if finite:
            mean = sum(finite) / len(finite)
            if mean < LEAST_STD:
                factors[judged.key] = TARGET_STD / mean
    return factors


def _tolerance(dtype: str) -> float:
    kind = getattr(torch, dtype, torch.float32)
    return math.sqrt(torch.finfo(kind).eps) if isinstance(kind, torch.dtype) and kind.is_floating_point else 1e-3


def call_difference(
    eager: AttentionCall, sdpa: AttentionCall, *, outputs: bool
) -> tuple[str, float | None, float] | None:
    """Return how the same call differs between two implementations, or None if it does not.

    Args:
        eager: The call as eager ran it.
        sdpa: The call as the other implementation ran it.
        outputs: Whether to compare the RMS of the outputs as well.

    Returns:
        A message that says what differs (scale, softcap, mask, output), the value or None, and the threshold.
    """
    one, two = eager.scale.effective, sdpa.scale.effective
    if one and two and not is_close(two, one):
        message = Message("rules.eager_vs_sdpa.scale", eager=f"{one:.6g}", other=f"{two:.6g}")
        return message, abs(two / one - 1.0), SCALE_TOLERANCE
    # A softcap may be among the steps that were not followed.
    if (eager.softcap is None) != (sdpa.softcap is None) and not eager.unknown and not sdpa.unknown:
        message = Message("rules.eager_vs_sdpa.softcap", eager=str(eager.softcap), other=str(sdpa.softcap))
        return message, sdpa.softcap, eager.softcap or 0.0
    if eager.softcap and sdpa.softcap and not is_close(sdpa.softcap, eager.softcap):
        message = Message("rules.eager_vs_sdpa.softcap", eager=f"{eager.softcap:g}", other=f"{sdpa.softcap:g}")
        return message, sdpa.softcap, eager.softcap
    if (eager.mask is None) != (sdpa.mask is None):
        names = [call.mask.kind if call.mask else "none" for call in (eager, sdpa)]
        return Message("rules.eager_vs_sdpa.mask", eager=names[0], other=names[1]), None, 0.0
    tolerance = _tolerance(eager.dtype)
    first, second = eager.output_rms, sdpa.output_rms
    if not outputs or first is None or second is None:
        return None
    relative = abs(first - second) / max(abs(first), abs(second), 1e-30)  # both may be 0
    if relative > tolerance:
        message = Message("rules.eager_vs_sdpa.output", eager=f"{first:.6g}", other=f"{second:.6g}")
        return message, relative, tolerance
    return None


def _outputs(eager: Rerun, sdpa: Rerun, dtype: str) -> tuple[float, float] | str | None:
    """Return (largest relative difference, threshold) of the models' outputs, or None if it is within the threshold.

    Returns a text with the reason if they can't be compared.
    """
    tolerance = OUTPUT_FACTOR * _tolerance(dtype)
    largest = 0.0
    shapes = [[tuple(tensor.shape) for tensor in run.outputs] for run in (eager, sdpa)]
    if not shapes[0]:
        return Message("rules.eager_vs_sdpa.no_outputs")
    if shapes[0] != shapes[1]:
        return Message("rules.eager_vs_sdpa.unlike_shapes", eager=str(shapes[0]), other=str(shapes[1]))
    for one, two in zip(eager.outputs, sdpa.outputs, strict=True):
        size = float(one.double().square().mean().sqrt())
        gap = float((one.double() - two.double()).square().mean().sqrt())
        if not math.isfinite(gap) and one.numel():
            return Message("rules.eager_vs_sdpa.outputs_not_finite")
        largest = max(largest, gap / size if size > 0 else gap)
    return (largest, tolerance) if largest > tolerance else None


def _costly(model: nn.Module) -> str | None:
    """Return why two more forward passes are not run unasked, or None."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return Message("rules.eager_vs_sdpa.offloaded")
    count = sum(parameter.numel() for parameter in model.parameters())
    return Message("rules.eager_vs_sdpa.large", billions=f"{count / 1e9:.3g}") if count > LARGE_MODEL else None


def compare_eager_sdpa(context: Context) -> Iterable[Finding | NotMeasured]:
    """Run a transformers model with both attention implementations, and yield at most one item on how they differ.

    It is a finding on the first attention that differs, else on the model's outputs, or a `NotMeasured` that says why
    they can't be compared. Nothing is run if the model offers no choice or `context.compare` is "never".
    """
    model = context.model
    if context.rerun is None or context.compare == "never" or not context.calls:
        return
    own = current(model)
    other = "sdpa" if own is None or own in ATTN else own
    if fixed_when_built(model):
        reason = Message("rules.eager_vs_sdpa.fixed")
        yield NotMeasured("", Message("rules.eager_vs_sdpa.not_compared", other=other, reason=reason), code="other_run")
    if not offers_choice(model):
        return
    if other == "sdpa" and not supports_sdpa(model):
        return
    for entry in _compared(context, other):
        if isinstance(entry, Finding):
            yield entry
        else:
            reason = Message("rules.eager_vs_sdpa.not_compared", other=other, reason=entry)
            yield NotMeasured("", reason, code="other_run")


def _compared(context: Context, other: str) -> Iterator[Finding | str]:
    """Yield the finding, or why something was not compared."""
    model = context.model
    if reason := refusal(model, "eager") or refusal(model, other):
        yield reason
        return
    if context.compare != "always" and (reason := _costly(model)):
        yield Message("rules.eager_vs_sdpa.left_out", reason=reason)
        return
    # The first tokens only tell that there is nothing to report. Who asks for both implementations gets all tokens.
    first = context.rerun_first if context.compare == "auto" else None
    if first is None or any(True for _ in _told(context, first, other)):
        assert context.rerun is not None
        yield from _told(context, context.rerun, other)


def _told(context: Context, rerun: _Rerun, other: str) -> Iterator[Finding | str]:
    """Yield the finding, or why something was not compared, of two runs."""
    runs, factors = [], enlargement(context)
    for name in ("eager", other):
        try:
            with implementation(context.model, name):
                runs.append(rerun(factors))
        except Exception as error:  # a user's implementation may raise anything
            yield Message("rules.eager_vs_sdpa.raised", name=name, error=kind_and_text(error))
            return
    eager, second = runs
    masks = (call.mask for call in (*(judged.call for judged in context.calls), *eager.calls, *second.calls))
    comparable = not any(mask is not None and (mask.blind_rows or mask.uniform_rows) for mask in masks)
    finding = _in_calls(eager, second, other, outputs=comparable)
    if finding is not None:
        yield finding
        return
    if eager.missed or second.missed:
        yield Message("rules.eager_vs_sdpa.lost", eager=eager.missed, number=second.missed, other=other)
    if not comparable:
        yield Message("rules.eager_vs_sdpa.blind_rows")
        return
    gap = _outputs(eager, second, context.dtype or context.calls[0].call.dtype)
    if isinstance(gap, str):
        yield gap
    elif gap is not None:
        yield _finding("", *gap, Message("rules.eager_vs_sdpa.outputs", other=other, gap=f"{gap[0]:.3g}"))


def _in_calls(eager: Rerun, second: Rerun, other: str, *, outputs: bool) -> Finding | None:
    """Return a finding on the first call that differs, or that only eager has if all attentions of both were read."""
    others = {(call.site, call.index): call for call in second.calls}
    whole = not eager.missed and not second.missed
    for call in eager.calls:
        twin = others.get((call.site, call.index))
        if twin is not None:
            found = call_difference(call, twin, outputs=outputs)
        else:
            found = (Message("rules.eager_vs_sdpa.alone", other=other), None, 0.0) if whole else None
        if found is not None:
            what, value, threshold = found
            finding = _finding(call.site, value, threshold, Message("rules.eager_vs_sdpa.call", other=other, what=what))
            return replace(finding, call=call.index)
    return None


def _finding(site: str, value: float | None, threshold: float, message: str) -> Finding:
    fix, source = Message("rules.eager_vs_sdpa.fix"), Message("sources.threshold.implementations")
    return Finding("eager_vs_sdpa", "fail", site, value, threshold, message, fix, source)

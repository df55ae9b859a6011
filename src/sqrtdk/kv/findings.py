"""The findings of a forecast, a report that includes them, and the bars. What could not be forecast is a finding too.

All bars are chosen, not measured. Mean KL of a head's weights, in nats: by Pinsker's inequality at most sqrt(KL / 2) of
the weight moves to other keys: a tenth at 0.02, 22% at 0.1, half at 0.5. Output, the error relative to its size: about
a tenth is lost anyway by four-bit storage of Gaussian numbers in groups of 64, and is not a finding. An outlier is 5
times the median or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce

from sqrtdk.audit.cache import (
    COARSE,
    CUT_OFF,
    FOLD,
    OTHER_HEAD,
    OUTLIERS,
    PRECISION,
    QK_NORM,
    ROWS,
    VALUES,
    Blame,
    CacheCall,
    CacheForecast,
    HeadError,
)
from sqrtdk.audit.records import SEVERITIES, UNMEASURED, CheckReport, Finding, with_calls_named
from sqrtdk.kv.formats import fixed_scale
from sqrtdk.messages import Message, joined

KL_BARS = (("fail", 0.5), ("warn", 0.1), ("note", 0.02))  # worst first
OUTPUT_BARS = (("fail", 0.5), ("warn", 0.25), ("note", 0.15))
OUTLIER = 5.0
HELPING_SHARE = 0.5  # of the largest mean KL: a storage helps if it at least halves the loss


def kl_level(error: HeadError) -> tuple[str, float] | None:
    """Return the worst severity whose bar the mean KL divergence (nats) passes, and the bar; None if it passes none."""
    return next((level for level in KL_BARS if error.kl_mean_nats > level[1]), None)


def output_level(error: HeadError) -> tuple[str, float] | None:
    """Return the worst severity whose bar the output's relative error passes, and the bar; None if it passes none."""
    return next((level for level in OUTPUT_BARS if error.output_error > level[1]), None)


def level(error: HeadError) -> str | None:
    """Return the worse of the two severities.

    Example:
        >>> level(HeadError(0.2, 0.1, 3.0, 4, 0.6)), level(HeadError(0.001, 0.0, 0.1, 0, 0.02))
        ('fail', None)
    """
    order = [name for name, _ in KL_BARS]
    found = [one[0] for one in (kl_level(error), output_level(error)) if one is not None]
    return min(found, key=order.index, default=None)


KV_RULE = "kv_cache"
_CAUSE_IDS = {
    OUTLIERS: "cache.cause.outlier_channels",
    ROWS: "cache.cause.large_rows",
    OTHER_HEAD: "cache.cause.other_head",
    PRECISION: "cache.cause.precision",
    VALUES: "cache.cause.values",
    CUT_OFF: "cache.cause.cut_off",
    COARSE: "cache.cause.coarse_scale",
}
_FIX_IDS = {"group": "cache.fix.group", FOLD: "cache.fix.fold", QK_NORM: "cache.fix.qk_norm"}


def with_forecast(report: CheckReport, forecast: CacheForecast) -> CheckReport:
    """Return a report with a forecast and its findings, worst first; health and verdicts remain those of the run."""
    every = (*report.findings, *findings(forecast))
    order = sorted(every, key=lambda finding: -SEVERITIES.index(finding.severity))
    return replace(report, findings=tuple(order), kv_cache=forecast)


def findings(forecast: CacheForecast) -> Iterator[Finding]:
    """Yield a finding for each key head at fault, and one for each attention without a forecast."""
    every = (_finding(forecast, call, blame) for call in forecast.calls for blame in _together(call.blame))
    yield from with_calls_named(every, (call.site for call in forecast.calls))
    for entry in forecast.not_measured:
        message = Message("cache.finding.not_forecast", reason=entry.reason)
        fix, source = Message("cache.finding.fix_not_forecast"), Message("cache.finding.source_not_forecast")
        yield Finding(UNMEASURED, "warn", entry.site, None, None, message, fix, source, entry.at)


def _together(every: Iterable[Blame]) -> Iterator[Blame]:
    """Merge key heads that have no cause of their own into one entry, worst first; yield the others as they are."""
    plain: dict[str, list[Blame]] = {}
    for blame in every:
        if blame.cause in (PRECISION, VALUES):
            plain.setdefault(blame.cause, []).append(blame)
        else:
            yield blame
    for group in plain.values():
        # Coarse rounding hits all heads alike; a finding for each would say the same thing many times.
        severities = [blame.severity for blame in group]
        yield replace(
            group[0],
            heads=tuple(sorted(head for blame in group for head in blame.heads)),
            severity=max(severities, key=SEVERITIES.index),
            mended_by=tuple(name for name in group[0].mended_by if all(name in one.mended_by for one in group)),
            helped_by=tuple(
                name
                for name in (*group[0].mended_by, *group[0].helped_by)
                if all(name in (*one.mended_by, *one.helped_by) for one in group)
                and not all(name in one.mended_by for one in group)
            ),
        )


def _finding(forecast: CacheForecast, call: CacheCall, blame: Blame) -> Finding:
    """Return the finding for a key head at fault; its value is that of the query head with the largest error."""
    errors = call.stored.heads
    by_kl = blame.cause != VALUES
    head = max(blame.heads, key=lambda i: errors[i].kl_mean_nats if by_kl else errors[i].output_error)
    worst = errors[head]
    # The head may be a finding by either bar. The one that gives its severity is reported, KL first.
    found = kl_level(worst) if by_kl else None
    bar = found[1] if found is not None and level(worst) == found[0] else dict(OUTPUT_BARS)[blame.severity]
    on_kl = bar == dict(KL_BARS)[blame.severity] and found is not None
    message = joined([_of_head(forecast, call, blame, head), blamed_text(blame)])
    return Finding(
        rule=KV_RULE,
        severity=blame.severity,
        site=call.site,
        value=worst.kl_mean_nats if on_kl else worst.output_error,
        threshold=bar,
        message=message,
        fix=fix_text(blame),
        source=Message("cache.finding.source_kl" if on_kl else "cache.finding.source_output"),
        call=call.index,
    )


def _of_head(forecast: CacheForecast, call: CacheCall, blame: Blame, head: int) -> Message:
    worst, heads = call.stored.heads[head], len(blame.heads)
    values: dict[str, str | int] = {
        "dtype": forecast.dtype,
        "grain": scale_text(forecast.scale),
        "head": head,
        "mean": f"{worst.kl_mean_nats:.3g}",
        "most": f"{worst.kl_max_nats:.3g}",
        "changed": worst.changed_rows,
        "rows": call.seeing_rows[head],
        "off": f"{worst.output_error:.0%}",
    }
    if heads == 1:
        return Message("cache.finding.head", **values)
    return Message("cache.finding.worst_head", heads=heads, **values)


def blamed_text(blame: Blame) -> str:
    """Return the cause of a head's errors in words and numbers."""
    return joined([Message(_CAUSE_IDS[blame.cause]), blame.text], "colon")


def scale_text(scale: str) -> str:
    """Return the grain of the scales in words, or the fixed scale.

    Example:
        >>> scale_text("head"), scale_text("group"), scale_text("1")
        ('one scale a head', 'one scale for 64 numbers', 'a fixed scale of 1')
    """
    return Message(f"cache.grain.{scale}") if fixed_scale(scale) is None else Message("cache.grain.fixed", number=scale)


def fix_text(blame: Blame) -> str:
    """Return a sentence that says what removes a head's errors, or what makes them smaller."""
    if blame.mended_by:
        return Message("cache.fix.mended", how=_either(blame.mended_by))
    not_mended = Message("cache.fix.not_mended")
    if not blame.helped_by:
        return not_mended
    return joined([not_mended, Message("cache.fix.better", how=_either(blame.helped_by))])


def _either(names: Sequence[str]) -> str:
    remedies = [Message(_FIX_IDS[name]) if name in _FIX_IDS else f"--cache-scale {name}" for name in names]
    return reduce(lambda first, second: Message("cache.fix.either", first=first, second=second), remedies)

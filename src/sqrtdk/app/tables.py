"""The numbers beside the figures."""

from __future__ import annotations

from markupsafe import Markup

from sqrtdk.app import sample
from sqrtdk.app.catalogue import Words
from sqrtdk.app.figures import of_range
from sqrtdk.app.pieces import Cell, table
from sqrtdk.app.settings import Settings
from sqrtdk.report.figures import number, percent, ratio
from sqrtdk.scales import sqrt_dk
from sqrtdk.theory import logit_distribution


def at_a_glance(settings: Settings, words: Words) -> Markup:
    """The numbers at the d_k chosen: measured, and expected where the theory says something."""
    logit, heads = sample.distribution(settings), sample.logits(settings)
    one = sample.at_dim(settings, settings.d_k)
    textbook = logit_distribution(settings.d_k, sqrt_dk()).scale
    capped = settings.softcap is not None
    theory = ["-"] * 4 if capped else [number(logit.std), *map(number, one.expected)]
    rows: list[tuple[Cell, ...]] = [
        (words("row.scale"), number(logit.scale), number(textbook)),
        (words("row.ratio"), ratio(logit.scale / textbook), ratio(1.0)),
        (words("row.std"), number(heads.std_logit[0]), theory[0]),
        (words("row.max"), number(heads.max_logit[0]), "-"),
        (words("row.entropy"), f"{number(one.entropy.mean[0])} ({percent(heads.entropy_fraction[0])})", theory[1]),
        (words("row.effective"), number(one.heads.effective_keys[0]), "-"),
        (words("row.peak"), number(one.peak.mean[0]), theory[2]),
        (words("row.saturated"), percent(one.heads.saturated[0]), "-"),
        (words("row.jacobian"), number(one.jacobian.mean[0] ** 0.5), theory[3]),
        (words("row.gradient"), number(one.gradient.quantiles[0.5][0]), "-"),
        (words("row.rounding", dtype=settings.dtype), number(sample.rounding(settings)), "-"),
    ]
    head = ("", words("column.measured"), words("column.expected"))
    return table(words("glance.caption", d_k=settings.d_k, keys=settings.keys), head, rows)


def ranges(settings: Settings, words: Words) -> Markup:
    """What fp16, bf16 and the dtype chosen make of the products, scaled after they are stored or before."""
    asked = of_range(settings)
    rows: list[tuple[Cell, ...]] = []
    for dtype in dict.fromkeys(("float16", "bfloat16", settings.dtype)):
        for before in (False, True):
            found = sample.forecast(asked, settings.d_k, dtype, before)
            rows.append(
                (
                    dtype,
                    words("place.before" if before else "place.after"),
                    number(found.expected_max),
                    number(found.largest_finite),
                    number(found.margin),
                    percent(found.overflow_probability),
                    number(found.spacing_at_max),
                )
            )
    names = ("dtype", "place", "largest", "limit", "margin", "overflow", "step")
    return table(
        words("range.caption", pairs=f"{settings.keys**2:,}"), [words(f"column.{name}") for name in names], rows
    )

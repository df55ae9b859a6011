"""The data that the page draws with its own script: heat maps and distributions, one entry a call with statistics."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from sqrtdk.audit.records import CheckReport, JudgedCall
from sqrtdk.report.plain import plain
from sqrtdk.stats.heads import HeadStats, Histogram
from sqrtdk.theory.gaussian import LARGEST_N, expected_entropy_nats

# key of HeadStats, name, unit, what it says
STATISTICS = (
    ("max_logit", "Max logit", "", "Largest visible logit: signed, scaled, after bias."),
    ("entropy_nats", "Entropy", "nats", "Mean entropy of a row's weights; low means few keys get all the weight."),
    ("entropy_fraction", "Entropy / log n", "%", "Share of the largest possible entropy; 100% is uniform attention."),
    ("effective_keys", "Effective keys", "keys", "Mean of 1 / sum p²: how many keys a row really uses."),
    ("peak", "Peak weight", "", "Mean over the rows of the largest weight."),
    ("peak_max", "Largest peak", "", "Largest weight of any row."),
    ("saturated", "Saturated rows", "%", "Share of rows that put more than .99 on one key."),
    ("std_logit", "Logit std", "", "Spread of the logits within a row."),
    ("mean_logit", "Mean logit", "", "Mean of the visible logits."),
    ("min_logit", "Min logit", "", "Smallest visible logit."),
    ("max_abs_logit", "Max |logit|", "", "Largest visible logit by size."),
    ("row_offset", "Row offset", "", "Largest |mean of a row|: what a low-precision store of the logits loses to."),
    ("jacobian_norm", "Jacobian norm", "", "Frobenius norm of the softmax Jacobian: how much gradient passes."),
    ("keys", "Visible keys", "keys", "Mean number of keys that the mask lets a row see."),
    ("nan_rows", "NaN rows", "rows", "Rows with a NaN or +inf logit; left out of everything else."),
    ("blind_rows", "Blind rows", "rows", "Rows that see no key; left out of everything else."),
)

_INTEGER = re.compile(r"\d+")


def payload(report: CheckReport) -> dict[str, Any]:
    """Return what the page's script needs, as JSON-ready data in which every text is made visible.

    Numbers are rounded to five digits; NaN is None, an infinity is the string "Infinity" or "-Infinity".

    Args:
        report: what `sqrtdk.check` returned.

    Returns:
        `statistics`: what can be chosen; `groups`: calls of one kind, each with a `title` and `rows`.
    """
    several_kinds = len({judged.call.kind for judged in report.calls}) > 1
    groups: dict[str, list[dict[str, Any]]] = {}
    for judged in report.calls:
        if judged.call.stats is not None:
            title, label = _place(judged, several_kinds)
            groups.setdefault(title, []).append(_row(judged, judged.call.stats, label))
    for rows in groups.values():
        repeated = Counter(row["label"] for row in rows)
        for position, row in enumerate(rows):
            if repeated[row["label"]] > 1:  # the same layer ran twice: number by order
                row["label"] = f"{row['label']}·{position}".lstrip("·")
    return {
        "statistics": [{"key": key, "name": name, "unit": unit, "help": text} for key, name, unit, text in STATISTICS],
        "groups": [{"title": title, "rows": rows} for title, rows in groups.items()],
    }


def _place(judged: JudgedCall, several_kinds: bool) -> tuple[str, str]:
    """Say in which map a call stands, and the name of its row there: its integers."""
    call = judged.call
    title = plain(_INTEGER.sub("*", call.site)) or "(root)"
    title += f" #{call.index}" if call.index else ""
    title += f" ({call.kind})" if several_kinds else ""
    return title, ".".join(_INTEGER.findall(call.site))


def _row(judged: JudgedCall, stats: HeadStats, label: str) -> dict[str, Any]:
    call = judged.call
    return {
        "label": label,
        "site": plain(call.site) or "(root)",
        "formula": plain(call.formula),
        "verdict": judged.verdict,
        "values": {key: [_short(value) for value in getattr(stats, key)] for key, *_ in STATISTICS},
        "p05": [_short(value) for value in stats.entropy_p05],
        "p50": [_short(value) for value in stats.entropy_p50],
        "p95": [_short(value) for value in stats.entropy_p95],
        "expected": [_expected(n, sigma) for n, sigma in zip(stats.keys, stats.std_logit, strict=True)],
        "logits": [_bins(histogram) for histogram in stats.logit_histogram],
        "entropies": [_bins(histogram) for histogram in stats.entropy_histogram],
    }


def _expected(keys: float, sigma: float) -> float | str | None:
    """Entropy of a row of Gaussian logits with this spread over this many keys; None where there is no such row."""
    if not (math.isfinite(keys) and math.isfinite(sigma)) or keys < 1:
        return None
    return _short(expected_entropy_nats(min(keys, LARGEST_N), sigma))


def _bins(histogram: Histogram) -> dict[str, Any] | None:
    if not histogram.counts or not sum(histogram.counts):
        return None
    return {"low": _short(histogram.low), "high": _short(histogram.high), "counts": list(histogram.counts)}


def _short(value: float) -> float | str | None:
    if isinstance(value, int):
        return value
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.5g}")

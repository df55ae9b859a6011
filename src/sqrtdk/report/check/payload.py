"""Prepares the data that the page's script draws: heat maps and distributions, one entry for each measured call."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from sqrtdk._sites import ROOT_NAME, site_name
from sqrtdk.audit.records import FAILING, HEALTH, CheckReport, JudgedCall
from sqrtdk.messages import Message, unfilled
from sqrtdk.report.json_values import pair, rounded
from sqrtdk.report.plain import plain
from sqrtdk.stats.heads import HeadStats, Histogram
from sqrtdk.theory.gaussian import LARGEST_N, expected_entropy_nats

UNIT_BY_STATISTIC = {  # field of HeadStats, or "scale_ratio" -> unit
    "max_logit": "",
    "scale_ratio": "",
    "entropy_nats": "nats",
    "entropy_fraction": "percent",
    "effective_keys": "keys",
    "peak": "",
    "peak_max": "",
    "saturated": "percent",
    "std_logit": "",
    "mean_logit": "",
    "min_logit": "",
    "max_abs_logit": "",
    "max_above_mean": "",
    "row_offset": "",
    "jacobian_norm": "",
    "keys": "keys",
    "nan_rows": "rows",
    "blind_rows": "rows",
}
_STATISTIC_DIGITS = 5  # of a number; a script draws them, and the JSON document has all
_NUMBER_IN_SITE = re.compile(r"\d+")


def check_page_data(report: CheckReport) -> dict[str, Any]:
    """Return the data for the page's script, JSON-ready, with every text passed through `plain`.

    Numbers are rounded to five digits; NaN is None, an infinity is the string "Infinity" or "-Infinity".

    Args:
        report: what `sqrtdk.check` returned.

    Returns:
        A dictionary: `words` of the script and `statistics` to choose from, as pairs of English and Chinese; `groups`
        of calls that share a map, each with a `title` and `rows`; `opens`, the row and head that are shown first.
    """
    # self- and cross-attention of one layer have maps of their own
    several_kinds = len({judged.call.kind for judged in report.calls}) > 1
    groups: dict[str, list[dict[str, Any]]] = {}
    drawn: dict[str, list[JudgedCall]] = {}
    for judged in report.calls:
        if judged.call.stats is not None:
            title, label = _place(judged, several_kinds)
            groups.setdefault(title, []).append(_row(judged, judged.call.stats, label))
            drawn.setdefault(title, []).append(judged)
    for rows in groups.values():
        repeated = Counter(row["label"] for row in rows)
        for position, row in enumerate(rows):
            if repeated[row["label"]] > 1:  # the same layer ran twice: number its rows
                row["label"] = f"{row['label']}·{position}".lstrip("·")
    return {
        "words": {key: pair(words) for key, words in unfilled("pages.script").items()},
        "statistics": [
            {
                "key": key,
                "name": pair(Message(f"pages.statistics.{key}.name")),
                "unit": pair(Message(f"pages.unit.{unit}") if unit else ""),
                "help": pair(Message(f"pages.statistics.{key}.mean")),
            }
            for key, unit in UNIT_BY_STATISTIC.items()
        ],
        "groups": [{"title": title, "rows": rows} for title, rows in groups.items()],
        "opens": _opens([judged for calls in drawn.values() for judged in calls]),
    }


def _opens(calls: list[JudgedCall]) -> list[int]:
    """Return row and head to show first: the worst failing call, in it a head with NaN, else the largest logit."""

    def harm(place: tuple[int, int]) -> tuple[int, bool, float]:
        judged, head = calls[place[0]], place[1]
        stats = judged.call.stats
        assert stats is not None
        # the worst call wins, in it a head with NaN rows, then the largest logit
        largest, failing = stats.max_logit[head], HEALTH.index(judged.health) if _fails(judged) else -1
        return failing, bool(stats.nan_rows[head]), -math.inf if math.isnan(largest) else largest

    places = [(row, head) for row, judged in enumerate(calls) for head, _ in enumerate(_ratios(judged))]
    return [*max(places, key=harm)] if places else [0, 0]


def _fails(judged: JudgedCall) -> bool:
    return judged.health in FAILING or judged.verdict == "unexplained"


def _ratios(judged: JudgedCall) -> list[float]:
    """Return the scale ratio of each head; NaN if it is not known."""
    scale, heads = judged.call.scale, judged.call.stats.heads if judged.call.stats else 0
    if scale.per_head and len(scale.per_head) == heads:
        return [value * math.sqrt(judged.call.head_dim) for value in scale.per_head]
    return [math.nan if scale.ratio is None else scale.ratio] * heads


def _place(judged: JudgedCall, several_kinds: bool) -> tuple[str, str]:
    """Return the title of a call's map and the label of its row: ("model.layers.*.self_attn", "3")."""
    call = judged.call
    title = plain(_NUMBER_IN_SITE.sub("*", call.site)) or ROOT_NAME
    title += f" #{call.index}" if call.index else ""
    title += f" ({call.kind})" if several_kinds else ""
    return title, ".".join(_NUMBER_IN_SITE.findall(call.site))


def _row(judged: JudgedCall, stats: HeadStats, label: str) -> dict[str, Any]:
    """Return the data of one call for the page's plots: statistics per head, and the entropy of a Gaussian."""
    call = judged.call
    return {
        "label": label,
        "site": plain(site_name(call.site, call.index)),
        "formula": plain(call.formula),
        "fails": _fails(judged),
        "values": {
            key: _numbers(_ratios(judged) if key == "scale_ratio" else getattr(stats, key)) for key in UNIT_BY_STATISTIC
        },
        "p05": _numbers(stats.entropy_p05),
        "p50": _numbers(stats.entropy_p50),
        "p95": _numbers(stats.entropy_p95),
        "expected": [_expected(n, sigma) for n, sigma in zip(stats.keys, stats.std_logit, strict=True)],
        "logits": [_bins(histogram) for histogram in stats.logit_histogram],
        "entropies": [_bins(histogram) for histogram in stats.entropy_histogram],
    }


def _expected(keys: float, sigma: float) -> float | str | None:
    """Return the entropy (nats) of Gaussian logits with this spread over this many keys; None without visible keys."""
    if not (math.isfinite(keys) and math.isfinite(sigma)) or keys < 1:
        return None
    return rounded(expected_entropy_nats(min(keys, LARGEST_N), sigma), _STATISTIC_DIGITS)


def _bins(histogram: Histogram) -> dict[str, Any] | None:
    if not histogram.counts or not sum(histogram.counts):
        return None
    low, high = _numbers((histogram.low, histogram.high))
    return {"low": low, "high": high, "counts": list(histogram.counts)}


def _numbers(values: Iterable[float]) -> list[float | str | None]:
    return [rounded(value, _STATISTIC_DIGITS) for value in values]

"""Writes runs as one JSON document. NaN is null ("not measured"), an infinity a string: see `sqrtdk._json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqrtdk._json import json_document
from sqrtdk.messages import fields
from sqrtdk.monitor.samples import Alarm
from sqrtdk.report.json_values import record_fields, tool
from sqrtdk.report.watch.compare import RunComparison
from sqrtdk.report.watch.fix import alarm_fix
from sqrtdk.report.watch.headline import Headline, compared_headline, run_headline
from sqrtdk.report.watch.missing import UnmeasuredEntry
from sqrtdk.report.watch.several import partly_shared
from sqrtdk.report.watch.sites import Site
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN
from sqrtdk.report.watch.summary import Summary

SCHEMA_VERSION = 1


def to_json(summary: Summary) -> str:
    """Return a run as one document, ASCII only, that ends with a newline.

    `sites` holds the trend of each attention and statistic: for each of `steps`, `worst` (the worst head's value),
    `head` (its number, or null if no head has a value) and `median` (over heads).
    """
    return json_document(_head() | _run(summary))


def series_json(done: dict[str, Any], runs: Sequence[Summary]) -> str:
    """Return several runs as one JSON document.

    Args:
        done: Fields at the top of the document, for example the checkpoints that were read.
        runs: Runs, which stand under "runs" as `to_json` writes each.
    """
    return json_document(_head() | done | {"runs": [_head() | _run(run) for run in runs]})


def several_json(runs: Sequence[Summary]) -> str:
    """Return several runs as one JSON document: each as `to_json` writes it, and the attentions that not all have."""
    return series_json({"only_in": [{"runs": one.runs, "sites": one.sites} for one in partly_shared(runs)]}, runs)


def comparison_json(a: Summary, b: Summary, compared: RunComparison) -> str:
    """Return two runs and what differs as one document.

    `differences` are sorted by `typical`, the median over attentions of `apart`. `apart` is the difference as a share
    of the larger value. `a` and `b` are medians of the worst head's value over the samples at `steps_a` and `steps_b`.
    """
    differences = [
        {
            "statistic": one.column,
            "typical": one.typical,
            "sites_measured": one.measured,
            "sites_that_differ": one.count,
            "sites": [{"site": pair.label, "a": pair.a, "b": pair.b, "apart": pair.apart} for pair in one.pairs],
        }
        for one in compared.differences
    ]
    how = {
        "steps_a": compared.steps_a,
        "steps_b": compared.steps_b,
        "steps_overlap": compared.overlap,
        "attentions_matched_by": compared.by,
    }
    sites = {"only_a": compared.only_a, "only_b": compared.only_b}
    first = _first(compared_headline(a, b, compared))
    return json_document(_head() | first | how | sites | {"differences": differences, "a": _run(a), "b": _run(b)})


def _head() -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "tool": tool()}


def _first(head: Headline) -> dict[str, Any]:
    return {"headline": head.text.en, "fix": head.fix or None}


def _run(summary: Summary) -> dict[str, Any]:
    """Return the fields of a run for JSON."""
    losses = summary.losses.tolist()
    return {
        "run": summary.name,
        "model": summary.model,
        "settings": summary.settings,
        **_first(run_headline(summary)),
        "attempts": summary.attempts,
        "writer": summary.writer,
        "first_step": summary.first_step,
        "last_step": summary.last_step,
        "recorded_steps": summary.recorded,
        "samples": summary.samples.tolist(),
        "how": dict(summary.how),
        "loss": {"steps": summary.loss_steps.tolist(), "values": losses},
        **{name: {"steps": at.tolist(), "values": of.tolist()} for name, (at, of) in summary.updates.items()},
        "sites": [_site(site) for site in summary.sites],
        "alarm_counts": summary.counts,
        "alarms": [_with_message(alarm, "text") | {"fix": alarm_fix(summary, alarm)} for alarm in summary.alarms],
        "missing": [_with_message(entry, "reason") for entry in summary.missing],
    }


def _with_message(record: Alarm | UnmeasuredEntry, of: str) -> dict[str, Any]:
    """Return the fields of a record, and beside one of them the id and the values of its sentence."""
    written: dict[str, Any] = {}
    for name, value in record_fields(record).items():
        written[name] = value
        if name == of:
            written |= fields(value)
    return written


def _site(site: Site) -> dict[str, Any]:
    statistics = {}
    for column in STATISTIC_BY_COLUMN:
        worst, at = site.worst(column)
        # value == value is false for NaN, of which no head is the worst
        heads = [site.heads[place] if value == value else None for place, value in zip(at, worst, strict=True)]
        statistics[column] = {"worst": worst.tolist(), "head": heads, "median": site.median(column).tolist()}
    return {
        "site": site.site,
        "index": site.index,
        "heads": site.heads,
        "rows_left_out": dict(site.left_out),
        "steps": site.steps.tolist(),
        "statistics": statistics,
    }

"""Writes the forecast of a quantised cache as JSON: alone, or as a part of the document of a check."""

from __future__ import annotations

from typing import Any

from sqrtdk._json import json_document
from sqrtdk.audit.cache import CacheForecast
from sqrtdk.messages import fields
from sqrtdk.report.json_values import reasoned, record_fields


def to_json(forecast: CacheForecast) -> str:
    """Return the forecast as one JSON document, ASCII only, that ends with a newline."""
    return json_document(forecast_fields(forecast))


def forecast_fields(forecast: CacheForecast) -> dict[str, Any]:
    """Return a forecast as a dict for JSON.

    Returns:
        The fields of `CacheForecast`; its "calls", "not_measured" and "without_cache" are lists of dicts, in which
        `message_id` and `values` stand beside each sentence.
    """
    calls = [
        record_fields(call) | {"blame": [record_fields(blame) | fields(blame.text) for blame in call.blame]}
        for call in forecast.calls
    ]
    unjudged = {
        "not_measured": [reasoned(entry) for entry in forecast.not_measured],
        "without_cache": [reasoned(entry) for entry in forecast.without_cache],
    }
    return record_fields(forecast) | {"calls": calls} | unjudged

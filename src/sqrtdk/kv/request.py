"""The forecasts of `sqrtdk kv`: refused before a model is built, their result added to the report of an audit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqrtdk._check import check_with
from sqrtdk.audit.cache import CacheForecast
from sqrtdk.audit.records import CheckReport
from sqrtdk.errors import InvalidValueError
from sqrtdk.kv.call import ForecastRequest
from sqrtdk.kv.findings import with_forecast
from sqrtdk.kv.forecast import checked_scale, forecasts_of_model
from sqrtdk.kv.formats import FORMATS
from sqrtdk.messages import Message
from sqrtdk.models.names import graph_kind
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import LoadedModel


def requests_of(
    model: str, cache_dtype: str | None, cache_scale: str | None, rows: int | None
) -> tuple[ForecastRequest, ...]:
    """Return the request for a format, or one for each format, with its own scale, if none is named.

    Raises:
        InvalidValueError: Format and scale do not fit together, a scale comes without a format, or the model is a
            graph, which has no values.

    Example:
        >>> [request.scale for request in requests_of("demo", None, None, None)]
        ['tensor', 'tensor', 'tensor', 'block', 'group']
    """
    if graph_kind(model) is not None:
        raise InvalidValueError(Message("errors.options.kv_graph"), hint=Message("errors.hint.exported"))
    if cache_dtype is not None:
        return (ForecastRequest(cache_dtype, checked_scale(cache_dtype, cache_scale), rows, 0),)
    if cache_scale is not None:
        raise InvalidValueError(
            Message("errors.options.no_cache_dtype", scale=cache_scale),
            hint=Message("errors.hint.add_cache_dtype", scale=cache_scale),
        )
    return tuple(ForecastRequest(name, form.scale, rows, 0) for name, form in FORMATS.items())


def audit_and_forecast(
    model: str, options: LoadOptions, requests: tuple[ForecastRequest, ...], **audit: Any
) -> CheckReport:
    """Return the report of `check_with` with forecasts, from one more run of the model.

    A single forecast adds its findings to the report. Several are compared, and none of them is a finding, as nobody
    has chosen a format yet.
    """
    forecasts: list[CacheForecast] = []

    def forecast(loaded: LoadedModel) -> None:
        forecasts.extend(forecasts_of_model(loaded, options, requests))

    report = check_with(model, None, options, after=forecast, **audit)
    return with_forecast(report, *forecasts) if len(requests) == 1 else replace(report, kv_formats=tuple(forecasts))

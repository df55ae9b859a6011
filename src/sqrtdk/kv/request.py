"""The forecast options of `sqrtdk check`: refused before a model is built, their result added to its report."""

from __future__ import annotations

from typing import Any

from sqrtdk._check import check_with
from sqrtdk.audit.cache import CacheForecast
from sqrtdk.audit.records import CheckReport
from sqrtdk.errors import InvalidValueError
from sqrtdk.kv.call import ForecastRequest
from sqrtdk.kv.findings import with_forecast
from sqrtdk.kv.forecast import checked_scale, forecast_of_model
from sqrtdk.messages import Message
from sqrtdk.models.names import graph_kind
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import LoadedModel


def request_of(
    model: str, kv_dtype: str | None, kv_scale: str | None, kv_rows: int | None, static: bool
) -> ForecastRequest | None:  # fmt: skip
    """Return the request for the options of `sqrtdk check`; None without a format.

    Raises:
        InvalidValueError: Format and scale do not fit together, another option comes without a format, or the run has
            no values.

    Example:
        >>> request_of("demo", "int8", None, None, False).scale, request_of("demo", None, None, None, True)
        ('tensor', None)
    """
    if kv_dtype is None:
        for name, value in (("kv_scale", kv_scale), ("kv_rows", kv_rows)):
            if value is not None:
                raise InvalidValueError(
                    Message("errors.options.no_kv_dtype", name=name, value=repr(value)),
                    hint=Message("errors.hint.add_kv_dtype"),
                )
        return None
    scale = checked_scale(kv_dtype, kv_scale)
    if static:
        raise InvalidValueError(
            Message("errors.options.kv_static", kv_dtype=repr(kv_dtype)),
            hint=Message("errors.hint.leave_static_out"),
        )
    if graph_kind(model) is not None:
        raise InvalidValueError(
            Message("errors.options.kv_graph", kv_dtype=repr(kv_dtype)),
            hint=Message("errors.hint.exported"),
        )
    return ForecastRequest(kv_dtype, scale, kv_rows, 0)


def check_and_forecast(model: str, options: LoadOptions, cache: ForecastRequest | None, **audit: Any) -> CheckReport:
    """Return the report of `check_with`; if requested, with the forecast of a cache, from one more run of the model.

    If both implementations of attention are audited, the first is used, as they cache the same k and v.
    """
    if cache is None:
        return check_with(model, None, options, **audit)
    told: list[CacheForecast] = []

    def forecast(loaded: LoadedModel) -> None:
        if not told:
            told.append(forecast_of_model(loaded, options, cache))

    report = check_with(model, None, options, after=forecast, **audit)
    return with_forecast(report, *told)

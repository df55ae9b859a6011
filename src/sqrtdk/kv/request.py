"""What `sqrtdk check` asks of a cache in fewer bits: refused before a model is built, added to its report after."""

from __future__ import annotations

from dataclasses import replace

from sqrtdk.audit.records import CheckReport
from sqrtdk.errors import InvalidValueError
from sqrtdk.kv.findings import with_forecast
from sqrtdk.kv.forecast import checked_scale, forecast_with
from sqrtdk.models.names import graph_kind
from sqrtdk.models.options import ATTN, LoadOptions


def asked(model: str, kv_dtype: str | None, kv_scale: str | None, static: bool) -> tuple[str, str] | None:
    """Format and grain of the scales; None where no cache was asked for.

    Raises:
        InvalidValueError: They don't go together, there is a scale and no format, or a run without values.

    Example:
        >>> asked("demo", "int8", None, False), asked("demo", None, None, True)
        (('int8', 'tensor'), None)
    """
    if kv_dtype is None:
        if kv_scale is None:
            return None
        raise InvalidValueError(f"kv_scale is {kv_scale!r}, and no kv_dtype is given", hint="Add --kv-dtype int8.")
    scale = checked_scale(kv_dtype, kv_scale)
    if static:
        raise InvalidValueError(
            f"kv_dtype is {kv_dtype!r} with static, where k and v have no values",
            hint="Leave --static out; a config alone is built with random weights.",
        )
    if graph_kind(model) is not None:
        raise InvalidValueError(
            f"kv_dtype is {kv_dtype!r} with a graph, whose k and v have no values",
            hint="Check the model that was exported.",
        )
    return kv_dtype, scale


def forecast_into(
    report: CheckReport, model: str, options: LoadOptions, cache: tuple[str, str] | None
) -> CheckReport:  # fmt: skip
    """The report with the forecast of a cache that was asked for, from one more run of the model.

    Where both implementations of attention are audited, the model's own runs: what is cached is the same.
    """
    if cache is None:
        return report
    options = replace(options, attn=options.attn if options.attn in ATTN else None)
    return with_forecast(report, forecast_with(model, None, options, *cache))

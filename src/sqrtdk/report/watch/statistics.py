"""The recorded columns that are drawn, and which of their values are worse; names and meanings are in the catalogue."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sqrtdk.messages import Message
from sqrtdk.report.figures import format_number, format_percent

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Statistic:
    """How a column of the records is shown.

    Attributes:
        column: of the records.
        worst: which value is the worst: the "largest", the "least", or the "farthest" from 1 as a factor.
        of: key of the unit in the catalogue, `watch.unit`; "" for a plain number, "%" for a share.
        newest: whether the table of the newest sample shows it.
        always: whether every attention should have it. A fused kernel, for example, stores no product.
    """

    column: str
    worst: str
    of: str = ""
    newest: bool = False
    always: bool = True

    @property
    def name(self) -> Message:
        """The title of the statistic that readers see."""
        return Message(f"watch.statistic.{self.column}.name")

    @property
    def meaning(self) -> Message:
        """One sentence that says what the statistic means."""
        return Message(f"watch.statistic.{self.column}.meaning")

    @property
    def unit_name(self) -> str:
        """The unit of the statistic that readers see; "" for a plain number."""
        return Message(f"watch.unit.{self.of}") if self.of and not self.unit else self.of

    @property
    def unit(self) -> str:
        """ "%" for a share, else "".

        Example:
            >>> STATISTIC_BY_COLUMN["saturated"].unit, STATISTIC_BY_COLUMN["max_logit"].unit
            ('%', '')
        """
        return self.of if self.of == "%" else ""


_TABLE = (
    Statistic("max_logit", "largest", "logits", newest=True),
    Statistic("max_logit_p50", "largest", "logits"),
    Statistic("max_logit_p95", "largest", "logits"),
    Statistic("min_logit", "least", "logits"),
    Statistic("max_abs_logit", "largest", "logits"),
    Statistic("mean_logit", "largest", "logits"),
    Statistic("std_logit", "largest", "logits", newest=True),
    Statistic("row_offset", "largest", "logits"),
    Statistic("max_product", "largest", "products"),
    Statistic("stored_product", "largest", "products", always=False),
    Statistic("scale_ratio", "farthest", newest=True),
    Statistic("entropy_fraction", "least", "%", newest=True),
    Statistic("entropy_nats", "least", "nats"),
    Statistic("entropy_p05", "least", "nats"),
    Statistic("entropy_p50", "least", "nats"),
    Statistic("entropy_p95", "least", "nats"),
    Statistic("effective_keys", "least", "keys"),
    Statistic("saturated", "largest", "%", newest=True),
    Statistic("peak", "largest", newest=True),
    Statistic("peak_max", "largest"),
    Statistic("jacobian_norm", "least"),
    Statistic("query_grad_p50", "largest", "per_q", newest=True),
    Statistic("query_grad_p95", "largest", "per_q"),
    Statistic("query_grad_max", "largest", "per_q", newest=True),
    Statistic("key_grad_p50", "largest", "per_k", newest=True),
    Statistic("key_grad_p95", "largest", "per_k"),
    Statistic("key_grad_max", "largest", "per_k", newest=True),
    Statistic("query_grad_nonfinite", "largest", "rows"),
    Statistic("key_grad_nonfinite", "largest", "keys"),
    Statistic("query_nonfinite", "largest", "numbers"),
    Statistic("key_nonfinite", "largest", "numbers"),
    Statistic("nan_rows", "largest", "rows"),
)
STATISTIC_BY_COLUMN: Mapping[str, Statistic] = {statistic.column: statistic for statistic in _TABLE}
NEWEST = tuple(name for name, statistic in STATISTIC_BY_COLUMN.items() if statistic.newest)


def badness(values: Array, column: str) -> Array:
    """Return a key that is largest at the worst head: the value, its negative, or |log|value||. NaN gives -inf.

    Example:
        >>> badness(np.array([0.5, 1.0, math.nan]), "scale_ratio").round(2).tolist()
        [0.69, 0.0, -inf]
    """
    # half and twice the right scale are equally bad
    kind = STATISTIC_BY_COLUMN[column].worst
    if kind == "farthest":
        with np.errstate(divide="ignore"):
            values = np.where(np.isnan(values), values, np.abs(np.log(np.abs(values))))
    return np.where(np.isnan(values), -math.inf, -values if kind == "least" else values)


def value_text(column: str, value: float | None) -> str:
    """Return a value in the unit of its statistic, as text; a column that is not a statistic has none.

    Example:
        >>> value_text("saturated", 0.25), value_text("max_logit", 12.5), value_text("max_logit", None)
        ('25%', '12.5', '-')
    """
    if value is None or math.isnan(value):
        return "-"
    share = column in STATISTIC_BY_COLUMN and STATISTIC_BY_COLUMN[column].unit == "%"
    return format_percent(value) if share else format_number(value)

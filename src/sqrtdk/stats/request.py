"""Which statistics of a call are requested, and the result: one number for every row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk._guesses import near_statistic
from sqrtdk._shown import figure_of, notebook_table
from sqrtdk.errors import InvalidTypeError
from sqrtdk.stats._partial import RowStats

if TYPE_CHECKING:
    from jaxtyping import Float

    from sqrtdk._shapes import Rows


@dataclass(frozen=True, slots=True)
class AuxRequest:
    """Which statistics `attention` returns beside its output; the fields are those of `AuxOutput`.

    `max_scores` is torch's name of `max_logit`.

    Example:
        >>> AuxRequest(lse=True).wanted
        ('lse',)
        >>> len(AuxRequest.all().wanted)
        10
    """

    lse: bool = False
    max_logit: bool = False
    min_logit: bool = False
    mean: bool = False
    variance: bool = False
    entropy_nats: bool = False
    collision: bool = False
    peak: bool = False
    jacobian_norm: bool = False
    keys: bool = False
    max_scores: bool = field(default=False, repr=False)  # torch's name of max_logit, in FlexAttention's AuxRequest

    def __new__(cls, *args: Any, **names: Any) -> AuxRequest:
        """Refuse an unknown statistic with the name that it has here."""
        known = (*AuxOutput._fields, "max_scores")
        for name in names:
            if name not in known:
                raise InvalidTypeError(
                    f"AuxRequest has no {name!r}{near_statistic(name, known)}",
                    hint=f"Its statistics: {', '.join(AuxOutput._fields)}.",
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in (*AuxOutput._fields, "max_scores"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidTypeError(f"{name} is True or False; got {getattr(self, name)!r}", hint="Pass a bool.")
        for name in ("max_logit", "max_scores"):
            object.__setattr__(self, name, self.max_logit or self.max_scores)

    @classmethod
    def all(cls) -> AuxRequest:
        """Return a request for every statistic.

        Example:
            >>> AuxRequest.all().wanted == AuxOutput._fields
            True
        """
        return cls(*[True] * len(AuxOutput._fields))

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the requested statistics.

        Example:
            >>> AuxRequest(lse=True).wanted
            ('lse',)
        """
        return tuple(name for name in AuxOutput._fields if getattr(self, name))


class AuxOutput(NamedTuple):
    """Statistics of every row, each (..., Hq, L), or None if it was not requested.

    float32, and float64 for float64 inputs; logits in natural-log units. max_logit to variance and keys describe the
    logits z at the visible keys; lse and the others the weights p = softmax(z), over the keys and the sink, if there is
    one. A row that sees no key has keys 0 and NaN for mean and variance; lse -inf and weight statistics 0 (its weights
    are zeros), or those of the sink alone. `lse` and `entropy_nats` carry gradients; the others are
    detached. `max_scores`, torch's name, is `max_logit`.
    """

    lse: Rows | None = None  # log sum e^z, the sink included
    max_logit: Rows | None = None  # largest z
    min_logit: Rows | None = None  # smallest z
    mean: Rows | None = None  # of z
    variance: Rows | None = None  # of z, divided by n; +inf if the sum of squares overflows the dtype
    entropy_nats: Rows | None = None  # -sum p log p, nats
    collision: Rows | None = None  # sum p^2
    peak: Rows | None = None  # largest p
    jacobian_norm: Rows | None = None  # Frobenius norm of diag(p) - p p^T
    keys: Rows | None = None  # visible keys, -inf logits included

    @property
    def max_scores(self) -> Rows | None:
        """`max_logit`, under the name that torch's FlexAttention has for it."""
        return self.max_logit

    def __repr__(self) -> str:
        there = {name: rows for name, rows in self._asdict().items() if rows is not None}
        kinds = {f"{tuple(rows.shape)} {str(rows.dtype).removeprefix('torch.')}": None for rows in there.values()}
        return f"AuxOutput({', '.join(there)}{': each ' if there else ''}{', '.join(kinds)})"

    def plot(self) -> Any:
        """Draw what there is of largest logit, entropy and largest weight, for each head along the queries.

        Raises:
            InvalidValueError: None of them was requested.
            MissingExtraError: matplotlib is not installed.
        """
        return figure_of(self)

    def _repr_html_(self) -> str:
        return notebook_table(self)


def _unknown(aux: AuxOutput, name: str) -> Any:
    raise AttributeError(f"AuxOutput has no {name!r}{near_statistic(name, aux._fields)}")


# Not in the class, where a type checker would take it for leave to read any name.
AuxOutput.__getattr__ = _unknown  # type: ignore[attr-defined]


def aux_output(
    request: AuxRequest,
    rows: RowStats,
    whole: RowStats | None = None,
    *,
    lse: Rows | None = None,
    entropy: Rows | None = None,
) -> AuxOutput:
    """Pick the requested statistics.

    Args:
        request: the requested fields.
        rows: rows over the visible keys.
        whole: rows over keys and sink; None without a sink.
        lse: the lse that carries gradients, instead of `whole.lse`.
        entropy: the same for the entropy.
    """
    whole = rows if whole is None else whole
    blind = whole.keys == 0

    def weights(value: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
        return torch.where(blind, torch.zeros_like(value), value)

    blank = rows.keys == 0
    makers = {
        "lse": lambda: whole.lse if lse is None else lse,
        "max_logit": lambda: rows.max_logit,
        "min_logit": lambda: rows.min_logit,
        "mean": lambda: rows.mean.masked_fill(blank, torch.nan),
        "variance": lambda: rows.variance,
        "entropy_nats": lambda: weights(whole.entropy_nats) if entropy is None else entropy,
        "collision": lambda: weights(whole.collision),
        "peak": lambda: weights(whole.peak),
        "jacobian_norm": lambda: weights(whole.jacobian_norm),
        "keys": lambda: rows.keys,
    }
    return AuxOutput(**{name: makers[name]() for name in request.wanted})

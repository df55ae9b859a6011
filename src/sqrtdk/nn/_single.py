"""The base of the modules without projections of q, k and v: one score, a call on (..., heads, length, channels).

Every module knows how many parameters it should have: a formula beside the count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sqrtdk._arguments import dropout_rate
from sqrtdk._guesses import parameters_of, refuse_arguments
from sqrtdk.errors import InvalidValueError
from sqrtdk.nn._attend import attend, function_mask
from sqrtdk.positions import PositionTerm
from sqrtdk.stats.request import AuxRequest
from sqrtdk.theory.parameters import Terms

if TYPE_CHECKING:
    from typing_extensions import Never

    from sqrtdk._named import AnyScale, AnyScore, AnyWindow
    from sqrtdk._shapes import AnyKey, Bias, Query, Value, Visible


class Counted(nn.Module):
    """Base of the modules of `sqrtdk.nn`, whose number of parameters is also given by a formula."""

    def parameter_terms(self) -> Terms:
        """Return the terms of the number of parameters, computed from the sizes alone."""
        return Terms()

    def parameter_count(self) -> int:
        """Return the number of parameters that the module holds, counting shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def expected_parameters(self) -> int:
        """Return the number of parameters by the formula; it equals `parameter_count()`.

        Example:
            >>> from sqrtdk.nn import MultiHeadAttention
            >>> module = MultiHeadAttention(32, 4, bias=False)
            >>> module.expected_parameters(), module.parameter_count()
            (4096, 4096)
        """
        return self.parameter_terms().total

    @property
    def parameter_formula(self) -> str:
        """The formula for the number of parameters, in symbols.

        Example:
            >>> from sqrtdk.nn import MultiHeadAttention
            >>> MultiHeadAttention(32, 4, bias=False).parameter_formula
            '3 h d_k d_model + d_model^2'
        """
        return self.parameter_terms().formula


def store_attribute(module: nn.Module, name: str, value: object) -> None:
    """Store a value as an attribute of a module; a plain tensor becomes a buffer, so that it moves with the module."""
    # nn.Module registers parameters and modules by itself on setattr, but not plain tensors.
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)


def own_terms(name: str, part: object) -> Terms:
    """Return the term of a part that the caller passed, whose parameters are counted instead of computed.

    Args:
        name: Name of the part in the formula.
        part: A module or a parameter; anything else has no parameters.
    """
    if isinstance(part, nn.Module):
        number = sum(parameter.numel() for parameter in part.parameters())
    else:
        number = part.numel() if isinstance(part, nn.Parameter) else 0
    return Terms(((f"{number} of the {name}", number),)) if number else Terms()


class ScoreAttention(Counted):
    """softmax(scale * score(q, k) + bias) v; the base of the modules with a single score.

    Attributes:
        score: a score function, its name, or None for the dot product.
        scale: a scale rule, a number or a tensor; None: the score's own rule.
        bias: a position term, its name, or None.
    """

    score: AnyScore | None
    scale: AnyScale | None
    bias: PositionTerm | str | None

    def __init__(
        self,
        score: AnyScore | None,
        dropout: float = 0.0,
        *,
        scale: AnyScale | None = None,
        bias: PositionTerm | str | None = None,
        softcap: float | None = None,
        window: AnyWindow | None = None,
        enable_gqa: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.score = score
        if isinstance(dropout, int) and dropout > 1:  # the num_heads of a module with projections
            raise InvalidValueError(
                f"{type(self).__name__} takes a rate of dropout, and no number of heads beside a width; got {dropout}",
                hint="MultiHeadAttention(embed_dim, num_heads, score=scores.cosine()) projects, for one.",
            )
        self.dropout = dropout_rate("dropout", dropout)
        store_attribute(self, "scale", scale)
        self.bias = bias
        self.softcap = softcap
        self.window = window
        self.enable_gqa = enable_gqa
        self.impl = impl

    def forward(
        self,
        query: Query,
        key: AnyKey,
        value: Value,
        attn_mask: Visible | Bias | None = None,
        is_causal: bool = False,
        *,
        need_weights: bool = False,
        return_aux: AuxRequest | bool | None = None,
        **_unknown: Never,
    ) -> Any:
        """Attend.

        Args:
            query: (..., heads, L, E), or (..., L, E) if no part has heads.
            key: (..., heads, S, Ek).
            value: (..., heads, S, Ev).
            attn_mask: broadcastable to (..., heads, L, S): bool, **True where the key is hidden from the row**, as in
                torch's modules; or floating, added. `sqrtdk.attention` takes a bool mask the other way round.
            is_causal: row i sees keys j <= i, and of these only what `attn_mask` leaves.
            need_weights: whether to return the weights, (..., heads, L, S), after dropout.
            return_aux: statistics to return, see `sqrtdk.AuxRequest`.

        Returns:
            The output (..., heads, L, Ev); with `need_weights` or `return_aux` a tuple of it and the requested weights
            and statistics.
        """
        if _unknown:
            refuse_arguments(type(self).__name__, _unknown, parameters_of(ScoreAttention.forward))
        return attend(
            query,
            key,
            value,
            attn_mask=None if attn_mask is None else function_mask(attn_mask),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
            score=self.score,
            softcap=self.softcap,
            bias=self.bias,
            window=self.window,
            need_weights=need_weights,
            return_aux=return_aux,
            impl=self.impl,
        ).asked()

    def parameter_terms(self) -> Terms:
        """Return the terms of the number of parameters: those of the score, the scale and the bias."""
        return self.score_terms() + own_terms("scale", self.scale) + self.bias_terms()

    def score_terms(self) -> Terms:
        """Return the terms of the score's parameters."""
        return own_terms("score", self.score)

    def bias_terms(self) -> Terms:
        """Return the terms of the position term's parameters."""
        return own_terms("bias", self.bias)

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows in parentheses: the dropout; the scale unless it is a module."""
        scale = self.scale
        shown = "" if scale is None or isinstance(scale, nn.Module | Tensor) else f", scale={scale}"
        return f"dropout={self.dropout}{shown}"

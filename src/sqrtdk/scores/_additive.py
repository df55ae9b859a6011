"""score = v . tanh(Wq^T q + Wk^T k + b): a network of one hidden layer on every pair.

Bahdanau, Cho & Bengio 2015, "Neural Machine Translation by Jointly Learning to Align and Translate", arXiv:1409.0473,
appendix A.1.2 (v, W_a, U_a; no bias).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales import ScaleRule, none
from sqrtdk.scores._tanh import check_v, tanh_pairs
from sqrtdk.scores._weights import check_heads, keep, project, widened

if TYPE_CHECKING:
    from jaxtyping import Float

_QUERY, _KEY = "query_weight of an additive score", "key_weight of an additive score"
_V, _BIAS = "v of an additive score", "the bias of an additive score"


class Additive(nn.Module):
    """See `additive`.

    Attributes:
        v: (A,) or (Hq, A).
        query_weight: (E, A) or (Hq, E, A).
        key_weight: (Ek, A) or (H, Ek, A).
        bias: (A,) or (Hq, A), or None.
    """

    v: Float[Tensor, " A"] | Float[Tensor, "Hq A"]
    query_weight: Float[Tensor, "E A"] | Float[Tensor, "Hq E A"]
    key_weight: Float[Tensor, "Ek A"] | Float[Tensor, "H Ek A"]
    bias: Float[Tensor, " A"] | Float[Tensor, "Hq A"] | None

    def __init__(
        self,
        v: Float[Tensor, " A"] | Float[Tensor, "Hq A"],
        query_weight: Float[Tensor, "E A"] | Float[Tensor, "Hq E A"],
        key_weight: Float[Tensor, "Ek A"] | Float[Tensor, "H Ek A"],
        bias: Float[Tensor, " A"] | Float[Tensor, "Hq A"] | None,
    ) -> None:
        super().__init__()
        keep(self, "v", v, _V, {1: "(A,)", 2: "(Hq, A)"})
        keep(self, "query_weight", query_weight, _QUERY, {2: "(E, A)", 3: "(Hq, E, A)"})
        keep(self, "key_weight", key_weight, _KEY, {2: "(Ek, A)", 3: "(Hkv, Ek, A)"})
        if bias is None:
            self.register_parameter("bias", None)
        else:
            keep(self, "bias", bias, _BIAS, {1: "(A,)", 2: "(Hq, A)"})
        hidden = [t.shape[-1] for t in (v, query_weight, key_weight, bias) if t is not None]
        if len(set(hidden)) > 1:
            raise InvalidValueError(
                f"the weights of an additive score have one hidden width; got {', '.join(map(str, hidden))}",
                hint="v is (A,), query_weight (E, A), key_weight (Ek, A), bias (A,).",
            )

    @property
    def default_scale(self) -> ScaleRule:
        """None: v sets the range."""
        return none()

    @property
    def width(self) -> int:
        """A: the hidden layer of a pair."""
        return self.v.shape[-1]

    def prepare(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S Ek"]
    ) -> tuple[Float[Tensor, "*BHq L A"], Float[Tensor, "*BH S A"]]:
        """Both projected, the query with the bias."""
        check_v(self.v, query, _V)
        projected = widened(project(query, self.query_weight, _QUERY, "query"))
        if self.bias is not None:
            check_heads(self.bias, 2, query, _BIAS, "query")
            bias = self.bias.to(projected.dtype)
            projected = projected + (bias.unsqueeze(-2) if query.ndim > 2 and bias.ndim == 2 else bias)
        return projected, widened(project(key, self.key_weight, _KEY, "key"))

    def pairs(self, query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"]) -> Float[Tensor, "*BHq R S"]:
        """The product of v and tanh(query + key)."""
        return tanh_pairs(query, key, self.v)

    def extra_repr(self) -> str:
        """Shapes."""
        return f"query_weight={tuple(self.query_weight.shape)}, key_weight={tuple(self.key_weight.shape)}"


def additive(
    v: Float[Tensor, " A"] | Float[Tensor, "Hq A"],
    query_weight: Float[Tensor, "E A"] | Float[Tensor, "Hq E A"],
    key_weight: Float[Tensor, "Ek A"] | Float[Tensor, "H Ek A"],
    bias: Float[Tensor, " A"] | Float[Tensor, "Hq A"] | None = None,
) -> Additive:
    """Bahdanau's additive score, v . tanh(q Wq + k Wk + b); not scaled where no scale is given.

    The projections are made once a call; blocks of pairs hold A numbers a pair. See `fresh_additive` for new weights.

    Args:
        v: (A,), or (Hq, A) for each query head.
        query_weight: Wq, (E, A), or (Hq, E, A) for each query head.
        key_weight: Wk, (Ek, A), or (H, Ek, A) for each key head.
        bias: b, (A,), or (Hq, A) for each query head.

    Returns:
        The score, an nn.Module; it takes query (..., Hq, L, E) and key (..., H, S, Ek). Parameters among the weights
        are trained with it. Weights are cast to the query's dtype; of half types only the projections are in it, the
        pairs are float32.

    Raises:
        InvalidTypeError: a weight is no floating tensor.
        InvalidValueError: weights of other dimensions or of different A, or, in a call, of other E, Ek or heads.

    Example:
        >>> import torch
        >>> score = additive(torch.ones(8), torch.zeros(4, 8), torch.zeros(6, 8), bias=torch.full((8,), 50.0))
        >>> score.pairs(*score.prepare(torch.randn(2, 4), torch.randn(1, 6)))
        tensor([[8.],
                [8.]])

    Reference:
        Bahdanau et al. 2015, arXiv:1409.0473.
    """
    return Additive(v, query_weight, key_weight, bias)

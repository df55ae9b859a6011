"""score = v . tanh(q Wq + k Wk + b): a network of one hidden layer on every pair, in three published forms.

- `additive`: Bahdanau, Cho & Bengio 2015, "Neural Machine Translation by Jointly Learning to Align and Translate",
  arXiv:1409.0473, appendix A.1.2 (v, W_a, U_a; no bias).
- `luong_concat`: v . tanh(W^T [q; k]), Luong et al. 2015, arXiv:1508.04025, section 3.1, "concat". W split after the
  query's features gives Bahdanau's form, so that the joined vector of a pair is never made.
- `keras_additive`: v . tanh(q + k), Keras's `AdditiveAttention` layer, which leaves projections out. `use_scale=True`
  there is the vector v, named `scale`; `use_scale=False` is a plain sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales import ScaleRule, none
from sqrtdk.scores._score import check_same_features, check_weight_heads, heads_of, project_heads, store_weight, widened

if TYPE_CHECKING:
    from jaxtyping import Float

_QUERY, _KEY = "query_weight of an additive score", "key_weight of an additive score"
_V, _BIAS = "v of an additive score", "the bias of an additive score"
_WEIGHT, _CONCAT_V = "the weight of a concat score", "v of a concat score"
_KERAS_V = "v of a Keras additive score"


class _TanhScore(nn.Module):
    """A score v . tanh(q + k) of a prepared query and a prepared key."""

    v: Float[Tensor, " A"] | Float[Tensor, "Hq A"]

    @property
    def default_scale(self) -> ScaleRule:
        """The scale rule `none()`: v sets the range of the logits."""
        return none()

    @property
    def width(self) -> int:
        """A, the width of the hidden layer: the numbers held at once for a pair of query and key."""
        return self.v.shape[-1]

    def pairs(self, query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"]) -> Float[Tensor, "*BHq R S"]:
        """Return v . tanh(q + k) for every pair of a prepared query and a prepared key."""
        return _tanh_pairs(query, key, self.v)


class Additive(_TanhScore):
    """See `additive`.

    Attributes:
        v: (A,) or (Hq, A).
        query_weight: (E, A) or (Hq, E, A).
        key_weight: (Ek, A) or (H, Ek, A).
        bias: (A,) or (Hq, A), or None.
    """

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
        store_weight(self, "v", v, _V, {1: "(A,)", 2: "(Hq, A)"})
        store_weight(self, "query_weight", query_weight, _QUERY, {2: "(E, A)", 3: "(Hq, E, A)"})
        store_weight(self, "key_weight", key_weight, _KEY, {2: "(Ek, A)", 3: "(Hkv, Ek, A)"})
        if bias is None:
            self.register_parameter("bias", None)
        else:
            store_weight(self, "bias", bias, _BIAS, {1: "(A,)", 2: "(Hq, A)"})
        hidden = [t.shape[-1] for t in (v, query_weight, key_weight, bias) if t is not None]
        if len(set(hidden)) > 1:
            raise InvalidValueError(
                f"the weights of an additive score have one hidden width; got {', '.join(map(str, hidden))}",
                hint="v is (A,), query_weight (E, A), key_weight (Ek, A), bias (A,).",
            )

    def prepare(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S Ek"]
    ) -> tuple[Float[Tensor, "*BHq L A"], Float[Tensor, "*BH S A"]]:
        """Return W_q q + b, (..., Hq, L, A), and W_k k, (..., H, S, A), at least in float32.

        Raises:
            InvalidValueError: A weight has other features or heads than the tensor.
        """
        check_weight_heads(self.v, 2, query, _V, "query")
        projected = widened(project_heads(query, self.query_weight, _QUERY, "query"))
        if self.bias is not None:
            check_weight_heads(self.bias, 2, query, _BIAS, "query")
            bias = self.bias.to(projected.dtype)
            projected = projected + (bias.unsqueeze(-2) if query.ndim > 2 and bias.ndim == 2 else bias)
        return projected, widened(project_heads(key, self.key_weight, _KEY, "key"))

    def extra_repr(self) -> str:
        """Return the shapes of the weights, which `print(module)` shows."""
        return f"query_weight={tuple(self.query_weight.shape)}, key_weight={tuple(self.key_weight.shape)}"


def additive(
    v: Float[Tensor, " A"] | Float[Tensor, "Hq A"],
    query_weight: Float[Tensor, "E A"] | Float[Tensor, "Hq E A"],
    key_weight: Float[Tensor, "Ek A"] | Float[Tensor, "H Ek A"],
    bias: Float[Tensor, " A"] | Float[Tensor, "Hq A"] | None = None,
) -> Additive:
    """Bahdanau's additive score, v . tanh(q Wq + k Wk + b); not scaled unless a scale is given.

    The projections are computed once in a call. A block of pairs holds A numbers for each pair. See `fresh_additive`
    for new weights.

    Args:
        v: (A,), or (Hq, A) for each query head.
        query_weight: Wq, (E, A), or (Hq, E, A) for each query head.
        key_weight: Wk, (Ek, A), or (H, Ek, A) for each key head.
        bias: b, (A,), or (Hq, A) for each query head.

    Returns:
        The score, an nn.Module; it takes query (..., Hq, L, E) and key (..., H, S, Ek). Weights that are Parameters are
        trained with it. Weights are cast to the query's dtype; for half types only the projections are computed in it,
        the pairs in float32.

    Raises:
        InvalidTypeError: a weight is not a floating tensor.
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


class LuongConcat(_TanhScore):
    """See `luong_concat`.

    Attributes:
        v: (A,) or (Hq, A).
        weight: (E + Ek, A) or (H, E + Ek, A).
    """

    weight: Float[Tensor, "both A"] | Float[Tensor, "H both A"]

    def __init__(
        self,
        v: Float[Tensor, " A"] | Float[Tensor, "Hq A"],
        weight: Float[Tensor, "both A"] | Float[Tensor, "H both A"],
    ) -> None:
        super().__init__()
        store_weight(self, "v", v, _CONCAT_V, {1: "(A,)", 2: "(Hq, A)"})
        store_weight(self, "weight", weight, _WEIGHT, {2: "(E + Ek, A)", 3: "(H, E + Ek, A)"})
        if v.shape[-1] != weight.shape[-1]:
            raise InvalidValueError(
                f"v and the weight of a concat score have one hidden width; got {v.shape[-1]} and {weight.shape[-1]}",
                hint="v is (A,), the weight (E + Ek, A).",
            )

    def prepare(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S Ek"]
    ) -> tuple[Float[Tensor, "*BHq L A"], Float[Tensor, "*BH S A"]]:
        """Return query and key times their parts of the weight, (..., Hq, L, A) and (..., H, S, A), at least float32.

        As W [q; k] = W_q q + W_k k, no pair has to be concatenated.

        Raises:
            InvalidValueError: The weight has other features or heads than query and key.
        """
        features = query.shape[-1]
        if features + key.shape[-1] != self.weight.shape[-2]:
            raise InvalidValueError(
                f"{_WEIGHT} takes {self.weight.shape[-2]} features of q and k together; "
                f"got {features} + {key.shape[-1]}",
                hint="Its shape is (E + Ek, A), the query's features first.",
            )
        if self.weight.ndim == 3 and heads_of(query) != heads_of(key):
            raise InvalidValueError(
                f"{_WEIGHT} for each head needs as many query as key heads; got {heads_of(query)} and {heads_of(key)}",
                hint="Split it for `additive`, which has a weight for each query head and one for each key head.",
            )
        check_weight_heads(self.v, 2, query, _CONCAT_V, "query")
        # [q; k] W = q W_q + k W_k: the pairs, L S of them, are not concatenated.
        of_query, of_key = self.weight[..., :features, :], self.weight[..., features:, :]
        return widened(project_heads(query, of_query, _WEIGHT, "query")), widened(
            project_heads(key, of_key, _WEIGHT, "key")
        )

    def extra_repr(self) -> str:
        """Return the shape of the weight, which `print(module)` shows."""
        return f"weight={tuple(self.weight.shape)}"


def luong_concat(
    v: Float[Tensor, " A"] | Float[Tensor, "Hq A"], weight: Float[Tensor, "both A"] | Float[Tensor, "H both A"]
) -> LuongConcat:
    """Luong's concat score, v . tanh([q; k] W); not scaled unless a scale is given.

    Args:
        v: (A,), or (Hq, A) for each query head.
        weight: W, (E + Ek, A), the query's features first, or (H, E + Ek, A) for each head, where q and k have the same
            number of heads.

    Returns:
        The score, an nn.Module; it takes query (..., Hq, L, E) and key (..., H, S, Ek). Dtypes as in `additive`.

    Raises:
        InvalidTypeError: a weight is not a floating tensor.
        InvalidValueError: weights of other dimensions or of different A, or, in a call, of other features or heads.

    Example:
        >>> import torch
        >>> score = luong_concat(torch.ones(1), torch.tensor([[1.0], [-1.0]]))
        >>> score.pairs(*score.prepare(torch.tensor([[3.0]]), torch.tensor([[3.0]])))
        tensor([[0.]])

    Reference:
        Luong et al. 2015, arXiv:1508.04025.
    """
    return LuongConcat(v, weight)


class KerasAdditive(nn.Module):
    """See `keras_additive`.

    Attributes:
        v: (E,) or (Hq, E), or None.
    """

    v: Float[Tensor, " E"] | Float[Tensor, "Hq E"] | None

    def __init__(self, v: Float[Tensor, " E"] | Float[Tensor, "Hq E"] | None) -> None:
        super().__init__()
        if v is None:
            self.register_parameter("v", None)
        else:
            store_weight(self, "v", v, _KERAS_V, {1: "(E,)", 2: "(Hq, E)"})

    @property
    def default_scale(self) -> ScaleRule:
        """The scale rule `none()`: v sets the range of the logits."""
        return none()

    @property
    def width(self) -> None:
        """None: a pair of query and key holds as many numbers as the query has features."""
        return

    def prepare(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"]
    ) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
        """Return query and key unchanged, half types as float32.

        Raises:
            InvalidValueError: The features of query, key and v differ, or v has other heads than the query.
        """
        check_same_features(query, key, "a Keras additive score")
        if self.v is not None:
            check_weight_heads(self.v, 2, query, _KERAS_V, "query")
            if self.v.shape[-1] != query.shape[-1]:
                raise InvalidValueError(
                    f"{_KERAS_V} has one number for each of {query.shape[-1]} features; got {self.v.shape[-1]}",
                    hint="Its shape is (E,), or (Hq, E).",
                )
        return widened(query), widened(key)

    def pairs(self, query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"]) -> Float[Tensor, "*BHq R S"]:
        """Return v . tanh(q + k) for every pair of query and key; without a v, the sum over the features."""
        return _tanh_pairs(query, key, self.v)


def keras_additive(v: Float[Tensor, " E"] | Float[Tensor, "Hq E"] | None = None) -> KerasAdditive:
    """The score of Keras's `AdditiveAttention`, v . tanh(q + k); not scaled unless a scale is given.

    Args:
        v: (E,), Keras's `scale` weight, or (Hq, E) for each query head; None: all ones (`use_scale=False`).

    Returns:
        The score, an nn.Module; it takes query (..., Hq, L, E) and key (..., H, S, E). Half types are computed in
        float32.

    Raises:
        InvalidTypeError: v is not a floating tensor.
        InvalidValueError: v has other dimensions, or, in a call, other features or heads than the query.

    Example:
        >>> import torch
        >>> score = keras_additive(torch.tensor([1.0, 3.0]))
        >>> score.pairs(*score.prepare(torch.full((1, 2), 50.0), torch.zeros(1, 2)))
        tensor([[4.]])

    Reference:
        keras.io/api/layers/attention_layers/additive_attention; Bahdanau et al. 2015, arXiv:1409.0473.
    """
    return KerasAdditive(v)


def _tanh_pairs(
    query: Float[Tensor, "*#BHq R A"],
    key: Float[Tensor, "*#BHq S A"],
    v: Float[Tensor, " A"] | Float[Tensor, "Hq A"] | None,
) -> Float[Tensor, "*BHq R S"]:
    """Return the scores of projected queries and keys.

    Args:
        query: projected, bias included.
        key: projected.
        v: (A,), or (Hq, A) for each head; None: all ones.
    """
    # In place: no derivative needs the sum, and a block is the largest tensor of the call.
    bent = (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh_()
    if v is None:
        return bent.sum(-1)
    if v.ndim == 2 and query.ndim == 2:
        v = v[0]
    # A matrix-vector product, because `bent * v` would allocate another block.
    product = bent.flatten(-3, -2) @ v.to(bent.dtype).unsqueeze(-1)
    return product.reshape(bent.shape[:-1])

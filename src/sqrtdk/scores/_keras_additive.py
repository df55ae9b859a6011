"""score = v . tanh(q + k): the additive score of Keras's `AdditiveAttention` layer, which leaves projections out.

`use_scale=True` there is the vector v, named `scale`; `use_scale=False` is a plain sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales import ScaleRule, none
from sqrtdk.scores._tanh import check_v, tanh_pairs
from sqrtdk.scores._weights import check_same_features, keep, widened

if TYPE_CHECKING:
    from jaxtyping import Float

_V = "v of a Keras additive score"


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
            keep(self, "v", v, _V, {1: "(E,)", 2: "(Hq, E)"})

    @property
    def default_scale(self) -> ScaleRule:
        """None: v sets the range."""
        return none()

    @property
    def width(self) -> None:
        """As many as the query has features."""
        return

    def prepare(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"]
    ) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
        """Both as they are, half types as float32."""
        check_same_features(query, key, "a Keras additive score")
        if self.v is not None:
            check_v(self.v, query, _V)
            if self.v.shape[-1] != query.shape[-1]:
                raise InvalidValueError(
                    f"{_V} has one number for each of {query.shape[-1]} features; got {self.v.shape[-1]}",
                    hint="Its shape is (E,), or (Hq, E).",
                )
        return widened(query), widened(key)

    def pairs(self, query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"]) -> Float[Tensor, "*BHq R S"]:
        """The product of v and tanh(query + key)."""
        return tanh_pairs(query, key, self.v)


def keras_additive(v: Float[Tensor, " E"] | Float[Tensor, "Hq E"] | None = None) -> KerasAdditive:
    """The score of Keras's `AdditiveAttention`, v . tanh(q + k); not scaled where no scale is given.

    Args:
        v: (E,), Keras's `scale` weight, or (Hq, E) for each query head; None: all ones (`use_scale=False`).

    Returns:
        The score, an nn.Module; it takes query (..., Hq, L, E) and key (..., H, S, E). Half types are computed in
        float32.

    Raises:
        InvalidTypeError: v is no floating tensor.
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

"""score = v . tanh(W^T [q; k]): Luong et al. 2015, arXiv:1508.04025, section 3.1, "concat".

W split after the query's features gives Bahdanau's form: the joined vector of a pair is never made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales import ScaleRule, none
from sqrtdk.scores._tanh import check_v, tanh_pairs
from sqrtdk.scores._weights import heads_of, keep, project, widened

if TYPE_CHECKING:
    from jaxtyping import Float

_W, _V = "the weight of a concat score", "v of a concat score"


class LuongConcat(nn.Module):
    """See `luong_concat`.

    Attributes:
        v: (A,) or (Hq, A).
        weight: (E + Ek, A) or (H, E + Ek, A).
    """

    v: Float[Tensor, " A"] | Float[Tensor, "Hq A"]
    weight: Float[Tensor, "both A"] | Float[Tensor, "H both A"]

    def __init__(
        self,
        v: Float[Tensor, " A"] | Float[Tensor, "Hq A"],
        weight: Float[Tensor, "both A"] | Float[Tensor, "H both A"],
    ) -> None:
        super().__init__()
        keep(self, "v", v, _V, {1: "(A,)", 2: "(Hq, A)"})
        keep(self, "weight", weight, _W, {2: "(E + Ek, A)", 3: "(H, E + Ek, A)"})
        if v.shape[-1] != weight.shape[-1]:
            raise InvalidValueError(
                f"v and the weight of a concat score have one hidden width; got {v.shape[-1]} and {weight.shape[-1]}",
                hint="v is (A,), the weight (E + Ek, A).",
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
        """Each through its part of the weight."""
        features = query.shape[-1]
        if features + key.shape[-1] != self.weight.shape[-2]:
            raise InvalidValueError(
                f"{_W} takes {self.weight.shape[-2]} features of q and k together; got {features} + {key.shape[-1]}",
                hint="Its shape is (E + Ek, A), the query's features first.",
            )
        if self.weight.ndim == 3 and heads_of(query) != heads_of(key):
            raise InvalidValueError(
                f"{_W} for each head needs as many query as key heads; got {heads_of(query)} and {heads_of(key)}",
                hint="Split it for `additive`, which has a weight for each query head and one for each key head.",
            )
        check_v(self.v, query, _V)
        of_query, of_key = self.weight[..., :features, :], self.weight[..., features:, :]
        return widened(project(query, of_query, _W, "query")), widened(project(key, of_key, _W, "key"))

    def pairs(self, query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"]) -> Float[Tensor, "*BHq R S"]:
        """The product of v and tanh(query + key)."""
        return tanh_pairs(query, key, self.v)

    def extra_repr(self) -> str:
        """Shape."""
        return f"weight={tuple(self.weight.shape)}"


def luong_concat(
    v: Float[Tensor, " A"] | Float[Tensor, "Hq A"], weight: Float[Tensor, "both A"] | Float[Tensor, "H both A"]
) -> LuongConcat:
    """Luong's concat score, v . tanh([q; k] W); not scaled where no scale is given.

    Args:
        v: (A,), or (Hq, A) for each query head.
        weight: W, (E + Ek, A), the query's features first, or (H, E + Ek, A) for each head, where q and k have the same
            number of heads.

    Returns:
        The score, an nn.Module; it takes query (..., Hq, L, E) and key (..., H, S, Ek). Dtypes as in `additive`.

    Raises:
        InvalidTypeError: a weight is no floating tensor.
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

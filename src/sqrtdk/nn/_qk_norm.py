"""Norms of q and k over one head, each with a learned gain: Qwen3 and Gemma 3; ViT-22B (arXiv:2302.05442)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from jaxtyping import Float


class HeadRMSNorm(nn.RMSNorm):
    """torch's, with the gain cast to the input: in autocast it warns of two dtypes otherwise."""

    def forward(self, x: Float[Tensor, "*B E"]) -> Float[Tensor, "*B E"]:
        """The gain times x / sqrt(mean x^2 + eps)."""
        weight = self.weight.to(x.dtype)
        return functional.rms_norm(x, list(self.normalized_shape), weight, self.eps)


QK_NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": lambda width, **where: HeadRMSNorm(width, eps=1e-6, **where),
    "layer": lambda width, **where: nn.LayerNorm(width, bias=False, **where),
}


def new_qk_norm(norm: Any, width: int, where: dict[str, Any]) -> nn.Module | None:
    """A new norm for a head of `width` channels: by name, or by the caller's function of it."""
    if norm is None:
        return None
    if isinstance(norm, str):
        if norm not in QK_NORMS:
            raise InvalidValueError(
                f"qk_norm is one of {', '.join(QK_NORMS)}; got {norm!r}",
                hint="For l2 use score=scores.cosine(), whose gain is the scale.",
            )
        return QK_NORMS[norm](width, **where)
    made = norm(width)
    if not isinstance(made, nn.Module):
        raise InvalidTypeError(
            f"qk_norm makes a module for a head dimension; got {type(made).__name__}", hint="Pass nn.RMSNorm, for one."
        )
    return made

"""beta_h = exp(theta_h) rule: one learned factor a head on any other rule, 1 at the start.

The parameter is a logarithm: equal steps are equal ratios, the sign can't turn, and weight decay pulls towards the
rule, not towards 0. A learned temperature of this kind is CLIP's (Radford et al. 2021, arXiv:2103.00020); over `log_n`
it is SSMax (Nakanishi 2025, arXiv:2501.19399).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.scales._numbers import whole
from sqrtdk.scales._rule import ScaleRule, Sizes
from sqrtdk.scales._sqrt_dk import sqrt_dk

if TYPE_CHECKING:
    from sqrtdk._shapes import Factor


class Learned(nn.Module):
    """See `learned`.

    Attributes:
        rule: what the factors multiply.
        log_factor: (heads,) parameter, theta; without unit.
    """

    def __init__(
        self,
        heads: int,
        rule: ScaleRule,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.rule = rule
        self.log_factor = nn.Parameter(torch.zeros(heads, dtype=dtype, device=device))

    def beta(self, sizes: Sizes) -> Factor:
        """exp(theta) times the rule, (heads, 1, 1), or (..., heads, L, 1) where the rule differs from row to row."""
        heads = self.log_factor.shape[0]
        if heads != 1 and heads != sizes.heads:
            raise InvalidValueError(
                f"a learned scale has a factor for each query head, or one; got {heads} for {sizes.heads} heads",
                hint=f"Build it with learned({sizes.heads}).",
            )
        factor = self.log_factor.to(torch.promote_types(self.log_factor.dtype, torch.float32)).exp()
        return factor.reshape((1, 1) if heads == 1 else (heads, 1, 1)) * self.rule.beta(sizes)

    def extra_repr(self) -> str:
        """Heads, and the rule where it is no module, which torch shows itself."""
        shown = "" if isinstance(self.rule, nn.Module) else f", rule={self.rule}"
        return f"heads={self.log_factor.shape[0]}{shown}"


def learned(
    heads: int,
    init: ScaleRule | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Learned:
    """A learned scale, beta_h = exp(theta_h) rule, theta one parameter a query head, 0 at the start.

    Args:
        heads: query heads, or 1 for one factor that all share.
        init: the rule that holds at the start, and that the factors multiply; None: `sqrt_dk()`.
        dtype: of the parameter; None: torch's default. The scale has this dtype, float32 for half types.
        device: of the parameter.

    Returns:
        The rule, an nn.Module: keep it as an attribute of a model, so that an optimiser finds its parameter.

    Raises:
        InvalidTypeError: heads is no whole number, or init is no rule.
        InvalidValueError: heads is below 1.

    Example:
        >>> from sqrtdk.scales import log_n, sizes
        >>> learned(2).beta(sizes(64, heads=2)).flatten().tolist()
        [0.125, 0.125]
        >>> ssmax = learned(8, init=log_n(s=0.168))

    Reference:
        Radford et al. 2021, arXiv:2103.00020; Nakanishi 2025, arXiv:2501.19399.

    Differs from:
        SSMax, which learns s itself: here s exp(theta), which can't become negative.
    """
    rule = sqrt_dk() if init is None else init
    if not isinstance(rule, ScaleRule):
        raise InvalidTypeError(
            f"init of a learned scale is a scale rule; got {type(init).__name__}",
            hint="Pass a rule of sqrtdk.scales, e.g. fixed(0.1).",
        )
    return Learned(whole(heads, "heads of a learned scale", 1), rule, dtype, device)

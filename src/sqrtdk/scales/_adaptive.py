"""Rules that adapt: to the number of visible keys, to an extended context, or by training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.scales._constant import sqrt_dk
from sqrtdk.scales._numbers import finite, positive, whole_number
from sqrtdk.scales._rule import ScaleRule, Sizes

if TYPE_CHECKING:
    from sqrtdk._shapes import Factor


@dataclass(frozen=True, slots=True)
class LogN:
    """The rule s log(n) / sqrt(d), with n the visible keys of the row; see `log_n`."""

    s: float
    base: float

    def beta(self, sizes: Sizes) -> Factor:
        """Return s log_base(n) / sqrt(d), broadcastable to (..., Hq, L, 1)."""
        # A row without keys has no logits, so any finite factor is correct; log 0 would make its gradient NaN.
        keys = sizes.visible_keys().clamp(min=1.0)
        return keys.log() * (self.s / (math.log(self.base) * math.sqrt(sizes.head_dim)))


def log_n(s: float = 1.0, base: float = math.e) -> LogN:
    """A scale that grows with the logarithm of the number of visible keys, beta_i = s log_base(n_i) / sqrt(d).

    The weights stay as sharp as n grows. A row that sees one key gets the scale 0: its only weight is 1 at any scale.
    To learn s for every head (SSMax), pass the rule to `learned`.

    Args:
        s: a finite number without unit.
        base: above 1; e for Chiang & Cholak and SSMax. Su's log_m n uses the training length in keys; at that length
            the rule is the textbook scale.

    Returns:
        The rule; its beta is a tensor, since n differs from row to row under a mask.

    Raises:
        InvalidTypeError: an argument is not a number.
        InvalidValueError: an argument is NaN or infinite, or the base is not above 1.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> log_n(base=512).beta(sizes(64, key_len=512))
        tensor([[0.1250]])

    Reference:
        Chiang & Cholak 2022, arXiv:2202.12172; Su 2021, kexue.fm/archives/8823; Nakanishi 2025, arXiv:2501.19399.

    Differs from:
        The papers, where n is the length of the sequence: here a row under a causal mask has its own n, as in SSMax's
        use in a decoder, and padding is not counted.
    """
    number = finite(base, "the base of log_n")
    if number <= 1.0:
        raise InvalidValueError(
            f"the base of log_n is above 1; got {number}", hint="Pass math.e, or the training length in keys."
        )
    return LogN(finite(s, "s of log_n"), number)


@dataclass(frozen=True, slots=True)
class Yarn:
    """The rule mscale^2 / sqrt(d); see `yarn`."""

    mscale: float

    def beta(self, sizes: Sizes) -> float:
        """Return mscale^2 / sqrt(d)."""
        return self.mscale * self.mscale / math.sqrt(sizes.head_dim)


def yarn(mscale: float) -> Yarn:
    """YaRN's scale, beta = mscale^2 / sqrt(d): a longer context gets a lower temperature, 1 / t = mscale^2.

    Args:
        mscale: above 0; see `yarn_mscale`.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: mscale is not a number.
        InvalidValueError: mscale is NaN, infinite, zero or negative.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> yarn(2.0).beta(sizes(64))
        0.5

    Reference:
        Peng et al. 2023, "YaRN", arXiv:2309.00071v2, section 3.4; DeepSeek-AI 2024 (DeepSeek-V2), arXiv:2405.04434,
        which applies it to the scale.

    Differs from:
        Code that multiplies the cosines and sines of the rotation by mscale, with the same effect: with such code use
        `sqrt_dk`, or the factor counts twice.
    """
    return Yarn(positive(mscale, "mscale of yarn"))


def yarn_mscale(factor: float, m: float = 1.0) -> float:
    """Return 0.1 m ln(factor) + 1, or 1 for a context that is not extended.

    Args:
        factor: new context length over the original one, above 0.
        m: DeepSeek's `mscale_all_dim`; 1 in the paper.

    Returns:
        The factor on q and on k each; `yarn` squares it.

    Raises:
        InvalidTypeError: an argument is not a number.
        InvalidValueError: an argument is NaN or infinite, or the factor is not above 0.

    Example:
        >>> round(yarn_mscale(40.0), 4)
        1.3689

    Reference:
        Peng et al. 2023, arXiv:2309.00071v2, section 3.4.
    """
    ratio = positive(factor, "the factor of yarn_mscale")
    multiplier = finite(m, "m of yarn_mscale")
    return 1.0 if ratio <= 1.0 else 0.1 * multiplier * math.log(ratio) + 1.0


class Learned(nn.Module):
    """See `learned`.

    Attributes:
        rule: the rule that the factors multiply.
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
        """Return exp(theta) times the factor of the initial rule.

        Returns:
            (heads, 1, 1), or (..., heads, L, 1) if the rule differs between rows.

        Raises:
            InvalidValueError: theta has another number of heads than the query, and more than one.
        """
        heads = self.log_factor.shape[0]
        if heads != 1 and heads != sizes.heads:
            raise InvalidValueError(
                f"a learned scale has a factor for each query head, or one; got {heads} for {sizes.heads} heads",
                hint=f"Build it with learned({sizes.heads}).",
            )
        # At least float32, because a half type would round the scale of every logit.
        factor = self.log_factor.to(torch.promote_types(self.log_factor.dtype, torch.float32)).exp()
        return factor.reshape((1, 1) if heads == 1 else (heads, 1, 1)) * self.rule.beta(sizes)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows: the heads; and the rule, unless torch shows it itself as a module."""
        shown = "" if isinstance(self.rule, nn.Module) else f", rule={self.rule}"
        return f"heads={self.log_factor.shape[0]}{shown}"


def learned(
    heads: int,
    init: ScaleRule | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Learned:
    """A learned scale, beta_h = exp(theta_h) rule, with one parameter theta for each query head, 0 at the start.

    The parameter is a logarithm: equal steps are equal ratios, the sign can't change, and weight decay pulls the scale
    towards the rule, not towards 0.

    Args:
        heads: query heads, or 1 for one factor that all share.
        init: the rule at the start, which the factors multiply; None: `sqrt_dk()`.
        dtype: of the parameter; None: torch's default. The scale has this dtype, float32 for half types.
        device: of the parameter.

    Returns:
        The rule, an nn.Module: keep it as an attribute of a model, so that an optimiser finds its parameter.

    Raises:
        InvalidTypeError: heads is not an integer, or init is not a rule.
        InvalidValueError: heads is below 1.

    Example:
        >>> from sqrtdk.scales import log_n, sizes
        >>> learned(2).beta(sizes(64, heads=2)).flatten().tolist()
        [0.125, 0.125]
        >>> ssmax = learned(8, init=log_n(s=0.168))

    Reference:
        Radford et al. 2021 (CLIP), arXiv:2103.00020; Nakanishi 2025 (SSMax), arXiv:2501.19399.

    Differs from:
        SSMax, which learns s itself: here s exp(theta), which can't become negative.
    """
    rule = sqrt_dk() if init is None else init
    if not isinstance(rule, ScaleRule):
        raise InvalidTypeError(
            f"init of a learned scale is a scale rule; got {type(init).__name__}",
            hint="Pass a rule of sqrtdk.scales, e.g. fixed(0.1).",
        )
    return Learned(whole_number(heads, "heads of a learned scale", 1), rule, dtype, device)

"""YaRN (Peng et al. 2023): rotary positions for a longer context, slow channels interpolated and fast ones kept."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.errors import InvalidValueError
from sqrtdk.positions._rope import check_rotary_dim, rotary_width, turn
from sqrtdk.positions._term import wide_dtype
from sqrtdk.scales import yarn_mscale
from sqrtdk.scales._numbers import positive, whole_number

if TYPE_CHECKING:
    from jaxtyping import Float, Real


def yarn_attention_factor(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """Return (0.1 mscale ln s + 1) / (0.1 mscale_all_dim ln s + 1), and 1 for s at most 1.

    Both q and k are multiplied by it, and their product by its square.

    Args:
        factor: s, how many times longer the context is, above 0.
        mscale: default 1, the paper's.
        mscale_all_dim: default 0, the paper's; DeepSeek moves this part into the attention's scale.

    Returns:
        A number without unit.

    Raises:
        InvalidTypeError: `factor` is not a number.
        InvalidValueError: `factor` is not finite and above 0.

    Example:
        >>> round(yarn_attention_factor(4.0), 4)
        1.1386
        >>> yarn_attention_factor(4.0, 0.7, 0.7)
        1.0

    Reference:
        Peng, Quesnelle, Fan, Shippole: YaRN, 2023, section 3.4 of version 2; DeepSeek-V2, 2024, for `mscale_all_dim`.
    """
    return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)


def yarn_frequencies(
    rotary_dim: int,
    *,
    factor: float,
    original_length: int,
    base: float = 10000.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Float[Tensor, " pairs"]:
    """NTK by parts: w_c where a channel turns often within the original length, w_c / s where it does not.

    Between the pair of channels that turns `beta_fast` times and that which turns `beta_slow` times the two are mixed
    linearly in c: w_c (1 - t_c) + (w_c / s) t_c, t_c = clip((c - low) / (high - low), 0, 1).

    Args:
        rotary_dim: channels that turn, even.
        factor: s, how many times longer the context is.
        original_length: of the context the model was trained with, in tokens.
        base: of w_c = base^(-2c / rotary_dim); default 10000.
        beta_fast: turns within `original_length` from which on a channel is kept; default 32.
        beta_slow: turns up to which it is interpolated, less than `beta_fast`; default 1.
        truncate: whether low and high are rounded outwards to whole channels; default True.
        dtype: default float32.
        device: of the result.

    Returns:
        (rotary_dim / 2,), in radians a token.

    Raises:
        InvalidTypeError: a number of the wrong type.
        InvalidValueError: an odd `rotary_dim`, a number that is not finite and above 0, a base of at most 1, or a
            `beta_slow` that is not less than `beta_fast`.

    Example:
        >>> w = yarn_frequencies(64, factor=4.0, original_length=2048)
        >>> w[0].item(), round(w[-1].item() * 4 * 10000 ** (62 / 64), 4)
        (1.0, 1.0)

    Reference:
        Peng, Quesnelle, Fan, Shippole: YaRN, 2023, section 3.2.

    Differs from:
        the paper's ramp, which is linear in the number of turns: the published code's is linear in the channel, and
        models were trained so.
    """
    check_rotary_dim(rotary_dim)
    whole_number(original_length, "original_length", 1)
    for name, value in (("factor", factor), ("base", base), ("beta_fast", beta_fast), ("beta_slow", beta_slow)):
        positive(value, name)
    if base <= 1.0:
        raise InvalidValueError(f"base is above 1 for YaRN; got {base}", hint="Pass the model's rope_theta.")
    if beta_slow >= beta_fast:
        raise InvalidValueError(f"beta_slow is less than beta_fast; got {beta_slow} and {beta_fast}", hint="Swap them.")

    def channel(turns: float) -> float:
        """Return the pair of channels that turns this many times within the original length."""
        return rotary_dim * math.log(original_length / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))

    # Fast pairs, which turn through all angles in training, keep their frequency: low is the last of them.
    low, high = channel(beta_fast), channel(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # avoids 0 / 0 at a sharp step, as in the published code
    periods = base ** (torch.arange(0, rotary_dim, 2, dtype=dtype, device=device) / rotary_dim)
    ramp = (torch.arange(rotary_dim // 2, dtype=dtype, device=device) - low) / (high - low)
    ramp = ramp.clamp(0.0, 1.0)
    # Slow pairs, which never completed a turn in training, are interpolated by the factor; those between are blended.
    return (1.0 / (factor * periods)) * ramp + (1.0 / periods) * (1.0 - ramp)


def yarn(
    query: Float[Tensor, "*BHq L E"],
    key: Float[Tensor, "*BH S E"],
    *,
    factor: float,
    original_length: int,
    base: float = 10000.0,
    layout: str = "half",
    positions: Real[Tensor, "... L"] | None = None,
    key_positions: Real[Tensor, "... S"] | None = None,
    rotary_dim: int | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
    """Rotary positions with `yarn_frequencies`, the turned channels multiplied by the attention factor.

    The logits of the turned channels are multiplied by attention_factor^2, 1 / t of the paper.

    Args:
        query: (..., Hq, L, E).
        key: (..., H, S, E).
        factor: s, how many times longer the context is.
        original_length: of the context the model was trained with, in tokens.
        base: of the frequencies; default 10000.
        layout: "half" (the default) or "interleaved", see `apply_rope`.
        positions: as in `rope`.
        key_positions: as in `rope`.
        rotary_dim: as in `rope`.
        beta_fast: as in `yarn_frequencies`.
        beta_slow: as in `yarn_frequencies`.
        truncate: as in `yarn_frequencies`.
        attention_factor: default `yarn_attention_factor(factor)`.

    Returns:
        The turned query and key, each of its own shape and dtype.

    Raises:
        InvalidTypeError: as in `rope` and `yarn_frequencies`.
        InvalidValueError: as in `rope` and `yarn_frequencies`; an attention factor that is not finite and above 0.

    Example:
        >>> q = torch.randn(8, 5, 64)
        >>> turned_q, turned_k = yarn(q, q, factor=4.0, original_length=2048)
        >>> round((turned_q.norm() / q.norm()).item(), 4)
        1.1386

    Reference:
        Peng, Quesnelle, Fan, Shippole: YaRN, 2023.
    """
    width = rotary_width(query, key, rotary_dim)
    frequencies = yarn_frequencies(
        width,
        factor=factor,
        original_length=original_length,
        base=base,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
        dtype=wide_dtype(query),
        device=query.device,
    )
    amplitude = yarn_attention_factor(factor) if attention_factor is None else attention_factor
    return turn(query, key, frequencies, amplitude, layout, positions, key_positions)

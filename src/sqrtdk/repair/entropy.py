"""A floor for the entropy of attention, as a term of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk._arguments import number
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats.request import AuxOutput

if TYPE_CHECKING:
    from jaxtyping import Float


def entropy_floor(aux: AuxOutput, *, nats: float | None = None, fraction: float | None = None) -> Float[Tensor, ""]:
    r"""Mean over heads of `max(0, floor - H_h)`: what to add to a loss so that no head's entropy falls below a floor.

    `H_h` is the mean entropy of a head's rows, over the batch: in nats, or each row's as a fraction of log n, n being
    the keys that it sees. Rows of fewer than two keys have no choice to make and are left out; a head of such rows
    alone adds nothing. At or above the floor the gradient is 0.

    Args:
        aux: of `sqrtdk.attention(..., return_aux=AuxRequest(entropy=True, count=True))`, (..., Hq, L).
        nats: the floor in nats, above 0; this or `fraction`.
        fraction: the floor as a fraction of log n, above 0, at most 1.

    Returns:
        A number that carries the gradient of the entropy, 0 or more, in nats or as a fraction.

    Raises:
        InvalidTypeError: `aux` is no AuxOutput.
        InvalidValueError: not one floor, or one out of its range; `aux` without entropy or count, or without heads.

    Example:
        >>> import sqrtdk
        >>> q = k = v = 9 * torch.eye(4).view(1, 1, 4, 4)
        >>> _, aux = sqrtdk.attention(q, k, v, return_aux=sqrtdk.AuxRequest(entropy=True, count=True))
        >>> bool(entropy_floor(aux, fraction=0.5) > 0.49)
        True

    Reference:
        Zhai et al. 2023, Stabilizing Transformer Training by Preventing Attention Entropy Collapse (arXiv:2303.06296),
        on what a low entropy goes with.
    """
    if not isinstance(aux, AuxOutput):
        raise InvalidTypeError(
            f"aux is the AuxOutput of sqrtdk.attention; got {type(aux).__name__}",
            hint="It is the second value returned.",
        )
    if (nats is None) == (fraction is None):
        raise InvalidValueError(
            f"one floor is given, in nats or as a fraction; got nats={nats}, fraction={fraction}", hint="Pass one."
        )
    entropy, count = aux.entropy, aux.count
    if entropy is None or count is None:
        held = [name for name, value in zip(aux._fields, aux, strict=True) if value is not None]
        raise InvalidValueError(
            f"aux has entropy and count; it has {', '.join(held) or 'neither'}",
            hint="attention(..., return_aux=AuxRequest(entropy=True, count=True))",
        )
    if entropy.ndim < 2:
        raise InvalidValueError(
            f"entropy has the shape (..., heads, rows); got {tuple(entropy.shape)}", hint="Give q, k and v heads."
        )
    if nats is not None:
        floor = number("nats", nats, above=0.0)
        value = entropy
    else:
        floor = number("fraction", fraction, above=0.0)
        if floor > 1.0:
            raise InvalidValueError(f"fraction is at most 1; got {floor:g}", hint="A floor in nats is `nats`.")
        value = entropy / count.clamp(min=2.0).log()
    choice = count > 1
    value = torch.where(choice, value, torch.zeros_like(value))
    value, rows = (each.movedim(-2, 0).flatten(1).sum(-1) for each in (value, choice.to(value.dtype)))
    mean = value / rows.clamp(min=1.0)
    return torch.where(rows > 0, (floor - mean).clamp(min=0.0), torch.zeros_like(mean)).mean()

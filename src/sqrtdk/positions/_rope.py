"""Rotary positions (Su et al. 2021): pairs of channels of q and k turn by an angle that grows with the position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.positions._term import wide_dtype
from sqrtdk.scales._numbers import positive, whole_number

if TYPE_CHECKING:
    from jaxtyping import Float, Real

ROPE_LAYOUTS = ("half", "interleaved")


def rope_frequencies(
    rotary_dim: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Float[Tensor, " pairs"]:
    """Return the angle per token of each pair of channels: base^(-2c / rotary_dim), c = 0..rotary_dim/2 - 1.

    Args:
        rotary_dim: channels that turn, even.
        base: above 0; default 10000.
        dtype: default float32.
        device: of the result.

    Returns:
        (rotary_dim / 2,), in radians a token.

    Raises:
        InvalidTypeError: `rotary_dim` is not an int, `base` no number.
        InvalidValueError: an odd `rotary_dim` or one less than 2, a base that is not finite and above 0.

    Example:
        >>> [round(w, 4) for w in rope_frequencies(4).tolist()]
        [1.0, 0.01]

    Reference:
        Su et al.: RoFormer, 2021, section 3.2.2.
    """
    check_rotary_dim(rotary_dim)
    positive(base, "base")
    return 1.0 / base ** (torch.arange(0, rotary_dim, 2, dtype=dtype, device=device) / rotary_dim)


def rope_tables(
    positions: Real[Tensor, "*L"], frequencies: Float[Tensor, " pairs"], *, amplitude: float = 1.0
) -> tuple[Float[Tensor, "*L pairs"], Float[Tensor, "*L pairs"]]:
    """Return the tables amplitude * cos(p w_c) and amplitude * sin(p w_c) of every position p and frequency w_c.

    Args:
        positions: (..., L), integers or, where they are interpolated, floating point; in tokens.
        frequencies: (D/2,), in radians a token; their dtype is that of the tables.
        amplitude: on both tables, so that the product q . k of the turned channels has its square; default 1.

    Returns:
        cos and sin, each (..., L, D/2).

    Raises:
        InvalidTypeError: boolean or complex positions, frequencies that are not floating point.
        InvalidValueError: positions without an axis, frequencies of another rank than 1, an amplitude that is not
            finite and above 0.

    Example:
        >>> cos, sin = rope_tables(torch.arange(5), rope_frequencies(8))
        >>> cos.shape, sin[0].tolist()
        (torch.Size([5, 4]), [0.0, 0.0, 0.0, 0.0])
    """
    positive(amplitude, "amplitude")
    if positions.dtype == torch.bool or positions.is_complex():
        raise InvalidTypeError(f"positions are real numbers; got {positions.dtype}", hint="Use torch.arange.")
    if not frequencies.is_floating_point():
        raise InvalidTypeError(
            f"frequencies are floating point; got {frequencies.dtype}", hint="Use rope_frequencies or yarn_frequencies."
        )
    if positions.dim() == 0 or frequencies.dim() != 1:
        raise InvalidValueError(
            "positions have shape (..., L) and frequencies (D/2,); "
            f"got {tuple(positions.shape)} and {tuple(frequencies.shape)}",
            hint="Pass one position a row, one frequency a pair of channels.",
        )
    angles = positions[..., None].to(frequencies.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if amplitude == 1.0 else (cos * amplitude, sin * amplitude)


def apply_rope(
    x: Float[Tensor, "*BHL E"],
    cos: Float[Tensor, "*#BHL pairs"],
    sin: Float[Tensor, "*#BHL pairs"],
    layout: str = "half",
) -> Float[Tensor, "*BHL E"]:
    """Turn the first D channels of x: (a, b) becomes (a cos - b sin, b cos + a sin), pair by pair.

    Args:
        x: (..., L, E), floating point.
        cos: broadcastable to (..., L, D/2), D at most E; the channels after D stay as they are.
        sin: the same.
        layout: which channels are pair c: "half" (c, c + D/2), as in Llama and GPT-NeoX, the default; "interleaved"
            (2c, 2c + 1), as in the paper and GPT-J.

    Returns:
        Shape and dtype of x; computed in the wider dtype of x and the tables.

    Raises:
        InvalidTypeError: x or a table is not floating point.
        InvalidValueError: an unknown layout, tables that do not fit each other or x.

    Example:
        >>> x = torch.tensor([[1.0, 0.0]])
        >>> cos, sin = rope_tables(torch.tensor([1.0]), torch.tensor([torch.pi / 2]))
        >>> [round(y) for y in apply_rope(x, cos, sin)[0].tolist()]
        [0, 1]

    Reference:
        Su et al.: RoFormer, 2021, equation 34.
    """
    check_layout(layout)
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not tensor.is_floating_point():
            raise InvalidTypeError(f"{name} is a floating point tensor; got {tensor.dtype}", hint=f"Convert {name}.")
    half = cos.shape[-1] if cos.dim() else 0
    fits = x.dim() >= 2 and cos.shape == sin.shape and half >= 1 and 2 * half <= x.shape[-1]
    if not fits or not _broadcasts(cos.shape[:-1], x.shape[:-1]):
        raise InvalidValueError(
            "cos and sin are broadcastable to (..., L, D/2) of x (..., L, E), D at most E; "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)} for x {tuple(x.shape)}",
            hint="Make the tables for the positions of x; tables of a batch need an axis of 1 for the heads.",
        )
    part = x[..., : 2 * half]
    # "half": channel i turns with i + E/2 (Llama, GPT-NeoX); "interleaved": 2i with 2i + 1 (GPT-J, the paper).
    a, b = part.chunk(2, -1) if layout == "half" else (part[..., ::2], part[..., 1::2])
    turned = (a * cos - b * sin, b * cos + a * sin)
    joined = torch.cat(turned, -1) if layout == "half" else torch.stack(turned, -1).flatten(-2)
    # The tables are float32 or wider; in half precision an angle of thousands of radians would be off by whole turns.
    joined = joined.to(x.dtype)
    return joined if 2 * half == x.shape[-1] else torch.cat([joined, x[..., 2 * half :]], -1)


def rope(
    query: Float[Tensor, "*BHq L E"],
    key: Float[Tensor, "*BH S E"],
    *,
    base: float = 10000.0,
    layout: str = "half",
    positions: Real[Tensor, "... L"] | None = None,
    key_positions: Real[Tensor, "... S"] | None = None,
    rotary_dim: int | None = None,
) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
    """Rotary positions: turned q_i . turned k_j depends on the contents and on i - j alone.

    Args:
        query: (..., Hq, L, E).
        key: (..., H, S, E).
        base: of the frequencies base^(-2c / D); default 10000.
        layout: "half" (the default) or "interleaved", see `apply_rope`.
        positions: of the query's rows, (L,), or (B, L) where each batch has its own; default 0..L-1.
        key_positions: of the keys, (S,) or (B, S); default `positions` where L = S, else 0..S-1.
        rotary_dim: D, even: how many of the first channels turn; default all E.

    Returns:
        The turned query and key, each of its own shape and dtype. Angles are computed in float32, as in the models
        that use them (float64 for float64 inputs).

    Raises:
        InvalidTypeError: inputs that are not floating point, boolean or complex positions.
        InvalidValueError: an odd or too large `rotary_dim`, an unknown layout, positions that do not fit.

    Example:
        >>> q, k = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64)
        >>> turned_q, turned_k = rope(q, k)
        >>> turned_q.shape, turned_k.shape
        (torch.Size([2, 8, 5, 64]), torch.Size([2, 2, 5, 64]))

    Reference:
        Su et al.: RoFormer, 2021.
    """
    width = rotary_width(query, key, rotary_dim)
    frequencies = rope_frequencies(width, base=base, dtype=wide_dtype(query), device=query.device)
    return turn(query, key, frequencies, 1.0, layout, positions, key_positions)


def turn(
    query: Float[Tensor, "*BHq L E"],
    key: Float[Tensor, "*BH S E"],
    frequencies: Float[Tensor, " pairs"],
    amplitude: float,
    layout: str,
    positions: Real[Tensor, "... L"] | None,
    key_positions: Real[Tensor, "... S"] | None,
) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
    """Return query and key, with their pairs of channels turned by angles position x frequency.

    Args:
        query: (..., Hq, L, E).
        key: (..., H, S, E).
        frequencies: (pairs,) radians per position.
        amplitude: Factor on the turned channels; 1 in plain RoPE.
        layout: Which channels form a pair, one of `ROPE_LAYOUTS`.
        positions: Positions of the rows, (..., L); None: 0, 1, 2, ...
        key_positions: Positions of the keys, (..., S); None: those of the rows if L = S, else 0, 1, 2, ...
    """
    check_layout(layout)
    rows, columns = query.shape[-2], key.shape[-2]
    # Self-attention. With other lengths, as beside a cache, keys count from 0.
    if key_positions is None and rows == columns:
        key_positions = positions
    where = (
        _positions("positions", positions, rows, query.device),
        _positions("key_positions", key_positions, columns, query.device),
    )
    cos, sin = rope_tables(where[0], frequencies, amplitude=amplitude)
    turned = apply_rope(query, cos, sin, layout)
    # The same tensor has the same tables, which are then computed once.
    if where[0] is not where[1]:
        cos, sin = rope_tables(where[1], frequencies, amplitude=amplitude)
    return turned, apply_rope(key, cos, sin, layout)


def rotary_width(query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"], rotary_dim: int | None) -> int:
    """Return the number of channels that turn: `rotary_dim`, or all of them for None.

    Raises:
        InvalidTypeError: Query or key is not a floating tensor.
        InvalidValueError: The shapes don't fit, or the number is odd or larger than E.
    """
    for name, x in (("query", query), ("key", key)):
        if not x.is_floating_point():
            raise InvalidTypeError(f"the {name} is a floating point tensor; got {x.dtype}", hint=f"Convert the {name}.")
        if x.dim() < 2:
            raise InvalidValueError(
                f"the {name} has shape (..., length, E); got {tuple(x.shape)}", hint=f"Add axes to the {name}."
            )
    if query.shape[-1] != key.shape[-1]:
        raise InvalidValueError(
            f"query and key share the head dimension; got {query.shape[-1]} and {key.shape[-1]}",
            hint="Rotate them apart with apply_rope, or project one of them.",
        )
    width = query.shape[-1] if rotary_dim is None else rotary_dim
    check_rotary_dim(width)
    if width > query.shape[-1]:
        raise InvalidValueError(
            f"rotary_dim is at most the head dimension {query.shape[-1]}; got {width}", hint="Choose a smaller one."
        )
    return width


def check_rotary_dim(rotary_dim: int) -> None:
    """Check that a number of channels can turn in pairs.

    Raises:
        InvalidValueError: It is odd, or below 2.
    """
    whole_number(rotary_dim, "rotary_dim", 2)
    if rotary_dim % 2:
        raise InvalidValueError(
            f"rotary_dim is even, as channels turn in pairs; got {rotary_dim}",
            hint=f"Turn {rotary_dim - 1} of the channels: rotary_dim={rotary_dim - 1}.",
        )


def check_layout(layout: str) -> None:
    """Check that a layout is one of `ROPE_LAYOUTS`.

    Raises:
        InvalidValueError: It is another.
    """
    if layout not in ROPE_LAYOUTS:
        raise InvalidValueError(f"layout is {' or '.join(ROPE_LAYOUTS)}; got {layout!r}", hint="Llama's is half.")


def _positions(
    name: str, given: Real[Tensor, "..."] | None, length: int, device: torch.device
) -> Real[Tensor, "... {length}"]:
    if given is None:
        return torch.arange(length, device=device)
    if given.dim() == 0 or given.shape[-1] != length:
        raise InvalidValueError(
            f"{name} have shape (..., {length}), one for each row; got {tuple(given.shape)}",
            hint="Pass the positions of just these rows.",
        )
    given = given.to(device)
    return given if given.dim() == 1 else given.unsqueeze(-2)  # an axis of 1 for the heads


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, m) for n, m in pairs)

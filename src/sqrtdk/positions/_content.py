"""Terms that are a part of the score, so that the scale multiplies them: relative keys and Transformer-XL's positions.

- `shaw`, Shaw et al. 2018: a learned vector for each offset joins the key.
- `transformer_xl`, Dai et al. 2019: projected sinusoids of the distance, and two learned biases. Sines and cosines of a
  distance i - j are products of those of i and of j, so that the term is a dot product of something that depends on the
  row alone and the sinusoids of the key's position: no table of distances is needed, and rows and columns may be any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError
from sqrtdk.positions._term import INIT_STD, check_block, offsets, pick, wide_dtype
from sqrtdk.scales._numbers import positive, whole_number

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Shaw(nn.Module):
    """Shaw's relative keys with their `table`, (2k + 1, E) or (Hq, 2k + 1, E); made by `shaw`."""

    def __init__(
        self,
        head_dim: int,
        max_distance: int,
        heads: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.max_distance = max_distance
        shape = (2 * max_distance + 1, head_dim)
        self.table = nn.Parameter(torch.empty(shape if heads is None else (heads, *shape), device=device, dtype=dtype))
        nn.init.normal_(self.table, std=INIT_STD)

    @property
    def content(self) -> bool:
        """True: the term is part of the score, which the scale multiplies."""
        return True

    def term(
        self,
        query: Float[Tensor, "*#BHq R E"],
        key: Float[Tensor, "... S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "*BHq R S"]:
        """Return q_i . table[clip(j - i, -k, k)], (..., Hq, R, S), in float32, or float64 for a float64 query.

        `PositionTerm.term` has the arguments.
        """
        check_block("Shaw's relative keys", query, key, rows, columns, heads=self.heads, head_dim=self.head_dim)
        dtype = wide_dtype(query)
        products = query.to(dtype) @ self.table.to(dtype).transpose(-1, -2)
        index = (-offsets(rows, columns)).clamp(-self.max_distance, self.max_distance) + self.max_distance
        return pick(products, index)


def shaw(
    head_dim: int,
    *,
    max_distance: int,
    heads: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Shaw:
    """Relative keys, q_i . r[clip(j - i, -k, k)] for row i and key j, with a learned table r.

    The products of a row with the whole table are computed and then picked from: 2k + 1 numbers per row.

    Args:
        head_dim: E of the query.
        max_distance: k, in tokens; all keys further away share a vector.
        heads: query heads where each has a table of its own; default None, one table for all, as in the paper.
        device: of the table.
        dtype: of the table.

    Returns:
        A module whose `table` (2k + 1, E) or (heads, 2k + 1, E), the row of offset -k first, starts normal with
        standard deviation 0.02. It is content: it joins the score before the scale.

    Raises:
        InvalidTypeError: a count that is not an int.
        InvalidValueError: a count less than 1.

    Example:
        >>> q, at = torch.zeros(8, 3, 4), torch.arange(3)
        >>> shaw(4, max_distance=16).term(q, q, at, at).shape
        torch.Size([8, 3, 3])

    Reference:
        Shaw, Uszkoreit, Vaswani: Self-Attention with Relative Position Representations, 2018, equation 4.

    Differs from:
        the paper in that it leaves the values alone (the paper adds vectors to them too, and finds no gain).
    """
    whole_number(head_dim, "head_dim", 1)
    whole_number(max_distance, "max_distance", 1)
    if heads is not None:
        whole_number(heads, "heads", 1)
    return Shaw(head_dim, max_distance, heads, device, dtype)


class TransformerXL(nn.Module):
    """Transformer-XL's term; made by `transformer_xl`.

    Attributes:
        content_bias: u, (Hq, E).
        position_bias: v, (Hq, E).
        projection: W, Linear from model_dim to H * E without bias.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        model_dim: int,
        base: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.model_dim = model_dim
        self.base = base
        self.content_bias = nn.Parameter(torch.empty(heads, head_dim, device=device, dtype=dtype))
        self.position_bias = nn.Parameter(torch.empty(heads, head_dim, device=device, dtype=dtype))
        self.projection = nn.Linear(model_dim, heads * head_dim, bias=False, device=device, dtype=dtype)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=INIT_STD)

    @property
    def content(self) -> bool:
        """True: the term is part of the score, which the scale multiplies."""
        return True

    def term(
        self,
        query: Float[Tensor, "*#B #Hq R E"],
        key: Float[Tensor, "*#B #Hq S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "*B Hq R S"]:
        """Return (q_i + v) . W r_{i-j}, (..., Hq, R, S), in float32, or float64 for a float64 query.

        r are the sinusoids of the distance, W is `projection`, and v is `position_bias`. `PositionTerm.term` has the
        arguments.
        """
        check_block("Transformer-XL", query, key, rows, columns, heads=self.heads, head_dim=self.head_dim)
        dtype = wide_dtype(query)
        weight = self.projection.weight.to(dtype).view(self.heads, self.head_dim, self.model_dim)
        along = (query.to(dtype) + self.position_bias.to(dtype)[:, None, :]) @ weight
        of_sine, of_cosine = along.chunk(2, -1)
        sine, cosine = self._sinusoids(rows, dtype)
        turned = torch.cat([of_cosine * sine - of_sine * cosine, of_cosine * cosine + of_sine * sine], -1)
        by_position = turned @ torch.cat(self._sinusoids(columns, dtype), -1).transpose(-1, -2)
        by_content = self.content_bias.to(dtype)[:, None, :] @ key.to(dtype).transpose(-1, -2)
        return by_position + by_content

    def _sinusoids(
        self, positions: Int[Tensor, " L"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "L half"], Float[Tensor, "L half"]]:
        channels = torch.arange(0, self.model_dim, 2, device=positions.device, dtype=torch.float64)
        # float64: at position 1e5 an angle in float32 is wrong by 0.004, and the difference of two angles should be
        # small.
        angles = positions[:, None] * self.base ** (-channels / self.model_dim)
        return angles.sin().to(dtype), angles.cos().to(dtype)


def transformer_xl(
    heads: int,
    head_dim: int,
    *,
    model_dim: int | None = None,
    base: float = 10000.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TransformerXL:
    """The terms that Transformer-XL adds to q_i . k_j: u . k_j + (q_i + v) . R_{i-j}, with learned u and v for each
    head.

    R_n = W [sin(n w_0), ..., cos(n w_0), ...] with w_c = base^(-2c / model_dim) and a learned W. With the product
    q_i . k_j itself the score is (q_i + u) . k_j + (q_i + v) . R_{i-j}.

    A pair of a query and a key costs `model_dim` multiplications a head.

    Args:
        heads: query heads.
        head_dim: E of the query.
        model_dim: width of the sinusoids, even; default heads * head_dim.
        base: of the frequencies, above 0; default 10000.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        A module with `content_bias` u and `position_bias` v (heads, E), and `projection.weight` W
        (heads * E, model_dim), all normal with standard deviation 0.02 at first. It is content: it joins the score
        before the scale.

    Raises:
        InvalidTypeError: a count that is not an int, a base that is not a number.
        InvalidValueError: a count less than 1, an odd `model_dim`, a base that is not finite and above 0.

    Example:
        >>> q, at = torch.zeros(8, 3, 4), torch.arange(3)
        >>> transformer_xl(8, 4).term(q, q, at, at).shape
        torch.Size([8, 3, 3])

    Reference:
        Dai et al.: Transformer-XL, 2019, section 3.3.
    """
    whole_number(heads, "heads", 1)
    whole_number(head_dim, "head_dim", 1)
    width = heads * head_dim if model_dim is None else model_dim
    whole_number(width, "model_dim", 1)
    if width % 2:
        raise InvalidValueError(
            f"model_dim is even, half sines and half cosines; got {width}", hint="Pass an even model_dim."
        )
    positive(base, "base")
    return TransformerXL(heads, head_dim, width, base, device, dtype)

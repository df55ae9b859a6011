"""What numbers are rounded to: the formats, what shares a scale, and the rules by which scales follow from numbers.

With codes q of a format, a scale s that a tensor, a row, a group or a block shares, and half = 2^(bits - 1):

    int, ""                 s q          s = max |x| / (half - 1), or / (half - 1/2)      Q8_0
    int, "signed scales"    s q          s = x / -half, with x of the largest size        Q4_0, Q5_0
    int, "zero points"      s (q - z)    s = (max(x, 0) - min(x, 0)) / (2^bits - 1)       GPTQ, AWQ
    int, "offsets"          s q + o      s = (max x - min x) / (2^bits - 1), o = min x    Q4_1, HQQ
    nf4, fp4                s q          s = max |x|, 16 codes
    fp8                     s q          s = max |x| / 448 (e4m3) or / 57344 (e5m2)

Reference:
    Dettmers et al. 2023, arXiv 2305.14314 (nf4); Micikevicius et al. 2022, arXiv 2209.05433 (fp8);
    OCP Microscaling Formats 1.0 (e2m1); ggml's `quantize_row_q4_0_ref` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip
_FP4_HALF = (0.0, 0.0625 / 12, 2 / 12, 3 / 12, 4 / 12, 6 / 12, 8 / 12, 1.0)  # as in bitsandbytes
_E2M1 = (0.0, 0.5 / 6, 1 / 6, 1.5 / 6, 2 / 6, 3 / 6, 4 / 6, 1.0)
CODES: Mapping[str, tuple[float, ...]] = {
    "nf4": _NF4,
    "fp4": tuple(sorted({*_FP4_HALF, *(-x for x in _FP4_HALF)})),
    "fp4 e2m1": tuple(sorted({*_E2M1, *(-x for x in _E2M1)})),
}
FLOATS: Mapping[str, torch.dtype] = {"fp8 e4m3": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which entries of a matrix share a scale.

    Attributes:
        name: "a scale a tensor", "a scale a row", "groups of 32", "groups of 32 along the outputs", "blocks of 128".
        rows: Rows of a block; 0 for all.
        columns: Columns of a block; 0 for all.
        apart: The rows of a block of one column are not neighbours but as far apart as they can be, as in HQQ.
    """

    name: str
    rows: int
    columns: int
    apart: bool = False

    def groups(self, matrix: Tensor) -> Tensor:
        """Return the entries group by group, (groups, entries).

        Example:
            >>> sharing_by(2).groups(torch.arange(4.0).view(1, 4)).tolist()
            [[0.0, 1.0], [2.0, 3.0]]
        """
        p, q = self._sizes(matrix)
        if p == 1:
            return matrix.reshape(-1, q)
        if self.apart:
            return matrix.reshape(p, -1).mT
        blocks = matrix.reshape(matrix.shape[0] // p, p, matrix.shape[1] // q, q).transpose(1, 2)
        return blocks.reshape(-1, p * q)

    def matrix(self, groups: Tensor, like: Tensor) -> Tensor:
        """Return entries that lie group by group at their places in a matrix of a shape; `groups` undone."""
        p, q = self._sizes(like)
        if p == 1:
            return groups.reshape(like.shape)
        if self.apart:
            return groups.mT.reshape(like.shape)
        blocks = groups.reshape(like.shape[0] // p, like.shape[1] // q, p, q).transpose(1, 2)
        return blocks.reshape(like.shape)

    def spread(self, numbers: Tensor, matrix: Tensor) -> Tensor:
        """Return one number a group, (groups, 1), at each entry of the matrix."""
        p, q = self._sizes(matrix)
        return self.matrix(numbers.expand(-1, p * q), matrix)

    def _sizes(self, matrix: Tensor) -> tuple[int, int]:
        return self.rows or matrix.shape[0], self.columns or matrix.shape[1]


PER_TENSOR = Sharing("a scale a tensor", 0, 0)
PER_ROW = Sharing("a scale a row", 1, 0)
PER_COLUMN = Sharing("a scale a column", 0, 1)


def sharing_by(size: int, *, down: bool = False, apart: bool = False) -> Sharing:
    """Return the sharing of groups of entries of a row; or, `down`, of a column; or of one with its rows `apart`."""
    if apart:
        return Sharing(f"groups of {size} across the outputs", size, 1, apart=True)
    return Sharing(f"groups of {size} along the outputs", size, 1) if down else Sharing(f"groups of {size}", 1, size)


@dataclass(frozen=True, slots=True)
class Grid:
    """What a matrix is rounded to.

    Attributes:
        form: "int8", "int4", "nf4", "fp8 e4m3", ...
        sharing: Which entries share a scale.
        zero: Of integers: "" if 0 is the middle of the codes, "signed scales" if it is and the largest number of a
            group has the lowest code, "zero points" if another code is 0, "offsets" if none is.
    """

    form: str
    sharing: Sharing
    zero: str = ""

    @property
    def name(self) -> str:
        """The grid in words: "int4, groups of 32, zero points"."""
        return ", ".join(filter(None, (self.form, self.sharing.name, self.zero)))

    @property
    def bits(self) -> int:
        """Bits of a code of an integer format; 0 for others."""
        return int(self.form[3:]) if self.form.startswith("int") else 0

    def scales(self, groups: Tensor) -> tuple[Tensor, ...]:
        """Return the scales of groups, (groups, 1), by each rule in use for the format, the usual one first.

        Example:
            >>> [scale.item() for scale in Grid("int4", PER_ROW).scales(torch.tensor([[7.5, 1.0]]))]
            [1.0714285373687744, 1.0]
        """
        most = groups.abs().amax(1, keepdim=True)
        if self.form in CODES:
            return (most,)
        if self.form in FLOATS:
            return (most / torch.finfo(FLOATS[self.form]).max,)
        return tuple(rule(groups, self.bits) for rule in _INTEGER_SCALES[self.zero])

    def codes(self, groups: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of groups, nearest to their numbers, and their zero points: numbers are s (q - z).

        With zero points and offsets codes are 0 to 2^bits - 1; of offsets z is -o / s, which is no whole number.
        """
        none = torch.zeros_like(scales)
        shares = groups / torch.where(scales == 0, 1.0, scales)
        if self.form in CODES:
            return nearest_codes(shares, CODES[self.form])[0], none
        if self.form in FLOATS:
            return shares.float().to(FLOATS[self.form]).to(groups.dtype), none
        half = 2 ** (self.bits - 1)
        if self.zero == "":
            return shares.round().clamp(-half, half - 1), none
        if self.zero == "signed scales":
            return (shares + 0.5).floor().clamp(-half, half - 1), none  # as ggml does
        low = groups.amin(1, keepdim=True)
        low = low.clamp(max=0.0) if self.zero == "zero points" else low
        zero = -low / torch.where(scales == 0, 1.0, scales)
        if self.zero == "offsets":
            return (shares + zero).round().clamp(0, 2 * half - 1), zero
        zero = zero.round()
        return (shares.round() + zero).clamp(0, 2 * half - 1), zero

    def rounded(self, values: Tensor, stored: torch.dtype | None = None) -> Tensor:
        """Return numbers rounded to nearest by the usual rule, computed in float32 (in float64 for float64).

        Args:
            values: (..., in).
            stored: Dtype in which the scales are kept; None for that of the computation.

        Example:
            >>> Grid("int8", PER_ROW).rounded(torch.tensor([[1.0, 0.5, -0.3]]), torch.float16)
            tensor([[ 0.9999,  0.5039, -0.2992]])
        """
        matrix = values.reshape(-1, values.shape[-1])
        matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
        groups = self.sharing.groups(matrix)
        scales = self.scales(groups)[0]
        codes, zeros = self.codes(groups, scales)
        kept = scales if stored is None else scales.to(stored).to(scales.dtype)
        return self.sharing.matrix((codes - zeros) * kept, matrix).view(values.shape).to(values.dtype)


def nearest_codes(shares: Tensor, codes: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return the nearest of a format's codes, and its place among them.

    Args:
        shares: Numbers as shares of the largest of their group; in float64 the codes are exact.
        codes: Codes in rising order, -1 to 1.
    """
    table = torch.tensor(codes, dtype=shares.dtype, device=shares.device)
    above = torch.searchsorted(table, shares.clamp(-1, 1).contiguous()).clamp(1, len(table) - 1)
    place = torch.where((shares - table[above - 1]).abs() < (shares - table[above]).abs(), above - 1, above)
    return table[place], place


# -- scales of integers ------------------------------------------------------------------------------------------------


def _largest(groups: Tensor, bits: int) -> Tensor:
    scales: Tensor = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return scales


def _half_more(groups: Tensor, bits: int) -> Tensor:
    scales: Tensor = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    return scales


def _signed(groups: Tensor, bits: int) -> Tensor:
    scales: Tensor = groups.gather(1, groups.abs().argmax(1, keepdim=True)) / -(2 ** (bits - 1))
    return scales


def _range_with_zero(groups: Tensor, bits: int) -> Tensor:
    low, high = groups.amin(1, keepdim=True).clamp(max=0.0), groups.amax(1, keepdim=True).clamp(min=0.0)
    scales: Tensor = (high - low) / (2**bits - 1)
    return scales


def _range(groups: Tensor, bits: int) -> Tensor:
    scales: Tensor = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / (2**bits - 1)
    return scales


_INTEGER_SCALES: Mapping[str, tuple[Callable[[Tensor, int], Tensor], ...]] = {
    "": (_largest, _half_more),
    "signed scales": (_signed,),
    "zero points": (_range_with_zero, _range),
    "offsets": (_range,),
}

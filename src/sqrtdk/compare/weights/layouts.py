"""How a weight of B lies, seen from the weight of A that has the same numbers.

    torch.nn.Linear    (H * E, D)         as it is
    flax, x @ w        (D, H * E)         transposed
    einsum             (D, H, E)          transposed, its heads split
    a GGUF file        (H * E, D)         rows of each head in another order
    c_attn             (D, 3 * H * E)     A's q is a part of it

Two tensors have the same numbers if some order of their axes, read row by row, gives the same list. Only the first
numbers of each order are looked at before a whole tensor is compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.compare.numbers import single_ratio
from sqrtdk.compare.rounding.precision import COARSER_DTYPES, WEIGHT_TOLERANCE, rounding_unit, same_rows

_FIRST = 8  # numbers that rule out nearly every order of the axes
_BEGINS_NEAR = 2.0**-6  # relative: a bfloat16 copy of a float32 weight begins alike
_MOST_AXES = 4
_ROWS_AT_ONCE = 2**10
_MOST_HELD_ROWS = 2**15  # rows among which rows are looked for
Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class WeightLayout:
    """Where the numbers of two weights stand: rows of A's, its axes in an order, are rows of B's.

    Attributes:
        kind: "same", "reshaped" (another shape, the same order), "transposed", "axes" (in another order), "permuted"
            (rows in another order), "part" (one is a part of the other).
        axes_a: order of A's axes, axes of size 1 left out.
        axes_b: order of B's axes, axes of size 1 left out.
        width: numbers in a row.
        rows_a: rows of A's matrix; None for all of them in order.
        rows_b: rows of B's matrix, parallel to `rows_a`.
    """

    kind: str
    axes_a: Axes
    axes_b: Axes
    width: int = 1
    rows_a: Tensor | None = None
    rows_b: Tensor | None = None

    def as_a(self, a: Tensor, b: Tensor) -> Tensor:
        """Return B's numbers in the place and shape of A's; of a part, the rest of A's numbers stays.

        Args:
            a: A's weight.
            b: B's weight.
        """
        x, y = a.squeeze(), b.squeeze()
        taken = y.permute(self.axes_b).reshape(-1, self.width)
        if self.rows_b is not None:
            taken = taken[self.rows_b]
        if self.rows_a is not None:
            whole = x.permute(self.axes_a).reshape(-1, self.width).clone()
            whole[self.rows_a] = taken.to(whole)
            taken = whole
        shape = [x.shape[axis] for axis in self.axes_a]
        back = sorted(range(x.dim()), key=lambda axis: self.axes_a[axis])
        return taken.reshape(shape).permute(back).reshape(a.shape)

    def fits(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two other weights may stand so: their axes, and the numbers in a row, allow it."""
        x, y = a.squeeze(), b.squeeze()
        if x.numel() != y.numel() or x.dim() != len(self.axes_a) or y.dim() != len(self.axes_b):
            return self.kind == "part" and x.dim() == len(self.axes_a) and y.dim() == len(self.axes_b)
        if self.kind == "transposed" and x.dim() == y.dim() == 2:
            return x.shape == y.shape[::-1]
        return self.kind != "same" or x.shape == y.shape


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """Two weights with the same numbers.

    Attributes:
        layout: how they stand.
        numbers: "same"; "rounded" (one is the other, rounded to `dtype`); "scaled" (B's are A's times `factor`);
            "offset" (B's are A's plus `factor`).
        dtype: dtype to which one is rounded; "" for none.
        factor: what B's numbers are multiplied by, or what is added.
    """

    layout: WeightLayout
    numbers: str = "same"
    dtype: str = ""
    factor: float = 1.0


def match_of(a: Tensor, b: Tensor, *, scaled: bool = False) -> Match | None:
    """Return how two weights of equally many numbers match; None if no order of their axes gives the same numbers.

    Args:
        a: A's weight.
        b: B's weight.
        scaled: look for weights that are multiples of one another too.

    Example:
        >>> w = torch.randn(4, 6)
        >>> match_of(w, w.mT.reshape(6, 2, 2)).layout.kind, match_of(w, w + 1)
        ('transposed', None)
    """
    if a.numel() != b.numel() or a.numel() < 2:
        return None
    x, y = a.detach().squeeze(), b.detach().squeeze()
    if max(x.dim(), y.dim()) > _MOST_AXES:
        return None
    for axes_a, axes_b in _orders(x.dim(), y.dim()):
        first = single_ratio(_first(x, axes_a), _first(y, axes_b)) if scaled else 1.0
        if first is None or not _begin_alike(_first(x, axes_a) * first, _first(y, axes_b)):
            continue
        one, other = x.permute(axes_a).reshape(1, -1), y.permute(axes_b).reshape(1, -1)
        layout = WeightLayout(_kind(x, y, axes_a, axes_b), axes_a, axes_b)
        if (dtype := same_numbers(one, other)) is not None:
            return Match(layout, "rounded" if dtype else "same", dtype)
        factor = single_ratio(one.double(), other.double()) if scaled else None
        if factor is not None:
            return Match(layout, "scaled", factor=factor)
    return None


def offset_of(a: Tensor, b: Tensor) -> Match | None:
    """Return the match of two vectors if B's is A's plus or minus 1; None otherwise: the gain of a norm is stored so.

    Args:
        a: A's weight.
        b: B's weight.
    """
    x, y = a.detach().squeeze(), b.detach().squeeze()
    if x.shape != y.shape or x.dim() != 1:
        return None
    by = float((y.double() - x.double()).mean().round())
    if abs(by) != 1 or not torch.allclose(x.double() + by, y.double(), atol=4 * _unit(x, y), rtol=0):
        return None
    return Match(WeightLayout("same", (0,), (0,)), "offset", factor=by)


def rows_match(a: Tensor, b: Tensor) -> Match | None:
    """Return how the rows of one weight are found among those of the other, in any order; None if they are not.

    The larger one may hold several weights: q, k and v fused, or all layers stacked.

    Args:
        a: A's weight.
        b: B's weight.

    Example:
        >>> q, k = torch.randn(2, 4, 6)
        >>> found = rows_match(k, torch.cat([q, k]).mT)
        >>> found.layout.kind, found.layout.rows_b.tolist()
        ('part', [4, 5, 6, 7])
    """
    x, y = a.detach().squeeze(), b.detach().squeeze()
    if max(x.dim(), y.dim()) > _MOST_AXES or min(x.numel(), y.numel()) < _FIRST:
        return None
    turned = x.numel() > y.numel()
    small, large = (y, x) if turned else (x, y)
    if 1 in (small.dim(), large.dim()):
        return _vector_part(small, large, turned=turned)
    for axes_s, width in _forms(small):
        one = small.permute(axes_s).reshape(-1, width)
        for axes_l, other_width in _forms(large):
            if width != other_width or large.numel() // width > _MOST_HELD_ROWS or width < 2:
                continue
            rows = _rows_in(one, large.permute(axes_l).reshape(-1, width))
            if rows is None:
                continue
            kind = "part" if small.numel() < large.numel() else "permuted"
            held = (axes_l, axes_s, width, rows, None) if turned else (axes_s, axes_l, width, None, rows)
            return Match(WeightLayout(kind, *held))
    return None


def same_numbers(a: Tensor, b: Tensor) -> str | None:
    """Return the dtype to which one of two matrices is rounded if they are the same otherwise.

    Returns:
        "" if they are equal but for the last digits of their dtypes; "bfloat16" or "float16"; None if they differ.
    """
    if a.shape != b.shape:
        return None
    if a.dtype is b.dtype and torch.equal(a, b):
        return ""
    one, other = (a, b) if a.dtype is b.dtype else (a.double(), b.double())
    if float((one - other).abs().max()) <= WEIGHT_TOLERANCE * float(a.abs().max()):
        return ""
    for dtype in COARSER_DTYPES:
        for one, other in ((a, b), (b, a)):
            if torch.equal(one.to(dtype).double(), other.double()):
                return str(dtype).removeprefix("torch.")
    return None


def is_constant(tensor: Tensor) -> bool:
    """Return whether all numbers are the same, as in a fresh norm or bias: such a weight can't be told by its numbers.

    Args:
        tensor: A weight.
    """
    flat = tensor.detach().reshape(-1)
    return flat.numel() < 2 or bool((flat[:2] == flat[0]).all() and (flat == flat[0]).all())


def _orders(dims_a: int, dims_b: int) -> Iterator[tuple[Axes, Axes]]:
    """Yield orders of the axes of both: of B's alone, rotations first, which transpose; then of A's alone."""
    plain_a, plain_b = tuple(range(dims_a)), tuple(range(dims_b))
    turns = [plain_b[at:] + plain_b[:at] for at in range(max(dims_b, 1))]
    for axes in dict.fromkeys((*turns, *itertools.permutations(plain_b))):
        yield plain_a, axes
    for axes in itertools.permutations(plain_a):
        if axes != plain_a:
            yield axes, plain_b


def _forms(tensor: Tensor) -> Iterator[tuple[Axes, int]]:
    """Yield the ways to read a tensor as rows: an order of its axes, and the numbers in a row."""
    dims = tensor.dim()
    for axes in itertools.permutations(range(dims)):
        for split in range(dims - 1, 0, -1):
            yield axes, math.prod(tensor.shape[axis] for axis in axes[split:])


def _first(tensor: Tensor, axes: Axes) -> Tensor:
    view = tensor.permute(axes)
    while view.dim() > 1 and (view.dim() > 2 or view.shape[-1] >= _FIRST):
        view = view[0]
    return view.reshape(-1)[:_FIRST].double()


def _begin_alike(a: Tensor, b: Tensor) -> bool:
    count = min(len(a), len(b))
    a, b = a[:count], b[:count]
    return bool(((a - b).abs() <= _BEGINS_NEAR * torch.maximum(a.abs(), b.abs()).clamp(min=1e-30)).all())


def _kind(x: Tensor, y: Tensor, axes_a: Axes, axes_b: Axes) -> str:
    if axes_a == tuple(sorted(axes_a)) and axes_b == tuple(sorted(axes_b)):
        return "same" if x.shape == y.shape else "reshaped"
    turned = axes_b if axes_a == tuple(sorted(axes_a)) else axes_a
    at = turned.index(0)
    return "transposed" if turned[at:] + turned[:at] == tuple(range(len(turned))) else "axes"


def _unit(x: Tensor, y: Tensor) -> float:
    return max(rounding_unit(z.dtype) for z in (x, y)) * float(torch.maximum(x.abs().max(), y.abs().max()))


def _vector_part(small: Tensor, large: Tensor, *, turned: bool) -> Match | None:
    """Return where a vector, such as the bias of q, stands in a larger one, in one piece; heads may be split."""
    flat, wanted = large.reshape(-1), small.reshape(-1)
    count = min(_FIRST, len(wanted))
    windows = flat.unfold(0, count, 1)[: len(flat) - len(wanted) + 1]
    alike = (windows.double() - wanted[:count].double()).abs() <= _BEGINS_NEAR * wanted[:count].abs().max()
    for start in alike.all(-1).nonzero().flatten().tolist():
        there = flat[start : start + len(wanted)]
        if same_numbers(there[None], wanted[None]) is not None:
            rows = torch.arange(start, start + len(wanted))
            plain = tuple(range(large.dim())), tuple(range(small.dim()))
            held = (*plain, 1, rows, None) if turned else (plain[1], plain[0], 1, None, rows)
            return Match(WeightLayout("part", *held))
    return None


def _rows_in(wanted: Tensor, rows: Tensor) -> Tensor | None:
    """Return for each wanted row its number among the rows, no number twice; None if one is missing."""
    beginnings = rows[:, :_FIRST].double()
    few = wanted[:, :_FIRST].double()
    if len(wanted) > len(rows) or float((beginnings - few[0]).abs().amax(-1).min()) > _BEGINS_NEAR * float(
        few[0].abs().max()
    ):
        return None
    order = torch.cat([torch.cdist(part, beginnings).argmin(-1) for part in torch.split(few, _ROWS_AT_ONCE)])
    if len(set(order.tolist())) < len(order) or not bool(same_rows(rows[order].double(), wanted.double()).all()):
        return None
    return order

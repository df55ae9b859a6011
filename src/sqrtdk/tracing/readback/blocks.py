"""Reads one softmax over several blocks of keys, where each block has its own product, and merges the readings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.readback.addends import HIDING_LOGIT, bias_name
from sqrtdk.tracing.readback.chain import Chain, Fork, read_chain
from sqrtdk.tracing.readback.orient import Orientation, product_operands
from sqrtdk.tracing.readback.reading import Cell, Layout, Logits, Reading
from sqrtdk.tracing.readback.regroup import Positions, positions, sliced
from sqrtdk.tracing.records import BY_BLOCK, Factor
from sqrtdk.tracing.steps import Bias, Blocks, Hide, Offset, Scale, Step, Unknown
from sqrtdk.tracing.steps.placed import StepTensor, to_softmax
from sqrtdk.tracing.tape.graph import numbered
from sqrtdk.tracing.tape.node import Node, Product, SoftmaxRun

SCALE_TOLERANCE = 0.01  # scales of two blocks count as equal up to this relative difference
_NAMED_BY_VALUES = ("alibi", "relative", "bias")
_RECOMPUTED_ROWS = 8  # output rows that `is_attention` recomputes; a sample keeps the check cheap
_OUTPUT_TOLERANCE = 0.05  # allowed error, relative to the largest output; bfloat16 rounding stays well below


@dataclass(frozen=True, slots=True)
class Span:
    """A run of keys whose logits come from one product.

    Attributes:
        chain: the steps and views from that product to the softmax.
        first: index of its first key.
        size: number of keys; None if it covers every key of the softmax.
    """

    chain: Chain
    first: int = 0
    size: int | None = None


# -- blocks side by side before one softmax ----------------------------------------------------------------------------


def key_spans(fork: Fork, softmax_run: SoftmaxRun) -> list[Span]:
    """Return the spans of keys of a softmax over concatenated logits.

    Handles `torch.cat([q @ k1.mT, q @ k2.mT], -1)`, and slices written into a tensor: `z[..., :8] = q @ k1.mT`.

    Args:
        fork: the node that joins the logits, with the steps and views after it.
        softmax_run: the softmax.

    Returns:
        The spans in the order of their keys; [] if the axis is not that of the keys, or if one part has no product.
    """
    node = fork.node
    axis = int(node.args[1]) % len(node.shape) if node.op == "cat" and len(node.args) > 1 else 0
    if node.op == "overwrite":
        axis, branches = sliced(node)
    else:
        branches = list(_branches(node, axis))
    if not branches or not all(branch.products for branch in branches) or not _along_keys(fork, axis, softmax_run):
        return []
    spans, first = [], 0
    for branch in branches:
        size = branch.shape[axis]
        view = Node("beside", node.shape, func=_widened, args=(branch, axis, first, node.shape[axis]))
        spans.append(Span(read_chain(branch, steps=fork.steps, views=(view, *fork.views)), first, size))
        first += size
    return spans if all(span.chain.product is not None for span in spans) else []


def _branches(node: Node, axis: int) -> Iterable[Node]:
    """Yield the concatenated tensors; `cat([cat([a, b]), c])` gives a, b, c."""
    for branch in node.parents():
        if branch.op == "cat" and (int(branch.args[1]) if len(branch.args) > 1 else 0) % len(branch.shape) == axis:
            yield from _branches(branch, axis)
        else:
            yield branch


def _widened(value: Tensor, axis: int, first: int, total: int) -> Tensor:
    """Return `value` placed at `first` along an axis of length `total`; the repeated edges around it are filler."""
    index = torch.arange(total, device=value.device) - first
    return value.index_select(axis, index.clamp(0, value.shape[axis] - 1))


def _along_keys(fork: Fork, axis: int, softmax_run: SoftmaxRun) -> bool:
    """Whether the softmax runs over this axis of the node, with the entries in the same order."""
    shape = fork.node.shape
    count = torch.arange(shape[axis], device="cpu")
    try:
        line = to_softmax(numbered(shape, axis), fork.views).movedim(softmax_run.dim, -1)
    except (RuntimeError, IndexError):
        return False
    keys = line[..., : len(count)].reshape(-1, line.shape[-1])[:, : len(count)]
    return bool(len(keys)) and keys.shape[-1] == len(count) and bool((keys[[0, -1]] == count).all())


def join_beside(softmax_run: SoftmaxRun, cells: Sequence[Cell]) -> Reading | None:
    """Return one reading of all keys, from readings of consecutive spans of keys.

    Args:
        softmax_run: the softmax over all keys.
        cells: the readings, in the order of their keys.

    Returns:
        The reading; None if batch, heads or rows of the spans differ.
    """
    first = cells[0].reading
    sizes = {(cell.reading.layout.batch, cell.reading.layout.heads, cell.reading.layout.rows) for cell in cells}
    if len(sizes) > 1 or not isinstance(first.operands, Logits):
        return None
    layout = replace(first.layout, columns=sum(cell.reading.layout.columns for cell in cells))
    whole = replace(first.operands, layout=layout, first=0)
    return joined_cells(cells, layout, whole.arrange(softmax_run.logits), whole.arrange(softmax_run.weights))


# -- putting together --------------------------------------------------------------------------------------------------


def positions_of(reading: Reading) -> tuple[Positions | None, Positions | None]:
    """Return the positions that the rows and the keys of a block were cut from, each None if they are unknown."""
    assert isinstance(reading.operands, Logits)
    left, right = product_operands(reading.operands.product)
    first, second = positions(left, -2), positions(right, -1)
    return (second, first) if reading.operands.axes.swapped else (first, second)


def aligned(reading: Reading, places: tuple[Positions | None, Positions | None] | None = None) -> Reading:
    """Return the reading of a block with the position of its first key minus that of its first row.

    The offset tells a rotation from a factor. Without a rotation the reading is returned unchanged; if the positions
    are unknown, it says that the scale can't be read from the numbers.

    Args:
        reading: The block.
        places: Positions of its rows and keys; None takes those of the operands of its product.
    """
    if not reading.query.moves:
        return reading
    rows, keys = places or positions_of(reading)
    if rows is None or keys is None or rows.total != keys.total:
        return replace(reading, no_slope=Message("trace.step.unknown_positions"))
    return replace(reading, offset=keys.first - rows.first)


def joined_cells(cells: Sequence[Cell], layout: Layout, logits: Tensor | None, weights: Tensor | None) -> Reading:
    """Return one reading of products that cover rows and keys without overlap; pairs that none covers are hidden.

    Args:
        cells: the products, in the order of their keys.
        layout: sizes of the merged attention.
        logits: (B, H, L, S) logits of the merged attention; None if they are too large to hold.
        weights: softmax of `logits`.
    """
    first = cells[0].reading
    steps = (*_merged(cells, layout, whole=logits is not None), Blocks(len({cell.key for cell in cells})))
    queries, keys = ([getattr(cell.reading, name) for cell in cells] for name in ("query", "key"))
    query, key = (
        replace(
            sides[0],
            unknown=tuple(dict.fromkeys(name for side in sides for name in side.unknown)),
            skewed=any(side.skewed for side in sides),
        )
        for sides in (queries, keys)
    )
    # Blocks with different scales: no single number is the scale of the merged attention.
    if not _alike([_factor(cell.reading) for cell in cells]):
        one = Scale(Factor(None, "logits", BY_BLOCK))
        query, key = replace(query, factors=()), replace(key, factors=())
        steps = (one, *(step for step in steps if not isinstance(step, Scale)))
    made = None
    if logits is not None and weights is not None:
        axes = Orientation(3, (2,), swapped=False, followed=True)
        made = Logits(logits, weights, _product(cells), (), axes, layout)
    return replace(first, layout=layout, query=query, key=key, steps=steps, operands=made, blocks=tuple(cells))


def _factor(reading: Reading) -> float | None:
    """Return the product of a block's factors, or None if any factor is unknown."""
    on_logits = [step.factor for step in reading.steps if isinstance(step, Scale)]
    values = [factor.value for factor in (*reading.query.factors, *reading.key.factors, *on_logits)]
    return None if None in values else math.prod(value for value in values if value is not None)


def _alike(factors: Sequence[float | None]) -> bool:
    first = factors[0]
    return all(
        (f is None) == (first is None) and abs((f or 0) - (first or 0)) <= SCALE_TOLERANCE * abs(f or 0)
        for f in factors
    )


def _product(cells: Sequence[Cell]) -> Node:
    """Return a node that stands for all products; it carries the largest |q . k| among them."""
    products = [cell.reading.operands.product for cell in cells if isinstance(cell.reading.operands, Logits)]
    made = Node("blocks", products[0].shape, place=products[0].place)
    known = [p.product.largest for p in products if p.product is not None and p.product.largest is not None]
    largest = torch.stack(known).max() if known else None
    made.product = Product(cells[0].reading.logits_dtype, largest)
    return made


# -- steps of all blocks as those of one: a mask or a bias that some of them have is 0 in the others -------------------


def _merged(cells: Sequence[Cell], layout: Layout, *, whole: bool) -> list[Step]:
    # The block with the most masks and biases gives the order of the merged steps.
    longest = max((cell.reading.steps for cell in cells), key=lambda steps: len(_kinds(steps, (Hide, Bias))))
    masks = [len(_kinds(cell.reading.steps, (Hide,))) for cell in cells]
    apart = set(masks) <= {0, max(masks)}  # blocks with different numbers of masks: all masks merge into one
    merged: list[Step] = []
    for step in longest:
        place = sum(type(earlier) is type(step) for earlier in merged)
        if isinstance(step, Bias):
            merged.append(_bias(cells, layout, step, place) if whole else replace(step, addend=None))
        elif isinstance(step, Hide):
            if apart or step is _kinds(longest, (Hide,))[-1]:
                merged.append(_hide(cells, layout, step, slice(place, place + 1) if apart else slice(None), whole))
        elif not isinstance(step, Offset):
            merged.append(step)
    covered = sum(cell.reading.layout.rows * cell.reading.layout.columns for cell in cells)
    if covered < layout.rows * layout.columns and all(_is_of_keys(step) for step in _kinds(merged, (Hide,))):
        # Flash-style loops skip the blocks above the diagonal: those logits are hidden, though no mask says so.
        merged.append(_hide(cells, layout, Hide("implicit", -math.inf), slice(0), whole))
    if any(_skeleton(cell.reading) != _skeleton(cells[0].reading) for cell in cells):
        merged.append(Unknown(Message("trace.step.unlike_blocks")))
    return merged


def _is_of_keys(step: Step) -> bool:
    """Whether a mask is padding: it hides the same keys from every row."""
    visible = step.visible.value if isinstance(step, Hide) and step.visible is not None else None
    return visible is not None and _same_rows(visible)


def _same_rows(visible: Tensor) -> bool:
    return bool((visible == visible[..., :1, :]).all())


def _kinds(steps: Iterable[Step], kinds: tuple[type[Step], ...]) -> list[Step]:
    return [step for step in steps if isinstance(step, kinds)]


def _skeleton(reading: Reading) -> tuple[object, ...]:
    """Return what all blocks must share: every step and side property except masks, biases and factors."""
    on_logits = [step for step in reading.steps if not isinstance(step, (Hide, Bias, Offset, Scale))]
    sides = [(side.norm, side.rope, side.padding, side.norm_gain) for side in (reading.query, reading.key)]
    return (*on_logits, *sides)


def assembled_pairs(
    cells: Sequence[Cell], layout: Layout, values_of: Callable[[Cell], Tensor | None], otherwise: float | bool
) -> Tensor | None:
    """Return the values of all blocks as one tensor (B, H, L, S), where B and H may be 1.

    Args:
        cells: the blocks.
        layout: sizes of the whole.
        values_of: returns a block's values, (B, H, rows, keys), or None if they are unknown.
        otherwise: the value of entries that no block covers.

    Returns:
        The tensor; None if the values of a block are unknown.
    """
    parts = [values_of(cell) for cell in cells]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    lead = tuple(max(part.shape[axis] for part in known) for axis in (0, 1))
    whole = known[0].new_full((*lead, layout.rows, layout.columns), otherwise)
    for cell, part in zip(cells, known, strict=True):
        _of(cell, whole).copy_(part)
    return whole


def _of(cell: Cell, whole: Tensor) -> Tensor:
    """Return the view of `whole` that holds the rows and keys of a block."""
    sizes = cell.reading.layout
    return whole[..., cell.row : cell.row + sizes.rows, cell.key : cell.key + sizes.columns]


def _values(cell: Cell, kind: type[Step], which: slice, start: float | bool) -> Tensor | None:
    """Return the selected masks (ANDed) or biases (summed) of a block, (B, H, L, S), or None if one is unknown."""
    reading, operands = cell.reading, cell.reading.operands
    # Masks of a model on the meta device are constants with values, which live on the CPU.
    device = torch.device("cpu") if reading.without_data else reading.device
    values = torch.full((1, 1, reading.layout.rows, reading.layout.columns), start, device=device)
    for step in _kinds(reading.steps, (kind,))[which]:
        placed = step.visible if isinstance(step, Hide) else step.addend if isinstance(step, Bias) else None
        if placed is None or not isinstance(operands, Logits) or not operands.axes.followed:
            return None
        values = (
            torch.where(values, operands.at_logits(placed), False) if start else values + operands.at_logits(placed)
        )
    return values


def _hide(cells: Sequence[Cell], layout: Layout, like: Hide, which: slice, whole: bool) -> Hide:
    """Return the masks of all blocks merged into one; it has no values if `whole` is False."""
    if not whole:
        return replace(like, visible=None, name="mask", source=None)
    visible = assembled_pairs(cells, layout, lambda cell: _values(cell, Hide, which, True), False)
    # Padding stays padding: rows that skipped a block say nothing about its keys, so any row that sees a key decides.
    if visible is not None and which != slice(0) and all(_same_rows(_of(cell, visible)) for cell in cells):
        visible = visible.any(-2, keepdim=True).expand_as(visible)
    return replace(like, visible=None if visible is None else StepTensor(visible, (), layout.shape), source=None)


def _bias(cells: Sequence[Cell], layout: Layout, like: Bias, place: int) -> Bias:
    """Return the biases that stand at the same place in each block, merged into one."""
    whole = assembled_pairs(cells, layout, lambda cell: _values(cell, Bias, slice(place, place + 1), 0.0), 0.0)
    if whole is None:
        return replace(like, addend=None)
    named = not like.content and like.name in _NAMED_BY_VALUES and not whole.is_meta
    name = bias_name(whole, None) if named else like.name
    return replace(like, name=name or like.name, addend=StepTensor(whole, (), layout.shape))


# -- what came out -----------------------------------------------------------------------------------------------------


def is_attention(logits: Tensor, values: Sequence[tuple[int, Tensor]], output: Tensor) -> bool | None:
    """Return whether `output` equals softmax(logits) @ values, or None if the shapes do not allow the comparison.

    Args:
        logits: (B, H, L, S), minus infinity where a key is hidden.
        values: the first key of every block, and the block's values (..., Sv, Ev).
        output: (..., L, Ev), or fewer columns if the values had an extra column of ones for the running sum.
    """
    batch, heads, rows, keys = logits.shape
    width = output.shape[-1]
    if output.is_meta or output.shape[-2] != rows or output.numel() != batch * heads * rows * width or not width:
        return None
    whole = logits.new_zeros(batch, heads, keys, width, dtype=torch.float64)
    for first, value in values:
        if value.numel() != batch * heads * value.shape[-2] * value.shape[-1] or value.shape[-1] < width:
            return None
        part = value.reshape(batch, heads, *value.shape[-2:])[..., :width]
        whole[:, :, first : first + value.shape[-2]] = part.to(torch.float64)
    at = torch.linspace(0, rows - 1, min(rows, _RECOMPUTED_ROWS), device=logits.device).round().long()
    z, out = logits[:, :, at].to(torch.float64), output.reshape(batch, heads, rows, width)[:, :, at].to(torch.float64)
    # A row whose keys are all hidden has no defined output.
    seeing = (z.amax(-1) > HIDING_LOGIT) & (z.amax(-1) < math.inf)
    difference = (z.softmax(-1) @ whole - out).abs().amax(-1)[seeing]
    size = out.abs().amax(-1)[seeing]
    return not difference.numel() or bool((difference <= _OUTPUT_TOLERANCE * size.max()).all())

"""Reads attention computed block by block with a running maximum and sum (online softmax), and merges the blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.weights import dropout_of
from sqrtdk.tracing.probe.replays import subgraph_between
from sqrtdk.tracing.readback.blocks import Span, aligned, assembled_pairs, is_attention, joined_cells, positions_of
from sqrtdk.tracing.readback.chain import read_chain
from sqrtdk.tracing.readback.eager import read_span
from sqrtdk.tracing.readback.guards import guard_of
from sqrtdk.tracing.readback.orient import coordinates
from sqrtdk.tracing.readback.reading import Cell, Layout, Logits, Reading
from sqrtdk.tracing.readback.regroup import Positions
from sqrtdk.tracing.records import IN_BLOCKS, Factor
from sqrtdk.tracing.steps import Hide, Scale, Step, Unknown
from sqrtdk.tracing.steps.placed import StepTensor
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import replay_all
from sqrtdk.tracing.tape.node import Exponential, Node, Online, SoftmaxRun

MOST_JOINED_LOGITS = 2**26  # logits of all blocks together that are held at once
FAULT_BLOCKS = "trace.fault.blocks"
FAULT_MAXIMA = "trace.fault.maxima"
_LAYOUT_ROUNDING = 1e-2  # difference from the output in another layout, as a share of its largest number
STATISTICS_TOO_LARGE = "trace.statistics.too_large"
_Places = tuple[Positions | None, Positions | None]


@dataclass(frozen=True, slots=True, eq=False)
class OnlineReading:
    """One attention of a run, or the part of it whose keys come from one tensor.

    Attributes:
        reading: the reading; it has cells in `blocks` if the part consists of several exponentials.
        exponentials: its exponentials, in the order of the cells.
    """

    reading: Reading
    exponentials: tuple[Exponential, ...]

    @property
    def nodes(self) -> list[Node]:
        """The nodes of all logits and values."""
        return [node for each in self.exponentials for node in (each.node, each.value_node)]


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """One `exp(z - m)`, read as if it were an attention, with the places of its rows and keys."""

    exponential: Exponential
    reading: Reading
    rows: Positions | None
    keys: Positions | None

    @property
    def source_of_rows(self) -> tuple[object, ...]:
        """An identity of the tensor that its queries come from, and of its layout."""
        layout = self.reading.layout
        return (_source(self.rows), layout.batch, layout.heads)


def read_online(run: Online, heads_hint: int | None, *, travelled: bool) -> list[list[OnlineReading]] | str:
    """Return the attentions of a run, one or one for each block of queries; a string says why there is none.

    Args:
        run: the exponentials and the output.
        heads_hint: number of heads that the module declares.
        travelled: whether tensors came from other ranks, so that blocks of keys from several tensors may be a ring.

    Returns:
        One list for each attention: its single reading, or those of the blocks of keys of a ring.
    """
    blocks: list[_Block] = []
    for exponential in run.parts:
        if not isinstance(exponential, Exponential):
            continue
        block = _read(exponential, run.output, heads_hint)
        if block is None:
            return Message("trace.missed.no_product_in_blocks")
        blocks.append(block)
    found: list[list[OnlineReading]] = []
    of_rows = _connected(blocks)
    mixed = len(blocks) < len(run.parts)  # a softmax has other keys of the same rows
    for group in of_rows:
        parts = _by_source_of_keys(group)
        output = run.output if len(of_rows) == 1 and not mixed else None
        whole = None if len(parts) == 1 else _attention(group, run, output)
        if whole is not None and (whole.reading.fault is not None or not travelled):
            found.append([whole])
            continue
        readings = [_attention(part, run, output if len(parts) == 1 else None, surely=True) for part in parts]
        known = [reading for reading in readings if reading is not None]
        if len(known) < len(readings):
            return Message("trace.missed.places_of_blocks")
        found += [known] if whole is not None else [[reading] for reading in known]
    return found


def _attention(
    group: Sequence[_Block], run: Online, output: Tensor | None, *, surely: bool = False
) -> OnlineReading | None:
    """Return one attention of blocks; None if their places are not known.

    Args:
        group: the blocks.
        run: their run.
        output: its output, if the blocks are all of it.
        surely: whether the blocks are known to be one attention. If not, their output must show it.
    """
    placed = _cells(group)
    if placed is None:
        return None
    cells = [cell for cell, _ in placed]
    values = [(cell.key, block.exponential.value) for cell, block in placed]
    reading = _joined(cells, output) if len(cells) > 1 else _alone(cells[0].reading, group[0].exponential, output)
    adds_up = _adds_up(reading, values, output)
    fault = FAULT_MAXIMA if run.loose else FAULT_BLOCKS if adds_up is False else None
    if not surely and adds_up is not True and not (run.whole and fault is not None):
        return None
    reading = reading if fault is None else _faulty(reading, Message(fault))
    return OnlineReading(reading, tuple(block.exponential for _, block in placed))


def _adds_up(reading: Reading, values: Sequence[tuple[int, Tensor]], output: Tensor | None) -> bool | None:
    """Return whether the output is softmax(logits) @ v; None if that can't be checked."""
    operands = reading.operands
    unknown = reading.dropout or any(isinstance(step, Unknown) for step in reading.steps)
    if unknown or output is None or not isinstance(operands, Logits) or operands.values.is_meta:
        return None
    return is_attention(operands.arrange(operands.values), values, output)


def _alone(reading: Reading, exponential: Exponential, output: Tensor | None) -> Reading:
    """Return the reading of a single exponential as that of a softmax, with its weights and output."""
    operands = reading.operands
    assert isinstance(operands, Logits)
    if operands.values.is_meta:
        return replace(reading, output=output)
    whole = replace(operands, weights=softmax(operands.values, exponential.dim))
    made = weights_in_product(whole.weights, exponential) @ exponential.value
    own = None if output is None else _in_layout_of(made, output)
    return replace(reading, operands=whole, output=made if own is None else own)


def _in_layout_of(made: Tensor, output: Tensor) -> Tensor | None:
    """Return the model's own output in the layout of the product that made it, or None if it is laid out otherwise.

    It has fewer columns than the product if one of them, of ones, gave the sum of the exponentials.
    """
    width = output.shape[-1]
    if output.shape == made.shape:
        return output
    if math.prod(output.shape[:-1]) != math.prod(made.shape[:-1]) or width > made.shape[-1]:
        return None
    laid = output.reshape(*made.shape[:-1], width)
    numbers, others = laid.to(torch.float64), made[..., :width].to(torch.float64)
    near = _LAYOUT_ROUNDING * others.abs().amax() if others.numel() else 0.0
    return laid if bool(((numbers - others).abs() <= near).all()) else None


def softmax(logits: Tensor, dim: int) -> Tensor:
    """Return the softmax of logits, 0 in rows that see no key."""
    return logits.softmax(dim).nan_to_num(0.0)


def weights_in_product(weights: Tensor, exponential: Exponential) -> Tensor:
    """Return weights in the layout of the exponential at its product with the values, (..., L, S).

    Args:
        weights: in the shape of the exponential.
        exponential: what was multiplied with the values.
    """
    moved = replay_all((node for node in exponential.way if node.op in ops.VIEWS), weights)
    moved = moved.mT if exponential.values_first and moved.dim() > 1 else moved
    return moved.to(exponential.value.dtype)


def _faulty(reading: Reading, fault: str) -> Reading:
    return replace(reading, steps=(*reading.steps, Unknown(fault)), fault=fault, output=None)


def _read(exponential: Exponential, output: Tensor, heads_hint: int | None) -> _Block | None:
    chain = read_chain(exponential.node)
    if chain.product is None or chain.product.product is None:
        return None
    held = exponential.logits is not None or exponential.power is not None
    hides = _hidden_later(exponential)
    logits = _logits(exponential, hides) if held else torch.empty(exponential.shape, device="meta")
    softmax_run = SoftmaxRun(
        node=exponential.node,
        logits=logits,
        weights=logits,
        dim=exponential.dim,
        op=IN_BLOCKS,
        entry=exponential.entry,
        flex=False,
        stored=exponential.stored,
    )
    reading = read_span(softmax_run, exponential.value, output, Span(chain), heads_hint)
    steps = reading.steps
    if exponential.base != math.e:
        base = Scale(Factor(math.log(exponential.base), "logits", f"base {exponential.base:g}"))
        # 2 ** (z * log2(e)): the base is a factor ln 2. Scales and masks commute with it, so it may stand innermost,
        # but for log2(e) that follows the masks, which it cancels.
        inside = all(isinstance(step, (Scale, Hide)) for step in steps) and any(
            isinstance(step, Hide) for step in steps[-1:]
        )
        steps = (base, *steps) if inside else (*steps, base)
    rate = max((drop[0] for node in exponential.way if (drop := dropout_of(node)) is not None), default=0.0)
    reading = replace(reading, dropout=rate, steps=(*steps, *hides), device=exponential.value.device, output=None)
    if not held:
        reading = replace(reading, no_slope=Message(STATISTICS_TOO_LARGE), no_stats=Message(STATISTICS_TOO_LARGE))
    places = _cut(reading, positions_of(reading))
    return _Block(exponential, aligned(reading, places), *places)


def _logits(exponential: Exponential, hides: Sequence[Step]) -> Tensor:
    """Return the logits in natural-log units: the exp's input plus its maximum; -inf where the exp was zeroed."""
    if exponential.power is not None:
        entered = exponential.power.log() / math.log(exponential.base)
    else:
        assert exponential.logits is not None
        entered = exponential.logits
    entered = entered if exponential.offset is None else entered + exponential.offset
    entered = entered if exponential.base == math.e else entered * math.log(exponential.base)
    for step in hides:
        if isinstance(step, Hide) and step.visible is not None and not entered.is_meta:
            entered = entered.masked_fill(~step.visible.at_softmax(), -math.inf)
    return entered


def _hidden_later(exponential: Exponential) -> tuple[Step, ...]:
    """Return the masks that zero the exp, `exp(z - m) * mask`; any other change of it is an unknown step."""
    steps: list[Step] = []
    for node in exponential.way:
        if node.op in ("mul", "div", "masked_fill", "where") and dropout_of(node) is None:
            guard = guard_of(node, exponential, _logits)
            steps += _zeroed(node, exponential.shape) if guard is None else [guard]
    return tuple(steps)


def _zeroed(node: Node, shape: tuple[int, ...]) -> list[Step]:
    """Return what an operation on the exp hides, by its effect on ones; [] if it multiplies all by one number."""
    main = node.main()
    part = None if main is None else subgraph_between(main, node)
    if main is None or part is None or node.shape != shape:
        return [Unknown(Message("trace.step.on_weights", name=node.op))]
    try:
        by = part.run(torch.ones(main.shape, device=part.device))
    except Exception:  # the values of the mask are not known
        return [Hide("bool", -math.inf)]
    if any(parent is not main for parent in node.parents()) and bool(((by == 0) | (by == 1)).all()):
        return [Hide("bool", -math.inf, StepTensor(by != 0, (), shape))]
    return [] if bool((by == by.flatten()[0]).all()) else [Unknown(Message("trace.step.on_weights", name=node.op))]


def _source(place: Positions | None) -> object:
    return None if place is None else (place.source, place.axis, place.others)


def _cut(reading: Reading, places: _Places) -> _Places:
    """Return the places of rows and keys of a block that was cut from a larger product: `(q @ k.mT)[..., 4:8]`."""
    operands = reading.operands
    assert isinstance(operands, Logits)
    product = operands.product
    if math.prod(operands.values.shape) >= math.prod(product.shape) or not operands.axes.followed:
        return places
    _, row, column = (operands.arrange(at) for at in coordinates(product, operands.views, torch.device("cpu")))
    lines = (column, row) if operands.axes.swapped else (row, column)
    found: list[Positions | None] = []
    for at, line, axis in zip(places, (lines[0][0, 0, :, 0], lines[1][0, 0, 0]), (-2, -1), strict=True):
        axis = -3 - axis if operands.axes.swapped else axis
        if len(line) == product.shape[axis] or (len(line) > 1 and bool((line.diff() != 1).any())):
            found.append(at)
        elif at is None:
            found.append(Positions(product, axis, int(line[0]), product.shape[axis], ()))
        else:
            found.append(replace(at, first=at.first + int(line[0])))
    return found[0], found[1]


def _by_source_of_keys(group: Sequence[_Block]) -> list[list[_Block]]:
    """Return the blocks by the tensor that their keys come from."""
    parts: dict[object, list[_Block]] = {}
    for block in group:
        parts.setdefault(_source(block.keys), []).append(block)
    return list(parts.values())


def _connected(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Return the blocks of each attention, which share rows or keys; packed sequences in one tensor share neither."""
    parts: list[tuple[set[object], list[_Block]]] = []
    for block in blocks:
        rows, keys = block.rows and block.rows.first, block.keys and block.keys.first
        of_rows = block.source_of_rows
        ends: set[object] = {(of_rows, "rows", rows), (of_rows, _source(block.keys), keys)}
        near = [part for part in parts if part[0] & ends]
        parts = [part for part in parts if not part[0] & ends]
        met = [*(other for _, blocks in near for other in blocks), block]
        parts.append((ends.union(*(each for each, _ in near)), met))
    return [sorted(blocks, key=lambda block: block.exponential.number) for _, blocks in parts]


def _cells(group: Sequence[_Block]) -> list[tuple[Cell, _Block]] | None:
    """Return the blocks at their rows and keys; None if they overlap or a place is unknown.

    Keys of several tensors, or of unknown place, follow one another in the order in which the blocks ran.
    """
    rows = [block.rows.first if block.rows is not None else 0 for block in group]
    sizes = {block.reading.layout.rows for block in group if block.rows is None}
    if len(sizes) > 1:
        return None
    keys: dict[_Block, int] = {}
    after = 0
    for part in _by_source_of_keys(group):
        known = [block.keys.first for block in part if block.keys is not None]
        for block in part:
            keys[block] = after + (block.keys.first - min(known) if block.keys is not None else 0)
            if block.keys is None:
                after += block.reading.layout.columns
        after = max(after, *(keys[block] + block.reading.layout.columns for block in part))
    first_row = min(rows)
    cells = [
        (Cell(row - first_row, keys[block], block.reading), block)
        for row, block in sorted(zip(rows, group, strict=True), key=lambda entry: (keys[entry[1]], entry[0]))
    ]
    return None if _overlap([cell for cell, _ in cells]) else cells


def _overlap(cells: Sequence[Cell]) -> bool:
    """Whether two blocks share both rows and keys, or share only some of their rows."""
    keys: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for cell in cells:
        sizes = cell.reading.layout
        span = (cell.key, cell.key + sizes.columns)
        keys.setdefault((cell.row, cell.row + sizes.rows), []).append(span)
    return any(
        before[1] > after[0] for spans in (keys, *keys.values()) for before, after in itertools.pairwise(sorted(spans))
    )


def _joined(cells: Sequence[Cell], output: Tensor | None) -> Reading:
    first = cells[0].reading
    layout = replace(
        first.layout,
        rows=max(cell.row + cell.reading.layout.rows for cell in cells),
        columns=max(cell.key + cell.reading.layout.columns for cell in cells),
    )
    logits = _whole(cells, layout)
    if logits is None:
        return replace(joined_cells(cells, layout, None, None), output=output, no_stats=Message(STATISTICS_TOO_LARGE))
    weights = logits if logits.is_meta else softmax(logits, -1)
    return replace(joined_cells(cells, layout, logits, weights), output=output)


def _whole(cells: Sequence[Cell], layout: Layout) -> Tensor | None:
    """Return the logits of all blocks, (B, H, L, S), or None if they are too many or were not held."""
    if layout.batch * layout.heads * layout.rows * layout.columns > MOST_JOINED_LOGITS:
        return None
    if any(cell.reading.no_stats is not None for cell in cells):
        return None
    return assembled_pairs(cells, layout, _logits_of, -math.inf)


def _logits_of(cell: Cell) -> Tensor | None:
    operands = cell.reading.operands
    return operands.arrange(operands.values) if isinstance(operands, Logits) else None

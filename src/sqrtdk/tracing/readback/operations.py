"""Reads single operations on the logits, between the product and the softmax.

`OPERATIONS` maps each operation to its reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.mixing import CONVOLUTIONS, HEADS_BY_DATA, is_bias_of_mixing, mixed_by_data, mixing_operands
from sqrtdk.tracing.lower.pairs import NONLINEARITIES
from sqrtdk.tracing.lower.softmax import is_of_groups
from sqrtdk.tracing.probe.replays import subgraph_between
from sqrtdk.tracing.readback.addends import HIDES, HIDING_LOGIT, read_addend
from sqrtdk.tracing.readback.factors import heads_axis, of_the_data, of_the_rows, read_factor
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import (
    OF_LOGITS,
    Clamp,
    Hide,
    Mix,
    Offset,
    Power,
    Scale,
    Softcap,
    Squares,
    Step,
    Unknown,
)
from sqrtdk.tracing.steps.placed import StepTensor, to_softmax
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import decided_by, evaluate
from sqrtdk.tracing.tape.node import ROW_SHIFTS, Node, back, origin


@dataclass(frozen=True, slots=True)
class Link:
    """One operation between the product and the softmax.

    Attributes:
        node: result of the operation.
        main: the operand that carries the product.
        views: the views after the operation, innermost first.
        later: the steps after the operation, innermost first.
    """

    node: Node
    main: Node
    views: tuple[Node, ...]
    later: tuple[Step, ...]

    @property
    def position(self) -> int | None:
        """Position of the first tensor operand other than `main`; None if there is no other."""
        return next((i for i, arg in enumerate(self.node.args) if isinstance(arg, Node) and arg is not self.main), None)

    def addends(self, position: int, by: float) -> tuple[Step, ...]:
        """Return the steps of the addend at `position`, multiplied by the number `by`, outermost first."""
        node = self.node
        steps = read_addend(node.args[position], node.operands.get(position), by, self.views, node.shape)
        return steps[::-1]

    def overwritten(self, position: int, fill: float | None, *, keep: bool) -> tuple[Step, ...]:
        """Return the mask that writes `fill` over the logits, except where the condition at `position` is `keep`.

        A `fill` of None is an unknown number.
        """
        condition = self.node.operands.get(position)
        if condition is not None and condition.is_meta:
            condition = evaluate(self.node.args[position])
        visible = None
        if condition is not None:
            visible = StepTensor(condition if keep else ~condition, self.views, self.node.shape)
        return (Hide("bool", fill, visible),)


Readers = Mapping[str, Callable[[Link], tuple[Step, ...]]]


def unknown(link: Link) -> tuple[Step, ...]:
    """Return an unknown step for an operation without a reader; curves like tanh belong to an additive score."""
    if link.node.op in NONLINEARITIES and not link.main.products:
        return ()
    return (Unknown(link.node.op),)


def _number(value: float, source: str = "number") -> tuple[Step, ...]:
    """Return the step of a number in the operation itself (`alpha`), or () if it is 1."""
    return () if value == 1 else (Scale(Factor(value, "logits", source)),)


# -- factors -----------------------------------------------------------------------------------------------------------


def _multiplied(link: Link) -> tuple[Step, ...]:
    node = link.node
    index = 1 if node.args[0] is link.main else 0
    trailing = len(node.shape) > 4 and node.shape[-1] == 1  # einsum adds a last axis of size 1
    axis = heads_axis(node.args[index], link.main)
    if isinstance(node.args[index], Node) and decided_by(node.args[index], link.main):
        return unknown(link)
    factor = read_factor(node, index, "logits", heads_axis=-4 if trailing and axis == -3 else axis)
    value = node.operands.get(index)
    value = evaluate(node.args[index]) if value is not None and value.is_meta else value
    if factor is None and node.op == "mul" and value is not None and bool(((value == 0) | (value == 1)).all()):
        # z * m before z + -1e4 * (1 - m) is the mask's first half; alone, it leaves hidden keys a logit of 0.
        unread = Unknown(Message("trace.step.zero_one_factor"), "zero_one_factor")
        return () if _hidden_later(value, link) else (unread,)
    if isinstance(node.args[index], Node) and node.args[index].products:
        return (Unknown(Message("trace.step.by_logits", name=node.op)),)
    factor = of_the_data(node.args[index], factor or of_the_rows(node, index, "logits"))
    if factor is None or (node.op == "div" and index == 0):
        return (Unknown(Message("trace.step.by_tensor", name=node.op)),)
    if factor.value is not None or value is None or value.is_meta:
        return (Scale(factor),)
    by = value.detach().to(torch.float64)
    return (Scale(factor, StepTensor(by.reciprocal() if node.op == "div" else by, link.views, node.shape)),)


def _hidden_later(factor: Tensor, link: Link) -> bool:
    """Whether the steps after the multiplication hide every key that the 0/1 `factor` sets to 0."""
    try:
        zeros = to_softmax((factor == 0).expand(link.node.shape), link.views)
        for step in link.later:
            if isinstance(step, Hide) and step.visible is not None:
                zeros = zeros & step.visible.at_softmax()
    except RuntimeError:
        return False
    return not bool(zeros.any())


def _raised(link: Link) -> tuple[Step, ...]:
    # ((q - k) ** 2).sum(-1).sqrt(): only a power of a distance is a known step, not a power of q . k.
    exponent = 0.5 if link.node.op == "sqrt" else link.node.number(1)
    distances = all(p.product is not None and p.product.distance for p in link.main.products)
    return (Power(exponent),) if exponent and distances else unknown(link)


def _added_product(link: Link) -> tuple[Step, ...]:
    """Reads addcmul, a + value * (logits * factor)."""
    node = link.node
    index = 2 if node.args[1] is link.main else 1
    factor = None if node.args[0] is link.main else read_factor(node, index, "logits", heads_axis=-3)
    if factor is None or factor.value is None:
        return unknown(link)
    return (*link.addends(0, 1.0), Scale(factor), *_number(float(node.kwargs.get("value", 1)), "addcmul value"))


# -- sums --------------------------------------------------------------------------------------------------------------


def _summed(link: Link) -> tuple[Step, ...]:
    node, position, alpha = link.node, link.position, float(link.node.kwargs.get("alpha", 1))
    signs = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[node.op]
    # add is a + alpha * b, sub is a - alpha * b, rsub is b - alpha * a: the signs of a and of b.
    main, sign = signs if node.args[0] is link.main else signs[::-1]
    turned = _number(main)
    if position is None or is_bias_of_mixing(node, position):
        return turned  # a number added to every logit of a head changes nothing
    other, value = node.args[position], node.operands.get(position)
    placed = None if value is None or value.is_meta else StepTensor(value * sign, link.views, node.shape)
    own = bool(other.products & link.main.products)
    # z - z.mean(-1, keepdim=True): one number per row, computed from the logits, leaves their softmax as it is.
    if (own and other.shape[-1:] == (1,)) or _is_own_maximum(other, link.main):
        return (Offset(placed), *turned)
    if is_squared_length(other):
        return (Squares("squares", placed, sign=sign), *turned)
    if own:
        return (Unknown(Message(OF_LOGITS)), *turned)
    if _is_second_part(other, link.main):
        return (Unknown(Message("trace.step.sum_of_products")), *turned)
    return (*link.addends(position, sign), *turned)


def beside_product(node: Node, views: tuple[Node, ...]) -> tuple[Step, ...]:
    """Return the steps of baddbmm, addmm and addbmm beside the product, beta * input + alpha * (q k^T).

    They are those of the input and of alpha, outermost first; () for any other operation.
    """
    if node.op not in ("baddbmm", "addmm", "addbmm"):
        return ()
    alpha, beta = (float(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))
    added = Link(node, node, views, ()).addends(0, beta) if beta else ()
    return (*added, *_number(alpha, f"{node.op} alpha"))


def _is_own_maximum(other: Node, main: Node) -> bool:
    """Whether `other` is the maximum of the logits: the softmax is invariant to `z - z.amax(-1, keepdim=True)`."""
    if is_of_groups(other):
        return bool(other.products & main.products)
    maximum = origin(other, ops.PASSING | {"masked_fill", "maximum"})
    return maximum.op in ROW_SHIFTS and _same_lineage(maximum, main)


def _same_lineage(node: Node, main: Node) -> bool:
    """Whether both nodes descend from the same product, or from the same roots if there is no product."""
    return bool(node.products & main.products if main.products else node.roots & main.roots)


def _is_second_part(other: Node, main: Node) -> bool:
    """Whether `other` is a second product of projections of the same module: `q1 @ k1.mT + q2 @ k2.mT` (two halves)."""
    seconds = [product for product in other.products if product.product is not None]
    sites = {product.site for product in main.products}
    alike = all(p.site in sites and not p.learned and _of_projections(p) for p in seconds)
    return bool(seconds) and alike and not any(_is_shifted(product, other) for product in seconds)


def _is_shifted(product: Node, logits: Node) -> bool:
    """Whether the product's columns are distances that padding and slices shift to their keys (relative shift).

    Dai et al. 2019, appendix B (Transformer-XL); Conformer encoders do the same.
    """
    part = subgraph_between(product, logits)
    if part is None:
        return False
    numbers = torch.arange(math.prod(product.shape), dtype=torch.float64, device=part.device).reshape(product.shape)
    try:
        moved = part.run(numbers)
    except Exception:  # some operation does not run on float64 counts
        return False
    return moved.numel() != numbers.numel() or bool((moved.flatten() != numbers.flatten()).any())


def _of_projections(product: Node) -> bool:
    """Whether both operands of a product come from projections, and none from a table of positions."""
    roots = [root.root for arg in product.args if isinstance(arg, Node) for root in arg.roots]
    return bool(roots) and all(root is not None and root.width is not None for root in roots)


# -- masks and clamps --------------------------------------------------------------------------------------------------


def _selected(link: Link) -> tuple[Step, ...]:
    node = link.node
    for position, other in ((1, 2), (2, 1)):  # where(c, z - 1e9, z): the lowered logits stand where c is True
        lower, logits = node.args[position], node.args[other]
        if isinstance(lower, Node) and lower.op in ("add", "sub") and lower.args[0] is logits:
            by = lower.number(1) or 0.0
            by = by if lower.op == "add" else -by
            if by < HIDES:
                return link.overwritten(0, by, keep=position == 2)
            break
    if all(isinstance(arg, Node) and _same_lineage(arg, link.main) for arg in node.args[1:3]):
        return unknown(link)
    keep_where_true = node.args[1] is link.main
    fill, known = _fill(node, 2 if keep_where_true else 1)
    return link.overwritten(0, fill, keep=keep_where_true) if known else unknown(link)


def _fill(node: Node, position: int) -> tuple[float | None, bool]:
    """Return the number written over hidden logits, and True if it is one number: `where(m, z, -1e9)`.

    It may be a number or a tensor filled with it. A tensor without values counts as one unknown number, (None, True).
    """
    arg, value = node.args[position], node.operands.get(position)
    if isinstance(arg, Node) and (value is None or value.is_meta):
        value = evaluate(arg)
    if value is None or not value.numel():
        return node.number(position), True
    first = float(value.flatten()[0])
    return first, bool((value == first).all())


def _written(link: Link) -> tuple[Step, ...]:
    fill = link.node.number(2)
    return (Hide("bool", fill),) if fill is not None and fill < HIDES else unknown(link)


def _clamped(link: Link) -> tuple[Step, ...]:
    """Return the step of a clamp, or () if its bounds are as low as finfo.min and only keep infinities out."""
    node = link.node
    if sum(_same_lineage(parent, link.main) for parent in node.parents()) > 1:  # torch.maximum(z, 2 * z): a curve
        return unknown(link)
    low = node.number(1) if node.op in ("clamp", "clamp_min", "maximum") else None
    high = node.number(2 if node.op == "clamp" else 1) if node.op in ("clamp", "clamp_max", "minimum") else None
    bounds = [f"{bound:.4g}" if bound is not None and abs(bound) < -HIDING_LOGIT else "" for bound in (low, high)]
    return (Clamp(", ".join(bounds)),) if any(bounds) else ()


def _put_together(link: Link) -> tuple[Step, ...]:
    """Reads chunks of logits that are padded and written slice by slice into a new tensor (Longformer)."""
    padded = link.node.op == "constant_pad_nd"
    return (Unknown(Message("trace.step.padded_chunks" if padded else "trace.step.written_slices")),)


# -- heads that are mixed: by a linear layer, an einsum, a matrix product or a convolution -----------------------------


def _mixed(link: Link) -> tuple[Step, ...]:
    """Return the step that mixes the heads of the logits, or an unknown step."""
    node, operands = link.node, mixing_operands(link.node)
    if operands is not None and mixed_by_data(node.args[operands[1]]):
        return (Unknown(Message(HEADS_BY_DATA)),)
    if operands is None or any(float(node.kwargs.get(name, 1)) != 1 for name in ("alpha", "beta")):
        return (Unknown(node.op),)
    value = node.operands.get(operands[1])
    return (Mix(None if value is None or value.is_meta else _matrix(node, value.detach(), operands[1])),)


def _matrix(node: Node, value: Tensor, position: int) -> Tensor | None:
    """Return the mixing matrix, (H mixed, H) float64, or None if it differs from entry to entry of the batch."""
    value = value.to(torch.float64)
    if node.op in CONVOLUTIONS:
        return value.flatten(1)
    if value.dim() == 3:
        if not bool((value == value[:1]).all()):
            return None
        value = value[0]
    return value if position == ops.CONTRACTIONS[node.op][0] else value.mT


def read_residual_mixing(node: Node) -> tuple[Step, Node] | None:
    """Return the step 1 + M and the node of z for `z + M z`, a residual mixing of heads; None for other sums."""
    terms = [arg for arg in node.args if isinstance(arg, Node) and arg.products]
    if len(terms) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    for whole, other in (terms, terms[::-1]):
        mixing = origin(other)
        main = mixing.main() if mixing.product is None and mixing.op in CONVOLUTIONS | ops.CONTRACTIONS.keys() else None
        if main is None or origin(main) is not origin(whole) or whole.shape != node.shape:
            continue
        (step,) = _mixed(Link(mixing, main, (), ()))
        if isinstance(step, Mix):
            matrix = step.matrix
            return Mix(None if matrix is None else matrix + torch.eye(len(matrix)).to(matrix)), whole
    return None


OPERATIONS: dict[str, Callable[[Link], tuple[Step, ...]]] = {
    **dict.fromkeys(("mul", "div"), _multiplied),
    "neg": lambda link: _number(-1.0),
    **dict.fromkeys(("pow", "sqrt"), _raised),
    "addcmul": _added_product,
    **dict.fromkeys(("add", "sub", "rsub"), _summed),
    "tanh": lambda link: (Softcap(),),
    "masked_fill": lambda link: link.overwritten(1, link.node.number(2), keep=False),
    "where": _selected,
    "index_put": _written,
    **dict.fromkeys(("copy", "overwrite", "constant_pad_nd"), _put_together),
    **dict.fromkeys((*ops.CONTRACTIONS, *CONVOLUTIONS), _mixed),
    **dict.fromkeys(ops.CLAMPS, _clamped),
}


def is_squared_length(node: Node) -> bool:
    """Return whether a tensor holds squared lengths, `(q ** 2).sum(-1)`, or the pairwise sum of those of q and k."""
    node = next((at for at in back(node) if at.pairs is not None), origin(node))
    if node.pairs is not None:
        return node.op == "add" and is_squared_length(node.pairs.left) and is_squared_length(node.pairs.right)
    inner = node.main() if node.act and not node.is_root else None
    if inner is None:
        return False
    if node.op == "sum":
        return _is_square(inner)
    return _is_square(node) and inner.op in ("linalg_vector_norm", "norm")


def _is_square(node: Node) -> bool:
    if node.is_root:
        return False
    return (node.op == "pow" and node.number(1) == 2) or (node.op == "mul" and node.args[0] is node.args[1])


def completed_distance(steps: tuple[Step, ...], factor: float) -> tuple[Step, ...] | None:
    """Return the steps that follow a squared distance written out as |q|^2 - 2 q.k + |k|^2, or None if it is none.

    Args:
        steps: innermost first; the first ones may complete q.k to the distance.
        factor: product of the factors on q and k.
    """
    last = max((i for i, step in enumerate(steps) if isinstance(step, Squares)), default=None)
    if last is None:
        return None
    inner, sign = steps[: last + 1], None
    for step in inner:
        if isinstance(step, Squares):
            sign = step.sign if sign is None else sign
            if step.sign != sign:
                return None
        elif isinstance(step, Scale) and step.factor.value is not None and step.factor.per_head is None:
            factor *= step.factor.value
            sign = None if sign is None else sign * step.factor.value
        else:
            return None
    if sign is None or not abs(factor + 2 * sign) <= 1e-6 * abs(factor):
        return None
    turned = () if sign == 1 else (Scale(Factor(sign, "logits", "number")),)
    return (*turned, *steps[last + 1 :])

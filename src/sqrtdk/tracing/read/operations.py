"""Reading the logits, operation by operation: what each is on the way from the softmax to the product.

What an operation means is a row of `OPERATIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.classify.mixing import CONVOLUTIONS, is_bias_of_mixing
from sqrtdk.tracing.classify.pairs import CURVES
from sqrtdk.tracing.classify.softmax import is_of_groups
from sqrtdk.tracing.probe.replays import part_between
from sqrtdk.tracing.read.distances import is_squared_length
from sqrtdk.tracing.read.factors import heads_axis, of_the_data, of_the_rows, read_factor
from sqrtdk.tracing.read.masks import HIDDEN, read_addend, read_overwritten
from sqrtdk.tracing.read.mixing import read_mixing
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import Clamp, Hide, Offset, Power, Scale, Softcap, Squares, Step, Unknown
from sqrtdk.tracing.steps.placed import Placed, to_softmax
from sqrtdk.tracing.steps.unknown import ZERO_ONE_FACTOR
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.constants import evaluate
from sqrtdk.tracing.watch.graph import EXTREMES, Node

_FILL = -1e3  # written over logits, a number below this hides


@dataclass(frozen=True, slots=True)
class Link:
    """One operation on the way.

    Attributes:
        node: its result.
        main: the operand that carries the product.
        views: the views after it, innermost first.
        later: the steps after it, innermost first.
    """

    node: Node
    main: Node
    views: tuple[Node, ...]
    later: tuple[Step, ...]

    @property
    def position(self) -> int | None:
        """Of the first other operand that is a tensor."""
        return next((i for i, arg in enumerate(self.node.args) if isinstance(arg, Node) and arg is not self.main), None)


Readers = Mapping[str, Callable[[Link], tuple[Step, ...]]]


# -- one reader an operation: its steps, outermost first ---------------------------------------------------------------


def unknown(link: Link) -> tuple[Step, ...]:
    """An operation without a reader; a part of an additive score is none."""
    if link.node.op in CURVES and not link.main.products:
        return ()
    return (Unknown(link.node.op),)


def _multiplied(link: Link) -> tuple[Step, ...]:
    node = link.node
    index = 1 if node.args[0] is link.main else 0
    trailing = len(node.shape) > 4 and node.shape[-1] == 1  # an axis that einsum adds
    axis = heads_axis(node.args[index], link.main)
    factor = read_factor(node, index, "logits", heads_axis=-4 if trailing and axis == -3 else axis)
    value = node.operands.get(index)
    value = evaluate(node.args[index]) if value is not None and value.is_meta else value
    if factor is None and node.op == "mul" and value is not None and _is_binary(value):
        # z * m before z + -1e4 * (1 - m) is the mask's first half; alone, it leaves hidden keys a logit of 0.
        return () if _hidden_later(value, link) else (Unknown(ZERO_ONE_FACTOR),)
    factor = of_the_data(node.args[index], factor or of_the_rows(node, index, "logits"))
    if factor is None or (node.op == "div" and index == 0):
        return (Unknown(f"{node.op} by a tensor"),)
    if factor.value is not None or value is None or value.is_meta:
        return (Scale(factor),)
    by = value.detach().to(torch.float64)
    return (Scale(factor, Placed(by.reciprocal() if node.op == "div" else by, link.views, node.shape)),)


def _raised(link: Link) -> tuple[Step, ...]:
    exponent = 0.5 if link.node.op == "sqrt" else link.node.number(1)
    distances = all(p.product is not None and p.product.distance for p in link.main.products)
    return (Power(exponent),) if exponent and distances else unknown(link)


def _added_product(link: Link) -> tuple[Step, ...]:
    """Addcmul: a + value * (logits * factor)."""
    node = link.node
    if node.args[0] is link.main:
        return unknown(link)
    index = 2 if node.args[1] is link.main else 1
    factor = read_factor(node, index, "logits", heads_axis=-3)
    number = float(node.kwargs.get("value", 1))
    if factor is None or factor.value is None:
        return unknown(link)
    scales = (Scale(factor), *(() if number == 1 else (Scale(Factor(number, "logits", "addcmul value")),)))
    return (*_addends(node.args[0], node.operands.get(0), 1.0, link.views, node.shape), *scales)


def _negated(link: Link) -> tuple[Step, ...]:
    return (Scale(Factor(-1.0, "logits", "number")),)


def _summed(link: Link) -> tuple[Step, ...]:
    node, position = link.node, link.position
    first, second = _signs(node)
    main, sign = (first, second) if node.args[0] is link.main else (second, first)
    turned = () if main == 1 else (Scale(Factor(main, "logits", "number")),)
    if position is None or is_bias_of_mixing(node, position):
        return turned  # a number added to every logit of a head changes nothing
    other, value = node.args[position], node.operands.get(position)
    own = bool(other.products & link.main.products)
    if (own and other.shape[-1:] == (1,)) or _is_own_maximum(other, link.main):
        known = value is not None and not value.is_meta
        offset = Placed(value * sign, link.views, node.shape) if known and value is not None else None
        return (Offset(offset), *turned)
    if is_squared_length(other):
        known = value is not None and not value.is_meta
        addend = Placed(value * sign, link.views, node.shape) if known and value is not None else None
        return (Squares("squares", addend, sign=sign), *turned)
    if own:
        return (Unknown("a sum with a function of the logits"), *turned)
    if _is_second_part(other, link.main):
        return (Unknown("a sum with another product of q and k"), *turned)
    return (*_addends(other, value, sign, link.views, node.shape), *turned)


def _is_second_part(other: Node, main: Node) -> bool:
    """Whether both are products of activations at one place: features of q and k in two parts, with one head_dim."""
    seconds = [product for product in other.products if product.product is not None]
    sites = {product.site for product in main.products}
    alike = all(p.site in sites and not p.learned and _of_projections(p) for p in seconds)
    return bool(seconds) and alike and not any(_is_shifted(product, other) for product in seconds)


def _is_shifted(product: Node, logits: Node) -> bool:
    """Whether keys of a product are others in the logits: distances, put to the keys by padding and slices.

    Dai et al. 2019, appendix B (Transformer-XL); so do Conformer encoders.
    """
    part = part_between(product, logits)
    if part is None:
        return False
    numbers = torch.arange(math.prod(product.shape), dtype=torch.float64, device=part.device).reshape(product.shape)
    try:
        moved = part.run(numbers)
    except Exception:  # an operation that does not take such numbers
        return False
    return moved.numel() != numbers.numel() or bool((moved.flatten() != numbers.flatten()).any())


def _of_projections(product: Node) -> bool:
    """Whether what was multiplied comes from projections, and not from a table of positions."""
    roots = [root.root for arg in product.args if isinstance(arg, Node) for root in arg.roots]
    return bool(roots) and all(root is not None and root.width is not None for root in roots)


def _signs(node: Node) -> tuple[float, float]:
    """The factors on both operands of a sum or a difference."""
    alpha = float(node.kwargs.get("alpha", 1))
    if node.op == "rsub":
        return -alpha, 1.0
    return 1.0, -alpha if node.op == "sub" else alpha


def _tanh(link: Link) -> tuple[Step, ...]:
    return (Softcap(),)


def _filled(link: Link) -> tuple[Step, ...]:
    node = link.node
    condition = node.operands.get(1)
    return (read_overwritten(condition, node.args[1], node.number(2), link.views, node.shape, keep=False),)


def _selected(link: Link) -> tuple[Step, ...]:
    node = link.node
    lowered = _lowered(node)
    if lowered is not None:
        hidden, number = lowered
        return (read_overwritten(node.operands.get(0), node.args[0], number, link.views, node.shape, keep=not hidden),)
    if all(isinstance(arg, Node) and _same_lineage(arg, link.main) for arg in node.args[1:3]):
        return unknown(link)
    kept = node.args[1] is link.main
    fill = node.number(2 if kept else 1)
    return (read_overwritten(node.operands.get(0), node.args[0], fill, link.views, node.shape, keep=kept),)


def _written(link: Link) -> tuple[Step, ...]:
    fill = link.node.number(2)
    return (Hide("bool", fill),) if fill is not None and fill < _FILL else unknown(link)


def _clamped(link: Link) -> tuple[Step, ...]:
    """A clamp that can bite; one at finfo.min only keeps infinities out."""
    node = link.node
    low, high = (node.number(1), node.number(2)) if node.op == "clamp" else (None, None)
    if node.op in ("clamp_min", "maximum"):
        low = node.number(1)
    elif node.op in ("clamp_max", "minimum"):
        high = node.number(1)
    bounds = [f"{bound:.4g}" if bound is not None and abs(bound) < -HIDDEN else "" for bound in (low, high)]
    return (Clamp(", ".join(bounds)),) if any(bounds) else ()


def _heads_mixed(link: Link) -> tuple[Step, ...]:
    return (read_mixing(link.node, link.main),)


def _put_together(link: Link) -> tuple[Step, ...]:
    """Chunks of logits, padded and written by slices into a new tensor (Longformer)."""
    return (Unknown("logits padded by chunks" if link.node.op == "constant_pad_nd" else "logits written by slices"),)


OPERATIONS: dict[str, Callable[[Link], tuple[Step, ...]]] = {
    "mul": _multiplied,
    "div": _multiplied,
    "neg": _negated,
    "pow": _raised,
    "sqrt": _raised,
    "addcmul": _added_product,
    "add": _summed,
    "sub": _summed,
    "rsub": _summed,
    "tanh": _tanh,
    "masked_fill": _filled,
    "where": _selected,
    "index_put": _written,
    **dict.fromkeys(("copy", "overwrite", "constant_pad_nd"), _put_together),
    **dict.fromkeys(ops.CONTRACTIONS, _heads_mixed),
    **dict.fromkeys(CONVOLUTIONS, _heads_mixed),
    **dict.fromkeys(ops.CLAMPS, _clamped),
}


# -- what they look at -------------------------------------------------------------------------------------------------


def _addends(
    other: Node, value: Tensor | None, alpha: float, views: tuple[Node, ...], shape: tuple[int, ...]
) -> tuple[Step, ...]:
    return read_addend(other, value, alpha, views, shape)[::-1]


def _lowered(node: Node) -> tuple[bool, float] | None:
    """Of where(c, z - 1e9, z) that the lowered logits stand where c is True, and by how much; None for any other."""
    for position, other in ((1, 2), (2, 1)):
        lower, logits = node.args[position], node.args[other]
        if isinstance(lower, Node) and lower.op in ("add", "sub") and lower.args[0] is logits:
            by = lower.number(1)
            by = by if by is None or lower.op == "add" else -by
            return (position == 1, by) if by is not None and by < _FILL else None
    return None


def _same_lineage(node: Node, main: Node) -> bool:
    """Whether both carry the product, or the score, and neither was made of numbers alone."""
    return bool(node.products & main.products) or bool(not main.products and node.roots & main.roots)


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


def _is_binary(value: Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _is_own_maximum(other: Node, main: Node) -> bool:
    """Z - max(z): the softmax does not see it."""
    if is_of_groups(other):
        return bool(other.products & main.products)
    while other.op in ops.VIEWS | ops.SAME | {"masked_fill", "maximum"}:
        parent = other.main()
        if parent is None:
            return False
        other = parent
    lineage = "products" if main.products else "roots"
    return other.op in EXTREMES and bool(getattr(other, lineage) & getattr(main, lineage))


def beside_product(node: Node, views: tuple[Node, ...]) -> tuple[Step, ...]:
    """What baddbmm and addmm do besides the product, outermost first."""
    if node.op not in ("baddbmm", "addmm", "addbmm"):
        return ()
    alpha, beta = float(node.kwargs.get("alpha", 1)), float(node.kwargs.get("beta", 1))
    steps: tuple[Step, ...] = ()
    if beta:
        steps = _addends(node.args[0], node.operands.get(0), beta, views, node.shape)
    return steps if alpha == 1 else (*steps, Scale(Factor(alpha, "logits", f"{node.op} alpha")))

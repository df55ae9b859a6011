"""What lies between product and softmax, as terms with their values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.axes import Axes
from sqrtdk.graphs.graph import SAME, Graph
from sqrtdk.graphs.layout import Values
from sqrtdk.graphs.logits import LogitLink
from sqrtdk.tracing.read.masks import bias_name, hidden_entries
from sqrtdk.tracing.read.patterns import distinct, pattern
from sqrtdk.tracing.tensors import Term

RESHAPES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
LIMITS = ("Clip", "Max", "Min")
_NEAR = 1e-6  # two numbers of one softcap, each rounded to float32


def wanted(graph: Graph, link: LogitLink) -> tuple[list[str], list[str]]:
    """Names of tensors, and of shapes, that the reading of a link needs."""
    names = [name for name in (link.other, link.condition) if name and not _is_shift(graph, link)]
    if link.node.op in LIMITS:
        names += [link.source, link.made]
    if link.node.op == "Cast":
        names = []
    return [name for name in names if graph.array(name) is None], [link.source, link.made]


def _is_shift(graph: Graph, link: LogitLink) -> bool:
    """Whether what is taken off is each row's largest logit, which no weight depends on."""
    node = graph.made_by.get(graph.through(link.other)) if link.other else None
    return link.node.op == "Sub" and node is not None and node.op == "ReduceMax" and node.inputs[0] == link.source


def read_terms(graph: Graph, links: tuple[LogitLink, ...], values: Values, axes: Axes) -> tuple[Term, ...]:
    """The terms of an attention.

    Args:
        graph: that ran.
        links: from the product to the softmax.
        values: of the run.
        axes: of the logits.

    Raises:
        UnsupportedError: the logits were reshaped to what is not (batch, heads, rows, keys).
    """
    terms: list[Term] = []
    for link in links:
        op = link.node.op
        if op in RESHAPES:
            before, after = values.shape(link.source), values.shape(link.made)
            if before[-2:] != after[-2:]:
                raise UnsupportedError(f"logits {before} were reshaped to {after}: their rows are not the queries")
        elif op not in SAME and not _is_shift(graph, link):
            terms += _terms(link, values, axes)
    return _with_softcaps(terms)


def _terms(link: LogitLink, values: Values, axes: Axes) -> list[Term]:
    op, lead = link.node.op, values.shape(link.source)[:-2]
    if op in ("Mul", "Div"):
        return [_scale(op, values.tensor(link.other), axes, lead)]
    if op == "Tanh":
        return [Term("tanh", None)]
    if op in LIMITS:
        before, after = values.tensor(link.source), values.tensor(link.made)
        return [] if torch.equal(before, after) else [Term("unknown", None, op)]
    if op == "Concat":
        return _sinks(link, values, axes)
    if op == "Where":
        return [_written(link, values, axes, lead)]
    added = values.tensor(link.other)
    return _added(-added if op == "Sub" else added, axes, lead)


def _scale(op: str, factor: Tensor, axes: Axes, lead: tuple[int, ...]) -> Term:
    number = factor.double()
    number = 1 / number if op == "Div" else number
    return Term("scale", float(number) if number.numel() == 1 else axes.logits(number, lead))


def _added(added: Tensor, axes: Axes, lead: tuple[int, ...]) -> list[Term]:
    """A bias, a mask, or both in one tensor."""
    placed = axes.logits(added.reshape(1, 1) if not added.dim() else added, lead)
    if placed.dtype is torch.bool or not placed.is_floating_point():
        return [Term("bias", placed, "bias")]
    hidden, fill = hidden_entries(placed.float())
    name = bias_name(placed.float(), hidden)
    terms = []
    if name is not None:
        terms.append(Term("bias", placed if hidden is None else placed.masked_fill(hidden, 0.0), name))
    if hidden is not None and fill is not None:
        visible = distinct(~hidden)
        terms.append(Term("mask", visible, pattern(visible) or "mask", fill, added=True))
    return terms


def _written(link: LogitLink, values: Values, axes: Axes, lead: tuple[int, ...]) -> Term:
    """A number that is written over the logits of hidden keys."""
    condition, other = values.tensor(link.condition), values.tensor(link.other)
    if other.numel() != 1 and not bool((other == other.flatten()[0]).all()):
        return Term("unknown", None, "Where")
    shown = condition if link.kept else ~condition
    visible = distinct(axes.logits(shown.reshape(1, 1) if not shown.dim() else shown, lead))
    return Term("mask", visible, pattern(visible) or "mask", float(other.flatten()[0]))


def _sinks(link: LogitLink, values: Values, axes: Axes) -> list[Term]:
    """One logit a head beside those of the keys."""
    other = values.tensor(link.other)
    if other.dim() < 2 or other.shape[-1] != 1 or link.node.attributes.get("axis", -1) not in (-1, other.dim() - 1):
        return [Term("unknown", None, "Concat")]
    placed = axes.logits(other, tuple(other.shape[:-2]))[..., 0]
    one = placed[:1, :, :1]
    if not bool((placed == one).all()):
        return [Term("unknown", None, "Concat")]
    return [Term("sinks", one.flatten().expand(axes.heads))]


def _with_softcaps(terms: list[Term]) -> tuple[Term, ...]:
    """The terms with c * tanh(a * z) as a softcap, of the scaled logits where a is not 1 / c."""
    made: list[Term] = []
    waiting = list(terms)
    while waiting:
        term = waiting.pop(0)
        if term.name != "tanh":
            made.append(term)
            continue
        after = waiting[0].value if waiting and waiting[0].name == "scale" else None
        cap = 1.0
        if isinstance(after, float) and after > 0:
            cap = after
            waiting.pop(0)
        scale = cap
        if made and made[-1].name == "scale" and isinstance(made[-1].value, float):
            before = made.pop().value
            assert isinstance(before, float)
            scale = before * cap
        if not math.isclose(scale, 1.0, rel_tol=_NEAR):
            made.append(Term("scale", scale))
        made.append(Term("softcap", cap))
    return tuple(made)

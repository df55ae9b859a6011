"""Parameters between the projections and the softmax: gains of q and k, temperatures, tables and slopes of a bias.

A trace has the operations from the projections' outputs and the parameters to the logits. They are run again in
float64, without casts and without `detach`, and their derivatives take the formula's gradients back to the parameters:

    J(theta) = sum of dz . z(theta) + dv . v(theta)        dtheta = dJ / dtheta

with dz of the logits that enter the softmax. For a fused kernel dq . q(theta), dk . k(theta) and dz . mask(theta) take
their place. Bounds on the entries of dz and dv are taken back with random signs: root sum of squares times the root of
their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.laws.backward.formula import FormulaGradients
from sqrtdk.laws.backward.logits import unit_of
from sqrtdk.tracing.calls.places import ValueOperands, places_of
from sqrtdk.tracing.probe.replays import run_again
from sqrtdk.tracing.readback.orient import product_operands
from sqrtdk.tracing.readback.reading import Logits, Reading, Vectors
from sqrtdk.tracing.tape.graph import ancestors
from sqrtdk.tracing.tape.node import Node
from sqrtdk.tracing.tape.store import NodeStore

LOGITS, VALUES = "logits", "v"
_MOST_LEARNED_LOGITS = 2**21  # of an attention whose parameters are judged
_PROBES = 4  # random signs by which bounds are taken back
_PATH_ROUNDINGS = 64.0  # of the operations between parameters and logits
_AGREES = 1e-3  # relative difference of the logits that are computed again


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """Where parameters arrive: "logits", "q", "k" or "v", its node, its layout (B, H, L, .), and its values there."""

    name: str
    node: Node
    arrange: Callable[[Tensor], Tensor]
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LearnedPath:
    """The way of parameters to the logits and values of an attention.

    Attributes:
        parameters: Names of all parameters on the way behind the projections, and their nodes.
        before: Names of those that enter q, k or v; the others enter the logits behind the product.
        projections: Names of the weights of all projections on the way.
        ends: Where they arrive; empty if that is not known.
        leaves: Values of tensors that the tape does not hold.
    """

    parameters: Mapping[str, Node]
    before: frozenset[str]
    projections: frozenset[str]
    ends: tuple[_End, ...]
    leaves: Mapping[Node, Tensor]

    def gradients(self, tensors: Mapping[str, Tensor], of: FormulaGradients) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the formula's gradients of parameters and their bounds on rounding; {} if they can't be computed.

        Args:
            tensors: The parameters that are wanted, by name.
            of: The formula's gradients at the ends.
        """
        try:
            with torch.enable_grad():
                return self._gradients(tensors, of)
        except Exception:  # an operation that can't run again, or has no derivative
            return {}

    def _gradients(self, tensors: Mapping[str, Tensor], of: FormulaGradients) -> dict[str, tuple[Tensor, Tensor]]:
        known = {
            name: x.detach().to(torch.float64).requires_grad_(name in tensors) for name, x in self._values().items()
        }
        wanted = [known[name] for name in tensors]
        again = run_again(
            [end.node for end in self.ends], {**self.leaves, **{self.parameters[n]: known[n] for n in known}}
        )
        outputs, given, errors = [], [], []
        for end in self.ends:
            value = end.arrange(again[end.node])
            if not _agrees(value.detach(), end.values):
                return {}
            if value.requires_grad:
                gradient, allowed = of.of(end.name, value.shape[1] if end.name in ("k", "v") else None)
                outputs.append(value.expand(gradient.shape))
                given.append(gradient)
                errors.append(allowed + _PATH_ROUNDINGS * unit_of("float32") * gradient.abs())
        if not outputs:
            return {}

        def back(cotangents: Sequence[Tensor]) -> list[Tensor]:
            found = torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True, allow_unused=True)
            return [torch.zeros_like(x) if one is None else one for x, one in zip(wanted, found, strict=True)]

        generator = torch.Generator(device="cpu").manual_seed(0)

        def signed(x: Tensor) -> Tensor:
            return x * (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1).to(x.device)

        right = back(given)
        squares = [torch.zeros_like(x) for x in wanted]
        for _ in range(_PROBES):
            squares = [a + b**2 for a, b in zip(squares, back([signed(x) for x in errors]), strict=True)]
        count = sum(x.numel() for x in errors)
        bounds = [2 * (count * square.amax() / _PROBES).sqrt().expand_as(square) for square in squares]
        return {
            name: (value, bound)
            for name, value, bound in zip(tensors, right, bounds, strict=True)
            if bool(bound.any()) and bool(value.isfinite().all()) and bool(bound.isfinite().all())
        }

    def _values(self) -> dict[str, Tensor]:
        return {name: self.leaves[node] for name, node in self.parameters.items() if node in self.leaves}


def _agrees(again: Tensor, values: Tensor) -> bool:
    one, other = again.to(torch.float64), values.to(torch.float64)
    if one.shape != other.shape:
        return False
    seen = other.abs() < 1e9  # of hidden keys a float32 logit has lost what it was
    size = other[seen].abs().amax() if bool(seen.any()) else 0.0
    return bool(((one - other)[seen].abs() <= _AGREES * size).all())


def learned_path(reading: Reading, used: ValueOperands | None, nodes: Sequence[Node], store: NodeStore) -> LearnedPath:
    """Return the way of the parameters of an attention that has just run.

    Args:
        reading: What was read of the attention.
        used: The operands of the product of weights and values.
        nodes: The node of its logits first, or those of a kernel's operands.
        store: The nodes of the run.
    """
    ends = (None if used is None else _ends(reading, used, nodes)) or ()
    every = _behind([end.node for end in ends] or nodes)
    parameters = {node.label: node for node in every if node.op == "parameter" and node.label}
    vectors = [end.node for end in ends if end.name != LOGITS]
    if ends and isinstance(reading.operands, Logits):
        vectors += product_operands(reading.operands.product)
    entering = _behind(vectors)
    before = frozenset(name for name, node in parameters.items() if node in entering)
    leaves = store.tensors_of({node for node in every if not (node.args or node.is_root)})
    projections = frozenset(node.label for node in every if node.is_root and node.label)
    return LearnedPath(parameters, before, projections, ends, leaves)


def _behind(nodes: Sequence[Node]) -> set[Node]:
    """Return nodes, all that they are computed from up to the projections, and tables whose rows they read."""
    every = {node for end in nodes for node in ancestors(end)}
    return every | {node.root.lookup[0] for node in every if node.root is not None and node.root.lookup is not None}


def _ends(reading: Reading, used: ValueOperands, nodes: Sequence[Node]) -> tuple[_End, ...] | None:
    layout, operands = reading.layout, reading.operands
    places = None
    if reading.blocks or layout.batch * layout.heads * layout.rows * layout.columns > _MOST_LEARNED_LOGITS:
        return None
    if isinstance(operands, Logits | Vectors) and reading.output is not None:
        places = places_of(reading, used)
    if places is None or isinstance(places, str):
        return None
    query, key, value = (
        _End(name, place.node, place.arrange, place.arrange(place.values.detach()))
        for name, place in zip(("q", "k", VALUES), places, strict=True)
    )
    if isinstance(operands, Logits):
        return _End(LOGITS, nodes[0], operands.arrange, operands.arrange(operands.values.detach())), value
    mask = None if used.kernel is None else used.kernel.nodes.get("attn_mask")
    if mask is None or not isinstance(operands, Vectors):
        return query, key, value
    given = used.kernel.arguments["attn_mask"].detach()  # type: ignore[union-attr]

    def at_logits(x: Tensor) -> Tensor:
        x = x[(None,) * (4 - x.dim())]
        return x.flatten(0, x.dim() - 4)

    return query, key, value, _End(LOGITS, mask, at_logits, at_logits(given))

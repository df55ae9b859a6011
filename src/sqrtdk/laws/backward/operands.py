"""The places in autograd's graph whose gradients are judged: q, k, v, biases, sinks, learned factors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from sqrtdk.audit.configs import module_at
from sqrtdk.laws.backward.graph import graph_place, is_one_factor, nodes_behind, nodes_inside, readers_behind
from sqrtdk.laws.backward.handles import Edge, Reached, edge_of, key_of
from sqrtdk.laws.backward.traced import TracedHandles
from sqrtdk.tracing.tensors import CallTensors

_LEARNED = "parameter "  # of the source of a factor


def read_pairs(run: TracedHandles) -> list[tuple[CallTensors, Reached | None]]:
    """Return each attention of a finished trace with its handles: of an operand, the newest copy that the output reads.

    What is made of k between the products, as a copy for a cache, is newer than what the product reads.
    """
    pairs = run.pairs()
    for _, reached in pairs:
        if reached is not None and reached.output is not None:
            ends = {graph_place(one.edge).node for copies in reached.copies.values() for one in copies}
            readers = readers_behind([graph_place(reached.output.edge).node], ends)
            read = {place for node in {*chain(*readers.values())} for place in node.next_functions}
            for name, copies in reached.copies.items():
                places = [(one, graph_place(one.edge)) for one in copies]
                there = (one for one, place in places if (place.node, place.output_nr) in read)
                reached.handles[name] = next(there, copies[0])
            reached.rescaled = reached.rescaled if _is_rescaled(reached) else None
    return pairs


def _is_rescaled(reached: Reached) -> bool:
    """Return whether the output is divided by, or multiplied with, what is computed from its operands."""
    assert reached.output is not None
    if reached.rescaled is None:
        return False
    output = graph_place(reached.output.edge).node
    between = nodes_inside([graph_place(reached.rescaled.edge).node], {output})
    factors = {earlier for node in between for earlier, _ in node.next_functions} - {None, output, *between}
    operands = {graph_place(handle.edge).node for handle in reached.handles.values()}
    return not operands.isdisjoint(readers_behind(factors, operands))


def at_last_output(reached: Reached) -> Reached:
    """Return an attention whose output is the rescaled one, if there is one: gradients reach q and k through both."""
    return reached if reached.rescaled is None else replace(reached, output=reached.rescaled, lse_cut=False)


def operand_edges(reached: Reached, module: nn.Module, factors: Mapping[str, Tensor]) -> dict[str, Edge]:
    """Return the places by the names of their gradients: "q", "bias 2", "sinks", "factor attn.tau".

    Args:
        reached: The attention.
        module: The model.
        factors: Learned factors on the logits, by name.
    """
    edges: dict[str, Edge] = {name: handle.edge for name, handle in reached.handles.items()}
    edges |= {f"bias {number}": bias for number, bias in reached.bias.items()}
    edges |= {} if (sinks := _sinks(reached, module)) is None else {"sinks": sinks}
    return edges | {f"factor {name}": edge_of(parameter) for name, parameter in factors.items()}


def one_tensor(edges: Mapping[str, Edge]) -> tuple[tuple[str, str], ...]:
    """Return pairs of q, k and v that are one tensor, whose gradient is the sum."""
    return tuple(
        (one, other) for one, other in (("q", "k"), ("q", "v"), ("k", "v"))
        if one in edges and other in edges and key_of(edges[one]) == key_of(edges[other])
    )  # fmt: skip


def start_of(reached: Reached, name: str, parameters: Mapping[str, nn.Parameter]) -> Edge | None:
    """Return where an operand without a handle begins: what its projection returned, or a weight that trains."""
    vector = {"q": reached.call.query, "k": reached.call.key, "v": reached.call.value}[name]
    if name in reached.projected:
        return reached.projected[name].edge
    weight = None if vector.projection is None else parameters.get(vector.projection.name)
    return edge_of(weight) if weight is not None and weight.requires_grad else None


def copy_is_unsure(reached: Reached) -> bool:
    """Return whether a bias reads q, k or v: its newest copy may be the bias's then, and not the product's."""
    biases = [nodes_behind(edge.node) for edge in reached.bias.values() if isinstance(edge, GradientEdge)]
    copies = [one.edge for of_one in reached.copies.values() if len(of_one) > 1 for one in of_one]
    return any(edge.node in behind for edge in copies if isinstance(edge, GradientEdge) for behind in biases)


def lse_is_cut_off(reached: Reached, operands: Collection[str]) -> tuple[str, ...]:
    """Return the operands whose gradient lacks that of lse, which the graph reads and which has none itself."""
    return tuple(name for name in ("q", "k") if name in operands) if reached.lse is None and reached.lse_cut else ()


def learned_factors(call: CallTensors, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the parameters that multiply the logits as they are: one number, or one per head."""
    found: dict[str, Tensor] = {}
    for factor in call.call.scale.factors if call.call is not None else ():
        name = factor.source.removeprefix(_LEARNED)
        parameter = parameters.get(name) if factor.source.startswith(_LEARNED) else None
        if parameter is None or not parameter.requires_grad:
            continue
        numbers = [factor.value] if factor.per_head is None else [*factor.per_head]
        held = parameter.detach().flatten().tolist()
        if len(held) == len(numbers) and all(
            one is not None and abs(one - other) <= 1e-5 * abs(other) for one, other in zip(numbers, held, strict=True)
        ):
            found[name] = parameter
    return found


def sure_factors(reached: Reached, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the learned factors whose gradient the formula gives: each multiplies q, k or their product, once.

    One that multiplies a bias or a capped logit as well has another; that no gradient reaches it shows nevertheless.
    """
    assert reached.output is not None
    start, terms = graph_place(reached.output.edge).node, reached.call.terms or ()
    bent = next((number for number, term in enumerate(terms) if term.name in ("bias", "softcap")), len(terms))
    late = {term.detail for term in terms[bent:] if term.name == "scale"}
    sources = [factor.source for factor in (reached.call.call.scale.factors if reached.call.call is not None else ())]
    sure = {}
    for name, parameter in factors.items():
        leaf, source = graph_place(edge_of(parameter)).node, f"{_LEARNED}{name}"
        once = sources.count(source) == 1 and source not in late and is_one_factor(start, leaf)
        if once or leaf not in nodes_behind(start):
            sure[name] = parameter
    return sure


def _sinks(reached: Reached, module: nn.Module) -> Edge | None:
    """Return the place of the sinks: what the run reads, or the parameter of the attention with their values."""
    term = next((term for term in reached.call.terms or () if term.name == "sinks"), None)
    if reached.sinks is not None or term is None or not isinstance(term.value, Tensor):
        return reached.sinks
    part = module_at(module, reached.call.site)
    for parameter in () if part is None else part.parameters(recurse=False):
        plain = parameter.detach().flatten().to(torch.float64)
        if (
            parameter.requires_grad
            and plain.shape == term.value.shape
            and torch.allclose(plain, term.value, 1e-4, 1e-6)
        ):
            return edge_of(parameter)
    return None

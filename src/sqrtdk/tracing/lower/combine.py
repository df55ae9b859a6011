"""Carries the roles of operands through elementwise operations and views: logits, weights, or q, k and v."""

from __future__ import annotations

from dataclasses import replace

from sqrtdk.tracing.lower.contract import is_scored, sum_values
from sqrtdk.tracing.lower.mixing import combine_weights
from sqrtdk.tracing.lower.pairs import is_additive, note_pairs
from sqrtdk.tracing.lower.softmax import is_maximum, is_softmax_by_hand, may_be_numerator, sums_values
from sqrtdk.tracing.lower.sums import note_sum, sums_to_products
from sqrtdk.tracing.lower.vectors import rescales_projection, summands, without_tables_and_gates
from sqrtdk.tracing.lower.weights import carry_weights, dropout_of, join_weights
from sqrtdk.tracing.probe.norms import may_normalise
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import alias
from sqrtdk.tracing.tape.node import Node, Weights
from sqrtdk.tracing.tape.recorder import RecordedOutput, Scene

_KEEPING_INPUT = frozenset(
    {"exp", "exp2", "_log_softmax"}
)  # keep their input: it is the logits if they end in a softmax
_MATRIX_INVERSES = frozenset({"linalg_pinv", "linalg_inv_ex", "_linalg_svd", "_linalg_eigh", "_linalg_solve_ex"})


def combine_roles(scene: Scene, made: RecordedOutput, parents: list[Node]) -> None:
    """Set the role of an elementwise operation's or view's output from its operands.

    It carries logits if an operand does, else weights if an operand does, else q, k and v.

    Args:
        scene: state of the trace.
        made: the output, whose node is changed.
        parents: the nodes of the operands.
    """
    node = made.node
    if node.op in ops.CACHE_WRITES and _written_to_cache(node):
        return
    active = [p for p in parents if p.act]
    if node.op in _KEEPING_INPUT:
        sums_to_products(active[0], edges=True)
    node.products = frozenset[Node]().union(*(p.products for p in active))
    if is_softmax_by_hand(scene, made):
        return
    if node.products:
        _carry_logits(made)
    elif any(p.weights is not None for p in active):
        _carry_weights(scene, made, active)
    else:
        _carry_vectors(scene, made, active)


def _written_to_cache(node: Node) -> bool:
    """Whether the node writes new keys into a cache (zeros or earlier keys); it then takes the new keys' lineage."""
    position = ops.CACHE_WRITES[node.op]
    new = node.args[position] if position < len(node.args) else None
    if not isinstance(new, Node) or not new.act or any(p.products or p.weights for p in node.parents()):
        return False
    if node.op != "slice_scatter" and new.roots & node.args[0].roots:  # k[k < -8] = 2 * k[k < -8] adds no keys
        return False
    node.args = (new,)
    node.roots, node.terms = new.roots, new.terms
    return True


def _carry_logits(made: RecordedOutput) -> None:
    node = made.node
    main = node.main()
    keeps_input = node.op in _KEEPING_INPUT
    node.operands = {i: alias(t) for i, t in made.tensors.items() if keeps_input or node.args[i] is not main}


def _carry_weights(scene: Scene, made: RecordedOutput, active: list[Node]) -> None:
    """Carries weights through casts, dropout and head masks; (w[..., None] * v).sum(-2) is a value product."""
    node, tensors = made.node, made.tensors
    if combine_weights(node, active, scene.entries):
        return
    carriers = [p for p in active if p.weights is not None]
    source = next((p for p in carriers if p.shape == node.shape), carriers[0])  # in w / w.sum() this is w
    before = source.weights
    assert before is not None
    if _ends(scene, made, source, before):
        return
    softmax_run = before.softmax_run
    others = [p for p in active if p.softmax_run is not softmax_run]
    joined = join_weights(node, source, softmax_run, before.weight_steps) if others and not before.weighted else None
    weight_steps = before.weight_steps if others else carry_weights(node, made.tensor, tensors, source, softmax_run)
    node.weights = replace(before, weight_steps=weight_steps)
    drop = dropout_of(node)
    softmax_run.dropout = softmax_run.dropout or (drop[0] if drop is not None else 0.0)
    spread = node.shape != softmax_run.entry.shape and is_scored(softmax_run.node)
    if node.op == "mul" and others and (spread or softmax_run.edges):
        values = next((t for i, t in tensors.items() if node.args[i] in others), None)
        node.weights = replace(node.weights, weighted=True, values=None if values is None else alias(values))
    elif joined is not None:  # p + adjacency, p * gate: a tensor from the inputs joins the weights
        node.weights = replace(before, weight_steps=joined)
    elif others:
        scene.store.cut(node, made.tensor)
        return
    elif before.weighted and node.op in ops.PASSING:
        node.weights = replace(node.weights, weighted=True, values=before.values)
    if node.op in ops.VIEWS:
        node.operands = {i: alias(t) for i, t in tensors.items() if node.args[i] is not source}
    elif any(parent is not source for parent in node.parents()):
        node.args = (source,)


def _ends(scene: Scene, made: RecordedOutput, source: Node, before: Weights) -> bool:
    """Whether the weights end here: multiplied with values and now summed, or inverted (Nystroem)."""
    node = made.node
    if before.weighted and (node.op == "sum" or sums_values(node)):
        sum_values(scene, made, source)
    elif node.op in _MATRIX_INVERSES:
        softmax_run = before.softmax_run
        if not softmax_run.entry.attention:
            softmax_run.entry.attention = True
            softmax_run.weight_steps = before.weight_steps
            scene.listener.eager(softmax_run, made.tensor, made.tensor)
        scene.store.cut(node, made.tensor, inverse=True)
    else:
        return False
    return True


def _flows(operand: object) -> bool:
    """Whether an operand carries q, k or v; the maximum of a row does not."""
    return isinstance(operand, Node) and operand.act and not is_maximum(operand)


def _carry_vectors(scene: Scene, made: RecordedOutput, active: list[Node]) -> None:
    """Carries q, k or v on; a sum of two branches begins a new lineage."""
    node = made.node
    if rescales_projection(scene, made):
        return
    note_pairs(node)
    note_sum(scene, made)
    active = without_tables_and_gates(node, active, made.tensors, scene.store.projected)
    first = node.main()
    # A further term of an additive score, or its maximum taken off: the lineage of the score goes on.
    scored = first is not None and len(active) > 1 and is_additive(first)
    together = scored or node.op in ("cat", "stack")
    if len({p.roots for p in active}) > 1 and not together:
        node.terms = sum(p.terms for p in active)
        node.branches = summands(node, scene.store.projected)
        scene.store.cut(node, made.tensor)
        return
    node.roots = frozenset[Node]().union(*(p.roots for p in active))
    node.terms = max((p.terms for p in active), default=0)
    is_numerator = node.op == "exp" and may_be_numerator(active[0])
    met = [i for i, arg in enumerate(node.args) if is_numerator or not _flows(arg) or (scored and i > 0)]
    node.operands = {i: alias(t) for i, t in made.tensors.items() if i in met}
    if may_normalise(node):
        scene.store.keep(node, made.tensor)

"""Attentions that are one operator, ONNX's own and onnxruntime's: what goes in and out is seen, the rest is told.

Scale, softcap, causal flag and window are attributes, masks and biases are inputs. The order is scale, softcap, bias,
mask; a causal mask is upper-left, after the keys of a cache. What an operator is given beyond that is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.calls import Plan
from sqrtdk.graphs.graph import Graph, Node
from sqrtdk.graphs.layout import Values
from sqrtdk.graphs.packed import arrangements, by_heads, sources
from sqrtdk.graphs.vectors import Way, read_vector, walk
from sqrtdk.tracing.read.masks import bias_name, hidden_entries
from sqrtdk.tracing.read.patterns import pattern
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector, Waypoint

MICROSOFT = "com.microsoft"
_FILTER = -10000.0  # what com.microsoft's operators add to hidden logits, where they are not told


@dataclass(frozen=True, slots=True)
class Signature:
    """Of an operator, numbers of the inputs that are read.

    Attributes:
        bias: of the bias of the three projections; -1 where there is none.
        padding: of the mask over keys.
        added: of what is added to the logits, or a bool mask.
        past: of the cached keys, and of the cached values.
        refused: of those that are not read, with their names.
        query_heads: name of the attribute.
        key_heads: the same.
        causal: the same.
        cap: the softcap's; "" where there is none.
    """

    bias: int
    padding: int
    added: int
    past: tuple[int, ...]
    refused: dict[int, str]
    query_heads: str
    key_heads: str
    causal: str
    cap: str = ""


OPERATORS = {
    ("", "Attention"): Signature(
        -1, -1, 3, (4, 5), {6: "nonpad_kv_seqlen"}, "q_num_heads", "kv_num_heads", "is_causal", "softcap"
    ),
    (MICROSOFT, "MultiHeadAttention"): Signature(
        3, 4, 5, (6, 7), {9: "cache_indirection"}, "num_heads", "num_heads", "unidirectional"
    ),
    (MICROSOFT, "GroupQueryAttention"): Signature(
        -1, -1, 10, (3, 4), {9: "position_ids", 12: "k_scale", 13: "v_scale"}, "num_heads", "kv_num_heads", "causal",
        "softcap",
    ),
    (MICROSOFT, "Attention"): Signature(
        2, 3, 5, (4,), {6: "past_sequence_length"}, "num_heads", "num_heads", "unidirectional"
    ),
}  # fmt: skip
FLAGS = ("smooth_softmax", "do_rotary_interleaved", "qk_matmul_output_mode", "k_quant_type", "v_quant_type")


def plan_operator(graph: Graph, node: Node) -> Plan:
    """What is needed of an attention that is one operator.

    Raises:
        UnsupportedError: it is given what is not read.
    """
    signature = OPERATORS[node.domain, node.op]
    own = node.op == "Attention" and node.domain == MICROSOFT
    odd = [name for index, name in signature.refused.items() if node.input(index)]
    odd += [name for name in FLAGS if node.attributes.get(name) not in (None, 0, "NONE")]
    cached = any(node.input(index) for index in signature.past)
    if cached and (own or len(node.outputs) < 3 or not all(node.outputs[1:3])):
        odd.append("a cache of keys whose whole it does not return")
    names = None if own else sources(node)
    if not own and names is None:
        odd.append("k or v left out")
    if own and node.attributes.get("do_rotary"):
        odd.append("a rotation inside")
    if odd:
        raise UnsupportedError(f"{node.op} with {', '.join(odd)}")
    rotated = bool(node.attributes.get("do_rotary"))
    from_cache = cached or rotated
    ways = tuple(walk(graph, name) for name in names or ())
    tensors = [name for name in (*node.inputs, node.outputs[0]) if name]
    tensors += [name for name in node.outputs[1:3] if name and from_cache]
    shapes: list[str] = []
    for way in ways:
        more, sizes = way.wanted(graph)
        tensors += more
        shapes += sizes

    def read(values: Values, _batch: int | None) -> CallTensors:
        heads = int(node.attributes.get(signature.query_heads, 0)), int(node.attributes.get(signature.key_heads, 0))
        vectors = _projected(node, values, heads[0]) if own else _vectors(node, ways, values, heads, signature.bias)
        past = values.shape(node.input(signature.past[0]))[-2] if cached else 0
        if from_cache:
            vectors = _with_cache(node, vectors, values, rotated, past)
        return _call(node, signature, vectors, values, past)

    wanted = tuple(name for name in tensors if graph.array(name) is None)
    cache = (node.input(signature.past[0]),) if cached else ()
    return Plan(node.site, node.number, wanted, (*shapes, *cache), read, derived=own)


Vectors = tuple[Vector, Vector, Vector]


def _vectors(node: Node, ways: tuple[Way, ...], values: Values, heads: tuple[int, int], bias: int) -> Vectors:
    places = arrangements(node, *heads)
    query, key, value = (read_vector(way, values, place) for way, place in zip(ways, places, strict=True))
    if bias < 0 or not node.input(bias):
        return query, key, value
    whole = values.tensor(node.input(bias))
    sizes = [vector.values.shape[1] * vector.values.shape[3] for vector in (query, key, value)]
    parts = torch.split(whole, sizes)
    return (_biased(query, parts[0]), _biased(key, parts[1]), _biased(value, parts[2]))


def _biased(vector: Vector, bias: Tensor) -> Vector:
    """With a bias that the operator adds, as the projection's own."""
    added = bias.reshape(vector.values.shape[1], -1)
    steps, projection = vector.steps, vector.projection
    if steps or projection is None or projection.bias is not None or vector.factor != 1.0:
        return replace(vector, values=vector.values + added[:, None], projected=None, projection=None)
    made = vector.values + added[:, None]
    return replace(vector, values=made, projected=made, projection=replace(projection, bias=added))


def _projected(node: Node, values: Values, heads: int) -> Vectors:
    """q, k and v of an operator that holds the projections: computed in float64, and rounded as it rounds them."""
    given, weight = values.tensor(node.inputs[0]), values.tensor(node.inputs[1])
    bias = values.tensor(node.inputs[2]) if node.input(2) else None
    sizes = [int(size) for size in node.attributes.get("qkv_hidden_sizes", [weight.shape[1] // 3] * 3)]
    made = []
    first = 0
    for size in sizes:
        columns = slice(first, first + size)
        first += size
        product = given.double() @ weight[:, columns].double()
        product = product if bias is None else product + bias[columns].double()
        projected = by_heads(heads)(product.to(given.dtype))
        features = torch.arange(columns.start, columns.stop).reshape(heads, -1)
        own = bias[features] if bias is not None else None
        label = f"{node.scope}.weight" if node.scope else node.inputs[1]
        projection = Projection(label, given, weight.mT[features], own, features)
        made.append(Vector(projected, projected=projected, projection=projection))
    return made[0], made[1], made[2]


def _with_cache(node: Node, vectors: Vectors, values: Values, rotated: bool, past: int) -> Vectors:
    """The query as it meets the keys; keys and values as the operator returns them, those of the cache among them."""
    query, key, value = vectors
    if len(node.outputs) < 3 or not all(node.outputs[1:3]):
        raise UnsupportedError(f"{node.op} with a rotation inside, and without its keys as an output")
    keys, whole = values.tensor(node.outputs[1]), values.tensor(node.outputs[2])
    if rotated:
        cos, sin = (values.tensor(node.inputs[index]) for index in (7, 8))
        interleaved = bool(node.attributes.get("rotary_interleaved", 0))
        turned = _turn(query.values, cos[past:], sin[past:], interleaved)
        query = replace(query, values=turned, steps=(*query.steps, Waypoint("rope", "", turned)))
        key = replace(key, steps=(*key.steps, Waypoint("rope", "", keys)))
    if past:
        key, value = Vector(keys), Vector(whole)
    return query, replace(key, values=keys), replace(value, values=whole)


def _turn(vectors: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """(B, H, L, E) turned by the first L rows of a table, in its own dtype."""
    length, width = vectors.shape[2], 2 * cos.shape[1]
    turning, rest = vectors[..., :width], vectors[..., width:]
    first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    c, s = cos[:length], sin[:length]
    parts = first * c - second * s, first * s + second * c
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((turned, rest), -1)


def _call(node: Node, signature: Signature, vectors: Vectors, values: Values, past: int) -> CallTensors:
    query, key, value = vectors
    batch, heads, rows, width = query.values.shape
    output = by_heads(heads)(values.tensor(node.outputs[0]))
    scale = float(node.attributes.get("scale", 0.0)) or 1 / math.sqrt(width)
    formula = [Term("scale", scale)]
    cap = float(node.attributes.get(signature.cap, 0.0)) if signature.cap else 0.0
    if cap:
        formula.append(Term("softcap", cap))
    if signature.added >= 0 and node.input(signature.added):
        formula += _added(values.tensor(node.inputs[signature.added]))
    keys = key.values.shape[2]
    fill = float(node.attributes.get("mask_filter_value", _FILTER))
    if signature.padding >= 0 and node.input(signature.padding):
        formula.append(_padding(values.tensor(node.inputs[signature.padding]), batch, keys, fill))
    formula += _implicit(node, signature, values, rows, keys, past)
    if node.op == "GroupQueryAttention" and node.input(11):
        formula.append(Term("sinks", values.tensor(node.inputs[11]).flatten()))
    dtype = str(query.values.dtype).removeprefix("torch.")
    return CallTensors(
        site=node.site,
        index=0,
        query=query,
        key=key,
        value=value,
        output=output,
        terms=tuple(formula),
        dtype=dtype,
        logits_dtype="float32" if dtype in ("float16", "bfloat16") else dtype,
        weights_dtype="float32" if dtype in ("float16", "bfloat16") else dtype,
    )


def _added(added: Tensor) -> list[Term]:
    placed = added.reshape((1,) * (4 - added.dim()) + tuple(added.shape))
    if placed.dtype is torch.bool:
        return [Term("mask", placed, pattern(placed) or "mask")]
    hidden, fill = hidden_entries(placed.float())
    name = bias_name(placed.float(), hidden)
    terms = []
    if name is not None:
        terms.append(Term("bias", placed if hidden is None else placed.masked_fill(hidden, 0.0), name))
    if hidden is not None and fill is not None:
        terms.append(Term("mask", ~hidden, pattern(~hidden) or "mask", fill, added=True))
    return terms


def _padding(mask: Tensor, batch: int, keys: int, fill: float) -> Term:
    """Lengths (B,), or ones where keys are seen, (B, S) or (B, L, S).

    Raises:
        UnsupportedError: of another shape.
    """
    if mask.shape == (batch,):
        visible = (torch.arange(keys) < mask[:, None])[:, None, None]
    elif mask.dim() in (2, 3) and mask.shape[0] == batch and mask.shape[-1] == keys:
        visible = (mask > 0).reshape(batch, 1, -1, keys)
    else:
        raise UnsupportedError(f"a mask of keys of shape {tuple(mask.shape)}")
    return Term("mask", visible, pattern(visible) or "padding", fill, added=True)


def _implicit(node: Node, signature: Signature, values: Values, rows: int, keys: int, past: int) -> list[Term]:
    """The causal mask and the window of an operator's attributes, and lengths of its sequences."""
    grouped = node.op == "GroupQueryAttention"
    if not node.attributes.get(signature.causal, int(grouped)):
        return []
    distance = torch.arange(rows)[:, None] + past - torch.arange(keys)
    visible = (distance >= 0)[None, None]
    window = int(node.attributes.get("local_window_size", -1))
    if window > 0:
        visible = visible & (distance < window)
    if grouped:
        last = values.tensor(node.inputs[5]).flatten()
        if bool((last != keys - 1).any()):
            raise UnsupportedError(f"{node.op} with sequences of unlike lengths")
    return [Term("mask", visible, pattern(visible) or "mask")] if not bool(visible.all()) else []

"""Classifying: what the output of one operation is to the lineage, from what its inputs are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sqrtdk.trace import opaque, ops
from sqrtdk.trace.additive import pairs_queries_and_keys
from sqrtdk.trace.carried import axis_fault, carry, dropout
from sqrtdk.trace.events import Listener, Pending, Seen
from sqrtdk.trace.graph import Node, alias, origin
from sqrtdk.trace.records import LOST_SIGHT, NEVER_USED
from sqrtdk.trace.sites import Sites
from sqrtdk.trace.store import Store, shape_of


class Classifier:
    """Makes a node for every output: a projection, a product, a softmax, its use, or a step in between."""

    def __init__(self, store: Store, sites: Sites, listener: Listener, *, products: bool) -> None:
        self.seen: list[Seen] = []
        self.flex = False
        self._store = store
        self._sites = sites
        self._listener = listener
        self._measure_products = products

    def note(self, func: Any, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Make the nodes of what `func` gave for `args`."""
        outside = not self._sites.running
        if outside and name in ops.RANDOM:
            self._store.forget(output)
            return
        if name == "lift_fresh":  # torch.tensor([...]) written in the model's code
            self._store.constant(args[0])
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        several = isinstance(output, (tuple, list))
        tensors: dict[int, Tensor] = {}
        inner: dict[tuple[int, int], Tensor] = {}  # tensors in a list, e.g. the indices of an indexing
        node_args: list[Any] = []
        for i, arg in enumerate(args):
            if isinstance(arg, Tensor):
                tensors[i] = arg
                node_args.append(self._store.node(arg))
            elif isinstance(arg, (list, tuple)) and any(isinstance(item, Tensor) for item in arg):
                node_args.append([self._store.node(x) if isinstance(x, Tensor) else x for x in arg])
                inner.update({(i, j): x for j, x in enumerate(arg) if isinstance(x, Tensor)})
            else:
                node_args.append(arg)
        for i, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor):
                continue
            node = Node(
                name,
                shape_of(tensor),
                func=func,
                args=tuple(node_args),
                kwargs={k: v for k, v in kwargs.items() if not isinstance(v, Tensor)},
                out=i if several else None,
                site=self._sites.here(),
            )
            self._classify(node, tensor, tensors)
            if name == "index" and node.act and not node.is_root:
                node.operands.update({key: alias(x) for key, x in inner.items()})
            self._store.put(tensor, node)
            if outside:
                self._store.loosen(tensor)
            if name in ops.NORMS or name in ("native_dropout", "max"):
                break

    def may_attend(self, name: str, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether an operation of which only the name and the shapes are known may be an attention."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and self._store.node(x).act]
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        shape = shape_of(first) if isinstance(first, Tensor) else ()
        return opaque.may_attend(name, [shape_of(x) for x in tensors], shape)

    def _classify(self, node: Node, tensor: Tensor, tensors: dict[int, Tensor]) -> None:
        parents = list(node.parents())
        if node.op == "copy":
            parents = parents[1:]  # what was there before is gone
        node.external = any(p.external for p in parents)
        numeric = tensor.is_floating_point() or tensor.is_complex()
        if node.op in ops.CREATIONS or not numeric or tensor.is_nested:
            return
        if node.op == "embedding":
            if parents[1].external or parents[0].act:
                node.act = True
                self._store.cut(node, tensor)
            return
        if not any(p.act for p in parents):
            if node.op in ops.CONTRACTIONS and any(origin(p).op == "parameter" for p in parents):
                # A projection of learned or positional vectors: learned queries (DETR), relative keys (DeBERTa).
                node.act = node.learned = True
                node.width = parents[-2].shape[-1]
                self._store.cut(node, tensor, source=parents[-2])
            return
        node.act = True
        node.learned = all(p.learned for p in parents if p.act)
        if node.op in ops.CONTRACTIONS:
            self._contract(node, tensor, tensors)
        elif node.op in ops.SOFTMAX:
            self._softmax(node, tensor, tensors[0], int(node.args[1]) if len(node.args) > 1 else -1)
        elif node.op in ops.AFFINE:
            self._store.cut(node, tensor, source=parents[0])
        elif node.op in ops.PROJECTIONS:
            if not (parents[0].products and parents[0].shape[-2:] == node.shape[-2:]):
                node.width = parents[1].shape[1] if len(parents) > 1 and len(parents[1].shape) > 1 else None
                self._store.cut(node, tensor, source=parents[0])
            else:  # a convolution over heads leaves the L x S matrix in place
                node.products = parents[0].products
        else:
            self._combine(node, tensor, tensors, parents)

    def _contract(self, node: Node, tensor: Tensor, tensors: dict[int, Tensor]) -> None:
        left, right = ops.CONTRACTIONS[node.op]
        a, b = node.args[left], node.args[right]
        weighing = next((p.softmax for p in (a, b) if p.softmax is not None), None)
        if weighing is not None and self._value_product(weighing, a, b, tensors, tensor):
            self._store.cut(node, tensor)
        elif _mixes_heads(node.op, a, b):
            node.softmax = weighing
            node.carried = a.carried or b.carried
            node.products = a.products | b.products
        elif self.is_product(a, b):
            node.is_product = True
            node.learned = a.learned or b.learned
            node.dtype = tensor.dtype
            node.operands = {i: alias(tensors[i]) for i in tensors if i not in (left, right)}
            if self._measure_products and not tensor.is_meta and tensor.numel():
                low, high = torch.aminmax(tensor.detach())
                node.max_product = torch.maximum(high, -low)
        else:
            if (a.products or b.products) and a.act and b.act and not (a.products and b.products):
                self._listener.missed(node.site, "a product of activations meets values without a softmax")
            source = a if a.act else b
            node.width = a.shape[-1]
            node.terms = 1 if len(node.shape) > 2 and a.shape[0] > 1 else 0
            node.label = _weight_name(b if a.act else a)
            if (node.op == "mv" or node.shape[-1] == 1) and pairs_queries_and_keys(source):
                node.op = "additive"
            self._store.cut(node, tensor, source=source)

    def is_product(self, a: Node, b: Node) -> bool:
        """Whether a contraction is a product of queries and keys, and not a projection or a value product."""
        if a.products or b.products or a.softmax is not None or b.softmax is not None:
            return False
        return a.act and b.act  # a raw parameter against activations is a projection, whatever it stands for

    def _value_product(self, weighing: Pending, a: Node, b: Node, tensors: dict[int, Tensor], out: Tensor) -> bool:
        value = b if a.softmax is weighing else a
        if weighing.seen.attention or not value.act or value.products:
            return False
        weighing.seen.attention = True
        weights = a if a.softmax is weighing else b
        held = next((t for t in tensors.values() if self._store.is_node(t, weights)), None)
        weighing.carried = weights.carried
        weighing.fault = axis_fault(weights, held, -1 if weights is a else -2, weighing)
        position = next(i for i, t in tensors.items() if self._store.is_node(t, value))
        self._listener.eager(weighing, tensors[position], out)
        return True

    def _softmax(self, node: Node, tensor: Tensor, logits: Tensor, dim: int) -> None:
        parent = node.args[0]
        product = next(iter(parent.products), None)
        site = product.site if product is not None else node.site
        seen = Seen(site, node.shape, reason=NEVER_USED if product is None else LOST_SIGHT)
        weighing = Pending(
            node=parent,
            logits=alias(logits),
            weights=alias(tensor),
            dim=dim,
            op=f"aten.{node.op}",
            seen=seen,
            flex=self.flex,
            stored=product.dtype if product is not None and product.dtype is not None else logits.dtype,
        )
        self.seen.append(seen)
        self._store.pending.add(weighing)
        node.args = ()
        node.products = frozenset()
        node.softmax = weighing

    def _combine(self, node: Node, tensor: Tensor, tensors: dict[int, Tensor], parents: list[Node]) -> None:
        """Everything elementwise, views and rearrangements included."""
        if node.op in ops.CACHE_WRITES and self._written_to_cache(node):
            return
        active = [p for p in parents if p.act]
        products: frozenset[Node] = frozenset()
        node.products = products.union(*(p.products for p in active))
        weighing = next((p.softmax for p in active if p.softmax is not None), None)
        roots = products.union(*(p.roots for p in active if not p.products))
        if node.products:
            if node.op == "exp" and self._from_logarithm(node, tensor, tensors):
                return
            sinks = _joined_by_sinks(node)
            if sinks is not None:
                numerator = node.args[0]
                node.args = (numerator.args[0],)
                self._softmax(node, tensor, numerator.operands[0], -1)
                node.softmax.sinks = sinks
                return
            main = node.main()
            node.operands = {i: alias(t) for i, t in tensors.items() if node.args[i] is not main or node.op in _KEPT}
            return
        if weighing is not None:
            self._carry_weights(node, tensor, tensors, active, weighing)
            return
        if len({p.roots for p in active}) > 1 and node.op not in ("cat", "stack"):
            node.terms = sum(p.terms for p in active)
            self._store.cut(node, tensor)
            return
        node.roots = roots
        node.terms = max((p.terms for p in active), default=0)
        node.operands = {i: alias(t) for i, t in tensors.items() if not node.args[i].act}
        self._normalise(node, tensor, active)

    def _written_to_cache(self, node: Node) -> bool:
        """New keys go into a tensor of zeros or of earlier keys: the lineage is that of the new ones."""
        position = ops.CACHE_WRITES[node.op]
        new = node.args[position] if position < len(node.args) else None
        if not isinstance(new, Node) or not new.act or any(p.products or p.softmax for p in node.parents()):
            return False
        node.args = (new,)
        node.roots, node.terms = new.roots, new.terms
        return True

    def _from_logarithm(self, node: Node, tensor: Tensor, tensors: dict[int, Tensor]) -> bool:
        """Exp of a log-softmax, or of z - logsumexp(z), is a softmax."""
        inner = node.args[0]
        while inner.op in ops.VIEWS | ops.SAME and inner.main() is not None:
            inner = inner.main()
        if inner.op == "_log_softmax":
            node.args = (inner.args[0],)
            self._softmax(node, tensor, inner.operands[0], int(inner.args[1]))
            return True
        if inner.op == "sub" and isinstance(inner.args[1], Node) and origin(inner.args[1]).op == "logsumexp":
            node.args = (inner,)
            self._softmax(node, tensor, tensors[0], -1)
            return True
        return False

    def _carry_weights(
        self, node: Node, tensor: Tensor, tensors: dict[int, Tensor], active: list[Node], weighing: Pending
    ) -> None:
        """Weights pass through casts, dropout and head masks; a broadcast product with values, summed, is a use."""
        others = [p for p in active if p.softmax is not weighing]
        node.softmax = weighing
        weights = next(p for p in active if p.softmax is weighing)
        if _sums(node) and node.shape[-1:] == (1,) and active[0].shape[-1:] != (1,):
            node.size = "sum"
        elif len(active) == 1:
            node.size = active[0].size
        node.carried = weights.carried if others else carry(node, tensor, tensors, weights, weighing)
        weighing.dropout = weighing.dropout or dropout(node)
        if node.op == "mul" and others and weighing.node.products and node.shape != weighing.seen.shape:
            node.label = "weighted values"
            value = next((t for i, t in tensors.items() if node.args[i] in others), None)
            node.value = alias(value) if value is not None else None
        elif node.op == "sum" and active[0].label == "weighted values":
            if not weighing.seen.attention and active[0].value is not None:
                weighing.seen.attention = True
                weighing.carried = node.carried
                self._listener.eager(weighing, active[0].value, tensor)
            self._store.cut(node, tensor)
            return
        elif others:
            self._store.cut(node, tensor)
            return
        if node.op in ops.VIEWS:
            node.operands = {i: alias(t) for i, t in tensors.items() if node.args[i] is not weights}
        else:
            node.args = (weights,)

    def _normalise(self, node: Node, tensor: Tensor, active: list[Node]) -> None:
        """Mark sizes (a reduced root) and normalisations (a root over its own size, then per-channel gains)."""
        name = node.op
        reduced = bool(node.shape) and node.shape[-1] == 1 and bool(active[0].shape) and active[0].shape[-1] > 1
        if name in ops.NORMS:
            node.norm = ops.NORMS[name]
        elif name in ("mean", "var", "linalg_vector_norm", "norm", "sum") and reduced and not active[0].size:
            node.size = "rms" if name in ("mean", "var") else "l2"
        elif name in ("mul", "div"):
            sizes = [p for p in active if p.size]
            whole = [p for p in active if not p.size]
            if sizes and whole:
                node.norm = sizes[0].size
            elif sizes:
                node.size = sizes[0].size
            elif len(active) == 1 and active[0].norm and name == "mul" and _is_gain(node):
                node.norm = active[0].norm
        elif all(p.size for p in active):
            node.size = active[0].size
        elif name in ops.SAME or (name == "add" and len(active) == 1 and _is_gain(node)):
            node.norm = active[0].norm
        if node.norm:
            self._store.keep(node, tensor)


GUARD = 1e-2  # a number at or below it keeps a sum from 0
_KEPT = frozenset({"exp", "_log_softmax"})  # whose own input is needed when they turn out to be a softmax


def _sums(weights: Node) -> bool:
    """Whether weights are summed; `F.normalize(weights, p=1)` does it by their norm."""
    return weights.op == "sum" or (weights.op == "linalg_vector_norm" and weights.number(1) == 1)


def _weight_name(node: Node) -> str:
    return origin(node).label


def _mixes_heads(op: str, a: Node, b: Node) -> bool:
    """Logits or weights times a learned square matrix over the heads, as einsum writes it (talking heads)."""
    for matrix, other in ((a, b), (b, a)):
        if op == "bmm" and not matrix.act and (other.products or other.softmax is not None):
            return matrix.shape[0] == 1 and matrix.shape[1] == matrix.shape[2] <= 256
    return False


def _is_gain(node: Node) -> bool:
    """Whether the constant operand has one number a channel, not one number for all."""
    for arg in node.args:
        if isinstance(arg, Node) and not arg.act:
            return bool(arg.shape) and arg.shape[-1] > 1
    return False


def _joined_by_sinks(node: Node) -> bool | None:
    """Whether more than a guard joins the sum that exp(z), by hand, is divided by; None if no such sum divides it."""
    if node.op != "div" or len(node.args) < 2:
        return None
    top, bottom = node.args[0], node.args[1]
    if not isinstance(top, Node) or not isinstance(bottom, Node) or top.op != "exp":
        return None
    sinks = False
    while bottom.op in ops.VIEWS | ops.SAME | ops.CLAMPS | {"add", "masked_fill"}:
        parent = bottom.main()
        if bottom.op == "add":
            weight = next((i for i in (0, 1) if _is_weight(bottom, i)), None)
            sinks |= weight is not None
            parent = bottom.args[1] if weight == 0 else parent
        if not isinstance(parent, Node):
            return None
        bottom = parent
    return sinks if bottom.op == "sum" and bottom.main() is top else None


def _is_weight(added: Node, position: int) -> bool:
    """Whether the addend is a weight, exp(sink) or 1, and no guard against a division by zero."""
    addend = added.args[position]
    if isinstance(addend, Node) and origin(addend).op == "exp":
        return True
    number = added.number(position)
    return number is not None and number > GUARD

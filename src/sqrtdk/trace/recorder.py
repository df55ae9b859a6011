"""The recorder: a dispatch mode that sees every aten operation, runs it unchanged, and grows the lineage graph.

It keeps one node for every tensor (`graph.Node`). When softmax weights meet a value product, or a fused attention
kernel runs, the recorder hands the nodes to `calls`, which reads the formula off the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from sqrtdk.trace import ops
from sqrtdk.trace.graph import Node, alias
from sqrtdk.trace.sites import Sites

_FLEX = "flex_attention"


@dataclass(slots=True)
class Seen:
    """A softmax that has run, for the list of those that turn out to be no attention."""

    site: str
    shape: tuple[int, ...]
    attention: bool = False
    reason: str = "its weights never reach a value product"


@dataclass(eq=False)
class Pending:
    """A softmax that has run; it becomes an attention when its weights reach a value product."""

    node: Node  # of the logits
    logits: Tensor  # what entered it
    weights: Tensor  # what left it
    dim: int
    op: str
    seen: Seen
    flex: bool
    stored: torch.dtype  # of the product's result, before an upcast for the softmax
    dropout: float = 0.0


@dataclass(slots=True)
class Fused:
    """The arguments of a fused attention call, whatever the kernel calls them."""

    op: str
    query: Tensor
    key: Tensor
    value: Tensor
    query_node: Node
    key_node: Node
    mask: Tensor | None
    mask_node: Node | None
    is_causal: bool
    scale: float | None
    dropout: float
    output: Tensor
    site: str


@dataclass(slots=True)
class Listener:
    """What the recorder tells: an eager attention is complete, a fused one or a native one ran."""

    eager: Callable[[Pending, Tensor, Tensor], None]
    fused: Callable[[Fused], None]
    native: Callable[[str, str, dict[str, Any], Tensor], None]
    enlarge: Callable[[str], float | None] = field(default=lambda site: None)


class Recorder(TorchDispatchMode):
    """Runs every operation as it is and notes where its output came from."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module | None, sites: Sites, listener: Listener, *, products: bool) -> None:
        super().__init__()
        self.sites = sites
        self.listener = listener
        self.seen: list[Seen] = []
        self._measure_products = products
        self._nodes: Any = WeakTensorKeyDictionary()
        self._valued: WeakSet[Node] = WeakSet()
        self._pending: WeakSet[Pending] = WeakSet()
        self._held: list[Tensor] = []  # module tensors: their ids must stay theirs
        self._constants: dict[int, str] = {}
        self._thread = threading.get_ident()
        self._flex = False
        self._composite: dict[Any, bool] = {}
        self._writes: dict[Any, tuple[int | str, ...]] = {}
        if model is not None:
            for name, tensor in _module_tensors(model):
                self._held.append(tensor)
                self._constants[id(tensor)] = name

    def __enter__(self) -> Recorder:
        self._thread = threading.get_ident()
        super().__enter__()
        return self

    def close(self) -> None:
        """Drop every tensor."""
        self._nodes = WeakTensorKeyDictionary()
        self._held.clear()
        self._constants.clear()

    # -- running ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if threading.get_ident() != self._thread or torch._C._current_graph_task_id() != -1:
            return func(*args, **kwargs)
        if not hasattr(func, "_schema"):
            return self._higher_order(func, args, kwargs)
        name = _base_name(func)
        if name not in ops.FUSED and self._is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name in ops.FUSED:
            return self._run_fused(func, name, args, kwargs)
        written = self._written(func)
        if written:
            self._save_before_write(written, args, kwargs)
        run_args = args
        if name in ("bmm", "baddbmm") and not self._flex:
            run_args = self._enlarged(name, args)
        output = func(*run_args, **kwargs)
        if name in ops.NATIVE:
            first = output[0] if isinstance(output, (tuple, list)) else output
            self.listener.native(name, self.sites.here(), _bind(func, args, kwargs), first)
            self._new_root(name, first)
            return output
        self._note(func, name, args, kwargs, output)
        if written:
            self._note_write(written, args, kwargs)
        return output

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """FlexAttention run eagerly: its own dense implementation, seen operation by operation."""
        if func.name() != _FLEX:
            return func(*args, **kwargs)
        dense = func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
        self._flex = True
        try:
            with self:
                return dense(*args, **kwargs)
        finally:
            self._flex = False

    def _is_composite(self, func: Any) -> bool:
        known = self._composite.get(func)
        if known is None:
            known = self._composite[func] = bool(func._can_decompose())
        return known

    def _written(self, func: Any) -> tuple[int | str, ...]:
        known = self._writes.get(func)
        if known is None:
            known = ()
            if func._schema.is_mutable:
                known = tuple(
                    arg.name if arg.kwarg_only else i
                    for i, arg in enumerate(func._schema.arguments)
                    if arg.alias_info is not None and arg.alias_info.is_write
                )
            self._writes[func] = known
        return known

    # -- fused kernels ---------------------------------------------------------------------------------------------

    def _run_fused(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        named = _bind(func, args, kwargs)
        site = self.sites.here()
        factor = self.listener.enlarge(site)
        if factor is not None:
            q = named["query"] * factor
            output = func(q, *args[1:], **kwargs) if args else func(**{**kwargs, "query": q})
        else:
            output = func(*args, **kwargs)
        first = output[0] if isinstance(output, (tuple, list)) else output
        mask = named.get("attn_mask", named.get("attn_bias"))
        self.listener.fused(
            Fused(
                op=f"aten.{name}",
                query=named["query"],
                key=named["key"],
                value=named["value"],
                query_node=self._node(named["query"]),
                key_node=self._node(named["key"]),
                mask=mask,
                mask_node=self._node(mask) if mask is not None else None,
                is_causal=bool(named.get("is_causal", False)),
                scale=named.get("scale"),
                dropout=float(named.get("dropout_p", 0.0) or 0.0),
                output=first,
                site=site,
            )
        )
        self._new_root(name, first)
        return output

    def _enlarged(self, name: str, args: Any) -> Any:
        left, _ = ops.CONTRACTIONS[name]
        a, b = args[left], args[left + 1]
        if self._is_product(self._node(a), self._node(b), name):
            factor = self.listener.enlarge(self.sites.here())
            if factor is not None:
                return (*args[:left], a * factor, *args[left + 1 :])
        return args

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _node(self, tensor: Tensor) -> Node:
        node: Node | None = self._nodes.get(tensor)
        return node if node is not None else self._leaf(tensor)

    def _leaf(self, tensor: Tensor) -> Node:
        """A tensor from outside the trace: a parameter or attribute of the model, a constant, or an input."""
        shape = _shape(tensor)
        label = self._constants.get(id(tensor))
        if label is not None or isinstance(tensor, nn.Parameter):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            node = Node(kind, shape, label=label or "")
        elif not tensor.is_floating_point() and not tensor.is_complex():
            node = Node("input", shape)
            node.external = True
        elif tensor.is_nested or tensor.numel() <= 1:
            node = Node("constant", shape)
        else:
            node = Node("input", shape, act=True, site=self.sites.here())
            node.make_root(alias(tensor))
            self._valued.add(node)
        self._nodes[tensor] = node
        return node

    def _new_root(self, op: str, tensor: Tensor, label: str = "") -> Node:
        node = Node(op, _shape(tensor), act=True, site=self.sites.here(), label=label)
        node.make_root(alias(tensor))
        self._valued.add(node)
        self._nodes[tensor] = node
        return node

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, output: Any) -> None:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        several = isinstance(output, (tuple, list))
        tensors: dict[int, Tensor] = {}
        inner: dict[tuple[int, int], Tensor] = {}  # tensors in a list, e.g. the indices of an indexing
        node_args: list[Any] = []
        for i, arg in enumerate(args):
            if isinstance(arg, Tensor):
                tensors[i] = arg
                node_args.append(self._node(arg))
            elif isinstance(arg, (list, tuple)) and any(isinstance(item, Tensor) for item in arg):
                node_args.append([self._node(x) if isinstance(x, Tensor) else x for x in arg])
                inner.update({(i, j): x for j, x in enumerate(arg) if isinstance(x, Tensor)})
            else:
                node_args.append(arg)
        for i, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor):
                continue
            node = Node(
                name,
                _shape(tensor),
                func=func,
                args=tuple(node_args),
                kwargs={k: v for k, v in kwargs.items() if not isinstance(v, Tensor)},
                out=i if several else None,
                site=self.sites.here(),
            )
            self._classify(node, tensor, tensors)
            if name == "index" and node.act and not node.is_root:
                node.operands.update({key: alias(x) for key, x in inner.items()})
            self._nodes[tensor] = node
            if name in ops.NORMS or name in ("native_dropout", "max", "topk"):
                break

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
                self._cut(node, tensor)
            return
        if not any(p.act for p in parents):
            if node.op in ops.CONTRACTIONS and any(_origin(p).op == "parameter" for p in parents):
                # A projection of learned or positional vectors: learned queries (DETR), relative keys (DeBERTa).
                node.act = node.learned = True
                node.width = parents[-2].shape[-1]
                self._cut(node, tensor, source=parents[-2])
            return
        node.act = True
        node.learned = all(p.learned for p in parents if p.act)
        if node.op in ops.CONTRACTIONS:
            self._contract(node, tensor, tensors)
        elif node.op in ops.SOFTMAX:
            self._softmax(node, tensor, tensors[0], int(node.args[1]) if len(node.args) > 1 else -1)
        elif node.op in ops.PROJECTIONS:
            if not (parents[0].products and parents[0].shape[-2:] == node.shape[-2:]):
                node.width = parents[1].shape[1] if len(parents) > 1 and len(parents[1].shape) > 1 else None
                self._cut(node, tensor, source=parents[0])
            else:  # a convolution over heads leaves the L x S matrix in place
                node.products = parents[0].products
        else:
            self._combine(node, tensor, tensors, parents)

    def _contract(self, node: Node, tensor: Tensor, tensors: dict[int, Tensor]) -> None:
        left, right = ops.CONTRACTIONS[node.op]
        a, b = node.args[left], node.args[right]
        weighing = next((p.softmax for p in (a, b) if p.softmax is not None), None)
        if weighing is not None and not weighing.seen.attention and self._value_product(weighing, a, b, tensors, tensor):
            self._cut(node, tensor)
        elif _mixes_heads(node.op, a, b):
            node.softmax = weighing
            node.products = a.products | b.products
        elif self._is_product(a, b, node.op):
            node.is_product = True
            node.learned = a.learned or b.learned
            node.dtype = tensor.dtype
            node.operands = {i: alias(tensors[i]) for i in tensors if i not in (left, right)}
            if self._measure_products and not tensor.is_meta and tensor.numel():
                low, high = torch.aminmax(tensor.detach())
                node.max_product = torch.maximum(high, -low)
        else:
            source = a if a.act else b
            node.width = a.shape[-1]
            node.terms = 1 if len(node.shape) > 2 and a.shape[0] > 1 else 0
            node.label = _weight_name(b if a.act else a)
            if node.shape[-1] == 1 and _through(source, "tanh"):
                node.op = "additive"
            self._cut(node, tensor, source=source)

    def _is_product(self, a: Node, b: Node, op: str) -> bool:
        """Whether a contraction is a product of queries and keys, and not a projection or a value product."""
        if a.products or b.products or a.softmax is not None or b.softmax is not None:
            return False
        if a.act and b.act:
            return True
        constant, other = (a, b) if b.act else (b, a)
        # A learned query shared by the batch: a parameter repeated over a batch dimension. A weight is not repeated.
        return other.act and op == "bmm" and constant.shape[0] > 1 and _repeats(constant)

    def _value_product(self, weighing: Pending, a: Node, b: Node, tensors: dict[int, Tensor], out: Tensor) -> bool:
        value = b if a.softmax is weighing else a
        if not value.act or value.products:
            return False
        weighing.seen.attention = True
        position = next(i for i, t in tensors.items() if self._nodes.get(t) is value)
        self.listener.eager(weighing, tensors[position], out)
        return True

    def _softmax(self, node: Node, tensor: Tensor, logits: Tensor, dim: int) -> None:
        parent = node.args[0]
        product = next(iter(parent.products), None)
        site = product.site if product is not None else node.site
        seen = Seen(site, node.shape)
        weighing = Pending(
            node=parent,
            logits=alias(logits),
            weights=alias(tensor),
            dim=dim,
            op=f"aten.{node.op}",
            seen=seen,
            flex=self._flex,
            stored=product.dtype if product is not None and product.dtype is not None else logits.dtype,
        )
        self.seen.append(seen)
        self._pending.add(weighing)
        node.args = ()
        node.products = frozenset()
        node.softmax = weighing

    def _combine(self, node: Node, tensor: Tensor, tensors: dict[int, Tensor], parents: list[Node]) -> None:
        """Everything elementwise, views and rearrangements included."""
        active = [p for p in parents if p.act]
        products: frozenset[Node] = frozenset()
        node.products = products.union(*(p.products for p in active))
        weighing = next((p.softmax for p in active if p.softmax is not None), None)
        roots = products.union(*(p.roots for p in active if not p.products))
        if node.products:
            if _is_quotient_of_exp(node):
                numerator = node.args[0]
                node.args = (numerator.args[0],)
                self._softmax(node, tensor, numerator.operands[0], -1)
                return
            main = node.main()
            node.operands = {i: alias(t) for i, t in tensors.items() if node.args[i] is not main or node.op == "exp"}
            return
        if weighing is not None:
            self._carry_weights(node, tensor, tensors, active, weighing)
            return
        if len({p.roots for p in active}) > 1 and node.op not in ("cat", "stack"):
            node.terms = sum(p.terms for p in active)
            self._cut(node, tensor)
            return
        node.roots = roots
        node.terms = max((p.terms for p in active), default=0)
        node.operands = {i: alias(t) for i, t in tensors.items() if not node.args[i].act}
        self._normalise(node, tensor, active)

    def _carry_weights(
        self, node: Node, tensor: Tensor, tensors: dict[int, Tensor], active: list[Node], weighing: Pending
    ) -> None:
        """Weights pass through casts, dropout and head masks; a broadcast product with values, summed, is a use."""
        others = [p for p in active if p.softmax is not weighing]
        node.softmax = weighing
        if node.op == "mul" and others and weighing.node.products and node.shape != weighing.seen.shape:
            node.label = "weighted values"
            value = next((t for i, t in tensors.items() if node.args[i] in others), None)
            node.value = alias(value) if value is not None else None
        elif node.op == "sum" and active[0].label == "weighted values":
            if not weighing.seen.attention and active[0].value is not None:
                weighing.seen.attention = True
                self.listener.eager(weighing, active[0].value, tensor)
            self._cut(node, tensor)
            return
        elif others:
            self._cut(node, tensor)
            return
        node.args = ()

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
        elif name in ops.SAME and active[0].norm:
            node.norm = active[0].norm
        elif name == "add" and len(active) == 1 and active[0].norm and _is_gain(node):
            node.norm = active[0].norm
        if node.norm:
            node.value = alias(tensor)
            self._valued.add(node)

    def _cut(self, node: Node, tensor: Tensor, source: Node | None = None) -> None:
        if source is not None:
            node.source = _origin(source).serial
        node.make_root(alias(tensor))
        self._valued.add(node)

    # -- writes in place -------------------------------------------------------------------------------------------

    def _save_before_write(self, written: tuple[int | str, ...], args: Any, kwargs: Any) -> None:
        """Values that a later reading needs are copied before an operation overwrites their storage."""
        for key in written:
            tensor = args[key] if isinstance(key, int) and key < len(args) else kwargs.get(str(key))
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()._cdata
            for node in list(self._valued):
                if node.value is not None and node.value.untyped_storage()._cdata == storage:
                    node.value = node.value.clone()
            for weighing in list(self._pending):
                if not weighing.seen.attention and weighing.logits.untyped_storage()._cdata == storage:
                    weighing.logits = weighing.logits.clone()

    def _note_write(self, written: tuple[int | str, ...], args: Any, kwargs: Any) -> None:
        """Other tensors on the written storage changed as well: they now descend from the write too."""
        for key in written:
            tensor = args[key] if isinstance(key, int) and key < len(args) else kwargs.get(str(key))
            if not isinstance(tensor, Tensor):
                continue
            new = self._node(tensor)
            if not new.act:
                continue
            storage = tensor.untyped_storage()._cdata
            for other, old in list(self._nodes.items()):
                if other is tensor or other.untyped_storage()._cdata != storage or old is new:
                    continue
                if other.shape == tensor.shape and other.data_ptr() == tensor.data_ptr():
                    self._nodes[other] = new
                    continue
                both = Node("overwrite", tuple(other.shape), args=(old, new), act=True, site=self.sites.here())
                both.roots = old.roots | new.roots
                both.products = old.products | new.products
                self._nodes[other] = both


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Nested tensors have none."""
    return () if tensor.is_nested else tuple(tensor.shape)


def _base_name(func: Any) -> str:
    name = str(func._schema.name).split("::")[1]
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def _bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by the names of the operator's schema."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _module_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that modules keep as plain attributes, one level of containers deep."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for key, item in vars(module).items():
            if key.startswith("_") and key in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(item, Tensor):
                yield f"{path}.{key}".lstrip("."), item
            elif isinstance(item, (list, tuple, dict)):
                for inner in item.values() if isinstance(item, dict) else item:
                    if isinstance(inner, Tensor):
                        yield f"{path}.{key}".lstrip("."), inner


def _origin(node: Node) -> Node:
    """The tensor that a projection read, before the views and casts that lead to it."""
    while node.op in ops.VIEWS | ops.SAME and not node.is_root:
        parent = node.main()
        if parent is None:
            break
        node = parent
    return node


def _weight_name(node: Node) -> str:
    return _origin(node).label


def _repeats(node: Node) -> bool:
    """Whether a constant was repeated over a dimension on its way from its leaf."""
    size = 1
    for n in node.shape:
        size *= n
    leaf = _origin(node)
    held = 1
    for n in leaf.shape:
        held *= n
    return held < size


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


def _through(node: Node, op: str) -> bool:
    while node.op in ops.VIEWS | ops.SAME and not node.is_root:
        parent = node.main()
        if parent is None:
            return False
        node = parent
    return node.op == op


def _is_quotient_of_exp(node: Node) -> bool:
    """exp(z) / sum exp(z), written out by hand."""
    if node.op != "div" or len(node.args) < 2:
        return False
    top, bottom = node.args[0], node.args[1]
    if not isinstance(top, Node) or not isinstance(bottom, Node) or top.op != "exp":
        return False
    while bottom.op in ops.VIEWS | ops.SAME | ops.CLAMPS | {"add"}:
        parent = bottom.main()
        if parent is None:
            return False
        bottom = parent
    return bottom.op == "sum" and bottom.main() is top

"""The tensors of a run whose gradients are those of an attention's operands.

A trace copies q, k, v and the output of each attention. While the model runs, every tensor that enters or leaves a
function and has a gradient is noted; of these the last one before the product that holds q's values is q, and the
first one after it that holds the output's is the output. A layout is one of five orders of the axes; a cast between
the noted tensor and the product is followed by its values. Notes are dropped at the next attention but one, so memory
is that of two blocks beside autograd's own.

The gradient is that of the part of the graph between these tensors, `torch.autograd.grad(output, (q, k, v), dO)`. What
else reads k (a cache, another attention) is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sqrtdk.laws.backward.learned_path import LearnedPath
from sqrtdk.tracing import unseen
from sqrtdk.tracing.records import IN_BLOCKS
from sqrtdk.tracing.tensors import CallTensors, Term, Vector

Edge = GradientEdge | Tensor  # a place in the graph, or a parameter
Layout = Callable[[Tensor, int, int, int, int], Tensor]
# From a noted tensor to (B, H, L, E); for a contiguous tensor each is a view.
_LAYOUTS: tuple[Layout, ...] = (
    lambda x, b, h, n, e: x.reshape(b, h, n, e),
    lambda x, b, h, n, e: x.reshape(b, n, h, e).transpose(1, 2),  # (B, L, H * E), (B * L, H, E)
    lambda x, b, h, n, e: x.reshape(n, b, h, e).permute(1, 2, 0, 3),  # nn.MultiheadAttention: (L, B * H, E)
    lambda x, b, h, n, e: x.reshape(b, h, e, n).mT,
    lambda x, b, h, n, e: x.reshape(h, b, n, e).transpose(0, 1),
)
_OPERANDS = ("query", "key", "value")
_SHORT = {"query": "q", "key": "k", "value": "v"}
_LEAVE_GRAPH = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_NESTED, _NUMBERS = (tuple, list, dict), (int, float, str, type(None))
_RESCALED = ("Div", "Mul", "Bmm")  # of nodes: out / e.sum(-1, keepdim=True), or times its inverse
_COPY_ROUNDINGS = 4.0  # by which a value and its copy in the trace may differ: a factor sqrt(scale) on and off


def edge_of(tensor: Tensor) -> Edge:
    """Return the place of a tensor in the graph; a parameter is its own place."""
    if tensor.grad_fn is None:
        return tensor
    edge = get_gradient_edge(tensor)
    node: object = edge.node
    if hasattr(edge, "ownership_token") or not isinstance(node, torch._C._FunctionBase):
        return edge
    held = _HeldEdge(*edge)
    with unseen(), torch.enable_grad():
        held.owner = tensor.view_as(tensor).grad_fn
    return held


class _HeldEdge(GradientEdge):
    """With a node that holds the graph: in torch 2.6 and 2.8 that of a Python function ends with its tensor."""

    owner: Any


def key_of(edge: Edge) -> tuple[int, int]:
    """Return a key that is the same for the same place in the graph."""
    return (id(edge), -1) if isinstance(edge, Tensor) else (id(edge.node), edge.output_nr)


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A tensor of the run as it was when it was found; a later write in place gives the tensor another `grad_fn`.

    Attributes:
        edge: Its place in the graph.
        sizes: Its shape.
        dtype: Its dtype.
        device: Its device.
        shape: (B, H, L, E), in which `layout` puts it.
        layout: The order of its axes.
    """

    edge: Edge
    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, int, int, int]
    layout: Layout

    @classmethod
    def of(cls, tensor: Tensor, shape: tuple[int, ...], layout: Layout) -> Handle:
        """Return the handle of a tensor that lies in a layout."""
        assert len(shape) == 4
        return cls(edge_of(tensor), tuple(tensor.shape), tensor.dtype, tensor.device, shape, layout)

    def back(self, gradient: Tensor) -> Tensor:
        """Return a gradient of the tensor in (B, H, L, E)."""
        return self.layout(gradient, *self.shape)


@dataclass(slots=True, eq=False)
class Reached:
    """An attention with the handles of its operands.

    Attributes:
        call: Its tensors; k and v with fewer heads if the run repeats them behind the handle.
        handles: By "q", "k", "v"; those that were not found are missing.
        output: Handle of the output; None until it is found.
        rescaled: That of the newest tensor that has the output's values after a division or a product:
            e = exp(z - lse.detach()), out = (e @ v) / e.sum(-1, keepdim=True), where the sum is 1. None without one.
        lse: Handle of the log-sum-exp, (B, Hq, L, 1), if something reads it; else None.
        lse_cut: Whether the graph holds numbers computed from a log-sum-exp that has no gradient itself.
        bias: Places of biases in the graph by the number of the term: tensors of the bias's own shape up to axes of
            size 1, or with samples and heads in one axis.
        copies: Handles of all tensors that hold an operand, the newest first.
        sinks: That of the sinks, (Hq,) up to its shape; None if not found.
        learned: The way of parameters to its logits, if the trace follows them.
        projected: Handles of what the projections returned, by "q", "k", "v", of operands without a handle.
    """

    call: CallTensors
    handles: dict[str, Handle] = field(default_factory=dict)
    output: Handle | None = None
    rescaled: Handle | None = None
    lse: Handle | None = None
    lse_cut: bool = False
    bias: dict[int, Edge] = field(default_factory=dict)
    copies: dict[str, list[Handle]] = field(default_factory=dict)
    sinks: Edge | None = None
    projected: dict[str, Handle] = field(default_factory=dict)
    learned: LearnedPath | None = None


class Notes(TorchFunctionMode):
    """Notes tensors with a gradient, and finds those of each attention that a `TracedHandles` records."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: dict[int, Reached] = {}
        self._windows: list[dict[tuple[int, int], Tensor]] = [{}, {}]  # since the last attention but one, and the last
        self._waiting: list[Reached] = []
        self._of_lse: dict[int, tuple[Tensor, Reached]] = {}  # without a gradient; held, so that no id is used again

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():  # inside of an `autograd.Function`, and under no_grad: nothing joins the graph
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        reads_shape = name == "__get__"  # x.shape, x.dtype, but also x.mT
        if not reads_shape:
            self.note((args, kwargs), read=func not in _LEAVE_GRAPH)
        with self._inside(func):
            result = func(*args, **kwargs)
        if reads_shape and isinstance(result, Tensor):
            self.note((args, kwargs), read=func not in _LEAVE_GRAPH)
        if isinstance(result, Tensor | tuple | list):
            self.note(result, read=False)
            if self._waiting and torch.is_grad_enabled():
                with torch._C.DisableTorchFunction(), unseen():
                    self._follow_lse(name, (args, kwargs), result)
        return result

    @contextmanager
    def _inside(self, func: Callable[..., Any]) -> Iterator[None]:
        """Note what `multi_head_attention_forward` calls, which is one function for modes, of many operations."""
        if func is not functional.multi_head_attention_forward:
            yield
            return
        name = "has_torch_function"  # if it is true, the function calls this mode again
        before = getattr(functional, name)
        setattr(functional, name, lambda *_: False)
        try:
            with self:
                yield
        finally:
            setattr(functional, name, before)

    def note(self, structure: Any, *, read: bool) -> None:
        """Note the tensors of a structure that have a gradient.

        Args:
            structure: Arguments or results, nested.
            read: Whether a function reads them, or has made them.
        """
        if not torch.is_grad_enabled():  # inside of an `autograd.Function`, and under no_grad: nothing joins the graph
            return
        for tensor in _tensors(structure):
            with torch._C.DisableTorchFunction():
                if type(tensor) in (Tensor, nn.Parameter) and tensor.requires_grad and tensor.is_floating_point():
                    key = (id(tensor), tensor._version)
                    self._windows[-1].pop(key, None)  # the last use counts
                    self._windows[-1][key] = tensor
                    if self._waiting:
                        with unseen():  # a comparison is no operation of the model
                            self._later(tensor, read)

    def _later(self, tensor: Tensor, read: bool) -> None:
        for reached in self._waiting[-2:]:
            if reached.output is None:
                reached.output = _handle(tensor, reached.call.output)
            elif not read and tensor.grad_fn is not None and tensor.grad_fn.name().startswith(_RESCALED):
                reached.rescaled = _handle(tensor, reached.call.output) or reached.rescaled
            if read and reached.lse is None and reached.call.lse is not None:
                reached.lse = _lse(tensor, reached.call)
        self._waiting = self._waiting[-2:]

    def _follow_lse(self, name: str, read: Any, made: Any) -> None:
        """Follow numbers of a log-sum-exp without a gradient, to where something in the graph is computed from them.

        There the derivative by lse is left out. A comparison, an integer and a tensor of its shape carry no numbers.
        """
        if name.endswith(("_like", "_as")) or name.startswith("new_"):
            return
        for tensor in _tensors(read):
            if tensor.requires_grad or not tensor.is_floating_point() or not tensor.numel():
                continue
            known = self._of_lse.get(id(tensor))
            reached = None if known is None else known[1]
            if reached is None:
                waits = (one for one in self._waiting if one.lse is None and one.call.lse is not None)
                reached = next((one for one in waits if _lse(tensor, one.call) is not None), None)
            if reached is None:
                continue
            for result in _tensors(made):
                if result.requires_grad:
                    reached.lse_cut = True
                elif result.is_floating_point():
                    self._of_lse[id(result)] = result, reached

    def recorded(self, number: int, call: CallTensors | None) -> None:
        """Find the operands of an attention that has just been read; its output follows."""
        if call is None or call.terms is None or call.missing is not None:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            noted = [*self._windows[0].values(), *self._windows[1].values()]
            self.reached[number] = reached = _found(call, noted)
            if call.call is not None and call.call.op == IN_BLOCKS:  # read when its output is used
                operands = {key_of(handle.edge) for handle in reached.handles.values()}
                outputs = (one for x in reversed(noted) if (one := _handle(x, call.output)) is not None)
                reached.output = next((one for one in outputs if key_of(one.edge) not in operands), None)
            self._waiting.append(reached)
        self._windows = [self._windows[1], {}]
        self._of_lse = {key: kept for key, kept in self._of_lse.items() if any(kept[1] is x for x in self._waiting)}


def _tensors(structure: Any, found: list[Tensor] | None = None) -> list[Tensor]:
    found = [] if found is None else found
    if isinstance(structure, Tensor):
        found.append(structure)
    elif isinstance(structure, _NESTED):
        for one in structure.values() if isinstance(structure, dict) else structure:
            if not isinstance(one, _NUMBERS):
                _tensors(one, found)
    return found


def _found(call: CallTensors, noted: Sequence[Tensor]) -> Reached:
    reached = Reached(call)
    newest = [*reversed(noted)]
    for name in _OPERANDS:
        vector: Vector = getattr(call, name)
        if not bool(vector.values.any()):  # zeros are also what a factor makes of them, whose gradient is another
            continue
        for values, factor in _forms(vector, name):
            handle = _first(newest, values)
            if handle is None:
                continue
            reached.handles[_SHORT[name]] = handle
            reached.call = _with_operand(reached.call, name, values, factor)
            reached.copies[_SHORT[name]] = [one for x in newest if (one := _handle(x, values)) is not None]
            break
        else:
            behind = None if vector.projected is None else _first(newest, vector.projected)
            if behind is not None:
                reached.projected[_SHORT[name]] = behind
    for number, term in enumerate(reached.call.terms or ()):
        if term.name == "bias" and isinstance(term.value, Tensor):
            bias = next((x for x in newest if _same(x, term.value)), None)
            if bias is not None:
                reached.bias[number] = edge_of(bias)
        elif term.name == "sinks" and isinstance(term.value, Tensor):
            sinks = next((x for x in newest if _same(x, term.value)), None)
            reached.sinks = None if sinks is None else edge_of(sinks)
    return reached


def _forms(vector: Vector, name: str) -> Iterator[tuple[Tensor, float]]:
    """Yield the values that a tensor of the run may have for an operand, and the factor from there to the operand.

    The run may repeat heads of k and v behind the tensor that has a gradient; a custom function may scale q or k
    inside: `(q * s) @ k.mT`.
    """
    bare = [(vector.values, 1.0)]
    if isinstance(vector.factor, float | int) and vector.factor not in (0.0, 1.0):
        bare.append((vector.values / vector.factor, float(vector.factor)))
    for values, factor in bare:
        yield values, factor
        if name != "query":
            for few in _fewer(values):
                yield few, factor


def _with_operand(call: CallTensors, name: str, values: Tensor, factor: float) -> CallTensors:
    """Return a call with other values of an operand, and what they lack as a factor on the logits."""
    vector: Vector = getattr(call, name)
    if factor == 1.0:
        return call if values is vector.values else replace(call, **{name: replace(vector, values=values)})  # type: ignore[arg-type]
    terms = (Term("scale", factor), *(call.terms or ()))
    return replace(call, terms=terms, **{name: replace(vector, values=values, factor=1.0)})  # type: ignore[arg-type]


def _fewer(values: Tensor) -> Iterator[Tensor]:
    heads = values.shape[1]
    for count in range(1, heads):
        if heads % count == 0:
            few = values[:, :: heads // count]
            if torch.equal(few.repeat_interleave(heads // count, 1), values):
                yield few


def _first(tensors: Sequence[Tensor], values: Tensor) -> Handle | None:
    return next((handle for x in tensors if (handle := _handle(x, values)) is not None), None)


def _handle(tensor: Tensor, values: Tensor) -> Handle | None:
    """Return a handle if the tensor holds the values in some layout, up to a cast."""
    if tensor.numel() != values.numel() or not tensor.numel() or tensor.device != values.device:
        return None
    plain, shape = tensor.detach(), tuple(values.shape)
    assert len(shape) == 4
    if not _near(plain[(-1,) * plain.dim()], values[-1, -1, -1, -1]):  # every layout ends with the same number
        return None
    for layout in _LAYOUTS:
        there = layout(plain, *shape)
        if _close(there[..., -1], values[..., -1]) and _close(there, values):
            return Handle.of(tensor, shape, layout)
    return None


def _same(tensor: Tensor, values: Tensor) -> bool:
    """Return whether the tensor holds the values in their order; samples and heads may be one axis, (B H, L, S)."""
    if tensor.numel() != values.numel() or tensor.device != values.device:
        return False
    axes = [size for size in tensor.shape if size != 1], [size for size in values.shape if size != 1]
    alike = axes[0] == axes[1] or (tensor.dim() == 3 and tensor.shape[-2:] == values.shape[-2:])
    return alike and _close(tensor.detach().reshape(-1), values.reshape(-1))


def _near(one: Tensor, other: Tensor) -> bool:
    """Return False for two numbers that `_close` would tell apart; it takes no operation on tensors."""
    a, b = float(one), float(other)
    limits = max((torch.finfo(one.dtype), torch.finfo(other.dtype)), key=lambda limits: limits.eps)
    return not abs(a - b) > (_COPY_ROUNDINGS + 1) * limits.eps * max(abs(a), abs(b)) + 2 * limits.tiny


def _close(one: Tensor, other: Tensor) -> bool:
    least = min(torch.finfo(one.dtype).bits, torch.finfo(other.dtype).bits)
    dtype = one.dtype if torch.finfo(one.dtype).bits == least else other.dtype
    one, other = one.to(dtype), other.to(dtype)
    return torch.equal(one, other) or torch.allclose(
        one, other, rtol=_COPY_ROUNDINGS * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny, equal_nan=True
    )


def _lse(tensor: Tensor, call: CallTensors) -> Handle | None:
    """Return a handle if the tensor holds the log-sum-exp of the logits."""
    assert call.lse is not None
    batch, heads, rows = call.lse.shape
    if tensor.numel() != call.lse.numel() or tensor.dtype != torch.float32 or tensor.device != call.lse.device:
        return None
    # Rows that see no key are written differently: minus infinity, or 0.
    last, own = float(call.lse[-1, -1, -1]), float(tensor.detach()[(-1,) * tensor.dim()])
    if math.isfinite(last) and math.isfinite(own) and abs(last - own) > 1e-4 * (1 + abs(last)):
        return None
    lse = call.lse.to(torch.float32)
    for layout in _LAYOUTS[:3]:
        there = layout(tensor.detach(), batch, heads, rows, 1)[..., 0]
        finite = lse.isfinite() & there.isfinite()
        if bool(finite.any()) and torch.allclose(there[finite], lse[finite], rtol=1e-5, atol=1e-5):
            return Handle.of(tensor, (batch, heads, rows, 1), layout)
    return None

"""ONNX's operators in torch: the table `ONNX_OPERATIONS` by domain and name, and the short operators.

An operator that the table lacks is reported as not read, and so is everything computed from its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import ModelError, UnsupportedError
from sqrtdk.graphs.graph import to_tensor
from sqrtdk.graphs.onnx_attention import ATTENTION_OPERATIONS, FUSED_OPERATIONS
from sqrtdk.graphs.onnx_blocked import BLOCKED_OPERATIONS
from sqrtdk.graphs.onnx_layers import LAYER_OPERATIONS, fake_quantised
from sqrtdk.graphs.onnx_recurrent import RECURRENT_OPERATIONS
from sqrtdk.graphs.onnx_shapes import SHAPES
from sqrtdk.graphs.onnx_step import OnnxStep, Operation, Result, binary, of_torch, torch_dtype
from sqrtdk.graphs.rewriting import ROUNDED_OPERATOR, TAKEN_OPERATOR
from sqrtdk.messages import Message


def _pairs(function: Callable[[Any, Any], Tensor]) -> Operation:
    def run(step: OnnxStep) -> Tensor:
        # Sum, Max and Min take any number of operands.
        result: Any = step.operand(0)
        for index in range(1, len(step.node.inputs)):
            result = binary(function, result, step.operand(index))
        return result if isinstance(result, Tensor) else step.tensor(0)

    return run


def _reduce(function: Callable[..., Tensor]) -> Operation:
    def run(step: OnnxStep) -> Tensor:
        x, axes, keeps = step.tensor(0), step.listed(1, "axes"), bool(step.attribute("keepdims", 1))
        if step.attribute("noop_with_empty_axes", 0) and not axes:
            return x
        return function(x, tuple(axes or range(x.dim())), keepdim=keeps)

    return run


def _softmax(function: Callable[[Tensor, int], Tensor]) -> Operation:
    def run(step: OnnxStep) -> Tensor:
        x = step.tensor(0)
        opset = step.attribute("opset", step.graph.opset)  # QLinearSoftmax names its opset itself
        axis = step.attribute("axis", -1 if opset >= 13 else 1)
        if opset < 13 and axis not in (-1, x.dim() - 1):  # before opset 13: over all axes from `axis` on
            return function(x.flatten(axis), -1).reshape(x.shape)
        return function(x, axis)

    return run


def _divide(left: Any, right: Any) -> Tensor:
    # ONNX divides integers towards zero.
    whole = all(not (x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)) for x in (left, right))
    return torch.div(left, right, rounding_mode="trunc" if whole else None)


def _where(step: OnnxStep) -> Tensor:
    condition, chosen, other = step.tensor(0), step.operand(1), step.operand(2)
    tested = step.graph.made_by.get(step.node.inputs[0])
    cleans = tested is not None and tested.op == "IsNaN" and tested.inputs[0] == step.node.inputs[2] and chosen == 0
    # where(isnan(w), 0, w): an exporter's zeros for rows that see no key. The weights pass through on the meta device.
    if step.device == "meta" and cleans and isinstance(other, Tensor):
        return other
    # where(mask, scores, -inf) and where(hide, -inf, scores) become masked_fill, which a trace reads as a mask.
    for value, fill, where in ((other, chosen, condition), (chosen, other, None)):
        if isinstance(value, Tensor) and not isinstance(fill, Tensor):
            shape = torch.broadcast_shapes(value.shape, condition.shape)  # type: ignore[no-untyped-call]
            return value.expand(shape).masked_fill(~condition if where is None else where, fill)
    return torch.where(condition, chosen, other)


def _clip(step: OnnxStep) -> Tensor:
    bounds: list[Any] = [
        step.operand(i) if step.given(i) else step.attribute(name, None) for i, name in ((1, "min"), (2, "max"))
    ]
    return step.tensor(0) if bounds == [None, None] else torch.clamp(step.tensor(0), *bounds)


def _range(step: OnnxStep) -> Tensor:
    first, last, by = (step.numbers(i)[0] for i in range(3))
    return torch.arange(first, last, by, dtype=step.tensor(0).dtype, device=step.device)


def _filled(step: OnnxStep) -> Tensor:
    value = to_tensor(step.attribute("value", np.float32(0.0)))
    return torch.full(step.numbers(0), value.flatten()[0].item(), dtype=value.dtype, device=step.device)


def _constant(step: OnnxStep) -> Tensor:
    kinds = ("value", "value_float", "value_floats", "value_int", "value_ints")
    value = next((value for kind in kinds if (value := step.attribute(kind, None)) is not None), None)
    if value is None:
        raise UnsupportedError("a Constant of text, or of none")
    return to_tensor(value).to(step.device)


def _dropout(step: OnnxStep) -> Result:
    x, rates = step.tensor(0), step.given(1)
    trains = step.given(2) and step.device != "meta" and any(step.numbers(2))
    if trains and any(step.numbers(1) if rates else [0.5]):
        raise UnsupportedError("Dropout that trains: its numbers are random")
    return (x, torch.ones_like(x, dtype=torch.bool)) if len(step.node.outputs) > 1 else x


def _product(x: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim)
    return x


_OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Atan": torch.atan, "Ceil": torch.ceil, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp,
    "Floor": torch.floor, "HardSwish": functional.hardswish, "IsNaN": torch.isnan, "Log": torch.log,
    "Mish": functional.mish, "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal,
    "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin,
    "Softplus": functional.softplus, "Softsign": functional.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan,
    "Tanh": torch.tanh,
}  # fmt: skip
_OF_TWO: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": torch.add, "And": torch.logical_and, "Div": _divide, "Equal": torch.eq, "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le, "Max": torch.maximum, "Min": torch.minimum,
    "Mul": torch.mul, "Or": torch.logical_or, "Sub": torch.sub, "Sum": torch.add,
    "Xor": torch.logical_xor,
}  # fmt: skip
_OVER_AXES: dict[str, Callable[..., Tensor]] = {
    "ReduceL1": lambda x, axes, keepdim: x.abs().sum(axes, keepdim),
    "ReduceL2": lambda x, axes, keepdim: torch.linalg.vector_norm(x, 2, axes, keepdim),
    "ReduceLogSum": lambda x, axes, keepdim: x.sum(axes, keepdim).log(),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax,
    "ReduceMean": torch.mean,
    "ReduceMin": torch.amin,
    "ReduceProd": _product,
    "ReduceSum": torch.sum,
    "ReduceSumSquare": lambda x, axes, keepdim: torch.sum(x * x, axes, keepdim),
}
_WITH_ATTRIBUTES: dict[str, Operation] = {
    "ArgMax": of_torch(lambda x, axis, keep: x.argmax(axis, bool(keep)), axis=0, keepdims=1),
    "ArgMin": of_torch(lambda x, axis, keep: x.argmin(axis, bool(keep)), axis=0, keepdims=1),
    "Cast": of_torch(lambda x, to: x.to(torch_dtype(to)), to=1),
    "CastLike": of_torch(lambda x, like: x.to(like.dtype), 2),
    "Celu": of_torch(functional.celu, alpha=1.0),
    "Clip": _clip,
    "Constant": _constant,
    "ConstantOfShape": _filled,
    "Dropout": _dropout,
    "Einsum": lambda step: torch.einsum(step.attribute("equation", ""), *step.tensors()),
    "Elu": of_torch(functional.elu, alpha=1.0),
    "Gelu": of_torch(lambda x, how: functional.gelu(x, approximate=how), approximate="none"),
    "HardSigmoid": of_torch(lambda x, a, b: torch.clamp(x * a + b, 0.0, 1.0), alpha=0.2, beta=0.5),
    "Identity": of_torch(lambda x: x),
    "IsInf": of_torch(
        lambda x, below, above: torch.isinf(x) & ((x > 0) | bool(below)) & ((x < 0) | bool(above)), detect_negative=1,
        detect_positive=1,
    ),
    "LeakyRelu": of_torch(functional.leaky_relu, alpha=0.01),
    "LogSoftmax": _softmax(torch.log_softmax),
    "Mean": lambda step: torch.div(_pairs(torch.add)(step), len(step.inputs)),  # type: ignore[arg-type]
    "Mod": lambda step: _pairs(torch.fmod if step.attribute("fmod", 0) else torch.remainder)(step),
    "Pow": lambda step: _pairs(torch.pow)(step).to(step.tensor(0).dtype),  # type: ignore[union-attr]
    "PRelu": of_torch(lambda x, slope: torch.where(x < 0, x * slope, x), 2),
    "Range": _range,
    "Selu": of_torch(
        lambda x, a, g: g * torch.where(x > 0, x, a * (torch.exp(x) - 1)), alpha=1.6732632423543772,
        gamma=1.0507009873554805,
    ),
    "Softmax": _softmax(torch.softmax),
    "Swish": of_torch(lambda x, a: x * torch.sigmoid(x * a), alpha=1.0),
    "ThresholdedRelu": of_torch(lambda x, alpha: torch.where(x > alpha, x, 0.0), alpha=1.0),
    "Where": _where,
}  # fmt: skip


def _taken(step: OnnxStep) -> Tensor:
    """Return the first input, if each other one holds the value that it had when a branch or a loop was written out."""
    for index, value in enumerate(step.attribute("values", ())):
        held = step.operand(index + 1)
        known = not isinstance(held, Tensor) or not held.is_meta
        if known and bool(torch.as_tensor(held != value).any()):
            raise ModelError(Message("graphs.other_branch", name=step.node.outputs[0][:60]))
    first = step.tensor(0)
    return first.view_as(first)  # a tensor of its own: a step that gives what it takes is left out


ONNX_OPERATIONS: dict[tuple[str, str], Operation] = {
    **{("", name): of_torch(function) for name, function in _OF_ONE.items()},
    **{("", name): _pairs(function) for name, function in _OF_TWO.items()},
    **{("", name): _reduce(function) for name, function in _OVER_AXES.items()},
    **{("", name): operation for name, operation in (_WITH_ATTRIBUTES | SHAPES | LAYER_OPERATIONS).items()},
    **{("", name): operation for name, operation in RECURRENT_OPERATIONS.items()},
    **FUSED_OPERATIONS,
    **ATTENTION_OPERATIONS,
    **BLOCKED_OPERATIONS,
    TAKEN_OPERATOR: _taken,
    ROUNDED_OPERATOR: of_torch(fake_quantised, scale=None, zero=None, fixed=False),
}


def operate(step: OnnxStep) -> dict[str, Tensor]:
    """Return the outputs of an operation by name.

    Raises:
        UnsupportedError: The node has an input or attribute that the operation did not read, or the graph uses an
            output that it does not compute. Ignoring an attribute would give wrong numbers silently.
    """
    node = step.node
    result = ONNX_OPERATIONS[node.domain, node.op](step)
    made = result if isinstance(result, tuple) else (result,)
    lacks = [f"its output {node.outputs.index(n)}" for n in node.outputs[len(made) :] if n in step.graph.taken_by]
    if odd := [*step.unread(), *lacks]:
        raise UnsupportedError(f"{node.op} with {', '.join(odd)}")
    return {name: tensor for name, tensor in zip(node.outputs, made, strict=False) if name}

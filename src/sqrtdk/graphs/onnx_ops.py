"""ONNX's operators as torch's: a table by domain and name, and those that are a line or few.

An operator that is not in `OPERATIONS` is not read; what comes after it is told as not read either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs import onnx_layers as layers
from sqrtdk.graphs import onnx_shapes as shapes
from sqrtdk.graphs.graph import to_tensor
from sqrtdk.graphs.onnx_attention import ATTENTIONS, FUSED
from sqrtdk.graphs.onnx_step import Operation, Result, Step, binary, dtype_of
from sqrtdk.graphs.rewriting import ROUNDED


def _unary(function: Callable[[Tensor], Tensor]) -> Operation:
    return lambda step: function(step.tensor(0))


def _pairs(function: Callable[[Any, Any], Tensor]) -> Operation:
    def run(step: Step) -> Tensor:
        result: Any = step.operand(0)
        for index in range(1, len(step.node.inputs)):
            result = binary(function, result, step.operand(index))
        return result if isinstance(result, Tensor) else step.tensor(0)

    return run


def _parameters(function: Callable[..., Tensor], **defaults: float) -> Operation:
    """An operator of one tensor with numbers as its attributes."""
    return lambda step: function(step.tensor(0), *(step.attribute(name, value) for name, value in defaults.items()))


def _reduce(function: Callable[..., Tensor]) -> Operation:
    def run(step: Step) -> Tensor:
        x, axes = step.tensor(0), step.listed(1, "axes")
        if not axes and step.attribute("noop_with_empty_axes", 0):
            return x
        return function(x, tuple(axes or range(x.dim())), keepdim=bool(step.attribute("keepdims", 1)))

    return run


def _arg(function: Callable[..., Tensor]) -> Operation:
    return lambda step: function(step.tensor(0), step.attribute("axis", 0), bool(step.attribute("keepdims", 1)))


def _softmax(function: Callable[[Tensor, int], Tensor]) -> Operation:
    def run(step: Step) -> Tensor:
        x = step.tensor(0)
        opset = step.attribute("opset", step.graph.opset)  # a quantised one says of which it is
        axis = step.attribute("axis", -1 if opset >= 13 else 1)
        if opset < 13 and axis not in (-1, x.dim() - 1):  # over all axes from this one on
            return function(x.flatten(axis), -1).reshape(x.shape)
        return function(x, axis)

    return run


def _divide(left: Any, right: Any) -> Tensor:
    whole = all(not (x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)) for x in (left, right))
    return torch.div(left, right, rounding_mode="trunc" if whole else None)


def _modulo(step: Step) -> Result:
    """By the divisor's sign, or by the dividend's (`fmod`)."""
    return _pairs(torch.fmod if step.attribute("fmod", 0) else torch.remainder)(step)


def _where(step: Step) -> Tensor:
    condition, kept, other = step.tensor(0), step.operand(1), step.operand(2)
    tested = step.graph.made_by.get(step.node.inputs[0])
    cleans = tested is not None and tested.op == "IsNaN" and tested.inputs[0] == step.node.inputs[2] and kept == 0
    if step.device == "meta" and cleans and isinstance(other, Tensor):  # zeros where a row sees no key
        return other
    for value, fill, where in ((other, kept, condition), (kept, other, None)):
        if isinstance(value, Tensor) and not isinstance(fill, Tensor):
            shape = torch.broadcast_shapes(value.shape, condition.shape)  # type: ignore[no-untyped-call]
            return value.expand(shape).masked_fill(~condition if where is None else where, fill)
    return torch.where(condition, kept, other)


def _clip(step: Step) -> Tensor:
    bounds: list[Any] = [
        step.operand(i) if step.given(i) else step.attribute(name, None) for i, name in ((1, "min"), (2, "max"))
    ]
    return step.tensor(0) if bounds == [None, None] else torch.clamp(step.tensor(0), *bounds)


def _range(step: Step) -> Tensor:
    first, last, by = (step.numbers(i)[0] for i in range(3))
    return torch.arange(first, last, by, dtype=step.tensor(0).dtype, device=step.device)


def _filled(step: Step) -> Tensor:
    value = to_tensor(step.attribute("value", np.float32(0.0)))
    return torch.full(step.numbers(0), value.flatten()[0].item(), dtype=value.dtype, device=step.device)


def _constant(step: Step) -> Tensor:
    value = next((value for key, value in step.node.attributes.items() if key.startswith("value")), None)
    if value is None or isinstance(value, str):
        raise UnsupportedError("a Constant of text, or of none")
    return to_tensor(value).to(step.device)


def _dropout(step: Step) -> Result:
    x = step.tensor(0)
    return (x, torch.ones_like(x, dtype=torch.bool)) if len(step.node.outputs) > 1 else x


def _infinite(step: Step) -> Tensor:
    x, found = step.tensor(0), torch.isinf(step.tensor(0))
    found = found if step.attribute("detect_negative", 1) else found & (x > 0)
    return found if step.attribute("detect_positive", 1) else found & (x < 0)


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
    "Mul": torch.mul, "Or": torch.logical_or, "Pow": torch.pow, "Sub": torch.sub, "Sum": torch.add,
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
_OTHERS: dict[str, Operation] = {
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "AveragePool": layers.average_pool,
    "BatchNormalization": layers.batch_norm,
    "Cast": lambda step: step.tensor(0).to(dtype_of(step.attribute("to", 1))),
    "CastLike": lambda step: step.tensor(0).to(step.tensor(1).dtype),
    "Celu": _parameters(functional.celu, alpha=1.0),
    "Clip": _clip,
    "Concat": shapes.concat,
    "Constant": _constant,
    "ConstantOfShape": _filled,
    "Conv": layers.conv,
    "ConvTranspose": layers.conv_transpose,
    "CumSum": shapes.cumsum,
    "DepthToSpace": shapes.to_space,
    "DequantizeLinear": layers.dequantised,
    "Dropout": _dropout,
    "Einsum": lambda step: torch.einsum(
        step.attribute("equation", ""), *(step.tensor(i) for i in range(len(step.inputs)))
    ),
    "Elu": _parameters(functional.elu, alpha=1.0),
    "Expand": shapes.expand,
    "Flatten": lambda step: step.tensor(0).reshape(math.prod(step.tensor(0).shape[: step.attribute("axis", 1)]), -1),
    "Gather": shapes.gather,
    "GatherElements": lambda step: step.tensor(0).gather(step.attribute("axis", 0), step.tensor(1).long()),
    "GatherND": shapes.gather_nd,
    "Gelu": lambda step: functional.gelu(step.tensor(0), approximate=step.attribute("approximate", "none")),
    "Gemm": layers.product,
    "GlobalAveragePool": lambda step: step.tensor(0).mean((*range(2, step.tensor(0).dim()),), keepdim=True),
    "GlobalMaxPool": lambda step: step.tensor(0).amax((*range(2, step.tensor(0).dim()),), keepdim=True),
    "GroupNormalization": layers.group_norm,
    "HardSigmoid": _parameters(lambda x, a, b: torch.clamp(x * a + b, 0.0, 1.0), alpha=0.2, beta=0.5),
    "Identity": lambda step: step.tensor(0),
    "InstanceNormalization": lambda step: functional.instance_norm(
        step.tensor(0), weight=step.tensor(1), bias=step.tensor(2), eps=step.attribute("epsilon", 1e-5)
    ),
    "IsInf": _infinite,
    "LayerNormalization": layers.layer_norm,
    "LeakyRelu": _parameters(functional.leaky_relu, alpha=0.01),
    "LogSoftmax": _softmax(torch.log_softmax),
    "LpNormalization": lambda step: functional.normalize(
        step.tensor(0), step.attribute("p", 2), step.attribute("axis", -1)
    ),
    "LpPool": layers.lp_pool,
    "MatMul": layers.product,
    "MaxPool": layers.max_pool,
    "Mean": lambda step: torch.div(_pairs(torch.add)(step), len(step.inputs)),  # type: ignore[arg-type]
    "Mod": _modulo,
    "OneHot": shapes.one_hot,
    "Pad": shapes.pad,
    "PRelu": lambda step: torch.where(step.tensor(0) < 0, step.tensor(0) * step.tensor(1), step.tensor(0)),
    "Range": _range,
    "Reshape": shapes.reshape,
    "Resize": layers.resize,
    "RMSNormalization": layers.rms_norm,
    "ScatterElements": shapes.scatter,
    "ScatterND": shapes.scatter_nd,
    "Selu": _parameters(
        lambda x, a, g: g * torch.where(x > 0, x, a * (torch.exp(x) - 1)),
        alpha=1.6732632423543772,
        gamma=1.0507009873554805,
    ),
    "Shape": lambda step: torch.tensor(
        step.tensor(0).shape[step.attribute("start", 0) : step.attribute("end", None)],
        dtype=torch.int64,
        device=step.device,
    ),
    "SimplifiedLayerNormalization": layers.rms_norm,
    "Size": lambda step: torch.tensor(step.tensor(0).numel(), device=step.device),
    "Slice": shapes.cut,
    "Softmax": _softmax(torch.softmax),
    "SpaceToDepth": shapes.to_depth,
    "Split": shapes.split,
    "Squeeze": shapes.squeeze,
    "Swish": lambda step: step.tensor(0) * torch.sigmoid(step.tensor(0) * step.attribute("alpha", 1.0)),
    "ThresholdedRelu": _parameters(lambda x, alpha: torch.where(x > alpha, x, 0.0), alpha=1.0),
    "Tile": lambda step: step.tensor(0).repeat(step.numbers(1)),
    "TopK": shapes.top_k,
    "Transpose": lambda step: step.tensor(0).permute(step.attribute("perm", [*range(step.tensor(0).dim())][::-1])),
    "Trilu": shapes.trilu,
    "Unsqueeze": shapes.unsqueeze,
    "Upsample": layers.resize,
    "Where": _where,
}
OPERATIONS: dict[tuple[str, str], Operation] = {
    **{("", name): _unary(function) for name, function in _OF_ONE.items()},
    **{("", name): _pairs(function) for name, function in _OF_TWO.items()},
    **{("", name): _reduce(function) for name, function in _OVER_AXES.items()},
    **{("", name): operation for name, operation in _OTHERS.items()},
    **FUSED,
    **ATTENTIONS,
    ROUNDED: layers.rounded,
}

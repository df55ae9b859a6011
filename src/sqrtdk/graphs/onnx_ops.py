"""ONNX's operators as torch's, for tensors on the meta device: shapes, and what a trace follows. No weights are read.

An operator that is not in `OPERATIONS` is not read; what comes after it is told as not read either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs import onnx_fused as fused
from sqrtdk.graphs import onnx_layers as layers
from sqrtdk.graphs import onnx_shapes as shapes
from sqrtdk.graphs import onnx_windows as windows
from sqrtdk.graphs.onnx_fused import FUSED
from sqrtdk.graphs.onnx_layers import Operation, Result
from sqrtdk.graphs.onnx_step import Step, binary, dtype_of
from sqrtdk.graphs.rewriting import ROUNDED
from sqrtdk.graphs.session import to_tensor


def _unary(function: Callable[[Tensor], Tensor]) -> Operation:
    return lambda step: function(step.tensor(0))


def _pairs(function: Callable[[Any, Any], Tensor]) -> Operation:
    def run(step: Step) -> Tensor:
        result: Any = step.operand(0)
        for index in range(1, len(step.node.inputs)):
            result = binary(function, result, step.operand(index))
        return result if isinstance(result, Tensor) else step.tensor(0)

    return run


def _divide(left: Any, right: Any) -> Tensor:
    whole = all(not (x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)) for x in (left, right))
    return torch.div(left, right, rounding_mode="trunc" if whole else None)


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


def _matmul(step: Step) -> Tensor:
    return step.tensor(0) @ step.weight(1)


def _einsum(step: Step) -> Tensor:
    made: Tensor = torch.einsum(str(step.attribute("equation", "")), *(step.tensor(i) for i in range(step.count)))
    return made


def _cast(step: Step) -> Tensor:
    return step.tensor(0).to(dtype_of(int(step.attribute("to", 1))))


def _softmax(step: Step) -> Tensor:
    x = step.tensor(0)
    opset = int(step.attribute("opset", step.opset))  # a quantised one says of which it is
    axis = step.attribute("axis", -1 if opset >= 13 else 1)
    if opset < 13 and axis not in (-1, x.dim() - 1):  # over all axes from this one on
        return x.flatten(axis).softmax(-1).reshape(x.shape)
    return x.softmax(axis)


def _reduce(function: Callable[..., Tensor]) -> Operation:
    def run(step: Step) -> Tensor:
        x, axes = step.tensor(0), shapes.given_axes(step)
        if not axes and step.attribute("noop_with_empty_axes", 0):
            return x
        return function(x, tuple(axes or range(x.dim())), keepdim=bool(step.attribute("keepdims", 1)))

    return run


def _clip(step: Step) -> Tensor:
    x, bounds = step.tensor(0), [step.attribute("min", None), step.attribute("max", None)]
    for i in (1, 2):
        if step.given(i):
            bounds[i - 1] = step.operand(i)
    if bounds == [None, None]:
        return x
    return torch.clamp(x, *bounds)


def _gelu(step: Step) -> Tensor:
    return functional.gelu(step.tensor(0), approximate=str(step.attribute("approximate", "none")))


def _range(step: Step) -> Tensor:
    first, last, by = (step.number(i) for i in range(3))
    return torch.arange(first, last, by, dtype=step.dtype(0), device=step.device)


def _filled(step: Step) -> Tensor:
    value = step.attribute("value", None)
    number = 0.0 if value is None else value.flatten()[0].item()
    dtype = torch.float32 if value is None else to_tensor(value).dtype
    return torch.full(step.numbers(0), number, dtype=dtype, device=step.device)


def _constant(step: Step) -> Tensor:
    value = next((value for key, value in step.node.attributes.items() if key.startswith("value")), None)
    if value is None or isinstance(value, str):
        raise UnsupportedError("a Constant of text, or of none")
    return to_tensor(value).to(step.device)


def _arg(largest: bool) -> Operation:
    def run(step: Step) -> Tensor:
        axis, keep = int(step.attribute("axis", 0)), bool(step.attribute("keepdims", 1))
        return (torch.argmax if largest else torch.argmin)(step.tensor(0), axis, keep)

    return run


def _l2(x: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    made: Tensor = torch.linalg.vector_norm(x, 2, axes, keepdim)
    return made


def _dropout(step: Step) -> Result:
    x = step.tensor(0)
    return (x, torch.ones_like(x, dtype=torch.bool)) if len(step.node.outputs) > 1 else x


def _parameters(function: Callable[..., Tensor], **defaults: float) -> Operation:
    """An operator of one tensor with numbers as its attributes."""

    def run(step: Step) -> Tensor:
        return function(step.tensor(0), *(float(step.attribute(name, value)) for name, value in defaults.items()))

    return run


def _selu(x: Tensor, alpha: float, gamma: float) -> Tensor:
    return gamma * torch.where(x > 0, x, alpha * (torch.exp(x) - 1))


def _modulo(step: Step) -> Tensor:
    """By the divisor's sign, or by the dividend's (`fmod`)."""
    return _pairs(torch.fmod if step.attribute("fmod", 0) else torch.remainder)(step)  # type: ignore[return-value]


def _infinite(step: Step) -> Tensor:
    x, found = step.tensor(0), torch.isinf(step.tensor(0))
    found = found if step.attribute("detect_negative", 1) else found & (x > 0)
    return found if step.attribute("detect_positive", 1) else found & (x < 0)


def _log_softmax(step: Step) -> Tensor:
    x = step.tensor(0)
    axis = int(step.attribute("axis", -1 if step.opset >= 13 else 1))
    if step.opset < 13 and axis not in (-1, x.dim() - 1):
        return x.flatten(axis).log_softmax(-1).reshape(x.shape)
    return x.log_softmax(axis)


def _product(x: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim)
    return x


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("", name): operation
    for name, operation in {
        "Abs": _unary(torch.abs),
        "Add": _pairs(torch.add),
        "And": _pairs(torch.logical_and),
        "ArgMax": _arg(True),
        "ArgMin": _arg(False),
        "Atan": _unary(torch.atan),
        "AveragePool": windows.average_pool,
        "BatchNormalization": layers.batch_norm,
        "Cast": _cast,
        "CastLike": lambda step: step.tensor(0).to(step.dtype(1)),
        "Ceil": _unary(torch.ceil),
        "Celu": _parameters(functional.celu, alpha=1.0),
        "Clip": _clip,
        "Concat": shapes.concat,
        "Constant": _constant,
        "ConstantOfShape": _filled,
        "Conv": windows.conv,
        "ConvTranspose": windows.conv_transpose,
        "Cos": _unary(torch.cos),
        "CumSum": layers.cumsum,
        "DepthToSpace": layers.to_space,
        "DequantizeLinear": layers.dequantised,
        "Div": _pairs(_divide),
        "Dropout": _dropout,
        "Einsum": _einsum,
        "Elu": _parameters(functional.elu, alpha=1.0),
        "Equal": _pairs(torch.eq),
        "Erf": _unary(torch.erf),
        "Exp": _unary(torch.exp),
        "Expand": shapes.expand,
        "Flatten": shapes.flatten,
        "Floor": _unary(torch.floor),
        "Gather": shapes.gather,
        "GatherElements": layers.gather_elements,
        "GatherND": shapes.gather_nd,
        "Gelu": _gelu,
        "Gemm": fused.gemm,
        "GlobalAveragePool": windows.global_average,
        "GlobalMaxPool": windows.global_max,
        "Greater": _pairs(torch.gt),
        "GreaterOrEqual": _pairs(torch.ge),
        "GroupNormalization": layers.group_norm,
        "HardSigmoid": _parameters(lambda x, a, b: torch.clamp(x * a + b, 0.0, 1.0), alpha=0.2, beta=0.5),
        "HardSwish": _unary(functional.hardswish),
        "Identity": lambda step: step.tensor(0),
        "InstanceNormalization": layers.instance_norm,
        "IsInf": _infinite,
        "IsNaN": _unary(torch.isnan),
        "LayerNormalization": layers.layer_norm,
        "LeakyRelu": _parameters(functional.leaky_relu, alpha=0.01),
        "Less": _pairs(torch.lt),
        "LessOrEqual": _pairs(torch.le),
        "Log": _unary(torch.log),
        "LogSoftmax": _log_softmax,
        "LpNormalization": layers.lp,
        "LpPool": windows.lp_pool,
        "MatMul": _matmul,
        "Max": _pairs(torch.maximum),
        "MaxPool": windows.max_pool,
        "Mish": _unary(functional.mish),
        "Mean": lambda step: _pairs(torch.add)(step) / step.count,  # type: ignore[operator]
        "Min": _pairs(torch.minimum),
        "Mod": _modulo,
        "Mul": _pairs(torch.mul),
        "Neg": _unary(torch.neg),
        "Not": _unary(torch.logical_not),
        "OneHot": layers.one_hot,
        "Or": _pairs(torch.logical_or),
        "Pad": layers.pad,
        "PRelu": lambda step: torch.where(step.tensor(0) < 0, step.tensor(0) * step.tensor(1), step.tensor(0)),
        "Pow": _pairs(torch.pow),
        "Range": _range,
        "Reciprocal": _unary(torch.reciprocal),
        "ReduceL1": _reduce(lambda x, axes, keepdim: x.abs().sum(axes, keepdim)),
        "ReduceL2": _reduce(_l2),
        "ReduceLogSum": _reduce(lambda x, axes, keepdim: x.sum(axes, keepdim).log()),
        "ReduceLogSumExp": _reduce(torch.logsumexp),
        "ReduceMax": _reduce(torch.amax),
        "ReduceMean": _reduce(torch.mean),
        "ReduceMin": _reduce(torch.amin),
        "ReduceProd": _reduce(_product),
        "ReduceSum": _reduce(torch.sum),
        "ReduceSumSquare": _reduce(lambda x, axes, keepdim: torch.sum(x * x, axes, keepdim)),
        "Relu": _unary(torch.relu),
        "Reshape": shapes.reshape,
        "Resize": layers.resize,
        "RMSNormalization": layers.rms_norm,
        "Round": _unary(torch.round),
        "ScatterElements": layers.scatter,
        "ScatterND": layers.scatter_nd,
        "Selu": _parameters(_selu, alpha=1.6732632423543772, gamma=1.0507009873554805),
        "Shape": shapes.shape,
        "Sigmoid": _unary(torch.sigmoid),
        "Sign": _unary(torch.sign),
        "SimplifiedLayerNormalization": layers.rms_norm,
        "Sin": _unary(torch.sin),
        "Size": lambda step: torch.tensor(step.tensor(0).numel(), device=step.device),
        "Slice": shapes.cut,
        "Softmax": _softmax,
        "Softplus": _unary(functional.softplus),
        "Softsign": _unary(functional.softsign),
        "SpaceToDepth": layers.to_depth,
        "Split": shapes.split,
        "Sqrt": _unary(torch.sqrt),
        "Squeeze": shapes.squeeze,
        "Sub": _pairs(torch.sub),
        "Sum": _pairs(torch.add),
        "Swish": lambda step: step.tensor(0) * torch.sigmoid(step.tensor(0) * float(step.attribute("alpha", 1.0))),
        "Tan": _unary(torch.tan),
        "Tanh": _unary(torch.tanh),
        "ThresholdedRelu": _parameters(lambda x, alpha: torch.where(x > alpha, x, 0.0), alpha=1.0),
        "Tile": lambda step: step.tensor(0).repeat(step.numbers(1)),
        "TopK": layers.top_k,
        "Transpose": shapes.transpose,
        "Trilu": layers.trilu,
        "Unsqueeze": shapes.unsqueeze,
        "Upsample": layers.resize,
        "Where": _where,
        "Xor": _pairs(torch.logical_xor),
    }.items()
}
OPERATIONS |= FUSED
OPERATIONS[ROUNDED] = layers.rounded

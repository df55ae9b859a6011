"""ONNX's operators as torch's, for tensors on the meta device: shapes, and what a trace follows. No weights are read.

An operator that is not in `OPERATIONS` is not read; what comes after it is told as not read either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs import onnx_layers as layers
from sqrtdk.graphs.onnx_layers import Operation, Result
from sqrtdk.graphs.onnx_step import Step, binary, dtype_of
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
    if cleans and isinstance(other, Tensor):  # zeros for the weights of a row that sees no key
        return other
    for value, fill, where in ((other, kept, condition), (kept, other, None)):
        if isinstance(value, Tensor) and not isinstance(fill, Tensor):
            shape = torch.broadcast_shapes(value.shape, condition.shape)  # type: ignore[no-untyped-call]
            return value.expand(shape).masked_fill(~condition if where is None else where, fill)
    return torch.where(condition, kept, other)


def _matmul(step: Step) -> Tensor:
    return step.tensor(0) @ step.weight(1)


def _gemm(step: Step) -> Tensor:
    left, right = step.tensor(0), step.weight(1)
    left = left.mT if step.attribute("transA", 0) else left
    right = right.mT if step.attribute("transB", 0) else right
    alpha, beta = float(step.attribute("alpha", 1.0)), float(step.attribute("beta", 1.0))
    made = left @ right
    made = made if alpha == 1.0 else made * alpha
    if not step.given(2):
        return made
    bias = step.tensor(2)
    return made + (bias if beta == 1.0 else bias * beta)


def _fused_matmul(step: Step) -> Tensor:
    left, right = step.tensor(0), step.weight(1)
    if step.attribute("transBatchA", 0) or step.attribute("transBatchB", 0):
        raise UnsupportedError("FusedMatMul with transposed batches")
    left = left.mT if step.attribute("transA", 0) else left
    right = right.mT if step.attribute("transB", 0) else right
    alpha = float(step.attribute("alpha", 1.0))
    return left @ right if alpha == 1.0 else (left @ right) * alpha


def _einsum(step: Step) -> Tensor:
    made: Tensor = torch.einsum(str(step.attribute("equation", "")), *(step.tensor(i) for i in range(step.count)))
    return made


def _cast(step: Step) -> Tensor:
    return step.tensor(0).to(dtype_of(int(step.attribute("to", 1))))


def _softmax(step: Step) -> Tensor:
    x = step.tensor(0)
    axis = step.attribute("axis", -1 if step.opset >= 13 else 1)
    if step.opset < 13 and axis not in (-1, x.dim() - 1):  # over all axes from this one on
        return x.flatten(axis).softmax(-1).reshape(x.shape)
    return x.softmax(axis)


def _reshape(step: Step) -> Tensor:
    x, sizes = step.tensor(0), step.numbers(1) if step.given(1) else [int(n) for n in step.attribute("shape", [])]
    if not step.attribute("allowzero", 0):
        sizes = [x.shape[i] if size == 0 and i < x.dim() else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _axes(step: Step) -> list[int] | None:
    found = step.numbers(1) if step.given(1) else step.attribute("axes", None)
    return None if found is None else [int(axis) for axis in found]


def _squeeze(step: Step) -> Tensor:
    axes = _axes(step)
    return step.tensor(0).squeeze() if axes is None else step.tensor(0).squeeze(tuple(axes))


def _unsqueeze(step: Step) -> Tensor:
    x, axes = step.tensor(0), _axes(step) or []
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _flatten(step: Step) -> Tensor:
    x, axis = step.tensor(0), int(step.attribute("axis", 1))
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _transpose(step: Step) -> Tensor:
    x = step.tensor(0)
    return x.permute(tuple(step.attribute("perm", [*range(x.dim())][::-1])))


def _expand(step: Step) -> Tensor:
    x = step.tensor(0)
    return x.expand(torch.broadcast_shapes(x.shape, tuple(step.numbers(1))))  # type: ignore[no-untyped-call]


def _concat(step: Step) -> Tensor:
    axis = int(step.attribute("axis", 0))
    parts = [step.tensor(i) for i in range(step.count)]
    full = [part for part in parts if part.shape[axis]]  # without a cache that is empty
    return torch.cat(full, axis) if len(full) > 1 else (full or parts)[0]


def _split(step: Step) -> Result:
    x, axis, count = step.tensor(0), int(step.attribute("axis", 0)), len(step.node.outputs)
    given = step.numbers(1) if step.given(1) else step.attribute("split", None)
    if given is None:
        most = -(-x.shape[axis] // count)
        given = [min(most, x.shape[axis] - most * i) for i in range(count)]
    return torch.split(x, [int(size) for size in given], axis)


def _slice(step: Step) -> Tensor:
    x = step.tensor(0)
    if step.given(1):
        starts, ends = step.numbers(1), step.numbers(2)
        axes = step.numbers(3) if step.given(3) else [*range(len(starts))]
        steps = step.numbers(4) if step.given(4) else [1] * len(starts)
    else:
        starts, ends = list(step.attribute("starts", [])), list(step.attribute("ends", []))
        axes, steps = list(step.attribute("axes", [*range(len(starts))])), [1] * len(starts)
    for start, end, axis, stride in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        if stride > 0:
            first, last, _ = slice(start, end).indices(size)  # torch warns of numbers far beyond an axis
            x = x[(slice(None),) * (axis % x.dim()) + (slice(first, max(first, last), stride),)]
        else:
            taken = range(size)[slice(start, None if end < -size else end, stride)]
            x = x.flip(axis) if len(taken) == size else x.index_select(axis, torch.tensor([*taken]).to(x.device))
    return x


def _gather(step: Step) -> Tensor:
    data = step.weight(0) if not step.known(1) else step.tensor(0)
    axis = int(step.attribute("axis", 0)) % max(data.dim(), 1)
    if step.known(1):
        numbers = step.numbers(1)
        shape = step.shape(1)
        if not shape:
            return data.select(axis, numbers[0])
        if len(numbers) == 1:
            at = numbers[0] % data.shape[axis]
            return data.narrow(axis, at, 1).reshape(*data.shape[:axis], *shape, *data.shape[axis + 1 :])
    indices = step.tensor(1)
    if data.dim() == 2 and axis == 0:
        return functional.embedding(indices, data)
    return data[(slice(None),) * axis + (indices,)]


def _gather_nd(step: Step) -> Tensor:
    if step.attribute("batch_dims", 0):
        raise UnsupportedError("GatherND with batch_dims")
    return step.tensor(0)[tuple(step.tensor(1).long().unbind(-1))]


def _reduce(function: Callable[..., Tensor]) -> Operation:
    def run(step: Step) -> Tensor:
        x, axes = step.tensor(0), _axes(step)
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


def _shape(step: Step) -> Tensor:
    x = step.tensor(0)
    first, last = step.attribute("start", 0), step.attribute("end", x.dim())
    return torch.tensor([*x.shape][first:last], dtype=torch.int64, device=step.device)


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


def _quick_gelu(step: Step) -> Tensor:
    x = step.tensor(0)
    return x * torch.sigmoid(x * float(step.attribute("alpha", 1.702)))


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("", name): operation
    for name, operation in {
        "Abs": _unary(torch.abs),
        "Add": _pairs(torch.add),
        "And": _pairs(torch.logical_and),
        "ArgMax": _arg(True),
        "ArgMin": _arg(False),
        "BatchNormalization": layers.batch_norm,
        "Cast": _cast,
        "CastLike": lambda step: step.tensor(0).to(step.dtype(1)),
        "Ceil": _unary(torch.ceil),
        "Clip": _clip,
        "Concat": _concat,
        "Constant": _constant,
        "ConstantOfShape": _filled,
        "Conv": layers.conv,
        "Cos": _unary(torch.cos),
        "CumSum": layers.cumsum,
        "DequantizeLinear": layers.dequantised,
        "Div": _pairs(_divide),
        "Dropout": _dropout,
        "Einsum": _einsum,
        "Elu": _unary(functional.elu),
        "Equal": _pairs(torch.eq),
        "Erf": _unary(torch.erf),
        "Exp": _unary(torch.exp),
        "Expand": _expand,
        "Flatten": _flatten,
        "Floor": _unary(torch.floor),
        "Gather": _gather,
        "GatherElements": layers.gather_elements,
        "GatherND": _gather_nd,
        "Gelu": _gelu,
        "Gemm": _gemm,
        "GlobalAveragePool": layers.average,
        "Greater": _pairs(torch.gt),
        "GreaterOrEqual": _pairs(torch.ge),
        "HardSigmoid": _unary(functional.hardsigmoid),
        "HardSwish": _unary(functional.hardswish),
        "Identity": lambda step: step.tensor(0),
        "IsInf": _unary(torch.isinf),
        "IsNaN": _unary(torch.isnan),
        "LayerNormalization": layers.layer_norm,
        "LeakyRelu": _unary(functional.leaky_relu),
        "Less": _pairs(torch.lt),
        "LessOrEqual": _pairs(torch.le),
        "Log": _unary(torch.log),
        "LogSoftmax": lambda step: step.tensor(0).log_softmax(int(step.attribute("axis", -1))),
        "LpNormalization": layers.lp,
        "MatMul": _matmul,
        "Max": _pairs(torch.maximum),
        "MaxPool": layers.max_pool,
        "Mish": _unary(functional.mish),
        "Min": _pairs(torch.minimum),
        "Mod": _pairs(torch.remainder),
        "Mul": _pairs(torch.mul),
        "Neg": _unary(torch.neg),
        "Not": _unary(torch.logical_not),
        "OneHot": layers.one_hot,
        "Or": _pairs(torch.logical_or),
        "Pad": layers.pad,
        "Pow": _pairs(torch.pow),
        "Range": _range,
        "Reciprocal": _unary(torch.reciprocal),
        "ReduceL2": _reduce(_l2),
        "ReduceMax": _reduce(torch.amax),
        "ReduceMean": _reduce(torch.mean),
        "ReduceMin": _reduce(torch.amin),
        "ReduceSum": _reduce(torch.sum),
        "ReduceSumSquare": _reduce(lambda x, axes, keepdim: torch.sum(x * x, axes, keepdim)),
        "Relu": _unary(torch.relu),
        "Reshape": _reshape,
        "Resize": layers.resize,
        "RMSNormalization": layers.rms_norm,
        "Round": _unary(torch.round),
        "ScatterElements": layers.scatter,
        "ScatterND": layers.scatter_nd,
        "Selu": _unary(functional.selu),
        "Shape": _shape,
        "Sigmoid": _unary(torch.sigmoid),
        "Sign": _unary(torch.sign),
        "SimplifiedLayerNormalization": layers.rms_norm,
        "Sin": _unary(torch.sin),
        "Size": lambda step: torch.tensor(step.tensor(0).numel(), device=step.device),
        "Slice": _slice,
        "Softmax": _softmax,
        "Softplus": _unary(functional.softplus),
        "Split": _split,
        "Sqrt": _unary(torch.sqrt),
        "Squeeze": _squeeze,
        "Sub": _pairs(torch.sub),
        "Sum": _pairs(torch.add),
        "Swish": _unary(functional.silu),
        "Tanh": _unary(torch.tanh),
        "Tile": lambda step: step.tensor(0).repeat(step.numbers(1)),
        "TopK": layers.top_k,
        "Transpose": _transpose,
        "Trilu": layers.trilu,
        "Unsqueeze": _unsqueeze,
        "Where": _where,
        "Xor": _pairs(torch.logical_xor),
    }.items()
}
OPERATIONS |= {
    ("com.microsoft", "FusedMatMul"): _fused_matmul,
    ("com.microsoft", "MatMulNBits"): layers.quantised_matmul,
    ("com.microsoft", "Gelu"): _unary(functional.gelu),
    ("com.microsoft", "FastGelu"): lambda step: functional.gelu(
        step.tensor(0) + step.tensor(1) if step.given(1) else step.tensor(0), approximate="tanh"
    ),
    ("com.microsoft", "BiasGelu"): lambda step: functional.gelu(step.tensor(0) + step.tensor(1)),
    ("com.microsoft", "QuickGelu"): _quick_gelu,
    ("com.microsoft", "SkipLayerNormalization"): layers.skip_norm(False),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): layers.skip_norm(True),
}

"""ONNX's operators as torch's, for tensors on the meta device: shapes, and what a trace follows. No weights are read.

An operator that is not in `OPERATIONS` is not read; what comes after it is told as not read either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_step import Step, binary, dtype_of

Result = Tensor | tuple[Tensor, ...]
Operation = Callable[[Step], Result]


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
            x = x[(slice(None),) * (axis % x.dim()) + (slice(start, min(end, size), stride),)]
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


def _layer_norm(step: Step) -> Tensor:
    x, axis = step.tensor(0), int(step.attribute("axis", -1))
    bias = step.tensor(2) if step.given(2) else None
    return functional.layer_norm(x, x.shape[axis:], step.weight(1), bias, float(step.attribute("epsilon", 1e-5)))


def _rms_norm(step: Step) -> Tensor:
    x, axis = step.tensor(0), int(step.attribute("axis", -1))
    return functional.rms_norm(x, x.shape[axis:], step.weight(1), float(step.attribute("epsilon", 1e-5)))


def _skip_norm(rms: bool) -> Operation:
    def run(step: Step) -> Result:
        """The sum of two tensors and a bias, normalised; the sum is the fourth output."""
        total = step.tensor(0) + step.tensor(1)
        place = 3 if rms else 4
        total = total + step.tensor(place) if step.given(place) else total
        epsilon, shape = float(step.attribute("epsilon", 1e-5)), total.shape[-1:]
        bias = step.tensor(3) if not rms and step.given(3) else None
        made = (
            functional.rms_norm(total, shape, step.weight(2), epsilon)
            if rms
            else functional.layer_norm(total, shape, step.weight(2), bias, epsilon)
        )
        return made, total[..., 0], total[..., 0], total

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


def _cumsum(step: Step) -> Tensor:
    x, axis = step.tensor(0), step.numbers(1)[0]
    if step.attribute("reverse", 0):
        raise UnsupportedError("CumSum in reverse")
    made = x.cumsum(axis)
    return (made - x if step.attribute("exclusive", 0) else made).to(x.dtype)


def _trilu(step: Step) -> Tensor:
    diagonal = step.numbers(1)[0] if step.given(1) else 0
    return step.tensor(0).triu(diagonal) if step.attribute("upper", 1) else step.tensor(0).tril(diagonal)


def _range(step: Step) -> Tensor:
    first, last, by = (step.number(i) for i in range(3))
    return torch.arange(first, last, by, dtype=step.dtype(0), device=step.device)


def _filled(step: Step) -> Tensor:
    value = step.attribute("value", None)
    number = 0.0 if value is None else value.flatten()[0].item()
    dtype = torch.float32 if value is None else torch.from_numpy(value).dtype
    return torch.full(step.numbers(0), number, dtype=dtype, device=step.device)


def _constant(step: Step) -> Tensor:
    value = next((value for key, value in step.node.attributes.items() if key.startswith("value")), None)
    if value is None or isinstance(value, str):
        raise UnsupportedError("a Constant of text, or of none")
    return torch.as_tensor(value).to(step.device)


def _shape(step: Step) -> Tensor:
    x = step.tensor(0)
    first, last = step.attribute("start", 0), step.attribute("end", x.dim())
    return torch.tensor([*x.shape][first:last], dtype=torch.int64, device=step.device)


def _conv(step: Step) -> Tensor:
    x, kernel = step.tensor(0), step.weight(1)
    spatial = x.dim() - 2
    if not 1 <= spatial <= 3:
        raise UnsupportedError("Conv of another rank")
    pads = [int(pad) for pad in step.attribute("pads", [0] * 2 * spatial)]
    if step.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise UnsupportedError("Conv with auto_pad")
    if pads[:spatial] != pads[spatial:]:
        flat = [pad for i in range(spatial - 1, -1, -1) for pad in (pads[i], pads[spatial + i])]
        x, pads = functional.pad(x, flat), [0] * spatial
    convolve: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[spatial - 1]
    made: Tensor = convolve(
        x,
        kernel,
        step.tensor(2) if step.given(2) else None,
        tuple(step.attribute("strides", [1] * spatial)),
        tuple(pads[:spatial]),
        tuple(step.attribute("dilations", [1] * spatial)),
        int(step.attribute("group", 1)),
    )
    return made


def _max_pool(step: Step) -> Tensor:
    x, size = step.tensor(0), tuple(step.attribute("kernel_shape", []))
    pads = step.attribute("pads", [0] * 2 * len(size))
    if len(size) != 2 or [*pads[:2]] != [*pads[2:]]:
        raise UnsupportedError("MaxPool of another rank, or with pads that differ")
    strides = tuple(step.attribute("strides", [1, 1]))
    return functional.max_pool2d(x, size, strides, tuple(pads[:2]), ceil_mode=bool(step.attribute("ceil_mode", 0)))


def _average(step: Step) -> Tensor:
    return step.tensor(0).mean((*range(2, step.tensor(0).dim()),), keepdim=True)


def _pad(step: Step) -> Tensor:
    x = step.tensor(0)
    pads = step.numbers(1) if step.given(1) else [int(pad) for pad in step.attribute("pads", [])]
    axes = [axis % x.dim() for axis in step.numbers(3)] if step.given(3) else [*range(x.dim())]
    value = step.number(2) if step.given(2) else 0.0
    flat = [0] * 2 * x.dim()
    for i, axis in enumerate(axes):
        flat[2 * (x.dim() - 1 - axis) : 2 * (x.dim() - axis)] = [pads[i], pads[len(axes) + i]]
    if step.attribute("mode", "constant") != "constant":
        raise UnsupportedError("Pad that is not constant")
    return functional.pad(x, flat, value=value)


def _resize(step: Step) -> Tensor:
    x = step.tensor(0)
    if step.given(3):
        sizes = step.numbers(3)
    elif step.given(2):
        factors = step.floats(2)
        sizes = [int(size * factor) for size, factor in zip(x.shape, factors, strict=True)]
    else:
        raise UnsupportedError("Resize without sizes")
    return torch.empty(sizes, dtype=x.dtype, device=x.device) * x.mean()  # where it lies does not matter


def _arg(largest: bool) -> Operation:
    def run(step: Step) -> Tensor:
        axis, keep = int(step.attribute("axis", 0)), bool(step.attribute("keepdims", 1))
        return (torch.argmax if largest else torch.argmin)(step.tensor(0), axis, keep)

    return run


def _top_k(step: Step) -> Result:
    axis, largest = int(step.attribute("axis", -1)), bool(step.attribute("largest", 1))
    values, indices = step.tensor(0).topk(step.numbers(1)[0], axis, largest)
    return values, indices


def _one_hot(step: Step) -> Tensor:
    return functional.one_hot(step.tensor(0).long(), step.numbers(1)[0]).to(step.dtype(2))


def _scatter(step: Step) -> Tensor:
    axis = int(step.attribute("axis", 0))
    return step.tensor(0).scatter(axis, step.tensor(1).long(), step.tensor(2))


def _scatter_nd(step: Step) -> Tensor:
    x, indices = step.tensor(0), step.tensor(1).long()
    return x.index_put(tuple(indices.unbind(-1)), step.tensor(2))


def _l2(x: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    made: Tensor = torch.linalg.vector_norm(x, 2, axes, keepdim)
    return made


def _lp(step: Step) -> Tensor:
    x, axis = step.tensor(0), int(step.attribute("axis", -1))
    return functional.normalize(x, float(step.attribute("p", 2)), axis)


def _dropout(step: Step) -> Result:
    x = step.tensor(0)
    return (x, torch.ones_like(x, dtype=torch.bool)) if len(step.node.outputs) > 1 else x


def _quick_gelu(step: Step) -> Tensor:
    x = step.tensor(0)
    return x * torch.sigmoid(x * float(step.attribute("alpha", 1.702)))


def _batch_norm(step: Step) -> Tensor:
    x, gain, shift, mean, variance = (step.tensor(i) for i in range(5))
    epsilon = float(step.attribute("epsilon", 1e-5))
    return functional.batch_norm(x, mean, variance, gain, shift, False, 0.0, epsilon)


def _quantised_matmul(step: Step) -> Tensor:
    """A product with a weight of few bits, whose shape alone is told."""
    x = step.tensor(0)
    rows, columns = int(step.attribute("K", x.shape[-1])), int(step.attribute("N", 0))
    if rows != x.shape[-1] or columns < 1:
        raise UnsupportedError("MatMulNBits of sizes that do not fit")
    return x @ nn.Parameter(torch.empty(rows, columns, dtype=x.dtype, device=x.device), requires_grad=False)


def _dequantised(step: Step) -> Tensor:
    """A weight of few bits as what it stands for: of its values nothing is told."""
    return nn.Parameter(torch.empty(step.shape(0), dtype=step.dtype(1), device=step.device), requires_grad=False)


def _gather_elements(step: Step) -> Tensor:
    return step.tensor(0).gather(int(step.attribute("axis", 0)), step.tensor(1).long())


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("", name): operation
    for name, operation in {
        "Abs": _unary(torch.abs),
        "Add": _pairs(torch.add),
        "And": _pairs(torch.logical_and),
        "ArgMax": _arg(True),
        "ArgMin": _arg(False),
        "BatchNormalization": _batch_norm,
        "Cast": _cast,
        "CastLike": lambda step: step.tensor(0).to(step.dtype(1)),
        "Ceil": _unary(torch.ceil),
        "Clip": _clip,
        "Concat": _concat,
        "Constant": _constant,
        "ConstantOfShape": _filled,
        "Conv": _conv,
        "Cos": _unary(torch.cos),
        "CumSum": _cumsum,
        "DequantizeLinear": _dequantised,
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
        "GatherElements": _gather_elements,
        "GatherND": _gather_nd,
        "Gelu": _gelu,
        "Gemm": _gemm,
        "GlobalAveragePool": _average,
        "Greater": _pairs(torch.gt),
        "GreaterOrEqual": _pairs(torch.ge),
        "HardSigmoid": _unary(functional.hardsigmoid),
        "HardSwish": _unary(functional.hardswish),
        "Identity": lambda step: step.tensor(0),
        "IsInf": _unary(torch.isinf),
        "IsNaN": _unary(torch.isnan),
        "LayerNormalization": _layer_norm,
        "LeakyRelu": _unary(functional.leaky_relu),
        "Less": _pairs(torch.lt),
        "LessOrEqual": _pairs(torch.le),
        "Log": _unary(torch.log),
        "LogSoftmax": lambda step: step.tensor(0).log_softmax(int(step.attribute("axis", -1))),
        "LpNormalization": _lp,
        "MatMul": _matmul,
        "Max": _pairs(torch.maximum),
        "MaxPool": _max_pool,
        "Mish": _unary(functional.mish),
        "Min": _pairs(torch.minimum),
        "Mod": _pairs(torch.remainder),
        "Mul": _pairs(torch.mul),
        "Neg": _unary(torch.neg),
        "Not": _unary(torch.logical_not),
        "OneHot": _one_hot,
        "Or": _pairs(torch.logical_or),
        "Pad": _pad,
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
        "Resize": _resize,
        "RMSNormalization": _rms_norm,
        "Round": _unary(torch.round),
        "ScatterElements": _scatter,
        "ScatterND": _scatter_nd,
        "Selu": _unary(functional.selu),
        "Shape": _shape,
        "Sigmoid": _unary(torch.sigmoid),
        "Sign": _unary(torch.sign),
        "SimplifiedLayerNormalization": _rms_norm,
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
        "TopK": _top_k,
        "Transpose": _transpose,
        "Trilu": _trilu,
        "Unsqueeze": _unsqueeze,
        "Where": _where,
        "Xor": _pairs(torch.logical_xor),
    }.items()
}
OPERATIONS |= {
    ("com.microsoft", "FusedMatMul"): _fused_matmul,
    ("com.microsoft", "MatMulNBits"): _quantised_matmul,
    ("com.microsoft", "Gelu"): _unary(functional.gelu),
    ("com.microsoft", "FastGelu"): lambda step: functional.gelu(
        step.tensor(0) + step.tensor(1) if step.given(1) else step.tensor(0), approximate="tanh"
    ),
    ("com.microsoft", "BiasGelu"): lambda step: functional.gelu(step.tensor(0) + step.tensor(1)),
    ("com.microsoft", "QuickGelu"): _quick_gelu,
    ("com.microsoft", "SkipLayerNormalization"): _skip_norm(False),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_norm(True),
}

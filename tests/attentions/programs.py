"""A small stack of attentions, and what may stand in the place of its plain weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, H, E = 32, 4, 8
ROOT = E**-0.5


class Attention(nn.Module):
    def __init__(self, scale: float = ROOT, fused: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.number, self.fused = scale, fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, E)).transpose(-3, -2) for part in (self.q, self.k, self.v))
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, scale=self.number)
        else:
            y = (q @ k.mT * self.number).softmax(-1) @ v
        return y.transpose(-3, -2).flatten(-2)


class Block(nn.Module):
    def __init__(self, scale: float, fused: bool) -> None:
        super().__init__()
        self.norm, self.attn, self.feed = nn.LayerNorm(WIDTH), Attention(scale, fused), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.feed(x)


class Net(nn.Module):
    def __init__(self, scale: float = ROOT, fused: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(scale, fused) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scriptable(nn.Module):
    """The same for TorchScript, which knows neither tuples of modules nor `mT`."""

    def __init__(self, scale: float, fused: bool) -> None:
        super().__init__()
        self.qkv, self.number, self.fused = nn.Linear(WIDTH, 3 * WIDTH), scale, fused

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, [3, 4, 8]).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], scale=self.number)
        else:
            y = (qkv[0] @ qkv[1].transpose(-1, -2) * self.number).softmax(-1) @ qkv[2]
        return y.transpose(1, 2).flatten(2)


# -- adapters ----------------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """W x + s B A dropout(x): a low-rank adapter beside a layer (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, layer: nn.Linear, *, size: float = 4.0) -> None:
        super().__init__()
        self.layer, self.size, self.drop, self.merged = layer, size, nn.Dropout(0.1), False
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.merged else self.layer(x) + self.b(self.a(self.drop(x))) * self.size

    def merge(self) -> None:
        with torch.no_grad():
            self.layer.weight += self.size * self.b.weight @ self.a.weight
        self.merged = True


class InPlace(Adapter):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).clone()
        y += self.b(self.a(self.drop(x))) * self.size
        return y


class Merging(Adapter):
    """The sum of the weights is made anew in every call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight + self.size * (self.b.weight @ self.a.weight)
        return functional.linear(x, weight, self.layer.bias)


class ByDirection(Adapter):
    """The weight's rows get learned lengths (DoRA, Liu et al. 2024, arXiv:2402.09353)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.length = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.layer.weight + self.size * self.b.weight @ self.a.weight
        size = self.length / torch.linalg.norm(whole, dim=1).detach()
        return size * (x @ self.layer.weight.mT) + size * self.b(self.a(x)) * self.size + self.layer.bias


# -- quantised weights -------------------------------------------------------------------------------------------------


class Whole(Tensor):
    """A weight of whole numbers with a size for each row, as a tensor of its own class; subclasses multiply with it."""

    numbers: Tensor
    sizes: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, sizes: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=sizes.dtype)  # type: ignore[attr-defined]

    def __init__(self, numbers: Tensor, sizes: Tensor) -> None:
        self.numbers, self.sizes = numbers, sizes

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, bias = args
            return cls.multiply(x, weight.numbers, weight.sizes) + bias
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].sizes)
        raise NotImplementedError(func)

    @staticmethod
    def multiply(x: Tensor, numbers: Tensor, sizes: Tensor) -> Tensor:
        """Make the weight whole again before it is used."""
        return x @ (numbers.to(x.dtype) * sizes).mT


class SizedAfter(Whole):
    """The sizes multiply the product."""

    @staticmethod
    def multiply(x: Tensor, numbers: Tensor, sizes: Tensor) -> Tensor:
        return (x.flatten(0, -2) @ numbers.to(x.dtype).mT * sizes.flatten()).unflatten(0, x.shape[:-1])


class WholeInputs(Whole):
    """The inputs are made whole numbers too, with a size for each row of them."""

    @staticmethod
    def multiply(x: Tensor, numbers: Tensor, sizes: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        each = rows.abs().amax(-1, keepdim=True) / 127
        product = torch._int_mm((rows / each).round().to(torch.int8), numbers.mT)
        return (product.to(x.dtype) * each * sizes.flatten()).unflatten(0, x.shape[:-1])


class Packed(Whole):
    """An operation of torch takes the sizes as well."""

    @staticmethod
    def multiply(x: Tensor, numbers: Tensor, sizes: Tensor) -> Tensor:
        rows = x.flatten(0, -2).bfloat16()
        y = torch.ops.aten._weight_int8pack_mm(rows, numbers, sizes.flatten().bfloat16())
        return y.to(x.dtype).unflatten(0, x.shape[:-1])


def whole(weight: Tensor, kind: type[Whole]) -> Whole:
    """A weight as whole numbers from -127 to 127."""
    sizes = weight.abs().amax(1, keepdim=True) / 127
    return kind((weight / sizes).round().to(torch.int8), sizes)


@torch.library.custom_op("sqrtdk_programs::gemv_4bit", mutates_args=())
def gemv_4bit(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """A stand-in for a library's product with packed weights."""
    return x @ (weight.to(x.dtype) * sizes).mT


@torch.library.custom_op("sqrtdk_programs::int8_scaled_mm", mutates_args=())
def int8_scaled_mm(x: Tensor, weight: Tensor, rows: Tensor, sizes: Tensor) -> Tensor:
    """A stand-in for one that takes inputs of whole numbers."""
    return (x.to(rows.dtype) * rows) @ (weight.to(rows.dtype) * sizes).mT


@torch.library.custom_op("sqrtdk_programs::int8_vectorwise_quant", mutates_args=())
def int8_vectorwise_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """A stand-in for what makes them."""
    sizes = x.abs().amax(-1, keepdim=True) / 127
    return (x / sizes).round().to(torch.int8), sizes


@torch.library.custom_op("sqrtdk_programs::rotary_mm", mutates_args=())
def rotary_mm(x: Tensor) -> Tensor:
    """No product with weights, whatever its name: it has none."""
    return x * 2


class ByLibrary(nn.Module):
    """A layer whose product is an operation of a library's own."""

    def __init__(self, layer: nn.Linear, inputs: bool) -> None:
        super().__init__()
        weight = whole(layer.weight.detach(), Whole)
        self.register_buffer("numbers", weight.numbers)
        self.register_buffer("sizes", weight.sizes)
        self.bias, self.inputs = layer.bias, inputs

    def forward(self, x: Tensor) -> Tensor:
        if not self.inputs:
            return gemv_4bit(x, self.numbers, self.sizes) + self.bias
        return int8_scaled_mm(*(quant := int8_vectorwise_quant(x))[:1], self.numbers, quant[1], self.sizes) + self.bias


def changed(model: nn.Module, change: Any) -> nn.Module:
    """The model with every projection of an attention in another form; `change` gives a layer, or a weight."""
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        for name in ("q", "k", "v"):
            layer = getattr(attention, name)
            new = change(layer)
            if isinstance(new, Tensor):
                layer.weight = nn.Parameter(new, requires_grad=False)
            else:
                setattr(attention, name, new)
    return model

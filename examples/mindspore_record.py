"""Record the attention of a MindSpore model into a trace file, which `sqrtdk diff` compares with a PyTorch model.

`recording` needs mindspore, numpy and safetensors, and nothing of sqrtdk or torch: copy it into your own project. It
records `mindspore.nn.MultiheadAttention`, in PyNative mode. For attention in code of your own, call `note` there.

    python examples/mindspore_record.py run.safetensors              # in the environment of MindSpore
    sqrtdk diff examples.mindspore_record:make run.safetensors       # in that of sqrtdk

The model here is two attentions with the same weights on both sides. The word `mistake`
behind the file lets each row see one key too many.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy
from safetensors.numpy import save_file

D, HEADS, LAYERS, LENGTH = 64, 4, 2, 12
Call = dict[str, Any]


@contextlib.contextmanager
def recording(model: Any, path: str, inputs: dict[str, Any]) -> Iterator[None]:
    """Record every `nn.MultiheadAttention` of a model while the block runs, and write the file at its end.

    Args:
        model: a `mindspore.nn.Cell`.
        path: file to write.
        inputs: what the model is given, by the names of the other side's arguments.
    """
    import mindspore
    from mindspore.ops.function import nn_func

    own = nn_func._scaled_dot_product_attention
    calls: list[Call] = []
    tensors = {f"inputs.{name}": _array(value) for name, value in inputs.items()}
    open_sites: list[tuple[str, Any, Any]] = []

    def attention(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, *rest: Any) -> Any:
        returned = own(query, key, value, attn_mask, dropout_p, *rest)
        site, layer, entering = open_sites[-1]
        note(calls, tensors, site, (query, key, value), returned[0], mask=attn_mask, scale=query.shape[-1] ** -0.5)
        _projections(calls[-1], tensors, f"calls.{len(calls) - 1}", site, layer, entering)
        return returned

    hooks = []
    for name, cell in model.cells_and_names():
        if isinstance(cell, mindspore.nn.MultiheadAttention):
            begin = lambda _, args, at=(name, cell): open_sites.append((*at, args[:3]))  # noqa: E731
            hooks.append(cell.register_forward_pre_hook(begin))
            hooks.append(cell.register_forward_hook(lambda *_: open_sites.pop() and None))
    nn_func._scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn_func._scaled_dot_product_attention = own
        for hook in hooks:
            hook.remove()
    document = {"schema_version": 1, "writer": f"MindSpore {mindspore.__version__}", "calls": calls,
                "module_class": type(model).__name__}  # fmt: skip
    kept = {name: numpy.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(kept, f"{path}.part", metadata={"sqrtdk_trace": json.dumps(document)})
    os.replace(f"{path}.part", path)


def note(calls: list[Call], tensors: dict[str, Any], site: str, qkv: Any, output: Any, *, mask: Any, scale: float
         ) -> None:  # fmt: skip
    """Add one attention: q, k and v as they enter their products, (B, H, L, E), and the output, (B, H, L, E).

    Args:
        calls: the calls so far.
        tensors: the tensors of the file.
        site: path of the cell.
        qkv: the three tensors.
        output: weights @ v.
        mask: what is added to the logits, (B or 1, H or 1, L, S), or None.
        scale: what multiplies q @ k.
    """
    number = len(calls)
    terms: list[dict[str, Any]] = [{"name": "scale", "value": scale}]
    if mask is not None:
        added = _array(mask)
        hides = bool(numpy.isin(added, (0.0, -numpy.inf)).all())
        terms.append({"name": "mask" if hides else "bias"})
        tensors[f"calls.{number}.terms.1"] = added == 0 if hides else added
    for letter, tensor in zip("qkv", qkv, strict=True):
        tensors[f"calls.{number}.{letter}"] = _array(tensor)
    tensors[f"calls.{number}.output"] = _array(output)
    calls.append({"site": site, "terms": terms, "dtype": str(qkv[0].dtype).lower()})


def _projections(call: Call, tensors: dict[str, Any], name: str, site: str, layer: Any, entering: Any) -> None:
    """Add what the projections of a MultiheadAttention took, and their weights: one for q, k and v."""
    weights = numpy.split(_array(layer.in_proj_weight), 3)
    biases = numpy.split(_array(layer.in_proj_bias), 3) if layer.in_proj_bias is not None else [None] * 3
    first = layer.batch_first
    for at, (letter, weight, bias) in enumerate(zip("qkv", weights, biases, strict=True)):
        own, shape = f"{name}.{letter}", (layer.num_heads, -1, weight.shape[1])
        entered = _array(entering[at] if at < len(entering) else entering[0])
        tensors[f"{own}.input"] = entered if first else entered.swapaxes(0, 1)
        tensors[f"{own}.weight"] = weight.reshape(shape)
        tensors[f"{own}.features"] = (numpy.arange(len(weight)) + at * len(weight)).reshape(shape[:2])
        if bias is not None:
            tensors[f"{own}.bias"] = bias.reshape(shape[:2])
        tensors[f"{own}.projected"] = tensors[own]  # nothing lies between the projections and the products
        call[letter] = {"projection": f"{site}.in_proj_weight"}


def _array(tensor: Any) -> Any:
    """Return a tensor as an array; numpy has no bfloat16, and every bfloat16 is a float32."""
    return tensor.float().asnumpy() if str(tensor.dtype).lower().endswith("bfloat16") else tensor.asnumpy()


def weights() -> dict[str, Any]:
    """Return the weights of both sides; PyTorch and MindSpore name and lay out those of attention alike."""
    random = numpy.random.default_rng(0)
    shapes = {"in_proj_weight": (3 * D, D), "in_proj_bias": (3 * D,), "out_proj.weight": (D, D), "out_proj.bias": (D,)}
    named = {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in shapes.items()}
    return {name: (0.2 * random.standard_normal(shape)).astype("float32") for name, shape in named.items()}


def entering() -> Any:
    """Return what the model is given, (B, L, D)."""
    return numpy.random.default_rng(1).standard_normal((2, LENGTH, D)).astype("float32")


def make() -> Any:
    """Return the PyTorch model, for `sqrtdk diff examples.mindspore_record:make run.safetensors`."""
    import torch
    from torch import nn

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.MultiheadAttention(D, HEADS, batch_first=True) for _ in range(LAYERS))

        def forward(self, x: Any) -> Any:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            for layer in self.layers:
                x = x + layer(x, x, x, attn_mask=hidden, need_weights=False)[0]
            return x

    model = Layers().eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights().items()})
    return model, {"x": torch.from_numpy(entering())}


def port(mistake: bool) -> Any:
    """Return the MindSpore model with the same weights."""
    import mindspore
    from mindspore import nn, ops

    class Layers(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.CellList([nn.MultiheadAttention(D, HEADS, batch_first=True) for _ in range(LAYERS)])

        def construct(self, x: Any) -> Any:
            hidden = ops.ones((x.shape[1], x.shape[1])).triu(2 if mistake else 1).astype(mindspore.bool_)
            for layer in self.layers:
                x = x + layer(x, x, x, attn_mask=hidden, need_weights=False)[0]
            return x

    model = Layers().set_train(False)
    parameters = {name: mindspore.Parameter(array, name=name) for name, array in weights().items()}
    missing, _ = mindspore.load_param_into_net(model, parameters)
    assert not missing, missing
    return model


def main() -> None:
    import mindspore

    path, *words = sys.argv[1:] or ["mindspore.safetensors"]
    model, x = port("mistake" in words), mindspore.Tensor(entering())
    with recording(model, path, {"x": x}):
        model(x)
    print(f"{path}: {LAYERS} attentions, {os.path.getsize(path):,} bytes")


if __name__ == "__main__":
    main()

"""Record the attention of a PaddlePaddle model into a trace file, which `sqrtdk diff` compares with a PyTorch model.

`recording` needs paddle, numpy and safetensors, and nothing of sqrtdk or torch: copy it into your own project.

    python examples/paddle_record.py run.safetensors              # in the environment of Paddle
    sqrtdk diff examples.paddle_record:make run.safetensors       # in that of sqrtdk

The model here is a small decoder with the same weights on both sides. The word
`mistake` behind the file scales q once more.
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

D, HEADS, KV, E, LAYERS, VOCAB = 64, 4, 2, 16, 2, 97


@contextlib.contextmanager
def recording(model: Any, path: str, inputs: dict[str, Any], steps: tuple[str, ...] = ("rope",)) -> Iterator[None]:
    """Record every `scaled_dot_product_attention` of a model while the block runs, and write the file at its end.

    Args:
        model: a `paddle.nn.Layer`; a layer with `q_proj`, `k_proj` and `v_proj` is a site.
        path: file to write.
        inputs: what the model is given, by the names of the other side's arguments.
        steps: what comes between the projections of q and k and their product: "norm", "rope".
    """
    import paddle
    from paddle.nn import functional

    own = functional.scaled_dot_product_attention
    calls: list[dict[str, Any]] = []
    tensors = {f"inputs.{name}": _array(value) for name, value in inputs.items()}
    open_sites: list[tuple[str, Any]] = []
    projected: dict[str, tuple[Any, Any]] = {}
    hooks = []

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
                  is_causal: bool = False, *args: Any, **named: Any) -> Any:  # fmt: skip
        output = own(query, key, value, attn_mask, dropout_p, is_causal, *args, **named)
        number, (site, layer) = len(calls), open_sites[-1]
        scale = named.get("scale") or query.shape[-1] ** -0.5
        terms: list[dict[str, Any]] = [{"name": "scale", "value": scale}]
        if is_causal:
            terms.append({"name": "mask", "detail": "causal", "least": 0})
        elif attn_mask is not None:
            terms.append({"name": "mask" if attn_mask.dtype == paddle.bool else "bias"})
            tensors[f"calls.{number}.terms.1"] = _array(attn_mask)
        call: dict[str, Any] = {"site": site, "layout": "BLHE", "terms": terms, "dropout": dropout_p,
                                "dtype": str(query.dtype).rpartition(".")[2]}  # fmt: skip
        for letter, tensor in (("q", query), ("k", key), ("v", value)):
            name, width = f"calls.{number}.{letter}", tensor.shape[-1]
            linear, (entering, given) = getattr(layer, f"{letter}_proj"), projected[f"{letter}_proj"]
            heads = given.shape[-1] // width
            which = numpy.arange(tensor.shape[2]) * heads // tensor.shape[2]  # keys may be repeated for groups of heads
            tensors[name] = _array(tensor)
            tensors[f"{name}.projected"] = _array(given).reshape(*given.shape[:2], heads, width)[:, :, which]
            tensors[f"{name}.input"] = _array(entering)
            # Paddle's Linear computes x @ weight, with a weight of (D, H * E)
            tensors[f"{name}.weight"] = _array(linear.weight).T.reshape(heads, width, -1)[which]
            tensors[f"{name}.features"] = numpy.arange(given.shape[-1]).reshape(heads, width)[which]
            if linear.bias is not None:
                tensors[f"{name}.bias"] = _array(linear.bias).reshape(heads, width)[which]
            call[letter] = {"projection": f"{site}.{letter}_proj.weight"}
            if letter != "v":
                call[letter]["steps"] = [{"name": step} for step in steps]
        tensors[f"calls.{number}.output"] = _array(output)
        calls.append(call)
        return output

    for name, layer in model.named_sublayers():
        if hasattr(layer, "q_proj"):
            hooks.append(layer.register_forward_pre_hook(lambda _, __, at=(name, layer): open_sites.append(at)))
            hooks.append(layer.register_forward_post_hook(lambda *_: open_sites.pop() and None))
            for part in ("q_proj", "k_proj", "v_proj"):
                keep = lambda _, x, y, part=part: projected.update({part: (x[0], y)})  # noqa: E731
                hooks.append(getattr(layer, part).register_forward_post_hook(keep))
    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own
        for hook in hooks:
            hook.remove()
    document = {"schema_version": 1, "writer": f"PaddlePaddle {paddle.__version__}", "calls": calls,
                "module_class": type(model).__name__}  # fmt: skip
    kept = {name: numpy.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(kept, f"{path}.part", metadata={"sqrtdk_trace": json.dumps(document)})
    os.replace(f"{path}.part", path)


def _array(tensor: Any) -> Any:
    """Return a tensor as an array; numpy has no bfloat16, and every bfloat16 is a float32."""
    return (tensor.astype("float32") if str(tensor.dtype).endswith("bfloat16") else tensor).numpy()


def weights() -> dict[str, Any]:
    """Return the weights of both sides, as PyTorch's Linear has them: (out, in)."""
    random = numpy.random.default_rng(0)
    shapes = {"embed": (VOCAB, D), "head": (VOCAB, D)}
    for n in range(LAYERS):
        sizes = {"q_proj": (HEADS * E, D), "k_proj": (KV * E, D), "v_proj": (KV * E, D), "o_proj": (D, HEADS * E)}
        shapes |= {f"layers.{n}.{name}": shape for name, shape in sizes.items()}
    return {name: (0.3 * random.standard_normal(shape)).astype("float32") for name, shape in shapes.items()}


def rotated(x: Any, cos: Any, sin: Any, cat: Any) -> Any:
    """Return q or k (B, L, H, E) after RoPE: channels c and c + E / 2 are a pair."""
    a, b = x[..., : E // 2], x[..., E // 2 :]
    return cat([a * cos - b * sin, b * cos + a * sin], -1)


def angles(length: int) -> Any:
    """Return the angles of RoPE (L, 1, E / 2)."""
    return (numpy.arange(length)[:, None, None] * 10000.0 ** (-numpy.arange(E // 2) / (E // 2))).astype("float32")


def make() -> Any:
    """Return the PyTorch model, for `sqrtdk diff examples.paddle_record:make run.safetensors`."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.o_proj = (nn.Linear(D, D, bias=False) for _ in range(2))
            self.k_proj, self.v_proj = (nn.Linear(D, KV * E, bias=False) for _ in range(2))

        def forward(self, x: Any) -> Any:
            q, k, v = (part(x).unflatten(-1, (-1, E)) for part in (self.q_proj, self.k_proj, self.v_proj))
            turn = torch.from_numpy(angles(x.shape[1]))
            q, k = (rotated(y, turn.cos(), turn.sin(), torch.cat).transpose(1, 2) for y in (q, k))
            y = nn.functional.scaled_dot_product_attention(
                q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True, scale=E**-0.5
            )
            return self.o_proj(y.transpose(1, 2).flatten(2))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB, bias=False)
            self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))

        def forward(self, input_ids: Any) -> Any:
            x = self.embed(input_ids)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x)

    model = Decoder().eval()
    model.load_state_dict({f"{name}.weight": torch.from_numpy(array) for name, array in weights().items()})
    return model, {"input_ids": torch.from_numpy(numpy.arange(24).reshape(2, 12) * 3 % VOCAB)}


def port(mistake: bool) -> Any:
    """Return the Paddle model with the same weights."""
    import paddle
    from paddle import nn

    class Attention(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.o_proj = (nn.Linear(D, D, bias_attr=False) for _ in range(2))
            self.k_proj, self.v_proj = (nn.Linear(D, KV * E, bias_attr=False) for _ in range(2))

        def forward(self, x: Any) -> Any:
            q, k, v = (part(x).reshape([*x.shape[:2], -1, E]) for part in (self.q_proj, self.k_proj, self.v_proj))
            turn = paddle.to_tensor(angles(x.shape[1]))
            q, k = (rotated(y, turn.cos(), turn.sin(), paddle.concat) for y in (q, k))
            if mistake:
                q = q * E**-0.5
            k, v = (y.repeat_interleave(HEADS // KV, axis=2) for y in (k, v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(y.flatten(2))

    class Decoder(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB, bias_attr=False)
            self.layers = nn.LayerList([Attention() for _ in range(LAYERS)])

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x)

    model = Decoder()
    model.eval()
    state = {f"{name}.weight": array if name == "embed" else array.T for name, array in weights().items()}
    model.set_state_dict({name: paddle.to_tensor(array) for name, array in state.items()})
    return model


def main() -> None:
    import paddle

    path, *words = sys.argv[1:] or ["paddle.safetensors"]
    ids = paddle.to_tensor(numpy.arange(24).reshape(2, 12) * 3 % VOCAB)
    model = port("mistake" in words)
    with paddle.no_grad(), recording(model, path, {"input_ids": ids}):
        model(ids)
    print(f"{path}: {LAYERS} attentions, {os.path.getsize(path):,} bytes")


if __name__ == "__main__":
    main()

"""Small random models with a cache that is really quantised, one layer of it at a time, and what that did.

The other layers keep full precision, so that the layer in question gets the q, k and v of a run without any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import transformers as hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, QuantizedLayer

from tests.hf.families import CACHE

TEXT = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = TEXT | {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
GPT2 = TEXT | {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128}
CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "qwen3": lambda: hf.Qwen3Config(**SMALL),
    "gemma2": lambda: hf.Gemma2Config(**SMALL, sliding_window=24, query_pre_attn_scalar=48),
    "phi3": lambda: hf.Phi3Config(**SMALL),
    "mistral": lambda: hf.MistralConfig(**SMALL | {"num_attention_heads": 8}, sliding_window=None),
    "gpt2": lambda: hf.GPT2Config(**GPT2, activation_function="gelu_new"),
}
TOKENS = 65  # 64 that are stored, so that groups of 64 come out even, and a step


def build(family: str, *, gain: float = 8.0, seed: int = 0) -> nn.Module:
    """A model in float64 whose q and k are large enough for weights that are not uniform."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    config._attn_implementation = "eager"
    model = hf.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn")) and weight.dim() > 1:
                weight.mul_(gain)
    return model


def scale_channels(model: nn.Module, layer: int, key_head: int, channels: list[int], by: float | Tensor) -> None:
    """Multiply channels of one key head by `by`, and divide those of the query heads that read it.

    The logits stay as they were (not so behind a norm of q and k); of a rotation both channels of a pair must be taken.
    """
    size = SMALL["head_dim"]
    block = [module for name, module in model.named_modules() if name.endswith((".self_attn", ".attn"))][layer]
    heads = model.config.num_attention_heads
    kv_heads = getattr(model.config, "num_key_value_heads", heads)
    group = heads // kv_heads
    keys = torch.tensor(channels) + key_head * size
    queries = [torch.tensor(channels) + head * size for head in range(key_head * group, (key_head + 1) * group)]
    with torch.no_grad():
        if hasattr(block, "c_attn"):
            q, k, _ = block.c_attn.weight.mT.chunk(3)
        elif hasattr(block, "qkv_proj"):
            q, k, _ = block.qkv_proj.weight.split((heads * size, kv_heads * size, kv_heads * size))
        else:
            q, k = block.q_proj.weight, block.k_proj.weight
        factor = torch.as_tensor(by, dtype=k.dtype).reshape(-1, 1)
        k[keys] *= factor
        for rows in queries:
            q[rows] /= factor


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(3, 96, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def after(module: nn.Module, layer: int) -> nn.Module:
    """What takes the output of a layer's attention, all heads side by side."""
    found = [m for name, m in module.named_modules() if name.endswith((".o_proj", ".attn.c_proj"))]
    return found[layer]


class Precise(TorchFunctionMode):
    """Softmax in float64, where the models ask for float32: a KL of 1e-6 drowns in that."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is nn.functional.softmax:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def step(
    model: nn.Module, ids: Tensor, layer: int, quantised: Mapping[int, CacheLayerMixin], steps: int = 1
) -> tuple[Tensor, Tensor]:
    """The last token after all others are in the cache: weights (Hq, S) of a layer, and its output (Hq, Ev).

    `quantised` are the layers of the cache that are; the others keep full precision. `steps` tokens come one by one.
    """
    cache = DynamicCache(config=model.config)
    for at, its_cache in quantised.items():
        cache.layers[at] = its_cache
    seen: list[Tensor] = []
    hook = after(model, layer).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad(), Precise():
        model(ids[:, :-steps], **{CACHE: cache})
        for token in ids[:, -steps:].split(1, 1):
            out = model(token, **{CACHE: cache}, output_attentions=True)
    hook.remove()
    weights = out.attentions[layer][0, :, 0].double()
    return weights, seen[-1].double().reshape(weights.shape[0], -1)


def divergences(p: Tensor, q: Tensor) -> list[float]:
    """KL of each head; a window leaves fewer keys on one side."""
    q = q[:, -p.shape[1] :]
    return [float((a[a > 0] * (a[a > 0].log() - b[a > 0].log())).sum()) for a, b in zip(p, q, strict=True)]


def measured(
    model: nn.Module, ids: Tensor, layer: int, quantised: CacheLayerMixin, steps: int = 1
) -> list[tuple[float, float]]:
    """KL of the weights and error of the output of each head, as they came about with one layer quantised."""
    (p, out), (q, other) = (step(model, ids, layer, cache, steps) for cache in ({}, {layer: quantised}))
    errors = ((other - out).norm(dim=-1) / out.norm(dim=-1)).tolist()
    return list(zip(divergences(p, q), errors, strict=True))


class Cast(DynamicLayer):
    """Keys and values as a cast leaves them, those of the last step too; the first call gets its own back."""

    def __init__(self, cast: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._cast = cast

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object):
        first = not self.is_initialized
        keys, values = super().update(key_states, value_states)
        return (keys, values) if first else (self._cast(keys), self._cast(values))


class Grouped(QuantizedLayer):
    """transformers' own layer, residual window and all, with groups of 64 written out here."""

    def __init__(self, axis: int) -> None:
        super().__init__(axis_key=axis, axis_value=axis, residual_length=8)

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        groups = tensor.reshape(-1, 64) if axis == 0 else tensor.reshape(-1, 64, tensor.shape[-1])
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        step = (high - low) / 15
        return (((groups - low) / step).round() * step + low).reshape(tensor.shape)

    def _dequantize(self, qtensor: Tensor) -> Tensor:
        return qtensor


def fp8(dtype: torch.dtype, axes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    def cast(x: Tensor) -> Tensor:
        scale = x.abs().amax(axes, keepdim=True) / torch.finfo(dtype).max
        return (x / scale).float().to(dtype).double() * scale

    return cast


def int8(axes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    def cast(x: Tensor) -> Tensor:
        scale = x.abs().amax(axes, keepdim=True) / 127
        return torch.round(x / scale) * scale

    return cast


def blocks_of_32(x: Tensor) -> Tensor:
    """q8_0, written out number by number."""
    told = x.clone().reshape(-1, 32)
    for block in told:
        d = max(abs(float(number)) for number in block) / 127
        stored = float(torch.tensor(d).half())
        for place, number in enumerate(block.tolist()):
            block[place] = math.copysign(math.floor(abs(number) / d + 0.5), number) * stored
    return told.reshape(x.shape)

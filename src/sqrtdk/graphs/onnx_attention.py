"""Expands fused ONNX operators (attentions, norms of sums, activations) so that a trace reads their formulas.

The order in an attention is scale, softcap, bias, mask. A causal mask is upper-left aligned, shifted by the keys of the
cache. Inputs that change the formula in any other way are refused by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_layers import conv, product
from sqrtdk.graphs.onnx_step import OnnxStep, Operation, Result, of_torch

MICROSOFT = "com.microsoft"
_INPUT_NAMES = {  # names of the inputs of each attention, in order
    ("", "Attention"): "q k v added past_k past_v nonpad_kv_seqlen",
    (MICROSOFT, "MultiHeadAttention"): "q k v bias padding added past_k past_v past_length cache_indirection",
    (MICROSOFT, "GroupQueryAttention"): (
        "q k v past_k past_v lengths total_length cos sin position_ids added sinks k_scale v_scale"
    ),
    (MICROSOFT, "Attention"): "x weight bias padding past added past_sequence_length",
}
_REFUSED_INPUTS = (
    "nonpad_kv_seqlen",
    "cache_indirection",
    "position_ids",
    "k_scale",
    "v_scale",
    "past_sequence_length",
)
Inputs = Mapping[str, Tensor]


def _heads(x: Tensor, heads: int) -> Tensor:
    """Return (B, L, H E) reshaped to (B, H, L, E). A tensor with four axes is returned unchanged."""
    return x if x.dim() == 4 else x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _attention(step: OnnxStep) -> Result:
    """Return the outputs of a fused attention operator of ONNX or onnxruntime, computed by plain operations."""
    node, names = step.node, _INPUT_NAMES[step.node.domain, step.node.op].split()
    given = {name: x for index, name in enumerate(names) if (x := step.optional(index)) is not None}
    if odd := [name for name in given if name in _REFUSED_INPUTS]:
        raise UnsupportedError(f"{node.op} with {', '.join(odd)}")
    projects = "weight" in names  # com.microsoft's Attention applies the projections itself
    q, k, v = _projected(step) if projects else _operands(step, given)
    interleaved = bool(step.attribute("rotary_interleaved", 0))
    if not projects and step.attribute("do_rotary", 0):
        cos, sin = (step.tensor(index)[: q.shape[2]] for index in (7, 8))
        q, k = (_turned(x, cos, sin, interleaved) for x in (q, k))
    earlier = (given["past"][0], given["past"][1]) if "past" in given else (given.get("past_k"), given.get("past_v"))
    past = 0 if earlier[0] is None or earlier[1] is None else earlier[0].shape[-2]
    if past:
        k, v = (torch.cat((before, x), 2) for before, x in zip(earlier, (k, v), strict=True) if before is not None)
    # The cache to return: com.microsoft's Attention has keys and values in one tensor, the others in two.
    cache = (torch.stack((k, v)), k) if projects else (k, v)
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    # A scale of 0 stands for the default.
    scale = step.attribute("scale", 0.0) or 1 / math.sqrt(q.shape[-1])
    grouped = node.op == "GroupQueryAttention"
    causal = step.attribute("causal" if grouped else "unidirectional" if node.domain else "is_causal", int(grouped))
    local, cap = step.attribute("local_window_size", -1), step.attribute("softcap", 0.0)
    # local_window_size counts the row's own key, left_window_size only the keys before it.
    left = step.attribute("left_window_size", local - 1 if local > 0 else -1)
    right, filler = step.attribute("right_window_size", -1), step.attribute("mask_filter_value", -10000.0)
    right = 0 if causal else right
    more = grouped or past or cap or "added" in given or "padding" in given or len([*filter(None, node.outputs)]) > 3
    # Torch's is_causal is aligned like ONNX's (upper-left), so the plain causal case is one call.
    if causal and left < 0 and not more:
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        results: tuple[Tensor, ...] = cache
    else:
        scaled = (q @ k.mT) * scale
        logits = torch.tanh(scaled / cap) * cap if cap else scaled
        logits = _masked(given, logits, filler)
        ones = torch.ones(*logits.shape[-2:], dtype=torch.bool, device=logits.device)
        # Row i has position past + i: it sees keys from past + i - left to past + i + right.
        hidden = [ones.triu(past + right + 1)] * (right >= 0) + [ones.tril(past - left - 1)] * (left >= 0)
        logits = logits.masked_fill(functools.reduce(torch.logical_or, hidden), -math.inf) if hidden else logits
        made, results = _weights(given, logits) @ v, (*cache, scaled) if not node.domain else cache
    if projects or step.tensor(0).dim() == 3:
        made = made.transpose(1, 2).flatten(2)
    return made, *results


def _projected(step: OnnxStep) -> list[Tensor]:
    """Return q, k and v of an operator that applies the projections itself."""
    made = step.tensor(0) @ step.tensor(1)
    made = made + step.tensor(2) if step.given(2) else made
    sizes = step.attribute("qkv_hidden_sizes", [made.shape[-1] // 3] * 3)
    return [_heads(part, step.attribute("num_heads", 0)) for part in torch.split(made, sizes, -1)]


def _operands(step: OnnxStep, given: Inputs) -> list[Tensor]:
    """Return q, k and v from separate or packed inputs, plus the operator's bias."""
    heads = step.attribute("q_num_heads", step.attribute("num_heads", 0))
    key_heads = step.attribute("kv_num_heads", 0) or heads
    x = step.tensor(0)
    if "v" in given:
        parts = [step.tensor(i) for i in range(3)]
    elif "k" in given:  # keys and values packed as (B, S, H, 2, E)
        parts = [x, *(part.transpose(1, 2) for part in given["k"].unbind(3))]
    elif x.dim() == 5:  # all three packed as (B, L, H, 3, E)
        parts = [part.transpose(1, 2) for part in x.unbind(3)]
    else:  # all three packed as (B, L, (Hq + 2 H) E)
        width = x.shape[-1] // (heads + 2 * key_heads)
        parts = [*torch.split(x, [heads * width, key_heads * width, key_heads * width], -1)]
    if "bias" in given:
        sizes = [part.shape[-1] for part in parts]
        parts = [part + bias for part, bias in zip(parts, torch.split(given["bias"], sizes), strict=True)]
    return [_heads(part, count) for part, count in zip(parts, (heads, key_heads, key_heads), strict=True)]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return `x` with its first features rotated in pairs. The remaining features are unchanged.

    A pair is two neighbours if `interleaved`, else one feature of each half.
    """
    width = 2 * cos.shape[-1]
    turning, rest = x[..., :width], x[..., width:]
    if interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    else:
        first, second = turning.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _masked(given: Inputs, logits: Tensor, filler: float) -> Tensor:
    """Return the logits with the additive mask and the padding mask applied."""
    if "added" in given:
        added = given["added"]
        logits = logits.masked_fill(~added, -math.inf) if added.dtype is torch.bool else logits + added
    if "padding" in given:
        shown = _shown(given["padding"], logits.shape[0], logits.shape[-1])
        logits = logits + torch.where(shown, 0.0, filler)
    return logits


def _shown(mask: Tensor, batch: int, keys: int) -> Tensor:
    """Return which keys each row sees, (B, 1, 1 or L, S), True for visible.

    onnxruntime's mask holds B lengths, or B ends followed by B starts, or a number per key that is 0 for a hidden one.
    """
    if mask.dim() == 1:
        places = torch.arange(keys, device=mask.device)
        shown = places < mask[:batch, None]
        if mask.shape[0] == 2 * batch:
            shown = shown & (places >= mask[batch:, None])
        elif mask.shape[0] != batch:
            raise UnsupportedError(f"a mask of {mask.shape[0]} numbers for {batch} sequences")
        return shown[:, None, None]
    if mask.dim() in (2, 3):
        return (mask > 0).reshape(mask.shape[0], 1, -1, keys)
    raise UnsupportedError(f"a mask of keys of {mask.dim()} axes")


def _weights(given: Inputs, logits: Tensor) -> Tensor:
    """Return the softmax of the logits, with one extra logit per head if the operator has sinks."""
    if "sinks" not in given:
        return logits.softmax(-1)
    sinks = given["sinks"].reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]


def _rotary(step: OnnxStep) -> Tensor:
    """Return the result of RotaryEmbedding, ONNX's or onnxruntime's, with tables of cosines and sines."""
    x, heads = step.tensor(0), step.attribute("num_heads", 0)
    if step.attribute("scale", 1.0) not in (0.0, 1.0):
        raise UnsupportedError("RotaryEmbedding with a scale")
    at = (2, 3, 1) if step.node.domain == MICROSOFT else (1, 2, 3)  # the inputs cos, sin and position_ids
    cos, sin, positions = step.tensor(at[0]), step.tensor(at[1]), step.optional(at[2])
    q = _heads(x, heads) if x.dim() == 3 and heads else x
    if q.dim() != 4:
        raise UnsupportedError("RotaryEmbedding without its number of heads")
    if positions is None:
        cos, sin = cos[:, None], sin[:, None]
    elif positions.dim() == 2:
        cos, sin = cos[positions][:, None], sin[positions][:, None]
    else:
        cos, sin = cos[: q.shape[2]], sin[: q.shape[2]]
    turned = _turned(q, cos, sin, bool(step.attribute("interleaved", 0)))
    return turned if x.dim() == 4 else turned.transpose(1, 2).flatten(2)


# -- what onnxruntime's optimiser makes of several of ONNX's operators -------------------------------------------------


def _skip_norm(x: Tensor, skip: Tensor, gain: Tensor, shift: Tensor | None, bias: Tensor | None, eps: float) -> Result:
    """Return the layer norm of a sum. The sum is the fourth output; the second and third are placeholders."""
    total = x + skip if bias is None else x + skip + bias
    return functional.layer_norm(total, total.shape[-1:], gain, shift, eps), total[..., 0], total[..., 0], total


def _skip_rms_norm(x: Tensor, skip: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> Result:
    """Return the RMS norm of a sum, with the same outputs as `_skip_norm`."""
    total = x + skip if bias is None else x + skip + bias
    return functional.rms_norm(total, total.shape[-1:], gain, eps), total[..., 0], total[..., 0], total


def _embed_norm(step: OnnxStep) -> Result:
    """Return the layer norm of the summed embeddings, the number of tokens in each row, and the sum.

    Inputs: ids, segment ids, tables of tokens, positions and segments, gain, shift, mask, position ids.
    """
    ids = step.tensor(0).long()
    total = functional.embedding(ids, step.tensor(2))
    places = step.tensor(8).long() if step.given(8) else torch.arange(ids.shape[1], device=ids.device)[None]
    total = total + functional.embedding(places, step.tensor(3))
    if step.given(1) and step.given(4):
        total = total + functional.embedding(step.tensor(1).long(), step.tensor(4))
    epsilon = step.attribute("epsilon", 1e-12)
    made = functional.layer_norm(total, total.shape[-1:], step.tensor(5), step.tensor(6), epsilon)
    lengths = step.tensor(7).sum(1) if step.given(7) else torch.zeros(ids.shape[0], device=ids.device)
    return made, lengths.to(torch.int32), total


_FUSED_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "": lambda x: x,
    "Relu": torch.relu,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "LeakyRelu": lambda x, alpha=0.01: functional.leaky_relu(x, alpha),
    "Clip": torch.clamp,
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: torch.clamp(x * alpha + beta, 0.0, 1.0),
}


def _activated(of: Operation) -> Operation:
    """Return the operation followed by the activation that the node names."""

    def run(step: OnnxStep) -> Tensor:
        made, name = of(step), step.attribute("activation", "")
        parts = [step.attribute(f"activation_{part}", None) for part in ("alpha", "beta", "gamma")]
        numbers = step.attribute("activation_params", [part for part in parts if part is not None])
        if name not in _FUSED_ACTIVATIONS:
            raise UnsupportedError(f"{step.node.op} with the activation {name[:40]}")
        return _FUSED_ACTIVATIONS[name](made, *numbers)

    return run


def _bias_softmax(x: Tensor, added: Tensor, axis: int) -> Tensor:
    logits = x + added
    return (
        logits.flatten(axis).softmax(-1).reshape(logits.shape) if axis % x.dim() < x.dim() - 1 else logits.softmax(-1)
    )


def _gelu(approximate: str) -> Operation:
    """Return GELU of the first input, plus the bias if there is a second."""
    return of_torch(lambda x, bias: functional.gelu(x if bias is None else x + bias, approximate=approximate), 2)


ATTENTION_OPERATIONS: dict[tuple[str, str], Operation] = dict.fromkeys(_INPUT_NAMES, _attention)
FUSED_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("", "RotaryEmbedding"): _rotary,
    (MICROSOFT, "RotaryEmbedding"): _rotary,
    (MICROSOFT, "BiasGelu"): _gelu("none"),
    (MICROSOFT, "BiasSoftmax"): of_torch(_bias_softmax, 2, axis=1),
    (MICROSOFT, "EmbedLayerNormalization"): _embed_norm,
    (MICROSOFT, "FastGelu"): _gelu("tanh"),
    (MICROSOFT, "FusedConv"): _activated(conv),
    (MICROSOFT, "FusedGemm"): _activated(product),
    (MICROSOFT, "FusedMatMul"): product,
    (MICROSOFT, "Gelu"): _gelu("none"),
    (MICROSOFT, "QuickGelu"): of_torch(lambda x, a: x * torch.sigmoid(x * a), alpha=1.702),
    (MICROSOFT, "SkipLayerNormalization"): of_torch(_skip_norm, 5, epsilon=1e-5),
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): of_torch(_skip_rms_norm, 4, epsilon=1e-5),
    (MICROSOFT, "TransposeMatMul"): product,
}

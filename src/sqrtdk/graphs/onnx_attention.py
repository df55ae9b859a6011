"""Attentions that are one operator of ONNX, or of onnxruntime, written out: so that a trace reads their formulas.

The order is scale, softcap, bias, mask; a causal mask is upper-left, after the keys of a cache. What an operator is
given beyond that is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_layers import Operation, Result
from sqrtdk.graphs.onnx_step import Step

MICROSOFT = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Signature:
    """Of an operator, numbers of the inputs that are read.

    Attributes:
        bias: of the bias of the three projections; -1 where there is none.
        padding: of the mask over keys.
        added: of what is added to the logits, or a bool mask.
        past: of the cached keys, and of the cached values.
        refused: of those that are not read, with their names.
        query_heads: name of the attribute.
        key_heads: the same.
        causal: the same.
        cap: the softcap's; "" where there is none.
    """

    bias: int
    padding: int
    added: int
    past: tuple[int, ...]
    refused: dict[int, str]
    query_heads: str
    key_heads: str
    causal: str
    cap: str = ""


OPERATORS = {
    ("", "Attention"): Signature(
        -1, -1, 3, (4, 5), {6: "nonpad_kv_seqlen"}, "q_num_heads", "kv_num_heads", "is_causal", "softcap"
    ),
    (MICROSOFT, "MultiHeadAttention"): Signature(
        3, 4, 5, (6, 7), {9: "cache_indirection"}, "num_heads", "num_heads", "unidirectional"
    ),
    (MICROSOFT, "GroupQueryAttention"): Signature(
        -1, -1, 10, (3, 4), {9: "position_ids", 12: "k_scale", 13: "v_scale"}, "num_heads", "kv_num_heads", "causal",
        "softcap",
    ),
    (MICROSOFT, "Attention"): Signature(
        2, 3, 5, (4,), {6: "past_sequence_length"}, "num_heads", "num_heads", "unidirectional"
    ),
}  # fmt: skip
FLAGS = ("smooth_softmax", "do_rotary_interleaved", "qk_matmul_output_mode", "k_quant_type", "v_quant_type")


def _heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, H E) as (B, H, L, E); (B, H, L, E) stays."""
    return x if x.dim() == 4 else x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _attention(step: Step) -> Result:
    node = step.node
    signature = OPERATORS[node.domain, node.op]
    own = node.domain == MICROSOFT and node.op == "Attention"
    odd = [name for index, name in signature.refused.items() if step.given(index)]
    odd += [name for name in FLAGS if node.attributes.get(name) not in (None, 0, "NONE")]
    if own and node.attributes.get("do_rotary"):
        odd.append("a rotation inside")
    if odd:
        raise UnsupportedError(f"{node.op} with {', '.join(odd)}")
    heads = int(step.attribute(signature.query_heads, 0))
    key_heads = int(step.attribute(signature.key_heads, 0)) or heads
    q, k, v = _projected(step, heads) if own else _operands(step, signature, heads, key_heads)
    if not own and step.attribute("do_rotary", 0):
        q, k = _rotate(q, step), _rotate(k, step)
    past = 0
    if not own and all(step.given(index) for index in signature.past):
        before = [step.tensor(index) for index in signature.past]
        past = before[0].shape[-2]
        if past:
            k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
    elif own and step.given(4) and step.shape(4)[-2]:
        raise UnsupportedError("Attention with a cache of keys")
    kept = (k, v)
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = float(step.attribute("scale", 0.0)) or 1 / math.sqrt(q.shape[-1])
    if _is_flag_alone(step, signature, past):  # as the flag of torch's function, which is aligned as ONNX's
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return _results(step, made, kept, own)
    logits = (q @ k.mT) * scale
    cap = float(step.attribute(signature.cap, 0.0)) if signature.cap else 0.0
    if cap:
        logits = torch.tanh(logits / cap) * cap
    logits = _masked(step, signature, logits, past)
    return _results(step, _weights(step, logits) @ v, kept, own, logits)


def _results(
    step: Step, made: Tensor, kept: tuple[Tensor, Tensor], own: bool, logits: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The outputs of an operator, as many as there are."""
    if own or step.tensor(0).dim() == 3:
        made = made.transpose(1, 2).flatten(2)
    if own:
        return made, torch.stack(kept), kept[0]
    return (made, *kept) if logits is None else (made, *kept, logits)


def _is_flag_alone(step: Step, signature: Signature, past: int) -> bool:
    """Whether nothing but a causal flag stands between product and softmax."""
    if step.node.op == "GroupQueryAttention" or past or not step.attribute(signature.causal, 0):
        return False
    more = [index for index in (signature.added, signature.padding) if index >= 0 and step.given(index)]
    capped = bool(signature.cap) and bool(step.attribute(signature.cap, 0.0))
    return not more and not capped and len([name for name in step.node.outputs if name]) < 4


def _projected(step: Step, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of an operator that holds the projections."""
    made = step.tensor(0) @ step.weight(1)
    if step.given(2):
        made = made + step.tensor(2)
    sizes = [int(size) for size in step.attribute("qkv_hidden_sizes", [made.shape[-1] // 3] * 3)]
    q, k, v = (_heads(part, heads) for part in torch.split(made, sizes, -1))
    return q, k, v


def _operands(step: Step, signature: Signature, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, each by itself or packed, with a bias that the operator adds."""
    parts: list[Tensor]
    if not step.given(1) and not step.given(2):
        packed = step.tensor(0)
        if packed.dim() == 5:  # (B, L, H, 3, E)
            parts = [part.transpose(1, 2) for part in packed.unbind(3)]
        else:
            width = packed.shape[-1] // (heads + 2 * key_heads)
            parts = [*torch.split(packed, [heads * width, key_heads * width, key_heads * width], -1)]
    elif step.given(1) and not step.given(2):  # (B, S, H, 2, E)
        parts = [step.tensor(0), *(part.transpose(1, 2) for part in step.tensor(1).unbind(3))]
    else:
        parts = [step.tensor(i) for i in range(3)]
    if signature.bias >= 0 and step.given(signature.bias):
        sizes = [part.shape[-1] for part in parts]
        parts = [part + bias for part, bias in zip(parts, torch.split(step.tensor(signature.bias), sizes), strict=True)]
    q, k, v = (_heads(part, count) for part, count in zip(parts, (heads, key_heads, key_heads), strict=True))
    return q, k, v


def _rotate(x: Tensor, step: Step) -> Tensor:
    """(B, H, L, E) turned by the first L rows of a table of cosines and sines."""
    cos, sin = (step.tensor(index)[: x.shape[2]] for index in (7, 8))
    return _turned(x, cos, sin, bool(step.attribute("rotary_interleaved", 0)))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first features turned in pairs: neighbours, or one of each half; the rest as they are."""
    width = 2 * cos.shape[-1]
    turning, rest = x[..., :width], x[..., width:]
    if interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    else:
        first, second = turning.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _masked(step: Step, signature: Signature, logits: Tensor, past: int) -> Tensor:
    """Logits with what is added to them, and with the keys hidden that the attributes hide."""
    if signature.added >= 0 and step.given(signature.added):
        added = step.tensor(signature.added)
        logits = logits.masked_fill(~added, -math.inf) if added.dtype is torch.bool else logits + added
    if signature.padding >= 0 and step.given(signature.padding):
        shown = _shown(step.tensor(signature.padding), logits.shape[0], logits.shape[-1])
        logits = logits + torch.where(shown, 0.0, float(step.attribute("mask_filter_value", -10000.0)))
    grouped = step.node.op == "GroupQueryAttention"
    if not step.attribute(signature.causal, int(grouped)):
        return logits
    rows, keys = logits.shape[-2:]
    ones = torch.ones(rows, keys, dtype=torch.bool, device=logits.device)
    hidden = ones.triu(past + 1)
    window = int(step.attribute("local_window_size", -1))
    if window > 0:
        hidden = hidden | ones.tril(past - window)
    return logits.masked_fill(hidden, -math.inf)


def _shown(mask: Tensor, batch: int, keys: int) -> Tensor:
    """Which keys rows see, (B, 1, 1 or L, S): from lengths, from ends and then beginnings, or from ones."""
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


def _weights(step: Step, logits: Tensor) -> Tensor:
    """The softmax, with a logit beside the keys for each head where the operator has sinks."""
    if step.node.op != "GroupQueryAttention" or not step.given(11):
        return logits.softmax(-1)
    sinks = step.weight(11).reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]


def _rotary(step: Step) -> Tensor:
    """ONNX's, or onnxruntime's, rotation as an operator of its own: by positions, from tables of cosines and sines."""
    x = step.tensor(0)
    order = (2, 3, 1) if step.node.domain == MICROSOFT else (1, 2, 3)
    cos, sin = step.tensor(order[0]), step.tensor(order[1])
    given = step.tensor(order[2]) if step.given(order[2]) else None
    heads = int(step.attribute("num_heads", 0))
    q = _heads(x, heads) if x.dim() == 3 and heads else x
    if q.dim() != 4:
        raise UnsupportedError("RotaryEmbedding without its number of heads")
    if given is not None and given.dim() == 2:
        cos, sin = cos[given][:, None], sin[given][:, None]
    elif given is not None:
        cos, sin = cos[: q.shape[2]], sin[: q.shape[2]]
    else:
        cos, sin = cos[:, None], sin[:, None]
    turned = _turned(q, cos, sin, bool(step.attribute("interleaved", 0)))
    return turned if x.dim() == 4 else turned.transpose(1, 2).flatten(2)


ATTENTIONS: dict[tuple[str, str], Operation] = dict.fromkeys(OPERATORS, _attention)
ROTATIONS: dict[tuple[str, str], Operation] = {
    ("", "RotaryEmbedding"): _rotary,
    (MICROSOFT, "RotaryEmbedding"): _rotary,
}

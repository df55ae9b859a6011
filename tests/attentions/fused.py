"""Styles of torch's fused attention: SDPA in its backends, and FlexAttention run eagerly."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.attentions.positions import ALIBI, table
from tests.attentions.styles import CAUSAL, PADDING, ROOT, SPOTS, B, E, H, L, Style, autocast


def sdpa(**kwargs: Any) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    return lambda m, q, k, v: functional.scaled_dot_product_attention(q, k, v, **kwargs)


def folded(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(B * H, L, E) for t in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).view(B, H, L, E)


def learned_on_sdpa(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q * m.gain, k, v, scale=1.0)


def flex(*, causal: bool = False, **kwargs: Any) -> dict[str, Any]:
    """FlexAttention run eagerly; it warns that it is not compiled."""

    def run(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=causal_blocks() if causal else None, **kwargs)

    return {"attend": run, "kind": "flex", "context": without_gradient}


@contextlib.contextmanager
def without_gradient() -> Iterator[None]:
    """FlexAttention has no backward on the CPU, and warns that it is not compiled."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def cap_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 2.0 * torch.tanh(score / 2.0)


def alibi_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - torch.exp2(-(h + 1.0)) * (j - i).abs()


@functools.cache
def causal_blocks() -> Any:
    return create_block_mask(lambda b, h, i, j: i >= j, B, H, L, L, device="cpu", BLOCK_SIZE=128)


CAUSAL_SDPA = {"kind": "sdpa", "mask": "causal", "visible": CAUSAL, "formula": "softmax(0.25 * q.k + causal)"}

FUSED: dict[str, Style] = {
    "sdpa": Style(sdpa(), kind="sdpa"),
    "sdpa_causal": Style(sdpa(is_causal=True), form="implicit", **CAUSAL_SDPA),
    "sdpa_bool_mask": Style(
        sdpa(attn_mask=SPOTS), "softmax(0.25 * q.k + mask)", kind="sdpa", mask="mask", form="bool", visible=SPOTS
    ),
    "sdpa_bool_causal": Style(sdpa(attn_mask=CAUSAL), form="bool", **CAUSAL_SDPA),
    "sdpa_bool_padding": Style(
        sdpa(attn_mask=PADDING),
        "softmax(0.25 * q.k + padding)",
        kind="sdpa",
        mask="padding",
        form="bool",
        visible=PADDING,
    ),
    "sdpa_float_causal": Style(
        sdpa(attn_mask=torch.zeros(L, L).masked_fill(~CAUSAL, -math.inf)), form="float", **CAUSAL_SDPA
    ),
    "sdpa_float_bias": Style(
        lambda m, q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=m.bias),
        "softmax(0.25 * q.k + bias)",
        kind="sdpa",
        bias="bias",
        setup=table,
        addend=lambda m: m.bias,
    ),
    "sdpa_alibi": Style(
        sdpa(attn_mask=ALIBI), "softmax(0.25 * q.k + alibi)", kind="sdpa", bias="alibi", addend=lambda m: ALIBI
    ),
    "sdpa_dropout": Style(sdpa(dropout_p=0.3), kind="sdpa", dropout=0.3),
    "sdpa_wide_values": Style(sdpa(), kind="sdpa", value_dim=E + 4),
    "sdpa_gqa": Style(sdpa(enable_gqa=True), kind="sdpa", kv_heads=2),
    "sdpa_mqa_causal": Style(sdpa(enable_gqa=True, is_causal=True), form="implicit", kv_heads=1, **CAUSAL_SDPA),
    "sdpa_gqa_math": Style(
        sdpa(enable_gqa=True), kind="sdpa", kv_heads=2, context=lambda: sdpa_kernel(SDPBackend.MATH)
    ),
    "sdpa_math": Style(sdpa(), kind="sdpa", context=lambda: sdpa_kernel(SDPBackend.MATH)),
    "sdpa_scale": Style(sdpa(scale=0.1), "softmax(0.1 * q.k)", kind="sdpa", scale=0.1),
    "sdpa_scale_dropout": Style(
        sdpa(scale=0.1, dropout_p=0.1), "softmax(0.1 * q.k)", kind="sdpa", scale=0.1, dropout=0.1
    ),
    "sdpa_scaled_q": Style(
        lambda m, q, k, v: functional.scaled_dot_product_attention(q * ROOT, k, v, scale=1.0), kind="sdpa"
    ),
    "sdpa_learned": Style(
        learned_on_sdpa,
        "softmax(gain[h] * q.k)",
        kind="sdpa",
        setup=lambda m: m.register_parameter("gain", nn.Parameter(torch.linspace(0.1, 0.4, H).view(H, 1, 1))),
        scale=lambda m: m.gain,
    ),
    "sdpa_3d": Style(folded, kind="sdpa"),
    "sdpa_inference_mode": Style(sdpa(), kind="sdpa", context=torch.inference_mode),
    "sdpa_no_grad": Style(sdpa(), kind="sdpa", context=torch.no_grad),
    "sdpa_autocast": Style(sdpa(), kind="sdpa", context=autocast),
    "sdpa_bfloat16": Style(sdpa(), kind="sdpa", dtype=torch.bfloat16),
    "flex": Style(**flex()),
    "flex_scale": Style(formula="softmax(0.1 * q.k)", scale=0.1, **flex(scale=0.1)),
    "flex_softcap": Style(formula="softmax(2 * tanh(0.25 * q.k / 2))", cap=2.0, **flex(score_mod=cap_score)),
    "flex_alibi": Style(
        formula="softmax(0.25 * q.k + alibi)", bias="alibi", addend=lambda m: ALIBI, **flex(score_mod=alibi_score)
    ),
    "flex_causal": Style(
        formula="softmax(0.25 * q.k + causal)",
        mask="causal",
        form="bool",
        visible=CAUSAL,
        **flex(causal=True),
    ),
    "flex_gqa": Style(kv_heads=2, **flex(enable_gqa=True)),
}

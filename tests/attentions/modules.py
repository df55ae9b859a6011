"""torch's own attention modules as cases; what they must give is computed from their weights and their inputs."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.attentions.styles import PLAIN, B, Case, E, Expected, H, L, Style

WIDTH = H * E
S = 5  # keys of a cross attention
HIDDEN_KEYS = torch.arange(L).expand(B, L) >= torch.tensor([L, L - 2]).view(B, 1)  # True hides, as nn modules have it
HIDDEN_FUTURE = torch.ones(L, L, dtype=torch.bool).triu(1)
FLOAT_FUTURE = torch.zeros(L, L).masked_fill(HIDDEN_FUTURE, -math.inf)


def oracle(module: nn.MultiheadAttention, args: Any, kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Float64 logits (B, H, L, S) of an `nn.MultiheadAttention` call, -inf where hidden, and the visible keys."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key = named["query"].double(), named["key"].double()
    if not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    if module.in_proj_weight is not None:
        wq, wk, _ = module.in_proj_weight.double().chunk(3)
    else:
        wq, wk = module.q_proj_weight.double(), module.k_proj_weight.double()
    bq, bk, _ = module.in_proj_bias.double().chunk(3)
    q, k = (functional.linear(x, w, b) for x, w, b in ((query, wq, bq), (key, wk, bk)))
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.double().expand(k.shape[0], 1, -1)], 1)
    q, k = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k))
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.zeros_like(logits, dtype=torch.bool)
    mask, padding = named.get("attn_mask"), named.get("key_padding_mask")
    if mask is not None:
        mask = mask.unflatten(0, (-1, module.num_heads)) if mask.dim() == 3 else mask
        hidden = hidden | (mask if mask.dtype == torch.bool else mask == -math.inf)
        if mask.dtype != torch.bool:
            logits = logits + mask.double()
    if padding is not None:
        padding = padding if padding.dtype == torch.bool else padding == -math.inf
        hidden = hidden | padding[:, None, None, :]
    return logits.masked_fill(hidden, -math.inf).detach(), None if not hidden.any() else ~hidden


@contextlib.contextmanager
def slow_path() -> Iterator[None]:
    """The modules' Python path, so that a reference run calls every submodule."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def module_case(
    model: nn.Module,
    *inputs: Any,
    styles: tuple[Style, ...],
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **kwargs: Any,
) -> Case:
    """A case of torch modules: a reference run with hooks on every `nn.MultiheadAttention` gives the logits."""
    found: list[tuple[str, Tensor]] = []
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    handles = [
        m.register_forward_pre_hook(
            lambda module, a, k, name=name: found.append((name, oracle(module, a, k)[0])), with_kwargs=True
        )
        for name, m in modules
    ]
    with torch.no_grad(), slow_path():
        model(*inputs, **kwargs)
    for handle in handles:
        handle.remove()
    assert len(found) == len(styles)
    expected = [Expected(name, style, logits) for (name, logits), style in zip(found, styles, strict=True)]
    for one in expected:
        if one.style.kind == "native":  # the encoder layer is one operation: its attention is never called by itself
            one.site = one.site.removesuffix("self_attn").removesuffix(".")
        # A native kernel does not show its logits, and a learned key has no projection.
        one.numeric = one.style.kind != "native" and not any(m.bias_k is not None for _, m in modules)
    return Case(model, inputs, expected, kwargs, context)


def masked(name: str, form: str, kind: str = "eager") -> Style:
    """A plain call with a mask."""
    return Style(lambda m, q, k, v: v, f"softmax(0.25 * q.k + {name})", kind=kind, mask=name, form=form)


def plain(kind: str = "eager") -> Style:
    return Style(lambda m, q, k, v: v, PLAIN, kind=kind)


def attention(*shapes: tuple[int, ...], styles: Any, batch_first: bool = True, **options: Any) -> Callable[[], Case]:
    """One `nn.MultiheadAttention`; `options` with a leading underscore go to the call."""

    def build() -> Case:
        torch.manual_seed(0)
        call = {k[1:]: v for k, v in options.items() if k.startswith("_")}
        made = {k: v for k, v in options.items() if not k.startswith("_") and k not in ("train", "context")}
        model = nn.MultiheadAttention(WIDTH, H, batch_first=batch_first, **made).train(options.get("train", True))
        tensors = [torch.randn(*shape) for shape in shapes]
        if not batch_first:
            tensors = [t.transpose(0, 1) for t in tensors]
        inputs = (tensors * 3)[:3]  # one shape: self attention
        context = options.get("context", contextlib.nullcontext)
        return module_case(model, *inputs, styles=(styles,), context=context, **call)

    return build


def encoder(
    layers: int, styles: tuple[Style, ...], *, train: bool = True, padding: bool = False, **options: Any
) -> Any:
    """`nn.TransformerEncoderLayer` (layers = 0) or a `nn.TransformerEncoder` of them."""

    def build() -> Case:
        torch.manual_seed(0)
        nested, context = options.get("nested", False), options.get("context", contextlib.nullcontext)
        made = {k: v for k, v in options.items() if k not in ("nested", "context", "mask")}
        layer = nn.TransformerEncoderLayer(WIDTH, H, 96, batch_first=True, dropout=0.0, **made)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested) if layers else layer
        kwargs = {"src_key_padding_mask": HIDDEN_KEYS} if padding else {}
        if "mask" in options:
            kwargs["mask" if layers else "src_mask"] = options["mask"]
        case = module_case(model.train(train), torch.randn(B, L, WIDTH), styles=styles, context=context, **kwargs)
        for one in case.expected:
            one.rows = ~HIDDEN_KEYS if nested else None
        return case

    return build


def seq2seq(train: bool) -> Case:
    """`nn.Transformer`: two encoder layers, two decoder layers with self and cross attention."""
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, H, 2, 2, 96, dropout=0.0, batch_first=True).train(train)
    styles = (plain("sdpa"),) * 2 + (masked("causal", "implicit", "sdpa"), plain("sdpa")) * 2
    target_mask = nn.Transformer.generate_square_subsequent_mask(L)
    return module_case(
        model,
        torch.randn(B, S, WIDTH),
        torch.randn(B, L, WIDTH),
        styles=styles,
        tgt_mask=target_mask,
        tgt_is_causal=True,
    )


SELF, CROSS = ((B, L, WIDTH),), ((B, L, WIDTH), (B, S, WIDTH), (B, S, WIDTH))
NO = {"_need_weights": False}


@contextlib.contextmanager
def inference() -> Iterator[None]:
    """Without gradients, so that the fast path runs; nested tensors warn that they are a prototype."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        yield


FAST = {"train": False, "context": inference}

MODULES: dict[str, Callable[[], Case]] = {
    "mha_weights": attention(*SELF, styles=plain()),
    "mha": attention(*SELF, styles=plain("sdpa"), **NO),
    "mha_batch_second": attention(*SELF, styles=plain("sdpa"), batch_first=False, **NO),
    "mha_weights_batch_second": attention(*SELF, styles=plain(), batch_first=False),
    "mha_eval_grad": attention(*SELF, styles=plain("sdpa"), train=False, **NO),
    "mha_fast": attention(*SELF, styles=plain("native"), **NO, **FAST),
    "mha_fast_weights": attention(*SELF, styles=plain("native"), **FAST),
    "mha_cross": attention(*CROSS, styles=plain("sdpa"), **NO),
    "mha_cross_eval_weights": attention(*CROSS, styles=plain(), **FAST),
    "mha_kdim_vdim": attention((B, L, WIDTH), (B, S, 20), (B, S, 12), styles=plain("sdpa"), kdim=20, vdim=12, **NO),
    "mha_kdim_vdim_weights": attention((B, L, WIDTH), (B, S, 20), (B, S, 12), styles=plain(), kdim=20, vdim=12),
    "mha_padding": attention(*SELF, styles=masked("padding", "float"), _key_padding_mask=HIDDEN_KEYS),
    "mha_padding_sdpa": attention(
        *SELF, styles=masked("padding", "float", "sdpa"), _key_padding_mask=HIDDEN_KEYS, **NO
    ),
    "mha_padding_fast": attention(
        *SELF, styles=masked("padding", "bool", "native"), _key_padding_mask=HIDDEN_KEYS, **NO, **FAST
    ),
    "mha_bool_mask": attention(*SELF, styles=masked("causal", "float"), _attn_mask=HIDDEN_FUTURE),
    "mha_bool_mask_sdpa": attention(*SELF, styles=masked("causal", "float", "sdpa"), _attn_mask=HIDDEN_FUTURE, **NO),
    "mha_bool_mask_fast": attention(
        *SELF, styles=masked("causal", "bool", "native"), _attn_mask=HIDDEN_FUTURE, **NO, **FAST
    ),
    "mha_float_mask": attention(*SELF, styles=masked("causal", "float"), _attn_mask=FLOAT_FUTURE),
    "mha_float_mask_sdpa": attention(*SELF, styles=masked("causal", "float", "sdpa"), _attn_mask=FLOAT_FUTURE, **NO),
    "mha_mask_per_head": attention(
        *SELF, styles=masked("causal", "float", "sdpa"), _attn_mask=FLOAT_FUTURE.repeat(B * H, 1, 1), **NO
    ),
    "mha_is_causal": attention(
        *SELF, styles=masked("causal", "implicit", "sdpa"), _attn_mask=FLOAT_FUTURE, _is_causal=True, **NO
    ),
    "mha_bias_kv": attention(*SELF, styles=plain("sdpa"), add_bias_kv=True, **NO),
    "encoder_layer": encoder(0, (plain("sdpa"),)),
    "encoder_layer_norm_first": encoder(0, (plain("sdpa"),), norm_first=True),
    "encoder_layer_causal": encoder(0, (masked("causal", "float", "sdpa"),), mask=FLOAT_FUTURE),
    "encoder_layer_fast": encoder(0, (plain("native"),), **FAST),
    "encoder_layer_fast_norm_first": encoder(0, (plain("native"),), norm_first=True, **FAST),
    "encoder_layer_fast_causal": encoder(0, (masked("causal", "bool", "native"),), mask=HIDDEN_FUTURE, **FAST),
    "encoder_layer_fast_padding": encoder(0, (masked("padding", "bool", "native"),), padding=True, **FAST),
    "encoder": encoder(3, (plain("sdpa"),) * 3),
    "encoder_norm_first": encoder(2, (plain("sdpa"),) * 2, norm_first=True),
    "encoder_padding": encoder(2, (masked("padding", "float", "sdpa"),) * 2, padding=True),
    "encoder_fast": encoder(3, (plain("native"),) * 3, **FAST),
    "encoder_fast_gelu": encoder(2, (plain("native"),) * 2, activation="gelu", norm_first=True, **FAST),
    "encoder_nested": encoder(2, (masked("padding", "bool", "native"),) * 2, padding=True, nested=True, **FAST),
    "encoder_fast_padding": encoder(2, (masked("padding", "bool", "native"),) * 2, padding=True, **FAST),
    "transformer": lambda: seq2seq(train=True),
    "transformer_eval": lambda: seq2seq(train=False),
}

"""`sqrtdk.attention` as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._subclasses import as_bool_mask
from sqrtdk.errors import InvalidValueError, UnsupportedError
from sqrtdk.models.extras import attention_registers
from sqrtdk.nn._attend import attend

ATTENTION_NAME = "sqrtdk"
_TRANSFORMERS_NAMES = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# Keyword arguments that change no result here, with the reason. An argument in neither table is refused: swallowing one
# that matters would give a wrong model without a word.
IGNORED_ARGUMENTS = {
    "cache_position": "where new keys go in the cache, which the model has filled already",
    "deterministic": "a switch of flash attention's backward pass",
    "ignore_index": "the label that the loss leaves out",
    "input_ids": "passed down whole by a few models; attention sees what they were embedded to",
    "labels": "of the loss",
    "logits_to_keep": "rows of the model's head",
    "max_length_k": "a size that flash attention wants beside cu_seq_lens_k",
    "max_length_q": "a size that flash attention wants beside cu_seq_lens_q",
    "num_items_in_batch": "the divisor of the loss",
    "output_hidden_states": "kept by the model",
    "output_router_logits": "kept by the model",
    "position_ids": "applied to q and k before; packed sequences are in the mask, and refused without one",
    "return_dict": "the form of the model's output",
    "shift_labels": "of the loss, shifted by whoever cut the sequence into parts",
    "seq_idx": "packed sequences for layers with a state; for attention they are in the mask",
    "sliding_window": "in the mask, where eager reads it as well; refused without one, unless it spans all keys",
    "use_cache": "the model has written its cache before it calls",
}
# Keyword arguments that change the result unless they are None or False: the reason to refuse them, and a hint.
REFUSED_ARGUMENTS = {
    "block_indices": ("attention to selected blocks of keys is not supported", "Use attn_implementation='sdpa'."),
    "block_table": ("a paged cache is not supported", "Use attn_implementation='sdpa' for it."),
    "cache": ("a paged cache is not supported", "Use attn_implementation='sdpa' for it."),
    "head_mask": ("kernels never hold weights, so heads can't be masked", "Use attn_implementation='eager'."),
    "layer_head_mask": ("kernels never hold weights, so heads can't be masked", "Use attn_implementation='eager'."),
}


def register(name: str = ATTENTION_NAME) -> None:
    """Make `attn_implementation="sqrtdk"` work on every model that supports transformers' attention interface.

    A mask function is registered too: without one, transformers silently passes neither a causal nor a padding mask.
    Scale, dropout, softcap (Gemma 2), sinks (one per head in gpt-oss, one per row in Inkling 2), position bias (T5),
    selected keys (DeepSeek-V3.2), grouped heads and sliding windows reach `sqrtdk.attention`. An unknown keyword
    argument is refused by its name.

    Args:
        name: the value of `attn_implementation`.

    Raises:
        MissingExtraError: transformers is not installed, or is older than 4.53.
        InvalidValueError: `name` is an implementation of transformers.

    Example:
        >>> register()
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
        >>> config = LlamaConfig(**sizes, intermediate_size=32, vocab_size=16, attn_implementation="sqrtdk")
        >>> LlamaModel(config).config._attn_implementation
        'sqrtdk'
    """
    if name in _TRANSFORMERS_NAMES:
        raise InvalidValueError(f"{name!r} is transformers' own implementation", hint="Use another name: 'sqrtdk'.")
    functions, masks = attention_registers()
    functions.register(name, attention_forward)
    masks.register(name, attention_mask)


def attention_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor:
    """Return the mask that transformers asks for: always a tensor, (B, 1, L, S), bool, or floating for eager models.

    The sdpa mask of transformers is None if it is purely causal or hides nothing, and the module's `is_causal` has to
    tell which. If that contradicts the mask (AIMv2), the result is wrong. So such a mask is built here, and carries a
    copy of itself: as long as it equals the copy, kernels need not read it.
    Models that transformers does not run on sdpa may read the mask themselves (DeepSeek-V4, NLLB-MoE) and get eager's
    form.

    Args:
        *args: arguments of `transformers.masking_utils.sdpa_mask`.
        config: the model's config.
        **kwargs: keyword arguments of `sdpa_mask`.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    as_eager = config is not None and _refuses_sdpa(type(config))
    # asked first as transformers would: None means purely causal or nothing hidden
    mask: Tensor | None = sdpa_mask(*args, config=config, **kwargs)
    never_none = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    left_to_is_causal = mask is None
    if as_eager:
        mask = eager_mask(*args, config=config, **(kwargs | never_none))
    elif mask is None:
        mask = sdpa_mask(*args, config=config, **(kwargs | never_none))
    assert mask is not None
    if left_to_is_causal and not torch.compiler.is_compiling() and type(mask) is Tensor and not mask.is_meta:
        marked: Any = mask  # for _plain: (is it causal, a copy of the entries in memory)
        marked._sqrtdk_plain = (bool(kwargs.get("allow_is_causal_skip", True)), _stored(mask).clone())
    return mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuses_sdpa(config_class: type) -> bool:
    return _has_no_sdpa(config_class)


@cache
def _has_no_sdpa(config_class: type) -> bool:
    """Return whether transformers refuses sdpa for a model of this config."""
    from transformers import PreTrainedModel

    classes = [PreTrainedModel]
    for cls in classes:  # the list grows while it is walked, to reach subclasses of subclasses
        classes += cls.__subclasses__()
    return any(cls.config_class is config_class and not cls._supports_sdpa for cls in classes)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for transformers: (B, Hq, L, E) in, (B, L, Hq, Ev) out, and the weights if requested.

    Args:
        module: the attention module.
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        attention_mask: bool (True takes part) or floating (added). None means no mask, or causal if `is_causal`.
        dropout: rate of dropout on the weights.
        scaling: factor on the product; None is 1/sqrt(E).
        is_causal: whether a missing mask means causal. A mask overrides it.
        softcap: the c of c tanh(z / c).
        s_aux: (Hq,) sink logits.
        sinks: sink logits of rows, broadcastable to (B, Hq, L, 1).
        position_bias: added to the logits.
        indices: (B, L, k), the keys that each row selects among the visible ones. A negative entry selects none.
        cu_seq_lens_q: offsets of the sequences in a packed batch; the mask has to keep the sequences apart.
        cu_seq_lens_k: the same for the keys.
        output_attentions: whether to return the weights, (B, Hq, L, S), after dropout. They take memory, as in eager.
        **kwargs: arguments of `IGNORED_ARGUMENTS`, arguments of `REFUSED_ARGUMENTS` that are False, and any argument
            that is None.

    Raises:
        UnsupportedError: a keyword argument is unknown or in `REFUSED_ARGUMENTS`, no mask separates packed sequences or
            holds the window, or a module that calls itself causal gets neither a mask nor `is_causal`.
        InvalidValueError: both kinds of sinks are given, or `cu_seq_lens` do not cover the rows or the keys.
    """
    _refuse_unknown(kwargs)
    if s_aux is not None and sinks is not None:
        raise InvalidValueError("sinks are one a head (s_aux) or one a row (sinks); got both", hint="Pass one of them.")
    keys = key.shape[2]
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None or indices is not None:  # both read the mask
        attention_mask = as_bool_mask("attention_mask", attention_mask, query.shape[2], keys, query.device)
    length, plain = query.shape[2], _plain(attention_mask, query.shape[2], keys)
    causal = bool(is_causal) if attention_mask is None else bool(plain)
    if attention_mask is None and is_causal is None and length > 1 and getattr(module, "is_causal", True):
        raise UnsupportedError(
            f"{type(module).__name__} calls itself causal and got no mask: eager would hide nothing, sdpa the future",
            hint="Pass an attention_mask or is_causal; or use attn_implementation='eager' or 'sdpa'.",
        )
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        ends_q = cu_seq_lens_k if cu_seq_lens_q is None else cu_seq_lens_q
        ends_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        assert ends_q is not None
        assert ends_k is not None
        _check_packed(attention_mask, ends_q, ends_k, query, keys)
    if attention_mask is None:
        _refuse_what_a_mask_would_hold(kwargs.get("sliding_window"), kwargs.get("position_ids"), keys)
    if plain is not None:
        attention_mask = None
    causal = causal and length > 1  # while decoding, one query sees all keys; upper-left causal would leave it key 0
    if causal and keys > length:  # prefill of a static cache: the keys behind the queries are empty slots
        if position_bias is not None and position_bias.shape[-1] == keys:
            position_bias = position_bias[..., :length]
        key, value = key[:, :, :length], value[:, :, :length]
    if indices is not None:
        attention_mask = _selected(indices, attention_mask, key.shape[2])
    found = attend(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        softcap=softcap,
        bias=position_bias,
        sinks=s_aux if sinks is None else sinks,
        need_weights=bool(output_attentions),
    )
    weights = found.weights
    if weights is not None and weights.shape[-1] < keys:
        # the empty slots that were cut off above have weight 0
        weights = nn.functional.pad(weights, (0, keys - weights.shape[-1]))
    return found.output.transpose(1, 2).contiguous(), weights


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is None or name in IGNORED_ARGUMENTS:
            continue
        reason, hint = REFUSED_ARGUMENTS.get(
            name, ("it is not known what it changes", "Use attn_implementation='eager'.")
        )
        if name not in REFUSED_ARGUMENTS or value is not False:
            raise UnsupportedError(f"attention got the argument {name!r}: {reason}", hint=hint)


def _stored(mask: Tensor) -> Tensor:
    """Return the part of a mask that is in memory: an expanded dimension (stride 0) is reduced to one entry."""
    return mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]


def _plain(mask: Tensor | None, length: int, keys: int) -> bool | None:
    """Return True for a purely causal mask, False for one that hides nothing, and None if it has to be read.

    The mask is compared with the copy that it carries. Its version counter would not do: a write to `mask.data` leaves
    it unchanged, and a compiled graph sees neither counter nor mark.
    """
    mark = getattr(mask, "_sqrtdk_plain", None)
    if mask is None or mark is None or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return None
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():  # a CUDA graph would replay today's answer
        return None
    causal: bool
    causal, copy = mark
    stored = _stored(mask)
    if mask.shape[-2:] != (length, keys) or stored.shape != copy.shape or not stored.is_contiguous():
        return None
    return causal if _same_bytes(stored, copy) else None


def _same_bytes(mask: Tensor, copy: Tensor) -> bool:
    """Return whether two contiguous masks are equal. Comparing eight entries at a time is five times faster."""
    one, other = mask.view(-1), copy.view(-1)
    words = one.numel() // 8 * 8
    if not words or one.storage_offset() % 8:  # int64 needs whole, aligned words; a lone entry may have stride 0
        return torch.equal(one, other)
    return torch.equal(one[words:], other[words:]) and torch.equal(
        one[:words].view(torch.int64), other[:words].view(torch.int64)
    )


def _check_packed(mask: Tensor | None, ends_q: Tensor, ends_k: Tensor, query: Tensor, keys: int) -> None:
    """Refuse packed sequences if a row sees a key of another sequence."""
    if ends_q.shape != ends_k.shape:
        raise InvalidValueError(
            f"{len(ends_q) - 1} sequences of rows (cu_seq_lens_q) and {len(ends_k) - 1} of keys (cu_seq_lens_k)",
            hint="Each sequence of rows needs the one of its keys.",
        )
    rows_of = _sequences("cu_seq_lens_q", ends_q, query.shape[0], query.shape[2], query.device)
    keys_of = _sequences("cu_seq_lens_k", ends_k, query.shape[0], keys, query.device)
    others = (rows_of[:, :, None] != keys_of[:, None]).unsqueeze(1)
    if mask is not None:
        others = others & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min)
    if bool(others.any()):
        raise UnsupportedError(
            f"{len(ends_q) - 1} sequences are packed into one (cu_seq_lens_q), and the mask lets one see another",
            hint="Pass position_ids that begin anew with each sequence, and no attention_mask.",
        )


def _sequences(name: str, ends: Tensor, batch: int, length: int, device: torch.device) -> Tensor:
    """Return each position's sequence: (1, length), or (batch, length) if the ends count through the whole batch."""
    ends = ends.to(device).long()
    last = int(ends[-1])
    if int(ends[0]) or bool((ends.diff() < 0).any()) or last not in (length, batch * length):
        raise InvalidValueError(
            f"{name} runs from {int(ends[0])} to {last}, for {batch} x {length} positions",
            hint="It begins with 0, rises, and ends with the number of positions.",
        )
    # a position belongs to the first sequence whose end lies beyond it
    return torch.bucketize(torch.arange(last, device=device), ends[1:], right=True).view(-1, length)


def _refuse_what_a_mask_would_hold(window: Any, positions: Tensor | None, keys: int) -> None:
    """Refuse a window or packed sequences without a mask, because only a mask says what they hide."""
    if window is not None and window is not False and int(window) < keys:
        raise UnsupportedError(
            f"attention got 'sliding_window' = {int(window)} for {keys} keys and no mask that holds it",
            hint="Pass an attention_mask with the window in it; or use attn_implementation='flash_attention_2'.",
        )
    # position_ids of three axes (images) may fall within one sequence, so they don't prove packing
    if positions is not None and 0 < positions.ndim < 3 and bool((positions.diff() <= 0).any()):
        raise UnsupportedError(
            "attention got 'position_ids' that begin anew (packed sequences) and no mask that keeps them apart",
            hint="Pass an attention_mask that keeps them apart; or use attn_implementation='flash_attention_2'.",
        )


def _selected(indices: Tensor, mask: Tensor | None, keys: int) -> Tensor:
    """Return the mask, (B, 1, L, S), with all keys hidden that are not selected."""
    outside = (indices < 0) | (indices >= keys)
    # column `keys` collects the indices that select none, and is cut off
    hidden = torch.ones(*indices.shape[:-1], keys + 1, dtype=torch.bool, device=indices.device)
    hidden = hidden.scatter(-1, indices.long().masked_fill(outside, keys), False)[..., :keys].unsqueeze(1)
    if mask is None:
        return ~hidden
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)

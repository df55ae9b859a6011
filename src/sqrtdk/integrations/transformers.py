"""`sqrtdk.attention` as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sqrtdk._attention import attention
from sqrtdk.errors import InvalidValueError, MissingExtraError, UnsupportedError

NAME = "sqrtdk"
_TAKEN = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def register(name: str = NAME) -> None:
    """Make `attn_implementation="sqrtdk"` work on every model that takes transformers' attention interface.

    The function is registered with its mask function: without one, transformers hands a model's attention no causal
    and no padding mask, and says nothing. Scale, dropout, softcap (Gemma 2), sinks (gpt-oss), position bias (T5),
    grouped heads and sliding windows reach `sqrtdk.attention`.

    Args:
        name: under which models ask for it.

    Raises:
        MissingExtraError: transformers is not installed.
        InvalidValueError: `name` is one of transformers' own.

    Example:
        >>> register()
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
        >>> config = LlamaConfig(**sizes, intermediate_size=32, vocab_size=16, attn_implementation="sqrtdk")
        >>> LlamaModel(config).config._attn_implementation
        'sqrtdk'
    """
    if name in _TAKEN:
        raise InvalidValueError(f"{name!r} is transformers' own implementation", hint="Use another name: 'sqrtdk'.")
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise MissingExtraError(
            "transformers is not installed", hint="pip install 'sqrtdk[hf]' brings transformers."
        ) from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


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
    position_bias: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: (B, Hq, L, E) in, (B, L, Hq, Ev) out, and no weights.

    Args:
        module: the attention module; its `is_causal` holds where the call does not say (True where it has none).
        query: (B, Hq, L, E).
        key: (B, Hkv, S, E).
        value: (B, Hkv, S, Ev).
        attention_mask: bool, True takes part, or floating, added; None: no mask, or causal alone.
        dropout: rate of dropout on the weights.
        scaling: factor on the product; None: 1/sqrt(E).
        is_causal: whether a missing mask means causal.
        softcap: c of c tanh(z / c).
        s_aux: (Hq,) sink logits.
        position_bias: added to the logits.
        cache: a paged cache, which is refused.
        **kwargs: what other implementations take; the window of a sliding layer is in the mask already.

    Raises:
        UnsupportedError: a paged cache of continuous batching.
    """
    if cache is not None:
        raise UnsupportedError("a paged cache is not supported", hint="Use attn_implementation='sdpa' for it.")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:  # an empty static cache: the keys after the queries are not there yet
        length = query.shape[2]
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = None if position_bias is None else position_bias[..., :length]
    output = attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal,
        scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        softcap=softcap,
        bias=position_bias,
        sinks=s_aux,
    )
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).contiguous(), None

"""What declares that rows may see keys after their own: prefix, bidirectional and block-causal attention, lookahead.

A flag `is_causal` of a module says in transformers no more than what a missing mask means, so that what the config
declares of the mask outweighs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from sqrtdk.audit.configs import as_number, field, number
from sqrtdk.tracing.records import Mask

_YES = (
    "use_bidirectional_attention",
    "bidirectional", "is_bidirectional", "bidirectional_attention", "prefix_lm", "use_prefix_lm", "is_prefix_lm",
    "attn_config.prefix_lm",  # MPT
    "block_causal", "use_block_causal", "blockwise_causal",
)  # fmt: skip
_SOME = ("all", "vision")  # Gemma 3 takes them in place of True
_NO = ("causal", "is_causal", "use_causal_mask")
_WORDS = ("attn_type", "attention_type", "attention_mode", "attn_mask_type", "mask_type")
_AHEAD = frozenset(
    {"bi", "bidirectional", "non_causal", "noncausal", "prefix", "prefix_lm", "block_causal", "blockwise_causal"}
)
_PREFIX = ("prefix_length", "num_prefix_tokens")
_LOOKAHEAD = (  # keys after its own that every row of a streaming encoder sees
    "right_context", "right_context_length", "future_context", "lookahead", "look_ahead", "num_lookahead",
)  # fmt: skip
_CONTEXTS = ("att_context_size", "window_size")  # [left, right]: NeMo, flash attention
_IMAGES = ("image_token_id", "image_token_index", "vision_config")  # image tokens see one another: PaliGemma, Gemma 3


def lookahead(owners: tuple[Any, ...]) -> float:
    """How many keys after its own a row sees by declaration; 0 where nothing declares any."""
    counts = [number(owner, name) or 0.0 for owner in owners for name in _LOOKAHEAD]
    pairs = [field(owner, name) for owner in owners for name in _CONTEXTS]
    counts += [as_number(pair[1]) or 0.0 for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]
    return max(counts, default=0.0)


def may_see_ahead(owners: tuple[Any, ...], model_config: Any, mask: Mask | None) -> str | None:
    """What declares that rows see keys after their own, or None; for a declared number of keys see `lookahead`.

    Args:
        owners: The module and the config that govern the call, nearest first.
        model_config: Of the whole model: images declare blocks of tokens that see one another, neither a mask that lets
            every row see one key too many, nor the lack of a mask.
        mask: Of the call.
    """
    said = next(chain.from_iterable(map(_declarations, owners)), None)
    if said is None and mask is not None and mask.band is False:
        images = (name for name in _IMAGES if field(model_config, name) is not None)
        return next(chain(images, *map(_compressed, owners)), None)
    return said


def _compressed(config: Any) -> Iterator[str]:
    """Layers with summaries of earlier keys after the keys themselves (DeepSeek V4)."""
    kinds = field(config, "layer_types")
    for kind in kinds if isinstance(kinds, list | tuple) else ():
        if isinstance(kind, str) and "compressed" in kind:
            yield f"layer_types: {kind}"


def _declarations(config: Any) -> Iterator[str]:
    for name in _YES:
        value = field(config, name)
        if value is True or (isinstance(value, str) and value in _SOME):
            yield f"{name} = {value}"
    for name in _NO:
        if field(config, name) is False:
            yield f"{name} = False"
    for name in _WORDS:
        value = field(config, name)
        if isinstance(value, str) and value.lower().replace("-", "_") in _AHEAD:
            yield f"{name} = {value}"
    for name in _PREFIX:
        if (number(config, name) or 0.0) > 0:
            yield f"{name} = {field(config, name)}"

"""What declares that rows may see keys after their own: prefix, bidirectional and block-causal attention, lookahead.

A flag `is_causal` of a module says in transformers no more than what a missing mask means, so that what the config
declares of the mask outweighs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from sqrtdk.audit.configs import field, number
from sqrtdk.trace.records import Mask

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
_LOOKAHEAD = ("right_context", "right_context_length", "lookahead", "look_ahead", "num_lookahead")  # streaming encoders
_IMAGES = ("image_token_id", "image_token_index", "vision_config")  # image tokens see one another: PaliGemma, Gemma 3


def lookahead(owners: tuple[Any, ...]) -> str | None:
    """What declares that every row sees some keys after its own, or None."""
    return _counted(owners, _LOOKAHEAD)


def may_see_ahead(owners: tuple[Any, ...], mask: Mask | None) -> str | None:
    """What declares that rows see keys after their own, or None.

    Args:
        owners: The module and the configs that govern the call, nearest first.
        mask: Of the call. Images declare blocks of tokens that see one another, neither a mask that lets every row see
            one key too many, nor the lack of a mask.
    """
    said = next(chain.from_iterable(map(_declarations, owners)), None) or _counted(owners, (*_PREFIX, *_LOOKAHEAD))
    if said is None and mask is not None and mask.band is False:
        return next((name for owner in owners for name in _IMAGES if field(owner, name) is not None), None)
    return said


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


def _counted(owners: tuple[Any, ...], names: tuple[str, ...]) -> str | None:
    """The first of the names that holds a number above 0."""
    positive = ((owner, name) for owner in owners for name in names if (number(owner, name) or 0.0) > 0)
    return next((f"{name} = {field(owner, name)}" for owner, name in positive), None)

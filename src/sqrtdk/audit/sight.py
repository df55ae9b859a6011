"""Which keys the rows of a call see and must not see: leaks of the future, and faulty shapes of a mask.

- A leak of the future: critical. Either rows of self-attention see keys after their own and none before; or a causal
  mask, off by one in any head or sequence, shows every row the key after its own; or a module that says it is causal
  shows a row a later key, or puts weight above 1e-4 on later keys, also if the keys begin before the rows (a cache).
  A declared prefix, two directions, blocks, or a lookahead that is long enough is believed.
- Rows that see a few keys after their own, and all before: fail, as a lookahead that nothing declares.
- A causal mask off by one that hides a row's own key: warn; note if q and k are one projection (Reformer).
- A causal mask aligned with the first key although a cache comes before the rows: critical.

In transformers a module's flag `is_causal` only says what a missing mask means, so the config's declaration of the
mask outweighs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import nn

from sqrtdk.audit.configs import as_number, contexts, field, model_type, number_at
from sqrtdk.messages import Message
from sqrtdk.tracing.records import BY_DATA, AttentionCall, Mask

LEAST_WEIGHT_AHEAD = 1e-4
_ALIGNED = "sources.threshold.corner"
_SLOTS = {"cache", "pad"}  # steps that place keys in a larger tensor: `cache[:, :, pos] = k`
LEAST_ROWS_OF_SHAPE = 4  # with fewer rows, a few visible keys fit many shapes
LEAK_SOURCE = "sources.threshold.illegal_connection"

_CAUSAL_FLAGS = ("is_causal", "causal")
_BY_CALL = ("blip_text_model",)  # its config says "decoder", but an argument of forward decides

Fault = tuple[str, float, float, str, str, str]  # severity, value, threshold, message, fix, id of the source
_KINDS_AHEAD = {
    "bi", "bidirectional", "non_causal", "noncausal", "prefix", "prefix_lm", "block_causal", "blockwise_causal",
}  # fmt: skip
# Fields that declare that rows see later keys, and the values that declare it.
_DECLARES: tuple[tuple[tuple[str, ...], Callable[[Any], bool]], ...] = (
    (
        ("use_bidirectional_attention", "bidirectional", "is_bidirectional", "bidirectional_attention", "prefix_lm",
         "use_prefix_lm", "is_prefix_lm", "attn_config.prefix_lm",  # the last is MPT's
         "block_causal", "use_block_causal", "blockwise_causal"),
        lambda value: value is True or (isinstance(value, str) and value in ("all", "vision")),  # words of Gemma 3
    ),
    (("causal", "is_causal", "use_causal_mask"), lambda value: value is False),
    (
        ("attn_type", "attention_type", "attention_mode", "attn_mask_type", "mask_type"),
        lambda value: isinstance(value, str) and value.lower().replace("-", "_") in _KINDS_AHEAD,
    ),
    (("prefix_length", "num_prefix_tokens"), lambda value: (as_number(value) or 0.0) > 0),
)  # fmt: skip
_LOOKAHEAD = (  # number of later keys that every row of a streaming encoder sees
    "right_context", "right_context_length", "future_context", "lookahead", "look_ahead", "num_lookahead",
)  # fmt: skip
_IMAGES = ("image_token_id", "image_token_index", "vision_config")  # image tokens see one another: PaliGemma, Gemma 3


def lookahead(owners: tuple[Any, ...]) -> float:
    """Return the largest number of keys after its own that a query may see by declaration; 0 if nothing declares any.

    Args:
        owners: Configs and modules whose fields are read, such as the second number of `window_size`.
    """
    counts = [number_at(owner, name) or 0.0 for owner in owners for name in _LOOKAHEAD]
    counts += [as_number(right) or 0.0 for owner in owners for _, (_, right) in contexts(owner)]
    return max(counts, default=0.0)


def may_see_ahead(owners: tuple[Any, ...], model_config: Any, mask: Mask | None) -> str | None:
    """Return what declares that queries may see later keys, or None; for a declared number of keys see `lookahead`.

    Args:
        owners: The module and the config that govern the call, nearest first.
        model_config: The config of the whole model. Its image fields declare blocks of tokens that see one another,
            which explains a mask that is no band.
        mask: The mask of the call, or None.

    Returns:
        The name of the field or attribute.
    """
    said = next(chain.from_iterable(map(_declarations, owners)), None)
    if said is None and mask is not None and mask.band is False:
        images = (name for name in _IMAGES if field(model_config, name) is not None)
        return next(chain(images, *map(_compressed, owners)), None)
    return said


def _compressed(config: Any) -> Iterator[str]:
    """Yield the layer types that put summaries of earlier keys after the keys themselves (DeepSeek V4)."""
    kinds = field(config, "layer_types")
    for kind in kinds if isinstance(kinds, list | tuple) else ():
        if isinstance(kind, str) and "compressed" in kind:
            yield f"layer_types: {kind}"


def _declarations(config: Any) -> Iterator[str]:
    for names, declares in _DECLARES:
        for name in names:
            value = field(config, name)
            if declares(value):
                yield f"{name} = {value}"


def says_causal(call: AttentionCall, module: nn.Module | None, config: Any) -> bool:
    """Return whether module or config declare causal attention, for a call with at least as many keys as queries."""
    return call.query_len <= call.key_len and declares_causal(call, module, config)


def declares_causal(call: AttentionCall, module: nn.Module | None, config: Any) -> bool:
    """Return whether module or config declare causal attention, and the call is one to which that applies.

    That is self-attention over positions with at least two queries. There may be more queries than keys, as in a ring
    buffer: `cache[:, :, position % window] = k`. A module that says both that it is causal and that it is no decoder
    (BridgeTower's) counts as neither.

    Args:
        call: The attention.
        module: Its module: attributes such as `is_causal` and `is_decoder` are read.
        config: The config that governs it; `is_decoder` counts if the module does not say.
    """
    if call.axis != "positions" or call.self_attention is False or call.query_len < 2:
        return False
    decoder = field(module, "is_decoder")
    if any(field(module, name) is True for name in _CAUSAL_FLAGS):
        return decoder is not False
    if call.self_attention is not True or any(field(module, name) is False for name in _CAUSAL_FLAGS):
        return False
    by_config = decoder is None and field(config, "is_decoder") is True and model_type(config) not in _BY_CALL
    return decoder is True or by_config


def leak(call: AttentionCall, declared: float, static: bool) -> Iterable[Fault]:
    """Yield at most one fault: a causal attention whose queries see later keys than are declared.

    If there are more keys than queries, the queries are taken to belong to the last keys.

    Args:
        call: The attention, which is known to be causal.
        declared: Number of later keys that a query may see, from `lookahead`.
        static: Whether the run had no values, so that weights on later keys are unknown.

    Yields:
        Severity "critical", the value, its threshold, the message, the fix and the id of the source. The value is the
        weight on later keys if it was measured, else the number of later keys that are visible.
    """
    mask, before = call.mask, call.key_len - call.query_len
    message: str | None = None
    value = call.future_weight
    merged = bool(call.blocks) and call.stats is None  # blocks that were merged have no softmax as a whole
    if mask is not None and mask.least is not None and -mask.least - before > max(declared, 0.0):
        message = Message("rules.mask_audit.sees_later", number=-mask.least - before)
        value = float(-mask.least - before) if value is None else value
    elif value is not None and value > LEAST_WEIGHT_AHEAD and not declared:
        message = Message("rules.mask_audit.weight_on_later", weight=f"{value:.3g}")
    elif mask is None and (before or static or merged) and value is None and not declared:
        message, value = Message("rules.mask_audit.no_mask"), float(call.query_len - 1)
    if message is not None and value is not None:
        yield "critical", value, LEAST_WEIGHT_AHEAD, message, Message("rules.mask_audit.fix_leak"), LEAK_SOURCE


def shape_fault(call: AttentionCall, declared: float, tokens: int) -> Fault | None:
    """Return the fault in the shape of the keys that the queries of a self-attention see, or None.

    The shape is given by the least and greatest distance i - j of visible pairs. Faults are an inverted mask and a
    boundary that is not where the masks of known models have it.

    Args:
        call: The attention; only masks of equally many queries and keys are judged.
        declared: Number of later keys that a query may see, see `lookahead`.
        tokens: Number of keys without padding in the longest sequence; queries that see these see all there are.
    """
    mask, rows = call.mask, call.query_len
    if mask is None or mask.least is None or mask.greatest is None:
        return None
    if call.self_attention is False or rows != call.key_len or rows < LEAST_ROWS_OF_SHAPE:
        return None
    ends = (rows - 1, tokens - 1)  # the last row sees all keys, or all but padding
    least, greatest = mask.least, mask.greatest
    ahead = _inverted(mask, least, greatest, tokens) or _ahead(mask, least, rows, ends, declared)
    return ahead or _behind(mask, least, ends)


def corner(call: AttentionCall) -> Fault | None:
    """Return the fault of a causal mask that begins at key 0 although the rows belong to the last keys, or None.

    `cat((past_k, k))` with `is_causal=True` does this, because torch and ONNX align the mask upper left: of 4 rows and
    16 keys, row 0 sees key 0 alone. If keys are written into slots (a static cache), they begin with the rows, and it
    is right.
    """
    mask, rows, keys = call.mask, call.query_len, call.key_len
    names = {stage.name for stage in call.stages if stage.where == "k"}
    if mask is None or not rows < keys or call.self_attention is not None or call.axis != "positions":
        return None
    if "input" not in names or names & _SLOTS or not mask.is_band(0, rows - 1):
        return None
    if mask.kind != "causal" and rows > 1:
        return None
    message = Message("rules.mask_audit.corner", hidden=keys - rows, keys=keys)
    fix = Message("rules.mask_audit.fix_corner")
    return "critical", float(keys - rows), 0.0, message, fix, _ALIGNED


def _inverted(mask: Mask, least: int, greatest: int, tokens: int) -> Fault | None:
    if greatest < 0:
        message, fix = Message("rules.mask_audit.inverted"), Message("rules.mask_audit.fix_inverted")
        return "critical", float(least), 0.0, message, fix, LEAK_SOURCE
    if mask.band and greatest == 0 and least <= 1 - tokens:
        message = Message("rules.mask_audit.inverted_with_own")
        fix = Message("rules.mask_audit.fix_inverted_with_own")
        return "critical", float(least), 0.0, message, fix, LEAK_SOURCE
    return None


def _ahead(mask: Mask, least: int, rows: int, ends: tuple[int, int], declared: float) -> Fault | None:
    """Return the fault that every row sees a few keys after its own, and all before, or None."""
    if mask.ahead_by_one and declared < 1:
        message = Message("rules.mask_audit.ahead_by_one" if mask.band else "rules.mask_audit.ahead_by_one_in_some")
        return "critical", -1.0, 0.0, message, Message("rules.mask_audit.fix_ahead_by_one"), LEAK_SOURCE
    if mask.band and mask.greatest in ends and -rows / 2 < least < -1 and declared < -least:
        message = Message("rules.mask_audit.ahead", number=-least)
        fix = Message("rules.mask_audit.fix_ahead", number=-least)
        return "fail", float(least), 0.0, message, fix, LEAK_SOURCE
    return None


def _behind(mask: Mask, least: int, ends: tuple[int, int]) -> Fault | None:
    """Return the fault that no row sees its own key, nor perhaps a few before, but all before these; or None."""
    if not mask.band or mask.greatest not in ends or least <= 0:
        return None
    message = Message("rules.mask_audit.behind", number=least)
    message = Message("rules.mask_audit.behind_by_one") if least == 1 else message
    return "warn", float(least), 0.0, message, Message("rules.mask_audit.fix_behind"), LEAK_SOURCE


def unordered(call: AttentionCall, module: nn.Module | None, config: Any) -> Fault | None:
    """Return a note that the right mask is unknown because the data selected queries or keys, or None.

    Returns:
        Severity "note", the number of queries, the threshold 0, the message, the fix and the id of the source. None if
        nothing was selected by the data, or if the call has no mask and nothing declares it causal.
    """
    if not any((stage.name, stage.detail) == ("gather", BY_DATA) for stage in call.stages):
        return None
    if call.mask is None and not says_causal(call, module, config):
        return None
    message, fix = Message("rules.mask_audit.gathered"), Message("rules.mask_audit.fix_gathered")
    return "note", float(call.query_len), 0.0, message, fix, LEAK_SOURCE


def own_key(call: AttentionCall) -> Fault | None:
    """Return a note on a causal mask without its diagonal, which is right if q and k are one projection (Reformer).

    The product of a token with itself would outweigh every other. The first row has no other key, so it should see its
    own (Kitaev et al. 2020).
    """
    mask, rows, groups = call.mask, call.query_len, call.batch * call.heads
    if not call.shared_qk or mask is None or rows != call.key_len or rows < LEAST_ROWS_OF_SHAPE:
        return None
    if not mask.is_band(1, rows - 1):
        return None
    message = Message("rules.mask_audit.own_key", blind=groups, rows=groups * rows)
    return "note", float(groups), 0.0, message, Message("rules.mask_audit.fix_own_key"), LEAK_SOURCE

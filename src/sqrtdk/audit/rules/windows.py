"""Rule `sliding_window`: the window of keys that config or module declare, and whether the masks show it.

The declared number counts the row's own key: transformers' masking_utils.sliding_window_overlay lets row i see the keys
j > i - sliding_window, as GPT-Neo, Gemma and litgpt do. Mistral's paper (Jiang et al. 2023) counts so in figure 1, at
most W tokens; its text has positions from i - W on, one more. Without a causal mask there are several ways to count,
within transformers too: see `sides`. Flash attention's pair (left, right) does not count the own key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from sqrtdk.audit.configs import as_number, contexts, field, is_transformers, model_type, number_at, present
from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding
from sqrtdk.audit.verdicts import layer_of
from sqrtdk.messages import Message
from sqrtdk.models.inputs import WINDOW_FIELDS
from sqrtdk.tracing.records import AttentionCall, NotMeasured

_WINDOW_SOURCE = "sources.threshold.window"
# Fields with the kind of each layer, in transformers, GPT-Neo and litgpt (1 for a layer with the window).
_KIND_LISTS = {
    "layer_types": WINDOW_FIELDS,
    "attention_layers": ("window_size",),
    "sliding_window_indices": ("sliding_window_size",),
}
_HAS_WINDOW = {
    "sliding_attention": True, "hybrid_sliding": True, "sliding": True, "local": True, "local_attention": True,
    "full_attention": False, "full": False, "global": False, "global_attention": False,
    "1": True, "0": False,
}  # fmt: skip
_BY_LAYER = ("max_window_layers", "sliding_window_pattern")  # which layers these name is not agreed without a list
# In transformers the window of these models limits the cache only: a forward pass without a cache sees every key.
_BY_CACHE = ("moshi", "moshi_depth", "kyutai_speech_to_text")


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window that a config or module declares for a layer."""

    keys: int  # keys that a row sees, its own included; 0 if it sees all of them
    by: str  # what declares it, "config.sliding_window = 4096"
    sure: bool = True  # False if it may not hold for this layer: then only a mask that is off by one contradicts it
    left: bool = False  # True if it says nothing about the keys after a row's own

    def sides(self, two: bool) -> tuple[int, ...]:
        """Return the numbers of keys that a row may see on one side, its own included.

        On two sides, one side has `keys` without the own key (ModernBERT), with it (Gemma 3), or half of them
        (T5Gemma 2).
        """
        if self.left or not two:
            return (self.keys,)
        return self.keys + 1, self.keys, self.keys // 2 + 1, (self.keys + 1) // 2


def declared_window(site: str, module: nn.Module | None, config: Any) -> Window | None:
    """Return the sliding window that config or module declare for a layer, or None if neither declares one.

    Args:
        site: Module path, which may hold the number of the layer for lists such as `layer_types`.
        module: The attention's module, or None.
        config: The config that governs it.

    Returns:
        The window with the number of keys that a query sees, its own included (0: a layer without a window), and the
        field that declares it. `sure` is False if the declaration may not hold for this layer.
    """
    known = is_transformers(config)
    if known and model_type(config) in _BY_CACHE:
        return None
    for names, widths in _KIND_LISTS.items():
        kinds, layer = field(config, names), _layer(site, module)
        if isinstance(kinds, list | tuple):
            kind = _HAS_WINDOW.get(str(kinds[layer])) if layer is not None and layer < len(kinds) else None
            width = _positive(config, widths)
            if kind is None or width is None:
                return None  # an unknown kind of layer, or no number
            return Window(width[1] if kind else 0, f"config.{width[0]} = {width[1]}")
    stated = None if field(config, "use_sliding_window") is False else _positive(config, WINDOW_FIELDS)
    own = _positive(module, WINDOW_FIELDS)
    if own is not None and (stated is None or not known):  # transformers' own may count as its kernels do
        return Window(own[1], Message("sources.declared.attribute_value", name=own[0], value=own[1]))
    if stated is not None:
        by_layer = any(field(config, name) is not None for name in _BY_LAYER)
        sure = own is not None or not (by_layer or any(present(module, name) for name in WINDOW_FIELDS))
        return Window(stated[1], f"config.{stated[0]} = {stated[1]}", sure)
    for name, pair in (*contexts(module), *contexts(config)):
        left = as_number(pair[0]) or 0.0
        if left >= 1:  # Swin writes its window of rows and columns in the same way
            return Window(int(left) + 1, f"{name} = {tuple(pair)}", sure=False, left=True)
    return None


def _layer(site: str, module: nn.Module | None) -> int | None:
    """Return the layer's number: the module's own, else the last number in its path."""
    numbers = [int(part) for part in site.split(".") if part.isdecimal()]
    layer = layer_of(module, numbers[-1] if numbers else -1)
    return layer if layer >= 0 else None


def _positive(owner: Any, names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = number_at(owner, name)
        if value is not None and value >= 1 and value == int(value):
            return name, int(value)
    return None


def sliding_window(context: Context) -> Iterable[Finding | NotMeasured]:
    """Compare the declared window of each call with the one that its mask shows.

    Formula: the most keys that a row sees, its own included, is the greatest i - j of the visible keys, plus 1.
    Threshold: exactly the declared number; without a causal mask, the number of keys on either side. A mask that is not
    a band (tokens of an image see one another, the first keys stay visible) is not judged. Rows that are not longer
    than the window can't show it: reported as not measured, once for each window.
    """
    short: dict[str, int] = {}
    unread: Counter[str] = Counter()
    for judged in context.whole_rows:
        call = judged.call
        window = declared_window(call.site, context.module(call.site), context.config(call.site))
        if window is None or not window.keys or call.self_attention is False or call.query_len < 2:
            continue
        longest = context.tokens.longest(call)
        if longest <= window.keys + (call.mask is None):  # without a mask the window may have two sides
            short[window.by] = max(longest, short.get(window.by, 0))
        elif call.mask is not None and call.mask.least is None:
            unread[window.by] += 1
        elif (finding := _judge(call, window)) is not None:
            yield finding
    for by, count in unread.items():
        yield NotMeasured("", Message("rules.sliding_window.masks_not_read", by=by, number=count))
    for by, longest in short.items():
        yield NotMeasured("", Message("rules.sliding_window.rows_too_short", by=by, longest=longest))


def _judge(call: AttentionCall, window: Window) -> Finding | None:
    """Return the finding of one call whose rows are long enough to show the window, or None."""
    mask, length = call.mask, call.key_len
    before = length - call.query_len  # keys of a cache before the first row
    sides = [length]
    if mask is not None and mask.least is not None and mask.greatest is not None:
        if not mask.band:
            return None
        sides = [mask.greatest + before + 1]
        if mask.least + before < 0 and sides[0] < length and not window.left:
            sides.append(1 - mask.least - before)
    admitted = window.sides(two=len(sides) > 1)
    off = [side for side in sides if side not in admitted]
    near = any(abs(side - number) == 1 for side in off for number in admitted)
    if not off or not (window.sure or near):
        return None
    seen, expected = off[0], admitted[0]
    if len(sides) > 1:
        message = Message("rules.sliding_window.one_side", seen=seen - 1, by=window.by, expected=expected - 1)
    elif seen >= length:
        message = Message("rules.sliding_window.all", length=length, by=window.by)
    else:
        message = Message("rules.sliding_window.other", seen=seen, by=window.by, expected=expected)
    fix, source = Message("rules.sliding_window.fix"), Message(_WINDOW_SOURCE)
    return Finding(
        "sliding_window", "fail", call.site, float(seen), float(expected), message, fix, source, call=call.index
    )

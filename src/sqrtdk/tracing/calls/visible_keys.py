"""Combines the masks of an attention: which keys each row sees, and what weight hidden keys and padding get."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.masks.band import TRIANGLES, band_mask, mask_pattern, mask_reach
from sqrtdk.tracing.readback.addends import BOTTOM
from sqrtdk.tracing.readback.reading import Logits, Reading, Vectors
from sqrtdk.tracing.records import Mask
from sqrtdk.tracing.steps import Beside, Hide, Step, Unknown, scaled_by
from sqrtdk.tracing.tape.graph import distinct

NO_DATA = "trace.fault.no_data"
# With two masks of different fills, -1e5 and -1e9, keys hidden by the weaker one keep weight if all others are hidden
# by a fill this many times larger.
_MUCH_LESS = 100.0

# Maps (site, batch, rows, columns, is self-attention) to row and key masks (B, L) and (B, S), True at a token.
TokensOf = Callable[[str, int, int, int, bool | None], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, slots=True, eq=False)
class VisibleKeys:
    """The combined masks of an attention.

    Attributes:
        steps: Steps of the reading, with a name for every mask that hides a key.
        mask: Mask for the record; None if nothing hides a key.
        visible: True where the row sees the key, broadcasts to (B, H, L, S); None if every key is visible, if only the
            causal flag hides keys, or if it is unknown.
        causal: Whether only the causal flag hides keys.
        ahead: Whether rows may see keys after their own: as many rows as keys, and no causal mask.
    """

    steps: tuple[Step, ...]
    mask: Mask | None = None
    visible: Tensor | None = None
    causal: bool = False
    ahead: bool = False


def combined_masks(reading: Reading, *, counts: bool = True) -> VisibleKeys:
    """Return the combined masks of a reading, with their names and counts.

    Args:
        reading: The attention.
        counts: Count the rows that see no key, how far rows see, and the weight of hidden keys. This takes several
            passes over all pairs of rows and keys.
    """
    visible_keys = _combined_masks(reading, counts)
    if not reading.reordered and reading.axis == "positions":
        causal = visible_keys.mask is not None and visible_keys.mask.kind in TRIANGLES
        return replace(visible_keys, ahead=reading.layout.rows == reading.layout.columns and not causal)
    # Rows and keys are in an unknown order, so the pattern of a mask means nothing.
    mask = visible_keys.mask
    if mask is not None:
        mask = replace(mask, kind="mask", least=None, greatest=None, band=None, ahead_by_one=None)
    return replace(visible_keys, steps=_named(visible_keys.steps, lambda i, step: step.name and "mask"), mask=mask)


def _combined_masks(reading: Reading, counts: bool) -> VisibleKeys:
    steps, operands = reading.steps, reading.operands
    hides = {i: step for i, step in enumerate(steps) if isinstance(step, Hide)}
    if reading.fault is not None:
        return VisibleKeys(steps)
    # Several products side by side: only the logits themselves show which keys are hidden.
    if isinstance(operands, Logits) and any(isinstance(step, Beside) for step in steps):
        return VisibleKeys(steps, visible=None if reading.without_data else operands.arrange(operands.values) > BOTTOM)
    if not hides:
        return VisibleKeys(steps)
    if isinstance(operands, (Logits, Vectors)) and all(hide.causal for hide in hides.values()):
        # `is_causal` of a fused call, upper-left: every row sees key 0 and its own
        rows = reading.layout.rows
        causal = Mask("causal", "implicit", 0, 0, 0.0, -math.inf, least=0, greatest=rows - 1, band=True, ahead_by_one=0)
        return VisibleKeys(steps, causal, causal=True)
    # Without values, as on the meta device, the mask gets a name and no counts.
    if not all(_is_known(hide, reading) for hide in hides.values()):
        named = _named(steps, lambda i, step: step.name or "mask")
        return VisibleKeys(named, _bare(steps, hides, next(iter(hides.values())).name or "mask"))
    masks: dict[int, Tensor] = {}
    names: dict[int, str | None] = {}
    for i, hide in hides.items():
        if (visible := visible_by(hide, reading)) is None:
            names[i] = "mask"
        elif (name := (hide.name if hide.visible is not None else None) or mask_pattern(visible)) is not None:
            names[i], masks[i] = name, visible
    named = _named(steps, lambda i, step: names.get(i))
    if not masks:
        return VisibleKeys(named)
    visible = functools.reduce(torch.Tensor.__and__, masks.values())
    # Masks of different kinds, such as causal and padding, are named by the pattern of both together.
    kinds = {names[i] or "mask" for i in masks}
    mask = _bare(steps, hides, kinds.pop() if len(kinds) == 1 else mask_pattern(visible) or "mask")
    if counts:
        seen_keys = _with_own_keys(visible, {i: (hides[i].fill, hidden) for i, hidden in masks.items()})
        mask = _counted(mask, reading, seen_keys, exact=all(hides[i].fill == -math.inf for i in masks))
    return VisibleKeys(named, mask, visible)


def _named(steps: tuple[Step, ...], name: Callable[[int, Hide], str | None]) -> tuple[Step, ...]:
    """Return the steps with new names for the masks."""
    return tuple(replace(s, name=name(i, s)) if isinstance(s, Hide) else s for i, s in enumerate(steps))


def _bare(steps: tuple[Step, ...], hides: Mapping[int, Hide], kind: str) -> Mask:
    """Return the mask for the record without counts."""
    first, hide = next(iter(hides.items()))
    return Mask(kind, hide.form, fill=hide.fill, scaled_by=scaled_by(steps, first))


def _with_own_keys(visible: Tensor, masks: Mapping[int, tuple[float | None, Tensor]]) -> Tensor:
    """Return the visible keys, where a row without any other key sees its own if that is hidden by a smaller number.

    Reformer (Kitaev et al. 2020), whose q and k share a projection, hides a row's own key in this way: with -1e5, while
    other masks use -1e9.
    """
    least = max((fill for fill, _ in masks.values() if fill is not None), default=0.0)
    others = [mask for fill, mask in masks.values() if fill is None or fill < _MUCH_LESS * least]
    if not others or len(others) == len(masks) or visible.shape[-1] != visible.shape[-2]:
        return visible
    own = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    return visible | (own & functools.reduce(torch.Tensor.__and__, others) & ~visible.any(-1, keepdim=True))


def _is_known(hide: Hide, reading: Reading) -> bool:
    """Return whether the hidden keys are known, from the mask's values or from the logits."""
    operands = reading.operands
    if not isinstance(operands, Logits):
        return isinstance(operands, Vectors) and (hide.causal or hide.visible is not None)
    return not reading.without_data or hide.causal or (hide.visible is not None and operands.axes.followed)


def visible_by(hide: Hide, reading: Reading) -> Tensor | None:
    """Return which keys a single mask lets each row see.

    Args:
        hide: the step that hides keys.
        reading: what was read of the attention.

    Returns:
        Bool, True where the row sees the key; broadcasts to (B, H, L, S). None if the mask is unknown.
    """
    operands, layout = reading.operands, reading.layout
    if hide.causal:
        return band_mask(layout.rows, layout.columns, 0, None, reading.device)[None, None]
    if isinstance(operands, Logits) and (hide.visible is None or not operands.axes.followed):
        if hide.visible is None and hide.fill is None:
            return None
        # A hidden logit is about `fill`, so half of it separates hidden keys from visible ones.
        return operands.arrange(operands.values) > max(0.5 * (hide.fill or -math.inf), BOTTOM)
    assert isinstance(operands, (Logits, Vectors))
    assert hide.visible is not None
    return distinct(operands.at_logits(hide.visible))


def _counted(mask: Mask, reading: Reading, visible: Tensor, *, exact: bool) -> Mask:
    """Return the mask with counts over all (batch, head, row), also if its values are broadcast over some of them."""
    layout, operands = reading.layout, reading.operands
    whole = visible.expand(*visible.shape[:-2], layout.rows, layout.columns)
    seeing = visible.any(-1).expand(whole.shape[:-1])
    unseeing = ~seeing
    if isinstance(operands, Vectors) and operands.exists is not None:
        unseeing = unseeing & operands.exists.squeeze(-1)
    matrices = layout.batch * layout.heads
    blind = int(unseeing.sum()) * (matrices // max(math.prod(unseeing.shape[:-1]), 1))
    weight: float | None = None
    if isinstance(operands, Logits) and not reading.without_data:
        weight = _hidden_weight(operands.arrange(operands.weights), visible, seeing)
        if weight is not None and operands.met is not None and operands.met.numel() == operands.weights.numel():
            met = layout.by_head(operands.met.abs())
            weight = max(weight, _hidden_weight(met, visible, seeing) or 0.0)
    elif isinstance(operands, Vectors) and operands.exact and exact:
        weight = 0.0
    return replace(
        mask,
        blind_rows=blind,
        # With a finite fill the softmax of a row without keys is a uniform average over masked keys.
        uniform_rows=blind if mask.fill is not None and math.isfinite(mask.fill) else 0,
        masked_weight=weight,
        **mask_reach(whole, matrices // max(math.prod(whole.shape[:-2]), 1)),
    )


def _hidden_weight(weights: Tensor, visible: Tensor, seeing: Tensor) -> float | None:
    """Return the largest total weight on hidden keys among rows that see a key."""
    if not weights.numel():
        return None
    hidden = weights.detach().masked_fill(visible[..., : weights.shape[-1]], 0.0).sum(-1)
    return float(hidden.masked_fill(~seeing, 0.0).max())


# -- against the padding of the inputs ---------------------------------------------------------------------------------


def against_padding(
    reading: Reading, visible_keys: VisibleKeys, tokens: TokensOf | None, self_attention: bool | None
) -> tuple[int | None, int | None]:
    """Return how the mask of an attention disagrees with the padding of the model's inputs.

    Args:
        reading: what was read of the attention.
        visible_keys: its combined masks.
        tokens: a function that returns which rows and keys are tokens, not padding; None if this is unknown.
        self_attention: whether q and k come from the same tokens; None if this is unknown.

    Returns:
        (the number of padding keys that the row of a token sees in some head, the number of token keys that no such row
        sees), counted over the batch. (None, None) if the padding or one of the masks is unknown.
    """
    layout = reading.layout
    known = tokens and tokens(reading.site, layout.batch, layout.rows, layout.columns, self_attention)
    visible = _all_visible(reading, visible_keys) if known else None
    if not known or visible is None:
        return None, None
    rows, keys = (part.to(visible.device) for part in known)
    by_row = visible.any(1).expand(layout.batch, layout.rows, layout.columns)
    attended = (by_row & rows[:, :, None]).any(1)
    return int((attended & ~keys).sum()), int((~attended & keys & rows.any(1, keepdim=True)).sum())


def _all_visible(reading: Reading, visible_keys: VisibleKeys) -> Tensor | None:
    """Return (B, H, L, S), any size may be 1, True where the row sees the key, or None if that is unknown."""
    if reading.fault is not None or reading.operands is None or reading.weight_steps.remasked:
        return None
    for step in reading.steps:
        unread = isinstance(step, Hide) and not step.causal and step.visible is None and step.fill is None
        if unread or isinstance(step, Unknown):
            return None
    if visible_keys.causal:
        return band_mask(reading.layout.rows, reading.layout.columns, 0, None, reading.device)[None, None]
    if visible_keys.visible is None and visible_keys.mask is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=reading.device)
    return visible_keys.visible

"""Which keys every row sees, by all masks together, and what the softmax made of the hidden ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.tracing.read.masks import BOTTOM, band
from sqrtdk.tracing.read.patterns import distinct, pattern, reach
from sqrtdk.tracing.read.reading import Edges, Logits, Reading, Vectors
from sqrtdk.tracing.records import Mask
from sqrtdk.tracing.steps import Beside, Hide, Step, scaled_by

_MUCH_LESS = 100.0  # of two numbers that hide, one this many times the other leaves it no weight


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What the masks of an attention come to.

    Attributes:
        steps: the reading's, every mask that hides a key with its name.
        mask: for the record; None where nothing hides a key.
        visible: True where the row sees the key, broadcasts to (B, H, L, S); None where every key is seen, where
            nothing but the causal flag hides some, and where it is not known.
        causal: nothing but the causal flag hides keys.
        ahead: rows may see keys after their own: as many rows as keys, and no causal mask.
    """

    steps: tuple[Step, ...]
    mask: Mask | None = None
    visible: Tensor | None = None
    causal: bool = False
    ahead: bool = False


def look(reading: Reading, *, counts: bool = True) -> Sight:
    """Name the masks of a reading, and count what they hide.

    Args:
        reading: the attention.
        counts: of the mask: how many rows it leaves blind, how far they see, what weight hidden keys get. They cost
            several passes over all pairs.
    """
    sight = _look(reading, counts)
    if reading.reordered or reading.axis != "positions":
        return _unordered(sight)
    causal = sight.mask is not None and sight.mask.kind in ("causal", "causal_lower_right")
    return replace(sight, ahead=reading.layout.rows == reading.layout.columns and not causal)


def _unordered(sight: Sight) -> Sight:
    """Of rows and keys in an unknown order: a mask has no pattern."""
    steps = tuple(replace(s, name=s.name and "mask") if isinstance(s, Hide) else s for s in sight.steps)
    mask = sight.mask
    if mask is not None:
        mask = replace(mask, kind="mask", least=None, greatest=None, band=None, ahead_by_one=None)
    return replace(sight, steps=steps, mask=mask)


def _look(reading: Reading, counts: bool) -> Sight:
    steps, operands = reading.steps, reading.operands
    hides = {i: step for i, step in enumerate(steps) if isinstance(step, Hide)}
    if reading.fault is not None:
        return Sight(steps)
    if operands is None or isinstance(operands, Edges):
        return _unread(steps, hides) if hides else Sight(steps)
    if isinstance(operands, Logits) and any(isinstance(step, Beside) for step in steps):
        return Sight(steps, visible=None if reading.without_data else operands.arrange(operands.values) > BOTTOM)
    if not hides:
        return Sight(steps)
    if all(hide.causal for hide in hides.values()):
        return Sight(steps, _causal(reading.layout.rows), causal=True)
    if not all(_is_known(hide, reading) for hide in hides.values()):
        return _unread(steps, hides)
    masks: dict[int, Tensor] = {}
    names: dict[int, str | None] = {}
    for i, hide in hides.items():
        if (visible := visible_by(hide, reading)) is None:
            names[i] = "mask"
        elif (name := (hide.name if hide.visible is not None else None) or pattern(visible)) is not None:
            names[i], masks[i] = name, visible
    steps = tuple(replace(s, name=names.get(i)) if isinstance(s, Hide) else s for i, s in enumerate(steps))
    if not masks:
        return Sight(steps)
    visible = functools.reduce(torch.Tensor.__and__, masks.values())
    named = {i: names[i] or "mask" for i in masks}
    if not counts:
        return Sight(steps, _bare(reading, hides, named, visible), visible)
    seen = _with_own_keys(visible, {i: (hides[i].fill, mask) for i, mask in masks.items()})
    return Sight(steps, _mask(reading, hides, named, seen), visible)


def _with_own_keys(visible: Tensor, masks: Mapping[int, tuple[float | None, Tensor]]) -> Tensor:
    """The keys that rows see; one without any other sees its own, where that is hidden by less than the others are.

    Of q and k in one projection a row's own key is hidden so (Kitaev et al. 2020, Reformer).
    """
    least = max((fill for fill, _ in masks.values() if fill is not None), default=0.0)
    others = [mask for fill, mask in masks.values() if fill is None or fill < _MUCH_LESS * least]
    if not others or len(others) == len(masks) or visible.shape[-1] != visible.shape[-2]:
        return visible
    own = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    return visible | (own & functools.reduce(torch.Tensor.__and__, others) & ~visible.any(-1, keepdim=True))


def _causal(rows: int) -> Mask:
    """What `is_causal` of a fused call is, upper-left: every row sees key 0 and its own."""
    return Mask("causal", "implicit", 0, 0, 0.0, -math.inf, least=0, greatest=rows - 1, band=True, ahead_by_one=0)


def _unread(steps: tuple[Step, ...], hides: Mapping[int, Hide]) -> Sight:
    """Masks whose values are not known."""
    named = tuple(replace(s, name=s.name or "mask") if isinstance(s, Hide) else s for s in steps)
    i, first = next(iter(hides.items()))
    return Sight(named, Mask(first.name or "mask", first.form, fill=first.fill, scaled_by=scaled_by(steps, i)))


def _is_known(hide: Hide, reading: Reading) -> bool:
    """Whether it can be told which keys are hidden: by the mask's values, or by the logits."""
    if isinstance(reading.operands, Logits) and not reading.without_data:
        return True
    followed = not isinstance(reading.operands, Logits) or reading.operands.axes.followed
    return hide.causal or (hide.visible is not None and followed)


def visible_by(hide: Hide, reading: Reading) -> Tensor | None:
    """True where the row sees the key, in the operands' layout; None where nothing is known of the mask."""
    operands, layout = reading.operands, reading.layout
    if hide.causal:
        return band(layout.rows, layout.columns, 0, reading.device)
    if isinstance(operands, Logits) and (hide.visible is None or not operands.axes.followed):
        if hide.visible is None and hide.fill is None:
            return None
        return operands.arrange(operands.values) > max(0.5 * (hide.fill or -math.inf), BOTTOM)
    assert isinstance(operands, (Logits, Vectors))
    assert hide.visible is not None
    return distinct(operands.at_logits(hide.visible))


def _bare(reading: Reading, hides: Mapping[int, Hide], names: Mapping[int, str], visible: Tensor) -> Mask:
    """What hides keys, without what came of it."""
    first, hide = next(iter(hides.items()))
    return Mask(
        kind=next(iter(names.values())) if len(set(names.values())) == 1 else pattern(visible) or "mask",
        form=hide.form,
        fill=hide.fill,
        scaled_by=scaled_by(reading.steps, first),
    )


def _mask(reading: Reading, hides: Mapping[int, Hide], names: Mapping[int, str], visible: Tensor) -> Mask:
    """Counts over (batch, head, row), also where the mask was given once for several of them."""
    layout, operands = reading.layout, reading.operands
    hide = next(iter(hides.values()))
    whole = visible.expand(*visible.shape[:-2], layout.rows, layout.columns)
    seeing = visible.any(-1).expand(whole.shape[:-1])
    unseeing = ~seeing
    if isinstance(operands, Vectors) and operands.exists is not None:
        unseeing = unseeing & operands.exists.squeeze(-1)
    matrices = layout.batch * layout.heads
    blind = int(unseeing.sum()) * (matrices // max(math.prod(unseeing.shape[:-1]), 1))
    finite = hide.fill is not None and math.isfinite(hide.fill)
    weight: float | None = None
    if isinstance(operands, Logits):
        weight = None if reading.without_data else _hidden_weight(operands.arrange(operands.weights), visible, seeing)
        if weight is not None and operands.met is not None and operands.met.numel() == operands.weights.numel():
            met = layout.by_head(operands.met.abs())
            weight = max(weight, _hidden_weight(met, visible, seeing) or 0.0)
    elif isinstance(operands, Vectors) and operands.exact and all(hides[i].fill == -math.inf for i in names):
        weight = 0.0
    return replace(
        _bare(reading, hides, names, visible),
        blind_rows=blind,
        uniform_rows=blind if finite else 0,
        masked_weight=weight,
        **reach(whole, matrices // max(math.prod(whole.shape[:-2]), 1)),
    )


def _hidden_weight(weights: Tensor, visible: Tensor, seeing: Tensor) -> float | None:
    """The largest total weight that a seeing row gives to hidden keys."""
    if not weights.numel():
        return None
    hidden = weights.detach().masked_fill(visible[..., : weights.shape[-1]], 0.0).sum(-1)
    return float(hidden.masked_fill(~seeing, 0.0).max())

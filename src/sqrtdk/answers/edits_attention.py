"""Edits inside attention: scale, softcap, window, mask, sinks, and which key head a query head reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sqrtdk.answers.attend import AttentionFacts
from sqrtdk.answers.edit import Change, Edit, edits_of_number
from sqrtdk.answers.edited import Edited

CAPS = (50.0, 30.0, 20.0)  # Gemma 2, Grok, and a smaller one
LEAST_WINDOW = 8


def every(change: Callable[[AttentionFacts], dict[str, Any]]) -> Change:
    """Return a change of every attention."""

    def apply(copy: Edited) -> None:
        for module, fact in copy.attentions():
            copy.change(module, **change(fact))

    return apply


def scales(copy: Edited, _length: int) -> Iterator[Edit]:
    """Other factors on the product, for all attentions: 1/sqrt(E), 1, s^2, 1/E, sqrt(E), those of the model's width."""
    if not copy.facts:
        return
    fact, hidden = copy.facts[0], copy.width
    own, width = fact.scale, fact.head_dim
    values = [width**-0.5, 1.0, own * own, 1 / width, width**0.5]
    if hidden:
        values += [hidden**-0.5, (hidden / fact.heads) ** -0.5]

    def change(value: float) -> Change:
        return every(lambda each: {"scale": value / own * each.scale})

    yield from edits_of_number("scale", "scale", own, values, (own / 256, own * 256), change)


def softcaps(copy: Edited, _length: int) -> Iterator[Edit]:
    """No cap on the logits, or another one."""
    own = next((fact.softcap for fact in copy.facts if fact.softcap is not None), None)
    if own is not None:
        yield Edit("softcap", "softcap", own, None, every(lambda _: {"softcap": None}))

    def change(value: float) -> Change:
        return every(lambda fact: {"softcap": value} if own is None or fact.softcap is not None else {})

    if copy.facts:
        yield from edits_of_number("softcap", "softcap", own, CAPS, (1.0, 400.0), change)


def windows(copy: Edited, length: int) -> Iterator[Edit]:
    """No window, another width, on every layer, on the other layers; for a model without windows, some widths."""
    own = next((fact.window for fact in copy.facts if fact.window is not None), None)
    if not copy.facts or not all(fact.causal for fact in copy.facts):
        return

    def change(value: float) -> Change:
        return every(lambda fact: {"window": int(value)} if own is None or fact.window is not None else {})

    if own is None:
        values = [2**power for power in range(LEAST_WINDOW.bit_length() - 1, length.bit_length()) if 2**power < length]
    else:
        values = [own + 1, own - 1, own // 2, own * 2]
        without = every(lambda fact: {"window": None} if fact.window is not None else {})
        yield Edit("window", "window", own, None, without)
        if any(fact.window is None for fact in copy.facts):
            everywhere = every(lambda _: {"window": own})
            yield Edit("window", "window_layers", "its_layers", "every_layer", everywhere)
            others = every(lambda fact: {"window": own if fact.window is None else None})
            yield Edit("window", "window_layers", "its_layers", "other_layers", others)
    usable = [value for value in values if value >= 1]
    yield from edits_of_number("window", "window", own, usable, (1, length), change, whole=True)


def masks(copy: Edited, _length: int) -> Iterator[Edit]:
    """Rows that see later keys: all of them, or one."""
    if copy.facts and all(fact.causal for fact in copy.facts):
        every_key = every(lambda fact: {"causal": False, "window": fact.window})
        yield Edit("mask", "mask", "causal", "all_keys", every_key)
        one_later = every(lambda fact: {"later": 1, "window": fact.window})
        yield Edit("mask_offset", "mask", "causal", "one_later", one_later)


def sinks(copy: Edited, _length: int) -> Iterator[Edit]:
    """No learned sink."""
    if any(fact.sinks for fact in copy.facts):
        yield Edit("sinks", "sinks", "learned", None, every(lambda _: {"sinks": False}))


def group_orders(copy: Edited, _length: int) -> Iterator[Edit]:
    """Key heads tiled (0 1 0 1) for repeated (0 0 1 1)."""
    if any(1 < fact.groups < fact.heads for fact in copy.facts):
        yield Edit("group_order", "group_order", "repeated", "tiled", every(lambda _: {"tiled": True}))

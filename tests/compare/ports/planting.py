"""What a planting is, and what plantings share: bases, fields of both sides, what either side does in an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.compare.ports.built import port_of
from tests.compare.ports.config import BASES, PAD, Port, weights_of

Changes = Mapping[str, Any]
Told = float | str | tuple[float, ...]
Says = Told | Callable[[Port, int], Told] | None  # of the port of that side, and the layer
NOTHING = "none"  # is what this side has of it
ALL = tuple(BASES)
WEIGHTS_SEEN = tuple(base for base in ALL if BASES[base].style != "sdpa")  # by their own code
TURNED = tuple(base for base in ALL if BASES[base].rope)
APART = tuple(base for base in ALL if not BASES[base].fused)
FUSED = tuple(base for base in ALL if BASES[base].fused)
SINGLE = tuple(base for base in ALL if BASES[base].kv_heads == BASES[base].heads)
GROUPED = tuple(base for base in ALL if BASES[base].kv_heads < BASES[base].heads)


@dataclass(frozen=True, slots=True)
class Planting:
    """One variant.

    Attributes:
        name: of the variant.
        planted: fields of `Port` that B has otherwise.
        bases: where it makes sense.
        common: fields that both sides have.
        a: what A does, a number, several of them, or words that must be in the answer; None where that is not asked.
        b: what B does.
        only: layers in which it is planted.
        first: the first layer that differs.
        stage: beginning of the stage that must be named; empty: one of its cause.
    """

    name: str
    planted: Changes | Callable[[Port], Changes]
    bases: tuple[str, ...] = ALL
    common: Changes | Callable[[Port], Changes] = field(default_factory=dict)
    a: Says = None
    b: Says = None
    only: tuple[int, ...] | None = None
    first: int = 0
    stage: str = ""

    def shared(self, base: str) -> dict[str, Any]:
        """Fields that both sides have."""
        return dict(self.common(BASES[base]) if callable(self.common) else self.common)

    def changes(self, base: str) -> dict[str, Any]:
        """Fields that B has otherwise."""
        port = port_of(base, **self.shared(base))
        return dict(self.planted(port) if callable(self.planted) else self.planted)


def case_name(cause: str, planting: Planting, base: str) -> str:
    """For a reader: "softcap-missing-eager"."""
    return f"{cause}-{planting.name.replace(' ', '_')}-{base}"


def causal(port: Port) -> Changes:
    """Causal masks and no padding, whatever the base has."""
    return {"causal": True, "padded": None}


def behind(port: Port) -> Changes:
    """The same with keys before the first row."""
    return {"causal": True, "padded": None, "memory": 6}


def padded(port: Port) -> Changes:
    """Padding where rows of tokens would see it."""
    return {"padded": "left" if port.causal else "right"}


def beside(side: str) -> Callable[[Port], Changes]:
    """Causal masks and padding: rows that it leaves without a key see their own."""
    return lambda port: {"causal": True, "padded": side}


def without(letter: str) -> Callable[[Port], Changes]:
    """No bias in one projection."""
    return lambda port: {"biases": port.biases.replace(letter, "")}


def factor(port: Port, layer: int) -> float:
    """The scale."""
    return port.factor


def hidden(port: Port, layer: int) -> float:
    """What hidden keys have of the style."""
    if port.fill is not None:
        return port.fill
    return torch.finfo(torch.float32).min if port.style in ("grouped", "einsum") else -torch.inf


def window_of(port: Port, layer: int) -> Told:
    """Keys that a row of the layer sees."""
    return port.windows[layer] or NOTHING


def short_of(port: Port, layer: int) -> str:
    """Where a sequence has its padding, as the port has it."""
    if port.padding == "lost":
        return NOTHING
    return f"the {'first' if (port.padded == 'left') == (port.padding == 'kept') else 'last'} {PAD}"


def drawn(name: str, power: int = 1) -> Callable[[Port, int], Told]:
    """The least and the greatest of some drawn numbers."""

    def of(port: Port, layer: int) -> Told:
        values = weights_of(port, layer)[name] ** power
        return float(values.min()), float(values.max())

    return of


def row_of(name: str) -> Callable[[Port, int], Told]:
    """The parameter that holds the projection."""
    return lambda port, layer: f"layers.{layer}.attn.{'qkv' if port.fused else name}_proj.weight"


def other_scale(name: str, value: float) -> Planting:
    return Planting(name, {"scale": value}, a=factor, b=value)


def normed(kind: str, **more: Any) -> dict[str, Any]:
    return {"qk_norm": kind, **more} | ({"scale": 3.0} if kind == "l2" else {})


def amplitude(port: Port) -> Changes:
    return {"amplitude": 1.25, "scale": port.factor / 1.25**2}


def windowed(port: Port) -> Changes:
    return {**causal(port), "windows": (6, 6, 6)}


def window_beside(port: Port) -> Changes:
    return {**beside("left")(port), "windows": (6, 6, 6)}


def upper(port: Port) -> Changes:
    return {**behind(port), "align": "upper"}


def windowed_layers(port: Port) -> Changes:
    return {**causal(port), "windows": (6, None, 6)}


def to_both_sides(port: Port) -> Changes:
    return {"causal": False, "padded": None, "windows": (6, 6, 6)}


def cap_at(name: str, where: str, cap: float, **more: Any) -> Planting:
    said = {"product": "before the scale", "masked": "after the mask"}[where]
    common = {"softcap": cap, **more}
    return Planting(name, {"softcap_at": where}, WEIGHTS_SEEN, common, a="after the scale", b=said)

"""What may be planted on one side of a pair of small models: for each cause its variants, and the bases it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from port_config import BASES, Port
from ports import port_of

Changes = Mapping[str, Any]
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
        a: what A does, a number, or words of which one must be in the answer; None where that is not asked.
        b: what B does.
        only: layers in which it is planted.
        first: the first layer that differs.
        stage: beginning of the stage that must be named; empty where that is not asked.
    """

    name: str
    planted: Changes | Callable[[Port], Changes]
    bases: tuple[str, ...] = ALL
    common: Changes | Callable[[Port], Changes] = field(default_factory=dict)
    a: float | str | None = None
    b: float | str | None = None
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


def causal(port: Port) -> Changes:
    """Causal masks and no padding, whatever the base has."""
    return {"causal": True, "padded": None}


def behind(port: Port) -> Changes:
    """The same with keys before the first row."""
    return {"causal": True, "padded": None, "memory": 6}


def padded(port: Port) -> Changes:
    """Padding where rows of tokens would see it."""
    return {"padded": "left" if port.causal else "right"}


def without(letter: str) -> Callable[[Port], Changes]:
    """No bias in one projection."""
    return lambda port: {"biases": port.biases.replace(letter, "")}


def _scale(name: str, value: float) -> Planting:
    return Planting(name, {"scale": value}, a=12**-0.5, b=value)


def _norm(kind: str, **more: Any) -> dict[str, Any]:
    return {"qk_norm": kind, **more} | ({"scale": 3.0} if kind == "l2" else {})


def _amplitude(port: Port) -> Changes:
    return {"amplitude": 1.25, "scale": port.factor / 1.25**2}


CACHE = {"cache_k": "once", "cache_v": "once"}

PLANTED: dict[str, tuple[Planting, ...]] = {
    "scale": (
        _scale("missing", 1.0),
        _scale("twice", 1 / 12),
        _scale("inverted", 12**0.5),
        _scale("model_dim", 48**-0.5),
        _scale("head_count", 0.5),
        _scale("off by 3%", 1.03 * 12**-0.5),
        Planting("missing in one layer", {"scale": 1.0}, only=(1,), first=1, a=12**-0.5, b=1.0),
    ),
    "softcap": (
        Planting("missing", {"softcap": None}, WEIGHTS_SEEN, {"softcap": 3.0}, a=3.0),
        Planting("other value", {"softcap": 4.0}, WEIGHTS_SEEN, {"softcap": 3.0}, a=3.0, b=4.0),
        Planting("added", {"softcap": 5.0}, WEIGHTS_SEEN, b=5.0),
    ),
    "softcap_order": (
        Planting("before the scale", {"softcap_at": "product"}, WEIGHTS_SEEN, {"softcap": 8.0}),
        Planting("before the scale, saturated", {"softcap_at": "product"}, WEIGHTS_SEEN, {"softcap": 3.0}),
        Planting("after the mask", {"softcap_at": "masked"}, WEIGHTS_SEEN, {"softcap": 3.0}),
        Planting("after the bias", {"softcap_at": "masked"}, WEIGHTS_SEEN, {"softcap": 3.0, "bias": "t5"}),
    ),
    "bias_scaled": (
        Planting("table", {"before_scale": "bias"}, common={"bias": "t5"}),
        Planting("slopes", {"before_scale": "bias"}, common={"bias": "alibi"}),
        Planting("mask", {"before_scale": "mask"}, common={"fill": -30.0}),
    ),
    "mask_offset": (
        Planting("sees the next key", {"offset": 1}, common=causal),
        Planting("sees not its own key", {"offset": -1}, common=causal),
        Planting("sees not its own key of more", {"offset": -1}, APART, behind),
        Planting("sees the next key of more", {"offset": 1}, APART, behind),
    ),
    "mask_alignment": (
        Planting("upper left", {"align": "upper"}, APART, behind),
        Planting("lower right", {"align": "lower"}, APART, lambda port: {**behind(port), "align": "upper"}),
    ),
    "window": (
        Planting("one less", {"windows": (5, 5, 5)}, common={"windows": (6, 6, 6)}),
        Planting("one more", {"windows": (7, 7, 7)}, common={"windows": (6, 6, 6)}),
        Planting("missing", {"windows": (None, None, None)}, common={"windows": (6, 6, 6)}),
        Planting("other layers", {"windows": (None, 6, None)}, common={"windows": (6, None, 6)}),
        Planting("also in the second layer", {"windows": (6, 6, 6)}, common={"windows": (6, None, 6)}, first=1),
    ),
    "padding": (
        Planting("lost", {"padding": "lost"}, common=padded),
        Planting("on the other side", {"padding": "flipped"}, common=padded),
    ),
    "mask_magnitude": (
        Planting("-5", {"fill": -5.0}, b=-5.0),
        Planting("-10", {"fill": -10.0}, b=-10.0),
        Planting("-8 against -1e9", {"fill": -8.0}, common={"fill": -1e9}, a=-1e9, b=-8.0),
    ),
    "bias": (
        Planting("no slopes", {"bias": None}, common={"bias": "alibi"}),
        Planting("no table", {"bias": None}, common={"bias": "t5"}),
        Planting("half the slopes", {"bias_steepness": 0.5}, common={"bias": "alibi"}),
        Planting("another table", {"changed": "t5"}, common={"bias": "t5"}),
        Planting("slopes added", {"bias": "alibi"}),
    ),
    "rope_missing": (
        Planting("on q", {"rope": "k"}, TURNED),
        Planting("on k", {"rope": "q"}, TURNED),
        Planting("on both", {"rope": ""}, TURNED),
    ),
    "rope_base": (
        Planting("10000", {"rope_base": 1e4}, TURNED, {"rope_base": 5e5}, a=5e5, b=1e4),
        Planting("1e6", {"rope_base": 1e6}, TURNED, a=1e4, b=1e6),
    ),
    "rope_layout": (
        Planting("interleaved", {"rope_layout": "interleaved"}, TURNED, {"rope_layout": "half"}, "half", "interleaved"),
        Planting("half-split", {"rope_layout": "half"}, TURNED, {"rope_layout": "interleaved"}, "interleaved", "half"),
    ),
    "rope_partial": (
        Planting("half of the head", {"rope_width": 6}, TURNED, {"rope_width": None}, a=12, b=6),
        Planting("the whole head", {"rope_width": None}, TURNED, {"rope_width": 8}, a=8, b=12),
    ),
    "positions": (
        Planting("q one further", {"shift_q": 1}, TURNED),
        Planting("k one further", {"shift_k": 1}, TURNED),
        Planting("k one back", {"shift_k": -1}, TURNED),
        Planting("q not reset", {"resets": "k"}, TURNED, {"padded": "left"}),
        Planting("k not reset", {"resets": "q"}, TURNED, {"padded": "left"}),
    ),
    "length_factor": (
        Planting("no amplitude", {"amplitude": 1.0}, TURNED, {"amplitude": 1.2}),
        Planting("another amplitude", {"amplitude": 1.3}, TURNED, {"amplitude": 1.1}),
        Planting("no log n", {"log_n": None}, common={"log_n": 8}),
        Planting("another log n", {"log_n": 16}, common={"log_n": 8}),
    ),
    "qk_norm": (
        Planting("rms missing", {"qk_norm": None}, common=_norm("rms")),
        Planting("layer missing", {"qk_norm": None}, common=_norm("layer")),
        Planting("l2 missing", {"qk_norm": None}, common=_norm("l2")),
        Planting("rms added", {"qk_norm": "rms"}),
    ),
    "qk_norm_order": (
        Planting("rms after", {"qk_norm_at": "after"}, TURNED, _norm("rms")),
        Planting("rms before", {"qk_norm_at": "before"}, TURNED, _norm("rms", qk_norm_at="after")),
        Planting("layer after", {"qk_norm_at": "after"}, TURNED, _norm("layer")),
    ),
    "qk_norm_eps": (
        Planting("rms 1e-2", {"qk_norm_eps": 1e-2}, common=_norm("rms"), a=1e-6, b=1e-2),
        Planting("rms 1e-3", {"qk_norm_eps": 1e-3}, common=_norm("rms"), a=1e-6, b=1e-3),
        Planting("layer 1e-2", {"qk_norm_eps": 1e-2}, common=_norm("layer"), a=1e-6, b=1e-2),
    ),
    "qk_norm_axis": (
        Planting("all heads", {"qk_norm_over": "heads"}, common=_norm("rms")),
        Planting("each head", {"qk_norm_over": "head"}, common=_norm("rms", qk_norm_over="heads")),
        Planting("all heads, layer", {"qk_norm_over": "heads"}, common=_norm("layer")),
    ),
    "sinks": (
        Planting("missing", {"sinks": None}, WEIGHTS_SEEN, {"sinks": "learned"}),
        Planting("zero", {"sinks": "zero"}, WEIGHTS_SEEN, {"sinks": "learned"}),
        Planting("added", {"sinks": "zero"}, WEIGHTS_SEEN),
    ),
    "group_order": (
        Planting("2 of 4", {"groups": "tile"}, GROUPED),
        Planting("2 of 6", {"groups": "tile"}, GROUPED, {"heads": 6, "head_dim": 8}),
        Planting("as it should", {"groups": "interleave"}, GROUPED, {"groups": "tile"}),
    ),
    "head_order": (
        Planting("q rolled", {"q_heads": "rolled"}),
        Planting("q transposed", {"q_heads": "transposed"}, APART),
        Planting("by heads", {"fused_read": "heads"}, FUSED, {"fused": "parts"}),
        Planting("by parts", {"fused_read": "parts"}, FUSED, {"fused": "heads"}),
    ),
    "kv_scale": (
        Planting("k twice", {"cache_k": "twice"}, common=CACHE),
        Planting("k never", {"cache_k": "never"}, common=CACHE),
        Planting("v twice", {"cache_v": "twice"}, common=CACHE),
        Planting("v never", {"cache_v": "never"}, common=CACHE),
    ),
    "rounding": (
        Planting("q and k in bfloat16", {"rounded": "qk"}),
        Planting("q in bfloat16", {"rounded": "q"}),
        Planting("k in float16", {"rounded": "k", "rounded_to": torch.float16}),
        Planting("softmax in float16", {"softmax_in": torch.float16}, WEIGHTS_SEEN),
        Planting("softmax in bfloat16", {"softmax_in": torch.bfloat16}, WEIGHTS_SEEN),
        Planting("weights in bfloat16", {"weights_in": torch.bfloat16}, WEIGHTS_SEEN),
    ),
    "dropout": (
        Planting("0.1", {"dropout": 0.1}, b=0.1),
        Planting("0.5", {"dropout": 0.5}, b=0.5),
    ),
    "projection_bias": (
        Planting("of q", without("q")),
        Planting("of v", without("v")),
        Planting("of k", without("k"), TURNED),
    ),
    "weights": (
        Planting("q", {"changed": "q"}),
        Planting("k", {"changed": "k"}),
        Planting("v", {"changed": "v"}),
        Planting("q in one layer", {"changed": "q"}, only=(2,), first=2),
        Planting("gain of q's norm", {"changed": "q_gain"}, common=_norm("rms")),
    ),
    "input": (
        Planting("GELU by tanh", {"activation": "tanh"}, first=1, stage="input"),
        Planting("ReLU", {"activation": "relu"}, first=1, stage="input"),
        Planting("output projection", {"changed": "o"}, first=1, stage="input"),
        Planting("embedding", {"embedding": 1.01}, tuple(b for b in ALL if not BASES[b].rope), stage="input"),
    ),
    "unknown": (
        Planting("tanh of q", {"odd": "tanh q"}, stage="query"),
        Planting("tanh of v", {"odd": "tanh v"}, stage="value"),
        Planting("clipped weights", {"odd": "clipped"}, WEIGHTS_SEEN, stage="weights"),
    ),
}

# What is written otherwise and gives the same outputs.
HARMLESS: tuple[Planting, ...] = (
    Planting("least number for minus infinity", {"fill": torch.finfo(torch.float32).min}),
    Planting("-1e4 for minus infinity", {"fill": -1e4}),
    Planting("both positions shifted", {"shift_q": 3, "shift_k": 3}, TURNED),
    Planting("no position reset", {"resets": ""}, TURNED, {"padded": "left"}),
    Planting("a window that holds all", {"windows": (24, 24, 24)}),
    Planting("no bias of k", without("k"), tuple(b for b in ALL if not BASES[b].rope)),
    Planting("slopes of zero", {"bias": "alibi", "bias_steepness": 0.0}),
    Planting("amplitude for scale", _amplitude, tuple(b for b in TURNED if BASES[b].rope_width is None)),
    Planting("rotation by parts", {"rope_code": "parts"}, TURNED),
    Planting("rotation by complex numbers", {"rope_code": "complex"}, TURNED),
    Planting("scale in the weights of q", {"folded": True}),
    Planting("other names", {"names": "h"}),
    Planting("one projection, by parts", {"fused": "parts"}, SINGLE),
    Planting("one projection, by heads", {"fused": "heads"}, SINGLE),
    Planting("three projections", {"fused": None}, FUSED),
    Planting("eager code", {"style": "eager"}),
    Planting("another code", {"style": "baddbmm"}),
    Planting("a softcap far above", {"softcap": 1e5}, WEIGHTS_SEEN),
)


def cases() -> Iterator[tuple[str, Planting, str]]:
    """Every cause, variant and base."""
    for cause, plantings in PLANTED.items():
        for planting in plantings:
            for base in planting.bases:
                yield cause, planting, base


def case_name(cause: str, planting: Planting, base: str) -> str:
    """For a reader: "softcap-missing-eager"."""
    return f"{cause}-{planting.name.replace(' ', '_')}-{base}"


def cross_section() -> Iterator[tuple[str, Planting, str]]:
    """A fixed part: two variants of each cause, on bases that change from one to the next."""
    turn = 0
    for cause, plantings in PLANTED.items():
        for planting in plantings[:2]:
            yield cause, planting, planting.bases[turn % len(planting.bases)]
            turn += 1

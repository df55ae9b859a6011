"""What may be planted on one side of a pair of small models: for each cause its variants, and the bases it fits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.compare.ports.config import BASES
from tests.compare.ports.planting import (
    ALL,
    APART,
    FUSED,
    GROUPED,
    NOTHING,
    SINGLE,
    TURNED,
    WEIGHTS_SEEN,
    Planting,
    amplitude,
    behind,
    beside,
    cap_at,
    causal,
    drawn,
    factor,
    hidden,
    normed,
    other_scale,
    padded,
    row_of,
    short_of,
    to_both_sides,
    upper,
    window_beside,
    window_of,
    windowed,
    windowed_layers,
    without,
)

HEADS, PARTS = "[head][q, k, v]", "[q, k, v][head]"
OWN = "its own dtype"
GAIN = drawn("q_gain")
CACHE = {"cache_k": "once", "cache_v": "once"}

PLANTED: dict[str, tuple[Planting, ...]] = {
    "scale": (
        other_scale("missing", 1.0),
        other_scale("twice", 1 / 12),
        other_scale("inverted", 12**0.5),
        other_scale("model_dim", 48**-0.5),
        other_scale("head_count", 0.5),
        other_scale("off by 3%", 1.03 * 12**-0.5),
        Planting("missing in one layer", {"scale": 1.0}, only=(1,), first=1, a=factor, b=1.0),
    ),
    "softcap": (
        Planting("missing", {"softcap": None}, WEIGHTS_SEEN, {"softcap": 3.0}, a=3.0, b=NOTHING),
        Planting("other value", {"softcap": 4.0}, WEIGHTS_SEEN, {"softcap": 3.0}, a=3.0, b=4.0),
        Planting("added", {"softcap": 5.0}, WEIGHTS_SEEN, a=NOTHING, b=5.0),
    ),
    "softcap_order": (
        cap_at("before the scale", "product", 8.0),
        cap_at("before the scale, saturated", "product", 3.0),
        cap_at("after the mask", "masked", 3.0),
        cap_at("after the bias", "masked", 3.0, bias="t5"),
    ),
    "bias_scaled": (
        Planting("table", {"before_scale": "bias"}, common={"bias": "t5"}, a=1.0, b=factor, stage="bias"),
        Planting("slopes", {"before_scale": "bias"}, common={"bias": "alibi"}, a=1.0, b=factor, stage="bias"),
        Planting("mask", {"before_scale": "mask"}, common={"fill": -25.0}, a=1.0, b=factor, stage="mask"),
    ),
    "mask_offset": (  # the least i - j
        Planting("sees the next key", {"offset": 1}, common=causal, a=0, b=-1),
        Planting("sees not its own key", {"offset": -1}, common=causal, a=0, b=1),
        Planting("sees not its own key of more", {"offset": -1}, APART, behind, a=-6, b=-5),
        Planting("sees the next key of more", {"offset": 1}, APART, behind, a=-6, b=-7),
        Planting("sees the next key beside padding", {"offset": 1}, common=beside("left"), a=0, b=-1),
    ),
    "mask_alignment": (
        Planting("upper left", {"align": "upper"}, APART, behind, "lower right", "upper left"),
        Planting("lower right", {"align": "lower"}, APART, upper, "upper left", "lower right"),
    ),
    "window": (
        Planting("one less", {"windows": (5, 5, 5)}, common=windowed, a=6, b=5),
        Planting("one more", {"windows": (7, 7, 7)}, common=windowed, a=6, b=7),
        Planting("missing", {"windows": (None, None, None)}, common=windowed, a=6, b=NOTHING),
        Planting("other layers", {"windows": (None, 6, None)}, common=windowed_layers, a=window_of, b=window_of),
        Planting("also in the second layer", {"windows": (6, 6, 6)}, common=windowed_layers, a=NOTHING, b=6, first=1),
        Planting("one less on both sides", {"windows": (5, 5, 5)}, common=to_both_sides, a=11, b=9),
        Planting("one less beside padding", {"windows": (5, 5, 5)}, common=window_beside, a=6, b=5),
        Planting("missing beside padding", {"windows": (None, None, None)}, common=window_beside, a=6, b=NOTHING),
    ),
    "padding": (
        Planting("lost", {"padding": "lost"}, common=padded, a=short_of, b=NOTHING),
        Planting("on the other side", {"padding": "flipped"}, common=padded, a=short_of, b=short_of),
    ),
    "mask_magnitude": (
        Planting("-5", {"fill": -5.0}, a=hidden, b=-5.0),
        Planting("-7", {"fill": -7.0}, a=hidden, b=-7.0),
        Planting("-6 against -1e9", {"fill": -6.0}, common={"fill": -1e9}, a=-1e9, b=-6.0),
    ),
    "bias": (
        Planting("no slopes", {"bias": None}, common={"bias": "alibi"}, a="ALiBi", b=NOTHING),
        Planting("no table", {"bias": None}, common={"bias": "t5"}, a="relative", b=NOTHING),
        Planting("half the slopes", {"bias_steepness": 0.5}, common={"bias": "alibi"}, a="ALiBi", b="ALiBi"),
        Planting("another table", {"changed": "t5"}, common={"bias": "t5"}, a="relative", b="relative"),
        Planting("slopes added", {"bias": "alibi"}, a=NOTHING, b="ALiBi"),
    ),
    "rope_missing": (
        Planting("on q", {"rope": "k"}, TURNED, a="rotated", b="not rotated", stage="query"),
        Planting("on k", {"rope": "q"}, TURNED, a="rotated", b="not rotated", stage="key"),
        Planting("on both", {"rope": ""}, TURNED, a="rotated", b="not rotated"),
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
        Planting("half of the head", {"rope_width": 6}, TURNED, {"rope_width": None}, "all 12", "0 to 5 of 12"),
        Planting("the whole head", {"rope_width": None}, TURNED, {"rope_width": 8}, "0 to 7 of 12", "all 12"),
    ),
    "positions": (
        Planting("q one further", {"shift_q": 1}, TURNED, a=0, b=1, stage="query"),
        Planting("k one further", {"shift_k": 1}, TURNED, a=0, b=1, stage="key"),
        Planting("k one back", {"shift_k": -1}, TURNED, a=0, b=-1, stage="key"),
        Planting("q not reset", {"resets": "k"}, TURNED, {"padded": "left"}, stage="query"),
        Planting("k not reset", {"resets": "q"}, TURNED, {"padded": "left"}, stage="key"),
    ),
    "length_factor": (
        Planting("no amplitude", {"amplitude": 1.0}, TURNED, {"amplitude": 1.2}, a=1.2, b=1.0),
        Planting("another amplitude", {"amplitude": 1.3}, TURNED, {"amplitude": 1.1}, a=1.1, b=1.3),
        Planting("no log n", {"log_n": None}, common={"log_n": 8}),
        Planting("another log n", {"log_n": 16}, common={"log_n": 8}),
    ),
    "qk_norm": (
        Planting("rms missing", {"qk_norm": None}, common=normed("rms"), a="RMS", b=NOTHING),
        Planting("layer missing", {"qk_norm": None}, common=normed("layer"), a="LayerNorm", b=NOTHING),
        Planting("l2 missing", {"qk_norm": None}, common=normed("l2"), a="L2", b=NOTHING),
        Planting("rms added", {"qk_norm": "rms"}, a=NOTHING, b="RMS"),
    ),
    "qk_norm_order": (
        Planting("rms after", {"qk_norm_at": "after"}, TURNED, normed("rms"), "before", "after"),
        Planting("rms before", {"qk_norm_at": "before"}, TURNED, normed("rms", qk_norm_at="after"), "after", "before"),
        Planting("layer after", {"qk_norm_at": "after"}, TURNED, normed("layer"), "before", "after"),
    ),
    "qk_norm_eps": (
        Planting("rms 1e-2", {"qk_norm_eps": 1e-2}, common=normed("rms"), a=1e-6, b=1e-2),
        Planting("rms 1e-3", {"qk_norm_eps": 1e-3}, common=normed("rms"), a=1e-6, b=1e-3),
        Planting("layer 1e-2", {"qk_norm_eps": 1e-2}, common=normed("layer"), a=1e-6, b=1e-2),
    ),
    "qk_norm_axis": (
        Planting("all heads", {"qk_norm_over": "heads"}, common=normed("rms"), a="each", b="all"),
        Planting("each head", {"qk_norm_over": "head"}, common=normed("rms", qk_norm_over="heads"), a="all", b="each"),
        Planting("all heads, layer", {"qk_norm_over": "heads"}, common=normed("layer"), a="each", b="all"),
    ),
    "sinks": (
        Planting("missing", {"sinks": None}, WEIGHTS_SEEN, {"sinks": "learned"}, drawn("sinks"), NOTHING),
        Planting("zero", {"sinks": "zero"}, WEIGHTS_SEEN, {"sinks": "learned"}, drawn("sinks"), 0.0),
        Planting("added", {"sinks": "zero"}, WEIGHTS_SEEN, a=NOTHING, b=0.0),
    ),
    "group_order": (
        Planting("2 of 4", {"groups": "tile"}, GROUPED, a="0 0 1 1", b="0 1 0 1"),
        Planting("2 of 6", {"groups": "tile"}, GROUPED, {"heads": 6, "head_dim": 8}, "0 0 0 1 1 1", "0 1 0 1 0 1"),
        Planting("as it should", {"groups": "interleave"}, GROUPED, {"groups": "tile"}, "0 1 0 1", "0 0 1 1"),
    ),
    "head_order": (
        Planting("q rolled", {"q_heads": "rolled"}, a="in order", b="3 0 1 2", stage="query"),
        Planting("q transposed", {"q_heads": "transposed"}, APART, a="in order", b="[channel][head]", stage="query"),
        Planting("by heads", {"fused_read": "heads"}, FUSED, {"fused": "parts"}, b=f"{HEADS} instead of {PARTS}"),
        Planting("by parts", {"fused_read": "parts"}, FUSED, {"fused": "heads"}, b=f"{PARTS} instead of {HEADS}"),
    ),
    "kv_scale": (  # against A's
        Planting("k twice", {"cache_k": "twice"}, common=CACHE, a=1.0, b=drawn("k_step"), stage="key"),
        Planting("k never", {"cache_k": "never"}, common=CACHE, a=1.0, b=drawn("k_step", -1), stage="key"),
        Planting("v twice", {"cache_v": "twice"}, common=CACHE, a=1.0, b=drawn("v_step"), stage="value"),
        Planting("v never", {"cache_v": "never"}, common=CACHE, a=1.0, b=drawn("v_step", -1), stage="value"),
    ),
    "rounding": (
        Planting("q and k in bfloat16", {"rounded": "qk"}, a=OWN, b="bfloat16"),
        Planting("q in bfloat16", {"rounded": "q"}, a=OWN, b="bfloat16", stage="query"),
        Planting("k in float16", {"rounded": "k", "rounded_to": torch.float16}, a=OWN, b="float16", stage="key"),
        Planting("softmax in float16", {"softmax_in": torch.float16}, WEIGHTS_SEEN, a=OWN, b="float16"),
        Planting("softmax in bfloat16", {"softmax_in": torch.bfloat16}, WEIGHTS_SEEN, a=OWN, b="bfloat16"),
        Planting("weights in bfloat16", {"weights_in": torch.bfloat16}, WEIGHTS_SEEN, a=OWN, b="bfloat16"),
    ),
    "dropout": (
        Planting("0.1", {"dropout": 0.1}, a=0.0, b=0.1),
        Planting("0.5", {"dropout": 0.5}, a=0.0, b=0.5),
    ),
    "projection_bias": (
        Planting("of q", without("q"), a="a bias", b=NOTHING, stage="query"),
        Planting("of v", without("v"), a="a bias", b=NOTHING, stage="value"),
        Planting("of k", without("k"), TURNED, a="a bias", b=NOTHING, stage="key"),
    ),
    "weights": (
        Planting("q", {"changed": "q"}, a=row_of("q"), b=row_of("q"), stage="query"),
        Planting("k", {"changed": "k"}, a=row_of("k"), b=row_of("k"), stage="key"),
        Planting("v", {"changed": "v"}, a=row_of("v"), b=row_of("v"), stage="value"),
        Planting("q in one layer", {"changed": "q"}, only=(2,), first=2, a=row_of("q"), b=row_of("q"), stage="query"),
        Planting("gain of q's norm", {"changed": "q_gain"}, common=normed("rms"), a=GAIN, b=GAIN, stage="query norm"),
    ),
    "input": (
        Planting("GELU by tanh", {"activation": "tanh"}, first=1, stage="input"),
        Planting("ReLU", {"activation": "relu"}, first=1, stage="input"),
        Planting("output projection", {"changed": "o"}, first=1, stage="input"),
        Planting("embedding", {"embedding": 1.01}, tuple(b for b in ALL if not BASES[b].rope), stage="input"),
    ),
    # Squared weights are not among these: p^2 / sum p^2 is the softmax of twice the logits, which is another scale.
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
    Planting("amplitude for scale", amplitude, tuple(b for b in TURNED if BASES[b].rope_width is None)),
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


def cross_section() -> Iterator[tuple[str, Planting, str]]:
    """A fixed part: two variants of each cause, on bases that change from one to the next."""
    turn = 0
    for cause, plantings in PLANTED.items():
        for planting in plantings[:2]:
            yield cause, planting, planting.bases[turn % len(planting.bases)]
            turn += 1

"""Scores, rules for the scale, and positions as parts of cases: the package's form beside the papers' formula."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor, nn

from sqrtdk import positions, scales, scores
from tests.attention import formulas
from tests.attention.oracle import dot, visible_keys
from tests.attention.parts import Leaves, Part, Shape, randn

Found = dict[str, Any]
HIDDEN = 3  # width of an additive score's layer
REACH = 2  # distance at which relative keys stop to differ
BUCKETS, LONGEST = 8, 20
MODEL = 6


def rule(make: Any, factor: Any) -> Part:
    """A rule without parameters; `factor` of E is what it should give."""
    return Part(lambda s, t: {"scale": make()}, resolved=lambda s, t, found: {"scale": factor(s.dim)})


def planted(module: nn.Module, **tensors: Tensor) -> nn.Module:
    """The module with these tensors in place of its parameters; `a__b` is b of the child a."""
    for path, tensor in tensors.items():
        *parents, name = path.split("__")
        owner = module.get_submodule(".".join(parents))
        assert owner.get_parameter(name).shape == tensor.shape
        delattr(owner, name)
        setattr(owner, name, tensor)
    return module


def counted(shape: Shape, found: Found) -> Tensor:
    """(..., L, 1): how many keys each row sees, at least 1."""
    masks = ("attn_mask", "is_causal", "causal_lower_right", "window")
    given = {"attn_mask": None, "is_causal": False, "causal_lower_right": False, "window": None}
    visible = visible_keys(shape.logits, **{name: found.get(name, given[name]) for name in masks})
    return visible.sum(-1, keepdim=True).double().clamp(min=1.0)


def log_n(shape: Shape, found: Found, base: float = math.e) -> Tensor:
    dtype = found["query"].dtype
    return (counted(shape, found).log() / (math.log(base) * math.sqrt(shape.dim))).to(dtype)


def per_head(theta: Tensor, shape: Shape) -> Tensor:
    return theta.exp().reshape(shape.per_head)


def shift(shape: Shape, found: Found) -> int:
    """Where the first row stands among the keys."""
    return shape.keys - shape.length if found.get("causal_lower_right") else 0


def score(make: Any, formula: Any, leaves: Any = None, *, scaled: bool = False) -> Part:
    """A score; where no scale is given it has 1/sqrt(E) or none."""
    return Part(
        lambda s, t: {"score": make(s, t)},
        leaves or (lambda s, g: {}),
        lambda s, t, found: {"score": formula(s, t), "scale": s.dim**-0.5 if scaled else 1.0},
    )


def weights(**sizes: Any) -> Any:
    """Leaves of the sizes that functions of the shape give, over the root of their rows, so that sums stay near 1."""

    def make(shape: Shape, generator: Generator) -> Leaves:
        found = {name: randn(*size(shape), generator=generator) for name, size in sizes.items()}
        return {name: t / math.sqrt(t.shape[-2]) if t.ndim > 1 else t for name, t in found.items()}

    return make


def heads_of(shape: Shape, kv: bool = False) -> tuple[int, ...]:
    return ((shape.kv_heads if kv else shape.heads),) if shape.heads else ()


def repeated(weight: Tensor, shape: Shape) -> Tensor:
    return weight.repeat_interleave(shape.heads // shape.kv_heads, 0) if shape.heads else weight


SCORES = {
    "dot": Part(resolved=lambda s, t, found: {"score": dot, "scale": s.dim**-0.5}),
    "dot_named": score(lambda s, t: scores.dot(), lambda s, t: dot, scaled=True),
    "bilinear": score(
        lambda s, t: scores.bilinear(t["w"]),
        lambda s, t: formulas.bilinear(t["w"]),
        weights(w=lambda s: (s.dim, s.wide)),
        scaled=True,
    ),
    "bilinear_heads": score(
        lambda s, t: scores.bilinear(t["w"]),
        lambda s, t: formulas.bilinear(t["w"]),
        weights(w=lambda s: (*heads_of(s), s.dim, s.wide)),
        scaled=True,
    ),
    "luong_general": score(
        lambda s, t: scores.luong_general(t["w"]),
        lambda s, t: formulas.bilinear(t["w"]),
        weights(w=lambda s: (s.dim, s.wide)),
    ),
    "additive": score(
        lambda s, t: scores.additive(t["v"], t["wq"], t["wk"], t["b"]),
        lambda s, t: formulas.additive(t["v"], t["wq"], t["wk"], t["b"]),
        weights(
            v=lambda s: (HIDDEN,), wq=lambda s: (s.dim, HIDDEN), wk=lambda s: (s.wide, HIDDEN), b=lambda s: (HIDDEN,)
        ),
    ),
    "additive_heads": score(
        lambda s, t: scores.additive(t["v"], t["wq"], t["wk"]),
        lambda s, t: formulas.additive(t["v"], t["wq"], repeated(t["wk"], s)),
        weights(
            v=lambda s: (*heads_of(s), HIDDEN),
            wq=lambda s: (*heads_of(s), s.dim, HIDDEN),
            wk=lambda s: (*heads_of(s, kv=True), s.wide, HIDDEN),
        ),
    ),
    "luong_concat": score(
        lambda s, t: scores.luong_concat(t["v"], t["w"]),
        lambda s, t: formulas.concat(t["v"], t["w"]),
        weights(v=lambda s: (HIDDEN,), w=lambda s: (s.dim + s.wide, HIDDEN)),
    ),
    "keras_additive": score(
        lambda s, t: scores.keras_additive(t["v"]),
        lambda s, t: formulas.plain_sum(t["v"]),
        weights(v=lambda s: (s.dim,)),
    ),
    "keras_sum": score(lambda s, t: scores.keras_additive(), lambda s, t: formulas.plain_sum(None)),
    "distance": score(lambda s, t: scores.distance(), lambda s, t: formulas.distance),
    "laplace": score(lambda s, t: scores.laplace(), lambda s, t: formulas.laplace),
    "cosine": score(
        lambda s, t: scores.cosine(gain=t["gain"]),
        lambda s, t: formulas.cosine("l2", t["gain"]),
        lambda s, g: {"gain": 1.0 + torch.rand(s.heads or 1, generator=g, dtype=torch.float64)},
    ),
    "cosine_rms": score(lambda s, t: scores.cosine("rms"), lambda s, t: formulas.cosine("rms"), scaled=True),
    "cosine_layer": score(
        lambda s, t: scores.cosine("layer", gain=0.7), lambda s, t: formulas.cosine("layer", 0.7), scaled=True
    ),
}
RULES = {
    "rule_sqrt_dk": rule(scales.sqrt_dk, lambda d: d**-0.5),
    "rule_none": rule(scales.none, lambda d: 1.0),
    "rule_dk": rule(lambda: scales.dk(2.0), lambda d: 2.0 / d),
    "rule_two": rule(scales.two_sqrt_dk, lambda d: 0.5 / d**0.5),
    "rule_fixed": rule(lambda: scales.fixed(0.3), lambda d: 0.3),
    "rule_temperature": rule(lambda: scales.temperature(2.0), lambda d: 0.5 * d**-0.5),
    "rule_yarn": rule(lambda: scales.yarn(1.2), lambda d: 1.44 * d**-0.5),
    "rule_disentangled": rule(lambda: scales.disentangled(3), lambda d: (3 * d) ** -0.5),
    "rule_layer": rule(lambda: scales.layer_index(1), lambda d: 0.5 * d**-0.5),
    "rule_log_n": Part(lambda s, t: {"scale": scales.log_n()}, resolved=lambda s, t, found: {"scale": log_n(s, found)}),
    "rule_learned": Part(
        lambda s, t: {"scale": planted(scales.learned(s.heads or 1), log_factor=t["theta"])},
        lambda s, g: {"theta": randn(s.heads or 1, generator=g) / 2},
        lambda s, t, found: {"scale": per_head(t["theta"], s) * s.dim**-0.5},
    ),
    "rule_learned_log_n": Part(
        lambda s, t: {"scale": planted(scales.learned(s.heads or 1, scales.log_n(base=8.0)), log_factor=t["theta"])},
        lambda s, g: {"theta": randn(s.heads or 1, generator=g) / 2},
        lambda s, t, found: {"scale": per_head(t["theta"], s) * log_n(s, found, 8.0)},
    ),
}
POSITIONS = {
    "alibi": Part(
        lambda s, t: {"bias": positions.alibi(slopes=t["slopes"])},
        lambda s, g: {"slopes": 0.1 + torch.rand(s.heads, generator=g, dtype=torch.float64) / 2},
        lambda s, t, found: {"bias": formulas.alibi(t["slopes"], s.length, s.keys, shift(s, found), False)},
    ),
    "alibi_symmetric": Part(
        lambda s, t: {"bias": positions.alibi(slopes=t["slopes"], symmetric=True)},
        lambda s, g: {"slopes": 0.1 + torch.rand(s.heads, generator=g, dtype=torch.float64) / 2},
        lambda s, t, found: {"bias": formulas.alibi(t["slopes"], s.length, s.keys, shift(s, found), True)},
    ),
    "t5": Part(
        lambda s, t: {
            "bias": planted(
                positions.t5_bias(s.heads, num_buckets=BUCKETS, max_distance=LONGEST), embedding__weight=t["table"]
            )
        },
        lambda s, g: {"table": randn(BUCKETS, s.heads, generator=g)},
        lambda s, t, found: {"bias": formulas.t5(t["table"], s.length, s.keys, shift(s, found), LONGEST, True)},
    ),
    "t5_decoder": Part(
        lambda s, t: {
            "bias": planted(
                positions.t5_bias(s.heads, bidirectional=False, num_buckets=BUCKETS, max_distance=LONGEST),
                embedding__weight=t["table"],
            )
        },
        lambda s, g: {"table": randn(BUCKETS, s.heads, generator=g)},
        lambda s, t, found: {"bias": formulas.t5(t["table"], s.length, s.keys, shift(s, found), LONGEST, False)},
    ),
    "shaw": Part(
        lambda s, t: {"bias": planted(positions.shaw(s.dim, max_distance=REACH), table=t["table"])},
        lambda s, g: {"table": randn(2 * REACH + 1, s.dim, generator=g) / 2},
        lambda s, t, found: {"content": formulas.shaw(t["table"], s.length, s.keys, shift(s, found))},
    ),
    "shaw_heads": Part(
        lambda s, t: {"bias": planted(positions.shaw(s.dim, max_distance=REACH, heads=s.heads), table=t["table"])},
        lambda s, g: {"table": randn(s.heads, 2 * REACH + 1, s.dim, generator=g) / 2},
        lambda s, t, found: {"content": formulas.shaw(t["table"], s.length, s.keys, shift(s, found))},
    ),
    "transformer_xl": Part(
        lambda s, t: {
            "bias": planted(
                positions.transformer_xl(s.heads, s.dim, model_dim=MODEL),
                content_bias=t["u"],
                position_bias=t["v_bias"],
                projection__weight=t["w_rel"],
            )
        },
        lambda s, g: {
            "u": randn(s.heads, s.dim, generator=g) / 2,
            "v_bias": randn(s.heads, s.dim, generator=g) / 2,
            "w_rel": randn(s.heads * s.dim, MODEL, generator=g) / 2,
        },
        lambda s, t, found: {
            "content": formulas.transformer_xl(t["u"], t["v_bias"], t["w_rel"], s.length, s.keys, shift(s, found))
        },
    ),
    "deberta": Part(
        lambda s, t: {
            "bias": planted(
                positions.deberta(
                    s.heads,
                    s.dim,
                    max_distance=REACH,
                    model_dim=MODEL,
                    key_proj=nn.Linear(MODEL, s.heads * s.dim, bias=False),
                    query_proj=nn.Linear(MODEL, s.heads * s.dim, bias=False),
                ),
                embedding=t["embedding"],
                key_proj__weight=t["w_key"],
                query_proj__weight=t["w_query"],
            )
        },
        lambda s, g: {
            "embedding": randn(2 * REACH, MODEL, generator=g),
            "w_key": randn(s.heads * s.dim, MODEL, generator=g) / 4,
            "w_query": randn(s.heads * s.dim, MODEL, generator=g) / 4,
        },
        lambda s, t, found: {
            "content": formulas.deberta(
                t["embedding"], t["w_key"], t["w_query"], s.heads, s.length, s.keys, shift(s, found)
            )
        },
    ),
    "rope": Part(
        lambda s, t: dict(zip(("query", "key"), positions.rope(t["query"], t["key"]), strict=True)),
        resolved=lambda s, t, found: {n: formulas.rope(t[n], "half", s.dim) for n in ("query", "key")},
    ),
    "rope_interleaved": Part(
        lambda s, t: dict(
            zip(
                ("query", "key"),
                positions.rope(t["query"], t["key"], layout="interleaved", rotary_dim=2),
                strict=True,
            )
        ),
        resolved=lambda s, t, found: {n: formulas.rope(t[n], "interleaved", 2) for n in ("query", "key")},
    ),
}
FOLDED = {"dot", "dot_named", "bilinear", "bilinear_heads", "luong_general", "cosine", "cosine_rms", "cosine_layer"} | {
    "distance"
}
WIDE_KEYS = {"bilinear", "bilinear_heads", "luong_general", "additive", "additive_heads", "luong_concat"}
CONTENT = {"shaw", "shaw_heads", "transformer_xl", "deberta"}
NO_HEADS = {"shaw"}  # terms that need no head dimension
ROTATIONS = {"rope", "rope_interleaved"}
TERMS = set(POSITIONS) - ROTATIONS
# what is computed in a half dtype before the logits, by design: its rounding shows in the statistics
ROUNDED_SCORES = {"bilinear", "bilinear_heads", "luong_general", "cosine", "cosine_rms", "cosine_layer"} | {
    "additive",
    "additive_heads",
    "luong_concat",
}
ROUNDED_RULES = {"rule_learned", "rule_learned_log_n"}  # a half parameter's exponential
ROUNDED_POSITIONS = {"deberta"} | ROTATIONS

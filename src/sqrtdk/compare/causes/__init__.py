"""Why two sides differ: one row for each way in which a part of A's program may differ from B's.

A row names the cause, where it looks and acts, the fields that become B's, the function that compares, and the
sentence. Rows are tried in order; causes early in an attention come first. A new cause is a row here, a function that
compares, and its sentences in `sqrtdk/messages/words/causes.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqrtdk.compare.causes import angles, bias, formula, masks, norms, projections, rotations
from sqrtdk.compare.suspect import QK, QKV, Row, Sides, Suspicion, formulas, suspicions, ways

KV = ("key", "value")
AMPLITUDE = "causes.length_factor.amplitude"
# Above most rows stands the code that they find: what B writes "for" what A writes.
ROWS = (
    # from the input to the product
    # qkv.view(B, L, H, 3, E) for qkv.view(B, L, 3, H, E): a fused projection read in the other layout
    Row("head_order", projections.reordered, "", (), projections.head_order, "causes.head_order.other"),
    Row("weights", projections.projections, "", ("weight",), projections.weight),
    # x * weight for x * (1 + weight)
    Row("weights", norms.norm_pairs, "norm", ("gain", "shift"), norms.gain),
    # nn.Linear(D, H * E, bias=False) for a checkpoint with q_proj.bias
    Row(
        "projection_bias", projections.projections, "", ("bias",), projections.bias,
        ("causes.projection_bias.missing", "causes.projection_bias.added", "causes.projection_bias.other"),
    ),
    # rope(q) for rope(self.q_norm(q))
    Row("qk_norm", ways(*QK), "norm", (), norms.missing, ("causes.qk_norm.missing", "causes.qk_norm.added", "")),
    # F.layer_norm(q, (E,)) for F.rms_norm(q, (E,))
    Row("qk_norm", norms.norm_pairs, "norm", ("kind", "eps"), norms.kind, "causes.qk_norm.other"),
    # self.q_norm(rope(q)) for rope(self.q_norm(q))
    Row("qk_norm_order", ways(*QK), "norm", (), norms.order),
    # the norm before q.view(B, L, H, E), over all heads, for the norm after it, over one
    Row("qk_norm_axis", norms.norm_pairs, "norm", ("over",), norms.axis, "causes.qk_norm_axis.other"),
    # nn.RMSNorm(E, eps=1e-5) for nn.RMSNorm(E, eps=1e-6)
    Row("qk_norm_eps", norms.norm_pairs, "norm", ("eps",), norms.eps, "causes.qk_norm_eps.other"),
    # q @ k.mT for rope(q) @ rope(k).mT
    Row(
        "rope_missing", ways(*QK), "rotation", (), rotations.missing,
        ("causes.rope_missing.missing", "causes.rope_missing.added", ""),
    ),
    # rope(q) for cat((rope(q[..., :R]), q[..., R:]), -1)
    Row("rope_partial", rotations.like_rotations, "rotation", (), rotations.channels, "causes.rope_partial.other"),
    # pairs (x[..., ::2], x[..., 1::2]) for (x[..., : R // 2], x[..., R // 2 :])
    Row("rope_layout", rotations.rotations, "rotation", (), rotations.layout, "causes.rope_layout.other"),
    # x1 * cos + x2 * sin for x1 * cos - x2 * sin
    Row("rope_layout", rotations.rotations, "rotation", (), rotations.direction, "causes.rope_layout.turns"),
    # base = 10000.0 for base = config.rope_theta
    Row("rope_base", rotations.like_rotations, "rotation", (), angles.of_kind("rope_base"), "causes.rope_base.other"),
    # position_ids = arange(L) for arange(cached, cached + L)
    Row("positions", rotations.like_rotations, "rotation", (), angles.of_kind("positions")),
    # cos, sin for cos * m, sin * m with m = 0.1 * log(factor) + 1: YaRN
    Row("length_factor", rotations.like_rotations, "rotation", (), rotations.amplitude, AMPLITUDE),
    Row("length_factor", ways(*QK), "rotation", ("scaled",), rotations.amplitude_as_factor, AMPLITUDE),
    # q for q * log(n), with n the keys that the row sees
    Row("length_factor", formulas, "scale", (), formula.of_rows),
    # k_cache.float() for k_cache.float() * k_scale
    Row("kv_scale", ways(*KV), "", ("scaled",), projections.kv_factor, "causes.kv_scale.times"),
    # k.repeat(1, Hq // H, 1, 1) for k.repeat_interleave(Hq // H, 1)
    Row("group_order", ways(*KV), "", ("heads",), projections.group_order, "causes.group_order.other"),
    # from the product to the output
    # softmax(q @ k.mT) for softmax(q @ k.mT / sqrt(E))
    Row("scale", formulas, "scale", ("scale", "after"), formula.scale),
    # z for cap * tanh(z / cap)
    Row(
        "softcap", formulas, "softcap", ("softcap",), formula.softcap,
        ("causes.softcap.missing", "causes.softcap.added", "causes.softcap.other"),
        digits=6,
    ),
    # scale * cap * tanh(q @ k.mT / cap) for cap * tanh(scale * q @ k.mT / cap)
    Row(
        "softcap_order", formulas, "softcap", ("softcap_at", "scale", "after"), formula.softcap_order,
        "causes.softcap_order.other",
    ),
    # (q @ k.mT + bias) * scale for q @ k.mT * scale + bias; with a mask of -1e4 the same is done to the fill
    Row("bias_scaled", formulas, "bias", ("bias_by",), bias.bias_factor, "causes.bias_scaled.bias"),
    Row("bias_scaled", formulas, "mask", ("fill_by",), bias.fill_factor, "causes.bias_scaled.mask"),
    Row("bias", formulas, "bias", ("bias", "bias_name", "bias_by"), bias.bias),
    # torch.ones(L, S).tril() for torch.ones(L, S).tril(S - L): a decoder with a cache
    Row("mask_alignment", masks.bands, "mask", ("visible",), masks.alignment, "causes.mask_alignment.other"),
    # torch.ones(L, L).tril(1) for torch.ones(L, L).tril()
    Row("mask_offset", masks.bands, "mask", ("visible",), masks.causal_bound),
    # i - j <= window for i - j < window
    Row(
        "window", masks.bands, "mask", ("visible",), masks.window,
        ("causes.window.missing", "causes.window.added", "causes.window.other"),
    ),
    # causal for causal & attention_mask[:, None, None, :]
    Row("padding", masks.masks, "mask", ("visible",), masks.padding),
    Row("mask", masks.masks, "mask", ("visible",), masks.structure),
    # z.masked_fill(~visible, -100.0) for z.masked_fill(~visible, -inf)
    Row("mask_magnitude", formulas, "mask", ("fill", "fill_by", "fill_added"), bias.fill),
    # softmax(z) for softmax(cat((z, sinks), -1))[..., :-1]
    Row(
        "sinks", formulas, "sinks", ("sinks",), formula.sinks,
        ("causes.sinks.missing", "causes.sinks.added", "causes.sinks.other"),
    ),
    # (positions.bfloat16()[:, None] * frequencies).cos() for the same in float32
    Row("rounding", rotations.like_rotations, "rotation", (), angles.of_kind("rounding")),
    Row("rounding", ways(*QKV), "", (), formula.rounded_vector),
    # z.bfloat16().softmax(-1) for z.softmax(-1)
    Row("rounding", formulas, "weights", ("logits_dtype", "weights_dtype", "own"), formula.rounded(formula.BOTH)),
    Row("rounding", formulas, "weights", ("logits_dtype", "own"), formula.rounded(formula.LOGITS)),
    Row("rounding", formulas, "weights", ("weights_dtype", "own"), formula.rounded(formula.WEIGHTS)),
    Row("dropout", formulas, "weights", ("kept", "dropout"), formula.dropout),
)  # fmt: skip


def suspect(*rows: Row) -> Callable[[Sides], Iterator[Suspicion]]:
    """Returns a function that yields the suspicions of some rows, in their order."""

    def suspected(sides: Sides) -> Iterator[Suspicion]:
        for row in rows:
            yield from suspicions(row, sides)

    return suspected


CAUSES: dict[str, Callable[[Sides], Iterator[Suspicion]]] = {
    name: suspect(*(row for row in ROWS if row.name == name)) for name in dict.fromkeys(row.name for row in ROWS)
}

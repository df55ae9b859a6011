"""Why two sides differ: one row for each way in which a part of A's program may differ from B's.

A row names the cause, where it looks and acts, the fields that become B's, the function that compares, and the
sentence. Rows are tried in order; causes early in an attention come first. A new cause is a row here, a function that
compares, and its sentences in `sqrtdk/messages/words/causes.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqrtdk.compare.causes import angles, bias, formula, masks, norms, projections, rotations
from sqrtdk.compare.program import QK, QKV
from sqrtdk.compare.suspect import CauseRow, Sides, Suspicion, formula_pairs, path_pairs, suspicions

KV = ("key", "value")
AMPLITUDE = "causes.length_factor.amplitude"
# Above most rows stands the code that they find: what B writes "for" what A writes.
CAUSE_ROWS = (
    # from the input to the product
    # qkv.view(B, L, H, 3, E) for qkv.view(B, L, 3, H, E): a fused projection read in the other layout
    CauseRow("head_order", projections.row_orders, "", (), projections.compare_head_order, "causes.head_order.other"),
    CauseRow("weights", projections.projection_pairs, "", ("weight",), projections.compare_weight),
    # x * weight for x * (1 + weight)
    CauseRow("weights", norms.norm_pairs, "norm", ("gain", "shift"), norms.compare_gain),
    # nn.Linear(D, H * E, bias=False) for a checkpoint with q_proj.bias
    CauseRow(
        "projection_bias", projections.projection_pairs, "", ("bias",), projections.compare_projection_bias,
        ("causes.projection_bias.missing", "causes.projection_bias.added", "causes.projection_bias.other"),
    ),
    # rope(q) for rope(self.q_norm(q))
    CauseRow(
        "qk_norm", path_pairs(*QK), "norm", (), norms.compare_norm_count,
        ("causes.qk_norm.missing", "causes.qk_norm.added", ""),
    ),
    # F.layer_norm(q, (E,)) for F.rms_norm(q, (E,))
    CauseRow("qk_norm", norms.norm_pairs, "norm", ("kind", "eps"), norms.compare_norm_kind, "causes.qk_norm.other"),
    # self.q_norm(rope(q)) for rope(self.q_norm(q))
    CauseRow("qk_norm_order", path_pairs(*QK), "norm", (), norms.compare_norm_order),
    # the norm before q.view(B, L, H, E), over all heads, for the norm after it, over one
    CauseRow("qk_norm_axis", norms.norm_pairs, "norm", ("over",), norms.compare_norm_axis, "causes.qk_norm_axis.other"),
    # nn.RMSNorm(E, eps=1e-5) for nn.RMSNorm(E, eps=1e-6)
    CauseRow("qk_norm_eps", norms.norm_pairs, "norm", ("eps",), norms.compare_eps, "causes.qk_norm_eps.other"),
    # q @ k.mT for rope(q) @ rope(k).mT
    CauseRow(
        "rope_missing", path_pairs(*QK), "rotation", (), rotations.compare_rotation_presence,
        ("causes.rope_missing.missing", "causes.rope_missing.added", ""),
    ),
    # rope(q) for cat((rope(q[..., :R]), q[..., R:]), -1)
    CauseRow(
        "rope_partial", rotations.like_rotation_pairs, "rotation", (), rotations.compare_channels,
        "causes.rope_partial.other",
    ),
    # pairs (x[..., ::2], x[..., 1::2]) for (x[..., : R // 2], x[..., R // 2 :])
    CauseRow(
        "rope_layout", rotations.rotation_pairs, "rotation", (), rotations.compare_layout,
        "causes.rope_layout.other",
    ),
    # x1 * cos + x2 * sin for x1 * cos - x2 * sin
    CauseRow(
        "rope_layout", rotations.rotation_pairs, "rotation", (), rotations.compare_direction,
        "causes.rope_layout.turns",
    ),
    # base = 10000.0 for base = config.rope_theta
    CauseRow(
        "rope_base", rotations.like_rotation_pairs, "rotation", (), angles.compare_angles("rope_base"),
        "causes.rope_base.other",
    ),
    # position_ids = arange(L) for arange(cached, cached + L)
    CauseRow("positions", rotations.like_rotation_pairs, "rotation", (), angles.compare_angles("positions")),
    # cos, sin for cos * m, sin * m with m = 0.1 * log(factor) + 1: YaRN
    CauseRow("length_factor", rotations.like_rotation_pairs, "rotation", (), rotations.compare_amplitude, AMPLITUDE),
    CauseRow(
        "length_factor", path_pairs(*QK), "rotation", ("scaled",), rotations.compare_amplitude_as_factor,
        AMPLITUDE,
    ),
    # q for q * log(n), with n the keys that the row sees
    CauseRow("length_factor", formula_pairs, "scale", (), formula.compare_row_factors),
    # k_cache.float() for k_cache.float() * k_scale
    CauseRow("kv_scale", path_pairs(*KV), "", ("scaled",), projections.compare_kv_factor, "causes.kv_scale.times"),
    # k.repeat(1, Hq // H, 1, 1) for k.repeat_interleave(Hq // H, 1)
    CauseRow(
        "group_order", path_pairs(*KV), "", ("heads",), projections.compare_group_order,
        "causes.group_order.other",
    ),
    # from the product to the output
    # softmax(q @ k.mT) for softmax(q @ k.mT / sqrt(E))
    CauseRow("scale", formula_pairs, "scale", ("scale", "after"), formula.compare_scale),
    # z for cap * tanh(z / cap)
    CauseRow(
        "softcap", formula_pairs, "softcap", ("softcap",), formula.compare_softcap,
        ("causes.softcap.missing", "causes.softcap.added", "causes.softcap.other"),
        digits=6,
    ),
    # scale * cap * tanh(q @ k.mT / cap) for cap * tanh(scale * q @ k.mT / cap)
    CauseRow(
        "softcap_order", formula_pairs, "softcap", ("softcap_at", "scale", "after"), formula.compare_softcap_order,
        "causes.softcap_order.other",
    ),
    # (q @ k.mT + bias) * scale for q @ k.mT * scale + bias; with a mask of -1e4 the same is done to the fill
    CauseRow("bias_scaled", formula_pairs, "bias", ("bias_by",), bias.compare_bias_factor, "causes.bias_scaled.bias"),
    CauseRow("bias_scaled", formula_pairs, "mask", ("fill_by",), bias.compare_fill_factor, "causes.bias_scaled.mask"),
    CauseRow("bias", formula_pairs, "bias", ("bias", "bias_name", "bias_by"), bias.compare_bias),
    # torch.ones(L, S).tril() for torch.ones(L, S).tril(S - L): a decoder with a cache
    CauseRow(
        "mask_alignment", masks.band_pairs, "mask", ("visible",), masks.compare_alignment,
        "causes.mask_alignment.other",
    ),
    # torch.ones(L, L).tril(1) for torch.ones(L, L).tril()
    CauseRow("mask_offset", masks.band_pairs, "mask", ("visible",), masks.compare_causal_bound),
    # i - j <= window for i - j < window
    CauseRow(
        "window", masks.band_pairs, "mask", ("visible",), masks.compare_window,
        ("causes.window.missing", "causes.window.added", "causes.window.other"),
    ),
    # causal for causal & attention_mask[:, None, None, :]
    CauseRow("padding", masks.mask_pairs, "mask", ("visible",), masks.compare_padding),
    CauseRow("mask", masks.mask_pairs, "mask", ("visible",), masks.compare_structure),
    # z.masked_fill(~visible, -100.0) for z.masked_fill(~visible, -inf)
    CauseRow("mask_magnitude", formula_pairs, "mask", ("fill", "fill_by", "fill_added"), bias.compare_fill),
    # softmax(z) for softmax(cat((z, sinks), -1))[..., :-1]
    CauseRow(
        "sinks", formula_pairs, "sinks", ("sinks",), formula.compare_sinks,
        ("causes.sinks.missing", "causes.sinks.added", "causes.sinks.other"),
    ),
    # (positions.bfloat16()[:, None] * frequencies).cos() for the same in float32
    CauseRow("rounding", rotations.like_rotation_pairs, "rotation", (), angles.compare_angles("rounding")),
    CauseRow("rounding", path_pairs(*QKV), "", (), formula.compare_vector_rounding),
    # z.bfloat16().softmax(-1) for z.softmax(-1)
    CauseRow(
        "rounding", formula_pairs, "weights", ("logits_dtype", "weights_dtype", "own"),
        formula.compare_roundings(formula.BOTH),
    ),
    CauseRow("rounding", formula_pairs, "weights", ("logits_dtype", "own"), formula.compare_roundings(formula.LOGITS)),
    CauseRow(
        "rounding", formula_pairs, "weights", ("weights_dtype", "own"),
        formula.compare_roundings(formula.WEIGHTS),
    ),
    CauseRow("dropout", formula_pairs, "weights", ("kept", "dropout"), formula.compare_dropout),
)  # fmt: skip


def suspect(*rows: CauseRow) -> Callable[[Sides], Iterator[Suspicion]]:
    """Return a function that yields the suspicions of some rows, in their order."""

    def suspected(sides: Sides) -> Iterator[Suspicion]:
        for row in rows:
            yield from suspicions(row, sides)

    return suspected


CAUSES: dict[str, Callable[[Sides], Iterator[Suspicion]]] = {
    name: suspect(*(row for row in CAUSE_ROWS if row.name == name))
    for name in dict.fromkeys(row.name for row in CAUSE_ROWS)
}

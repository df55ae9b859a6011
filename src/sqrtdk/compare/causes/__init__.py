"""Why two sides differ: one row for each way in which a part of A may differ from B's, inside and outside attention.

A row of `CAUSE_ROWS` names the cause, where in an attention it looks and acts, the fields of A's program that become
B's, the function that compares, and the sentence (`causes.toml`). Rows are tried in order; causes early in an attention
come first. A row of `MODULE_CAUSE_ROWS` names the cause, the part of two modules that it compares, the kinds of modules
that it belongs to, the function that compares, the sentence (`outputs.toml`) and the fix (`fixes.toml`). The first row
that finds a difference of a part names it. What is found is tried by `sqrtdk.compare.outside.chain`. A new cause is a
row here, a function that compares, and its sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sqrtdk.compare.causes import (
    angles,
    bias,
    classes,
    formula,
    masks,
    norms,
    parameters,
    projections,
    rotations,
    settings,
    sums,
)
from sqrtdk.compare.inside.program import QK, QKV
from sqrtdk.compare.inside.suspect import CauseRow, Sides, Suspicion, formula_pairs, path_pairs, suspicions
from sqrtdk.compare.outside.parts import ModuleCauseRow, NamedDifference, PartKind

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

_LOAD_WEIGHT = "fixes.weights.load"
_SET_VALUE = "fixes.setting.set"
_OTHER_CLASS = "outputs.module.other_type", "fixes.module_class.set"
_BIAS_ADDED = "outputs.module.adds_bias", ("fixes.layer_bias.set", "fixes.layer_bias.drop")
_ONE_SIDE_ALONE = "outputs.module.of_a_alone", "outputs.module.of_b_alone"
_OTHER_VALUE = "outputs.module.other_value"
MODULE_CAUSE_ROWS = [
    # a parameter or buffer: all that differ in a module become B's together
    # lm_head.weight = embed_tokens.weight, where A has a head of its own; or no longer, where A has that
    ModuleCauseRow(
        "tied_head", "tensor", ("linear",), parameters.compare_tied_head,
        ("outputs.module.of_none", "outputs.module.of_another"), ("fixes.tied_head.drop", "fixes.tied_head.set"),
    ),
    # {"norm1.weight": "ln_2.weight"} in the table of names that a checkpoint is loaded through
    ModuleCauseRow(
        "weights_elsewhere", "tensor", (), parameters.compare_place, "outputs.module.of_another",
        "fixes.weights_elsewhere.set",
    ),
    # nn.Linear(D, 4 * D) for nn.Linear(D, 8 * D // 3)
    ModuleCauseRow("weights_shape", "tensor", (), parameters.compare_shape, _OTHER_VALUE),
    # w / math.sqrt(D) when loading, for w
    ModuleCauseRow(
        "weights_scaled", "tensor", (), parameters.compare_factor, "outputs.module.times", "fixes.weights_scaled.set",
    ),
    # w for w + 1, which a norm that multiplies by 1 + weight adds itself
    ModuleCauseRow(
        "norm_offset", "tensor", ("norm",), parameters.compare_offset, "outputs.module.plus", "fixes.norm_offset.load",
    ),
    # the weight of GPT-2's Conv1D, (in, out), in an nn.Linear, (out, in)
    ModuleCauseRow(
        "weights_transposed", "tensor", (), parameters.compare_transposed, "outputs.module.transposed",
        "fixes.weights_transposed.set",
    ),
    # w.bfloat16().float() for w
    ModuleCauseRow(
        "weights_rounded", "tensor", (), parameters.compare_rounded, "outputs.module.rounded",
        "fixes.weights_rounded.exact", of_checkpoint="rounded",
    ),
    ModuleCauseRow(
        "weights_rounded", "tensor", (), parameters.compare_not_rounded, "outputs.module.not_rounded",
        "fixes.weights_rounded.rounded", of_checkpoint="not rounded",
    ),
    ModuleCauseRow("weights", "tensor", (), parameters.compare_few, "outputs.module.numbers", _LOAD_WEIGHT),
    # gate_up[:n] for gate_up[n:]
    ModuleCauseRow(
        "weights_elsewhere", "tensor", (), parameters.compare_held, "outputs.module.held",
        "fixes.weights_elsewhere.set",
    ),
    # an embedding in which the row of one token was replaced
    ModuleCauseRow("weights", "tensor", (), parameters.compare_few_rows, "outputs.module.rows", _LOAD_WEIGHT),
    ModuleCauseRow(
        "weights", "tensor", (), parameters.compare_numbers, "outputs.module.other_numbers", _LOAD_WEIGHT,
        of_checkpoint="other numbers",
    ),
    # nn.Linear(D, D, bias=False) for a checkpoint with down_proj.bias
    ModuleCauseRow(
        "layer_bias", "tensor", (), parameters.compare_layer_bias, _ONE_SIDE_ALONE,
        ("fixes.layer_bias.set", "fixes.layer_bias.drop"),
    ),
    ModuleCauseRow(
        "parameter_missing", "tensor", (), parameters.compare_presence, _ONE_SIDE_ALONE,
        ("fixes.parameter_missing.set", "fixes.parameter_missing.drop"),
    ),
    # a value that the module or its config holds: each alone and then all, with the tensors
    # nn.RMSNorm(D, eps=1e-5) for nn.RMSNorm(D, eps=1e-6)
    ModuleCauseRow("norm_eps", "value", (), settings.compare_norm_eps, _OTHER_VALUE, _SET_VALUE),
    # nn.GELU() for nn.GELU(approximate="tanh"); hidden_act = "gelu" for "silu"
    ModuleCauseRow("activation", "value", (), settings.compare_activation_setting, _OTHER_VALUE, _SET_VALUE),
    # config.final_logit_softcapping = None for 30.0
    ModuleCauseRow("logit_cap", "value", (), settings.compare_cap, _OTHER_VALUE, _SET_VALUE),
    # config.residual_multiplier = 1.0 for 0.22
    ModuleCauseRow("multiplier", "value", (), settings.compare_multiplier, _OTHER_VALUE, _SET_VALUE),
    ModuleCauseRow("setting", "value", (), settings.compare_setting, _OTHER_VALUE, _SET_VALUE),
    # the modules: every row is tried alone
    # x @ self.weight.mT for F.linear(x, self.weight, self.bias)
    ModuleCauseRow("layer_bias", "module", ("linear",), classes.compare_added_bias("A"), *_BIAS_ADDED),
    ModuleCauseRow("layer_bias", "module", ("linear",), classes.compare_added_bias("B"), *_BIAS_ADDED),
    # x * self.weight for x * (1 + self.weight): Gemma's norms
    ModuleCauseRow(
        "norm_offset", "module", ("norm",), classes.compare_norm_offset("A"), "outputs.module.offset",
        "fixes.norm_offset.set",
    ),
    ModuleCauseRow(
        "norm_offset", "module", ("norm",), classes.compare_norm_offset("B"), "outputs.module.offset",
        "fixes.norm_offset.drop",
    ),
    # nn.ReLU() for nn.GELU()
    ModuleCauseRow("activation", "module", ("activation",), classes.compare_class, *_OTHER_CLASS),
    # nn.LayerNorm(D) for nn.RMSNorm(D)
    ModuleCauseRow("norm_kind", "module", ("norm",), classes.compare_class, *_OTHER_CLASS),
    # LowRank(nn.Linear(D, D)) for nn.Linear(D, D)
    ModuleCauseRow("module_class", "module", ("linear", "embedding", "other"), classes.compare_class, *_OTHER_CLASS),
    # the numbers where the outputs of a module begin to differ: A goes on with B's output
    ModuleCauseRow("output_shape", "shape", (), sums.compare_output_shape, "outputs.shapes"),
    # self.o_proj(heads) for self.o_proj(heads * torch.sigmoid(self.g_proj(x)))
    ModuleCauseRow(
        "gate_missing", "gate", (), sums.compare_gate_presence, ("outputs.gate.not_run", "outputs.gate.added"),
        ("fixes.gate_missing.set", "fixes.gate_missing.drop"),
    ),
    # silu(self.up(x)) * self.gate(x) for silu(self.gate(x)) * self.up(x)
    ModuleCauseRow(
        "gate_place", "gate", (), sums.compare_gate_place, "outputs.gate.moved", "fixes.gate_place.set",
    ),
    ModuleCauseRow(
        "gate_activation", "gate", (), sums.compare_gate_activation, "outputs.gate.activation",
        "fixes.gate_activation.set",
    ),
    # self.embed(ids) for self.embed(ids) * math.sqrt(D)
    ModuleCauseRow(
        "output_scale", "numbers", (), sums.compare_output_factor, "outputs.relation.times", "fixes.output_scale.set",
    ),
    # self.mlp(self.norm(x)) for x + self.mlp(self.norm(x))
    ModuleCauseRow(
        "residual", "numbers", (), sums.compare_residual, "outputs.relation.adds",
        ("fixes.residual.set", "fixes.residual.drop"),
    ),
    # x + y for x + 0.22 * y: the rest of x is what one side adds more of
    ModuleCauseRow(
        "residual_scale", "numbers", (), sums.compare_residual_scale, "outputs.relation.adds_more",
        ("fixes.residual_scale.set", "fixes.residual_scale.drop"),
    ),
    # y.transpose(0, 1).reshape_as(y) for y
    ModuleCauseRow("output_order", "numbers", (), sums.compare_number_order, "outputs.relation.order"),
]  # fmt: skip


def named_differences(kind: PartKind, part: Any, module: str = "") -> Iterator[NamedDifference]:
    """Yield what the rows for one kind of part find in it, most specific row first.

    Args:
        kind: kind of the part: "tensor", "value", "module", "shape", "gate" or "numbers". Of a tensor or a value, only
            the first difference is meant as a cause.
        part: the part of both sides, of the class that belongs to the kind: `TensorPair` for "tensor", for example.
        module: kind of the modules that hold the part, as `ModulePair.kind`; "" for parts that are read off numbers.
    """
    for row in MODULE_CAUSE_ROWS:
        if row.part == kind and (not row.modules or module in row.modules):
            found = row.compare(part)
            if found is not None:
                yield NamedDifference(row, found)


def suspect(*rows: CauseRow) -> Callable[[Sides], Iterator[Suspicion]]:
    """Return a function that takes the programs of both sides and yields the suspicions of these rows, in order."""

    def suspected(sides: Sides) -> Iterator[Suspicion]:
        for row in rows:
            yield from suspicions(row, sides)

    return suspected


CAUSES: dict[str, Callable[[Sides], Iterator[Suspicion]]] = {
    name: suspect(*(row for row in CAUSE_ROWS if row.name == name))
    for name in dict.fromkeys(row.name for row in CAUSE_ROWS)
}

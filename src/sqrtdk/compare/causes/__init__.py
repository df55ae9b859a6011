"""Why two sides differ: one row for each way in which a part of A's program may not be B's.

A row names the cause, says where it looks and acts, which fields are made B's, what compares them, and the sentence.
The rows are in the order in which they are tried: what comes first in an attention comes first. A new cause is a row
here, a function that compares, and its sentences in `sqrtdk/report/words/causes.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqrtdk.compare.causes import angles, bias, formula, masks, norms, projections, rotations
from sqrtdk.compare.suspect import QK, QKV, Row, Sides, Suspicion, formulas, suspicions, ways

KV = ("key", "value")
AMPLITUDE = "has {b} instead of {a} as amplitude of the rotation of {parts}"
ROWS = (
    # from the input to the product
    Row(
        "head_order", projections.reordered, "", (), projections.head_order,
        "has the rows of {parts} in another order: {b}",
    ),
    Row(
        "weights", projections.projections, "", ("weight",), projections.weight,
        "has another weight for {parts}{name}: {how}",
    ),
    Row(
        "weights", norms.norm_pairs, "norm", ("gain", "shift"), norms.gain,
        "has another gain in the norm of {parts}: {how}",
    ),
    Row(
        "projection_bias", projections.projections, "", ("bias",), projections.bias,
        (
            "leaves out the bias of the projection of {parts}",
            "adds a bias to the projection of {parts}, which A does not",
            "adds another bias to the projection of {parts}",
        ),
    ),
    Row(
        "qk_norm", ways(*QK), "norm", (), norms.missing,
        ("leaves out the norm of {parts} ({a})", "normalises {parts} ({b}), which A does not", ""),
    ),
    Row("qk_norm", norms.norm_pairs, "norm", ("kind", "eps"), norms.kind, "normalises {parts} by {b} instead of {a}"),
    Row("qk_norm_order", ways(*QK), "norm", (), norms.order, "normalises {parts} {b} instead of {before} it"),
    Row("qk_norm_axis", norms.norm_pairs, "norm", ("over",), norms.axis, "normalises {parts} over {b} instead of {a}"),
    Row("qk_norm_eps", norms.norm_pairs, "norm", ("eps",), norms.eps, "adds {b} instead of {a} in the norm of {parts}"),
    Row(
        "rope_missing", ways(*QK), "rotation", (), rotations.missing,
        ("leaves out the rotation of {parts}", "rotates {parts}, which A does not", ""),
    ),
    Row(
        "rope_partial", rotations.like_rotations, "rotation", (), rotations.channels,
        "turns {b} of {parts}{of_b} instead of {a}{of_a}",
    ),
    Row(
        "rope_layout", rotations.rotations, "rotation", (), rotations.layout,
        "pairs the channels of {parts} {b} instead of {a}",
    ),
    Row("rope_layout", rotations.rotations, "rotation", (), rotations.direction, "turns {parts} {b}"),
    Row(
        "rope_base", rotations.like_rotations, "rotation", (), angles.of_kind("rope_base"),
        "turns {parts} with {b} instead of {a}",
    ),
    Row("positions", rotations.like_rotations, "rotation", (), angles.of_kind("positions")),
    Row("length_factor", rotations.like_rotations, "rotation", (), rotations.amplitude, AMPLITUDE),
    Row("length_factor", ways(*QK), "rotation", ("scaled",), rotations.amplitude_as_factor, AMPLITUDE),
    Row("length_factor", formulas, "scale", (), formula.of_rows),
    Row(
        "kv_scale", ways(*KV), "", ("scaled",), projections.kv_factor,
        "has {parts} times {by}: the scale of a quantised cache applied twice, or not at all",
    ),
    Row(
        "group_order", ways(*KV), "", ("heads",), projections.group_order,
        "gives the query heads the heads {b} of {parts} instead of {a}",
    ),
    # from the product to the output
    Row("scale", formulas, "scale", ("scale", "after"), formula.scale),
    Row(
        "softcap", formulas, "softcap", ("softcap",), formula.softcap,
        (
            "leaves out the softcap ({a})",
            "has a softcap ({b}), which A has not",
            "has a softcap of {b} in place of {a}",
        ),
        digits=6,
    ),
    Row(
        "softcap_order", formulas, "softcap", ("softcap_at", "scale", "after"), formula.softcap_order,
        "applies the softcap {b}, not {a}",
    ),
    Row(
        "bias_scaled", formulas, "bias", ("bias_by",), bias.bias_factor,
        "multiplies the bias by {by} as well, as if it were a part of the product",
    ),
    Row(
        "bias_scaled", formulas, "mask", ("fill_by",), bias.fill_factor,
        "multiplies the mask by {by} as well, as if it were a part of the product",
    ),
    Row("bias", formulas, "bias", ("bias", "bias_name", "bias_by"), bias.bias),
    Row(
        "mask_alignment", masks.bands, "mask", ("visible",), masks.alignment,
        "aligns the causal mask to the {b} ({rows}, {keys} keys)",
    ),
    Row("mask_offset", masks.bands, "mask", ("visible",), masks.causal_bound),
    Row(
        "window", masks.bands, "mask", ("visible",), masks.window,
        (
            "leaves out the window ({a} keys)",
            "has a window of {b} keys, which A has not",
            "has a window of {b} keys in place of {a}",
        ),
    ),
    Row("padding", masks.masks, "mask", ("visible",), masks.padding),
    Row("mask", masks.masks, "mask", ("visible",), masks.structure),
    Row("mask_magnitude", formulas, "mask", ("fill", "fill_by", "fill_added"), bias.fill),
    Row(
        "sinks", formulas, "sinks", ("sinks",), formula.sinks,
        ("leaves out the sinks ({a})", "has sinks ({b}), which A has not", "has other sinks ({b} in place of {a})"),
    ),
    Row("rounding", rotations.like_rotations, "rotation", (), angles.of_kind("rounding")),
    Row("rounding", ways(*QKV), "", (), formula.rounded_vector),
    Row(
        "rounding", formulas, "weights", ("logits_dtype", "weights_dtype", "own"),
        formula.rounded("the logits and the weights"),
    ),
    Row("rounding", formulas, "weights", ("logits_dtype", "own"), formula.rounded("the logits")),
    Row("rounding", formulas, "weights", ("weights_dtype", "own"), formula.rounded("the weights")),
    Row("dropout", formulas, "weights", ("kept", "dropout"), formula.dropout),
)  # fmt: skip


def suspect(*rows: Row) -> Callable[[Sides], Iterator[Suspicion]]:
    """What some rows suspect, in their order."""

    def suspected(sides: Sides) -> Iterator[Suspicion]:
        for row in rows:
            yield from suspicions(row, sides)

    return suspected


CAUSES: dict[str, Callable[[Sides], Iterator[Suspicion]]] = {
    name: suspect(*(row for row in ROWS if row.name == name)) for name in dict.fromkeys(row.name for row in ROWS)
}

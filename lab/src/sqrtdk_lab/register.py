"""The register of claims: what popular explanations of sqrt(d_k) say, each with its experiment.

S0 to S4 are five widely read explanations of the scale, named in `sqrtdk_lab.claim`; their statements are given here in
our own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message, joined
from sqrtdk_lab.claim import Claim
from sqrtdk_lab.claims import (
    additive_bounded,
    amp_scaling,
    any_dk,
    batchnorm_analogy,
    best_exponent,
    bilinear_unscaled,
    cosine_analogy,
    cosine_unscaled,
    cross_modal,
    deep_models,
    derivative_floor,
    dk_trained,
    dot_faster,
    dynamic,
    entropy_table,
    exp_examples,
    few_positions,
    fp16_overflow,
    free,
    grad_norm,
    heads_claims,
    heads_differ,
    init_equivalent,
    init_scaling,
    init_variance,
    jacobian_vanishes,
    large_dk,
    layernorm_role,
    mean_range,
    minmax_by_dim,
    normal,
    onehot_64,
    optimal_interval,
    paper_footnote,
    paper_table3,
    params_multi,
    params_single,
    params_table,
    per_head_dk,
    printed_maxima,
    range_64,
    range_512,
    relative_scale,
    robust,
    saturation_by_dim,
    scale_dk,
    scale_two_sqrt,
    seed_code_shapes,
    seed_module,
    seed_prints,
    small_dk,
    softmax_example,
    softmax_overflow,
    std_512,
    temperature,
    train_instability,
    v_scaling,
    var_general,
    var_linear,
    var_sigma,
)

SEE_ALL = "errors.hint.all_claims"  # id of a sentence

CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        var_linear.CLAIM,
        var_general.CLAIM,
        var_sigma.CLAIM,
        std_512.CLAIM,
        range_512.CLAIM,
        range_64.CLAIM,
        normal.CLAIM,
        init_scaling.CLAIM,
        init_equivalent.CLAIM,
        cosine_analogy.CLAIM,
        mean_range.CLAIM,
        dynamic.CLAIM,
        seed_code_shapes.CLAIM,
        onehot_64.CLAIM,
        softmax_example.CLAIM,
        exp_examples.CLAIM,
        derivative_floor.CLAIM,
        saturation_by_dim.CLAIM,
        printed_maxima.CLAIM,
        minmax_by_dim.CLAIM,
        entropy_table.CLAIM,
        few_positions.CLAIM,
        seed_prints.CLAIM,
        v_scaling.CLAIM,
        temperature.CLAIM,
        optimal_interval.CLAIM,
        jacobian_vanishes.CLAIM,
        grad_norm.CLAIM,
        train_instability.CLAIM,
        small_dk.CLAIM,
        init_variance.CLAIM,
        layernorm_role.CLAIM,
        batchnorm_analogy.CLAIM,
        deep_models.CLAIM,
        any_dk.CLAIM,
        robust.CLAIM,
        scale_dk.CLAIM,
        dk_trained.CLAIM,
        scale_two_sqrt.CLAIM,
        best_exponent.CLAIM,
        additive_bounded.CLAIM,
        cosine_unscaled.CLAIM,
        bilinear_unscaled.CLAIM,
        relative_scale.CLAIM,
        per_head_dk.CLAIM,
        cross_modal.CLAIM,
        fp16_overflow.CLAIM,
        softmax_overflow.CLAIM,
        amp_scaling.CLAIM,
        free.CLAIM,
        dot_faster.CLAIM,
        params_single.CLAIM,
        params_multi.CLAIM,
        params_table.CLAIM,
        large_dk.CLAIM,
        seed_module.CLAIM,
        heads_differ.CLAIM,
        heads_claims.CLAIM,
        paper_footnote.CLAIM,
        paper_table3.CLAIM,
    )
}


def find_claims(ids: Sequence[str]) -> list[Claim]:
    """Return claims by their ids, in the given order; "all" stands for the whole register.

    Args:
        ids: of claims; a repeated id runs once.

    Raises:
        InvalidValueError: There is no such claim; similar names are suggested.

    Example:
        >>> [claim.id for claim in find_claims(["var-linear"])]
        ['var-linear']
    """
    wanted: dict[str, Claim] = {}
    for name in ids:
        if name == "all":
            wanted |= CLAIMS
        elif name in CLAIMS:
            wanted[name] = CLAIMS[name]
        else:
            near = get_close_matches(name, CLAIMS, n=3, cutoff=0.6)
            raise InvalidValueError(
                Message("errors.lab.no_claim", name=repr(name), claims=len(CLAIMS)),
                hint=Message("errors.hint.near_claims", names=joined(near, "or")) if near else Message(SEE_ALL),
            )
    return list(wanted.values())

"""Planted errors of the trace: each makes a reading wrong, or lets something pass; patterns: `tests.planting`."""

from __future__ import annotations

from tests.planting.changes import Change, Planted, plant

MOVED = "tracing/probe/replays.py:_rearrangement"
BETWEEN, RAN = "tracing/probe/replays.py:subgraph_between", "tracing/probe/replays.py:_ran"
IS_PRODUCT = "tracing/lower/contract.py:is_product"
MULTIPLIED, SUMMED = "tracing/readback/operations.py:_multiplied", "tracing/readback/operations.py:_summed"
CLAMPED, SELECTED = "tracing/readback/operations.py:_clamped", "tracing/readback/operations.py:_selected"
BESIDE, SHIFTED = "tracing/readback/operations.py:beside_product", "tracing/readback/operations.py:_is_shifted"
BY_EFFECT = "tracing/readback/chain.py:_by_effect"
CAPS, SIDES = "tracing/readback/chain.py:_fold_caps", "tracing/readback/chain.py:_side_by_side"
FACTOR, TENSOR = "tracing/readback/factors.py:read_factor", "tracing/readback/factors.py:tensor_factor"
ONE_A_HEAD, UNIFORM = "tracing/readback/factors.py:_one_a_head", "tracing/readback/factors.py:_uniform"
SCALE, REGRESS = "tracing/calls/scale.py:tell_scale", "tracing/calls/scale.py:_regress"
EACH_HEAD, AGREE = "tracing/calls/scale.py:each_head", "tracing/calls/scale.py:_agree"
NO_SLOPE = "tracing/calls/scale.py:_why_no_slope"
LOOK = "tracing/calls/visible_keys.py:_combined_masks"

MUTANTS: dict[str, Planted] = {
    # what a part of the graph does to other values
    "an effect is not tried on other numbers": plant(MOVED, Change("(1.0, 64.0, 2.0**20)", "()")),
    "an effect is tried at one size": plant(MOVED, Change("(1.0, 64.0, 2.0**20)", "(1.0,)")),
    "an effect's places are off by one": plant(
        MOVED, Change("A.long().flatten() - 1", "(A.long().flatten() - 2).clamp_min(0)")
    ),
    "an effect on logits may move them": plant(BY_EFFECT, Change("if A.in_place: return A", "return A")),
    "random numbers are run again": plant(BETWEEN, Change("A.op in _UNREPEATABLE", "False")),
    "a write in place reaches the graph's own tensors": plant(RAN, Change("A is not None and A.is_mutable", "False")),
    # projection, product, values
    "a projection by weights is a product": plant(IS_PRODUCT, Change("A.act and B.act", "A.act or B.act")),
    "a product of products is a product": plant(
        IS_PRODUCT, Change("if A.products or B.products or C is not None or D is not None: return False", "pass")
    ),
    "a rotation by matrices is a product": plant(
        IS_PRODUCT, Change("if holds_angles(A) or holds_angles(B): return False", "pass")
    ),
    # factors on the logits
    "a division multiplies": plant(FACTOR, Change('A.op == "div"', "False")),
    "a tensor's division multiplies": plant(
        TENSOR, Change("Factor(1 / A if B and A else A, C, D, learned=E)", "Factor(A, C, D, learned=E)")
    ),
    "a head's division multiplies": plant(ONE_A_HEAD, Change("1 / float(A) if B else float(A)", "float(A)")),
    "factors of heads in another order": plant(
        ONE_A_HEAD,
        Change("[1 / float(A) if B else float(A) for A in C]", "[1 / float(A) if B else float(A) for A in C][::-1]"),
    ),
    "a tensor of unlike numbers is one number": plant(TENSOR, Change("not bool((A == B).all())", "False")),
    "zeros and ones are a factor": plant(
        MULTIPLIED, Change('A is None and B.op == "mul" and C is not None and D', "False")
    ),
    "alpha of an addition is left out": plant(
        SUMMED, Change('{"add": (1.0, A), "sub": B, "rsub": C}', '{"add": (1.0, 1.0), "sub": B, "rsub": C}')
    ),
    "a subtraction adds": plant(
        SUMMED, Change('{"add": A, "sub": (1.0, -B), "rsub": C}', '{"add": A, "sub": (1.0, B), "rsub": C}')
    ),
    "alpha of baddbmm is left out": plant(BESIDE, Change("*_number(A, B)", "*_number(1.0, B)")),
    "beta of baddbmm is left out": plant(BESIDE, Change("A.addends(0, B)", "A.addends(0, 1.0)")),
    "positions by shifting are content": plant(SHIFTED, Change("if A is None: return False", "return False")),
    # masks, clamps, caps
    "a mask hides where it keeps": plant(
        SELECTED, Change("A.overwritten(0, B, keep=C)", "A.overwritten(0, B, keep=not C)", 1)
    ),
    "no clamp bites": plant(CLAMPED, Change("A if any(B) else ()", "()")),
    "a cap has no slope": plant(CAPS, Change("Scale(Factor(A, B, C), at=D)", "Scale(Factor(1.0, B, C), at=D)")),
    "a cap and its division need not cancel": plant(CAPS, Change("abs(A * B - 1) < 1e-3", "True")),
    "unlike scales side by side are one": plant(SIDES, Change("A is None or any(B for C in D)", "False")),
    "all masks are those of a flag": plant(LOOK, Change("all(A.causal for A in B)", "True")),
    "masks are joined by or": plant(LOOK, Change("torch.Tensor.__and__", "torch.Tensor.__or__")),
    # the two readings of the scale
    "the readings need not agree": plant(AGREE, Change("abs(A - B) <= AGREEMENT * abs(B)", "True")),
    "a slope of a curve tells the scale": plant(SCALE, Change("A.r_squared >= LEAST_R2", "True", at=1)),
    "a slope tells the scale behind the unknown": plant(
        SCALE, Change("A is None and B is not None and not C", "A is None and B is not None")
    ),
    "r for the wrong width": plant(SCALE, Change("A * math.sqrt(B)", "A * B")),
    "factors of heads are added": plant(
        EACH_HEAD, Change("math.prod(A[B % len(A)] for A in C)", "sum(A[B % len(A)] for A in C)")
    ),
    "hidden logits are regressed on": plant(
        REGRESS, Change("A & torch.isfinite(B) & torch.isfinite(C)", "torch.isfinite(B) & torch.isfinite(C)")
    ),
    "a slope of x on y": plant(REGRESS, Change("A / B", "B / A", 0)),
    "changed weights do not matter to the slope": plant(
        NO_SLOPE, Change("if A.weight_steps.changes: return B", "pass")
    ),
}

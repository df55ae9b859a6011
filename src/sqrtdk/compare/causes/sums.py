"""What two modules compute otherwise though all that they hold agrees: a residual, a factor, an order, a gate, a shape.

It is read off the numbers where their outputs begin to differ. Nothing is put into A, which goes on with B's output.
"""

from __future__ import annotations

import torch

from sqrtdk.compare.numbers import same, single_ratio
from sqrtdk.compare.outside.parts import GatePair, ModuleDifference, NumberPair, ShapePair
from sqrtdk.tracing.probe.gates import activation_text

_NUMBER_TOLERANCE = 1e-6  # relative, for numbers computed in float64


def compare_output_shape(both: ShapePair) -> ModuleDifference | None:
    """Return the difference of the shapes of both outputs, as text "(1, 4)"; None if they are equal."""
    one, other = f"{tuple(both.a)}", f"{tuple(both.b)}"
    return None if both.a == both.b else ModuleDifference(one, other, {"one": one, "other": other})


# -- gates -------------------------------------------------------------------------------------------------------------


def compare_gate_presence(both: GatePair) -> ModuleDifference | None:
    """Return the difference if only one side applies a gate; None otherwise.

    A gate is `sigmoid(g_proj(x))` in `o_proj(heads * sigmoid(g_proj(x)))`. `a` and `b` are the gate's module, or None.
    """
    if bool(both.a.name) == bool(both.b.name):
        return None
    gate = {"gate": f"`{both.a.name or both.b.name}`"}
    if both.b.name:
        return ModuleDifference(None, both.b.name, gate)
    text = "outputs.gate.not_applied" if both.a.name in both.ran else ""
    return ModuleDifference(both.a.name, None, gate, text=text)


def compare_gate_place(both: GatePair) -> ModuleDifference | None:
    """Return the difference if the gates are outputs of other modules, with equal activations; None otherwise."""
    if both.a.name == both.b.name or both.a.activation != both.b.activation:
        return None
    return ModuleDifference(both.a.name, both.b.name, {"gate": f"`{both.b.name}`", "other": f"`{both.a.name}`"})


def compare_gate_activation(both: GatePair) -> ModuleDifference | None:
    """Return the difference if the gates have other activations, named in `a` and `b`; None otherwise."""
    if both.a.activation == both.b.activation:
        return None
    old, new = (activation_text(gate.activation) for gate in (both.a, both.b))
    return ModuleDifference(old, new, {"gate": f"`{both.b.name}`", "new": new, "old": old})


# -- numbers -----------------------------------------------------------------------------------------------------------


def compare_output_factor(both: NumberPair) -> ModuleDifference | None:
    """Return the difference if B's numbers are A's times one number, which is `b` (`a` is 1.0); else None."""
    factor = single_ratio(both.a, both.b) if _comparable(both) else None
    return None if factor is None else ModuleDifference(1.0, factor, {"factor": f"{factor:.4g}"})


def compare_residual(both: NumberPair) -> ModuleDifference | None:
    """Return the difference if one side adds an earlier tensor and the other does not; else None.

    An example is `x + mlp(norm(x))` for `mlp(norm(x))`. The side that adds it has 1.0, the other None.
    """
    what, factor = _added(both)
    if what is None or abs(abs(factor) - 1) > _NUMBER_TOLERANCE:
        return None
    one, other = ("A", "B") if factor > 0 else ("B", "A")
    words = {"one": one, "what": what, "other": other}
    return ModuleDifference(1.0 if factor > 0 else None, None if factor > 0 else 1.0, words)


def compare_residual_scale(both: NumberPair) -> ModuleDifference | None:
    """Return the difference if one side adds a multiple of an earlier tensor to the other's sum; else None.

    An example is `0.5 * x + mlp(norm(x))` for `x + mlp(norm(x))`. The side that adds more has the factor, the other
    None.
    """
    what, factor = _added(both)
    if what is None:
        return None
    one, other = ("A", "B") if factor > 0 else ("B", "A")
    words = {"factor": f"{abs(factor):.4g}", "one": one, "what": what, "other": other}
    return ModuleDifference(factor if factor > 0 else None, None if factor > 0 else -factor, words)


def compare_number_order(both: NumberPair) -> ModuleDifference | None:
    """Return a difference if B has A's numbers in another order, else None; `a` and `b` are None.

    An example is `y.transpose(0, 1).reshape_as(y)` for y.
    """
    if not _comparable(both):
        return None
    one, other = (x.flatten().sort().values for x in (both.a, both.b))
    return ModuleDifference(None, None) if same(one, other, _NUMBER_TOLERANCE) else None


def _comparable(both: NumberPair) -> bool:
    return both.a.shape == both.b.shape and bool(torch.isfinite(both.a).all() and torch.isfinite(both.b).all())


def _added(both: NumberPair) -> tuple[str | None, float]:
    """Return which of the earlier tensors A adds, and its factor; a negative factor if B adds it."""
    if _comparable(both):
        for what, tensor in both.before:
            factor = single_ratio(tensor, both.a - both.b) if tensor.shape == both.a.shape else None
            if factor is not None:
                return what, factor
    return None, 0.0

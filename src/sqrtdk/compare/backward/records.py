"""Results of a comparison of gradients, and the place where a difference enters: frozen records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FirstModule:
    """The first module whose input agrees and whose output does not; of a backward pass,
    the first whose incoming gradient agrees and whose outgoing one does not; the path of a whole model is "".

    Attributes:
        a: its path in A.
        b: its path in B.
        place: file and lines of B's code with the difference: "model.py:42", "model.py:40-41"; None if no code shows
            it, as for a weight.
    """

    a: str
    b: str
    place: str | None = None


@dataclass(frozen=True, slots=True)
class GradientDiff:
    """One gradient that both backward passes give.

    Attributes:
        name: "q", "k" or "v" of an attention, or "parameter".
        a: module path of the attention in A, or name of the parameter.
        b: the same in B.
        same: whether it agrees within rounding; None if that could not be judged.
        difference: root mean square of the difference, as a share of that of A's gradient; None if unknown.
        allowed: what the rounding of both sides allows, as the same share; None if no side runs in float64.
    """

    name: str
    a: str
    b: str
    same: bool | None
    difference: float | None
    allowed: float | None


@dataclass(frozen=True, slots=True)
class BackwardFault:
    """An attention whose backward pass is not that of its formula, as the law `gradient` says.

    Attributes:
        side: "a" or "b".
        site: module path of the attention.
        text: what is wrong: "the gradient of k is 4 times the formula's: the scale is missing".
        by: the custom function that computes it, with its line: "Attend.backward (port.py:14)"; None if autograd does.
    """

    side: str
    site: str
    text: str
    by: str | None = None


@dataclass(frozen=True, slots=True)
class BackwardDiff:
    """The gradients of both sides for the same gradient of their output.

    Attributes:
        gradients: those of q, k and v in A's order, then those of parameters.
        faults: attentions with a wrong backward pass, of either side.
        first_module: the first module, in the order of the backward pass, whose incoming gradient agrees and whose
            outgoing one does not; None if no gradient differs, if the forward passes differ, or if unknown.
        only_a: parameters that only A's backward pass reaches, by A's names.
        only_b: parameters that only B's reaches, by B's names.
        reason: why nothing was compared; None if it was.
        output: the output that the gradient is given to.
    """

    gradients: tuple[GradientDiff, ...] = ()
    faults: tuple[BackwardFault, ...] = ()
    first_module: FirstModule | None = None
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    reason: str | None = None
    output: str = ""

    @property
    def same(self) -> bool | None:
        """Whether all gradients agree within rounding; None if some could not be judged and no difference was found."""
        judged = [one.same for one in self.gradients]
        if self.only_a or self.only_b or self.faults or False in judged:
            return False
        return None if self.reason is not None or None in judged or not judged else True

"""What a sampled step yields: frozen records, one `CallSample` for every attention of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqrtdk._sites import ROOT

AS_IS = "as is"  # the step ran what all steps run
EAGER = "eager"  # what is compiled ran its Python code
NOT_MEASURED = "not measured: "
UNMEASURED = "unmeasured"  # the alarm that says what was not measured, and why


def not_measured(reason: str) -> str:
    """How a step ran that could not be measured."""
    return NOT_MEASURED + reason


@dataclass(frozen=True, slots=True)
class CallTraits:
    """What is known of an attention's scale beside its formula, and does not differ from step to step.

    Attributes:
        logits_dtype: as in `CallSample`, and the next three.
        stored: as above.
        factors: as above.
        fixed_scale: as above.
        norm_size: as `audit.norms` has it.
        dtype: of q at the product.
    """

    logits_dtype: str = ""
    stored: bool = False
    factors: tuple[str, ...] = ()
    fixed_scale: bool = True
    norm_size: int = 0
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class CallSample:
    """One attention at one step.

    Attributes:
        site: module path.
        index: 0-based count of the attentions at this site.
        heads: of q.
        columns: by column of the records, a number a head; NaN where nothing was counted.
        scale_ratio: effective scale times sqrt(head_dim); None if it could not be read.
        formula: that reached the softmax.
        reason: why there are no statistics; None if there are.
        logits_dtype: in which the logits were stored, "float16"; the accumulator's for a fused kernel.
        stored: the logits were stored, as those of a fused kernel are not.
        factors: of the scale, where each one acts and what it is, without its value.
        fixed_scale: none of them is learned, or computed from the data or for each row.
        norm_sigma: standard deviation that the scale gives to logits of normalised q and k; 0 where nothing sets it.
        dtype: of q at the product, "float16".
    """

    site: str
    index: int
    heads: int
    columns: Mapping[str, Sequence[float]]
    scale_ratio: float | None
    formula: str
    reason: str | None = None
    logits_dtype: str = ""
    stored: bool = False
    factors: tuple[str, ...] = ()
    fixed_scale: bool = True
    norm_sigma: float = 0.0
    dtype: str = ""

    @property
    def name(self) -> str:
        """The attention, for a reader."""
        return (self.site or ROOT) + (f" (call {self.index + 1})" if self.index else "")

    @property
    def place(self) -> tuple[str, int]:
        """Site and index."""
        return self.site, self.index


# What is known of where an output that is not finite begins, `FirstNonfinite.cause`.
WEIGHT = "weight"  # a parameter or a buffer of the module is not finite
AROUND = "weight around"  # one of a module around it is not finite, as `experts.up` before `experts.act`
INPUTS = "inputs"  # what goes into the model is not finite
BETWEEN = "between"  # what goes into the module is not finite, and no module returned it
WITHIN = "within"  # modules within it ran, and what they returned is finite
FROM_MINUS = "minus infinity"  # what goes into the module holds minus infinity
FROM_FINITE = "finite"  # what goes into the module is finite
UNKNOWN = "unknown"  # nothing that goes into the module could be looked at, as it is called with keywords
RULED_OUT = "ruled out"  # no output is NaN or plus infinity, and the model returns minus infinity


@dataclass(frozen=True, slots=True)
class FirstNonfinite:
    """The first output that is not finite.

    Attributes:
        site: path of the module that returned it.
        kind: class of the module.
        tensor: name within what the module returned, "loss"; "" where that is one tensor.
        cause: one of the constants above.
        detail: "parameter bias" or "buffer running_var" for `WEIGHT`, with the path for `AROUND`; for `BETWEEN` and
            `WITHIN` the module that ended before, "" for none.
        returned: the model returned numbers that are not finite, too.
        before: site and index of the attention that ran next; None: none did.
        order: number of the pass, and of the module in the order of ending.
        rank: that saw it, where several ranks watch together.
    """

    site: str
    kind: str
    tensor: str
    cause: str
    detail: str
    returned: bool
    before: tuple[str, int] | None
    order: tuple[int, int]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class StepSample:
    """One sampled step.

    Attributes:
        step: from 1 on.
        calls: one for every attention, in the order of running.
        how: `AS_IS`, `EAGER`, or `NOT_MEASURED` with the reason.
        not_measured: what could not be measured besides, and why.
        loss: that `step()` was told; None: none.
        scaled: a GradScaler multiplies the loss, and skips a step whose gradients are not finite.
        first: output of a module that is not finite; None: all are, or they were not looked at.
        modules: whose outputs were looked at.
    """

    step: int
    calls: tuple[CallSample, ...]
    how: str = AS_IS
    not_measured: tuple[str, ...] = ()
    loss: float | None = None
    scaled: bool = False
    first: FirstNonfinite | None = None
    modules: int = 0

    @property
    def measured(self) -> tuple[CallSample, ...]:
        """The attentions that have statistics."""
        return tuple(call for call in self.calls if call.reason is None)

    @property
    def count(self) -> int:
        """How many numbers of heads it holds."""
        return sum(len(values) for call in self.calls for values in call.columns.values())

    @property
    def unmeasured(self) -> int:
        """How many attentions have none, and what could not be measured besides; a step of which nothing was is 1.

        Example:
            >>> StepSample(1, (), not_measured("no attention ran")).unmeasured, StepSample(1, ()).unmeasured
            (1, 0)
        """
        missed = len(self.calls) - len(self.measured) + len(self.not_measured)
        return max(missed, int(self.how.startswith(NOT_MEASURED)))


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that a run is warned of.

    Attributes:
        name: of the alarm, "max_logit".
        severity: "note", "warn", "fail" or "critical".
        step: at which it was seen.
        site: None for the whole run.
        index: of the attention at the site.
        head: None if the alarm is not about one head.
        value: what was measured.
        bar: what it was held against.
        source: where the bar comes from.
        text: one sentence.
    """

    name: str
    severity: str
    step: int
    text: str
    source: str
    site: str | None = None
    index: int | None = None
    head: int | None = None
    value: float | None = None
    bar: float | None = None

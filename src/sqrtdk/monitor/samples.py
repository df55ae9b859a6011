"""Frozen records of a sampled step: one `CallSample` for every attention of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqrtdk._sites import ROOT_NAME
from sqrtdk.messages import Message

AS_IS = "as is"  # the step ran exactly as the other steps
EAGER = "eager"  # compiled code ran as plain Python
STEP_UNMEASURED = "unmeasured"  # name of the alarm on values that were not measured
_NOT_MEASURED_MESSAGE = "alarms.how.not_measured"
_WITH_REASON = "alarms.place.with_reason"


def not_measured(reason: str) -> str:
    """Return the text for how a step ran that could not be measured.

    Example:
        >>> not_measured("the model was compiled")
        'not measured: the model was compiled'
    """
    return Message("alarms.how.not_measured", reason=reason)


def reason_unmeasured(how: str) -> str | None:
    """Return why a step could not be measured; None if it was measured.

    Example:
        >>> reason_unmeasured(not_measured("no attention ran")), reason_unmeasured(AS_IS)
        ('no attention ran', None)
    """
    return _value(how, "reason") if isinstance(how, Message) and how.id == _NOT_MEASURED_MESSAGE else None


def with_place(place: str, reason: str) -> str:
    """Return a reason, preceded by the site, call or rank that it is about.

    Example:
        >>> with_place("h.0", "no tensors")
        'h.0: no tensors'
    """
    return Message("alarms.place.with_reason", place=place, reason=reason)


def place_and_reason(text: str) -> tuple[str, str]:
    """Split what `with_place` returned; the place is "" if the text is about the whole step.

    Example:
        >>> place_and_reason(with_place("h.0", "it is fused")), place_and_reason("h.0: it is fused")
        (('h.0', 'it is fused'), ('h.0', 'it is fused'))
    """
    if isinstance(text, Message):
        return (_value(text, "place"), _value(text, "reason")) if text.id == _WITH_REASON else ("", text)
    place, colon, reason = text.partition(": ")  # as older versions recorded it
    return (place, reason) if colon else ("", text)


def _value(sentence: Message, name: str) -> str:
    value = sentence.values[name]
    return value if isinstance(value, str) else str(value)


@dataclass(frozen=True, slots=True)
class ScaleFault:
    """A scale that nothing declares, or that is not the declared one, as `sqrtdk.check` finds it.

    Attributes:
        rule: of the audit, "scale_ledger" or "declared_vs_actual".
        severity: as in `Alarm`.
        text: what is wrong, with the name of the mistake.
        source: where the rule comes from.
        at: file and line, or "".
    """

    rule: str
    severity: str
    text: str
    source: str
    at: str = ""


@dataclass(frozen=True, slots=True)
class CallTraits:
    """What is the same at every step of an attention, beside its formula.

    Attributes:
        logits_dtype: dtype of the stored logits, "float16"; of the accumulator for a fused kernel.
        stored: whether the logits were stored; a fused kernel stores none.
        factors: where each factor of the scale acts and its source, without its value.
        fixed_scale: whether no factor is learned, or computed from the data or for each row.
        norm_size: divisor of the scale ratio, see `audit.gains.norm_size`; 0 if q and k have no norm.
        dtype: dtype of q at the product, "float16".
        scale_faults: what is wrong with its scale from the start.
    """

    logits_dtype: str = ""
    stored: bool = False
    factors: tuple[str, ...] = ()
    fixed_scale: bool = True
    norm_size: int = 0
    dtype: str = ""
    scale_faults: tuple[ScaleFault, ...] = ()


@dataclass(frozen=True, slots=True)
class CallSample:
    """One attention at one step.

    Attributes:
        site: module path.
        index: 0-based count of the attentions at this site.
        heads: number of query heads.
        columns: by column of the records, one number per head; NaN if nothing was counted.
        scale_ratio: effective scale times sqrt(head_dim); None if it could not be read.
        formula: of the logits that reached the softmax.
        reason: why there are no statistics; None if there are.
        logits_dtype: dtype of the stored logits, "float16"; of the accumulator for a fused kernel.
        stored: whether the logits were stored; a fused kernel stores none.
        factors: of the scale: where each factor acts and its source, without its value.
        fixed_scale: whether no factor is learned, or computed from the data or for each row.
        norm_sigma: standard deviation that the scale gives to logits of normalised q and k; 0 if q and k have no norm.
        dtype: of q at the product, "float16".
        scale_faults: what is wrong with its scale from the start.
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
    scale_faults: tuple[ScaleFault, ...] = ()

    @property
    def name(self) -> str:
        """Name of the attention that readers see: its module path, and its number if the module has several."""
        site = self.site or ROOT_NAME
        return Message("alarms.place.call", site=site, number=self.index + 1) if self.index else site

    @property
    def place(self) -> tuple[str, int]:
        """(site, index): the module path, and which of the module's attentions it is, from 0."""
        return self.site, self.index


# The known causes of an output that is not finite, `FirstNonfinite.cause`.
CAUSE_WEIGHT = "weight"  # a parameter or buffer of the module is not finite
# a parameter or buffer of an enclosing module is not finite, as `experts.up` before `experts.act`
CAUSE_WEIGHT_AROUND = "weight around"
CAUSE_INPUTS = "inputs"  # an input of the model is not finite
CAUSE_BETWEEN = "between"  # an input of the module is not finite, but no module returned it
CAUSE_WITHIN = "within"  # modules inside it ran, and their outputs are finite
FROM_MINUS = "minus infinity"  # an input of the module holds minus infinity
FROM_FINITE = "finite"  # the inputs of the module are finite
CAUSE_UNKNOWN = "unknown"  # no input of the module could be read, as it was called with keywords
RULED_OUT = "ruled out"  # no output holds NaN or plus infinity, but the model returns minus infinity


@dataclass(frozen=True, slots=True)
class FirstNonfinite:
    """The first output that is not finite.

    Attributes:
        site: path of the module that returned it.
        kind: class of the module.
        tensor: name within the module's output, "loss"; "" if the output is one tensor.
        cause: one of the constants above.
        detail: "parameter bias" or "buffer running_var" for `CAUSE_WEIGHT`, with the path for
            `CAUSE_WEIGHT_AROUND`; for `CAUSE_BETWEEN` and `CAUSE_WITHIN` the module that ended before, or "".
        returned: whether the model's own output is not finite either.
        before: site and index of the attention that ran next; None if no attention did.
        order: number of the pass, and of the module in order of ending.
        rank: rank that saw it, if several ranks watch together.
        behind: site and index of the attentions that ran between this output and the last one that was finite.
        received: whether the keys of such an attention that came from other ranks are not finite, and its own are:
            then it began on another rank.
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
    behind: tuple[tuple[str, int], ...] = ()
    received: bool = False


@dataclass(frozen=True, slots=True)
class GradientFault:
    """One thing that is wrong with the backward pass of an attention.

    Attributes:
        site: module path of the attention.
        index: 0-based count of the attentions at this site.
        text: what is wrong, in a sentence.
        rounded: whether values were only rounded further than the dtypes allow.
        by: name and place of the custom function that computes the gradient, or "".
        off: largest difference, relative to the largest entry of the formula's gradient; None if it has no size.
        allowed: largest difference that rounding may give, likewise.
    """

    site: str
    index: int
    text: str
    rounded: bool = False
    by: str = ""
    off: float | None = None
    allowed: float | None = None


@dataclass(frozen=True, slots=True)
class StepSample:
    """One sampled step.

    Attributes:
        step: its number, from 1 on.
        calls: one for every attention, in execution order.
        how: `AS_IS`, `EAGER`, or what `not_measured` returns.
        not_measured: what else could not be measured, and why.
        loss: passed to `step()`; None if no loss was passed.
        scaled: whether a GradScaler multiplies the loss, and skips a step whose gradients are not finite.
        first: first output of a module that is not finite; None if all are finite, or were not read.
        modules: number of modules whose outputs were read.
        relative_step: of the weights that give q and k, see `updates`; None if it is not known.
        learning_rate: of the step; None if it is not known.
        faults: what is wrong with the backward passes of attentions, where it was asked.
        drift: of such a weight since the sampled step before, see `updates`; None if it is not known.
    """

    step: int
    calls: tuple[CallSample, ...]
    how: str = AS_IS
    not_measured: tuple[str, ...] = ()
    loss: float | None = None
    scaled: bool = False
    first: FirstNonfinite | None = None
    modules: int = 0
    relative_step: float | None = None
    learning_rate: float | None = None
    faults: tuple[GradientFault, ...] = ()
    drift: float | None = None

    @property
    def measured(self) -> tuple[CallSample, ...]:
        """The attentions that have statistics."""
        return tuple(call for call in self.calls if call.reason is None)

    @property
    def count(self) -> int:
        """Number of values of all statistics, over all heads."""
        return sum(len(values) for call in self.calls for values in call.columns.values())

    @property
    def unmeasured(self) -> int:
        """Number of attentions without statistics, and of other unmeasured values; 1 for a wholly unmeasured step.

        Example:
            >>> StepSample(1, (), not_measured("no attention ran")).unmeasured, StepSample(1, ()).unmeasured
            (1, 0)
        """
        missed = len(self.calls) - len(self.measured) + len(self.not_measured)
        return max(missed, int(reason_unmeasured(self.how) is not None))


@dataclass(frozen=True, slots=True)
class Alarm:
    """A warning about a run.

    Attributes:
        name: of the rule, "max_logit".
        severity: "note", "warn", "fail" or "critical".
        step: at which it was raised.
        site: None for the whole run.
        index: of the attention at the site.
        head: None if the alarm is not about one head.
        value: the measured number.
        bar: the threshold that it passed.
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

"""The sums of one sampled step: over the rows of each head, for each call, and for the step.

They are in a form to which batches and ranks can be added: sums, maxima, ordered rows. There is never a mean of means:
a mean stays a sum and a count until the last batch of the last rank is added. Numbers that are not finite have a count
of their own, and are left out of the maxima.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sqrtdk.audit.gains import norm_sigma, norm_size
from sqrtdk.monitor.samples import Alarm, CallSample, CallTraits, FirstNonfinite, GradientFault, ScaleFault
from sqrtdk.stats.heads import SATURATED
from sqrtdk.stats.rows import row_quantiles
from sqrtdk.tracing import CallRows
from sqrtdk.tracing.records import BY_BLOCK, BY_ROW, FROM_DATA, AttentionCall

# Added up. `seeing` rows have a finite largest logit; `choices` are those with two or more keys.
SUM_COLUMNS = (
    *("rows", "blind_rows", "nan_rows", "inf_rows", "seeing", "choices"),
    *("keys", "mean_logit", "variance", "entropy_nats", "effective_keys", "peak", "jacobian_norm"),  # over seeing
    *("entropy_fraction", "saturated"),  # over choices
    *("query_nonfinite", "key_nonfinite"),  # numbers of q and k of all heads; NaN if unknown
    *("query_grad_nonfinite", "key_grad_nonfinite"),  # rows; NaN without gradients
)
PRODUCT_COLUMNS = ("max_product", "stored_product")  # one number per call, the same for all of its heads
MAXIMUM_COLUMNS = ("max_logit", "-min_logit", "max_abs_logit", "row_offset", "peak_max", *PRODUCT_COLUMNS)
RATIO_QUANTILES = (0.05, 0.50, 0.95)


@dataclass(frozen=True, slots=True, eq=False)
class HeadSums:
    """The sums of one attention so far.

    Attributes:
        sums: (len(SUMS), Hq) float64.
        maxima: (len(MAXIMA), Hq) float64; -inf if there was no row, NaN if unknown.
        ordered: by column whose quantiles over rows are reported ("max_logit", "entropy_nats", "query_grad",
            "key_grad"), (Hq, n) float32 of the counted rows, +inf at the others.
    """

    sums: Tensor
    maxima: Tensor
    ordered: dict[str, Tensor]

    def with_gradients(self, query: Tensor | None, key: Tensor | None) -> HeadSums:
        """Add the size of the gradient of each row, the root mean square over its channels.

        Args:
            query: (Hq, n), of q; None if unknown.
            key: (H, n), of k; each of its heads belongs to Hq / H query heads.
        """
        heads, ordered, sums = self.sums.shape[-1], dict(self.ordered), self.sums.clone()
        for name, gradient in (("query_grad", query), ("key_grad", key)):
            if gradient is not None and heads % gradient.shape[0] == 0:
                # One gradient of a key head counts for each query head that reads it, as the other columns are by query
                # head.
                every = gradient.float().repeat_interleave(heads // gradient.shape[0], 0)
                # Plus infinity marks what quantiles must leave out: it sorts last, as the rows that don't count do.
                ordered[name] = every.nan_to_num(nan=math.inf)
                sums[SUM_COLUMNS.index(f"{name}_nonfinite")] = (ordered[name] == math.inf).sum(-1)
        return HeadSums(sums, self.maxima, ordered)


def head_sums(call: CallRows) -> HeadSums:
    """Return sums and maxima over the rows of each head, from the statistics of the rows.

    Rows that see no key, rows whose logits are all minus infinity, and rows with NaN are counted apart.
    """
    rows = call.rows
    blind = rows.keys == 0
    endless = ~blind & (rows.max_logit == -math.inf)
    broken = ~blind & rows.max_logit.isnan()
    # endless | broken) | These three have no finite statistics, and one of them would make every mean NaN.
    seeing = ~(blind | endless | broken)
    choice = seeing & (rows.keys > 1)
    padding = 0 if call.padding is None else call.padding
    heads = rows.keys.shape[0]

    def total(value: Tensor, where: Tensor = seeing) -> Tensor:
        # In float64: the means of 10^8 rows are compared from step to step.
        return value.masked_fill(~where, 0.0).sum(-1, dtype=torch.float64)

    def largest(value: Tensor) -> Tensor:
        if not value.shape[-1]:
            # amax of no rows raises, and minus infinity is neutral in a maximum.
            return value.new_full((heads,), -math.inf, dtype=torch.float64)
        return value.masked_fill(~seeing, -math.inf).amax(-1).double()

    counts = [seeing.sum(-1) + blind.sum(-1) + endless.sum(-1) + broken.sum(-1) - padding, blind.sum(-1) - padding]
    counts += [broken.sum(-1), endless.sum(-1), seeing.sum(-1), choice.sum(-1)]
    means = [rows.keys, rows.mean, rows.variance, rows.entropy_nats, rows.effective_keys, rows.peak, rows.jacobian_norm]
    of_choices = [rows.entropy_nats / rows.keys.clamp(min=2.0).log(), (rows.peak > SATURATED).to(rows.keys.dtype)]
    sums = [*(count.double() for count in counts), *map(total, means), *(total(value, choice) for value in of_choices)]
    for count in (call.query_nonfinite, call.key_nonfinite):
        sums.append(torch.full_like(sums[0], math.nan) if count is None else count.double().expand(heads))
    sums += [torch.full_like(sums[0], math.nan)] * 2  # gradients, which come later
    size = torch.maximum(rows.max_logit.abs(), rows.min_logit.abs())
    unknown = rows.keys.new_full((heads,), math.nan, dtype=torch.float64)  # NaN makes a later maximum unknown too
    products = [
        unknown if product is None else product.double().nan_to_num(nan=math.inf).expand(heads)
        for product in (call.max_product, call.stored_product)
    ]
    maxima = [
        largest(rows.max_logit),
        largest(-rows.min_logit),
        largest(size),
        largest(rows.mean.abs()),
        largest(rows.peak),
    ]
    ordered = {
        "max_logit": rows.max_logit.masked_fill(~seeing, math.inf).float(),
        "entropy_nats": rows.entropy_nats.masked_fill(~seeing, math.inf).float(),
    }
    return HeadSums(torch.stack(sums), torch.stack([*maxima, *products]), ordered)


def join_rows(parts: Sequence[HeadSums]) -> HeadSums:
    """Return the sums of the same heads over all rows, from those over disjoint sets of rows.

    Such sets are further forward passes of a step, or the sequences of other ranks.

    Args:
        parts: One or more; only ordered values that all of them have are kept.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    # A pass without autograd has no gradients; quantiles over some passes would look like those of all.
    names = [name for name in first.ordered if all(name in part.ordered for part in parts)]
    return HeadSums(
        torch.stack([part.sums for part in parts]).sum(0),
        torch.stack([part.maxima for part in parts]).amax(0),
        {name: torch.cat([part.ordered[name] for part in parts], -1) for name in names},
    )


def join_heads(parts: Sequence[HeadSums]) -> HeadSums:
    """Return the sums of all heads over the same rows, from those of disjoint sets of heads.

    Args:
        parts: In the order of the heads, as of tensor-parallel ranks; only ordered values that all of them have are
            kept.
    """
    names = [name for name in parts[0].ordered if all(name in part.ordered for part in parts)]
    return HeadSums(
        torch.cat([part.sums for part in parts], -1),
        torch.cat([part.maxima for part in parts], -1),
        {name: torch.cat([part.ordered[name] for part in parts]) for name in names},
    )


def head_statistics(calls: Sequence[HeadSums]) -> list[dict[str, list[float]]]:
    """Return the statistics of every head of some calls, which leave the device in one transfer.

    Returns:
        For each call, by column of the records, one number per head; NaN if nothing was counted.
    """
    if not calls:
        return []
    stacked = [_columns(call) for call in calls]
    # One transfer for all calls: each waits for the GPU.
    flat = torch.cat([torch.stack(list(columns.values())).flatten() for columns in stacked]).tolist()
    tables, at = [], 0
    for columns in stacked:
        named: dict[str, list[float]] = {}
        for name, column in columns.items():
            named[name] = flat[at : at + len(column)]
            at += len(column)
        tables.append(named)
    return tables


def _columns(call: HeadSums) -> dict[str, Tensor]:
    """Return the statistics of each head, (H,) by column, from sums and maxima over its rows."""
    sums, maxima = dict(zip(SUM_COLUMNS, call.sums, strict=True)), dict(zip(MAXIMUM_COLUMNS, call.maxima, strict=True))
    found = {name: sums[name] for name in SUM_COLUMNS if name.endswith(("rows", "nonfinite"))}
    for name in ("keys", "mean_logit", "entropy_nats", "effective_keys", "peak", "jacobian_norm"):
        found[name] = sums[name] / sums["seeing"]
    for name in ("entropy_fraction", "saturated"):
        found[name] = sums[name] / sums["choices"]
    # The root of the mean variance, not the mean of roots: only sums can be joined over ranks.
    found["std_logit"] = (sums["variance"] / sums["seeing"]).sqrt()
    for name, value in maxima.items():
        sign = -1.0 if name.startswith("-") else 1.0
        found[name.removeprefix("-")] = torch.where(value > -math.inf, sign * value, math.nan)
    for name, values in call.ordered.items():
        total = (values < math.inf).sum(-1)
        for quantile, value in zip(
            RATIO_QUANTILES, row_quantiles(values.double(), total, RATIO_QUANTILES), strict=True
        ):
            found[f"{name.removesuffix('_nats')}_p{100 * quantile:02.0f}"] = value
        if name.endswith("_grad"):
            largest = values.masked_fill(values == math.inf, -math.inf).amax(-1).double()
            found[f"{name}_max"] = torch.where(largest > -math.inf, largest, math.nan)
    return found


NO_TRAITS = CallTraits()


def traits_of(call: AttentionCall, scale_faults: tuple[ScaleFault, ...] = ()) -> CallTraits:
    """Return what is the same at every step of an attention, from its record and what is wrong with its scale.

    This is the dtype of its inputs and of its logits, whether logits are stored, the factors of its scale, whether the
    scale is a fixed number, and the size of its norm of q and k.
    """
    factors = call.scale.factors
    return CallTraits(
        logits_dtype=call.logits_dtype,
        stored=call.kind == "eager",
        factors=tuple(sorted(f"{factor.where}: {factor.source}" for factor in factors)),
        fixed_scale=not any(factor.learned or factor.source in (BY_ROW, FROM_DATA, BY_BLOCK) for factor in factors),
        norm_size=norm_size(call),
        dtype=call.dtype,
        scale_faults=scale_faults,
    )


@dataclass(slots=True)
class CallParts:
    """One attention of the step so far: its first call, the sums of all calls, and their rows if they are kept."""

    call: AttentionCall
    parts: list[HeadSums] = field(default_factory=list)
    rows: list[CallRows] = field(default_factory=list)
    unread: bool = False  # the rows of one of its calls are unknown


@dataclass(frozen=True, slots=True, eq=False)
class WatchedCall:
    """One attention of a step, with its sums.

    Attributes:
        site: module path.
        index: 0-based count of the attentions at this site.
        heads: number of query heads.
        ratio: effective scale times sqrt(head_dim); None if it could not be read.
        formula: of the logits that reached the softmax.
        sums: over the rows of each head; None if they could not be measured.
        reason: why there are no sums.
        rows: the summed rows of each forward pass, kept only on request.
        traits: of the attention, beside its formula.
    """

    site: str
    index: int
    heads: int
    ratio: float | None
    formula: str
    sums: HeadSums | None
    reason: str | None = None
    rows: tuple[CallRows, ...] = ()
    traits: CallTraits = NO_TRAITS

    @property
    def place(self) -> tuple[str, int]:
        """(site, index): the module path, and which of the module's attentions it is, from 0."""
        return self.site, self.index


@dataclass(frozen=True, slots=True, eq=False)
class WatchedStep:
    """All attentions of one sampled step.

    Attributes:
        calls: in execution order.
        how: how the step ran, as in `StepSample`.
        missed: what could not be measured, and why.
        loss: passed to `step()`.
        alarms: alarms that do not follow from the numbers, and that every process must know.
        first: first output of a module that is not finite.
        modules: number of modules whose outputs were read.
        relative_step: of the weights that give q and k, see `updates`; None if it is not known.
        learning_rate: of the step; None if it is not known.
        faults: what is wrong with the backward passes of attentions.
        drift: of such a weight since the sampled step before, see `updates`; None if it is not known.
    """

    calls: tuple[WatchedCall, ...]
    how: str
    missed: tuple[str, ...] = ()
    loss: float | None = None
    alarms: tuple[Alarm, ...] = ()
    first: FirstNonfinite | None = None
    modules: int = 0
    relative_step: float | None = None
    learning_rate: float | None = None
    faults: tuple[GradientFault, ...] = ()
    drift: float | None = None

    def samples(self) -> tuple[CallSample, ...]:
        """Return the statistics of every call, in the order of `calls`.

        The sums of all calls are stacked first, so that a GPU is waited for once.
        """
        known = [call for call in self.calls if call.sums is not None]
        with torch.no_grad():
            tables = head_statistics([call.sums for call in known if call.sums is not None])
        columns = {call.place: one for call, one in zip(known, tables, strict=True)}
        return tuple(_call_sample(call, columns.get(call.place, {})) for call in self.calls)


def _call_sample(call: WatchedCall, columns: dict[str, list[float]]) -> CallSample:
    """Return the sample of a call: its statistics, beside what is the same at every step."""
    known = call.traits
    return CallSample(
        site=call.site,
        index=call.index,
        heads=call.heads,
        columns=columns,
        scale_ratio=call.ratio,
        formula=call.formula,
        reason=call.reason,
        logits_dtype=known.logits_dtype,
        stored=known.stored,
        factors=known.factors,
        fixed_scale=known.fixed_scale,
        norm_sigma=norm_sigma(call.ratio, known.norm_size),
        dtype=known.dtype,
        scale_faults=known.scale_faults,
    )

"""QK-clip: weights of q and k scaled down, head by head, until the largest logit is at the threshold.

gamma = threshold / max where max > threshold, else 1; rows of q times gamma^balance, rows of k times
gamma^(1 - balance), so that the logits are times gamma (Kimi Team 2025, Kimi K2, arXiv:2507.20534). Behind a softcap it
is the maximum before the cap that is scaled.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sqrtdk._arguments import number
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.repair.lookup import Parameters
from sqrtdk.repair.masters import Copies, Optimizers, scale_
from sqrtdk.repair.plan import grouped, plan_of, shared_rows
from sqrtdk.repair.ranks import Ranks, merged, reshard
from sqrtdk.repair.rows import CallPlan, Rows
from sqrtdk.repair.watched import StepWatch, measured
from sqrtdk.tracing import Trace

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@runtime_checkable
class LogitMaxima(Protocol):
    """What a clip reads: plans, and the largest logit of each head of each, merged over ranks already.

    Attributes:
        plans: one a call, see `plan_of`.
        maxima: (Hq,) of each plan, scaled, after softcap, over visible keys; None if a call did not run.
    """

    plans: tuple[CallPlan, ...]
    maxima: Sequence[Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class ClipRecord:
    """What a clip did to one call; its tensors stay on the device of the maxima until they are read.

    Attributes:
        site: module path.
        index: 0-based count of the attentions at this site.
        measured: (Hq,), the maxima it was given.
        gamma: (Hq,), by what the product of q and k was scaled; 1 where a head was left alone.
        predicted: (Hq,), the maxima of the same inputs now; those measured where nothing was scaled.
        usable: (Hq,), whether the maximum is a finite number, and below the softcap.
        shared: what several heads share, in words: they are scaled by the largest maximum among them.
        refused: why nothing was scaled; None if scaling was possible.
        partial: numbers of the heads whose maximum, by a watch, is of some of their rows: it measures `rows=` of a
            sequence, or others held a NaN or an infinity. The rest may be larger than what is measured and predicted.
    """

    site: str
    index: int
    measured: Float[Tensor, " Hq"]
    gamma: Float[Tensor, " Hq"]
    predicted: Float[Tensor, " Hq"]
    usable: Bool[Tensor, " Hq"]
    shared: tuple[str, ...] = ()
    refused: str | None = None
    partial: tuple[int, ...] = ()

    @property
    def clipped(self) -> tuple[int, ...]:
        """Numbers of the heads that were scaled."""
        return tuple((self.gamma < 1).nonzero().flatten().tolist())

    @property
    def unusable(self) -> tuple[int, ...]:
        """Numbers of the heads whose maximum is missing, NaN, infinite or at the softcap: no ground for a clip."""
        return tuple((~self.usable).nonzero().flatten().tolist())


def qk_clip_(
    model: nn.Module,
    watch_or_stats: Trace | LogitMaxima | StepWatch,
    threshold: float = 100.0,
    balance: float = 0.5,
    *,
    optimizer: Optimizers = None,
    group: Ranks = None,
) -> tuple[ClipRecord, ...]:
    """Scale q and k in place, head by head, so that no head's largest logit is above a threshold.

    gamma = threshold / max of a head whose maximum is above the threshold and finite; its q weight and bias are
    multiplied by gamma^balance, those of k by gamma^(1 - balance). Other heads keep their weights bit for bit, except
    where they share a row with one that is scaled: a key head of GQA (not with a balance of 1, which leaves k alone),
    the gain of a q/k norm, a projection of two layers.

    Args:
        model: whose parameters are scaled; call it after the optimizer's step, never between forward and backward.
        watch_or_stats: a finished `sqrtdk.trace(model, keep=True)`; the watch of `sqrtdk.watch(model)`, inside its
            block and after its `step()`; or what has `plans` and `maxima`, see `LogitMaxima`. Of a watch the maxima are
            those of the step that has just ended, over all of its forward passes and all ranks, each of which calls
            this. What a clip has left of them counts for a second one by the same step, or the same trace, which has
            nothing more to scale: after weights are put back, trace again.
        threshold: the largest logit that is left alone, in natural-log units, above 0.
        balance: share of q in the scaling, from 0 (k alone) to 1 (q alone).
        optimizer: whose float32 copies of the weights are scaled as well.
        group: of a trace in one of several processes: the process group of the ranks that hold the same weights, whose
            maxima are merged, or "merged" where they are the same on every rank. Of a watch with shards="alone", which
            merges none, "merged" as well. Of no other `watch_or_stats`.

    Returns:
        One record a call; a call that can't be clipped says why in `refused`, and is left as it is. None by a watch
        whose last step was not sampled: nothing is known, and nothing is scaled.

    Raises:
        InvalidTypeError: an argument of another type.
        InvalidValueError: a threshold that is not above 0, a balance outside 0..1, a trace without keep=True or of
            another model, plans of parameters that the model has not; no `group` in one of several processes; a watch
            of another model, or outside its block.
        UnsupportedError: a watch of ranks that share heads or layers.

    Example:
        >>> import sqrtdk
        >>> layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> x = 30 * torch.randn(1, 6, 32)
        >>> with sqrtdk.trace(layer, keep=True) as run:
        ...     _ = layer(x, x, x)
        >>> qk_clip_(layer, run, threshold=10.0)[0].predicted.max().item() <= 10.0 + 1e-12
        True

    Reference:
        Kimi Team 2025, Kimi K2: Open Agentic Intelligence, section 2.1 (arXiv:2507.20534).
    """
    threshold, balance = bound(threshold), share(balance)
    plans: Sequence[CallPlan]
    maxima: Sequence[Tensor | None]
    if isinstance(watch_or_stats, StepWatch):
        return _by_watch(model, watch_or_stats, threshold, balance, optimizer, group)
    if isinstance(watch_or_stats, LogitMaxima):
        if not isinstance(model, nn.Module):
            raise InvalidTypeError(f"model is an nn.Module; got {type(model).__name__}", hint="Pass the model itself.")
        if group is not None:
            raise InvalidValueError(
                "a group merges the maxima of a trace; those of an object are merged already", hint="Leave it out."
            )
        plans, maxima = watch_or_stats.plans, watch_or_stats.maxima
    else:
        return _by_trace(model, watch_or_stats, threshold, balance, optimizer, group)
    return clip_(model, plans, maxima, threshold, balance, optimizer=optimizer)


_clipped: WeakKeyDictionary[Trace, list[Tensor]] = WeakKeyDictionary()  # what a clip has left of a trace's maxima


def _by_trace(
    model: nn.Module, run: Trace, threshold: float, balance: float, optimizer: Optimizers, group: Ranks
) -> tuple[ClipRecord, ...]:
    plans = plan_of(model, run)
    each = [None if call.stats is None else call.stats.max_logit for call in run.calls]
    maxima = merged(each, [plan.heads for plan in plans], group)
    records = clip_(model, plans, _clipped.get(run, maxima), threshold, balance, optimizer=optimizer)
    _clipped[run] = _left(records, threshold)
    return records


def _by_watch(
    model: nn.Module, watch: StepWatch, threshold: float, balance: float, optimizer: Optimizers, group: Ranks
) -> tuple[ClipRecord, ...]:
    step = measured(model, watch, group)
    if step is None:
        return ()
    records = clip_(watch.model, step.plans, step.maxima, threshold, balance, optimizer=optimizer)
    step.clips.left(step.places, _left(records, threshold))
    return tuple(replace(one, partial=partial) for one, partial in zip(records, step.partial, strict=True))


def _left(records: Sequence[ClipRecord], threshold: float) -> list[Tensor]:
    """The maxima after a clip, from which a second one by the same measurement begins."""
    return [torch.where(one.gamma < 1, one.predicted.clamp(max=threshold), one.measured) for one in records]


@torch.no_grad()
def clip_(
    model: nn.Module,
    plans: Sequence[CallPlan],
    maxima: Sequence[Tensor | None],
    threshold: float = 100.0,
    balance: float = 0.5,
    *,
    optimizer: Optimizers = None,
) -> tuple[ClipRecord, ...]:
    """Apply plans to maxima: `qk_clip_` without a trace; no device sync but for an optimizer, or a balance of 0 or 1.

    Args:
        model: whose parameters the plans name.
        plans: see `plan_of`.
        maxima: (Hq,) of each plan, the same on all ranks; None if a call did not run.
        threshold: see `qk_clip_`.
        balance: see `qk_clip_`.
        optimizer: see `qk_clip_`.

    Returns:
        One record a plan.

    Raises:
        InvalidValueError: as many maxima as plans and heads are needed, and parameters of the plans' names and shapes.
    """
    threshold, balance = bound(threshold), share(balance)
    measured = _checked(plans, maxima)
    if not plans:
        return ()
    plans = _scaled_by(plans, balance)
    gamma = _gammas(plans, measured, threshold)
    factors = _factors(plans, gamma, balance)
    reshard(model)
    parameters = Parameters(model)
    scaled = {name: parameters.get(name) for name in factors}
    _check_shapes(scaled, factors)
    copies = Copies(scaled, parameters.ids, optimizer)
    for name, parameter in scaled.items():
        scale_(parameter, copies.of(name), factors[name])
    return tuple(_record(plan, m, g) for plan, m, g in zip(plans, measured, gamma, strict=True))


# -- how much ---------------------------------------------------------------------------------------------------------


def _gammas(
    plans: Sequence[CallPlan], measured: Sequence[Float[Tensor, " Hq"]], threshold: float
) -> list[Float[Tensor, " Hq"]]:
    """Gamma of each head: the least of those that are scaled as one."""
    wanted = torch.cat([_wanted(plan, each, threshold) for plan, each in zip(plans, measured, strict=True)])
    groups = torch.cat([plan.groups for plan in plans]).to(wanted.device)
    least = torch.ones_like(wanted).scatter_reduce(0, groups, wanted, "amin")
    return list(torch.split(least[groups], [plan.heads for plan in plans]))


def _scaled_by(plans: Sequence[CallPlan], balance: float) -> Sequence[CallPlan]:
    """The plans without the side that a balance leaves alone: what heads share there does not make them one."""
    alone = {0.0: "q", 1.0: "k"}.get(balance)
    if alone is None:
        return plans
    each = [(plan, tuple(rows for rows in plan.rows if rows.side != alone)) for plan in plans]
    return grouped([replace(one, rows=rows, shared=tuple(filter(None, map(shared_rows, rows)))) for one, rows in each])


def _wanted(plan: CallPlan, measured: Float[Tensor, " Hq"], threshold: float) -> Float[Tensor, " Hq"]:
    """Gamma of each head by itself: 1 where it is at or below the threshold, or no number."""
    ones = torch.ones_like(measured)
    if plan.refused is not None or (plan.softcap is not None and threshold >= plan.softcap):
        return ones
    limit = threshold if plan.softcap is None else plan.softcap * math.atanh(threshold / plan.softcap)
    largest = _uncapped(measured, plan.softcap)
    above = (measured > threshold) & largest.isfinite()
    return torch.where(above, limit / torch.where(above, largest, ones), ones)


def _uncapped(logit: Float[Tensor, "..."], softcap: float | None) -> Float[Tensor, "..."]:
    return logit if softcap is None else softcap * torch.atanh(logit / softcap)


def _record(plan: CallPlan, measured: Float[Tensor, " Hq"], gamma: Float[Tensor, " Hq"]) -> ClipRecord:
    """What was done, and the maxima once the product is times gamma."""
    logit, cap = _uncapped(measured, plan.softcap), plan.softcap
    capped = gamma * logit if cap is None else cap * torch.tanh(gamma * logit / cap)
    predicted = torch.where(gamma < 1, capped, measured)
    return ClipRecord(plan.site, plan.index, measured, gamma, predicted, logit.isfinite(), plan.shared, plan.refused)


def _check_shapes(scaled: dict[str, Tensor], factors: dict[str, list[tuple[Rows, Tensor]]]) -> None:
    """Refuse plans of another model, before anything is scaled."""
    for name, pairs in factors.items():
        planned = next((rows.shape for rows, _ in pairs if rows.shape not in (None, tuple(scaled[name].shape))), None)
        if planned is not None:
            raise InvalidValueError(
                f"a plan's parameters are the model's; {name} has the shape {tuple(scaled[name].shape)}, and had "
                f"{planned} in the plan",
                hint="Make the plan from a trace of this very model.",
            )


# -- what -------------------------------------------------------------------------------------------------------------


def _factors(
    plans: Sequence[CallPlan], gamma: Sequence[Float[Tensor, " Hq"]], balance: float
) -> dict[str, list[tuple[Rows, Float[Tensor, " Hq"]]]]:
    """Of each parameter that is scaled: its rows, and the factor of each head's."""
    powers = {"q": balance, "k": 1.0 - balance, "whole": 1.0}
    factors: dict[str, list[tuple[Rows, Tensor]]] = defaultdict(list)
    for plan, by in zip(plans, gamma, strict=True):
        for rows in plan.rows:
            factors[rows.name].append((rows, by ** powers[rows.side]))
    return factors


# -- arguments --------------------------------------------------------------------------------------------------------


def bound(threshold: Any) -> float:
    """A threshold: a finite number above 0."""
    return number("threshold", threshold, above=0.0)


def share(balance: Any) -> float:
    """A balance: a number from 0 to 1."""
    of_query = number("balance", balance)
    if not 0.0 <= of_query <= 1.0:
        raise InvalidValueError(f"balance is from 0 to 1; got {of_query:g}", hint="0.5 shares evenly.")
    return of_query


def _checked(plans: Sequence[CallPlan], maxima: Sequence[Tensor | None]) -> list[Tensor]:
    """The maxima as floating tensors beside the weights; NaN where there are none."""
    if len(plans) != len(maxima):
        raise InvalidValueError(
            f"there are maxima for each plan; got {len(maxima)} for {len(plans)}",
            hint="None stands for a call not run.",
        )
    beside = [rows.index.device for plan in plans for rows in plan.rows]
    device = next(iter(beside), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    tensors = []
    for plan, each in zip(plans, maxima, strict=True):
        if each is None:
            each = torch.full((plan.heads,), math.nan)
        if tuple(each.shape) != (plan.heads,):
            raise InvalidValueError(
                f"maxima of {plan.site or 'the root'} have one number a head, ({plan.heads},); got {tuple(each.shape)}",
                hint="Take the largest over batch and rows.",
            )
        tensors.append(each.detach().to(device=device, dtype=dtype))
    return tensors

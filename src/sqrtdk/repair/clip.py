"""QK-clip: weights of q and k are scaled down, head by head, until the largest logit is at the threshold.

gamma = threshold / max if max > threshold, else 1. Rows of q are scaled by gamma^balance and rows of k by gamma^(1 -
balance), so the logits are multiplied by gamma (Kimi Team 2025, Kimi K2, arXiv:2507.20534). With a softcap, the maximum
before the cap is scaled.
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

from sqrtdk._arguments import finite_number
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.repair.lookup import Parameters
from sqrtdk.repair.masters import Copies, Optimizers, scale_
from sqrtdk.repair.plan import grouped, plan_of, shared_rows
from sqrtdk.repair.ranks import Ranks, merged, reshard
from sqrtdk.repair.rows import CallPlan, HeadRows
from sqrtdk.repair.watched import StepWatch, step_maxima
from sqrtdk.tracing import Trace

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@runtime_checkable
class LogitMaxima(Protocol):
    """The input of a clip: plans, and the largest logit of each of their heads, already merged over ranks.

    Attributes:
        plans: one per call, see `plan_of`.
        maxima: (Hq,) of each plan, scaled, after softcap, over visible keys; None if a call did not run.
    """

    plans: tuple[CallPlan, ...]
    maxima: Sequence[Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class ClipRecord:
    """The effect of a clip on one call; its tensors stay on the device of the maxima until they are read.

    Attributes:
        site: module path.
        index: 0-based count of the attentions at this site.
        measured: (Hq,), the measured maxima.
        gamma: (Hq,), factor on the product of q and k; 1 for a head that was not scaled.
        predicted: (Hq,), the maxima of the same inputs after the clip; equal to `measured` if nothing was scaled.
        usable: (Hq,), whether the maximum is a finite number, and below the softcap.
        shared: weights that several heads share, in words; such heads are scaled by their largest maximum.
        refused: why nothing was scaled; None if scaling was possible.
        partial: numbers of the heads whose maximum, from a watch, covers only some rows, because `rows=` limits them or
            other rows held a NaN or an infinity. The true maximum may be larger than measured and predicted.
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
        """Indices of the heads that were scaled down, those with gamma < 1."""
        return tuple((self.gamma < 1).nonzero().flatten().tolist())

    @property
    def unusable(self) -> tuple[int, ...]:
        """Indices of the heads that can't be clipped: their maximum is missing, NaN, infinite, or at the softcap."""
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

    For a head whose maximum is finite and above the threshold, gamma = threshold / max; its q weight and bias are
    multiplied by gamma^balance, those of k by gamma^(1 - balance). Other heads keep their weights bit for bit, unless
    they share rows with a scaled head: a key head of GQA (except with a balance of 1, which leaves k alone), the gain
    of a q/k norm, a projection used by two layers.

    Args:
        model: its parameters are scaled. Call this after the optimizer's step, never between forward and backward.
        watch_or_stats: a finished `sqrtdk.trace(model, keep=True)`; or the watch of `sqrtdk.watch(model)`, inside its
            block and after its `step()`; or an object with `plans` and `maxima`, see `LogitMaxima`. A watch gives the
            maxima of the step that has just ended, over all of its forward passes and all ranks, each of which must
            call this. A second clip by the same step or trace starts from the maxima that the first one left, so it
            finds nothing more to scale: after restoring weights, trace again.
        threshold: the largest logit that is left alone, in natural-log units, above 0.
        balance: share of q in the scaling, from 0 (k alone) to 1 (q alone).
        optimizer: its float32 copies of the weights are scaled as well.
        group: for a trace in one of several processes: the process group of the ranks that hold the same weights, whose
            maxima are merged, or "merged" if they are equal on every rank. For a watch with shards="alone", which
            merges nothing: "merged". None for any other `watch_or_stats`.

    Returns:
        One record per call; a call that can't be clipped gives its reason in `refused`, and is not changed. Empty for a
        watch whose last step was not sampled: nothing is known, and nothing is scaled.

    Raises:
        InvalidTypeError: An argument has another type.
        InvalidValueError: The threshold is not above 0, or the balance outside 0..1; the trace has no keep=True or is
            of another model; the plans name parameters that the model lacks; `group` is missing in one of several
            processes; the watch is of another model, or outside its block.
        UnsupportedError: The ranks of the watch share heads or layers.

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
    threshold, balance = bound(threshold), checked_balance(balance)
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


# A trace keeps the maxima from before a clip. Without these, a second clip by the same trace would scale again what is
# already below the threshold.
_clipped: WeakKeyDictionary[Trace, list[Tensor]] = WeakKeyDictionary()  # maxima that the last clip left, by trace


def _by_trace(
    model: nn.Module, run: Trace, threshold: float, balance: float, optimizer: Optimizers, group: Ranks
) -> tuple[ClipRecord, ...]:
    plans = plan_of(model, run)
    each = [None if call.stats is None else call.stats.max_logit for call in run.calls]
    maxima = merged(each, [plan.heads for plan in plans], group)
    records = clip_(model, plans, _clipped.get(run, maxima), threshold, balance, optimizer=optimizer)
    _clipped[run] = _maxima_left(records, threshold)
    return records


def _by_watch(
    model: nn.Module, watch: StepWatch, threshold: float, balance: float, optimizer: Optimizers, group: Ranks
) -> tuple[ClipRecord, ...]:
    step = step_maxima(model, watch, group)
    if step is None:
        return ()
    records = clip_(watch.model, step.plans, step.maxima, threshold, balance, optimizer=optimizer)
    step.clips.left(step.places, _maxima_left(records, threshold))
    return tuple(replace(one, partial=partial) for one, partial in zip(records, step.partial, strict=True))


def _maxima_left(records: Sequence[ClipRecord], threshold: float) -> list[Tensor]:
    """Return the maxima after a clip, from which a second clip by the same measurement starts."""
    # Rounding may leave the prediction an ulp above the threshold, and a repeated clip would then scale by almost 1.
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
    """Apply plans to maxima: `qk_clip_` without a trace. It syncs the device only for an optimizer, or a balance of 0
    or 1.

    Args:
        model: the plans name its parameters.
        plans: see `plan_of`.
        maxima: (Hq,) of each plan, the same on all ranks; None if a call did not run.
        threshold: see `qk_clip_`.
        balance: see `qk_clip_`.
        optimizer: see `qk_clip_`.

    Returns:
        One record per plan.

    Raises:
        InvalidValueError: The number of maxima differs from that of plans or heads, or the model lacks a plan's
            parameter.
    """
    threshold, balance = bound(threshold), checked_balance(balance)
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
    """Return gamma of each head: the smallest in its group of heads that must be scaled as one."""
    # A key head of GQA, or the gain of a norm, is scaled once for all heads that read it: by the smallest gamma.
    wanted = torch.cat([_wanted(plan, each, threshold) for plan, each in zip(plans, measured, strict=True)])
    groups = torch.cat([plan.groups for plan in plans]).to(wanted.device)
    least = torch.ones_like(wanted).scatter_reduce(0, groups, wanted, "amin")
    return list(torch.split(least[groups], [plan.heads for plan in plans]))


def _scaled_by(plans: Sequence[CallPlan], balance: float) -> Sequence[CallPlan]:
    """Return the plans without the side that the balance leaves alone: rows shared there do not tie heads together."""
    # With a balance of 0 or 1 one side keeps its weights, so heads that share rows of that side alone are no group.
    alone = {0.0: "q", 1.0: "k"}.get(balance)
    if alone is None:
        return plans
    each = [(plan, tuple(rows for rows in plan.rows if rows.side != alone)) for plan in plans]
    return grouped([replace(one, rows=rows, shared=tuple(filter(None, map(shared_rows, rows)))) for one, rows in each])


def _wanted(plan: CallPlan, measured: Float[Tensor, " Hq"], threshold: float) -> Float[Tensor, " Hq"]:
    """Return gamma of each head by itself: 1 if its maximum is at or below the threshold, or not a finite number."""
    ones = torch.ones_like(measured)
    # Capped logits never reach a threshold at the cap or above.
    if plan.refused is not None or (plan.softcap is not None and threshold >= plan.softcap):
        return ones
    # cap * tanh(z / cap) is at the threshold where z = cap * atanh(threshold / cap)
    limit = threshold if plan.softcap is None else plan.softcap * math.atanh(threshold / plan.softcap)
    largest = _uncapped(measured, plan.softcap)
    # A negative maximum is never above: threshold / max would be negative, and its square root NaN in the weights.
    above = (measured > threshold) & largest.isfinite()
    return torch.where(above, limit / torch.where(above, largest, ones), ones)


def _uncapped(logit: Float[Tensor, "..."], softcap: float | None) -> Float[Tensor, "..."]:
    return logit if softcap is None else softcap * torch.atanh(logit / softcap)


def _record(plan: CallPlan, measured: Float[Tensor, " Hq"], gamma: Float[Tensor, " Hq"]) -> ClipRecord:
    """Return the record of a call, with the maxima predicted for the product multiplied by gamma."""
    logit, cap = _uncapped(measured, plan.softcap), plan.softcap
    capped = gamma * logit if cap is None else cap * torch.tanh(gamma * logit / cap)
    predicted = torch.where(gamma < 1, capped, measured)
    return ClipRecord(plan.site, plan.index, measured, gamma, predicted, logit.isfinite(), plan.shared, plan.refused)


def _check_shapes(scaled: dict[str, Tensor], factors: dict[str, list[tuple[HeadRows, Tensor]]]) -> None:
    """Refuse plans of another model before anything is scaled."""
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
) -> dict[str, list[tuple[HeadRows, Float[Tensor, " Hq"]]]]:
    """Return, for each parameter that is scaled, its rows and the factor of each head."""
    # gamma^balance * gamma^(1 - balance) = gamma on the product. Rotated channels that all heads share in k (multi-head
    # latent attention) can't be scaled for one head, so q takes their whole gamma.
    powers = {"q": balance, "k": 1.0 - balance, "whole": 1.0}
    factors: dict[str, list[tuple[HeadRows, Tensor]]] = defaultdict(list)
    for plan, by in zip(plans, gamma, strict=True):
        for rows in plan.rows:
            factors[rows.name].append((rows, by ** powers[rows.side]))
    return factors


# -- arguments --------------------------------------------------------------------------------------------------------


def bound(threshold: Any) -> float:
    """Return the threshold as a float.

    Raises:
        InvalidTypeError: It is not a number.
        InvalidValueError: It is not finite, or not above 0.

    Example:
        >>> bound(100)
        100.0
    """
    return finite_number("threshold", threshold, above=0.0)


def checked_balance(balance: Any) -> float:
    """Return the balance (the query's share of the clip) as a float.

    Raises:
        InvalidTypeError: It is not a number.
        InvalidValueError: It is below 0 or above 1.

    Example:
        >>> checked_balance(1)
        1.0
    """
    of_query = finite_number("balance", balance)
    if not 0.0 <= of_query <= 1.0:
        raise InvalidValueError(f"balance is from 0 to 1; got {of_query:g}", hint="0.5 shares evenly.")
    return of_query


def _checked(plans: Sequence[CallPlan], maxima: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the maxima as floating tensors on the device of the weights; NaN for a call that did not run."""
    if len(plans) != len(maxima):
        raise InvalidValueError(
            f"there are maxima for each plan; got {len(maxima)} for {len(plans)}",
            hint="None stands for a call not run.",
        )
    beside = [rows.index.device for plan in plans for rows in plan.rows]
    device = next(iter(beside), torch.device("cpu"))
    # MPS has no float64
    dtype = torch.float32 if device.type == "mps" else torch.float64
    tensors = []
    for plan, each in zip(plans, maxima, strict=True):
        # NaN is not above any threshold, so that a head without a maximum keeps its weights.
        if each is None:
            each = torch.full((plan.heads,), math.nan)
        if tuple(each.shape) != (plan.heads,):
            raise InvalidValueError(
                f"maxima of {plan.site or 'the root'} have one number a head, ({plan.heads},); got {tuple(each.shape)}",
                hint="Take the largest over batch and rows.",
            )
        tensors.append(each.detach().to(device=device, dtype=dtype))
    return tensors

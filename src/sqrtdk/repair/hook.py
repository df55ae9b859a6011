"""QK-clip after every optimizer step, by the maxima of the forward passes since the previous step."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from sqrtdk.repair.clip import ClipRecord, LogitMaxima, bound, checked_balance, clip_, qk_clip_
from sqrtdk.repair.masters import Optimizers
from sqrtdk.repair.plan import grouped, is_broken, plan_of
from sqrtdk.repair.ranks import Ranks, gathered, is_group, merged
from sqrtdk.repair.rows import CallPlan
from sqrtdk.repair.watched import StepWatch
from sqrtdk.tracing import Trace
from sqrtdk.tracing.trace import trace

Key = tuple[str, int]


class QKClip:
    """Clips a model after each step, attached to an optimizer or called by the loop.

    The model's training forwards are traced, on every step or on every n-th, at the cost of a trace. If a watch
    measures the maxima anyway, pass it as `stats`, and call `step(optimizer)` after the watch's own step: nothing is
    traced then. Forwards in eval mode do not count. Several forwards before a step give the largest maxima. For a
    compiled model pass the result of `torch.compile(model)`: on traced steps it runs eagerly.

    Args:
        model: the module whose forward runs; for DistributedDataParallel its `.module`.
        threshold: see `qk_clip_`.
        balance: see `qk_clip_`.
        every: steps from one clip to the next, at least 1.
        group: ranks whose maxima are merged, see `qk_clip_`; each of them must step equally often. An attention is
            clipped only once all of them have met it.
        stats: a watch, or an object with `plans` and `maxima`, read at each step.

    Attributes:
        records: of the last step that clipped; empty before.

    Raises:
        InvalidTypeError: An argument has another type.
        InvalidValueError: A threshold, a balance or an `every` is out of its range.

    Example:
        >>> layer = nn.MultiheadAttention(32, 4, batch_first=True)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> clip = QKClip(layer, threshold=5.0).attach(optimizer)
        >>> x = 20 * torch.randn(1, 6, 32)
        >>> layer(x, x, x)[0].square().mean().backward()
        >>> optimizer.step()
        >>> clip.records[0].predicted.max().item() <= 5.0 + 1e-12
        True
        >>> clip.remove()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        threshold: float = 100.0,
        balance: float = 0.5,
        every: int = 1,
        group: Ranks = None,
        stats: LogitMaxima | StepWatch | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidTypeError(f"model is an nn.Module; got {type(model).__name__}", hint="Pass the model itself.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidValueError(f"every is a number of steps from 1; got {every!r}", hint="1 clips at each step.")
        if stats is not None and not isinstance(stats, LogitMaxima | StepWatch):
            raise InvalidTypeError(
                f"stats is a watch, or has `plans` and `maxima`; got {type(stats).__name__}",
                hint="Without it forwards are traced.",
            )
        self.records: tuple[ClipRecord, ...] = ()
        self._model, self._threshold, self._balance = model, bound(threshold), checked_balance(balance)
        self._every, self._group, self._stats = every, group, stats
        self._steps = 0
        self._run: Trace | None = None
        self._plans: dict[Key, CallPlan] = {}
        self._maxima: dict[Key, Tensor] = {}
        self._unplanned = True
        self._attached = False
        self._handles: list[Any] = []
        if stats is None:
            self._handles.append(model.register_forward_pre_hook(self._begin))
            # Also if the forward pass raises: otherwise the trace would stay open for all that runs afterwards.
            self._handles.append(model.register_forward_hook(self._end, always_call=True))

    def attach(self, optimizer: torch.optim.Optimizer) -> QKClip:
        """Clip after each step of an optimizer; its own copies of the weights are clipped as well.

        Raises:
            InvalidTypeError: The optimizer takes no hooks.
            InvalidValueError: `stats` is a watch, which has its maxima only after the step; or another optimizer is
                attached, as neither of the two knows when both have stepped.
        """
        if isinstance(self._stats, StepWatch):
            raise InvalidValueError(
                "a hook of the optimizer runs within the step; a watch has its maxima once watch.step() has ended it",
                hint="Call clip.step(optimizer) after watch.step(loss).",
            )
        if self._attached:
            raise InvalidValueError(
                "one optimizer is attached, and a step is over when all have made theirs",
                hint="Call clip.step([one, other]) after the last of them.",
            )
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):  # a wrapper, such as accelerate's, may take no hooks itself
            return self.attach(inner)
        if not hasattr(optimizer, "register_step_post_hook"):
            raise InvalidTypeError(
                f"an optimizer with register_step_post_hook is needed; got {type(optimizer).__name__}",
                hint="Call step(optimizer) after each of its steps.",
            )
        self._handles.append(optimizer.register_step_post_hook(self._after))
        self._attached = True
        return self

    def step(self, optimizer: Optimizers = None) -> tuple[ClipRecord, ...]:
        """Clip by the measurements since the last step.

        Args:
            optimizer: its copies of the weights are scaled as well.

        Returns:
            The records; empty if this step is not due, or nothing was measured.
        """
        # Counted from the first step, so that a run of any length is clipped once at least.
        due = self._steps % self._every == 0
        self._steps += 1
        if not due:
            return ()
        options: Any = {"optimizer": optimizer}
        if self._stats is not None:
            group = self._group if isinstance(self._stats, StepWatch) else None
            records = qk_clip_(self._model, self._stats, self._threshold, self._balance, group=group, **options)
            self.records = records or self.records
            return records
        plans, maxima = self._measured()
        self._maxima.clear()
        if all(one is None for one in maxima):
            return ()
        self.records = clip_(self._model, plans, maxima, self._threshold, self._balance, **options)
        return self.records

    def _measured(self) -> tuple[tuple[CallPlan, ...], list[Tensor | None]]:
        """Return plans and maxima, equal on every rank: of the attentions that all ranks know."""
        each = [self._maxima.get(key) for key in self._plans]
        if not is_group(self._group):
            merged([], [], self._group)  # raises for an invalid group, and for no group in several processes
            return tuple(self._plans.values()), each
        lists = {key: None if one is None else one.tolist() for key, one in zip(self._plans, each, strict=True)}
        own = {key: (plan.heads, plan.refused, lists[key]) for key, plan in self._plans.items()}
        of_ranks = gathered(own, self._group)
        # In the same order on every rank, because the plans are paired by their place afterwards.
        known = sorted(
            key for key in own if all(key in others and others[key][0] == own[key][0] for others in of_ranks)
        )
        plans, maxima = [], list[Tensor | None]()
        for key in known:
            refused = next((others[key][1] for others in of_ranks if others[key][1] is not None), None)
            plan = self._plans[key]
            plans.append(plan if refused is None else replace(plan, rows=(), shared=(), refused=refused))
            of_head = [
                torch.tensor(others[key][2], dtype=torch.float64) for others in of_ranks if others[key][2] is not None
            ]
            maxima.append(functools.reduce(torch.maximum, of_head) if of_head else None)  # torch.maximum keeps NaN
        return grouped(plans), maxima

    def remove(self) -> None:
        """Remove all hooks from the model and the optimizer; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._attached = False

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.step(optimizer)

    def _begin(self, model: nn.Module, _: Any) -> None:
        # Evaluation has other data and no step after it. A recursive call, as of a checkpointed block, must not begin a
        # second trace.
        if model.training and self._run is None and self._steps % self._every == 0:
            run = trace(model, numeric=False, keep=self._unplanned)
            try:
                run.__enter__()
            except RuntimeError as error:  # from torch, if dynamo runs the forward
                raise UnsupportedError(
                    f"the forward of {type(model).__name__} runs inside a compiled region, which can't be traced",
                    hint="Give QKClip what torch.compile(model) returned, or maxima as `stats`.",
                ) from error
            self._run = run

    def _end(self, model: nn.Module, _: Any, output: Any) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.__exit__(None, None, None)
        calls = {(call.site, call.index): call for call in run.calls}
        # The tensors of a call are kept for the first step in which it runs; afterwards its maxima are enough.
        if run.tensors and not calls.keys() <= self._plans.keys():
            self._add(plan_of(model, run), broken=any(map(is_broken, run.tensors)))
        self._unplanned = not self._plans or not calls.keys() <= self._plans.keys()
        for key, call in calls.items():
            if call.stats is not None:
                largest = torch.tensor(call.stats.max_logit, dtype=torch.float64)
                self._maxima[key] = torch.maximum(largest, self._maxima.get(key, largest))

    def _add(self, plans: tuple[CallPlan, ...], broken: bool) -> None:
        """Add plans of new calls; each refusal is warned of once.

        In a forward with `broken` numbers, these may be the cause of a refusal: such calls wait for the next forward.
        """
        # With NaN in q or k a refusal says nothing about the model, and the call is planned again at the next step.
        asked = {(plan.site, plan.index): plan for plan in plans if not (broken and plan.refused)}
        fresh = {key: plan for key, plan in asked.items() if key not in self._plans}
        refused = [f"{plan.site or 'the root'}: {plan.refused}" for plan in fresh.values() if plan.refused]
        if refused:
            warnings.warn(f"{len(refused)} of {len(fresh)} attentions can't be clipped: {refused[0]}", stacklevel=2)
        every = self._plans | fresh
        self._plans = dict(zip(every, grouped(list(every.values())), strict=True))

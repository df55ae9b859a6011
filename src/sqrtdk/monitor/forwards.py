"""The forward passes of a sampled step: each one is traced, and what their rows sum up to is added up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from sqrtdk.audit.rules.entropy import norm_sigma
from sqrtdk.errors import kind_and_text
from sqrtdk.monitor.gradients import Gradients, Projected
from sqrtdk.monitor.samples import AS_IS, EAGER, CallSample, not_measured
from sqrtdk.monitor.sums import HeadSums, head_sums, joined, table
from sqrtdk.tracing.records import BLOCKS, DATA, ROWS, AttentionCall
from sqrtdk.tracing.tell.finish import MostRows
from sqrtdk.tracing.tensors import CallRows, Projection
from sqrtdk.tracing.trace import Trace
from sqrtdk.tracing.watch.stance import eager_compiler

Place = tuple[str, int]
NO_FORWARD = "no forward pass of the model was seen"


class Forwards:
    """Sees the forward passes of a model while its context is open; nothing is put on the model.

    Attributes:
        most: rows of a sequence that are measured; None: all.
    """

    def __init__(self, model: nn.Module, rows: int | None) -> None:
        self._model = model
        self.most = rows
        self._projections: dict[nn.Module, list[Projected]] | None = None
        self._ratios: dict[Place, tuple[str, float | None]] = {}
        self._calls: dict[Place, list[tuple[AttentionCall, CallRows | None]]] = {}
        self._missed: list[str] = []
        self._gradients = Gradients({})
        self._trace: Trace | None = None
        self._depth = 0
        self._seen = 0
        self._ignoring = 0
        self._thread = threading.get_ident()
        self._open = ExitStack()

    def __enter__(self) -> Forwards:
        self._calls, self._missed, self._seen, self._depth = {}, [], 0, 0
        self._thread = threading.get_ident()
        self._gradients = Gradients(self._projections or {})
        with ExitStack() as stack:
            stack.enter_context(eager_compiler())
            stack.enter_context(self._gradients)
            before = torch_module.register_module_forward_pre_hook(self._begins)
            stack.callback(before.remove)
            after = torch_module.register_module_forward_hook(self._ends, always_call=True)
            stack.callback(after.remove)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()
        self._open.close()

    @property
    def seen(self) -> int:
        """Forward passes since the context was opened."""
        return self._seen

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """A block whose forward passes are not seen."""
        self._ignoring += 1
        try:
            yield
        finally:
            self._ignoring -= 1

    # -- one forward pass ------------------------------------------------------------------------------------------

    def _ours(self, module: nn.Module) -> bool:
        return module is self._model and threading.get_ident() == self._thread

    def _begins(self, module: nn.Module, args: Any) -> None:
        if not self._ours(module):
            return
        self._depth += 1
        if self._depth > 1 or self._ignoring:
            return
        self._seen += 1
        first = self._projections is None
        try:
            trace = Trace(self._model, stats=False, numeric=first, rows=MostRows(self.most), projections=first)
            trace.__enter__()
        except Exception as error:  # an observer never stops the run
            self._missed.append(f"the trace did not begin: {kind_and_text(error)}")
            return
        self._trace = trace

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._ours(module):
            return
        self._depth -= 1
        if self._depth == 0:
            self._end()

    def _end(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        try:
            trace.__exit__(None, None, None)
        except Exception as error:
            self._missed.append(f"the trace did not end: {kind_and_text(error)}")
            return
        for call, rows in zip(trace.calls, trace.rows, strict=True):
            self._calls.setdefault((call.site, call.index), []).append((call, rows))
        self._missed += [f"{entry.site}: {entry.reason}" for entry in trace.not_measured]
        if self._projections is None:
            self._projections = _by_module(self._model, trace)

    # -- the step --------------------------------------------------------------------------------------------------

    def summarised(self) -> tuple[tuple[CallSample, ...], str, tuple[str, ...]]:
        """The calls of the step, how it ran, and what was not measured."""
        if not self._seen:
            return (), not_measured(NO_FORWARD), tuple(self._missed)
        with torch.no_grad():
            sums = {place: self._sums(place, parts) for place, parts in self._calls.items()}
            known = {place: one for place, one in sums.items() if one is not None}
            columns = dict(zip(known, table(list(known.values())), strict=True))
        calls = []
        for place, parts in self._calls.items():
            call = parts[0][0]
            reason = None if place in columns else call.stats_reason or "its rows were not measured"
            calls.append(_sample(call, columns.get(place, {}), reason))
        self._calls = {}
        how = EAGER if _compiled(self._model) else AS_IS
        return tuple(calls), how, tuple(dict.fromkeys(self._missed))

    def _sums(self, place: Place, parts: list[tuple[AttentionCall, CallRows | None]]) -> HeadSums | None:
        rows = [one for _, one in parts if one is not None]
        if len(rows) < len(parts):
            return None
        found = joined([head_sums(one) for one in rows])
        gradients = (self._gradient(place, name) for name in ("query", "key"))
        return found.with_gradients(*gradients)

    def _gradient(self, place: Place, name: str) -> Tensor | None:
        parts = self._gradients.rows.get((*place, name))
        return torch.cat(parts, -1) if parts else None


def _sample(call: AttentionCall, columns: Mapping[str, Sequence[float]], reason: str | None) -> CallSample:
    factors = call.scale.factors
    return CallSample(
        site=call.site,
        index=call.index,
        heads=call.heads,
        columns=columns,
        scale_ratio=call.scale.ratio,
        formula=call.formula,
        reason=reason,
        logits_dtype=call.logits_dtype,
        stored=call.kind == "eager",
        factors=tuple(sorted(f"{factor.where}: {factor.source}" for factor in factors)),
        fixed_scale=not any(factor.learned or factor.source in (ROWS, DATA, BLOCKS) for factor in factors),
        norm_sigma=norm_sigma(call),
    )


def _by_module(model: nn.Module, trace: Trace) -> dict[nn.Module, list[Projected]]:
    """The modules whose outputs hold q and k, and where in them."""
    modules = dict(model.named_modules())
    found: dict[nn.Module, list[Projected]] = {}
    for call, pair in zip(trace.calls, trace.projections, strict=True):
        for name, projection in zip(("query", "key"), pair, strict=True):
            module = _module_of(projection, modules)
            if module is not None and projection is not None:
                place = (call.site, call.index, name)
                found.setdefault(module, []).append(Projected(place, projection.features))
    return found


def _module_of(projection: Projection | None, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The module that holds a projection's weight and returns what it gave."""
    path, _, name = projection.name.rpartition(".") if projection is not None else ("", "", "")
    module = modules.get(path)
    return module if name == "weight" and module is not None and not list(module.children()) else None


def _compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )

"""The forward passes of a sampled step: each is traced, and the statistics of its rows are summed.

If some passes of a step run with autograd, those without it (an evaluation, the text that a policy generates) do not
belong to the step. They are left out, with a note. If none runs with autograd, all count. Once a run had steps with
autograd, passes without it are not traced at all.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch
import torch._dynamo  # a model may be compiled within a sampled step; an optimizer imports it anyway
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from sqrtdk._modes import eager_compiler, in_backward_pass
from sqrtdk._sites import ROOT_NAME
from sqrtdk._wrappers import named_modules
from sqrtdk.errors import kind_and_text
from sqrtdk.laws.backward.traced import TracedHandles
from sqrtdk.messages import Message
from sqrtdk.messages import joined as joined_names
from sqrtdk.monitor.backward import BackwardCheck
from sqrtdk.monitor.first_nonfinite import NonfiniteSearch
from sqrtdk.monitor.gradients import Gradients, Projected, can_project, module_of, share_features, was_compiled
from sqrtdk.monitor.samples import AS_IS, EAGER, not_measured, with_place
from sqrtdk.monitor.scales import ScaleFaults
from sqrtdk.monitor.sums import CallParts, WatchedCall, WatchedStep, head_sums, join_rows, traits_of
from sqrtdk.monitor.updates import ProjectionUpdate
from sqrtdk.tracing import CallTensors, ProjectionGradients, RowLimit, Sites, Trace, sketch_of, unseen

Place = tuple[str, int]
MAX_PASSES_A_STEP = 1024  # forward passes of one step; a loop that never calls step() must not fill the memory


class StepTracer:
    """Traces the forward passes of a model while its context is open; the model itself is not changed.

    Attributes:
        most: rows of a sequence that are measured; None: all.
        keeps_rows: keep all rows until the step ends, because the keys of a row lie on several ranks.
        whole_rows: rows whose q, k or v went through a collective count: the user says how the ranks split the work.
        passes: number of forward passes since the step began.
        sketches: where q and k come from, for each attention examined in this step.
    """

    def __init__(self, model: nn.Module, rows: int | None, optimizers: tuple[Any, ...] = ()) -> None:
        self._model, self._optimizers = model, optimizers
        self._update, self._scales = ProjectionUpdate(model, optimizers), ScaleFaults(model)
        self.most = rows
        self.keeps_rows = self.whole_rows = False
        self._projections: dict[nn.Module, list[Projected]] = {}
        # q and k that no module returns, or a module returns several times
        self._by_root: dict[tuple[str, int, str], Projected] = {}
        self._labels: dict[nn.Module, str] = {}  # names of the weights whose modules return q or k
        self._times: Counter[nn.Module] = Counter()  # calls of these modules in the current pass
        # modules that return a DTensor, whose gradients do not reach the trace's nodes
        self._of_mesh: set[nn.Module] = set()
        self._weights: set[str] = set()  # names of the weights that project the vectors of `_by_root`
        self._without: list[str] = []  # messages on attentions whose projection is unknown, until they are reported
        # places whose gradients should come; a place is removed once they did not
        self._expected: set[tuple[str, int, str]] = set()
        self._known: set[Place] = set()
        self._looks = True  # whether the step looks for projections
        self._asked = self._answered = False  # a search in every attention of one step was asked for; has begun
        self._unknown_sites: set[Place] = set()  # attentions that ran in this step while no search was on
        self._before: set[Place] = set()  # the same of the previous step
        self._by_numbers = False
        self._scaled: set[Place] = set()  # attentions whose scale was known once
        self._trains = False  # whether a step had passes with autograd
        self._thread = threading.get_ident()
        self._sites, self._open, self._ends_trace = Sites(None), ExitStack(), ExitStack()
        self._trace: Trace | None = None
        self._backward: BackwardCheck | None = None
        self._depth = 0
        self._part: nn.Module | None = None  # the part of the model that a backward pass recomputes now
        self._part_trace: Trace | None = None
        self._part_depth = self._judged = 0  # steps whose backward passes were judged
        self.begin()

    def begin(self, loss_scale: float = 1.0, *, gradient: bool = False) -> None:
        """Begin a step.

        Args:
            loss_scale: factor on the loss before the backward pass.
            gradient: whether the backward passes of the attentions are judged.
        """
        self._found: dict[Place, CallParts] = {}
        if self._backward is not None:
            self._backward.close()
        self._judged += gradient
        self._backward = BackwardCheck(self._model, self._judged - 1) if gradient else None
        self._missed: list[str] = []
        self._before, self._unknown_sites = self._unknown_sites, set()
        if self._answered:
            self._asked = self._answered = False
        self._looks = self._should_look()
        self.passes = self._skipped_passes = 0
        self.sketches: dict[Place, CallTensors] = {}
        self._eager = self._with_autograd = False
        self._late = False  # something ran without autograd, and may be recomputed with it
        self._gradients = Gradients(self._asks, self._places, self.most, loss_scale)
        self._search = NonfiniteSearch()
        self._update = ProjectionUpdate(self._model, self._optimizers, self._update)

    def look(self) -> None:
        """Ask the next sampled step to search again for the projections of q and k, even in known attentions."""
        self._asked = self._looks = True

    def _should_look(self) -> bool:
        return self._asked or not self._known or not (self._unknown_sites | self._before) <= self._known

    def __enter__(self) -> StepTracer:
        self._depth, self._thread = 0, threading.get_ident()
        with ExitStack() as stack:
            # Compiled regions run eagerly in a sampled step, as no trace can see inside them.
            stack.enter_context(eager_compiler())
            self._sites = stack.enter_context(Sites(self._model))
            stack.enter_context(self._gradients)
            # Global hooks: hooks on each module would change the model, and a compiled one would be compiled anew.
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
        self._part_depth = 0
        self._part_ends(None)
        self._open.close()

    # -- one forward pass ------------------------------------------------------------------------------------------

    def _asks(self, module: nn.Module) -> bool:
        """Return whether the module's output may hold q or k, in a pass that counts or a recomputation of one."""
        may_hold = can_project(module) if self._looks else module in self._projections
        return may_hold and (in_backward_pass() or (self._depth > 0 and threading.get_ident() == self._thread))

    def _places(self, module: nn.Module) -> list[Projected]:
        return self._projections.get(module, [])

    def _begins(self, module: nn.Module, args: Any) -> None:
        """Handle the start of a module's forward; open a trace if it is the model and the pass is to be measured."""
        if in_backward_pass():
            self._part_begins(module)
            return
        if threading.get_ident() != self._thread:
            return
        if module is self._model:
            self._depth += 1
        if not self._depth:
            return
        self._eager = self._eager or was_compiled()
        self._late = self._late or not torch.is_grad_enabled()
        if module is not self._model or self._depth > 1:
            if self._trace is not None:
                self._search.begins(module, args)
            return
        self.passes += 1
        self._times.clear()
        if not self._counts(torch.is_grad_enabled()):
            return
        if self.passes - self._skipped_passes > MAX_PASSES_A_STEP:
            self._missed.append(Message("alarms.unmeasured.too_many", number=MAX_PASSES_A_STEP))
            return
        try:
            # The factors of the scale are known after the first look; a slope by values costs a product of all rows.
            numeric, rows = self._looks or self._by_numbers, RowLimit(self.most)
            self._ends_trace.enter_context(self._scales.watching(self._looks))
            trace = self._ends_trace.enter_context(self._traced(numeric=numeric, rows=rows, projections=self._looks))
        except Exception as error:  # an observer never stops the run
            self._missed.append(Message("alarms.unmeasured.trace_not_begun", error=kind_and_text(error)))
            return
        self._trace = trace
        self._search.pass_begins()
        self._search.begins(module, args)

    def _traced(self, **options: Any) -> AbstractContextManager[Trace]:
        weights = None if self._looks else self._weights
        gradients = ProjectionGradients(weights, self._gradients.come) if self._looks or weights else None
        options |= {"stats": False, "sites": self._sites, "gradients": gradients}
        if self._backward is not None and self._backward.waits() and not in_backward_pass():
            return self._backward.begin(**options)
        return Trace(self._model, **options)

    def _counts(self, with_autograd: bool) -> bool:
        """Return whether the new pass belongs to the step. The first pass with autograd discards those before it."""
        if with_autograd and not self._with_autograd:
            self._with_autograd = self._trains = True
            # The first pass with autograd is the training; passes before it (a target network, generation) are dropped.
            self._skipped_passes, self._found, self._missed, self._search = self.passes - 1, {}, [], NonfiniteSearch()
        if with_autograd or not (self._with_autograd or self._trains):
            return True
        self._skipped_passes += 1
        return False

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """Handle the end of a module's forward; close the trace if it was the model's outermost call."""
        if in_backward_pass():
            self._part_ends(module)
            return
        if threading.get_ident() != self._thread:
            return
        if self._depth and self._asks(module):
            self._times[module] += 1
            if getattr(output, "placements", None) is not None:
                self._of_mesh.add(module)
        if self._trace is not None:
            self._search.ends(module, output, self._trace.so_far)
        if module is not self._model:
            return
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._end()

    def _end(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        try:
            self._ends_trace.close()
            with torch.no_grad(), unseen():
                if self._backward is not None and isinstance(trace, TracedHandles):
                    self._backward.add(trace)
                self._add(trace)
            self._search.pass_ends(trace)
            self._update.begin({*self._labels.values(), *self._weights})
        except Exception as error:
            self._missed.append(Message("alarms.unmeasured.trace_not_ended", error=kind_and_text(error)))

    def _part_begins(self, module: nn.Module) -> None:
        """Trace a recomputed part of the model: tensors that first ran without autograd have gradients only here."""
        self._part_depth += module is self._part
        if self._part is not None or not (self._weights and self._late):
            return
        try:
            self._sites.follow_here(module)
            self._part_trace = self._traced(numeric=False).__enter__()
            self._part, self._part_depth = module, 1
        except Exception as error:
            self._missed.append(Message("alarms.unmeasured.again_not_begun", error=kind_and_text(error)))

    def _part_ends(self, module: nn.Module | None) -> None:
        self._part_depth -= module is self._part
        trace = self._part_trace
        if trace is None or self._part_depth:
            return
        self._part = self._part_trace = None
        self._sites.follow(self._thread)
        try:
            trace.__exit__(None, None, None)
            self._root(trace, part=True)
        except Exception as error:
            self._missed.append(Message("alarms.unmeasured.again_not_ended", error=kind_and_text(error)))

    def _root(self, trace: Trace, *, part: bool = False) -> None:
        """Hand the trace's nodes that hold q and k to the gradients, for vectors that no module returns."""
        here, all_calls = (Counter(site for site, _ in places) for places in (_places_of(trace), self._known))
        for call, pair in zip(trace.calls, trace.roots, strict=True):
            site = call.site
            # the recomputation counts its calls from 0, so which calls they are is unknown
            if part and here[site] < all_calls[site]:
                lost = {place for place in self._by_root if place[0] == site} & self._expected
                if lost:
                    self._missed.append(with_place(site or ROOT_NAME, Message("alarms.unmeasured.which_call")))
                self._expected -= lost
                continue
            for name, serial, length in zip(("query", "key"), pair, (call.query_len, call.key_len), strict=True):
                projected = self._by_root.get((site, call.index, name))
                if projected is not None and serial is not None:
                    self._gradients.root(serial, projected, length)

    def _add(self, trace: Trace) -> None:
        """Add the calls of a pass to the step, and decide whether the next pass must be examined closely."""
        for call, rows, whole in zip(trace.calls, trace.rows, trace.whole_rows, strict=True):
            place = call.site, call.index
            attention = self._found.setdefault(place, CallParts(call))
            if rows is None or not (whole or (self.whole_rows and call.part_of_row in ("gathered", "summed"))):
                attention.call, attention.unread = call, True
            else:
                attention.parts.append(head_sums(rows))
                attention.rows += [rows] if self.keeps_rows else []
            if call.scale.ratio is not None:
                self._scaled.add(place)
            elif place in self._scaled:
                self._by_numbers = True  # the factors alone do not give the scale
        self._missed += [with_place(entry.site or ROOT_NAME, entry.reason) for entry in trace.not_measured]
        if self._looks:
            self._missed += self._scales.judge(trace.calls)
            self._locate(trace)
            self.sketches |= {(one.site, one.index): sketch_of(one) for one in trace.tensors}
        self._call_apart()
        self._root(trace)
        self._unknown_sites |= _places_of(trace)
        self._answered = self._asked
        self._looks = self._should_look()

    def _locate(self, trace: Trace) -> None:
        """Find the modules whose outputs hold q and k, and where; otherwise the weights that project them."""
        modules = dict(named_modules(self._model))
        for call, pair in zip(trace.calls, trace.projections, strict=True):
            site, unknown = call.site, []
            if (site, call.index) in self._known:
                continue
            self._known.add((site, call.index))
            for name, projection in zip(("query", "key"), pair, strict=True):
                module = module_of(projection, modules)
                if projection is None:
                    unknown.append(name)
                    continue
                place = (site, call.index, name)
                projected = Projected.of(place, projection.features)
                self._expected.add(place)
                if module is not None:
                    self._projections.setdefault(module, []).append(projected)
                    self._labels[module] = projection.name
                else:
                    self._by_root[place] = projected
                    self._weights.add(projection.name)
            if unknown:
                text = Message("alarms.unmeasured.no_projection", names=joined_names(unknown, "and"))
                self._without.append(with_place(site or ROOT_NAME, text))

    def _call_apart(self) -> None:
        """Tell apart what several calls of a module, or modules that share a weight, return: by nodes of the trace."""
        several = [one for one, places in self._projections.items() if self._times[one] > 1 or share_features(places)]
        for module in several:
            by_place = {projected.place: projected for projected in self._projections.pop(module)}
            label = self._labels.pop(module)
            if module in self._of_mesh:
                self._expected -= by_place.keys()
                self._without.append(with_place(label, Message("alarms.unmeasured.sharded")))
            else:
                self._by_root |= by_place
                self._weights.add(label)

    # -- the step --------------------------------------------------------------------------------------------------

    def watched_step(self) -> WatchedStep:
        """Return what was measured in the step that ends, and forget it.

        These are the attentions, how the step ran, what was not measured, the first output that was not finite, and the
        relative change of the weights with the learning rate.
        """
        with torch.no_grad():
            calls = tuple(self._call(place, attention) for place, attention in self._found.items())
        moved, drift = self._update.changes()
        faults, unjudged = self._backward.close() if self._backward is not None else ((), [])
        missed = [*self._missed, *unjudged, *self._gradients.failures, *self._search.failures, *self._update.failures]
        if self._skipped_passes:
            missed.append(Message("alarms.unmeasured.without_autograd", forwards=self._skipped_passes))
        if self._with_autograd:
            missed += self._without + self._absent()
            self._without = []
        how = EAGER if self._eager else AS_IS
        if not calls:
            nothing = "alarms.unmeasured.no_attention" if self.passes else "alarms.unmeasured.no_forward"
            how = not_measured(missed[0] if missed else Message(nothing))
        self._found = {}
        first, modules = self._search.first(self._model), self._search.looked_at()
        told, rate = tuple(dict.fromkeys(missed)), self._update.learning_rate
        return WatchedStep(calls, how, told, None, (), first, modules, moved, rate, faults, drift)

    def _absent(self) -> list[str]:
        """Return messages on places without gradients in a step where others had them; each is returned once."""
        came = set(self._gradients.rows)
        absent = {place for place in self._expected - came if place[:2] in self._found} if came else set()
        self._expected -= absent
        places = sorted((site or ROOT_NAME, name) for site, _, name in absent)
        return [with_place(site, Message("alarms.unmeasured.frozen", name=name)) for site, name in places]

    def _call(self, place: Place, attention: CallParts) -> WatchedCall:
        call, sums = attention.call, None
        reason = call.stats_reason or Message("alarms.unmeasured.rows")
        if not attention.unread:
            try:
                gradients = (self._gradient(place, name) for name in ("query", "key"))
                sums = join_rows(attention.parts).with_gradients(*gradients)
            except Exception as error:  # other ranks wait for this one's row
                reason = Message("alarms.unmeasured.row_sums", error=kind_and_text(error))
        why = None if sums is not None else reason
        rows, traits = tuple(attention.rows), traits_of(call, self._scales.of(call))
        return WatchedCall(*place, call.heads, call.scale.ratio, call.formula, sums, why, rows, traits)

    def _gradient(self, place: Place, name: str) -> Tensor | None:
        parts = self._gradients.rows.get((*place, name))
        return torch.cat(parts, -1) if parts else None


def _places_of(trace: Trace) -> set[Place]:
    return {(call.site, call.index) for call in trace.calls}

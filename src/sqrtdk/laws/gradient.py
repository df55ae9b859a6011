"""Law `gradient`: autograd gives the gradients of the attention's formula.

Changed: nothing. The model runs once in train mode with autograd, dropout included. At each attention a random
gradient of its output (and of its lse, where something reads it) goes back through the graph to q, k, v, to biases,
sinks and learned factors, and is held against the gradients of the formula that the trace read, in float64, within the
rounding of the dtypes (`sqrtdk.laws.backward.formula`). What differs is named if a changed formula gives the run's
gradients (`sqrtdk.laws.backward.faults`). What breaks it: a kernel or an `autograd.Function` whose backward pass
forgets a scale, a mask, the sum over a group, sinks or lse; a `detach`; a buffer that is written over.

A half-precision model is asked as a float32 copy and as it is. A fused kernel does not tell what it dropped, so such an
attention runs again with dropout off. Frozen projections are left out.
Not asked: if nothing trains, if an attention's formula or its tensors are unknown, if autograd refuses; of a program of
another framework that only runs forward here. If no law is named, it is asked of the first tokens where these stand for
all, so that it costs no more than the other laws do; of whole inputs only while autograd keeps `MOST_GRAPH_BYTES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from sqrtdk._wrappers import named_parameters
from sqrtdk.audit.guard import training_of
from sqrtdk.audit.records import JudgedCall, LawAnswer
from sqrtdk.errors import INTERRUPTS, kind_and_text
from sqrtdk.laws.answers import law_holds
from sqrtdk.laws.backward.case import OF_LEARNED, QUERY_KEY_VALUE, Fault
from sqrtdk.laws.backward.findings import GradientFinding, answers_to
from sqrtdk.laws.backward.graph import graph_place, nodes_behind, nodes_inside, own_backward
from sqrtdk.laws.backward.handles import Edge, Handle, Reached, edge_of
from sqrtdk.laws.backward.hooks import HooksWatched
from sqrtdk.laws.backward.judge import judge_gradients
from sqrtdk.laws.backward.learned import LearnedParameters
from sqrtdk.laws.backward.lines import BackwardLines, arguments_of, backward_lines, custom_functions
from sqrtdk.laws.backward.operands import (
    at_last_output,
    learned_factors,
    lse_is_cut_off,
    one_tensor,
    operand_edges,
    read_pairs,
    start_of,
    sure_factors,
)
from sqrtdk.laws.backward.passes import delivered_gradients, gradients_between
from sqrtdk.laws.backward.traced import noted
from sqrtdk.laws.first_tokens import stand_for_all
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.laws.training import module_that_trains, seed_all, without_dropout
from sqrtdk.messages import Message, joined
from sqrtdk.models.unchanged import unchanged
from sqrtdk.modules.calls import CallPlace, hooked
from sqrtdk.tracing.tape.stance import fast_path_off
from sqrtdk.tracing.tensors import CallTensors

LAW = "gradient"
LOGITS_COMPUTED = 2**24  # of all attentions together; beyond it some heads stand for all
MOST_GRAPH_BYTES = 2**31  # of a backward pass that nobody has named
_NUMBER_BYTES = 4
_KEPT_OF_LOGITS = 4  # the logits, the weights, those after dropout, and a mask
_KEPT_OF_FEATURES = 32  # what the projections, norms and the MLP of a layer keep of a token, in widths of the model
_MOST_UNJUDGED = 4  # of the parameters that were not judged
_MOST_RESTORED_BYTES = 2**25  # bytes of buffers that train mode may change


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield one answer for each kind of fault, or one that the law is kept.

    Raises:
        NotAsked: Nothing trains, the model can't run in train mode, or no attention could be judged.
    """
    findings: list[GradientFinding] = []
    reasons: list[str] = []
    unjudged: list[str] = []
    judged = count = 0
    for asked in (subject, subject.itself):
        if asked is not None:
            run = _Run(_that_trains(asked))
            judged += run.judge()
            count += run.count
            sites = {one.site for one in findings}  # of a float32 copy: half precision would say it again, less sharply
            findings += [one for one in run.findings if one.site not in sites]
            reasons += run.reasons
            unjudged += [name for name in run.unjudged if name not in unjudged]
    yield from answers_to(LAW, findings)
    if not findings:
        if not judged:
            raise NotAsked(reasons[0] if reasons else Message("laws.gradient.no_graph"), by_length=False)
        notes = [Message("laws.gradient.some", count=count - judged, of=count, reason=reasons[0])] if reasons else []
        if unjudged:
            names = joined(unjudged[:_MOST_UNJUDGED], "comma")
            more = "more_unjudged" if len(unjudged) > _MOST_UNJUDGED else "unjudged"
            notes.append(Message(f"laws.gradient.{more}", names=names, count=len(unjudged) - _MOST_UNJUDGED))
        yield law_holds(LAW, "", joined(notes) if notes else "")


def ask_within_bounds(subject: Subject) -> Iterator[LawAnswer]:
    """Yield what `ask` does, at no more than the cost of the other laws: of the first tokens, if they stand for all.

    Raises:
        NotAsked: As for `ask`; or the graph of a backward pass would take much memory.
    """
    if (first := subject.first) is not None:
        half = subject.itself
        if half is not None:
            mine = {name: _like(value, half.inputs[name]) for name, value in first.inputs.items()}
            first = first.over(first.inputs)
            first.itself = half.over(mine)
        try:
            answers = list(ask(first))
        except NotAsked as error:
            if not error.by_length:
                raise
        else:
            if stand_for_all(answers):
                yield from answers
                return
    if (size := graph_bytes(subject.calls)) > MOST_GRAPH_BYTES:
        raise NotAsked(Message("laws.gradient.costly", size=f"{size / 2**30:.0f}"), by_length=True)
    yield from ask(subject)


def graph_bytes(calls: Sequence[JudgedCall]) -> int:
    """Return about how many bytes autograd keeps of the layers around some attentions, as if none were fused.

    Example:
        >>> graph_bytes(())
        0
    """
    total = 0
    for call in (judged.call for judged in calls):
        rows = call.batch * call.heads * call.query_len
        total += _NUMBER_BYTES * rows * (_KEPT_OF_LOGITS * call.key_len + _KEPT_OF_FEATURES * call.head_dim)
    return total


def _like(value: Any, other: Any) -> Any:
    return value.to(other.dtype) if isinstance(value, Tensor) and isinstance(other, Tensor) else value


def _that_trains(subject: Subject) -> Subject:
    """Return the subject with a module that has a backward pass.

    Raises:
        NotAsked: It has none, or nothing in it trains.
    """
    module = module_that_trains(subject.module)
    if module is None:
        framework = getattr(subject.module, "framework", "").partition(" ")[0]
        raise NotAsked(
            Message("laws.gradient.forward_alone", framework=framework) if framework
            else Message("laws.gradient.graph_alone")
        )  # fmt: skip
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise NotAsked(Message("laws.gradient.nothing_trains"))
    if torch.is_inference_mode_enabled() or any(parameter.is_inference() for parameter in module.parameters()):
        raise NotAsked(Message("laws.gradient.inference"))
    if module is subject.module:
        return subject
    trained = subject.over(subject.inputs)
    trained.module = module
    return trained


@dataclass(slots=True, eq=False)
class _Run:
    """A run of the model.

    Attributes:
        subject: The model.
        findings: Filled by `judge`.
        reasons: Why attentions were not judged.
        count: Number of attentions.
        unjudged: Operands and parameters that were not judged, and in how many attentions.
        readers: How many attentions have each parameter on the way to their logits.
        factors: How many attentions read a learned factor; of one that several read each has a part of the gradient.
    """

    subject: Subject
    findings: list[GradientFinding] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    count: int = 0
    factors: Counter[str] = field(default_factory=Counter)
    readers: Counter[str] = field(default_factory=Counter)
    unjudged: Counter[str] = field(default_factory=Counter)

    def judge(self) -> int:
        """Judge every attention; return of how many the backward pass was looked at."""
        with ExitStack() as stack:
            pairs = self._pairs(stack, dropout=True)
            again: list[tuple[CallTensors, Reached | None]] = []
            if any(_dropped_unknown(call) for call, _ in pairs):
                again = self._pairs(stack, dropout=False)
            twins = {(call.site, call.index): (call, reached) for call, reached in again}
            pairs = [
                twins.get((call.site, call.index), (call, reached)) if _dropped_unknown(call) else (call, reached)
                for call, reached in pairs
            ]
            self.count = len(pairs)
            parameters = dict(named_parameters(self.subject.module))
            self.readers.update(
                name
                for _, one in pairs
                if one is not None and one.learned is not None
                for name in one.learned.parameters
            )
            self.factors.update(name for call, _ in pairs for name in learned_factors(call, parameters))
            return sum(self._judged(call, reached, LOGITS_COMPUTED // len(pairs)) for call, reached in pairs)

    def _pairs(self, stack: ExitStack, *, dropout: bool) -> list[tuple[CallTensors, Reached | None]]:
        """Run the model; what the block of `stack` holds must stay until the backward passes are done."""
        module, subject = self.subject.module, self.subject
        # Who asks of a user's module holds its weights; a run in train mode writes to buffers.
        stack.enter_context(unchanged(module, most_copied=_MOST_RESTORED_BYTES, weights=False))
        stack.enter_context(training_of(module, lambda _: True) if dropout else without_dropout(module, lambda _: True))
        seed_all(subject.seed)
        with fast_path_off(), noted(module, parameters=True) as run, _with_autograd(module):
            subject.run({})
        return read_pairs(run)

    def _judged(self, call: CallTensors, reached: Reached | None, most: int) -> bool:
        if reached is None or call.missing is not None:
            self.reasons.append(call.missing or Message("laws.gradient.no_formula"))
            return False
        if reached.output is None or not (reached.handles or reached.projected):
            self.reasons.append(Message("laws.gradient.no_graph"))
            return False
        try:
            with torch.no_grad():
                faults, judged = self._faults(reached, most)
                if faults and reached.rescaled is not None:  # a part of dq and dk comes through its factor
                    faults, judged = self._faults(at_last_output(reached), most)
        except NotAsked as error:
            self.reasons.append(error.reason)
            return False
        except INTERRUPTS:
            raise
        except Exception as error:  # of a backward pass, whose code is the user's
            self.reasons.append(Message("laws.gradient.refused", error=kind_and_text(error, 120)))
            return False
        dtype = "" if self.subject.itself is not None else _half(call.dtype)
        inside = _inside(reached, reached.output) if faults else []
        for fault in faults:
            self.findings.append(GradientFinding(call.site, fault, dtype, *self._place(reached, fault, inside)))
        return judged or bool(faults)

    def _place(self, reached: Reached, fault: Fault, inside: Sequence[Any]) -> tuple[str, BackwardLines]:
        """Return the custom function whose backward pass has a fault, and its lines; "" if the fault is none of it."""
        by, functions = own_backward(inside), custom_functions(inside)
        if not by or len(functions) != 1:
            return by, BackwardLines()
        edges = operand_edges(reached, self.subject.module, {})
        arguments = arguments_of(functions[0], edges)
        wanted = [arguments.get(name, -1) for name in fault.operands]
        if fault.code == "none" and all(name in edges for name in fault.operands) and max(wanted) < 0:
            return "", BackwardLines()  # cut off before the function gets it
        return by, BackwardLines() if min(wanted) < 0 else backward_lines(functions[0], wanted)

    def _faults(self, reached: Reached, most: int) -> tuple[list[Fault], bool]:
        call, parameters = reached.call, dict(named_parameters(self.subject.module))
        assert reached.output is not None
        faults: list[Fault] = []
        for name in QUERY_KEY_VALUE:  # an operand without a graph: frozen, or cut off behind its projection
            if name not in reached.handles and _is_cut_off(reached, name, parameters):
                faults.append(Fault((name,), "none"))
        alone = {n: p for n, p in learned_factors(call, parameters).items() if self.factors[n] == 1}
        factors = sure_factors(reached, alone)
        _take_copies(reached)
        edges = operand_edges(reached, self.subject.module, factors)
        if not edges:
            return faults, bool(faults)
        if without_lse := lse_is_cut_off(reached, edges):
            faults.append(Fault(without_lse, "no_lse"))
        same = one_tensor(edges)
        learned = LearnedParameters.of(reached, edges, parameters, self.readers)
        faults += learned.cut_off(parameters)
        judge = partial(
            judge_gradients, call, lse=reached.lse is not None, factors=factors, same=same, most=most,
            seed=self.subject.seed, dtypes=(reached.output.dtype, *(one.dtype for one in reached.handles.values())),
            learned=learned.formula(),
        )  # fmt: skip
        result = judge(learned.beside(partial(delivered_gradients, reached, edges)))
        if result.faults:
            watched = HooksWatched(reached, edges)
            result = judge(learned.beside(watched))
            if watched.on_the_way:
                raise NotAsked(Message("laws.gradient.hook"))
        self.unjudged.update(learned.unjudged(result))
        self.unjudged.update(
            name
            for name in QUERY_KEY_VALUE
            if name not in reached.handles and start_of(reached, name, parameters) is not None
        )
        if same and result.faults:  # which of two equal tensors is which can't be told
            raise NotAsked(Message("laws.gradient.one_tensor"))
        return _each_once([*faults, *result.faults], edges, parameters), True


def _each_once(
    faults: Sequence[Fault], edges: Mapping[str, Edge], parameters: Mapping[str, nn.Parameter]
) -> list[Fault]:
    """Return the faults, where those without a gradient are one: a bias is said, and no table behind it once more.

    Args:
        faults: The faults of an attention.
        edges: Places of its operands by name.
        parameters: Parameters of the model by name.
    """
    without = [name for fault in faults if fault.code == "none" for name in fault.operands]
    biases = [edges[name] for name in without if name.startswith("bias ")]
    behind = {node for edge in biases for node in nodes_behind(graph_place(edge).node)}
    learned = [name for name in dict.fromkeys(without) if name.startswith(OF_LEARNED)]
    left = [
        name for name in learned
        if graph_place(edge_of(parameters[name.removeprefix(OF_LEARNED)])).node not in behind
    ]  # fmt: skip
    others = [one for one in faults if not (one.code == "none" and one.operands[0] in learned)]
    return [*others, *([Fault(tuple(left), "none")] if left else [])]


def _inside(reached: Reached, output: Handle) -> list[Any]:
    """Return the nodes between the operands and the output."""
    ends = {graph_place(handle.edge).node for handle in reached.handles.values()}
    return nodes_inside([graph_place(output.edge).node], ends)


def _dropped_unknown(call: CallTensors) -> bool:
    return isinstance(call.missing, Message) and call.missing.id == "trace.kept.dropped"


def _half(dtype: str) -> str:
    return dtype if dtype in ("bfloat16", "float16") else ""


@contextmanager
def _with_autograd(module: nn.Module) -> Iterator[None]:
    """Run the forward pass of a module with autograd within the block."""

    def begins(place: CallPlace, args: Any, kwargs: Any) -> None:
        torch.set_grad_enabled(True)

    def ends(place: CallPlace, args: Any, kwargs: Any, output: Any) -> None:
        torch.set_grad_enabled(False)

    enabled = torch.is_grad_enabled()
    try:
        with hooked({"": module}, begins, ends):
            yield
    finally:
        torch.set_grad_enabled(enabled)


def _take_copies(reached: Reached) -> None:
    """Let the handle of an operand be its newest copy that the output reads other than through a computed bias."""
    biases: dict[str, Edge] = {f"bias {number}": edge for number, edge in reached.bias.items()}
    if not any(isinstance(edge, GradientEdge) for edge in biases.values()):
        return
    d_out = torch.randn(reached.call.output.shape, generator=torch.Generator().manual_seed(0))
    for name, copies in reached.copies.items():
        for handle in copies if len(copies) > 1 else ():
            reached.handles[name] = handle
            gradient = delivered_gradients(
                reached, {name: handle.edge, **biases}, d_out.to(handle.device), None, False
            )[name]
            if gradient is not None and bool(gradient.any()):
                break
        else:
            reached.handles[name] = copies[0]


def _is_cut_off(reached: Reached, name: str, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Return whether an operand's projection trains and the attention's output does not reach it."""
    start = start_of(reached, name, parameters)
    if start is None:
        return False
    assert reached.output is not None
    ones = torch.ones(reached.output.sizes, dtype=reached.output.dtype, device=reached.output.device)
    return gradients_between([reached.output.edge], {name: start}, [ones])[name] is None

"""What a user's own backward pass delivers at an attention: hooks on the nodes of the graph, and no pass of our own.

    dO     what reaches the node of the output, from all that reads the output
    dq     the sum of what the nodes between q and the output hand on to the place of q; what else reads q is left out

If something else reads what is computed on the way, as a loss on the weights does, its gradient goes through the same
nodes: then more reaches a node than the nodes before it hand on, and the attention is not judged.

Hooks change no gradient. They die with the graph, which nothing here keeps alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from sqrtdk._wrappers import named_parameters
from sqrtdk.errors import kind_and_text
from sqrtdk.laws.backward.case import QUERY_KEY_VALUE, Fault
from sqrtdk.laws.backward.faults import blind_rows
from sqrtdk.laws.backward.graph import at_end_of_backward, graph_place, nodes_behind, nodes_inside, own_backward
from sqrtdk.laws.backward.handles import Edge, Reached
from sqrtdk.laws.backward.hooks import HOOKED_MODULE, changed_on_a_module
from sqrtdk.laws.backward.judge import judge_delivered
from sqrtdk.laws.backward.operands import (
    copy_is_unsure,
    lse_is_cut_off,
    one_tensor,
    operand_edges,
    start_of,
    sure_factors,
)
from sqrtdk.messages import Message
from sqrtdk.tracing.tensors import CallTensors, Vector

_SUM_ROUNDINGS = 8.0  # by which a sum of gradients may differ from that of autograd, whose order is its own
_OUTPUT, _LSE = "output", "lse"
_Slot = tuple[int, int]  # number of a node inside, and of its output


@dataclass(slots=True, eq=False)
class Delivery:
    """An attention of a forward pass, and the gradients that the backward pass delivers.

    Attributes:
        call: Its tensors, without a graph.
        shaped: By "q", "k", "v", "output" and "lse": from the layout of the run to (B, H, L, E).
        dtypes: Of the output and of the operands in the run.
        factors: Learned factors, as they were in the forward pass.
        same: Pairs of operands that are one tensor.
        by: The custom function of the backward pass; "" for none.
        faults: What is wrong; those of the graph alone are there from the start.
        reason: Why it is not judged; None if it is.
        logits: Logits that are computed at most.
        turn: Where to begin among the heads if that leaves some out.
        unsure: Whether a copy of q may be taken for the one that the product reads.
    """

    call: CallTensors
    shaped: dict[str, Callable[[Tensor], Tensor]]
    dtypes: tuple[torch.dtype, ...]
    factors: dict[str, Tensor]
    same: tuple[tuple[str, str], ...]
    by: str
    faults: list[Fault]
    reason: str | None
    logits: int
    turn: int
    unsure: bool = False
    _hooks: list[Any] = field(default_factory=list)
    _task: int | None = None  # the backward pass that is followed: the first that reaches the output
    _ended: bool = False
    _arrived: dict[str, Tensor] = field(default_factory=dict)
    _executed: set[str] = field(default_factory=set)
    _handed: dict[_Slot, list[Tensor]] = field(default_factory=dict)

    # -- in the backward pass --------------------------------------------------------------------------------------

    def reaches(self, number: int, names: Mapping[int, str], gradients: Sequence[Tensor | None]) -> None:
        """Take what reaches a node inside; `names` says which of its outputs are the attention's."""
        if not self._follows(begins=bool(names)):
            return
        for output, gradient in enumerate(gradients):
            handed = self._handed.pop((number, output), [])
            if output in names:
                if gradient is not None:
                    self._arrived[names[output]] = gradient.detach().clone()
            elif not _is_sum(gradient, handed):
                self.reason = Message("alarms.unmeasured.backward.read_elsewhere")

    def hands_on(self, targets: Sequence[tuple[str, _Slot] | None], gradients: Sequence[Tensor | None]) -> None:
        """Take what a node inside hands on: to operands, by their names, or to other nodes inside."""
        if not self._follows():
            return
        for target, gradient in zip(targets, gradients, strict=True):
            if target is None or gradient is None:
                continue
            name, slot = target
            if not name:
                self._handed.setdefault(slot, []).append(gradient)
            elif name in self._arrived:
                self._arrived[name] = self._arrived[name] + gradient.detach()
            else:  # a copy: some rotations write their own gradient over it
                self._arrived[name] = gradient.detach().clone()

    def executes(self, names: Sequence[str]) -> None:
        """Note that the pass goes on from operands: if it does not, nobody asked for their gradient."""
        if self._follows():
            self._executed.update(names)

    def _follows(self, *, begins: bool = False) -> bool:
        task = torch._C._current_graph_task_id()
        if begins and self._task is None and not self._ended:
            self._task = task
            at_end_of_backward(self._judge)
        return self._task == task and not self._ended and self.reason is None

    def _judge(self) -> None:
        if self._ended:
            return
        try:
            with torch.no_grad():
                if self.reason is None:
                    self.reason = self._judged()
        except Exception as error:  # an error raised here would stop the backward pass
            self.reason = Message("alarms.unmeasured.backward.failed", error=kind_and_text(error, 120))
        self.close()

    def _judged(self) -> str | None:
        """Judge what was delivered, and return why that is not possible; None if it is."""
        shape, arrived = self.shaped, dict(self._arrived)
        for one, other in self.same:
            if one in arrived:
                arrived.setdefault(other, arrived[one])
        arrived = {name: shape[name](gradient) if name in shape else gradient for name, gradient in arrived.items()}
        d_out, d_lse = arrived.pop(_OUTPUT, None), arrived.pop(_LSE, None)
        if d_out is None:
            d_out = torch.zeros_like(self.call.output)
        for gradient in (d_out, d_lse):
            if gradient is not None and not bool(gradient.isfinite().all()):
                return Message("alarms.unmeasured.backward.nonfinite")
        came = self._executed.union(arrived)
        got = {name: arrived.get(name) for name in (*QUERY_KEY_VALUE, *sorted(came)) if name in came}
        if not got:
            return Message("alarms.unmeasured.backward.none")
        if torch.float16 in self.dtypes and not all(x is None or bool(x.isfinite().all()) for x in got.values()):
            return Message("alarms.unmeasured.backward.overflow")  # as the scale of a loss makes it at times
        result = judge_delivered(
            self.call, d_out, None if d_lse is None else d_lse[..., 0], got,
            factors=self.factors, same=self.same, most=self.logits, dtypes=self.dtypes, misread=self._misread(),
            turn=self.turn,
        )  # fmt: skip
        if result.faults and self.same:  # which of two equal tensors is which can't be told
            return Message("laws.gradient.one_tensor")
        if self.unsure and (result.faults or not {*QUERY_KEY_VALUE} <= got.keys()):
            return Message("alarms.unmeasured.backward.copies")
        blind = blind_rows(self.call) if result.faults else None
        if blind is not None and bool(d_out[blind].any()):
            return Message("alarms.unmeasured.backward.blind")
        self.faults += result.faults
        return None

    def _misread(self) -> Tensor | None:
        """Return the gradient of the output as its memory has it, in order; None if that is the same."""
        gradient = self._arrived.get(_OUTPUT)
        if gradient is None or gradient.is_contiguous() or gradient.untyped_storage().nbytes() < gradient.nbytes:
            return None
        strides = torch.empty(gradient.shape, device="meta").stride()
        return self.shaped[_OUTPUT](gradient.as_strided(gradient.shape, strides, 0))

    def close(self) -> None:
        """Drop hooks and tensors; without a backward pass that came so far, this is the reason."""
        if not self._ended and self._task is None and self.reason is None:
            self.reason = Message("alarms.unmeasured.backward.none")
        self._ended = True
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.shaped, self.factors = [], {}, {}
        self._arrived, self._handed = {}, {}
        nothing = Vector(torch.zeros(0))
        self.call = replace(
            self.call, query=nothing, key=nothing, value=nothing, output=nothing.values, terms=None, lse=None, kept=None
        )


def followed(
    call: CallTensors, reached: Reached | None, module: nn.Module, factors: Mapping[str, Tensor], logits: int, turn: int
) -> Delivery:
    """Follow the backward pass of an attention, whose forward pass has ended.

    Args:
        call: Its tensors.
        reached: Its handles; None if its formula is unknown.
        module: The model.
        factors: Learned factors that it alone reads, by name.
        logits: Logits that are computed at most.
        turn: Where to begin among the heads if that leaves some out.
    """
    reason: str | None = None
    if call.call is not None and call.call.part_of_row:  # dk and dv of its keys are sums over the rows of other ranks
        reason = Message("alarms.unmeasured.backward.ranks")
    elif reached is None or call.missing is not None:
        reason = call.missing or Message("laws.gradient.no_formula")
    elif reached.output is None or not (reached.handles or reached.projected):
        reason = Message("alarms.unmeasured.backward.no_graph")
    delivery = Delivery(call, {}, (), {}, (), "", [], reason, logits, turn)
    if reason is None:
        assert reached is not None
        _hook(delivery, reached, module, factors)
    return delivery


def _hook(delivery: Delivery, reached: Reached, module: nn.Module, factors: Mapping[str, Tensor]) -> None:
    output = reached.output
    assert output is not None
    start = graph_place(output.edge)
    factors = sure_factors(reached, factors)
    edges = operand_edges(reached, module, factors)
    if len(reached.handles) < len(QUERY_KEY_VALUE):  # the walk goes on behind an operand, maybe to what others share
        edges = {name: edge for name, edge in edges.items() if name in QUERY_KEY_VALUE}
    places = {name: graph_place(edge) for name, edge in edges.items()}
    own = {start: _OUTPUT} | ({graph_place(reached.lse.edge): _LSE} if reached.lse is not None else {})
    ends = {place.node for place in places.values()}
    inside = nodes_inside([place.node for place in own], ends)
    if start.node in ends or start.node not in inside:
        places, inside = {}, []
    delivery.call = _plain(reached.call)
    handles = {**reached.handles, _OUTPUT: output} | ({_LSE: reached.lse} if reached.lse is not None else {})
    delivery.shaped = {name: partial(_arranged, one.layout, one.shape) for name, one in handles.items()}
    delivery.dtypes = output.dtype, *(handle.dtype for handle in reached.handles.values())
    delivery.factors = {name: value.detach().clone() for name, value in factors.items()}
    delivery.same, delivery.by, delivery.unsure = one_tensor(edges), own_backward(inside), copy_is_unsure(reached)
    within = {(node, number) for one in inside for node, number in one.next_functions}
    cut = _cut_off(
        reached, start, {name: p for name, p in places.items() if (p.node, p.output_nr) not in within}, module
    )
    delivery.faults = [Fault((name,), "none") for name in cut if name not in places]
    if without_lse := lse_is_cut_off(reached, places):
        delivery.faults.append(Fault(without_lse, "no_lse"))
    if delivery.unsure and delivery.faults:
        delivery.reason, delivery.faults = Message("alarms.unmeasured.backward.copies"), []
        return
    delivery._executed.update(name for name in cut if name in places)  # their gradient is zero, and is judged so
    places = {name: p for name, p in places.items() if (p.node, p.output_nr) in within}
    if not inside:
        delivery.reason = None if delivery.faults else Message("alarms.unmeasured.backward.no_graph")
        delivery._ended = bool(delivery.faults)
        return
    by_slot: dict[_Slot, list[str]] = {}
    ids = {node: number for number, node in enumerate((*inside, *ends))}
    for name, place in places.items():
        by_slot.setdefault((ids[place.node], place.output_nr), []).append(name)
    for node in inside:
        names = {place.output_nr: name for place, name in own.items() if place.node is node}
        targets = [
            None if earlier is None or earlier not in ids else _target(ids[earlier], output_nr, by_slot, len(inside))
            for earlier, output_nr in node.next_functions
        ]
        delivery._hooks += [
            node.register_prehook(partial(_reached, delivery, ids[node], names)),
            node.register_hook(partial(_handed_on, delivery, node.name() == HOOKED_MODULE, targets)),
        ]
    for node in ends:
        delivery._hooks.append(
            node.register_prehook(partial(_executed, delivery, [n for n, p in places.items() if p.node is node]))
        )


def _target(number: int, output: int, by_slot: Mapping[_Slot, list[str]], count: int) -> tuple[str, _Slot] | None:
    """Return the operand or the place inside to which a gradient goes; None for neither."""
    slot = number, output
    if number >= count:
        return (by_slot[slot][0], slot) if slot in by_slot else None
    return "", slot


# A hook that returns None leaves the gradients as they are.


def _reached(delivery: Delivery, number: int, names: Mapping[int, str], gradients: Any) -> None:
    _try(delivery, delivery.reaches, number, names, gradients)


def _handed_on(delivery: Delivery, of_module: bool, targets: Any, gradients: Any, got: Any) -> None:
    _try(delivery, delivery.hands_on, targets, gradients)
    if of_module and changed_on_a_module(gradients, got):
        delivery.reason = delivery.reason or Message("alarms.unmeasured.backward.read_elsewhere")


def _executed(delivery: Delivery, names: Sequence[str], _: Any) -> None:
    _try(delivery, delivery.executes, names)


def _try(delivery: Delivery, take: Callable[..., None], *arguments: Any) -> None:
    try:
        with torch.no_grad():
            take(*arguments)
    except Exception as error:  # an error raised here would stop the backward pass
        delivery.reason = Message("alarms.unmeasured.backward.failed", error=kind_and_text(error, 120))


def _arranged(layout: Callable[..., Tensor], shape: tuple[int, int, int, int], gradient: Tensor) -> Tensor:
    return layout(gradient, *shape)


def _is_sum(whole: Tensor | None, parts: Sequence[Tensor]) -> bool:
    """Return whether a gradient is the sum of the parts that nodes inside handed on."""
    if whole is None or not parts:
        return whole is None and not parts
    if len(parts) == 1:
        part = parts[0]
        return part is whole or (part.dtype == whole.dtype and torch.equal(part, whole))
    total, sizes = sum(part.to(torch.float64) for part in parts), sum(part.to(torch.float64).abs() for part in parts)
    assert isinstance(total, Tensor)
    off = (whole.to(torch.float64) - total).abs()
    return bool((off <= _SUM_ROUNDINGS * torch.finfo(whole.dtype).eps * sizes + torch.finfo(whole.dtype).tiny).all())


def _plain(call: CallTensors) -> CallTensors:
    """Return a call whose tensors have no graph and share none of the projections' tensors."""
    query, key, value = (Vector(one.values.detach(), one.factor) for one in (call.query, call.key, call.value))
    terms = tuple(
        replace(term, value=term.value.detach()) if isinstance(term.value, Tensor) else term
        for term in call.terms or ()
    )
    kept = None if call.kept is None else call.kept.detach()
    return replace(
        call, query=query, key=key, value=value, output=call.output.detach(), terms=terms, lse=None, kept=kept
    )


def _cut_off(reached: Reached, start: GradientEdge, apart: Mapping[str, GradientEdge], module: nn.Module) -> list[str]:
    """Return the operands that autograd does not reach from the output, though they train.

    Places of parameters count only if weights of the same attention lie behind the output: those that a wrapper
    gathers are others than the model's.

    Args:
        reached: The attention.
        start: The place of its output.
        apart: Places of operands to which no node inside leads.
        module: The model.
    """
    without = [name for name in QUERY_KEY_VALUE if name not in reached.handles]
    if not (without or apart):
        return []
    parameters, behind = dict(named_parameters(module)), nodes_behind(start.node)

    def is_behind(edge: Edge | None) -> bool:
        return edge is not None and graph_place(edge).node in behind

    plain = Reached(reached.call)  # without what the projections returned: their weights alone
    weights = {name: start_of(plain, name, parameters) for name in QUERY_KEY_VALUE}
    known = any(map(is_behind, weights.values()))
    cut = []
    for name in (*without, *apart):
        begin = start_of(reached, name, parameters) if name in QUERY_KEY_VALUE else None
        place = apart.get(name)
        real = name in reached.projected or (place is not None and place.node.name() != "AccumulateGrad")
        begins = begin is not None or place is not None
        if begins and (known or real) and not is_behind(begin) and not is_behind(place):
            cut.append(name)
    return cut

"""The gradients of two models, for `diff --backward`.

Both sides run once with autograd, dropout off, and get the same random gradient of their first common output. Compared
are the gradients of q, k and v of each pair of attentions and those of paired parameters, up to the rounding that is
measured against a float64 copy of each side. The law `gradient` then says of each side which attention's backward pass
is not that of its formula.

Where the difference enters: of all tensors between modules whose gradients differ, the last one that the forward pass
makes is the first one that the backward pass reaches. The module that takes it gets a gradient that agrees, and hands
on one that does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sqrtdk.audit.records import BROKEN, LawAnswer
from sqrtdk.compare.backward.pairs import (
    Pick,
    attention_gradients,
    compare_gradients,
    parameter_gradients,
    reached_alone,
)
from sqrtdk.compare.backward.records import BackwardDiff, BackwardFault, FirstModule
from sqrtdk.compare.backward.run import (
    Gradient,
    Key,
    NoBackwardError,
    RunGradients,
    SideGradients,
    side_gradients,
)
from sqrtdk.compare.outside.modules import ModuleStep, align_steps
from sqrtdk.compare.outside.outputs import pair_outputs
from sqrtdk.compare.records import DiffReport
from sqrtdk.compare.rounding.tensors import padding_of
from sqrtdk.compare.sides import ModelSide
from sqrtdk.laws.ask import ask
from sqrtdk.laws.backward.handles import Edge, key_of
from sqrtdk.messages import Message
from sqrtdk.modules.calls import CallPlace


def compare_backward(a: ModelSide, b: ModelSide, report: DiffReport, seed: int) -> BackwardDiff:
    """Return the comparison of the gradients of two sides that have run.

    Args:
        a: Side A.
        b: Side B.
        report: The comparison of their forward passes.
        seed: Seed of the gradient of the output.
    """
    try:
        names, given = _output_gradient(a, b, seed)
        sides = side_gradients(a, "A", names[0], given), side_gradients(b, "B", names[1], given)
    except NoBackwardError as error:
        return BackwardDiff(reason=error.reason)
    gradients = (*attention_gradients(*sides, report), *parameter_gradients(*sides, report))
    only_a, only_b = reached_alone(*sides, report)
    faults = tuple(fault for side, label in ((a, "a"), (b, "b")) for fault in _faults(side, label))
    differs = any(one.same is False for one in gradients)
    first = None
    if report.same is not False and differs:
        first = _first_module(*sides, {pair.site_a: pair.site_b for pair in report.pairs})
    return BackwardDiff(gradients, faults, first, only_a, only_b, output=names[0])


def _output_gradient(a: ModelSide, b: ModelSide, seed: int) -> tuple[tuple[str, str], Tensor]:
    """Return the names of the first floating output of both sides, and the random gradient that it gets.

    The gradient is standard normal, float64, and 0 in padded rows, whose outputs may be anything.
    """
    paired, _ = pair_outputs(a, b, padding_of(a, b))
    for both in paired:
        if both.a.is_floating_point() and both.b.is_floating_point():
            generator = torch.Generator().manual_seed(seed)
            given = torch.randn(both.a.shape, generator=generator, dtype=torch.float64)
            return (both.name, both.name_b), given if both.rows is None else given * both.rows
    raise NoBackwardError(Message("compare.backward.no_output"))


def _faults(side: ModelSide, label: str) -> Iterator[BackwardFault]:
    assert side.module is not None
    for answer in ask(side.module, side.inputs, "gradient").answers:
        if answer.state == BROKEN:
            yield BackwardFault(label, answer.site, answer.reason, _function(answer))


def _function(answer: LawAnswer) -> str | None:
    """Return the custom function whose backward pass has the fault, with its line; None if autograd computes it."""
    fix, at = (None, None) if answer.finding is None else (answer.finding.fix, answer.finding.at)
    if not isinstance(fix, Message) or fix.id not in ("laws.gradient.fix_in", "laws.gradient.fix_line"):
        return None
    by = str(fix.values["by"])
    return f"{by} ({at})" if at and fix.id == "laws.gradient.fix_line" else by


# -- where the difference enters ---------------------------------------------------------------------------------------


def _first_module(a: SideGradients, b: SideGradients, sites: Mapping[str, str]) -> FirstModule | None:
    pairs = align_steps(a.own.steps, b.own.steps, sites)
    last: tuple[int, Key] | None = None
    agree: set[CallPlace] = set()  # of calls all of whose outputs have gradients that agree
    for one, other in pairs:
        for gives in (True, False):
            kept = True
            edges = [_edges(side, step, gives) for side, step in ((a, one), (b, other))]
            for number, (x, _) in enumerate(zip(*edges, strict=False)):
                pick = [_between(step.place, gives, number) for step in (one, other)]
                same, _, _ = compare_gradients(a, b, pick[0], pick[1])
                kept = kept and same is not False
                if same is False and x is not None and (last is None or a.own.tensors.met[key_of(x)] > last[0]):
                    last = a.own.tensors.met[key_of(x)], key_of(x)
            if gives and kept:
                agree.add(one.place)
    if last is None:
        return None
    partner = {one.place[0]: other.place[0] for one, other in pairs}
    takers = [
        one for one, _ in pairs
        if one.place in agree and last[1] in _keys(a.own.tensors.takes, one.place)
    ]  # fmt: skip
    inner = [one.place[0] for one in takers if not any(_is_below(x.place[0], one.place[0]) for x in takers)]
    if not inner:  # no module takes it: the code of the module around its maker does
        makers = [one for one, _ in pairs if last[1] in _keys(a.own.tensors.gives, one.place)]
        inner = [max((one.place[0] for one in makers), key=len).rpartition(".")[0]] if makers else [""]
    path = inner[0]
    while not all(one == path or _is_below(one, path) for one in inner) or path not in partner:
        if not path:
            return FirstModule("", "")
        path = path.rpartition(".")[0]
    return FirstModule(path, partner[path])


def _edges(side: SideGradients, step: ModuleStep, gives: bool) -> list[Edge | None]:
    tensors = side.own.tensors
    return (tensors.gives if gives else tensors.takes).get(step.place, [])


def _keys(edges: Mapping[CallPlace, Sequence[Edge | None]], place: CallPlace) -> set[Key]:
    return {key_of(edge) for edge in edges.get(place, ()) if edge is not None}


def _between(place: CallPlace, gives: bool, number: int) -> Pick:
    def pick(gradients: RunGradients) -> Gradient:
        edge = (gradients.tensors.gives if gives else gradients.tensors.takes)[place][number]
        return None if edge is None else gradients.by_key[key_of(edge)]

    return pick


def _is_below(path: str, parent: str) -> bool:
    return path != parent and (not parent or path.startswith(f"{parent}."))

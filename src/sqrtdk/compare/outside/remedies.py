"""What is tried where two models begin to differ: B's parts in a copy of A, one after the other; then B's output.

A remedy is a patch of A's next run. What it is made from are the modules of both sides, their weights, and, against a
program of another framework, settings of A's own modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import nn

from sqrtdk._wrappers import named_modules, submodule
from sqrtdk.compare.outside.changes import ModuleChange, changes_of
from sqrtdk.compare.outside.modules import KeptTensor, ModuleStep, Patch
from sqrtdk.compare.outside.parts import LAYER_NUMBER, ModulePair, NamedDifference, is_norm
from sqrtdk.compare.outside.trials import holds_for, trial_changes
from sqrtdk.compare.records import FirstModule
from sqrtdk.compare.sides import ModelSide
from sqrtdk.errors import MODEL_ERRORS
from sqrtdk.frontends.module import ForeignModule
from sqrtdk.modules.calls import CallPlace

# tensors that differ between the sides; None if nothing can be compared
DifferingTensors = list[tuple[KeptTensor, KeptTensor]] | None


class ChangedWeights(Protocol):
    """The weights of both sides that belong together."""

    def homes(self) -> Mapping[str, str]:
        """Return which module of B has the weights of which module of A, by path."""

    def change_of(self, path: str, modules: Mapping[str, nn.Module], paths: Collection[str]) -> ModuleChange | None:
        """Return B's weights in place of A's, in a module of A; None if none differ there."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A place where a difference enters.

    Attributes:
        module: the module, with the lines of B's code.
        where: place in the module: "`head`", "`layers.1`, between `layers.1.norm` and `layers.1.mlp`".
        how: what differs there: "ReLU in A, GELU in B"; "" if unknown.
        parts: the causes in `how`, one by one.
        proven: A gave what B gives there once it had B's parts; otherwise they are read off the numbers.
        others: modules of A that differ in the same path.
        to_end: it lies between the model's last module and its output.
    """

    module: FirstModule
    where: str
    how: str = ""
    parts: tuple[NamedDifference, ...] = ()
    proven: bool = False
    others: tuple[str, ...] = ()
    to_end: bool = False


@dataclass(frozen=True, slots=True)
class DifferenceChain:
    """All places where differences enter outside attentions, in the order of the run.

    Attributes:
        entries: the places.
        whole: A gives B's output once it has B's parts there and the outputs of B's attentions.
        attentions: some attentions differ as well.
        beside: one of these attentions comes before the first place.
        inside: what the modules of these attentions do besides is the same, apart from the places.
    """

    entries: tuple[Entry, ...] = ()
    whole: bool = False
    attentions: bool = False
    beside: bool = False
    inside: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ComparedCall:
    """A call of A, its partner in B, and the inputs and outputs that differ."""

    a: ModuleStep
    b: ModuleStep
    takes: DifferingTensors
    gives: DifferingTensors


class DifferenceWalk(Protocol):
    """The walk over A's calls that asks for remedies.

    Attributes:
        sides: A and B.
        held: the weights that belong together; None if unknown.
        patch: what A's latest run had of B.
        steps: calls of A with their partners.
        ran: all calls of A.
        own: attentions that differ, by A's place.
        opened: sites of A that are walked from a module behind their attention on.
    """

    sides: tuple[ModelSide, ModelSide]
    held: ChangedWeights | None
    patch: Patch
    steps: Sequence[tuple[ModuleStep, ModuleStep]]
    ran: Sequence[ModuleStep]
    own: dict[CallPlace, CallPlace]
    opened: dict[str, str]


def remedies(walk: DifferenceWalk, call: ComparedCall, entry: Entry) -> Iterator[tuple[Entry, Patch, Collection[str]]]:
    """Yield B's parts at a place, put into all modules that differ alike; then B's output."""
    start, steps, pairs, called = walk.patch, walk.steps, dict(_modules(walk)), entry.module.a
    model = walk.sides[0].module
    own = {} if model is None else dict(named_modules(model))
    if called in pairs:
        for number, change in enumerate(_changes(walk, called, pairs[called], own, pairs)):
            alike = {called: change}
            for path, (one, other) in pairs.items():
                if change.of_checkpoint or type(one) is type(pairs[called][0]):
                    parts = _changes(walk, path, (one, other), own, pairs)[number:]
                    alike |= {path: parts[0]} if parts and parts[0].likeness == change.likeness else {}
            edits = [partial(part.edit, path=path) for path, part in alike.items()]
            module = entry.module if change.written else replace(entry.module, place=None)
            # their modules are named already
            edited = start.edits if change.of_checkpoint == "other numbers" else ()
            named = {called, *(edit.keywords["path"] for edit in edited if isinstance(edit, partial))}
            others = tuple(x for x in alike if x not in named)
            told = replace(entry, module=module, how=change.text, parts=change.parts, proven=True, others=others)
            yield told, replace(start, edits=(*start.edits, *edits)), ()
        yield from _trials(walk, call, entry, start, pairs)
    returned = {
        one.place: other.whole or tuple(kept.values.view(kept.shape) for kept in other.gives)
        for one, other in steps
        if one.place[0] == called and all(kept.stride == 1 for kept in other.gives)
    }
    if called and returned:
        yield entry, replace(start, returned={**start.returned, **returned}), (called,)


def _trials(
    walk: DifferenceWalk, call: ComparedCall, entry: Entry, start: Patch, pairs: Collection[str]
) -> Iterator[tuple[Entry, Patch, Collection[str]]]:
    """Yield settings of A's modules that give what a program of another framework gives, in all layers."""
    model, called = walk.sides[0].module, entry.module.a
    if model is None or not isinstance(walk.sides[1].module, ForeignModule) or isinstance(model, ForeignModule):
        return
    alike = [path for path in pairs if LAYER_NUMBER.sub("#", f".{path}.") == LAYER_NUMBER.sub("#", f".{called}.")]
    norms = {one.place[0]: other for one, other in reversed(walk.steps)}
    for change in trial_changes(call.a, call.gives or (), walk.ran, model):
        if is_norm(submodule(model, called)):
            alike = [path for path, step in norms.items() if holds_for(change, submodule(model, path), step)]
            alike = list(dict.fromkeys((called, *reversed(alike))))
        edits = tuple(partial(change.edit, path=path) for path in alike)
        others = tuple(path for path in alike if path != called)
        told = replace(entry, how=change.text, parts=change.parts, proven=True, others=others)
        yield told, replace(start, edits=(*start.edits, *edits)), ()


def _changes(
    walk: DifferenceWalk,
    path: str,
    both: tuple[nn.Module, nn.Module],
    others: Mapping[str, nn.Module],
    pairs: Mapping[str, tuple[nn.Module, nn.Module]],
) -> list[ModuleChange]:
    """Return the changes from one module to another; [] if tensors can't be compared, such as quantised ones."""
    try:
        changes = list(changes_of(ModulePair(*both, others, {one: other for one, (_, other) in pairs.items()})))
        change = None if walk.held is None else walk.held.change_of(path, others, pairs)
    except MODEL_ERRORS:
        return []
    return changes if change is None else [change, *changes]


def _modules(walk: DifferenceWalk) -> Iterator[tuple[str, tuple[nn.Module, nn.Module]]]:
    """Yield pairs of modules by A's path, except those within attentions with causes."""
    known = [{} if side.module is None else dict(named_modules(side.module)) for side in walk.sides]
    for one, other in walk.steps:
        path, pair = one.place[0], (known[0].get(one.place[0]), known[1].get(other.place[0]))
        closed = [site for site, _ in walk.own if site not in walk.opened]
        if pair[0] is not None and pair[1] is not None and not is_within(path, closed) and path not in walk.opened:
            yield path, (pair[0], pair[1])


def is_within(path: str, sites: Collection[str]) -> bool:
    """Return whether a module is one of these, or inside one; the root is around all."""
    return any(path == site or not site or path.startswith(f"{site}.") for site in sites)

"""Finds where two models begin to differ outside their attentions, what causes it, and whether that explains all.

Both models run in float64, so that rounding hides nothing relevant. Module calls are walked in the order in which A's
calls end, up to the first whose input agrees and whose output does not. The part of B's module that differs is put
into a copy of A, which runs again. If the module then gives B's output, the part is proven and the walk continues
behind it. An unknown part is replaced by B's output. So are attentions that differ, since they have causes of their
own. If A ends with B's output, nothing is left unexplained.

The same float64 runs tell whether a difference between two attentions cancels before it leaves their modules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from sqrtdk.compare.changes import OTHER_NUMBERS, ModuleChange, changes_of, relation
from sqrtdk.compare.gates import gate_at
from sqrtdk.compare.measured import (
    MODEL_ERRORS,
    UNMEASURED_ROUNDINGS,
    BlindRows,
    TensorOfBoth,
    exact_of,
    seeing_entries,
)
from sqrtdk.compare.modules import KeptTensor, ModuleCall, ModuleStep, Patch, align_steps, line_of, lines_of
from sqrtdk.compare.precision import rounding_unit
from sqrtdk.compare.records import FirstModule, PairDiff
from sqrtdk.compare.sides import FinerRun, ModelSide
from sqrtdk.messages import Message
from sqrtdk.tracing.tape.stance import Disturbed

_HIDDEN_BELOW = -1e4  # a float mask adds this or less to hide a key; -1e4 and finfo.min have the same effect
_ENTRY_SHARE = 8.0  # a difference counts as entering if it is at least 1/8 of the difference at the end
_MOST_PATCHED_RUNS = 6  # runs of A with parts of B: each costs a forward pass
# tensors that differ between the sides; None if nothing can be compared
DifferingTensors = list[tuple[KeptTensor, KeptTensor]] | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A place where a difference enters.

    Attributes:
        module: the module, with the lines of B's code.
        where: place in the module: "`head`", "`layers.1`, between `layers.1.norm` and `layers.1.mlp`".
        how: what differs there: "ReLU in A, GELU in B"; "" if unknown.
        others: modules of A that differ in the same path.
        to_end: it lies between the model's last module and its output.
    """

    module: FirstModule
    where: str
    how: str = ""
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
    """

    entries: tuple[Entry, ...] = ()
    whole: bool = False
    attentions: bool = False
    beside: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call of A, its partner in B, and the inputs and outputs that differ."""

    a: ModuleStep
    b: ModuleStep
    takes: DifferingTensors
    gives: DifferingTensors


def follow_differences(
    a: ModelSide, b: ModelSide, pairs: Sequence[PairDiff], blind: BlindRows, share: float
) -> DifferenceChain:
    """Follows the differences from where they enter to the output.

    `share` is the final difference of the outputs, as a share of their size.
    """
    exact = [exact_of(side, listen=True) for side in (a, b)]
    if exact[0] is None or exact[1] is None or not (exact[0].steps and exact[1].steps):
        return DifferenceChain()
    walk = _Walk(a, b, exact[1], pairs, blind, level_of(exact, share))
    entries: list[Entry] = []
    found, beside = walk.first(exact[0].steps), False
    while found is not None:
        call, entry = found
        if walk.owns(entry.module.a):
            steps = walk.attentions(exact[0])
            if steps is None:
                return DifferenceChain(tuple(entries))
            found, beside = walk.first(steps), not entries
            continue
        # The first remedy that moves the walk on is the proven one; without any, the walk ends here unexplained.
        for told, patch, passed in walk.remedies(call, entry):
            steps = walk.run(patch, passed)
            then = found if steps is None else walk.first(steps)
            # None: nothing differs any more. The same place again: this remedy has not helped.
            if then is None or (then[1].module, then[1].where) != (entry.module, entry.where):
                entries.append(told)
                found = then
                break
        else:
            return DifferenceChain((*entries, entry), entry.to_end, bool(walk.own), beside)
    return DifferenceChain(tuple(entries), True, bool(walk.own), beside)


class _Walk:
    """Walks A's calls beside B's while A gets more and more parts of B."""

    def __init__(
        self,
        a: ModelSide,
        b: ModelSide,
        exact: FinerRun,
        pairs: Sequence[PairDiff],
        blind: BlindRows,
        level: tuple[float, float],
    ) -> None:
        self.sides, self.exact, self.blind, self.level = (a, b), exact, blind, level
        self.sites = {pair.site_a: pair.site_b for pair in pairs}
        own = [pair for pair in pairs if pair.same is False and any(cause.name != "input" for cause in pair.causes)]
        own += [pair for pair in pairs if pair.same is False and not pair.causes and pair.follows_from is None]
        self.own = {(pair.site_a, pair.index_a): (pair.site_b, pair.index_b) for pair in own}
        self.patch, self.passed, self.runs = Patch(), frozenset[str](), 0
        self.steps: Sequence[tuple[ModuleStep, ModuleStep]] = ()

    def first(self, steps: Sequence[ModuleStep]) -> tuple[_Call, Entry] | None:
        """Returns the first call of A, in the order of ending, whose input agrees and whose output does not."""
        self.ran, aligned = steps, align_steps(steps, self.exact.steps, self.sites)
        self.steps = [pair for pair in aligned if not _within(pair[0].place[0], self.passed)]
        calls = []
        for order, (one, other) in enumerate(self.steps):
            # A module around an attention may return weights or a cache as well; only its main output is compared.
            main = 1 if any(_within(site, [one.place[0]]) for site in self.sites) else len(one.gives)
            both = matched(one.takes, other.takes), matched(one.gives[:main], other.gives)
            calls.append(_Call(one, other, *(self._apart(pairs, order) for pairs in both)))
        for call in calls:
            if not call.takes and call.gives:
                return call, self._entry(call, [inner for inner in calls if inner.a.parent == call.a.number])
        return None

    def _apart(self, pairs: Sequence[tuple[KeptTensor, KeptTensor]], order: int) -> DifferingTensors:
        # Rounding of independent steps adds up like a random walk: it grows with the root of their number.
        allowed = min(self.level[0] * math.sqrt(order + 1), self.level[1])
        return [pair for pair in pairs if not gap_of(*pair, self.blind) <= allowed] if pairs else None

    def _entry(self, call: _Call, inside: Sequence[_Call]) -> Entry:
        """Returns the place in a module: after its last call that agrees, before the first whose input does not."""
        path, path_b = call.a.place[0], call.b.place[0]
        name = f"`{path}`" if path else Message("outputs.place.model")
        behind = before = None
        known = [(_input_of(name), kept) for kept in call.a.takes[:1]]
        for inner in inside:
            if inner.takes:
                before = inner
                break
            if inner.gives == []:
                behind = inner
                known += [(_input_of(f"`{inner.a.place[0]}`"), kept) for kept in inner.a.takes[:1]]
                known += [(_output_of(f"`{inner.a.place[0]}`"), kept) for kept in inner.a.gives[:1]]
        first: str = _input_of(name) if behind is None else _call_of(f"`{behind.a.place[0]}`")
        last: str = _output_of(name) if before is None else _call_of(f"`{before.a.place[0]}`")
        within = behind is not None or before is not None
        if inside and path in self.sites and path not in {site for site, _ in self.own}:
            within, first = True, Message("outputs.place.attention")
        lines = None
        if (model := self.sides[1].module) is not None:
            module, ends = model.get_submodule(path_b), [None if end is None else end.b for end in (behind, before)]
            lines = lines_of(module, *ends) if within else line_of(module, call.b)
        numbers = before.takes if before is not None else call.gives
        gate = gate_at((numbers or [])[:1], (call.a, self.ran), (call.b, self.exact.steps), self.sides[1].calls)
        how = gate or (_relation(numbers[0], known) if numbers else None) or ""
        where = Message("outputs.place.between", module=name, first=first, last=last) if within else name
        return Entry(FirstModule(path, path_b, lines), where, how, to_end=within and before is None and not path)

    def owns(self, path: str) -> bool:
        """Returns whether a module is in or around an attention with causes whose output is not yet B's."""
        waiting = [site for site, _ in self.own if site not in self.passed]
        return any(_within(path, [site]) or _within(site, [path]) for site in waiting)

    def attentions(self, exact: FinerRun) -> Sequence[ModuleStep] | None:
        """Returns A's calls when the modules of attentions with causes return B's outputs.

        Returns None if one of them is the whole model, or if a module ran a different number of times than its
        attention.
        """
        returned = {}
        for places in self.own.items():
            for side, steps, (site, _) in zip(self.sides, (exact.steps, self.exact.steps), places, strict=True):
                ran, called = sum(call.site == site for call in side.calls), sum(x.place[0] == site for x in steps)
                if not site or ran != called:
                    return None
            whole = next((step.whole for step in self.exact.steps if step.place == places[1]), ())
            if not whole:
                return None
            returned[places[0]] = whole
        patch = replace(self.patch, returned={**self.patch.returned, **returned})
        return self.run(patch, [site for site, _ in self.own])

    def run(self, patch: Patch, passed: Collection[str]) -> Sequence[ModuleStep] | None:
        """Returns the calls of A run with the patch; None if A can't run so or can't take what B returned.

        Modules in `passed` then give B's outputs whatever they get.
        """
        again = self.sides[0].again
        if again is None or self.runs == _MOST_PATCHED_RUNS:
            return None
        self.runs += 1
        self.sides[0].forwards += 1
        try:
            run = again(True, patch)
        except MODEL_ERRORS:
            return None
        if run.replaced != set(patch.returned):
            return None  # A returns a tensor of another shape, or one that can't be replaced
        self.patch, self.passed = patch, self.passed | set(passed)
        return run.steps

    def remedies(self, call: _Call, entry: Entry) -> Iterator[tuple[Entry, Patch, Collection[str]]]:
        """Yields B's parts at a place, put into all modules that differ alike; last, the output of B's module."""
        # Parts come first: they name a cause. B's output always works and explains nothing.
        start, steps, pairs, called = self.patch, self.steps, dict(self._modules()), entry.module.a
        own = {path: one for path, (one, _) in pairs.items()}
        if called in pairs:
            for number, change in enumerate(_changes(*pairs[called], own)):
                alike = {called: change}
                for path, (one, other) in pairs.items():
                    if change.kind == OTHER_NUMBERS or type(one) is type(pairs[called][0]):
                        parts = _changes(one, other, own)[number:]
                        alike |= {path: parts[0]} if parts and parts[0].kind == change.kind else {}
                edits = [partial(part.edit, path=path) for path, part in alike.items()]
                module = entry.module if change.written else replace(entry.module, place=None)
                told = replace(entry, module=module, how=change.text, others=tuple(alike)[1:])
                yield told, replace(start, edits=(*start.edits, *edits)), ()
        returned = {
            one.place: other.whole or tuple(kept.values.view(kept.shape) for kept in other.gives)
            for one, other in steps
            if one.place[0] == called and all(kept.stride == 1 for kept in other.gives)
        }
        if called and returned:
            yield entry, replace(start, returned={**start.returned, **returned}), (called,)

    def _modules(self) -> Iterator[tuple[str, tuple[nn.Module, nn.Module]]]:
        """Yields pairs of modules by A's path, except those within attentions with causes."""
        known = [{} if side.module is None else dict(side.module.named_modules()) for side in self.sides]
        for one, other in self.steps:
            path, pair = one.place[0], (known[0].get(one.place[0]), known[1].get(other.place[0]))
            if pair[0] is not None and pair[1] is not None and not _within(path, [site for site, _ in self.own]):
                yield path, (pair[0], pair[1])


def _input_of(module: str) -> Message:
    return Message("outputs.place.input", module=module)


def _call_of(module: str) -> Message:
    return Message("outputs.place.call", module=module)


def _output_of(module: str) -> Message:
    return Message("outputs.place.output", module=module)


def _changes(one: nn.Module, other: nn.Module, others: Mapping[str, nn.Module]) -> list[ModuleChange]:
    """Returns the changes from one module to another; [] if tensors can't be compared, such as quantised ones."""
    try:
        return list(changes_of(one, other, others))
    except MODEL_ERRORS:
        return []


def _relation(numbers: tuple[KeptTensor, KeptTensor], known: Sequence[tuple[str, KeptTensor]]) -> Message | None:
    """Returns how B's numbers relate to A's; None unless all of them were kept."""
    if any(kept.stride != 1 or not kept.values.is_floating_point() for kept in numbers):
        return None
    a, b = (kept.values.double() for kept in numbers)
    before = [(name, kept.values.double()) for name, kept in known if kept.shape == numbers[0].shape]
    return relation(a, b, before)


def level_of(exact: Sequence[FinerRun | None], share: float) -> tuple[float, float]:
    """Returns the relative rounding of one step, and the largest difference that counts as rounding.

    The unit is at least that of float32: models cast on their way even when run in float64 (`x.float()` in a norm).
    """
    units = [max(rounding_unit(one.dtype), rounding_unit(torch.float32)) for one in exact if one is not None]
    return UNMEASURED_ROUNDINGS * max(units), share / _ENTRY_SHARE if share else math.inf


def _within(path: str, sites: Collection[str]) -> bool:
    return any(path == site or not site or path.startswith(f"{site}.") for site in sites)


def matched(one: Sequence[KeptTensor], other: Sequence[KeptTensor]) -> list[tuple[KeptTensor, KeptTensor]]:
    """Returns pairs of tensors of equal kind and shape, in order; tensors of one side only are left out."""
    left = list(other)
    pairs = []
    for x in one:
        kind = x.values.is_floating_point()
        y = next((y for y in left if y.shape == x.shape and y.values.is_floating_point() == kind), None)
        if y is not None:
            left.remove(y)
            pairs.append((x, y))
    return pairs


def gap_of(x: KeptTensor, y: KeptTensor, blind: BlindRows) -> float:
    """Returns the root mean square of the difference, as a share of the size of A's tensor."""
    # Long tensors keep every stride-th number; both are thinned to the numbers that they share.
    stride = math.lcm(x.stride, y.stride)
    one, other = x.values[:: stride // x.stride], y.values[:: stride // y.stride]
    if torch.equal(one, other):
        return 0.0
    if not one.is_floating_point():
        return math.inf
    rows = seeing_entries(x.shape, blind)
    counted = None if rows is None else rows.reshape(-1)[::stride]
    # -1e4 in one float mask and finfo.min in the other hide the same keys
    one, other = (values.double().clamp_min(_HIDDEN_BELOW) for values in (one, other))
    both = TensorOfBoth("", "", one, other, counted, (0.0, 0.0))
    gap, size = both.gap[0], both.size(one)[0]
    return gap / size if size else gap and math.inf


# -- what cancels ------------------------------------------------------------------------------------------------------


def leaves_alike(
    a: ModelSide, b: ModelSide, pairs: Sequence[tuple[ModuleCall, ModuleCall]], blind: BlindRows
) -> list[bool]:
    """Returns whether modules get equal inputs and give equal outputs, whatever their attentions do in between.

    `(weights @ v) * sigmoid(lse - sink)` is attention with a sink: other weights, the same output. Three kinds of
    modules prove nothing: one that gives only zeros, one that gives fewer rows than it gets (it returns the last
    token), and one whose output does not depend on its attention (`x + proj(heads)` where `proj` starts as zero).

    `pairs` are places of modules of A and of B.
    """
    exact = [exact_of(side, listen=True) for side in (a, b)]
    if exact[0] is None or exact[1] is None:
        return [False] * len(pairs)
    steps = [{step.place: step for step in one.steps} for one in exact if one is not None]
    allowed = level_of(exact, 0.0)[0]
    alike = []
    for place_a, place_b in pairs:
        one, other = steps[0].get(place_a), steps[1].get(place_b)
        if one is None or other is None or not one.gives or _rows(one.gives[0]) < sum(map(_rows, one.takes[:1])):
            alike.append(False)
            continue
        takes, gives = matched(one.takes, other.takes), matched(one.gives[:1], other.gives)
        same = [bool(pairs) and all(gap_of(x, y, blind) <= allowed for x, y in pairs) for pairs in (takes, gives)]
        alike.append(all(same) and bool(one.gives[0].values.any()) and _reacts(a, one, blind, allowed))
    return alike


def _reacts(a: ModelSide, step: ModuleStep, blind: BlindRows, allowed: float) -> bool:
    """Returns whether the output of a module changes if its attention gives something else."""
    call = next((call for call in a.calls if (call.site, call.index) == step.place), None)
    if call is None or call.output is None or a.again is None:
        return False
    a.forwards += 1
    by = torch.linspace(-0.5, 0.5, call.output.numel()).to(call.output).view_as(call.output)
    other = Disturbed(call.output, call.output * by)
    try:
        with other:
            run = a.again(True, None)
    except MODEL_ERRORS:
        return False
    gives = [own.gives[:1] for own in run.steps if own.place == step.place]
    return other.done and any(gap_of(x, y, blind) > allowed for own in gives for x, y in matched(step.gives[:1], own))


def _rows(kept: KeptTensor) -> int:
    """Returns the number of rows of a tensor; each id of an integer tensor is a row."""
    return math.prod(kept.shape[:-1] if kept.values.is_floating_point() else kept.shape)

"""Finds where two models begin to differ outside their attentions, what causes it, and whether that explains all.

Both models run in float64, so that rounding hides nothing relevant. Module calls are walked in the order in which A's
calls end, up to the first whose input agrees and whose output does not. The part of B's module that differs is put
into a copy of A, which runs again. If the module then gives B's output, the part is proven and the walk continues
behind it. An unknown part is replaced by B's output. So are attentions that differ, since they have causes of their
own. If A ends with B's output, nothing is left unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from sqrtdk._wrappers import submodule
from sqrtdk.compare.outside.beside import is_one_code, modules_behind, numbers_before, parts_beside
from sqrtdk.compare.outside.changes import difference_of_numbers
from sqrtdk.compare.outside.gaps import gap_of, level_of, matched
from sqrtdk.compare.outside.gates import gate_at, gates_apart
from sqrtdk.compare.outside.modules import KeptTensor, ModuleStep, Patch, align_steps, line_of, lines_of
from sqrtdk.compare.outside.remedies import (
    ChangedWeights,
    ComparedCall,
    DifferenceChain,
    DifferingTensors,
    Entry,
    is_within,
    remedies,
)
from sqrtdk.compare.records import FirstModule, PairDiff
from sqrtdk.compare.rounding.tensors import BlindRows, exact_of
from sqrtdk.compare.sides import FinerRun, ModelSide
from sqrtdk.errors import MODEL_ERRORS
from sqrtdk.frontends.module import ForeignModule
from sqrtdk.messages import Message
from sqrtdk.modules.calls import CallPlace, first_apart
from sqrtdk.tracing.probe.gates import Gate, gate_of, multiple_of

_MOST_PATCHED_RUNS = 6  # runs of A with parts of B: each costs a forward pass


def first_module_apart(a: ModelSide, b: ModelSide) -> str | None:
    """Return the first module whose output differs, as text, for two sides whose attentions don't fit.

    None is returned if no module is found, or if a side can't run again in float64.
    """
    exact = [exact_of(side, listen=True) for side in (a, b)]
    if exact[0] is None or exact[1] is None or not (exact[0].steps and exact[1].steps):
        return None
    found = _Walk(a, b, exact[1], (), {}, level_of(exact, 0.0)).first(exact[0].steps)
    if found is None or not found[1].module.a:
        return None
    place: str = found[1].where
    if found[1].module.place:
        place = Message("joins.brackets", first=place, second=found[1].module.place)
    return Message("joins.colon", first=place, second=found[1].how) if found[1].how else place


def follow_differences(
    a: ModelSide,
    b: ModelSide,
    pairs: Sequence[PairDiff],
    blind: BlindRows,
    share: float,
    held: ChangedWeights | None = None,
) -> DifferenceChain:
    """Return where the differences enter outside attention, from the first place on to the output.

    `share` is the final difference of the outputs, as a share of their size; `blind` are rows that are left out; `held`
    tells which weights of both sides belong together and differ.
    """
    exact = [exact_of(side, listen=True) for side in (a, b)]
    if exact[0] is None or exact[1] is None or not (exact[0].steps and exact[1].steps):
        return DifferenceChain()
    walk = _Walk(a, b, exact[1], pairs, blind, level_of(exact, share), held)
    entries: list[Entry] = []
    found, beside = walk.first(exact[0].steps), False
    while found is not None:
        call, entry = found
        if walk.owns(entry.module.a):
            steps = walk.attentions(exact[0])
            if steps is None:
                return DifferenceChain(tuple(entries))
            found, beside = walk.first(steps), not entries
            entries += walk.gates()
            continue
        # The first remedy that moves the walk on is the proven one; without any, the walk ends here unexplained.
        for told, patch, passed in remedies(walk, call, entry):
            steps = walk.run(patch, passed)
            then = found if steps is None else walk.first(steps)
            # None: nothing differs any more. The same place again: this remedy has not helped.
            if then is None or (then[1].module, then[1].where) != (entry.module, entry.where):
                entries.append(told)
                found = then
                break
        else:
            return DifferenceChain((*entries, entry), entry.to_end, bool(walk.own), beside)
    inside = not walk.own or walk.same_beside([entry.module.a for entry in entries])
    return DifferenceChain(tuple(entries), True, bool(walk.own), beside, inside)


def _is_made_up_for(call: ComparedCall, calls: Sequence[ComparedCall]) -> bool:
    """Return whether the code behind a module makes up for what it does otherwise.

    A's embedding holds a factor, for instance, and B writes `self.embed(ids) * dim**0.5`: the next module of both takes
    the same numbers, which are a multiple of what this one gives, on each side by its own factor.
    """
    if not call.gives or call.takes:
        return False
    behind = (one for one in calls if one.a.parent == call.a.parent and one.a.number > call.a.number)
    later = min(behind, key=lambda one: one.a.number, default=None)
    if later is None or later.takes != []:
        return False
    sides = ((later.a, call.a), (later.b, call.b))
    return all(
        bool(taker.takes and giver.gives) and multiple_of(taker.takes[0].values, giver.gives[0].values) is not None
        for taker, giver in sides
    )


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
        held: ChangedWeights | None = None,
    ) -> None:
        self.sides, self.exact, self.blind, self.level, self.held = (a, b), exact, blind, level, held
        self.sites = {pair.site_a: pair.site_b for pair in pairs}
        self.homes = {} if held is None else held.homes()
        own = [pair for pair in pairs if pair.same is False and any(cause.name != "input" for cause in pair.causes)]
        own += [pair for pair in pairs if pair.same is False and not pair.causes and pair.follows_from is None]
        self.own = {(pair.site_a, pair.index_a): (pair.site_b, pair.index_b) for pair in own}
        self.patch, self.passed, self.runs = Patch(), frozenset[str](), 0
        self.beside = frozenset[str]()  # modules of A inside an attention's module that serve something besides it
        self.opened: dict[str, str] = {}  # sites of A walked from a module behind their attention on, and that module
        self.joining: dict[
            str, tuple[Gate | None, Gate | None]
        ] = {}  # gates behind the attention of a site of A, of both
        self.unlike: list[Entry] = []  # those that differ by more than a weight
        self.steps: Sequence[tuple[ModuleStep, ModuleStep]] = ()

    def first(self, steps: Sequence[ModuleStep]) -> tuple[ComparedCall, Entry] | None:
        """Return the first call of A, in the order of ending, whose input agrees and whose output does not."""
        self.ran, aligned = steps, align_steps(steps, self.exact.steps, self.sites, self.homes)
        begun = {one.place[0]: one.number for one in reversed(steps)}
        self.steps = [
            pair
            for pair in aligned
            if not is_within(pair[0].place[0], self.passed) and not self._before_attention(pair[0], begun)
        ]
        calls = [self._compared(order, *pair) for order, pair in enumerate(self.steps)]
        left = [call for call in calls if not _is_made_up_for(call, calls)]
        call = first_apart(left, lambda call: not call.takes, lambda call: bool(call.gives))
        if call is None:
            return None
        return call, self._entry(call, self._inside(call, calls))

    def _inside(self, call: ComparedCall, calls: Sequence[ComparedCall]) -> list[ComparedCall]:
        """Return the calls directly inside a call, apart from modules around them that have no partner."""
        parents, paired = {step.number: step.parent for step in self.ran}, {one.a.number for one in calls}

        def around(number: int) -> int:
            number = parents[number]
            while number >= 0 and number not in paired:
                number = parents[number]
            return number

        return [inner for inner in calls if around(inner.a.number) == call.a.number]

    def _compared(self, order: int, one: ModuleStep, other: ModuleStep) -> ComparedCall:
        """Return a call of both sides with the inputs and outputs that differ."""
        # A module around an attention may return weights or a cache as well; only its main output is compared.
        main = 1 if any(is_within(site, [one.place[0]]) for site in self.sites) else len(one.gives)
        both = matched(one.takes, other.takes), matched(one.gives[:main], other.gives)
        takes, gives = (self._apart(pairs, order) for pairs in both)
        takes = _of_other_shapes(one.takes, other.takes) if takes is None else takes
        if one.parent < 0 and isinstance(self.sides[1].module, ForeignModule):
            takes = []  # what both sides were given: an image may have its channels last
        gives = _of_other_shapes(one.gives[:main], other.gives) if gives is None else gives
        return ComparedCall(one, other, takes, gives)

    def _apart(self, pairs: Sequence[tuple[KeptTensor, KeptTensor]], order: int) -> DifferingTensors:
        # Rounding of independent steps adds up like a random walk: it grows with the root of their number.
        allowed = min(self.level[0] * math.sqrt(order + 1), self.level[1])
        return [pair for pair in pairs if not gap_of(*pair, self.blind) <= allowed] if pairs else None

    def _entry(self, call: ComparedCall, inside: Sequence[ComparedCall]) -> Entry:
        """Return the place in a module: after its last call that agrees, before the first whose input does not."""
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
            module, ends = submodule(model, path_b), [None if end is None else end.b for end in (behind, before)]
            lines = lines_of(module, *ends) if within else line_of(module, call.b)
        numbers = before.takes if before is not None else call.gives
        unlike = bool(numbers and numbers[0][0].shape != numbers[0][1].shape)
        gate = gate_at(
            [] if unlike else (numbers or [])[:1], (call.a, self.ran), (call.b, self.exact.steps), self.sides[1].calls
        )
        found = gate or (difference_of_numbers(numbers[0], known) if numbers else None)
        where = Message("outputs.place.between", module=name, first=first, last=last) if within else name
        to_end = within and before is None and not path
        how, parts = (found.text, (found,)) if found else ("", ())
        return Entry(FirstModule(path, path_b, lines), where, how, parts, to_end=to_end)

    def _before_attention(self, step: ModuleStep, begun: Mapping[str, int]) -> bool:
        """Return whether a call is inside an opened site, and leads to its q, k and v alone, as far as is known."""
        return step.place[0] not in self.beside and any(
            step.place[0] != site and is_within(step.place[0], [site]) and step.number < begun.get(behind, 0)
            for site, behind in self.opened.items()
        )

    def owns(self, path: str) -> bool:
        """Return whether a module is in or around an attention with causes whose output is not yet B's."""
        waiting = [site for site, _ in self.own if site not in self.passed and site not in self.opened]
        return any(is_within(path, [site]) or is_within(site, [path]) for site in waiting)

    def attentions(self, exact: FinerRun) -> Sequence[ModuleStep] | None:
        """Return A's calls when the attentions with causes give what B's give.

        Where a module behind the attention gets its output (`o_proj`), that module gets B's input, so that it is walked
        as well. Elsewhere the whole module of the attention returns B's output.

        Returns None if one of them is the whole model, or if a module ran a different number of times than its
        attention.
        """
        start, taken = self.patch, modules_behind(exact.steps, self.exact.steps, self.own, self.sites)
        self.opened = {site: path for site, (path, _) in taken.items()}
        self._read_gates(exact.steps)
        if taken:
            steps = self._given({step.place: kept for _, (_, both) in taken.items() for step, kept in both})
            found = None if steps is None else self.first(steps)
            if steps is not None and (found is None or found[0].a.place[0] not in self.opened):
                return steps
            self.patch, self.opened = start, {}
        return self._given({})

    def _read_gates(self, steps: Sequence[ModuleStep]) -> None:
        """Reads the gates in front of the modules that get B's input, and lists what is walked in front of those."""
        self.beside = frozenset(path for site in self.opened for path in parts_beside(self.sides[0], site))
        for places in self.own.items():
            site = places[0][0]
            both = numbers_before((steps, self.exact.steps), places, self.sides) if site in self.opened else None
            if both is None:
                continue
            one, other = (gate_of(side.numbers) for side in both)
            self.joining[site] = one, other
            if (found := gates_apart(one, other, both[1])) is not None:
                self.unlike.append(Entry(FirstModule(site, places[1][0]), f"`{site}`", found.text, (found,)))
            elif one is not None and one.name:
                self.beside |= {f"{site}.{one.name}" if site else one.name}

    def gates(self) -> list[Entry]:
        """Return the gates of A and B that differ in front of the modules that got B's input."""
        return [entry for entry in self.unlike if entry.module.a in self.opened]

    def same_beside(self, named: Collection[str]) -> bool:
        """Return whether the modules of the attentions do the same besides, apart from modules in `named`."""
        sites = {place[0]: other[0] for place, other in self.own.items()}
        for site, other in sites.items():
            one, second = self.joining.get(site, (None, None))
            # The heads themselves are what is gated, or what is reached: no norm is in between.
            read = site in self.opened and one is not None and second is not None and not (one.of or second.of)
            if not read and not is_one_code(*self.sides, (site, other), named):
                return False
        return True

    def _given(self, taken: Mapping[CallPlace, tuple[Tensor, ...]]) -> Sequence[ModuleStep] | None:
        """Return A's calls when some modules take, and the other modules of attentions with causes return, B's."""
        exact = self.sides[0].exact
        assert exact is not None
        returned = {}
        for places in self.own.items():
            if places[0][0] not in self.opened and self._is_more(places[0][0], places[1][0]):
                return None
            for side, steps, (site, _) in zip(self.sides, (exact.steps, self.exact.steps), places, strict=True):
                ran, called = sum(call.site == site for call in side.calls), sum(x.place[0] == site for x in steps)
                if not site or ran != called:
                    return None
            whole = next((step.whole for step in self.exact.steps if step.place == places[1]), ())
            if places[0][0] in self.opened:
                continue
            if not whole:
                return None
            returned[places[0]] = whole
        patch = replace(self.patch, returned={**self.patch.returned, **returned}, taken=taken)
        return self.run(patch, [site for site, _ in self.own if site not in self.opened])

    def _is_more(self, site: str, other: str) -> bool:
        """Return whether B's module of an attention holds as many weights as the module around A's.

        So it is if `def layer(x, p)` is a whole layer of B: what it returns is no output of an attention.
        """
        one, second = (side.module for side in self.sides)
        around = site.rpartition(".")[0]
        if one is None or not isinstance(second, ForeignModule) or not around:
            return False
        sizes = [
            sum(p.numel() for p in part.parameters())
            for part in (submodule(one, site), submodule(one, around), submodule(second, other))
        ]
        return sizes[0] < sizes[1] <= sizes[2]

    def run(self, patch: Patch, passed: Collection[str]) -> Sequence[ModuleStep] | None:
        """Return the calls of A run with the patch; None if A can't run so or can't take what B returned.

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
        if run.replaced != {*patch.returned, *patch.taken}:
            return None  # A returns a tensor of another shape, or one that can't be replaced
        self.patch, self.passed = patch, self.passed | set(passed)
        return run.steps


def _of_other_shapes(one: Sequence[KeptTensor], other: Sequence[KeptTensor]) -> DifferingTensors:
    """Return the first tensors of both sides if these have no shape in common; None otherwise."""
    shapes = [{x.shape for x in every} for every in (one, other)]
    return None if not all(shapes) or shapes[0] & shapes[1] else [(one[0], other[0])]


def _input_of(module: str) -> Message:
    return Message("outputs.place.input", module=module)


def _call_of(module: str) -> Message:
    return Message("outputs.place.call", module=module)


def _output_of(module: str) -> Message:
    return Message("outputs.place.output", module=module)

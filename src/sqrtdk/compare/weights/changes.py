"""Weights of B that differ, as changes of a module of A: B's numbers, brought into the layout of A's weight.

The modules of two frameworks don't hold weights of one name. The pairs of weights say which belong together, and each
is then compared as one that both modules hold: scaled, transposed, another weight's, other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from sqrtdk.compare.causes import named_differences
from sqrtdk.compare.causes.parameters import entries_off
from sqrtdk.compare.outside.changes import ModuleChange
from sqrtdk.compare.outside.parts import ModulePair, NamedDifference, TensorPair
from sqrtdk.compare.weights.pairing import WeightPair, WeightPairs
from sqrtdk.messages import Message, joined

_MOST_PARTS = 3  # weights of one module that are named


@dataclass(frozen=True, slots=True, eq=False)
class HeldWeights:
    """The weights of both sides.

    Attributes:
        pairs: which belong together.
        a: A's weights by name.
        b: B's weights by name.
    """

    pairs: WeightPairs
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]

    def change_of(self, path: str, modules: Mapping[str, nn.Module], paths: Collection[str]) -> ModuleChange | None:
        """Return B's weights in place of A's, in a module of A; None if none differ there.

        Args:
            path: path of the module.
            modules: all modules of A by path.
            paths: paths of A's modules that have a partner; a weight belongs to the innermost of them.
        """
        found = [
            one
            for pair in self.suspects()
            if max((other for other in paths if _is_within(pair.a, other)), key=len, default="") == path
            for one in self._difference(pair, path, modules)
        ]
        merged = _merged(found)
        return ModuleChange(tuple(merged), False) if 0 < len(merged) <= _MOST_PARTS else None

    def homes(self) -> dict[str, str]:
        """Return which module of B has the weights of which module of A, by path; none that share them with others.

        Norms of ones could each be any other: their order in the run tells them apart, and not the weights.
        """
        found: dict[str, set[str]] = {}
        back: dict[str, set[str]] = {}
        for pair in self.pairs.pairs:
            a, b = pair.a.rpartition(".")[0], pair.b.rpartition(".")[0]
            if pair.layout.kind != "part" and not pair.tied and not pair.guessed:
                found.setdefault(a, set()).add(b)
                back.setdefault(b, set()).add(a)
        return {a: next(iter(b)) for a, b in found.items() if len(b) == 1 and back[next(iter(b))] == {a}}

    def suspects(self) -> Iterator[WeightPair]:
        """Yield the pairs that do something else than A's where both are used alike.

        A checkpoint in bfloat16 is no difference, and one that went through bfloat16 is.
        """
        yield from self.pairs.suspects
        for pair in self.pairs.pairs:
            if pair.numbers == "rounded" and not pair.turned and self.a[pair.a].dtype == self.b[pair.b].dtype:
                yield pair

    def _difference(self, pair: WeightPair, path: str, modules: Mapping[str, nn.Module]) -> list[NamedDifference]:
        home, _, last = pair.a.rpartition(".")
        owner = modules.get(home)
        if owner is None:
            return []
        a = self.a[pair.a]
        b = pair.layout.as_a(a, self.b[pair.b].to(a.device))
        both = ModulePair(owner, owner, modules)
        one = next(named_differences("tensor", TensorPair(both, last, a, b, entries_off(a, b)), both.kind), None)
        if one is None:
            return []
        shown = f"`{pair.a.removeprefix(f'{path}.')}`"
        edit = None if one.found.edit is None else partial(_edited, one.found.edit, home)
        return [replace(one, found=replace(one.found, words={**one.found.words, "name": shown}, edit=edit))]


def _merged(found: Sequence[NamedDifference]) -> list[NamedDifference]:
    """Return the differences, with weights that are rounded alike in one."""
    rounded = [one for one in found if one.row.of_checkpoint in ("rounded", "not rounded")]
    if len(rounded) < 2:
        return list(found)
    names = [one.found.words["name"] for one in rounded]
    shown = joined(names, "and")
    if (more := len(names) - _MOST_PARTS) > 0:
        shown = Message("compare.weights.and_more", names=joined(names[:_MOST_PARTS], "comma"), count=more)
    edits = [one.found.edit for one in rounded if one.found.edit is not None]
    first = replace(rounded[0].found, words={**rounded[0].found.words, "name": shown}, edit=partial(_all, edits))
    return [replace(rounded[0], found=first), *(one for one in found if one not in rounded)]


def _all(edits: Sequence[Callable[[nn.Module, str], None]], model: nn.Module, path: str) -> None:
    for edit in edits:
        edit(model, path)


def _is_within(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")


def _edited(edit: Callable[[nn.Module, str], None], home: str, model: nn.Module, path: str) -> None:
    """Edit the module that holds the weight, wherever the difference shows."""
    edit(model, home)

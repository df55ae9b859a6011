"""Pairs the weights of two models by their numbers; what is left over is paired by place, and its numbers differ.

Two implementations have other names, and another framework other shapes. The numbers of a weight are its own, so they
are looked for first: under the same name, in any layout, scaled, as a part of a larger weight. The pairs found so say
which name of A belongs to which of B (`layers.#.mlp.down_proj.weight` to `layers.#.mlp.down`), and by these a weight
that was not loaded finds its partner.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_parameters, whole_tensor
from sqrtdk.compare.weights.layouts import Match, WeightLayout, is_constant, match_of, offset_of, rows_match
from sqrtdk.frontends.module import ForeignModule

_MOST_WEIGHTS = 2**12
_ROWS_BUDGET = 2**31  # numbers that are read in the search for rows in another order
_READ_FOR_ROWS, _NAME_LIKENESS = 6, 0.3  # times that a search reads a weight (its axes in every order); of names
_NO_NAMES = ("weight", "kernel", "scale", "embedding", "bias", "w", "b")
_CROSSED_BY = 0.5  # likeness of two pairs of names, of 2 in all
# 3 of "layers.3.wq", and of "layers_3.attn.kernel"; "ln_1.bias" is the name of a module
NUMBER_OF_LAYER = re.compile(r"(?:(?<=[./])|^)\d+(?=[./]|$)|(?<=_)\d+(?=[./][^./]+[./])")


@dataclass(frozen=True, slots=True, eq=False)
class WeightPair:
    """A weight of A and one of B that belong together.

    Attributes:
        a: name of A's.
        b: name of B's.
        layout: how B's lies, seen from A's; of weights whose numbers differ, as those of their kind lie.
        numbers: "same", "rounded", "scaled", "offset", "other".
        dtype: dtype to which one is rounded; "" for none.
        factor: factor or summand of "scaled" and "offset"; 1 else.
        tied: B holds A's weight twice, or A B's, and this is the second time.
        turned: the weight lies as it would in the other convention: A's square matrix as it is, and others transposed.
        expected: the weight of B that has A's place, if that is another: layers or names are exchanged.
        guessed: chosen by the likeness of names, as several weights have these numbers: two norms of ones.
    """

    a: str
    b: str
    layout: WeightLayout
    numbers: str = "same"
    dtype: str = ""
    factor: float = 1.0
    tied: bool = False
    turned: bool = False
    expected: str = ""
    guessed: bool = False


@dataclass(frozen=True, slots=True)
class WeightPairs:
    """The weights of both sides.

    Attributes:
        pairs: in A's order.
        alone_a: names of A's without a partner, in order.
        alone_b: names of B's without a partner, in order.
        named_alike: at least half of A's names are B's too: a weight that differs is found by its name.
    """

    pairs: tuple[WeightPair, ...] = ()
    alone_a: tuple[str, ...] = ()
    alone_b: tuple[str, ...] = ()
    named_alike: bool = True

    @property
    def suspects(self) -> tuple[WeightPair, ...]:
        """Return the pairs that do something else than A's where both are used alike."""
        moved = (replace(pair, b=pair.expected, numbers="other") for pair in self.pairs if pair.expected)
        return (*(one for one in self.pairs if one.numbers not in ("same", "rounded") or one.turned), *moved)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters of a module by name, each once.

    A program of another framework says which names are its own: its functions share parameters with its root.
    """
    named: Mapping[str, Tensor] = (
        module.weights() if isinstance(module, ForeignModule) else dict(named_parameters(module))
    )
    return {name: whole_tensor(weight) for name, weight in named.items() if _is_plain(weight)}


def pair_weights(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> WeightPairs:
    """Return which weight of A is which of B.

    Args:
        a: A's weights by name.
        b: B's weights by name.

    Example:
        >>> q, k = torch.randn(2, 4, 6)
        >>> found = pair_weights({"q_proj.weight": q, "k_proj.weight": k}, {"wq": q.mT, "wk": k.mT + 1})
        >>> [(pair.a, pair.b, pair.layout.kind, pair.numbers) for pair in found.pairs]
        [('q_proj.weight', 'wq', 'transposed', 'same'), ('k_proj.weight', 'wk', 'transposed', 'other')]
    """
    if max(len(a), len(b)) > _MOST_WEIGHTS:
        return WeightPairs(alone_a=tuple(a), alone_b=tuple(b), named_alike=_named_alike(a, b))
    work = _Pairing(a, {name: tensor.to(next(iter(a.values())).device) for name, tensor in b.items()} if a else b)
    work.under_one_name()
    work.anywhere()
    work.parts()
    work.twice()
    work.constants()
    work.by_role()
    pairs = work.with_places(work.with_conventions())
    order = {name: at for at, name in enumerate(a)}
    return WeightPairs(
        tuple(sorted(pairs, key=lambda pair: order[pair.a])),
        tuple(name for name in a if name in work.left_a),
        tuple(name for name in b if name in work.left_b),
        _named_alike(a, b),
    )


class _Pairing:
    def __init__(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
        self.a, self.b = a, b
        self.left_a, self.left_b = dict.fromkeys(a), dict.fromkeys(b)
        self.pairs: list[WeightPair] = []
        self.constant = {id(tensor): is_constant(tensor) for tensor in (*a.values(), *b.values())}

    def under_one_name(self) -> None:
        """Pairs weights of one name and shape whose numbers are the same."""
        for name in [name for name in self.left_a if name in self.left_b]:
            if self.a[name].shape == self.b[name].shape and (match := match_of(self.a[name], self.b[name])) is not None:
                self._add(name, name, match)

    def anywhere(self) -> None:
        """Pairs weights whose numbers are the same in some layout; then multiples, then norms that are off by 1."""
        for scaled in (False, True):
            for x, y in self._of_one_size():
                if (match := match_of(self.a[x], self.b[y], scaled=scaled)) is not None:
                    self._add(x, y, match)
        for x, y in self._of_one_size():
            if (match := offset_of(self.a[x], self.b[y])) is not None:
                self._add(x, y, match)

    def parts(self) -> None:
        """Pairs weights whose rows are among those of another, which may hold several of them."""
        whole_a: set[str] = set()
        whole_b: set[str] = set()
        filled: Counter[str] = Counter()
        budget = _ROWS_BUDGET
        for x in [name for name in self.left_a if not self._is_constant(self.a[name])]:
            ys = [name for name in self.left_b if not self._is_constant(self.b[name])]
            for y in sorted(ys, key=lambda name: _numbers(name) != _numbers(x)):
                sizes = self.a[x].numel(), self.b[y].numel()
                # a weight that is itself a part is no container of others
                if (sizes[0] < sizes[1] and x in whole_a | whole_b) or max(sizes) % min(sizes) or budget <= 0:
                    continue
                budget -= _READ_FOR_ROWS * sum(sizes)
                if (match := rows_match(self.a[x], self.b[y])) is None:
                    continue
                self.pairs.append(WeightPair(x, y, match.layout))
                (whole_b if sizes[0] < sizes[1] else whole_a).add(y if sizes[0] < sizes[1] else x)
                filled[x] += sizes[1]
                if sizes[0] >= sizes[1]:
                    self.left_b.pop(y)
                if sizes[0] <= sizes[1]:
                    self.left_a.pop(x)
                if filled[x] >= sizes[0]:  # it has all its parts, or is one
                    break
        for name in whole_a:
            self.left_a.pop(name, None)
        for name in whole_b:
            self.left_b.pop(name, None)

    def twice(self) -> None:
        """Pairs what one side holds once and the other twice: the embedding as the head."""
        taken = {pair.a: pair.b for pair in self.pairs}
        for y in list(self.left_b):
            for x in taken:
                if not self._is_constant(self.b[y]) and (match := match_of(self.a[x], self.b[y])) is not None:
                    self._add(x, y, match, tied=True)
                    break
        for x in list(self.left_a):
            for y in taken.values():
                if not self._is_constant(self.a[x]) and (match := match_of(self.a[x], self.b[y])) is not None:
                    self._add(x, y, match, tied=True)
                    break

    def constants(self) -> None:
        """Pairs zeros with zeros and ones with ones: by name, in a layer of one number, in their order."""

        def alike(x: str, y: str) -> bool:
            one, other = self.a[x], self.b[y]
            constant = self._is_constant(one) and self._is_constant(other)
            return constant and one.numel() == other.numel() and bool(one.flatten()[0] == other.flatten()[0])

        roles = self._roles()
        fitting = {x: [y for y in self.left_b if alike(x, y) and _numbers(x) == _numbers(y)] for x in self.left_a}
        wanted = Counter(y for every in fitting.values() for y in every)
        for x, all_of_b in fitting.items():
            every = [y for y in all_of_b if y in self.left_b]
            if every:
                best = max(every, key=lambda y: (x == y, roles.get(_role(x)) == _role(y), _likeness(x, y)))
                known = x == best or roles.get(_role(x)) == _role(best) or len(all_of_b) == wanted[best] == 1
                self._add(x, best, Match(WeightLayout(*_whole(self.a[x], self.b[best]))), guessed=not known)

    def by_role(self) -> None:
        """Pairs what is left by the names of those that are paired, by its own name, and by what alone it fits."""
        roles = self._roles()
        for x in list(self.left_a):
            for y in self.left_b:
                if _numbers(x) == _numbers(y) and (roles.get(_role(x)) == _role(y) or x == y) and self._may_be(x, y):
                    self._other(x, y)
                    break
        for x in list(self.left_a):
            if x not in self.left_a:
                continue
            ys = [y for y in self.left_b if _numbers(x) == _numbers(y) and self._may_be(x, y)]
            if not ys:
                continue
            best = max(ys, key=lambda y: _likeness(x, y))
            mutual = [z for z in self.left_a if _numbers(z) == _numbers(best) and self._may_be(z, best)]
            alone = len(ys) == 1 and len(mutual) == 1
            if alone or (_likeness(x, best) >= _NAME_LIKENESS and max(mutual, key=lambda z: _likeness(z, best)) == x):
                self._other(x, best)

    def with_conventions(self) -> list[WeightPair]:
        """Return the pairs, with `turned` where a square matrix lies as the others of its side do not."""
        tables = {name for name in self.a if re.search("emb|wte|wpe", name)}
        matrices = [
            pair
            for pair in self.pairs
            if pair.layout.kind in ("same", "transposed", "reshaped") and pair.numbers != "other"
            and pair.a not in tables and not pair.tied and min(self.a[pair.a].dim(), self.b[pair.b].dim()) >= 2
        ]  # fmt: skip
        oblong = [pair for pair in matrices if not _is_square(self.a[pair.a])]
        kinds = Counter(pair.layout.kind == "transposed" for pair in oblong or matrices)
        if not kinds or len(matrices) < 2:
            return self.pairs
        usual = kinds.most_common(1)[0][0]
        stray = {id(pair) for pair in matrices if (pair.layout.kind == "transposed") != usual}
        return [self._turned(pair, usual) if id(pair) in stray else pair for pair in self.pairs]

    def with_places(self, pairs: list[WeightPair]) -> list[WeightPair]:
        """Return the pairs, with what `expected` weights of B should hold that stand in another place.

        A weight of layer 3 stands in layer 4, though others have the same numbers; or the names of two weights of one
        layer are exchanged: A's `gate_proj` is B's `up`, and A's `up_proj` is B's `gate`.
        """
        whole = [p for p in pairs if p.layout.kind != "part" and p.numbers != "other" and not p.tied and _numbers(p.a)]
        whole = [p for p in whole if len(_numbers(p.a)) == len(_numbers(p.b)) and not self._is_constant(self.a[p.a])]
        moved = [p for p in whole if _numbers(p.a) != _numbers(p.b)]
        expected: dict[int, str] = {}
        if len(moved) * 2 < len(whole):
            for pair in moved:
                place = _with_numbers(pair.b, _numbers(pair.a))
                if place in self.b and self.b[place].shape == self.b[pair.b].shape:
                    expected[id(pair)] = place
        for one, other in itertools.combinations(whole, 2):
            if _numbers(one.a) == _numbers(other.a) == _numbers(one.b) == _numbers(other.b) and (
                self.b[one.b].shape == self.b[other.b].shape and _crossed(one, other)
            ):
                expected |= {id(one): other.b, id(other): one.b}
        return [replace(pair, expected=expected[id(pair)]) if id(pair) in expected else pair for pair in pairs]

    def _turned(self, pair: WeightPair, transposed: bool) -> WeightPair:
        x, y = self.a[pair.a].squeeze(), self.b[pair.b].squeeze()
        if not _is_square(x):
            return pair
        plain = tuple(range(y.dim()))
        axes = next((axes for axes in _rotations(y) if _rows_after(y, axes) == len(x)), plain)
        kind, axes = ("transposed", axes) if transposed else ("same" if x.shape == y.shape else "reshaped", plain)
        return replace(pair, layout=WeightLayout(kind, (0, 1), axes), turned=True)

    def _of_one_size(self) -> Iterator[tuple[str, str]]:
        """Yield names of weights of one size that are still without a partner; those that are alike by name first."""
        by_size: dict[int, list[str]] = defaultdict(list)
        for name in self.left_b:
            by_size[self.b[name].numel()].append(name)
        for x in list(self.left_a):
            if self._is_constant(self.a[x]):
                continue
            for y in by_size[self.a[x].numel()]:
                if x not in self.left_a:
                    break
                if y in self.left_b and not self._is_constant(self.b[y]):
                    yield x, y

    def _add(self, x: str, y: str, match: Match, *, tied: bool = False, guessed: bool = False) -> None:
        how = match.layout, match.numbers, match.dtype, match.factor
        self.pairs.append(WeightPair(x, y, *how, tied, guessed=guessed))
        self.left_a.pop(x, None)
        self.left_b.pop(y, None)

    def _other(self, x: str, y: str) -> None:
        self.pairs.append(WeightPair(x, y, self._usual(x, y), "other"))
        self.left_a.pop(x, None)
        self.left_b.pop(y, None)

    def _usual(self, x: str, y: str) -> WeightLayout:
        """Return how a weight would lie whose numbers differ: as those of its role do, or as its shape allows."""
        one, other = self.a[x], self.b[y]
        of_role = [p.layout for p in self.pairs if _role(p.a) == _role(x) and _role(p.b) == _role(y)]
        shaped = [p.layout for p in self.pairs if self.a[p.a].shape == one.shape and self.b[p.b].shape == other.shape]
        for layout in (*of_role, *shaped):
            if layout.fits(one, other) and layout.kind != "part":
                return layout
        return WeightLayout(*_whole(one, other))

    def _may_be(self, x: str, y: str) -> bool:
        one, other = self.a[x].squeeze(), self.b[y].squeeze()
        return one.numel() == other.numel() and (one.dim() == 1) == (other.dim() == 1)

    def _roles(self) -> dict[str, str]:
        return {_role(pair.a): _role(pair.b) for pair in self.pairs}

    def _is_constant(self, tensor: Tensor) -> bool:
        return self.constant[id(tensor)]


def _named_alike(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return 2 * len(a.keys() & b.keys()) >= len(a)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_meta and tensor.layout is torch.strided and tensor.numel() > 0


def _whole(a: Tensor, b: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the layout of two weights of one size by their shapes alone: (8, 4) may be (4, 8), transposed."""
    x, y = a.squeeze(), b.squeeze()
    plain = tuple(range(x.dim())), tuple(range(y.dim()))
    if x.shape == y.shape:
        return "same", *plain
    if x.dim() == 2:
        for turned in _rotations(y):
            if _rows_after(y, turned) == x.shape[0]:
                return "transposed", plain[0], turned
    return "reshaped", *plain


def _rotations(tensor: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the orders of the axes that transpose a matrix whose sides may be split: (D, H, E) to (H, E, D)."""
    axes = tuple(range(tensor.dim()))
    return ((*axes[at:], *axes[:at]) for at in range(1, tensor.dim()))


def _rows_after(tensor: Tensor, axes: tuple[int, ...]) -> int:
    """Return the rows of the matrix that a rotation of the axes gives: the axes in front that came last."""
    return math.prod(tensor.shape[axis] for axis in axes[: axes.index(0)])


def _is_square(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]


def _with_numbers(name: str, numbers: Sequence[str]) -> str:
    """Return a name with other numbers of layers."""
    given = iter(numbers)
    return NUMBER_OF_LAYER.sub(lambda _: next(given), name)


def _crossed(one: WeightPair, other: WeightPair) -> bool:
    """Return whether the names say the opposite of the numbers: `up` is A's `gate_proj`, and `gate` its `up_proj`."""
    plain = _likeness(one.a, one.b) + _likeness(other.a, other.b)
    return _likeness(one.a, other.b) + _likeness(other.a, one.b) > plain + _CROSSED_BY


def _role(name: str) -> str:
    return NUMBER_OF_LAYER.sub("#", name)


def _numbers(name: str) -> list[str]:
    """Return the numbers of the layers that a name is in; those inside a word, as in fc1, are of the word."""
    return NUMBER_OF_LAYER.findall(name)


def _likeness(x: str, y: str) -> float:
    """Return how alike two names are, 0 to 1; the last word counts most: `down` in "layers.0.mlp.down_proj.weight"."""
    one, other = _words(x), _words(y)
    last, whole = _ratio(one[-1], other[-1]), _ratio(".".join(one), ".".join(other))
    return 0.8 * last + 0.2 * whole


def _ratio(x: str, y: str) -> float:
    return float(SequenceMatcher(None, x, y).ratio())


def _words(name: str) -> list[str]:
    """Return the parts of a name that say what it is: without "weight", numbers and the like."""
    words = [part.removesuffix("_proj") for part in name.replace("/", ".").split(".") if part not in _NO_NAMES]
    return [word for word in words if not word.isdigit()] or [name]

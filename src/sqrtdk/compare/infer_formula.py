"""The formula of a side that tells q, k, v and what came out, and little else.

It is looked for near the other side's: what ports do by mistake (`options`), one change, then two, each computed in
float64 and compared with what was recorded; the first that gives that within rounding is taken. Changes are tried on
some rows of the attention, and what is taken is proven on all. How many are tried is bounded by what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain, combinations, islice
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.tolerance import inverse_root
from sqrtdk.compare.compute import dtype_of
from sqrtdk.compare.fit.scale import CAPS, RATIO, fit_scale, fit_softcap
from sqrtdk.compare.infer_rows import BEST, fills_of, from_rows
from sqrtdk.compare.numbers import one_number, rescaled, total
from sqrtdk.compare.observed import Seen
from sqrtdk.compare.options import (
    BIAS,
    DROPOUT,
    FILL,
    MASK,
    ROUNDING,
    SCALE,
    SINKS,
    SOFTCAP,
    Option,
    blind_rows,
    options,
    window,
)
from sqrtdk.compare.program import Formula
from sqrtdk.compare.recorded import Recorded
from sqrtdk.compare.suspect import Edit
from sqrtdk.tracing.tensors import CallTensors, Term

LOGITS = 2**26  # logits that may be computed for trials: some seconds
MOST = 600  # trials
FITTED = 6  # formulas whose scale is fitted, each as dear as a hundred trials
Known = Mapping[int, Edit[Formula]]  # what a side tells of its formula: by the part, what puts it into another formula
STRONG = (0.5, 1.0, 2.0, 3.0, 4.0, 7.0)  # softcaps below the usual ones
NEAR = 0.02  # relative: a fitted scale so near a usual one is tried as that one first


def infer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor | None,
    known: Known | None,
    other: Formula,
    first: Formula | None = None,
    *,
    far: bool = True,
) -> Formula | None:
    """The formula that gives the output.

    Args:
        query: (B, Hq, L, E), as it met k.
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        output: (B, Hq, L, Ev), of the dtype that the side computed in.
        lse: (B, Hq, L); None where it is not known.
        known: what the side tells, which is not put in question; None: nothing.
        other: the other side's formula.
        first: what was found for another call of the side; tried before all but the other's own.
        far: whether more than one change is looked for, and numbers that nobody told.

    Returns:
        The first formula that gives output and lse within rounding, that of the other side before any other; None
        where none does.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
        >>> output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> infer(q, k, v, output, None, None, Formula(1.0, visible=torch.ones(8, 8, dtype=torch.bool).tril())).scale
        0.25
    """
    call, known = Recorded(query, key, value, output, lse), known or {}
    base, fixed = merged(known, other), known.keys() - {ROUNDING}
    found = [option for option in options(base, call.sizes) if _leaves(option, base, fixed)]
    if MASK not in fixed:
        found = [*(window(base, call.sizes, row) for row in call.first_apart(base)), *found]
    guess = None if first is None else merged(known, first)
    search = _Search(call, base, tuple(found), frozenset(fixed), guess if guess and _has_sizes(guess, call) else None)
    return next((formula for formula in search.trials(far) if call.left(formula) <= 1.0 and call.gives(formula)), None)


def _leaves(option: Option, base: Formula, fixed: Set[int]) -> bool:
    """Whether an option leaves alone what is known; of a softcap that is known the place may still be another."""
    return option.part not in fixed or (option.part == SOFTCAP and option.change(base).softcap == base.softcap)


def _has_sizes(formula: Formula, call: Recorded) -> bool:
    """Whether the tensors of a formula have the sizes of a call."""
    sizes = call.sizes
    whole = (sizes.batch, sizes.heads, sizes.rows, sizes.keys)
    every = (formula.scale, formula.after, formula.bias, formula.visible, formula.kept)
    shapes = [(1, 1, 1, 1, *part.shape)[-4:] for part in every if isinstance(part, Tensor)]
    fits = all(size in (1, there) for shape in shapes for size, there in zip(shape, whole, strict=True))
    return fits and (formula.sinks is None or formula.sinks.numel() == sizes.heads)


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """What is tried, and on what.

    Attributes:
        call: what was recorded.
        base: formula that is changed.
        options: the changes.
        fixed: the parts that are known.
        guess: a formula that is tried before the changes.
    """

    call: Recorded
    base: Formula
    options: tuple[Option, ...]
    fixed: frozenset[int]
    guess: Formula | None

    def trials(self, far: bool) -> Iterator[Formula]:
        """Formulas that may give what was recorded, nearest to the base first."""
        yield self.base
        if self.guess is not None:
            yield self.guess
        tried: list[tuple[float, Option]] = []
        for option in self._single():
            formula = option.change(self.base)
            tried.append((self.call.left(formula), option))
            if tried[-1][0] <= 1.0:
                yield formula
        if not far:
            return
        for formula in chain([self.base], self._from_rows(self._supposed())):
            yield from self._with_fills(formula)
        yield from self._fitted([self.base])
        if SCALE not in self.fixed:
            yield from self._fitted(list(islice(self._from_rows(self._grid()), 2 * BEST)))
        yield from self._twofold()
        nearest = sorted((entry for entry in tried if entry[1].part != SCALE), key=lambda entry: entry[0])
        yield from self._fitted([option.change(self.base) for _, option in nearest[: min(FITTED, self._most // 100)]])

    def _from_rows(self, supposed: list[Formula]) -> Iterator[Formula]:
        return from_rows(self.call, supposed, masked=MASK in self.fixed, sunk=SINKS in self.fixed)

    def _with_fills(self, formula: Formula) -> Iterator[Formula]:
        """What rows that see no key may be, and numbers that leave weight at hidden keys."""
        yield formula
        if FILL not in self.fixed:
            yield from blind_rows(formula)
            yield from fills_of(self.call, formula)

    def _supposed(self) -> list[Formula]:
        """The base, and it with another usual scale, softcap or bias, or a scale and one of the others."""
        parts = {part: [o.change for o in self._single() if o.part == part] for part in (SCALE, SOFTCAP, BIAS)}
        scaled = [self.base, *(change(self.base) for change in parts[SCALE])]
        others = [*parts[SOFTCAP], *parts[BIAS]]
        return [*scaled, *(change(formula) for change in others for formula in self._few_scales())]

    def _grid(self) -> list[Formula]:
        """The base with scales from which no other is far, and with softcaps of the usual scales."""
        low, high = math.log(1 / (8 * self.call.sizes.features)), math.log(8.0)
        scales = torch.linspace(low, high, 1 + math.ceil((high - low) / math.log(RATIO))).exp().tolist()
        scaled = [rescaled(self.base, Formula(scale)) for scale in scales]
        if SOFTCAP in self.fixed:
            return scaled
        return [*scaled, *(replace(formula, softcap=cap) for cap in STRONG for formula in self._few_scales())]

    def _few_scales(self) -> list[Formula]:
        """The base, and it with the textbook's scale and none."""
        root = inverse_root(self.call.sizes.features)
        return [self.base, *(rescaled(self.base, Formula(scale)) for scale in (root, 1.0) if SCALE not in self.fixed)]

    def _single(self) -> list[Option]:
        return [option for option in self.options if option.changes == 1][: self._most]

    @property
    def _most(self) -> int:
        """How many trials there may be."""
        return max(64, min(MOST, LOGITS // max(1, self.call.cost)))

    def _twofold(self) -> Iterator[Formula]:
        """Formulas of two changes, of two parts or of one."""
        double = [option.change for option in self.options if option.changes == 2]
        yield from (change(self.base) for change in double)
        places: dict[int, int] = {}
        ranked = []
        for option in self._single():
            places[option.part] = rank = places.get(option.part, -1) + 1
            ranked.append((rank, option))
        pairs = (pair for pair in combinations(ranked, 2) if pair[0][1].part != pair[1][1].part)
        nearest = sorted(pairs, key=lambda pair: pair[0][0] + pair[1][0])  # what is first in its part is likeliest
        for (_, first), (_, second) in nearest[: self._most]:
            yield second.change(first.change(self.base))

    def _fitted(self, formulas: list[Formula]) -> Iterator[Formula]:
        """Each with the scale, and the softcap, that fits best; a usual scale that is near first."""
        if SCALE in self.fixed:
            return
        changed = [option.change(self.base) for option in self.options if option.part == SCALE]
        usual = [one_number(total(formula)) for formula in (self.base, *changed)]
        for formula in formulas:
            for fitted in self._fits(formula):
                yield from (*_usual(fitted, usual), fitted)

    def _fits(self, formula: Formula) -> Iterator[Formula]:
        caps: list[tuple[float, ...]] = [()]  # none is looked for
        if formula is self.base and SOFTCAP not in self.fixed:
            caps.append(CAPS)
        elif formula.softcap is not None and SOFTCAP not in self.fixed:
            caps = [(formula.softcap,)]
        for some in caps:
            result = self._fit(formula, some, every_head=False)
            if result is not None and (isinstance(result.scale, Tensor) or self.call.left(result) <= 1.0):
                near = (result.softcap,) if some and result.softcap is not None else ()
                result = self._fit(formula, near, every_head=True)  # the finer, and of each head
            if result is not None:
                yield result

    def _fit(self, formula: Formula, caps: tuple[float, ...], every_head: bool) -> Formula | None:
        some, here = self.call.tried(formula, every_head=every_head)
        lse = None if here.sinks is not None else some.lse  # with or without sinks: not known
        fit = partial(fit_softcap, caps=caps) if caps else fit_scale
        found = fit(some.query, some.key, some.value, some.output, None, lse, formula=replace(here, scale=1.0))
        if found is None:
            return None
        factor = found.scale[:, None, None] if found.common is None else found.common
        return replace(formula, scale=factor, softcap=found.softcap or formula.softcap)


def _usual(fitted: Formula, scales: list[float | None]) -> Iterator[Formula]:
    """What was fitted with a usual scale in place of one that is near, and with a softcap of few digits."""
    if isinstance(fitted.scale, Tensor):
        fitted = replace(fitted, scale=float(fitted.scale.log().mean().exp()))  # one for all heads
        yield fitted
    number = one_number(total(fitted))
    if fitted.softcap is not None:
        fitted = replace(fitted, softcap=float(f"{fitted.softcap:.3g}"))
    for scale in scales:
        if number and scale and abs(scale / number - 1.0) < NEAR:
            yield rescaled(fitted, Formula(scale))


# -- what a side tells of its formula ----------------------------------------------------------------------------------


def merged(known: Known, other: Formula) -> Formula:
    """The other side's formula with what is known in it."""
    for part in sorted(known):
        other = known[part](other)
    return other


def known_of(call: CallTensors, seen: Mapping[str, Seen]) -> Known:
    """What a call tells of its formula.

    A list of terms is whole: what it does not name is not there. With an operation that was not followed it may be,
    and then the values that are named are known and no more; nor is the scale, which that operation may have changed.

    Args:
        call: its tensors.
        seen: of `observe(call)`.
    """
    known: dict[int, Edit[Formula]] = {}
    lesser = torch.finfo(dtype_of(call.dtype)).eps
    told = {name: getattr(call, name) for name in ("logits_dtype", "weights_dtype")}
    told = {name: dtype for name, dtype in told.items() if torch.finfo(dtype_of(dtype)).eps > lesser}
    if told:
        known[ROUNDING] = partial(replace, **told)
    if call.kept is not None:
        known[DROPOUT] = partial(replace, kept=call.kept, dropout=call.dropout)
    if call.terms is None:
        return known
    whole = all(term.name != "unknown" for term in call.terms)
    terms = {name: [term for term in call.terms if term.name == name] for name in ("softcap", "bias", "mask", "sinks")}
    none = {name for name, named in terms.items() if whole and not named}
    values: dict[str, Any] = {name: named[0].value if len(named) == 1 else None for name, named in terms.items()}
    scale = _scale(call.terms, seen) if whole else None
    if scale is not None:
        known[SCALE] = partial(rescaled, other=Formula(scale))
    if "softcap" in none or (values["softcap"] is not None and not terms["softcap"][0].detail):
        known[SOFTCAP] = partial(replace, softcap=None if "softcap" in none else float(values["softcap"]))
    last = [term.name for term in call.terms if term.name in ("bias", "scale")][-1:]
    if "bias" in none or (isinstance(values["bias"], Tensor) and last == ["bias"]):
        bias, name = (None, "bias") if "bias" in none else (values["bias"].double(), terms["bias"][0].detail)
        known[BIAS] = partial(replace, bias=bias, bias_name=name, bias_by=1.0)
    masks = [term.value for term in terms["mask"] if isinstance(term.value, Tensor)]
    if "mask" in none:
        known[MASK] = partial(replace, visible=torch.ones(1, 1, 1, 1, dtype=torch.bool), mask="")
    elif masks and len(masks) == len(terms["mask"]):
        kinds, added = {term.detail for term in terms["mask"]}, all(term.added for term in terms["mask"])
        kind = kinds.pop() if len(kinds) == 1 else "mask"
        known[MASK] = partial(replace, visible=reduce(torch.logical_and, masks), mask=kind)
        fill = min(term.fill for term in terms["mask"])
        known[FILL] = partial(replace, fill=fill, fill_by=1.0, fill_added=added)
    if "sinks" in none or isinstance(values["sinks"], Tensor):
        known[SINKS] = partial(replace, sinks=values["sinks"])
    return known


def _scale(terms: tuple[Term, ...], seen: Mapping[str, Seen]) -> float | None:
    """The product of all factors; None where one is not known or is no number."""
    factors = [seen["query"].factor, seen["key"].factor, *(term.value for term in terms if term.name == "scale")]
    numbers = [float(x) for x in factors if x is not None and (not isinstance(x, Tensor) or x.numel() == 1)]
    return math.prod(numbers) if len(numbers) == len(factors) else None

"""Finds the formula of a side that tells q, k, v and the output, and little else.

The search starts near the other side's formula: mistakes that ports make (`formula_options`), one change, then two.
Each candidate is computed in float64 and compared with the record; the first that fits within rounding is taken.
Candidates are tried on some rows of the attention, and the winner is proven on all. Their cost limits their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice

from torch import Tensor

from sqrtdk.audit.tolerance import inverse_root
from sqrtdk.compare.infer.evidence import CHANGES, FITTED, TWOFOLD, Recorded, SearchWork
from sqrtdk.compare.infer.fit import USUAL_SOFTCAPS, fit_scale
from sqrtdk.compare.infer.fit.scale import fit_cost, scale_grid
from sqrtdk.compare.infer.options import (
    BIAS,
    DROPOUT,
    FILL,
    MASK,
    ROUNDING,
    SCALE,
    SINKS,
    SOFTCAP,
    Option,
    formula_options,
    other_blind_rows,
    scaled,
    window_before_key_0,
)
from sqrtdk.compare.infer.rows import MOST_ASSUMPTIONS, fills_of, formulas_from_rows
from sqrtdk.compare.inside.build import formula_of
from sqrtdk.compare.inside.call_numbers import ObservedVector
from sqrtdk.compare.inside.program import Formula
from sqrtdk.compare.numbers import rescaled, single_number, total
from sqrtdk.tracing.tensors import CallTensors

MOST_LOGITS = 2**26  # total number of logits that trials may compute: some seconds
MOST_TRIALS = 600  # trials at most
MOST_FITTED = 6  # formulas whose scale is fitted: each costs as much as a hundred trials
STRONG_SOFTCAPS = (0.5, 1.0, 2.0, 3.0, 4.0, 7.0)  # softcaps below the usual ones, for codes that cap strongly
USUAL_SCALE_DISTANCE = 0.02  # relative: a fitted scale this close to a usual one is tried as that one first
NO_CAP = (None,)  # no softcap is searched
TERM_NAMES = {SCALE: "scale", SOFTCAP: "softcap", BIAS: "bias", MASK: "mask", SINKS: "sinks"}  # names of terms
TERM_FIELDS = {
    SOFTCAP: ("softcap", "softcap_by_logits"),
    BIAS: ("bias", "bias_name", "bias_by"),
    MASK: ("visible", "mask"),
    FILL: ("fill", "fill_by", "fill_added"),
    SINKS: ("sinks",),
    ROUNDING: ("logits_dtype", "weights_dtype"),
    DROPOUT: ("kept", "dropout"),
}


@dataclass(frozen=True, slots=True, eq=False)
class KnownFormula:
    """What a side tells about its formula.

    Attributes:
        formula: formula with the known parts.
        parts: numbers of the known parts.
    """

    formula: Formula
    parts: Set[int]

    def put_into(self, other: Formula) -> Formula:
        """Return a copy of another formula in which the known parts are replaced by this one's."""
        if SCALE in self.parts:
            other = rescaled(other, Formula(total(self.formula)))
        names = [name for part in self.parts for name in TERM_FIELDS.get(part, ())]
        return replace(other, **{name: getattr(self.formula, name) for name in names}) if names else other


NOTHING_KNOWN = KnownFormula(Formula(), frozenset())


def known_formula(call: CallTensors, seen: Mapping[str, ObservedVector]) -> KnownFormula:
    """Return what a call tells about its formula.

    A list of terms is complete: an operation that it doesn't name didn't happen. If the list holds an operation that
    was not followed, only the named values are known. The scale is then unknown too, since that operation may have
    changed it.

    Args:
        call: tensors of the call.
        seen: result of `observe(call)`.
    """
    every, numbers = call.terms or (), ("scale", "softcap")
    terms = tuple(x for x in every if isinstance(x.value, Tensor) or (x.name in numbers and x.value is not None))
    formula = formula_of(replace(call, terms=terms), seen)
    if formula is None:
        return NOTHING_KNOWN
    whole = call.terms is not None and all(term.name != "unknown" for term in every)
    named, lost = {term.name for term in every}, {term.name for term in every if term not in terms}
    parts = {part for part, name in TERM_NAMES.items() if name not in lost and (whole or name in named)}
    if not whole or single_number(total(formula)) is None:
        parts.discard(SCALE)
    if "scale" in lost:  # a scale after the bias multiplies the bias too
        parts.discard(BIAS)
    parts |= {FILL} if MASK in parts and "mask" in named else set()
    parts |= {ROUNDING} if formula.logits_dtype or formula.weights_dtype else set()
    parts |= {DROPOUT} if call.kept is not None else set()
    return KnownFormula(formula, parts)


# -- the search --------------------------------------------------------------------------------------------------------


def infer_formula(
    call: Recorded,
    other: Formula,
    first: Formula | None = None,
    known: KnownFormula | None = None,
    *,
    far: bool = True,
    work: SearchWork | None = None,
) -> Formula | None:
    """Return the formula that gives the output.

    Args:
        call: the recorded tensors.
        other: the other side's formula.
        first: formula found for another call of this side; tried right after the other side's own.
        known: what the side tells, which is never changed; None: nothing.
        far: whether to search for more than one change, and for numbers that no side tells.
        work: what may be computed, and what was left out; None bounds nothing.

    Returns:
        The first formula that gives output and lse within rounding, the other side's before any other; None if no
        candidate does.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
        >>> output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> causal = Formula(1.0, visible=torch.ones(8, 8, dtype=torch.bool).tril())
        >>> infer_formula(Recorded(q, k, v, output, None), causal).scale
        0.25
    """
    known = known or NOTHING_KNOWN
    base, fixed = known.put_into(other), known.parts - {ROUNDING}
    found = [option for option in formula_options(base, call.sizes) if _leaves(option, base, fixed)]
    # The first row that the base fails to give tells the window: earlier rows still see every key.
    if MASK not in fixed:
        found = [*(window_before_key_0(base, call.sizes, row) for row in call.first_apart(base)), *found]
    guess = None if first is None else known.put_into(first)
    guess = guess if guess and _has_sizes(guess, call) else None
    search = _Search(call, base, tuple(found), fixed, guess, work or SearchWork())
    return next((formula for formula in search.trials(far) if call.left(formula) <= 1.0 and call.gives(formula)), None)


def _leaves(option: Option, base: Formula, fixed: Set[int]) -> bool:
    """Return whether an option keeps what is known; the place of a known softcap may still change."""
    return option.part not in fixed or (option.part == SOFTCAP and option.change(base).softcap == base.softcap)


def _has_sizes(formula: Formula, call: Recorded) -> bool:
    """Return whether the tensors of a formula fit the sizes of a call."""
    sizes = call.sizes
    whole = (sizes.batch, sizes.heads, sizes.rows, sizes.keys)
    every = (formula.scale, formula.after, formula.bias, formula.visible, formula.kept)
    shapes = [(1, 1, 1, 1, *part.shape)[-4:] for part in every if isinstance(part, Tensor)]
    fits = all(size in (1, there) for shape in shapes for size, there in zip(shape, whole, strict=True))
    return fits and (formula.sinks is None or formula.sinks.numel() == sizes.heads)


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """The candidates and the call on which they are tried.

    Attributes:
        call: the recorded tensors.
        base: formula that is changed.
        options: the changes.
        fixed: numbers of the known parts.
        guess: formula that is tried before the changes.
        work: what may be computed.
    """

    call: Recorded
    base: Formula
    options: tuple[Option, ...]
    fixed: Set[int]
    guess: Formula | None
    work: SearchWork

    def trials(self, far: bool) -> Iterator[Formula]:
        """Yield formulas that may give the record, nearest to the base first."""
        yield self.base
        if self.guess is not None:
            yield self.guess
        tried: list[tuple[float, Option]] = []
        for option in self._single():
            if not self.work.takes(self.call.cost, CHANGES):
                return
            formula = option.change(self.base)
            tried.append((self.call.left(formula), option))
            if tried[-1][0] <= 1.0:
                yield formula
        # From here on numbers are fitted to the record, which costs far more than a trial.
        if not far:
            return
        for formula in chain([self.base], self._from_rows(self._supposed())):
            if self.work.takes(self.call.cost, CHANGES):
                yield from self._with_fills(formula)
        yield from self._fitted([self.base])
        if SCALE not in self.fixed:
            yield from self._fitted(list(islice(self._from_rows(self._grid()), 2 * MOST_ASSUMPTIONS)))
        yield from self._twofold()
        nearest = sorted((entry for entry in tried if entry[1].part != SCALE), key=lambda entry: entry[0])
        yield from self._fitted(
            [option.change(self.base) for _, option in nearest[: min(MOST_FITTED, self._most // 100)]]
        )

    def _from_rows(self, supposed: list[Formula]) -> Iterator[Formula]:
        masked, sunk = MASK in self.fixed, SINKS in self.fixed
        return formulas_from_rows(self.call, supposed, masked=masked, sunk=sunk, work=self.work)

    def _with_fills(self, formula: Formula) -> Iterator[Formula]:
        """Yield the formula, variants of rows that see no key, and fills that leave weight at hidden keys."""
        yield formula
        if FILL not in self.fixed:
            yield from other_blind_rows(formula)
            yield from fills_of(self.call, formula)

    def _supposed(self) -> list[Formula]:
        """Return the candidates: the base with a standard scale, softcap or bias, or with a scale and one of these."""
        parts = {part: [o.change for o in self._single() if o.part == part] for part in (SCALE, SOFTCAP, BIAS)}
        others = [*parts[SOFTCAP], *parts[BIAS]]
        of_scales = [self.base, *(change(self.base) for change in parts[SCALE])]
        return [*of_scales, *(change(formula) for change in others for formula in self._few_scales())]

    def _grid(self) -> list[Formula]:
        """Return the base with a grid of scales, and with strong softcaps at the usual scales."""
        every = [scaled(scale)(self.base) for scale in scale_grid(self.call.sizes.features).tolist()]
        if SOFTCAP in self.fixed:
            return every
        return [*every, *(replace(formula, softcap=cap) for cap in STRONG_SOFTCAPS for formula in self._few_scales())]

    def _few_scales(self) -> list[Formula]:
        """Return the base, and the base with the textbook scale and with no scale."""
        root = inverse_root(self.call.sizes.features)
        return [self.base, *(scaled(scale)(self.base) for scale in (root, 1.0) if SCALE not in self.fixed)]

    def _single(self) -> list[Option]:
        return [option for option in self.options if option.changes == 1][: self._most]

    @property
    def _most(self) -> int:
        """The number of trials that the cost of one trial allows."""
        return max(64, min(MOST_TRIALS, MOST_LOGITS // max(1, self.call.cost)))

    def _twofold(self) -> Iterator[Formula]:
        """Yield formulas with two changes, of two parts or of one part."""
        double = [option.change for option in self.options if option.changes == 2]
        yield from (change(self.base) for change in double)
        places: dict[int, int] = {}
        ranked = []
        for option in self._single():
            places[option.part] = rank = places.get(option.part, -1) + 1
            ranked.append((rank, option))
        pairs = (pair for pair in combinations(ranked, 2) if pair[0][1].part != pair[1][1].part)
        nearest = sorted(pairs, key=lambda pair: pair[0][0] + pair[1][0])  # a part's first options are likeliest
        for (_, first), (_, second) in nearest[: self._most]:
            if not self.work.takes(self.call.cost, TWOFOLD):
                return
            yield second.change(first.change(self.base))

    def _fitted(self, formulas: list[Formula]) -> Iterator[Formula]:
        """Yield each formula with the best fitting scale and softcap; a usual scale nearby comes first."""
        if SCALE in self.fixed:
            return
        changed = [option.change(self.base) for option in self.options if option.part == SCALE]
        usual = [single_number(total(formula)) for formula in (self.base, *changed)]
        for formula in formulas:
            for fitted in self._fits(formula):
                yield from (*_usual(fitted, usual), fitted)

    def _fits(self, formula: Formula) -> Iterator[Formula]:
        free: tuple[Sequence[float | None], ...] = (
            (NO_CAP, USUAL_SOFTCAPS) if formula is self.base else ((formula.softcap,),)
        )
        for caps in (NO_CAP,) if SOFTCAP in self.fixed else free:
            result = self._fit(formula, caps, every_head=False)
            if result is not None and (isinstance(result.scale, Tensor) or self.call.left(result) <= 1.0):
                near = caps if caps == NO_CAP else (result.softcap,)
                result = self._fit(formula, near, every_head=True)  # a finer fit, with a scale for each head
            if result is not None:
                yield result

    def _fit(self, formula: Formula, caps: Sequence[float | None], every_head: bool) -> Formula | None:
        some, here = self.call.tried(formula, every_head=every_head)
        if not self.work.takes(fit_cost(some.query, some.key) * len(caps), FITTED):
            return None
        lse = None if here.sinks is not None else some.lse  # an lse may or may not include the sinks
        found = fit_scale(some.query, some.key, some.value, some.output, lse, formula=here, caps=caps)
        if found is None:
            return None
        factor = found.scale[:, None, None] if found.common is None else found.common
        return replace(formula, scale=factor, softcap=found.softcap or formula.softcap)


def _usual(fitted: Formula, scales: list[float | None]) -> Iterator[Formula]:
    """Yield the fit with a usual scale in place of a close one, and with a softcap of three digits."""
    if isinstance(fitted.scale, Tensor):
        fitted = replace(fitted, scale=float(fitted.scale.log().mean().exp()))  # one for all heads
        yield fitted
    number = single_number(total(fitted))
    if fitted.softcap is not None:
        fitted = replace(fitted, softcap=float(f"{fitted.softcap:.3g}"))
    for scale in scales:
        if number and scale and abs(scale / number - 1.0) < USUAL_SCALE_DISTANCE:
            yield scaled(scale)(fitted)

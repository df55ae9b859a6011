"""The formula of a side that tells q, k, v and what came out, and little else.

It is looked for near the other side's: what ports do by mistake (`options`), one change, then two, each computed in
float64 and compared with what was recorded; the first that gives that within rounding is taken. Changes are tried on
some rows of the attention, and what is taken is proven on all. How many are tried is bounded by what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, islice

import torch
from torch import Tensor

from sqrtdk.audit.tolerance import inverse_root
from sqrtdk.compare.fit.scale import CAPS, RATIO, fit_scale, fit_softcap
from sqrtdk.compare.infer_known import Known, merged
from sqrtdk.compare.infer_rows import BEST, fills_of, from_rows
from sqrtdk.compare.numbers import one_number, rescaled, total
from sqrtdk.compare.options import BIAS, FILL, MASK, SCALE, SINKS, SOFTCAP, Option, blind_rows, options, window
from sqrtdk.compare.program import Formula
from sqrtdk.compare.recorded import Recorded

LOGITS = 2**26  # logits that may be computed for trials: some seconds
MOST = 600  # trials
FITTED = 6  # formulas whose scale is fitted, each as dear as a hundred trials
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
        known: what the side tells, which is not put in question.
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
    call = Recorded(query, key, value, output, lse)
    base, fixed = merged(known, other)
    found = list(_allowed(options(base, call.sizes), base, fixed))
    if MASK not in fixed:
        found = [*(window(base, call.sizes, row) for row in call.first_apart(base)), *found]
    search = _Search(call, base, tuple(found), fixed, _guess(first, known, call))
    return next((formula for formula in search.plausible(far) if call.gives(formula)), None)


def _guess(first: Formula | None, known: Known | None, call: Recorded) -> Formula | None:
    """The formula of another call with what is known of this one; None where its tensors are of other sizes."""
    if first is None:
        return None
    formula, _ = merged(known, first)
    sizes = call.sizes
    whole = (sizes.batch, sizes.heads, sizes.rows, sizes.keys)
    every = (formula.scale, formula.after, formula.bias, formula.visible, formula.kept)
    shapes = [(1, 1, 1, 1, *part.shape)[-4:] for part in every if isinstance(part, Tensor)]
    fits = all(size in (1, there) for shape in shapes for size, there in zip(shape, whole, strict=True))
    sinks = formula.sinks is None or formula.sinks.numel() == sizes.heads
    return formula if fits and sinks else None


def _allowed(every: Iterable[Option], base: Formula, fixed: frozenset[int]) -> Iterator[Option]:
    """The options that leave alone what is known; of a softcap that is known the place may still be another."""
    for option in every:
        if option.part not in fixed or (option.part == SOFTCAP and option.change(base).softcap == base.softcap):
            yield option


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

    def plausible(self, far: bool) -> Iterator[Formula]:
        """Formulas that give what was recorded on some rows, nearest to the base first."""
        if self.call.left(self.base) <= 1.0:
            yield self.base
        if self.guess is not None and self.call.left(self.guess) <= 1.0:
            yield self.guess
        tried: list[tuple[float, Option]] = []
        for option in self._single():
            formula = option.change(self.base)
            left = self.call.left(formula)
            if left <= 1.0:
                yield formula
            tried.append((left, option))
        if not far:
            return
        yield from self._of_rows(self._supposed())
        yield from self._fitted([self.base])
        if SCALE not in self.fixed:
            yield from self._fitted(list(islice(self._from_rows(self._grid()), 2 * BEST)))
        for formula in self._twofold():
            if self.call.left(formula) <= 1.0:
                yield formula
        nearest = sorted((entry for entry in tried if entry[1].part != SCALE), key=lambda entry: entry[0])
        yield from self._fitted([option.change(self.base) for _, option in nearest[: min(FITTED, self._most // 100)]])

    def _of_rows(self, supposed: list[Formula]) -> Iterator[Formula]:
        """With what the rows tell of mask, sinks and fill."""
        for formula in chain([self.base], self._from_rows(supposed)):
            for whole in self._with_fills(formula):
                if self.call.left(whole) <= 1.0:
                    yield whole

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
                for trial in (*_usual(fitted, usual), fitted):
                    if self.call.left(trial) <= 1.0:
                        yield trial

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

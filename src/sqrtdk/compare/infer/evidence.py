"""What a side recorded of one attention without its formula, and whether a formula explains it within rounding.

The rounding is estimated from the formula itself, with logits and weights rounded to the dtype of the output. Half
precision rounds them that much and no more, up to the factor `TRIAL_SLACK`. Products of E terms, summed in
float32, are off by up to sqrt(E) times the rounding of their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.inside.compute import compute_output, repeat_heads, some_heads, some_rows
from sqrtdk.compare.inside.program import Formula
from sqrtdk.messages import Message, joined

TRIAL_ROWS = 24  # evenly spaced rows on which a formula is tried
FIRST_TRIAL_ROWS = 4  # and the first rows, to which a causal mask leaves the fewest keys
FEWEST_HEADS = 2
TRIAL_LOGITS = 2**16  # logits of these rows in one trial: this limits the number of heads
TRIAL_SLACK = 2.0
FAR, HALF_FAR = 1e-3, 0.25  # root mean square, relative: beyond it no rounding is computed
HALF_APART = (0.03, 0.06, 0.12, 0.25)  # candidates for what separates a difference from rounding in half precision
FAR_OFF_FACTOR = 1e3  # factor that ranks formulas far off behind all others
DIVISION_FLOOR = 1e-30  # keeps divisions by 0 finite
FLIPPED_SHARE = 0.1  # share of the root mean square from numbers that round to another step
FLOAT64_SHARE = 2.0**-29  # ratio of float64's rounding to float32's
SEARCH_NUMBERS = 2**27  # numbers that the searches of one comparison may compute in vain: about five seconds
STEP_NUMBERS = 2**14  # at least, of one step: below that, calls cost more than numbers
CHANGES, FITTED, ROW_MASKS, TWOFOLD, STEPS = "changes", "fitted", "rows", "twofold", "steps"  # what may be left out


class SearchWork:
    """How much searches may compute, and what they left out.

    Two small files of noise name no formula, so that every candidate is tried, and the intervals of keys alone grow
    with the square of the keys. What is counted are numbers, not seconds: an answer does not depend on the machine.
    Each search gets half of what is left, and returns what it took if it found something: a thousand layers whose
    formulas can't be found cost no more than one.

    Example:
        >>> work = SearchWork(2**20).part()
        >>> work.takes(2**18, FITTED), work.takes(2**19, TWOFOLD), work.takes(2**15, FITTED)
        (True, False, True)
        >>> work.ended
        'its search ended after 294,912 numbers, before it tried two changes at once'
    """

    def __init__(self, most: float = math.inf, whole: SearchWork | None = None) -> None:
        self.left, self.taken, self._whole, self._returned = most, 0, whole, 0
        self._missing: list[str] = []

    def part(self, earlier: SearchWork | None = None) -> SearchWork:
        """Return the budget of one search: half of what is left.

        Args:
            earlier: a search whose omissions also count as this one's.
        """
        part = SearchWork(self.left / 2, self)
        part._missing += [] if earlier is None else earlier._missing
        return part

    def takes(self, numbers: float, what: str) -> bool:
        """Return whether so many numbers may be computed, and deduct them if so.

        Args:
            numbers: how many numbers; at least `STEP_NUMBERS` are deducted.
            what: name of the part of the search that counts as left out if they may not.
        """
        numbers = max(int(numbers), STEP_NUMBERS)
        if numbers > self.left:
            return not self.leaves_out(what)
        for work in (self, self._whole):
            if work is not None:
                work.left, work.taken = work.left - numbers, work.taken + numbers
        return True

    def leaves_out(self, what: str) -> bool:
        """Record that a part of the search is left out, and return True."""
        if what not in self._missing:
            self._missing.append(what)
        return True

    def found(self) -> None:
        """Give back to the whole budget what this search has taken so far, as it found something."""
        if self._whole is not None:
            self._whole.left += self.taken - self._returned
            self._returned = self.taken

    @property
    def ended(self) -> Message | None:
        """Return what was not searched, as half a sentence; None if everything was."""
        if not self._missing:
            return None
        parts = joined([Message(f"compare.search.{name}") for name in self._missing], "comma")
        return Message("compare.search.ended", count=f"{self.taken:,}", parts=parts)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Sizes of one attention.

    Attributes:
        batch: B.
        heads: number of query heads, Hq.
        rows: number of queries, L.
        keys: number of keys, S.
        features: width of a head of q and k, E.
    """

    batch: int
    heads: int
    rows: int
    keys: int
    features: int


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The recorded tensors of one attention; H divides Hq.

    Attributes:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        output: (B, Hq, L, Ev).
        lse: log of the sum of exp(logits), (B, Hq, L); None if unknown.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor | None

    @property
    def sizes(self) -> AttentionSizes:
        """Return the sizes B, Hq, L, S and E."""
        batch, heads, rows, features = self.query.shape
        return AttentionSizes(batch, heads, rows, self.key.shape[-2], features)

    @property
    def cost(self) -> int:
        """Return the number of logits that one trial of a formula computes, over the trial rows and heads."""
        return self.query.shape[0] * len(self._heads()) * len(self._index()) * self.key.shape[-2]

    def _index(self) -> Tensor:
        length = self.query.shape[-2]
        spaced = torch.linspace(0, max(0, length - 1), min(length, TRIAL_ROWS)).long().tolist()
        return torch.tensor(sorted({*range(min(length, FIRST_TRIAL_ROWS)), *spaced}), dtype=torch.long)

    def _heads(self) -> Tensor:
        batch, count = self.query.shape[:2]
        room = TRIAL_LOGITS // max(1, batch * len(self._index()) * self.key.shape[-2])
        return evenly(0, count, max(FEWEST_HEADS, room))

    def first_apart(self, formula: Formula) -> list[int]:
        """Return the first rows, ascending, whose output a formula does not give.

        There is one for each limit of what may be rounding, without repeats and without row 0. With a window, it is the
        first row that no longer sees key 0.
        """
        output, _ = compute_output(self.query, self.key, self.value, formula)
        gap = (self.output.double() - output).abs().amax((0, 1, 3))
        rows = set()
        for far in HALF_APART if self._half else (FAR,):
            apart = torch.nonzero(gap > far * _size(output))
            rows |= {int(apart[0])} if len(apart) else set()
        return sorted(rows - {0})

    def tried(self, formula: Formula, *, every_head: bool = False) -> tuple[Recorded, Formula]:
        """Return the trial rows and heads of the recorded tensors, and the formula for these.

        Args:
            formula: formula for all rows and heads.
            every_head: take all heads, and not only as many as `TRIAL_LOGITS` allows.
        """
        return self.part(formula, None if every_head else self._heads(), self._index())

    def part(self, formula: Formula, heads: Tensor | None, rows: Tensor) -> tuple[Recorded, Formula]:
        """Return some rows of some query heads with the keys and values that they read, and the formula for these.

        Args:
            formula: formula for all rows and heads.
            heads: indices of query heads; None for all.
            rows: indices of rows.
        """
        count, length = self.query.shape[1:3]
        formula = some_rows(formula, rows, length)
        query, key, value, output, lse = self.query, self.key, self.value, self.output, self.lse
        if heads is not None and len(heads) < count:
            formula = some_heads(formula, heads, count)
            query, output, lse = query[:, heads], output[:, heads], None if lse is None else lse[:, heads]
            key, value = (repeat_heads(x, count)[:, heads] for x in (key, value))
        return Recorded(
            query[:, :, rows], key, value, output[:, :, rows], lse if lse is None else lse[:, :, rows]
        ), formula

    def left(self, formula: Formula) -> float:
        """Return the error of a formula on the trial rows over the allowed rounding error; at most 1 if it fits.

        A few rows to which masks leave many keys come first; if they are far off, no other rows are computed.
        """
        some, here = self.tried(formula)
        count = some.query.shape[2]
        few, its = some.part(here, None, evenly(count // FIRST_TRIAL_ROWS, count, FIRST_TRIAL_ROWS))
        far = few.over(its, roughly=True)
        return far if far > 1.0 else some.over(here)

    def gives(self, formula: Formula) -> bool:
        """Return whether a formula gives the whole recorded output, and the lse if known, within rounding."""
        return self.over(formula) <= 1.0

    def over(self, formula: Formula, *, roughly: bool = False) -> float:
        """Return the largest ratio of error to allowed error: root mean square and maximum, of output and lse.

        It is infinite if a row that sees a key has an output that is not finite.

        Args:
            formula: formula to try.
            roughly: return 0 unless the output is so far off that rounding can't explain it, which is cheaper to tell.
        """
        output, lse = compute_output(self.query, self.key, self.value, formula)
        unseen = torch.isneginf(lse)[..., None]  # such rows are 0 here, and may be NaN elsewhere
        if bool((~torch.isfinite(self.output) & ~unseen).any()):
            return math.inf
        far = _rms(self.output, output) / (_size(output) * (HALF_FAR if self._half else FAR) + DIVISION_FLOOR)
        if far > 1.0:
            return FAR_OFF_FACTOR * far
        if roughly:
            return 0.0
        unit = FLOAT64_SHARE if self.output.dtype == torch.float64 else 1.0
        fine = TRIAL_SLACK * math.sqrt(self.query.shape[-1]) * unit
        noise = fine * self._noise(formula, output, lse, "float32")
        if self._half:
            noise += TRIAL_SLACK * self._noise(formula, output, lse, str(self.output.dtype).removeprefix("torch."))
        left = _ratio(self.output, output, noise[0])
        return left if self.lse is None else max(left, min(_ratio(self.lse, x, noise[1]) for x in _sums(lse, formula)))

    @property
    def _half(self) -> bool:
        return self.output.dtype in (torch.float16, torch.bfloat16)

    def _noise(self, formula: Formula, output: Tensor, lse: Tensor, dtype: str) -> Tensor:
        """Return the effect of rounding logits and weights to a dtype: (output or lse, root mean square or maximum).

        If the formula rounds them itself, another order of sums moves a few numbers to the next step, off by all of
        it: at most `FLIPPED_SHARE` of the root mean square.
        """
        coarse = replace(
            formula, logits_dtype=formula.logits_dtype or dtype, weights_dtype=formula.weights_dtype or dtype
        )
        noisy, exact, share = compute_output(self.query, self.key, self.value, coarse), (output, lse), 1.0
        if formula.logits_dtype is not None or formula.weights_dtype is not None:
            exact = compute_output(
                self.query, self.key, self.value, replace(formula, logits_dtype=None, weights_dtype=None)
            )
            share = FLIPPED_SHARE
        pairs = zip(noisy, exact, strict=True)
        return torch.tensor(
            [(share * _rms(one, two), _largest_entry(one, two)) for one, two in pairs], dtype=torch.float64
        )


def _ratio(there: Tensor, here: Tensor, noise: Tensor) -> float:
    """Return error over allowance, by root mean square or maximum: noise plus the rounding of storage."""
    eps = torch.finfo(there.dtype).eps
    largest = float(torch.nan_to_num(here, posinf=0.0, neginf=0.0).abs().max()) if here.numel() else 0.0
    allowed_rms, allowed_most = float(noise[0]) + eps * _size(here), TRIAL_SLACK * (float(noise[1]) + eps * largest)
    return max(
        _rms(there, here) / (allowed_rms + DIVISION_FLOOR),
        _largest_entry(there, here) / (allowed_most + DIVISION_FLOOR),
    )


def _sums(lse: Tensor, formula: Formula) -> list[Tensor]:
    """Return the lse that may have been recorded: with or without sinks."""
    if formula.sinks is None:
        return [lse]
    sinks = formula.sinks.double()[:, None].expand(lse.shape)
    return [lse + (-(sinks - lse).exp()).clamp_min(-1.0).log1p(), lse]


def evenly(first: int, end: int, count: int) -> Tensor:
    """Return at most `count` evenly spaced whole numbers from `first` to `end` - 1, as an integer tensor.

    Example:
        >>> evenly(0, 9, 3).tolist(), evenly(2, 4, 5).tolist()
        ([0, 4, 8], [2, 3])
    """
    return torch.linspace(first, max(first, end - 1), max(1, min(count, end - first))).long()


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Return differences of finite numbers; 0 if either is infinite, as in a row that sees no key."""
    gap = a.double() - b.double()
    return torch.where(torch.isfinite(a) & torch.isfinite(b), gap, 0.0)


def _rms(a: Tensor, b: Tensor) -> float:
    return float(_apart(a, b).square().mean().sqrt()) if a.numel() else 0.0


def _largest_entry(a: Tensor, b: Tensor) -> float:
    return float(_apart(a, b).abs().max()) if a.numel() else 0.0


def _size(a: Tensor) -> float:
    return _rms(a, torch.zeros_like(a))

"""A rotary table taken apart: angle = position * frequency, an amplitude, and the law that the frequencies follow.

The table gives angles up to whole turns, so that frequencies are found first, from rows one position apart (the step
that most rows make), over ever longer distances; then each run of such rows has one place, which is searched for.
Position and frequency are known up to a common factor: the commonest step is one position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

SAMPLE = 128  # steps among which the commonest is searched
MOST_RUNS = 256  # of rows one position apart: more are no positions
FAR = 2**17  # largest position that is searched for
MOST_LOST = 32  # places that are searched for so far: more are no positions
WHOLE = 2e-3  # a position that near to a whole number is one
FITS = 0.1  # angle in radians: nine tenths of a table must fit that well
LEAST_IN_RUNS = 0.25  # of the rows follow the one before: else there is no commonest step, and no frequency
CHUNK = 2**12
CHANCE = 0.01  # far places that fit by chance alone: with more of them none is said
ANGLES = 1e-4  # radians that angles of float32 are off by at far places
KEPT = 16  # tables that stay taken apart: each cause asks for the same ones
LARGEST = 2**24  # numbers of which a quantile is taken
STANDS = 0.25  # of the usual step: what is less is a row that does not move
LAW = 1e-3  # of a frequency, relative: as far as one may be from the law that it follows
LOOSE_LAW = 0.03  # the same, where values of half precision were turned
UNSEEN = 0.05  # angle in radians over all positions: a frequency that turns less is not known well enough to judge


def phase(angles: Tensor) -> Tensor:
    """What turns a pair by an angle in radians: exp(i angle)."""
    return torch.polar(torch.ones_like(angles), angles)


def unit(table: Tensor) -> Tensor:
    """The table without its amplitude, in complex128; 1 where that is 0."""
    table = table.to(torch.complex128)
    size = table.abs()
    return torch.where(size > 0, table / size.clamp_min(torch.finfo(torch.float64).tiny), 1.0)


def angle_gap(table: Tensor, other: Tensor) -> float:
    """Radians that the angles of two tables are apart, at most."""
    return float((unit(table) - unit(other)).abs().max())


def nearly_whole(positions: Tensor) -> Tensor:
    """Positions, whole numbers where they are so near to them."""
    return torch.where((positions - positions.round()).abs() < WHOLE, positions.round(), positions)


@dataclass(frozen=True, slots=True)
class Law:
    """frequency of pair c of P: factor * base^(-c / P); a factor of 1 / 4 is a linear scaling by 4."""

    base: float
    factor: float = 1.0

    def frequencies(self, pairs: int, of: int = 0) -> Tensor:
        """(pairs,), radians a position; the first ones of a law of `of` pairs, where that is given."""
        return self.factor * self.base ** (-torch.arange(pairs, dtype=torch.float64) / (of or pairs))


@dataclass(frozen=True, eq=False)
class Turn:
    """Positions, frequencies and amplitude of a table.

    Attributes:
        positions: (B or 1, L).
        frequencies: (P,), radians a position.
        amplitude: (B or 1, L, P).
    """

    positions: Tensor
    frequencies: Tensor
    amplitude: Tensor

    @property
    def span(self) -> float:
        """The largest distance from position 0, at least 1."""
        return max(1.0, float(self.positions.abs().max()))

    @cached_property
    def law(self) -> Law | None:
        """The law of its frequencies; None where they follow none, as YaRN's."""
        return law_of(self.frequencies, self.span)

    @property
    def sign(self) -> float:
        """-1 where the pairs turn backwards, else 1."""
        return -1.0 if float(self.frequencies.sum()) < 0 else 1.0

    def still(self, tolerance: float) -> Tensor:
        """(P,), True for pairs that turn by no more than `tolerance`, radians, in all positions."""
        return self.frequencies.abs() * self.span <= tolerance

    def with_frequencies(self, frequencies: Tensor) -> Turn:
        """The turn with other frequencies; for more pairs or fewer each row has the median of its amplitude."""
        amplitude = self.amplitude
        if len(frequencies) != len(self.frequencies):
            amplitude = amplitude.median(-1, keepdim=True).values.expand(*amplitude.shape[:-1], len(frequencies))
        return Turn(self.positions, frequencies, amplitude)

    def table(self) -> Tensor:
        """(B or 1, L, P), complex: the table again."""
        return self.amplitude * phase(self.positions[..., None] * self.frequencies)


@lru_cache(maxsize=KEPT)
def take_apart(table: Tensor, known: Tensor | None = None) -> Turn | None:
    """Positions, frequencies and amplitude of a table (B or 1, L, P).

    Args:
        table: complex.
        known: the frequencies where they are known, as of a table of one row; else they are found from it.

    Returns:
        None where its angles are no products of positions and frequencies, or it has too few rows.
    """
    if known is None and table.shape[1] < 3:
        return None
    turned, steps = unit(table), frequencies(table) if known is None else known
    positions = _positions(turned, steps, LEAST_IN_RUNS if known is None else 0.0) if bool(steps.any()) else None
    if positions is None:
        return None
    rest = (turned * phase(-positions[..., None] * steps)).angle()
    if rest.numel() < LARGEST and float(rest.abs().flatten().quantile(0.9)) > FITS:
        return None
    weight = (positions**2).sum()
    if float(weight) > 0:
        steps = steps + (positions[..., None] * rest).sum((0, 1)) / weight
    return Turn(positions, steps, table.to(torch.complex128).abs())


# -- frequencies -------------------------------------------------------------------------------------------------------


def frequencies(table: Tensor) -> Tensor:
    """Radians of the commonest step from one row to the next, of each pair, (P,); of a single row, its angles.

    Each step is less than half a turn; those over 2, 4, 8 rows are known well enough by the last to count their turns.

    Example:
        >>> angles = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.01])
        >>> [round(float(f), 5) for f in frequencies(phase(angles)[None])]
        [1.0, 0.01]
    """
    turned = unit(table)
    if turned.shape[1] == 1:
        return turned[:, 0].angle().median(0).values
    steps = turned[:, 1:] * turned[:, :-1].conj()
    common = _commonest(steps.flatten(0, 1))
    follows = _near(steps, common)
    found, reach = (steps[follows].mean(0) if bool(follows.any()) else common).angle(), 1
    while follows.shape[1] > reach:
        follows = follows[:, :-reach] & follows[:, reach:]
        if not bool(follows.any()):
            break
        reach *= 2
        far = (turned[:, reach:] * turned[:, :-reach].conj())[follows].mean(0)
        found = found + (far * phase(-reach * found)).angle() / reach
    return found


def _commonest(steps: Tensor) -> Tensor:
    """(P,): the step that is nearest to most others, of those that move; 1 where none does."""
    moves = (steps - 1).abs().mean(-1)
    moving = steps[moves > STANDS * float(moves.quantile(0.75) if moves.numel() < LARGEST else moves.max())]
    if not len(moving):
        return torch.ones_like(steps[0])
    sample = moving[torch.linspace(0, len(moving) - 1, min(len(moving), SAMPLE)).round().long()]
    distance = (sample[:, None] - sample[None]).abs().mean(-1)
    return sample[int(distance.median(1).values.argmin())]


def _near(steps: Tensor, common: Tensor) -> Tensor:
    return (steps - common).abs().mean(-1) < STANDS * (common - 1).abs().mean()


def law_of(frequencies: Tensor, span: float, tolerance: float = LAW) -> Law | None:
    """The law that frequencies follow; None where they follow none, or fewer than two of them show.

    Args:
        frequencies: (P,), radians a position; of either sign.
        span: positions over which they were seen: what turns little over them is known less well.
        tolerance: relative, that a frequency may be off by.
    """
    sizes = frequencies.abs().cpu()
    pairs, number_of = len(sizes), torch.arange(len(sizes), dtype=torch.float64)
    seen = sizes * span > UNSEEN
    if int(seen.sum()) < 2:
        return None
    c, logs, weight = number_of[seen], sizes[seen].log(), sizes[seen] ** 2
    mean_c, mean_log = (weight * c).sum() / weight.sum(), (weight * logs).sum() / weight.sum()
    slope = (weight * (c - mean_c) * (logs - mean_log)).sum() / (weight * (c - mean_c) ** 2).sum()
    factor = float((mean_log - slope * mean_c).exp())
    if abs(factor - 1) < LAW:
        factor, slope = 1.0, (weight * c * logs).sum() / (weight * c * c).sum()
    law = Law(math.exp(float(-slope) * pairs), factor)
    off = (law.frequencies(pairs)[seen] - sizes[seen]).abs()
    return law if bool((off < tolerance * sizes[seen] + UNSEEN / 5 / span).all()) else None


# -- positions ---------------------------------------------------------------------------------------------------------


def _positions(turned: Tensor, steps: Tensor, least: float) -> Tensor | None:
    """(B or 1, L): the place of each run of rows one position apart; None where `least` of the rows are in no run."""
    follows = _near(turned[:, 1:] * turned[:, :-1].conj(), phase(steps))
    begins = torch.cat([torch.ones(len(turned), 1, dtype=torch.bool), ~follows], 1).flatten()
    run, rows = begins.cumsum(0) - 1, torch.arange(len(begins))
    within, lengths = (rows - rows[begins][run]).double(), run.bincount()
    if len(lengths) > MOST_RUNS or int(lengths[lengths > 1].sum()) < least * len(rows):
        return None
    back = turned.flatten(0, 1) * phase(-within[:, None] * steps)
    places = _places(back.new_zeros(len(lengths), len(steps)).index_add(0, run, back), steps, turned.shape[1])
    return (places[run] + within).view(turned.shape[:2])


def _places(turned: Tensor, steps: Tensor, rows: int) -> Tensor:
    """(R,): the positions whose angles are those of each of `turned` (R, P): the nearest to 0 where several are."""
    best, fits = _best(turned, steps, torch.arange(-2 * rows - 64, 4 * rows + 64, dtype=torch.float64) / 2)
    lost = (fits < 1 - FITS**2).nonzero()[:, 0]
    if 0 < len(lost) <= MOST_LOST:
        far, far_fits = _best(turned[lost], steps, torch.arange(-CHUNK, FAR, dtype=torch.float64))
        # how many of all far places fit any angles as well: two angles are met by some place among 100,000
        apart = (2 * (1 - far_fits).clamp_min(0)).sqrt().clamp_min(ANGLES)
        by_chance = FAR * (apart / math.pi) ** int((steps.abs() * FAR > math.pi).sum())
        best[lost] = torch.where((far_fits > fits[lost]) & (by_chance < CHANCE), far, best[lost])
    for _ in range(3):
        rest = (turned * phase(-best[:, None] * steps)).angle()
        best = best + (steps * rest).sum(-1) / (steps**2).sum()
    return nearly_whole(best)


def _best(turned: Tensor, steps: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The places that fit best, (R,), and how well: 1 is exactly."""
    sizes = turned.abs().sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    best, most = torch.zeros(len(turned), dtype=torch.float64), torch.full((len(turned),), -math.inf).double()
    for some in torch.split(places, CHUNK):
        # of places that fit alike the nearest to 0
        fits = (phase(-some[:, None] * steps) @ turned.T).real / sizes - some.abs()[:, None] * 1e-9
        here, at = fits.max(0)
        best, most = torch.where(here > most, some[at], best), torch.maximum(here, most)
    return best, most + best.abs() * 1e-9

"""Decomposes a rotary table into positions, frequencies, an amplitude, and the law that the frequencies follow.

angle = position * frequency, but the table gives angles only modulo a full turn. So frequencies come first: from rows
one position apart, over ever longer distances. Then each run of consecutive rows has one unknown start, which is
searched for. Positions and frequencies are defined up to a common factor: the commonest step between rows counts as one
position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

SAMPLE = 128  # steps among which the commonest is searched
MOST_RUNS = 256  # runs of consecutive rows; a table with more has no positions
FARTHEST_POSITION = 2**17  # largest position that is searched for
MOST_LOST = 32  # runs that are searched for up to FARTHEST_POSITION; a table with more has no positions
POSITION_TOLERANCE = 2e-3  # distance from an integer within which a position is rounded to it
ANGLE_TOLERANCE = 0.1  # error in radians that nine tenths of a table must stay within
LEAST_IN_RUNS = 0.25  # least share of rows in runs; with fewer there is no commonest step, so no frequency
POSITIONS_AT_A_TIME = 2**12  # positions tried at a time
CHANCE_FITS = 0.01  # expected number of far positions that fit by chance; with more, none is reported
FLOAT32_ANGLE_ERROR = 1e-4  # error in radians of float32 angles at far positions
CACHED_TABLES = 16  # cached decompositions: several causes ask for the same tables
MOST_QUANTILE_ELEMENTS = 2**24  # size limit of torch.quantile, in elements
STANDING_STEP = 0.25  # share of the usual step; a row with a smaller step does not move
FREQUENCY_TOLERANCE = 1e-3  # largest relative distance of a frequency from its law
LOOSE_FREQUENCY_TOLERANCE = 0.03  # the same for frequencies read from half-precision values
LEAST_TURN = 0.05  # radians over all positions; a frequency that turns less is too uncertain to judge


def phase(angles: Tensor) -> Tensor:
    """Return exp(i angle), a complex number of size 1 that turns a pair of channels; angles are in radians."""
    return torch.polar(torch.ones_like(angles), angles)


def unit_amplitude(table: Tensor) -> Tensor:
    """Return the table divided by its absolute values, complex128; 1 where a number is 0."""
    table = table.to(torch.complex128)
    size = table.abs()
    return torch.where(size > 0, table / size.clamp_min(torch.finfo(torch.float64).tiny), 1.0)


def angle_gap(table: Tensor, other: Tensor) -> float:
    """Return the largest |a - b| of two complex tables after both are divided by their absolute values.

    For small differences it is the difference of the angles in radians.
    """
    return float((unit_amplitude(table) - unit_amplitude(other)).abs().max())


def nearly_whole(positions: Tensor) -> Tensor:
    """Return positions, rounded where they are within `POSITION_TOLERANCE` of an integer."""
    return torch.where((positions - positions.round()).abs() < POSITION_TOLERANCE, positions.round(), positions)


@dataclass(frozen=True, slots=True)
class Law:
    """The law frequency(c) = factor * base^(-c / P) for pair c of P.

    Attributes:
        base: base of the power, 10000 in most models.
        factor: number that multiplies all frequencies; 1 / 4 is linear scaling by 4.
    """

    base: float
    factor: float = 1.0

    def frequencies(self, pairs: int, of: int = 0) -> Tensor:
        """Return the frequencies of the first pairs, float64, (pairs,), in radians per position.

        Args:
            pairs: number of pairs.
            of: P, the number of pairs that the law spans; 0 takes `pairs`.
        """
        return self.factor * self.base ** (-torch.arange(pairs, dtype=torch.float64) / (of or pairs))


@dataclass(frozen=True, eq=False)
class Turn:
    """The decomposition of a rotary table: table = amplitude * exp(i position * frequency).

    Attributes:
        positions: (B or 1, L).
        frequencies: (P,), radians per position.
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
        """The law of the frequencies; None if they follow none, as those of YaRN."""
        return law_of(self.frequencies, self.span)

    @property
    def sign(self) -> float:
        """-1.0 if the frequencies sum to less than 0, so that the pairs turn backwards, else 1.0."""
        return -1.0 if float(self.frequencies.sum()) < 0 else 1.0

    def still(self, tolerance: float) -> Tensor:
        """Return (P,), True for pairs that turn by at most `tolerance` radians over all positions."""
        return self.frequencies.abs() * self.span <= tolerance

    def with_frequencies(self, frequencies: Tensor) -> Turn:
        """Return a copy with other frequencies; if their number differs, each row gets its median amplitude."""
        amplitude = self.amplitude
        if len(frequencies) != len(self.frequencies):
            amplitude = amplitude.median(-1, keepdim=True).values.expand(*amplitude.shape[:-1], len(frequencies))
        return Turn(self.positions, frequencies, amplitude)

    def table(self) -> Tensor:
        """Return the complex table (B or 1, L, P), amplitude * exp(i position * frequency)."""
        return self.amplitude * phase(self.positions[..., None] * self.frequencies)


@lru_cache(maxsize=CACHED_TABLES)
def take_apart(table: Tensor, known: Tensor | None = None) -> Turn | None:
    """Return positions, frequencies and amplitude of a complex table (B or 1, L, P).

    Args:
        table: Complex table.
        known: Frequencies, if known already, as for a table of one row. Default: found from the table.

    Returns:
        The decomposition, or None if the angles are not products of positions and frequencies, or the rows are too few.
    """
    if known is None and table.shape[1] < 3:
        return None
    turned, steps = unit_amplitude(table), frequencies(table) if known is None else known
    positions = _positions(turned, steps, LEAST_IN_RUNS if known is None else 0.0) if bool(steps.any()) else None
    if positions is None:
        return None
    rest = (turned * phase(-positions[..., None] * steps)).angle()
    if rest.numel() < MOST_QUANTILE_ELEMENTS and float(rest.abs().flatten().quantile(0.9)) > ANGLE_TOLERANCE:
        return None
    # The angles that remain, fitted by least squares over the positions, correct the frequencies.
    weight = (positions**2).sum()
    if float(weight) > 0:
        steps = steps + (positions[..., None] * rest).sum((0, 1)) / weight
    return Turn(positions, steps, table.to(torch.complex128).abs())


# -- frequencies -------------------------------------------------------------------------------------------------------


def frequencies(table: Tensor) -> Tensor:
    """Return the angles of the commonest step between rows, (P,) in radians, or those of the row if there is one.

    One step is less than half a turn. Steps over 2, 4, 8, ... rows refine the angle: each estimate is precise enough to
    count the full turns of the next.

    Example:
        >>> angles = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.01])
        >>> [round(float(f), 5) for f in frequencies(phase(angles)[None])]
        [1.0, 0.01]
    """
    turned = unit_amplitude(table)
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
    """Return the step (P,) closest to most others, among the rows that move, or 1 if none does."""
    moves = (steps - 1).abs().mean(-1)
    moving = steps[
        moves > STANDING_STEP * float(moves.quantile(0.75) if moves.numel() < MOST_QUANTILE_ELEMENTS else moves.max())
    ]
    if not len(moving):
        return torch.ones_like(steps[0])
    sample = moving[torch.linspace(0, len(moving) - 1, min(len(moving), SAMPLE)).round().long()]
    distance = (sample[:, None] - sample[None]).abs().mean(-1)
    return sample[int(distance.median(1).values.argmin())]


def _near(steps: Tensor, common: Tensor) -> Tensor:
    return (steps - common).abs().mean(-1) < STANDING_STEP * (common - 1).abs().mean()


def law_of(frequencies: Tensor, span: float, tolerance: float = FREQUENCY_TOLERANCE) -> Law | None:
    """Return the law of the frequencies, or None if they follow none or fewer than two of them are visible.

    Args:
        frequencies: (P,), radians per position, of either sign.
        span: Number of positions in the table. A frequency that turns little over them is known less precisely.
        tolerance: Largest relative distance of a frequency from the law.
    """
    sizes = frequencies.abs().cpu()
    pairs, number_of = len(sizes), torch.arange(len(sizes), dtype=torch.float64)
    turning = sizes * span > LEAST_TURN
    if int(turning.sum()) < 2:
        return None
    # A line through log(frequency) over c: its slope is -log(base) / P, its value at c = 0 is log(factor). Faster pairs
    # weigh more, because their frequencies are known more precisely.
    c, logs, weight = number_of[turning], sizes[turning].log(), sizes[turning] ** 2
    mean_c, mean_log = (weight * c).sum() / weight.sum(), (weight * logs).sum() / weight.sum()
    slope = (weight * (c - mean_c) * (logs - mean_log)).sum() / (weight * (c - mean_c) ** 2).sum()
    factor = float((mean_log - slope * mean_c).exp())
    if abs(factor - 1) < FREQUENCY_TOLERANCE:
        factor, slope = 1.0, (weight * c * logs).sum() / (weight * c * c).sum()
    law = Law(math.exp(float(-slope) * pairs), factor)
    off = (law.frequencies(pairs)[turning] - sizes[turning]).abs()
    return law if bool((off < tolerance * sizes[turning] + LEAST_TURN / 5 / span).all()) else None


# -- positions ---------------------------------------------------------------------------------------------------------


def _positions(turned: Tensor, steps: Tensor, least: float) -> Tensor | None:
    """Return positions (B or 1, L) of all rows, or None if fewer than the share `least` of the rows are in runs."""
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
    """Return the position (R,) that fits the phases of each row of `turned` (R, P), and the nearest to 0 of several.

    Half positions near the table are tried first, and integers up to `FARTHEST_POSITION` only for rows that none of
    them fits.
    """
    best, fits = _best(turned, steps, torch.arange(-2 * rows - 64, 4 * rows + 64, dtype=torch.float64) / 2)
    lost = (fits < 1 - ANGLE_TOLERANCE**2).nonzero()[:, 0]
    if 0 < len(lost) <= MOST_LOST:
        far, far_fits = _best(
            turned[lost], steps, torch.arange(-POSITIONS_AT_A_TIME, FARTHEST_POSITION, dtype=torch.float64)
        )
        # Expected number of far positions that fit random angles as well. Two angles are met by some of 100,000.
        apart = (2 * (1 - far_fits).clamp_min(0)).sqrt().clamp_min(FLOAT32_ANGLE_ERROR)
        by_chance = FARTHEST_POSITION * (apart / math.pi) ** int((steps.abs() * FARTHEST_POSITION > math.pi).sum())
        best[lost] = torch.where((far_fits > fits[lost]) & (by_chance < CHANCE_FITS), far, best[lost])
    # Least squares on the angles that remain moves each position between the grid's points.
    for _ in range(3):
        rest = (turned * phase(-best[:, None] * steps)).angle()
        best = best + (steps * rest).sum(-1) / (steps**2).sum()
    return nearly_whole(best)


def _best(turned: Tensor, steps: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions that fit best, (R,), and the quality of the fit, where 1 is exact."""
    sizes = turned.abs().sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    best, most = torch.zeros(len(turned), dtype=torch.float64), torch.full((len(turned),), -math.inf).double()
    for some in torch.split(places, POSITIONS_AT_A_TIME):
        # The small penalty prefers the position nearest to 0 among equal fits.
        fits = (phase(-some[:, None] * steps) @ turned.T).real / sizes - some.abs()[:, None] * 1e-9
        here, at = fits.max(0)
        best, most = torch.where(here > most, some[at], best), torch.maximum(here, most)
    return best, most + best.abs() * 1e-9

"""A rotary table taken apart: angle = position * frequency, and an amplitude.

The table gives angles up to whole turns, so that frequencies are found first, from rows one position apart (the step
that most rows make), over ever longer distances; then each run of such rows has one place, which is searched for.
Position and frequency are known up to a common factor: the commonest step is one position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

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


@dataclass(frozen=True, slots=True, eq=False)
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
        angles = self.positions[..., None] * self.frequencies
        return self.amplitude * torch.polar(torch.ones_like(angles), angles)


def unit(table: Tensor) -> Tensor:
    """The table without its amplitude; 1 where that is 0."""
    size = table.abs()
    return torch.where(size > 0, table / size.clamp_min(torch.finfo(torch.float64).tiny), 1.0)


def off(one: Tensor, other: Tensor) -> float:
    """Radians that the angles of two tables are apart, at most."""
    return float((unit(one.to(torch.complex128)) - unit(other.to(torch.complex128))).abs().max())


@lru_cache(maxsize=KEPT)
def take_apart(table: Tensor, frequencies: Tensor | None = None) -> Turn | None:
    """Positions, frequencies and amplitude of a table (B or 1, L, P).

    Args:
        table: complex.
        frequencies: where they are known, as of a table of one row; else they are found from it.

    Returns:
        None where its angles are no products of positions and frequencies, or it has too few rows.
    """
    table = table.to(torch.complex128)
    amplitude, turned = table.abs(), unit(table)
    least = LEAST_IN_RUNS if frequencies is None else 0.0
    frequencies = _frequencies(turned) if frequencies is None else frequencies
    if frequencies is None or not bool(frequencies.any()):
        return None
    positions = _positions(turned, frequencies, least)
    if positions is None:
        return None
    rest = (turned * torch.polar(torch.ones_like(amplitude), -positions[..., None] * frequencies)).angle()
    if rest.numel() < LARGEST and float(rest.abs().flatten().quantile(0.9)) > FITS:
        return None
    weight = (positions**2).sum()
    if float(weight) > 0:
        frequencies = frequencies + (positions[..., None] * rest).sum((0, 1)) / weight
    return Turn(positions, frequencies, amplitude)


def _frequencies(unit: Tensor) -> Tensor | None:
    """(P,), by what the commonest step turns; finer over two, four, eight steps that follow each other."""
    if unit.shape[1] < 3:
        return None
    steps = unit[:, 1:] * unit[:, :-1].conj()
    common = _commonest(steps.flatten(0, 1))
    if common is None:
        return None
    near = _near(steps, common)
    mean = steps[near].mean(0) if bool(near.any()) else common
    frequencies = mean.angle()
    reach, follows = 1, near
    while True:
        reach *= 2
        if follows.shape[1] <= reach // 2:
            return frequencies
        follows = follows[:, : -(reach // 2)] & follows[:, reach // 2 :]
        if not bool(follows.any()):
            return frequencies
        far = (unit[:, reach:] * unit[:, :-reach].conj())[follows].mean(0)
        frequencies = frequencies + (far * torch.polar(torch.ones_like(frequencies), -reach * frequencies)).angle() / (
            reach
        )


def _commonest(steps: Tensor) -> Tensor | None:
    """(P,): the step that is nearest to most others, of those that move."""
    moves = (steps - 1).abs().mean(-1)
    steps = steps[moves > STANDS * float(moves.quantile(0.75) if moves.numel() < LARGEST else moves.max())]
    if not len(steps):
        return None
    sample = steps[torch.linspace(0, len(steps) - 1, min(len(steps), SAMPLE)).round().long()]
    distance = (sample[:, None] - sample[None]).abs().mean(-1)
    return sample[int(distance.median(1).values.argmin())]


def _near(steps: Tensor, common: Tensor) -> Tensor:
    return (steps - common).abs().mean(-1) < STANDS * (common - 1).abs().mean()


def _positions(unit: Tensor, frequencies: Tensor, least: float) -> Tensor | None:
    """(B or 1, L): the place of each run of rows one position apart; None where `least` of the rows are in no run."""
    one = torch.polar(torch.ones_like(frequencies), frequencies)
    near = _near(unit[:, 1:] * unit[:, :-1].conj(), one)
    rows = torch.zeros(unit.shape[:2], dtype=torch.float64)
    runs = [
        (batch, first, last) for batch in range(len(unit)) for first, last in _runs(near[batch].tolist(), unit.shape[1])
    ]
    together = sum(last - first for _, first, last in runs if last - first > 1)
    if len(runs) > MOST_RUNS or together < least * rows.numel():
        return None
    turned = []
    for batch, first, last in runs:
        within = torch.arange(last - first, dtype=torch.float64)
        back = torch.polar(
            torch.ones(last - first, len(frequencies), dtype=torch.float64), -within[:, None] * frequencies
        )
        turned.append((unit[batch, first:last] * back).mean(0))
    places = _places(torch.stack(turned), frequencies, unit.shape[1])
    for (batch, first, last), place in zip(runs, places, strict=True):
        rows[batch, first:last] = torch.arange(last - first, dtype=torch.float64) + place
    return rows


def _runs(near: list[bool], rows: int) -> list[tuple[int, int]]:
    ends = [row + 1 for row, follows in enumerate(near) if not follows]
    return list(zip([0, *ends], [*ends, rows], strict=True))


def _places(turned: Tensor, frequencies: Tensor, rows: int) -> list[float]:
    """The positions whose angles are those of each of `turned` (R, P): the nearest to 0 where several are."""
    near = torch.arange(-2 * rows - 64, 4 * rows + 64, dtype=torch.float64) / 2
    best, fits = _best(turned, frequencies, near)
    lost = (fits < 1 - FITS**2).nonzero()[:, 0]
    if 0 < len(lost) <= MOST_LOST:
        far, far_fits = _best(turned[lost], frequencies, torch.arange(-CHUNK, FAR, dtype=torch.float64))
        found = (far_fits > fits[lost]) & (_by_chance(far_fits, frequencies) < CHANCE)
        best[lost] = torch.where(found, far, best[lost])
    for _ in range(3):
        rest = (turned * torch.polar(torch.ones_like(turned.real), -best[:, None] * frequencies)).angle()
        best = best + (frequencies * rest).sum(-1) / (frequencies**2).sum()
    return [float(round(place)) if abs(place - round(place)) < WHOLE else place for place in best.tolist()]


def _by_chance(fits: Tensor, frequencies: Tensor) -> Tensor:
    """How many of all far places fit any angles as well: two angles are met by some place among 100,000."""
    apart = (2 * (1 - fits).clamp_min(0)).sqrt().clamp_min(ANGLES)
    told = int((frequencies.abs() * FAR > math.pi).sum())
    return FAR * (apart / math.pi) ** told


def _best(turned: Tensor, frequencies: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The places that fit best, (R,), and how well: 1 is exactly."""
    sizes = turned.abs().sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    best, most = torch.zeros(len(turned), dtype=torch.float64), torch.full((len(turned),), -math.inf).double()
    for some in torch.split(places, CHUNK):
        back = torch.polar(torch.ones(len(some), len(frequencies), dtype=torch.float64), -some[:, None] * frequencies)
        # of places that fit alike the nearest to 0
        fits = (back @ turned.T).real / sizes - some.abs()[:, None] * 1e-9
        here, at = fits.max(0)
        best = torch.where(here > most, some[at], best)
        most = torch.maximum(here, most)
    return best, most + best.abs() * 1e-9

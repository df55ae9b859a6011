"""The finite-n table against quadrature between its points, and against direct simulation: 1% everywhere."""

from __future__ import annotations

import importlib.util
import json
import math
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.special import entr, log_ndtr, ndtri, softmax

from sqrtdk.theory import expected_effective_keys, expected_entropy_nats, expected_jacobian_norm, expected_peak

EXPECTED = {
    "entropy": expected_entropy_nats,
    "peak": expected_peak,
    "effective": expected_effective_keys,
    "jacobian": expected_jacobian_norm,
}
DOCUMENTED = {"entropy": 6e-5, "peak": 6e-4, "effective": 1.4e-4, "jacobian": 1.7e-4}  # of what is interpolated
AGREEMENT = 0.01
ERROR = AGREEMENT / 4.5  # standard error at which a simulation stops: chance does not fail 600 comparisons
ELEMENTS = 2**20


def _generator() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "make_gaussian_table.py"
    spec = importlib.util.spec_from_file_location("make_gaussian_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = _generator()
BETWEEN = sorted(  # whole numbers near the middle of two neighbours, and all small ones
    {*range(2, 17)}
    | {round(math.sqrt(a * b)) for a, b in zip(GENERATOR.COUNTS[1:], GENERATOR.COUNTS[2:], strict=False)}
    | {2**20, 2**24}
)
MIDDLES = [(a + b) / 2 for a, b in zip((0.0, *GENERATOR.SIGMAS), GENERATOR.SIGMAS, strict=False)]


@pytest.mark.parametrize(
    "sigma",
    [
        *(0.02, MIDDLES[0], MIDDLES[1], MIDDLES[2], 2.375, 4.25, 8.0, 11.0),
        *(pytest.param(sigma, marks=pytest.mark.slow) for sigma in (0.01, 0.05, 0.08, 0.2, *MIDDLES[3:])),
    ],
)
def test_between_the_points_it_is_as_near_to_quadrature_as_documented(sigma: float) -> None:
    exact = GENERATOR.statistics(sigma, BETWEEN)
    for name, expected in EXPECTED.items():
        for n, value in zip(BETWEEN, exact[name], strict=True):
            assert abs(expected(n, sigma) / value - 1.0) < DOCUMENTED[name], (name, n)


def test_the_file_is_what_the_generator_makes() -> None:
    table = json.loads(files("sqrtdk.theory").joinpath("gaussian_table.json").read_text(encoding="utf-8"))
    assert (table["n"], table["sigma"][1:]) == (list(GENERATOR.COUNTS), list(GENERATOR.SIGMAS))
    column, n = GENERATOR.SIGMAS.index(4.0) + 1, [1 + GENERATOR.NEAR, *GENERATOR.COUNTS[1:]]
    for name, values in GENERATOR.statistics(4.0, n).items():
        for row, count, value in zip(table[name], n, values, strict=True):
            assert row[column] == pytest.approx(GENERATOR._ratio(name, value, count), rel=6e-7), (name, count)


@pytest.mark.parametrize("sigma", [0.25, 4.0])
def test_finer_steps_change_nothing(sigma: float) -> None:
    counts = (2, 3, 100, 2**24)
    coarse, fine = GENERATOR.statistics(sigma, counts), GENERATOR.statistics(sigma, counts, fine=2.0)
    for name, values in fine.items():
        assert values == pytest.approx(coarse[name], rel=2e-7, abs=0.0), name


def _rows(n: int, sigma: float, rows: int, keep: int, source: np.random.Generator) -> dict[str, np.ndarray]:
    """Statistics of rows of n logits: the `keep` largest drawn exactly, the sums over the others by their mean.

    -log of the uniform order statistics are sums of independent exponentials, the j-th over n - j + 1 (Renyi). Given
    the smallest that is kept, at a, the others are independent normals below a; the sum of their e^z scatters by at
    most the square root of the weight of a, and enters in second order.
    """
    spacings = source.exponential(size=(rows, keep)) / np.arange(n, n - keep, -1)
    x = -ndtri(-np.expm1(-np.cumsum(spacings, 1)))
    top, a = x[:, :1], x[:, -1]
    z = sigma * (x - top)
    e = np.exp(z)
    sums = {k: (e**k).sum(1) for k in (1, 2, 3)}
    tilted = (z * e).sum(1)
    if keep < n:
        share = math.log(n - keep) - log_ndtr(a)
        for k in (1, 2, 3):
            s = k * sigma
            sums[k] = sums[k] + np.exp(share + s * s / 2 - s * top[:, 0] + log_ndtr(a - s))
        size = np.exp(share + sigma**2 / 2 - sigma * top[:, 0] + log_ndtr(a - sigma))
        hazard = np.exp(-((a - sigma) ** 2) / 2 - log_ndtr(a - sigma)) / math.sqrt(2 * math.pi)
        tilted = tilted + size * sigma * (sigma - hazard - top[:, 0])
    p2, p3 = sums[2] / sums[1] ** 2, sums[3] / sums[1] ** 3
    return {
        "entropy": np.log(sums[1]) - tilted / sums[1],
        "peak": 1.0 / sums[1],
        "effective": 1.0 / p2,
        "jacobian": np.maximum(0.0, p2 - 2 * p3 + p2**2),  # its square
    }


FEW = [(n, sigma) for n in (2, 3, 7, 24, 90) for sigma in (0.375, 1.6, 5.25)]
LARGE = [(2**16, 1.6), (2**16, 4.25)]
MANY = [
    (n, sigma)
    for n in (2, 3, 5, 11, 30, 90, 362, 1448, 11585, 92682, 524288, 2**20)
    for sigma in (0.0625, 0.375, 1.125, 1.9, 2.7, 3.6, 4.25, 5.25, 7.25, 11.0, 18.0, 36.0, 64.0)
    if (n, sigma) not in FEW
]


@pytest.mark.parametrize(
    ("n", "sigma"),
    [
        *FEW,
        *(pytest.param(*case, marks=pytest.mark.full) for case in LARGE),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY),
    ],
)
def test_within_one_percent_of_simulation(n: int, sigma: float) -> None:
    source = np.random.default_rng([n, round(1000 * sigma)])
    keep = min(n, 512 if sigma < 8.0 else 1024 // round(sigma))
    total = dict.fromkeys(EXPECTED, 0.0)
    squares, rows = dict.fromkeys(EXPECTED, 0.0), 0
    while True:
        chunk = max(64, ELEMENTS // keep)
        rows += chunk
        precise = True
        for name, values in _rows(n, sigma, chunk, keep, source).items():
            total[name] += values.sum()
            squares[name] += (values**2).sum()
            mean = total[name] / rows
            error = math.sqrt(max(0.0, squares[name] / rows - mean**2) / rows) / mean
            precise &= error < (2.0 if name == "jacobian" else 1.0) * ERROR  # of the square: twice that of the norm
        if precise:
            break
    for name, expected in EXPECTED.items():
        mean = total[name] / rows
        simulated = math.sqrt(mean) if name == "jacobian" else mean
        assert abs(expected(n, sigma) / simulated - 1.0) < AGREEMENT, (name, rows)


@pytest.mark.parametrize(
    ("n", "sigma", "keep", "rows"),
    [(200, 2.0, 64, 20_000), pytest.param(2**13, 4.25, 512, 6_000, marks=pytest.mark.full)],  # at the critical sigma
)
def test_the_simulation_itself_against_plain_draws(n: int, sigma: float, keep: int, rows: int) -> None:
    source = np.random.default_rng(1)
    drawn = _rows(n, sigma, rows, keep, source)
    plain: dict[str, list[np.ndarray]] = {name: [] for name in drawn}
    for _ in range(0, rows, chunk := min(rows, ELEMENTS // n)):
        p = softmax(sigma * source.standard_normal((chunk, n)), 1)
        p2, p3 = (p**2).sum(1), (p**3).sum(1)
        plain["entropy"].append(entr(p).sum(1))
        plain["peak"].append(p.max(1))
        plain["effective"].append(1 / p2)
        plain["jacobian"].append(p2 - 2 * p3 + p2**2)
    for name, chunks in plain.items():
        values = np.concatenate(chunks)
        error = math.sqrt(values.var() / len(values) + drawn[name].var() / rows)
        assert abs(values.mean() - drawn[name].mean()) < 4.5 * error, name
        assert error < 0.02 * values.mean(), "too few rows to tell"

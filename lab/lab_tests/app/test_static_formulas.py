"""The formulas of the static explorer, run as they stand in the page, against those of Python in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from sqrtdk.report.figures import format_number, format_percent, format_ratio
from sqrtdk.scales import SCALES
from sqrtdk.theory import (
    expected_entropy_nats,
    expected_jacobian_norm,
    expected_peak,
    largest_finite,
    logit_distribution,
    range_forecast,
    ranges,
    spacing,
)
from sqrtdk_lab.app.settings import CONTROL_BY_RULE
from sqrtdk_lab.app.static import STATIC_DTYPES, explorer_page
from tests.support.playwright_here import Browser
from tests.tolerances import allowed

pytestmark = [pytest.mark.browser, pytest.mark.full]

Formula = Callable[[str, Sequence[Sequence[Any]]], list[Any]]
DIMS = (1, 2, 3, 4, 8, 64, 100, 512, 1024)
KEYS = (2, 3, 7, 64, 100, 256, 2048)
SIGMAS = (0.0, 0.01, 0.25, 0.5, 1.0, 2.83, 5.0, 8.0, 22.6, 64.0, 100.0)


@pytest.fixture(scope="module")
def formula(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Formula]:
    """Call a function of the page's script for each list of arguments."""
    file = tmp_path_factory.mktemp("static") / "explorer.html"
    file.write_text(explorer_page("en"), encoding="utf-8")
    page = browser.new_page()
    page.set_default_timeout(180_000)
    page.goto(file.as_uri())
    yield lambda name, all: page.evaluate(f"all => all.map(one => {name}(...one))", [list(one) for one in all])
    page.close()


def off(found: Sequence[float], expected: Sequence[float], limits: Sequence[float]) -> list[str]:
    """What is farther from Python's number than it may be; infinities are equal."""
    return [
        f"{at}: {mine!r} for {its!r}, {limit:.3g} is allowed"
        for at, (mine, its, limit) in enumerate(zip(found, expected, limits, strict=True))
        if mine != its and not abs(mine - its) <= limit
    ]


def roundings(value: float, *, length: int = 1, logit: float = 0.0) -> float:
    return allowed(torch.float64, length=length, logit=logit, magnitude=abs(value))


def test_scales(formula: Formula) -> None:
    grid = [
        (rule, d, keys, None if control is None else float(value))
        for rule, control in CONTROL_BY_RULE.items()
        for value in (control.offered if control else ("",))
        for d in DIMS
        for keys in (2, 256)
    ]
    assert formula("(() => Object.keys(theory.SCALES))", [()]) == [[*CONTROL_BY_RULE]]
    whole = {rule for rule, control in CONTROL_BY_RULE.items() if control and control.whole}
    expected = []
    for rule, d, keys, value in grid:
        arguments = () if value is None else (int(value) if rule in whole else value,)
        expected.append(logit_distribution(d, SCALES[rule](*arguments), keys=keys).scale)
    assert off(formula("theory.scale", grid), expected, [roundings(one) for one in expected]) == []


def test_standard_deviation(formula: Formula) -> None:
    grid = [(d, factor, vq, vk) for d in DIMS for factor in (0.125, -1.0, 0.0) for vq in (1, 0.01) for vk in (1, 100)]
    expected = [logit_distribution(d, f, query_variance=vq, key_variance=vk).std for d, f, vq, vk in grid]
    assert off(formula("theory.std", grid), expected, [roundings(one) for one in expected]) == []


@pytest.mark.parametrize(
    ("name", "of"),
    [("entropy", expected_entropy_nats), ("peak", expected_peak), ("jacobian", expected_jacobian_norm)],
)
def test_softmax_of_gaussian_logits(formula: Formula, name: str, of: Callable[[float, float], float]) -> None:
    """Splines through 28 numbers of keys and 36 sigmas, of logarithms; entropies are products of two of them."""
    grid = [(keys, sigma) for keys in KEYS for sigma in SIGMAS]
    expected = [of(*one) for one in grid]
    limits = [roundings(one, length=64, logit=abs(math.log(one)) + math.log(2048)) for one in expected]
    assert off(formula(f"theory.{name}", grid), expected, limits) == []


def test_tails_of_the_products(formula: Formula) -> None:
    """Logarithms, far into the tail: an exponent as large as the logarithm is rounded, and so are some 400 terms."""
    grid = [(d, x * math.sqrt(d)) for d in DIMS for x in (-3.0, -0.5, 0.0, 0.1, 1.0, 3.0, 10.0, 40.0, 1000.0)]
    grid += [(64, math.inf), (64, -math.inf)]
    expected = [logit_distribution(d, 1.0).log_above(x) for d, x in grid]
    limits = [roundings(1.0, length=400, logit=min(abs(one), 1e9)) for one in expected]
    assert off(formula("theory.logAbove", grid), expected, limits) == []


def test_density_of_the_logits(formula: Formula) -> None:
    ends = [(-1.0, 1.0), (-1.0, 2.0), (0.0, 0.5), (2.0, 2.5), (-3.0, -2.0), (-1.0, 0.0), (6.0, 7.0)]
    grid = [
        (d, unit, unit * math.sqrt(d) * a, unit * math.sqrt(d) * b)
        for d in DIMS
        for unit in (1, 0.125)
        for a, b in ends
    ]
    expected = [logit_distribution(d, unit).probability_within(a, b) for d, unit, a, b in grid]
    # a difference of two probabilities of at most 1
    assert (
        off(formula("theory.probabilityWithin", grid), expected, [roundings(1.0, length=400, logit=1.0)] * len(grid))
        == []
    )
    assert formula("theory.probabilityWithin", [(64, 0, -1, 1), (64, 0, 1, 2)]) == [1, 0]


def test_spacing_is_exact(formula: Formula) -> None:
    rng = random.Random(0)
    powers = [2.0**k for k in range(-30, 17)]
    values = [0.0, 1e-30, 65504.0, 65520.0, 1e39, *powers, *(math.nextafter(one, 0.0) for one in powers)]
    values += [rng.lognormvariate(0.0, 6.0) for _ in range(200)]
    for dtype in STATIC_DTYPES:
        found = formula("theory.spacing", [(value, dtype) for value in values])
        assert found == [spacing(value, dtype) for value in values]


def test_range_forecasts(formula: Formula, monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected largest of N products is an integral, as exact as its rule: what half of the step moves."""
    grid = [(d, keys**2, 1.0, "float16") for d in (1, 64, 1024) for keys in (2, 2048)]
    grid += [(4, 256**2, unit, dtype) for unit in (1.0, 0.125, 1500.0) for dtype in STATIC_DTYPES]
    expected = [range_forecast(d, pairs, dtype, scale_before=unit) for d, pairs, unit, dtype in grid]
    monkeypatch.setattr(ranges, "NODES", 2 * ranges.NODES)
    monkeypatch.setattr(ranges, "NODE_STEP", ranges.NODE_STEP / 2)
    finer = range_forecast(4, 256**2, "float16").expected_max  # where the rule is worst
    rule = 2 * abs(finer / expected[grid.index((4, 256**2, 1.0, "float16"))].expected_max - 1)
    assert 0 < rule < 1e-6
    for (_, _, _, dtype), its, mine in zip(grid, expected, formula("theory.forecast", grid), strict=True):
        pairs = (its.expected_max, its.margin)
        assert off([mine["largest"], mine["margin"]], pairs, [rule * one for one in pairs]) == []
        assert mine["limit"] == largest_finite(dtype)
        # 1 - (1 - T)^N is as exact as log T, which is as large as where it rounds to 0
        limit = roundings(its.overflow_probability, length=400, logit=745.0)
        assert off([mine["overflow"]], [its.overflow_probability], [limit]) == []
        assert mine["step"] == spacing(mine["largest"], dtype)
    assert {0.0} < {its.overflow_probability for its in expected}


def test_numbers_are_written_as_in_the_reports(formula: Formula) -> None:
    rng = random.Random(1)
    values = [
        0.0,
        1.0,
        0.125,
        12345.678,
        65504.0,
        99999.4,
        999999.4,
        1e6,
        1e9,
        3.4028234e38,
        1e-5,
        0.0001,
        9.9996,
        -2.5,
    ]
    values += [rng.choice((-1, 1)) * rng.lognormvariate(0.0, 8.0) for _ in range(2000)]
    one = [(value,) for value in values]
    assert formula("charts.shown", one) == [format_number(value) for value in values]
    assert formula("charts.ratio", one) == [format_ratio(value) for value in values]
    shares = [0.0, 1.0, 0.5831, 0.0042, 0.996, 0.1, 0.99, *(rng.random() for _ in range(500))]
    assert formula("charts.percent", [(share,) for share in shares]) == [format_percent(share) for share in shares]
    assert formula("charts.shown", [(math.inf,), (math.nan,), (None,)]) == ["∞", "-", "-"]

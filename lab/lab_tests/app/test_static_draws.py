"""The measurements of the static explorer, run as they stand in the page, against the library on the same vectors."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from scipy import stats

from sqrtdk import attention, measure
from sqrtdk.stats import head_stats, row_summary
from sqrtdk_lab.app import sample
from sqrtdk_lab.app.settings import CONTROLS
from sqrtdk_lab.app.static import explorer_page
from tests.support.playwright_here import Browser, Page
from tests.tolerances import allowed, complaint

pytestmark = [pytest.mark.browser, pytest.mark.full]

DTYPE = torch.float64
BYTES = "numbers => btoa(Array.from(new Uint8Array(numbers.buffer), one => String.fromCharCode(one)).join(''))"
QUERY, KEY, VALUE, UPSTREAM = 1, 2, 3, 4  # streams of the page's random numbers


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    file = tmp_path_factory.mktemp("static") / "explorer.html"
    file.write_text(explorer_page("en"), encoding="utf-8")
    page = browser.new_page()
    page.set_default_timeout(180_000)
    page.goto(file.as_uri())
    yield page
    page.close()


def vectors(page: Page, stream: int, set_: int, count: int, dim: int, components: str = "normal", seed: int = 0) -> Any:
    """Vectors (count, dim) as the page draws them, float32."""
    call = "rows.vectors(seed, stream, set, count, dim, rows.COMPONENTS[name])"
    script = f"([stream, set, count, dim, name, seed]) => ({BYTES})({call})"
    drawn = base64.b64decode(page.evaluate(script, [stream, set_, count, dim, components, seed]))
    return numpy.frombuffer(drawn, dtype=numpy.float32).reshape(count, dim)


DISTRIBUTIONS: dict[str, Callable[[Any], Any]] = {
    "normal": stats.norm.cdf,
    "uniform": stats.uniform(-math.sqrt(3.0), math.sqrt(12.0)).cdf,
    "Laplace": stats.laplace(scale=math.sqrt(0.5)).cdf,
}


@pytest.mark.parametrize("components", CONTROLS["components"].offered)
def test_components_have_their_distribution(page: Page, components: str) -> None:
    """Mean 0 and variance 1; vectors of one draw and of two have nothing to do with one another."""
    drawn = vectors(page, KEY, 2, 64, 1024, components)
    if components == "signs":
        assert set(drawn.flat) == {-1.0, 1.0}
        assert stats.binomtest(int((drawn > 0).sum()), drawn.size).pvalue > 1e-3
    else:
        assert stats.kstest(drawn.flatten(), DISTRIBUTIONS[components]).pvalue > 1e-3
    assert drawn.var() == pytest.approx(1.0, abs=5 * math.sqrt(6.0 / drawn.size))
    together = numpy.concatenate([drawn, vectors(page, KEY, 2, 64, 1024, components, seed=1)])
    alike = numpy.corrcoef(together)[~numpy.eye(128, dtype=bool)]
    assert numpy.abs(alike).max() < 6.0 / math.sqrt(1024)
    assert (drawn[:, 1:] * drawn[:, :-1]).mean() == pytest.approx(0.0, abs=5 / math.sqrt(drawn.size))


def test_a_slider_draws_no_other_vectors(page: Page) -> None:
    few, many = (vectors(page, KEY, 1, count, 1024) for count in (8, 16))
    assert (few == many[:8]).all()


CASES: dict[str, dict[str, Any]] = {
    "textbook": {},
    "unscaled": {"factor": 1.0},
    "softcap": {"factor": 1.0, "softcap": 5.0},
    "negative, other variances": {"factor": -0.3, "query_variance": 4.0, "key_variance": 0.25},
    "signs": {"components": "signs", "d_k": 8, "factor": 0.5, "keys": 24},
    "Laplace, one dimension": {"components": "Laplace", "d_k": 1, "factor": 1.0, "seed": 3},
    "two keys": {"keys": 2, "d_k": 33, "factor": 0.2},
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_measured_is_what_the_library_measures(page: Page, name: str) -> None:
    case = {"seed": 0, "components": "normal", "keys": 16, "d_k": 64, "query_variance": 1.0, "key_variance": 1.0}
    case |= {"softcap": None, "factor": case["d_k"] ** -0.5} | CASES[name]
    d, keys, factor, softcap = case["d_k"], case["keys"], case["factor"], case["softcap"]
    measured = """([settings, factor, d]) => {
      const work = rows.measured(settings, factor, d, true);
      for (;;) {
        const { done, value } = work.next();
        if (done) return { ...value, logits: value.logits.map(one => Array.from(one)) };
      }
    }"""
    mine = page.evaluate(measured, [case, factor, d])
    both = []
    for stream, count, variance in ((QUERY, sample.QUERIES, case["query_variance"]), (KEY, keys, case["key_variance"])):
        drawn = [
            vectors(page, stream, s, count, 1024, case["components"], case["seed"])[:, :d] for s in range(sample.SETS)
        ]
        both.append(torch.tensor(numpy.stack(drawn), dtype=DTYPE).unsqueeze(1) * math.sqrt(variance))
    query, key = both
    value, upstream = (
        torch.tensor(
            numpy.stack([vectors(page, stream, s, count, 64, seed=case["seed"]) for s in range(sample.SETS)]),
            dtype=DTYPE,
        ).unsqueeze(1)
        for stream, count in ((VALUE, keys), (UPSTREAM, sample.QUERIES))
    )
    query.requires_grad_()
    output = attention(query, key, value, scale=factor, softcap=softcap)
    assert isinstance(output, torch.Tensor)
    (output * torch.nn.functional.normalize(upstream, dim=-1)).sum().backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None
    its = measure(query.detach(), key, scale=factor, softcap=softcap)
    z = torch.tensor(mine["logits"], dtype=DTYPE)
    size = {"length": max(d, keys, 64), "logit": float(z.abs().max())}
    expected = {
        "max": its.max_logit,
        "std": its.variance.sqrt(),
        "entropy": its.entropy_nats,
        "peak": its.peak,
        "effective": its.effective_keys,
        "jacobian": its.jacobian_norm**2,
        "gradient": query.grad.norm(dim=-1),
    }
    wrong = {
        key: complaint(torch.tensor(mine[key], dtype=DTYPE), value.flatten(), DTYPE, **size)  # type: ignore[arg-type]
        for key, value in expected.items()
    }
    assert {key: why for key, why in wrong.items() if why} == {}
    heads = head_stats(its)
    summary = "all => all.map(one => [rows.mean(one), rows.quantile(one, 0.05), rows.quantile(one, 0.5)])"
    summaries = page.evaluate(summary, [mine["entropy"], mine["gradient"]])
    for told, values in zip(summaries, (its.entropy_nats, query.grad.norm(dim=-1)), strict=True):
        known = row_summary(values, quantiles=[0.05, 0.5])
        near = allowed(DTYPE, length=128, logit=size["logit"], magnitude=float(values.max()))
        assert told == pytest.approx([known.mean[0], known.quantiles[0.05][0], known.quantiles[0.5][0]], abs=near)
    assert sum(one > 0.99 for one in mine["peak"]) / len(mine["peak"]) == heads.saturated[0]
    assert {len(one) for one in mine["logits"]} == {keys}


def test_a_row_near_one_hot_keeps_its_digits(page: Page) -> None:
    """Of two keys 40 apart: J = p (1 - p) [[1, -1], [-1, 1]], and H is about (1 - p) 41."""
    told = page.evaluate("z => rows.statistics(Float64Array.from(z))", [40.0, 0.0])
    small = math.exp(-40.0)
    share = small / (1.0 + small)
    near = allowed(DTYPE, length=2, logit=40.0, magnitude=1.0)
    assert told["jacobian"] == pytest.approx(4.0 * (share * (1.0 - share)) ** 2, rel=near, abs=0.0)
    assert told["entropy"] == pytest.approx(math.log1p(small) + 40.0 * share, rel=near, abs=0.0)


def test_the_histogram_counts_every_logit(page: Page) -> None:
    rng = numpy.random.default_rng(0)
    values = rng.normal(size=(3, 500))
    told = page.evaluate("all => rows.histogram(all)", values.tolist())
    counts, edges = numpy.histogram(values, bins=48)
    assert (told["low"], told["high"]) == (edges[0], edges[-1])
    assert told["counts"] == counts.tolist()
    assert page.evaluate("rows.histogram([[2, 2]])") == {"low": 2, "high": 2, "counts": [2] + [0] * 47}

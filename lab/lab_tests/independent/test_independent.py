"""Figures of the record, each computed a second time by a short script that imports nothing of sqrtdk.

A script has the name of its claim. Its keys name figures of the record: "tail_over_normal; d_k=64; outside=4.0".
"""

from __future__ import annotations

import ast
import json
import runpy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scipy import stats

HERE = Path(__file__).resolve().parent
RECORD = HERE.parents[2] / "benchmarks" / "results" / "lab-figures.json"
SCRIPTS = sorted(path for path in HERE.glob("*.py") if path.name not in ("__init__.py", Path(__file__).name))
LEAST_SCRIPTS = 12

PACKAGES = {"fractions", "itertools", "math", "numpy", "scipy", "statistics", "torch"}
# What could load sqrtdk, or read its figures, without an import statement.
LOADERS = {"__import__", "compile", "eval", "exec", "open"}

CONFIDENCE = 0.99  # of each interval of the record, and of all bands here together
# Both sides may compute an exact figure in float64 by thousands of sums or by an integral to 1e-9.
ROUNDING = 1e-8

Estimate = tuple[float, float]  # value and standard error; 0 for what is not drawn


class Recorded(NamedTuple):
    """A figure of the record."""

    value: float
    low: float
    high: float


@cache
def claims_of_record() -> dict[str, Any]:
    return {claim["id"]: claim for claim in json.loads(RECORD.read_text())["claims"]}


def recorded(script: Path, key: str) -> Recorded:
    """Return the figure that a key names. A claim or a figure that the record lacks is an error."""
    name, *places = key.split("; ")
    at = dict(place.split("=") for place in places)
    claim = claims_of_record().get(script.stem.replace("_", "-"))
    assert claim is not None, f"the record has no claim {script.stem}"
    figures = [figure for figure in claim["figures"] if figure["name"] == name]
    found = [f for f in figures if at.items() <= {axis: str(place) for axis, place in f["at"].items()}.items()]
    assert len(found) == 1, (
        f"{len(found)} figures of {claim['id']} are {key!r}; {name} is at {[f['at'] for f in figures]}"
    )
    return Recorded(*(float(found[0][field]) for field in Recorded._fields))


def lies_within(figure: Recorded, estimate: Estimate, comparisons: int) -> bool:
    """Whether an estimate lies in the record's interval, widened by its own.

    Each interval of the record holds with 99%: of a hundred right figures one would be refused. By Bonferroni's rule
    both intervals are stretched until that many comparisons hold together with 99%.
    """
    value, error = estimate
    reach, recorded_reach = (stats.norm.ppf(1 - (1 - CONFIDENCE) / (2 * count)) for count in (comparisons, 1))
    own = reach * error + ROUNDING * abs(figure.value)
    stretch = reach / recorded_reach
    low, high = (figure.value + stretch * (end - figure.value) for end in (figure.low, figure.high))
    return bool(low - own <= value <= high + own)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_record_agrees(script: Path) -> None:
    estimates: dict[str, Estimate] = runpy.run_path(str(script))["figures"]()
    figures = {key: recorded(script, key) for key in estimates}
    count = len(SCRIPTS) * len(estimates)  # every script has the same share of the 1% that may miss
    apart = {
        key: (estimate, figures[key])
        for key, estimate in estimates.items()
        if not lies_within(figures[key], estimate, count)
    }
    assert apart == {}
    # The bands are narrow enough to refuse: were all figures a tenth larger, some would leave theirs.
    wrong = {key: (1.1 * value, error) for key, (value, error) in estimates.items()}
    assert not all(lies_within(figures[key], estimate, count) for key, estimate in wrong.items())


def foreign(source: str) -> list[str]:
    """Return what a script imports or calls that could bring in sqrtdk or its figures."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] not in PACKAGES]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level or module.partition(".")[0] not in PACKAGES:
                found.append("." * node.level + module)
        elif isinstance(node, ast.Name) and node.id in LOADERS:
            found.append(node.id)
    return found


def test_scripts_import_nothing_of_the_package() -> None:
    assert len(SCRIPTS) >= LEAST_SCRIPTS
    assert {script.stem: names for script in SCRIPTS if (names := foreign(script.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import sqrtdk",
        "import numpy, sqrtdk_lab as lab",
        "from sqrtdk import scales",
        "def f():\n    from sqrtdk_lab.claims.normal import CLAIM",
        "from . import normal",
        "from importlib import import_module",
        "import subprocess",
        "__import__('sqrtdk')",
        "open('benchmarks/results/lab-figures.json')",
    ],
)
def test_an_import_of_the_package_is_seen(source: str) -> None:
    assert len(foreign(source)) == 1


def test_only_an_estimate_near_the_interval_lies_within() -> None:
    figure = Recorded(10.0, 9.0, 11.0)
    for value, error, count, expected in (
        (11.0, 0.0, 1, True),
        (11.1, 0.0, 1, False),
        (8.9, 0.0, 1, False),
        (11.1, 0.1, 1, True),
        (11.1, 0.0, 100, True),  # stretched by 1.5
        (11.6, 0.0, 100, False),
    ):
        assert lies_within(figure, (value, error), count) is expected
    exact = Recorded(10.0, 10.0, 10.0)
    assert lies_within(exact, (10.0 + 1e-8, 0.0), 1)
    assert not lies_within(exact, (10.0 + 1e-6, 0.0), 100)

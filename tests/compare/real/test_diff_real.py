"""What `sqrtdk.diff` says of the real pairs: the same, or the cause that is known, at the sites that have it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.compare.real.old_releases import CASES, current, python_of, run_old
from tests.compare.real.pairs import BLIND, PAIRS
from tests.compare.real.small import tokens

diff = pytest.importorskip("sqrtdk.compare.diff").diff

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
FACTOR = ("scale", "length_factor")  # a scale without mscale^2 is off by a length factor, and by a number
PROVEN = 0.99  # share of a difference that a cause explains


@pytest.mark.parametrize("name", PAIRS)
def test_port(name: str):
    """Sites that are to differ by the cause do; the others are the same, or follow from one that is not."""
    port = PAIRS[name]
    if importlib.util.find_spec(port.package) is None:
        pytest.skip(f"{port.package} is not installed here: python scripts/real.py makes environments that have it")
    a, b, inputs_a, inputs_b = port.build()
    report = diff(a, b, inputs_a, inputs_b=inputs_b)
    assert not report.unpaired_a
    assert not report.unpaired_b
    assert all(pair.residue <= pair.allowed for pair in report.pairs)
    if port.relabels:
        for pair in report.pairs:
            assert tuple(sorted(cause.name for cause in pair.causes if cause.name != "input")) == port.relabels
            assert all(cause.explained >= PROVEN for cause in pair.causes)
        return
    if port.cause in (None, BLIND):
        assert [pair.same for pair in report.pairs] == [True] * len(report.pairs)
        assert report.same is True
        return
    assert report.same is False
    for number, pair in enumerate(report.pairs):
        names = [cause.name for cause in pair.causes if cause.name != "input"]
        if port.cause == "input":
            assert names == []
            assert (pair.first_stage == "input") == (number >= port.sites[0])
        elif number in port.sites:
            assert names == [port.cause]
            assert all(cause.explained >= PROVEN for cause in pair.causes if cause.name == port.cause)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Trace files by release and key, of those releases whose environment is there."""
    releases = [release for release in sorted({case.release for case in CASES}) if python_of(release).exists()]
    return {release: run_old(release, tmp_path_factory.mktemp("old")) for release in releases}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.release}-{case.key}")
def test_old_release(case, written):
    """Layers whose scale is another one there differ by it; the others have none of their own."""
    if case.release not in written:
        pytest.skip(f"no environment with transformers {case.release}: python scripts/real.py makes it")
    report = diff(current(case), written[case.release][case.key], {"input_ids": tokens()})
    assert len(report.pairs) == len(case.ratio)
    assert not report.unpaired_a
    assert not report.unpaired_b
    assert report.same is (set(case.ratio) == {1.0})
    for pair, ratio in zip(report.pairs, case.ratio, strict=True):
        causes = [cause for cause in pair.causes if cause.name != "input"]
        assert len(causes) == int(ratio != 1)
        for cause in causes:
            assert cause.name in FACTOR
            assert cause.explained >= PROVEN
            if cause.name == "scale":
                assert float(cause.b) / float(cause.a) == pytest.approx(ratio, rel=1e-3)

"""Ports of Hugging Face's models in other released packages: what is the same, what differs, and by what."""

from __future__ import annotations

import importlib.util

import pytest

import sqrtdk
from sqrtdk.compare.diff import diff
from tests.compare.real.pairs import BLIND, PAIRS, Port
from tests.compare.real.small import call, rounding

# What these packages warn of is theirs.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROVEN = 0.99  # share of a difference that a cause explains


@pytest.fixture(params=PAIRS)
def port(request: pytest.FixtureRequest) -> Port:
    """Each pair whose package is installed."""
    pair = PAIRS[request.param]
    if importlib.util.find_spec(pair.package) is None:
        pytest.skip(f"{pair.package} is not installed here: python scripts/real.py makes environments that have it")
    return pair


def test_outputs_are_the_same_or_differ_by_the_cause(port: Port):
    """Within rounding where there is no cause; with the cause repaired in B where there is one."""
    a, b, inputs_a, inputs_b = port.build()
    allowed = rounding(a, inputs_a)
    expected = call(a, inputs_a)
    difference = (call(b, inputs_b) - expected).abs().max().item()
    if port.cause is None:
        assert difference <= allowed
        return
    assert difference > 100 * allowed
    if port.repair is not None:
        port.repair(b)
        assert (call(b, inputs_b) - expected).abs().max().item() <= allowed


def test_every_attention_is_read(port: Port):
    """Each with a scale by two readings that agree, and no operation unknown."""
    a, b, inputs_a, inputs_b = port.build()
    formulas = []
    for model, inputs in ((a, inputs_a), (b, inputs_b)):
        with sqrtdk.trace(model) as run:
            call(model, inputs)
        assert run.calls
        assert not run.not_measured
        for one in run.calls:
            assert one.unknown == ()
            assert one.scale.agree
        formulas.append([one.scale.effective for one in run.calls])
    ours, theirs = formulas
    assert len(ours) == len(theirs)
    if port.function != "t5":  # T5's scale is in the weights of q there
        same = [abs(one / other - 1) < 1e-3 for one, other in zip(ours, theirs, strict=True)]
        assert same == [port.cause != "scale"] * len(ours)


def test_the_cause_is_named_at_its_sites(port: Port):
    """Sites that are to differ by the cause do; the others are the same, or follow from one that is not."""
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

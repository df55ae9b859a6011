"""Ports of Hugging Face's models in other released packages: what is the same, what differs, and by what."""

from __future__ import annotations

import importlib.util

import pytest

import sqrtdk
from tests.compare.real.pairs import PAIRS, Port
from tests.compare.real.small import call, rounding

# What these packages warn of is theirs.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


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

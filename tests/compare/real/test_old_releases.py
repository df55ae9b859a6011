"""Older releases of transformers with a known error, from trace files that were written in their environments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk.compare.diff import diff
from tests.compare.real.old_releases import CASES, Case, current, python_of, run_old
from tests.compare.real.small import call, rounding, tokens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
WRONG_BY = 100  # times what rounding allows, at least
FACTOR = ("scale", "length_factor")  # a scale without mscale^2 is off by a length factor, and by a number
PROVEN = 0.99  # share of a difference that a cause explains


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Trace files by release and key, of those releases whose environment is there."""
    files = {}
    for release in sorted({case.release for case in CASES}):
        if python_of(release).exists():
            files[release] = run_old(release, tmp_path_factory.mktemp("old"))
    return files


@pytest.fixture(params=CASES, ids=lambda case: f"{case.release}-{case.key}")
def case(request: pytest.FixtureRequest, written: dict[str, dict[str, Path]]) -> Case:
    """Each case whose release is there."""
    if request.param.release not in written:
        pytest.skip(
            f"no environment with transformers {request.param.release}: python scripts/real.py makes it "
            f"({python_of(request.param.release)})"
        )
    return request.param


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    from safetensors.torch import load_file

    return load_file(path)


def test_logits_differ_where_the_scale_does(case: Case, written: dict[str, dict[str, Path]]):
    """And nowhere else: with the scale the same, the two releases agree within rounding."""
    path = written[case.release][case.key]
    model, inputs = current(case), {"input_ids": tokens()}
    difference = (call(model, inputs) - read(path.with_name(f"logits-{path.name}"))["logits"]).abs().max().item()
    allowed = rounding(model, inputs)
    if set(case.ratio) == {1.0}:
        assert difference <= allowed
    else:
        assert difference > WRONG_BY * allowed


def test_the_ratio_of_the_scales_makes_the_old_output(case: Case, written: dict[str, dict[str, Path]]):
    """Of each layer: the current release's scale times the ratio, on the old q, k and v, is the old output."""
    tensors = read(written[case.release][case.key])
    model = current(case)
    with sqrtdk.trace(model) as run:
        call(model, {"input_ids": tensors["inputs.input_ids"]})
    assert len(run.calls) == len(case.ratio)
    hidden = torch.ones(tokens().shape[1], tokens().shape[1], dtype=torch.bool).triu(1)
    for number, (one, ratio) in enumerate(zip(run.calls, case.ratio, strict=True)):
        query, key, value, output = (tensors[f"calls.{number}.{name}"].double() for name in ("q", "k", "v", "output"))
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        assert one.scale.agree

        def attend(scale: float) -> Tensor:
            logits = (query @ key.mT * scale).masked_fill(hidden, float("-inf"))  # noqa: B023
            return (logits.softmax(-1) @ value - output).abs().max()  # noqa: B023

        # what rounding of a logit does to a weight, for the largest logit and value
        scale = one.scale.effective
        size = (1 + (query.norm(dim=-1).max() * key.norm(dim=-1).max() * scale * ratio)) * value.abs().max()
        allowed = 4 * torch.finfo(torch.float32).eps * size
        assert attend(scale * ratio) <= allowed
        if ratio != 1:
            assert attend(scale) > WRONG_BY * allowed


def test_the_scale_is_named_in_its_layers(case: Case, written: dict[str, dict[str, Path]]):
    """Layers whose scale is another one there differ by it; the others have none of their own."""
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

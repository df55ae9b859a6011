"""Inputs without anything in them, and the meta device."""

import pytest
import torch
from torch import nn

from sqrtdk._check import check
from sqrtdk.errors import ModelError
from tests.attentions.each import each
from tests.audit.stranger_modules import ROOT, Attention, Lenient, told


@pytest.fixture
def x():
    return torch.randn(1, 6, 32)


class Reshaping(Attention):
    def forward(self, x):
        return super().forward(x.view(x.shape[0], -1, 32))  # ambiguous when there is nothing


class Fused(Attention):
    def forward(self, x):
        q, k = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.q, self.k))
        return nn.functional.scaled_dot_product_attention(q, k, k)


@each("static", [False, True])
@each("kind", [Attention, Reshaping, Fused])
@each("shape", [(0, 6, 32), (1, 0, 32), (0, 0, 32)])
def test_empty_inputs_are_named(kind, shape, static):
    with pytest.raises(ModelError, match="nothing to measure") as caught:
        check(kind(1.0), torch.randn(shape), static=static)
    assert f"0 {shape}" in str(caught.value)
    assert "at least one row and one token" in caught.value.hint


def test_an_empty_input_beside_a_full_one_is_no_error(x):
    class Two(Attention):
        def forward(self, x, extra):
            return super().forward(x)

    assert check(Two(), (x, torch.randn(0, 3))).calls[0].verdict == "exact"


@each("place", ["buffer", "plain"])
@each(
    "value, verdict, mistake",
    [(ROOT, "exact", None), (0.3, "unexplained", "unknown"), (8**0.5, "unexplained", "inverted")],
)
def test_a_scale_in_a_buffer_is_read_on_meta(x, place, value, verdict, mistake):
    model = Attention("scale")
    if place == "buffer":
        model.register_buffer("scale", torch.tensor(value))
    else:
        model.scale = torch.tensor(value)
    kept = model.scale
    report = check(model, x, static=True)
    assert (report.mode, told(report.calls[0])) == ("static", (verdict, mistake))
    assert model.scale is kept
    assert not model.scale.is_meta


@each("place", ["buffer", "plain"])
@each("shape", [(1,), (4, 1, 1)])
def test_a_scale_in_a_larger_buffer_is_unmeasured_on_meta(x, place, shape):
    model = Attention("scale")
    if place == "buffer":
        model.register_buffer("scale", torch.full(shape, ROOT))
    else:
        model.scale = torch.full(shape, ROOT)
    judged = check(model, x, static=True).calls[0]
    assert judged.verdict == "unmeasured"
    assert "no data on the meta device" in judged.reason
    assert check(model, x).calls[0].verdict == "exact"


def test_static_is_static_without_weights_and_for_a_model_that_is_on_meta_already(x):
    class Bare(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT * ROOT).softmax(-1) @ v

    report = check(Bare(), tuple(torch.randn(3, 1, 4, 6, 8)), static=True)
    assert (report.mode, report.calls[0].verdict, report.calls[0].call.stats) == ("static", "exact", None)
    for model in (Attention().to("meta"), Lenient().to("meta")):
        report = check(model, x)
        assert (report.mode, report.calls[0].verdict) == ("static", "exact")


def test_a_counter_counts_the_forward_passes(x):
    """While it is audited; afterwards it is where it was."""
    counts = []

    class Counting(Attention):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.seen += 1
            counts.append(self.seen.is_meta or int(self.seen))
            return super().forward(x)

    model = Counting()
    check(model, x)
    assert counts == [1]
    assert int(model.seen) == 0
    check(model, x, static=True)
    assert int(model.seen) == 0

"""TorchScript, and modules that raise when they are asked: the audit reads what it can and says the rest."""

import warnings

import pytest
import torch
from torch import nn

from sqrtdk._check import check
from sqrtdk.audit.configs import field, module_at, own_fields, present
from sqrtdk.audit.declared import declared_scale
from sqrtdk.errors import ModelError
from tests.attentions import programs
from tests.attentions.each import each
from tests.attentions.programs import changed
from tests.audit.stranger_modules import ROOT, Attention, Net, told


@pytest.fixture
def x():
    return torch.randn(1, 6, 32)


class StrangeError(Exception):
    """Of no built-in kind that a reader of attributes would expect."""


class Strange(Attention):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise StrangeError(name) from None


def test_a_module_whose_getattr_raises_something_strange(x):
    """`test_audit_odd_models.py` has the other answers that a module may give."""
    report = check(Net(Strange(1.0), Strange()), x, attn="both")
    assert [told(judged) for judged in report.calls] == [("unexplained", "missing"), ("exact", None)]
    assert {f.rule for f in report.findings} - {"flat"} == {"scale_ledger"}
    with pytest.raises(ModelError, match="can't be copied to the meta device"):
        check(Strange(), x, static=True)


def test_the_readers():
    hostile = Net(Strange())
    assert field(hostile, "parts.0.nothing") is None
    assert not present(hostile.parts[0], "nothing")
    assert present(hostile.parts[0], "v")
    assert own_fields(hostile.parts[0])["width"] == 8
    assert own_fields(3) == {}
    assert module_at(hostile, "parts.0.v") is hostile.parts[0].v
    assert module_at(hostile, "") is hostile
    assert module_at(hostile, "parts.0.number") is None
    assert module_at(hostile, "parts.7") is None


def test_a_mapping_that_raises_is_no_config(make_call):
    class Odd(dict):
        def get(self, *_):
            raise StrangeError

    assert declared_scale(make_call(), None, Odd(attention_multiplier=0.5)) is None


class Scriptable(nn.Module):
    def __init__(self, scale: float = ROOT):
        super().__init__()
        self.qkv, self.q_norm, self.scale = nn.Linear(32, 96), nn.LayerNorm(8), scale

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, [3, 4, 8]).permute(2, 0, 3, 1, 4)
        logits = self.q_norm(qkv[0]) @ qkv[1].transpose(-1, -2) * self.scale
        return (logits.softmax(-1) @ qkv[2]).transpose(1, 2).flatten(2)


def script(made, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(made)


def traced(made, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(made, x)


@each("compiled", [script, traced])
@each("scale, verdicts", [(ROOT, {"exact"}), (0.3, {"declared", "unexplained"})])
def test_a_torchscript_attention_is_audited(x, compiled, scale, verdicts):
    model = Net(Attention(), compiled(Scriptable(scale), x))
    report = check(model, x)
    assert [judged.call.site for judged in report.calls] == ["parts.0", "parts.1"]
    assert report.calls[0].verdict == "exact"
    assert report.calls[1].verdict in verdicts  # a traced module holds its scale as a constant of the graph
    assert not {"unused", "responsiveness"} & {f.rule for f in report.findings}
    assert not any("responsiveness" in entry.reason for entry in report.not_measured)


def test_a_scripted_scale_is_named_and_a_module_below_it_is_found(x):
    model = Net(script(Scriptable(0.3), x))
    assert check(model, x).calls[0].attribute == "scale"
    assert isinstance(module_at(model, "parts.0.q_norm"), nn.Module)
    assert told(check(Net(script(Scriptable(8**0.5), x)), x).calls[0]) == ("unexplained", "inverted")


@each("freeze", [False, True])
def test_torchscript_beside_an_attention_is_left_alone(x, freeze):
    beside = script(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)), x)
    if freeze:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            beside = torch.jit.freeze(beside.eval())
    model = Net(Attention(), beside)
    report = check(model, x)
    assert [judged.verdict for judged in report.calls] == ["exact"]
    assert freeze or beside.training


def test_torchscript_cannot_be_copied_to_meta(x):
    with pytest.raises(ModelError, match=r"parts\.1 is TorchScript") as caught:
        check(Net(Attention(), script(Scriptable(), x)), x, static=True)
    assert "without static" in caught.value.hint


def test_a_weight_of_a_class_of_its_own_is_judged_and_said_to_be_unseen(x):
    """NaN in it is not looked for; what its attention does is read all the same."""
    model = changed(programs.Net(1.0), lambda layer: programs.whole(layer.weight.detach(), programs.Whole))
    report = check(model, x)
    assert [told(judged) for judged in report.calls] == [("unexplained", "missing")] * 2
    assert report.not_measured
    assert all("weight can't be looked at" in entry.reason for entry in report.not_measured)

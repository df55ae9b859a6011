"""Factors of q/k normalisation and gains on the logits that a module holds: one that nothing reads is found."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

import sqrtdk
from sqrtdk._check import check
from tests.attentions.each import each
from tests.hf.families import GROUPED, build


class Normed(nn.Module):
    """Self-attention that normalises q and k as `normalise` says, and multiplies as `gain` says."""

    def __init__(self, normalise, gain=None, **held):
        super().__init__()
        self.qkv, self.normalise, self.gain = nn.Linear(64, 192), normalise, gain
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        q, k = self.normalise(self, q, k)
        logits = q @ k.mT * (0.25 if self.gain is None else self.gain(self))
        return logits.softmax(-1) @ v


def norms():
    return {"q_norm": nn.RMSNorm(16), "k_norm": nn.RMSNorm(16)}


def by_modules(m, q, k):
    return m.q_norm(q), m.k_norm(k)


def by_functions(m, q, k):
    return F.rms_norm(q, (16,), m.q_norm.weight), F.rms_norm(k, (16,), m.k_norm.weight)


def by_hand(m, q, k):
    return tuple(
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * n.weight.data
        for x, n in ((q, m.q_norm), (k, m.k_norm))
    )


def without_gain(m, q, k):
    return F.rms_norm(q, (16,)), F.rms_norm(k, (16,))


def one_gain(m, q, k):
    return m.q_norm(q), F.rms_norm(k, (16,))


def not_at_all(m, q, k):
    return q, k


def unit(m, q, k):
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1)


def temperature():
    return {"temperature": nn.Parameter(torch.tensor(2.0))}


CASES = {
    "modules": (by_modules, None, norms, ""),
    "functions": (by_functions, None, norms, ""),
    "by hand": (by_hand, None, norms, ""),
    "no gain": (without_gain, None, norms, "q_norm.weight, k_norm.weight: stored, but nothing reads them"),
    "one gain": (one_gain, None, norms, "k_norm.weight: stored, but nothing reads it"),
    "no norm": (not_at_all, None, norms, "q_norm is built but never runs"),
    "temperature": (unit, lambda m: m.temperature, temperature, ""),
    "its exponential": (unit, lambda m: m.temperature.exp(), temperature, ""),
    "clamped": (unit, lambda m: m.temperature.clamp(max=100), temperature, ""),
    "detached": (unit, lambda m: m.temperature.detach(), temperature, ""),
    "no temperature": (unit, lambda m: 2.0, temperature, "temperature: stored, but nothing reads it"),
    "another parameter": (unit, lambda m: 2.0, lambda: {"mask_token": nn.Parameter(torch.ones(64))}, ""),
    "gains of q and k": (
        lambda m, q, k: (q * m.q_scale, k),
        None,
        lambda: {"q_scale": nn.Parameter(torch.ones(16)), "k_scale": nn.Parameter(torch.ones(16))},
        "k_scale: stored, but nothing reads it",
    ),
}


@each("static", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_factor_that_nothing_reads(name, static):
    normalise, gain, held, message = CASES[name]
    report = check(Normed(normalise, gain, **held()), torch.randn(2, 6, 64), static=static)
    found = [f for f in report.findings if f.rule == "unused"]
    assert [(f.severity, f.message) for f in found] == ([("warn", message)] if message else [])


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_a_released_norm_that_lost_its_gain(monkeypatch, attn):
    model = build(hf.Qwen3Config(**GROUPED, head_dim=16, architectures=["Qwen3ForCausalLM"]), attn)
    assert not [f for f in check(model, seq_len=24).findings if f.severity != "note"]
    norm = type(model.model.layers[0].self_attn.q_norm)

    def bare(self, x):
        return F.rms_norm(x, (x.shape[-1],)) if x.dim() == 4 else F.rms_norm(x, (x.shape[-1],), self.weight)

    monkeypatch.setattr(norm, "forward", bare)
    found = [f for f in check(model, seq_len=24).findings if f.rule == "unused"]
    assert [f.message for f in found] == ["q_norm.weight, k_norm.weight: stored, but nothing reads them"] * 2


def test_the_trace_names_what_nothing_read():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with sqrtdk.trace(model) as run:
        model[0](torch.randn(2, 4))
    assert run.unread == {"1.weight", "1.bias"}

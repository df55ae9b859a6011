"""`check` on real modules: what it finds, what it refuses, and that it leaves no trace of itself."""

import copy
import random

import pytest
import torch
from torch import nn

from sqrtdk._check import check
from sqrtdk.audit.records import SEVERITIES
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError
from tests.attentions.each import each
from tests.attentions.plain import Plain

hf = pytest.importorskip("transformers")


class Attention(nn.Module):
    """Causal self-attention, 4 heads of 16, eager; `bug` picks what is wrong with it."""

    is_causal = True

    def __init__(self, bug=None):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.q_norm = nn.LayerNorm(16)
        self.scaling = 0.25
        self.softcap = None
        self.bug = bug
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        if self.bug == "raises":
            raise KeyError("no such key")
        random.random()
        x = x + torch.rand(()) if self.bug == "noisy" else x
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.bug != "idle norm":
            q = self.q_norm(q)
        scale = {"fixed": 0.25, "fixed and wrong": 1.0}.get(self.bug, self.scaling)
        logits = q @ k.transpose(-1, -2) * scale
        if self.bug != "no mask":
            length = x.shape[1]
            logits = logits.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), float("-inf"))
        weights = self.drop(logits.softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, bug=None):
        super().__init__()
        self.layers = nn.ModuleList(Attention(bug) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def found(report):
    return {(finding.rule, finding.severity) for finding in report.findings if finding.severity != "note"}


@pytest.fixture
def x():
    return torch.randn(1, 24, 64)


def test_a_healthy_module(x):
    report = check(Stack(), x)
    assert [judged.verdict for judged in report.calls] == ["exact", "exact"]
    assert found(report) == set()
    assert report.exit_code == 0
    assert report.mode == "dynamic"
    assert report.model.parameters == sum(p.numel() for p in Stack().parameters())
    assert {"python", "torch", "transformers", "platform", "device", "dtype"} <= set(report.environment)


@each(
    "bug, expected",
    [
        ("fixed and wrong", {("scale_ledger", "fail"), ("responsiveness", "fail")}),
        ("no mask", {("mask_audit", "critical")}),
        ("idle norm", {("unused", "warn")}),
    ],
)
def test_a_sick_module(x, bug, expected):
    report = check(Stack(bug), x)
    assert found(report) == expected
    assert report.exit_code == int(any(severity != "warn" for _, severity in expected))
    assert check(Stack(bug), x, fail_on="warn").exit_code == 1


def test_an_attribute_that_is_not_read_but_right_is_a_note(x):
    report = check(Stack("fixed"), x)
    assert [f.severity for f in report.findings if f.rule == "responsiveness"] == ["note", "note"]
    assert "responsiveness" not in {f.rule for f in check(Stack(), x).findings}


class WithLora(Plain):
    """The attribute `scaling` is that of a low-rank branch on the values."""

    def __init__(self, number, scaling):
        super().__init__(number, scaling=scaling)
        self.low = nn.Linear(64, 64)

    def forward(self, x):
        return super().forward(x) + self.low(x) * self.scaling


@each("static", [False, True])
@each(
    "model, verdict, mistake, severity",
    [
        (lambda: Plain(1.0, scaling=1.0), "unexplained", "missing", "fail"),
        (lambda: Plain(1.0, temperature=1.0), "unexplained", "missing", "fail"),
        (lambda: Plain(1.0, alpha=1.0), "unexplained", "missing", "fail"),
        (lambda: WithLora(1.0, 1.0), "unexplained", "missing", "fail"),
        (lambda: Plain("scaling", scaling=1.0), "unexplained", "missing", "fail"),
        (lambda: Plain("temperature", temperature=1.0), "unexplained", "missing", "fail"),
        (lambda: Plain(0.3, scale=0.3), "unexplained", "unknown", "warn"),
        (lambda: Plain("scale", scale=0.3), "unexplained", "unknown", "warn"),
        (lambda: Plain("scale", scale=0.0, way="added", visible=torch.zeros(1)), "unexplained", "unknown", "fail"),
        (lambda: Plain("scale", scale=-0.25), "unexplained", "unknown", "fail"),
        (lambda: Plain("scale", scale=4.0), "unexplained", "inverted", "fail"),
        (lambda: Plain("scale", scale=64**-0.5), "unexplained", "model_dim", "fail"),
        (lambda: Plain("scale", scale=4**-0.5), "unexplained", "head_count", "fail"),
        (lambda: Plain("scale", scale=1 / 16), "unexplained", "twice", "fail"),  # muP's 1/d, which a config declares
        (lambda: Plain(4.0, scale=4.0), "unexplained", "inverted", "fail"),
    ],
)
def test_an_attribute_excuses_nothing(x, model, verdict, mistake, severity, static):
    report = check(model(), x, static=static)
    (judged,) = report.calls
    assert (judged.verdict, judged.mistake) == (verdict, mistake)
    assert [f.severity for f in report.findings if f.rule == "scale_ledger"] == ([severity] if severity else [])


def test_a_number_of_something_else_is_told_as_such(x):
    """A LoRA branch on the values whose alpha/r happens to be the textbook scale."""
    report = check(WithLora(0.25, 0.25), x)
    assert report.calls[0].verdict == "exact"
    (note,) = (f for f in report.findings if f.rule == "responsiveness")
    assert note.severity == "note"
    assert "the scale does not follow attribute scaling" in note.message
    assert "not read" not in note.message
    assert "remove" not in note.fix
    assert check(Plain(0.25, alpha=1.0), x).findings == ()  # 1/sqrt(head_dim) is not in it
    (note,) = check(Plain(0.25, alpha=0.25), x).findings
    assert "attribute alpha:" in note.message


def test_nan_weights_are_a_finding(x):
    model = Stack()
    with torch.no_grad():
        model.layers[1].qkv.weight.fill_(float("nan"))
    report = check(model, x)
    assert report.findings[0].rule == "nonfinite"
    assert report.findings[0].severity == "critical"
    assert report.exit_code == 1


@each("bug", [None, "raises"])
def test_the_model_is_left_as_it_was(x, bug):
    model = Stack(bug).train()
    model.layers[1].drop.eval()
    model.layers[0].qkv.weight.requires_grad_(False)
    scaling = model.layers[0].scaling
    before = [
        (name, m.training, dict(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    ]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.requires_grad for p in model.parameters()]
    rng, python_rng, grad_mode = torch.get_rng_state(), random.getstate(), torch.is_grad_enabled()
    if bug:
        with pytest.raises(ModelError):
            check(model, x)
    else:
        check(model, x)
    after = [
        (name, m.training, dict(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    ]
    for one, two in zip(before, after, strict=True):
        assert one[:2] == two[:2]
        assert one[3:] == two[3:]
        assert one[2].keys() == two[2].keys()
        assert all(two[2][key] is value for key, value in one[2].items())
    assert model.layers[0].scaling is scaling
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == grads
    assert torch.equal(torch.get_rng_state(), rng)
    assert random.getstate() == python_rng
    assert torch.is_grad_enabled() == grad_mode
    assert all(p.grad is None for p in model.parameters())


def test_the_rng_seed_does_not_leak_into_the_result(x):
    model = Stack("noisy").train()
    torch.manual_seed(1)
    one = check(model, x, seed=3)
    torch.manual_seed(2)
    two = check(model, x, seed=3)
    assert one.calls == two.calls


def test_the_model_runs_in_evaluation_mode(x):
    model = Stack()
    assert check(model.train(), x).calls == check(model.eval(), x).calls


def test_findings_are_worst_first():
    report = check("demo:unscaled", seq_len=64)
    ranks = [SEVERITIES.index(finding.severity) for finding in report.findings]
    assert len(set(ranks)) > 1
    assert ranks == sorted(ranks, reverse=True)


def test_static_copies_no_weight_and_leaves_the_model(x):
    model = Stack()
    report = check(model, x, static=True)
    assert report.mode == "static"
    assert [judged.verdict for judged in report.calls] == ["exact", "exact"]
    assert not any(p.is_meta for p in model.parameters())
    assert all(judged.call.stats is None for judged in report.calls)


def test_errors(x):
    with pytest.raises(ModelError, match=r"no attention ran in Linear"):
        check(nn.Linear(64, 64), x)
    with pytest.raises(ModelError, match="no such key"):
        check(Stack("raises"), x)
    with pytest.raises(ModelError):
        check(Stack(), torch.randn(1, 24, 63))
    with pytest.raises(InvalidValueError, match="no inputs"):
        check(Stack())
    with pytest.raises(InvalidValueError, match="device"):
        check(Stack(), x, device="cpu")
    with pytest.raises(InvalidValueError, match="fail_on"):
        check(Stack(), x, fail_on="bad")
    with pytest.raises(InvalidValueError, match="attn"):
        check(Stack(), x, attn="flash")
    with pytest.raises(InvalidTypeError):
        check(3)
    with pytest.raises(InvalidTypeError):
        check(Stack(), "text")


def test_a_model_that_cannot_run_with_a_larger_scale_is_not_measured(x):
    class Strict(Attention):
        def forward(self, x):
            if self.scaling != 0.25:
                raise ValueError("not my scale")
            return super().forward(x)

    model = Stack()
    model.layers[1] = Strict()
    report = check(model, x)
    assert "not my scale" in report.not_measured[0].reason
    assert model.layers[0].scaling == model.layers[1].scaling == 0.25


def test_a_deep_copy_gives_the_same_report(x):
    model = Stack()
    assert check(model, x).findings == check(copy.deepcopy(model), x).findings


def test_static_runs_a_mixture_of_experts_and_leaves_its_config():
    config = hf.MixtralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
    )
    model = hf.MixtralForCausalLM(config)
    before = model.config._experts_implementation
    report = check(model, seq_len=24, static=True)
    assert [judged.verdict for judged in report.calls] == ["exact", "exact"]
    assert model.config._experts_implementation == before


@each("variant, mistake", [("", None), (":unscaled", "missing"), (":twice", "twice"), (":inverted", "inverted")])
@each("static", [False, True])
def test_the_embedded_models(variant, mistake, static):
    report = check(f"demo{variant}", seq_len=48, static=static)
    assert {judged.mistake for judged in report.calls} == {mistake}
    assert report.exit_code == int(mistake is not None)
    assert report.model.id == f"demo{variant}"

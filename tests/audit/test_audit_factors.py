"""Factors of the sequence's length and of the data that a scale has by design, and the mistake beside each."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk._check import check
from sqrtdk.audit.explanations import judge_scale
from tests.attentions.each import each
from tests.audit.by_design_models import HEADS, LENGTH, WIDTH, Projected, audited, found


class Proportional(Projected):
    """Lumina-T2X: the base length and the switch are set on the module."""

    def forward(self, x):
        q, k, v = self.projected(x)
        on = self.applied if hasattr(self, "applied") else math.log(x.shape[1], self.base_seqlen) ** 0.5
        return functional.scaled_dot_product_attention(q, k, v, scale=on * WIDTH**-0.5)


class Processor:
    """Diffusers: the base length is an argument of the processor that the module calls."""

    def __call__(self, attn, x, base_sequence_length=None, wrong=1.0):
        q, k, v = attn.projected(x)
        factor = math.log(x.shape[1], base_sequence_length) ** 0.5 if base_sequence_length else 1.0
        return functional.scaled_dot_product_attention(q, k, v, scale=wrong * factor * WIDTH**-0.5)


class Processed(Projected):
    def forward(self, x, **options):
        return self.processor(self, x, **options)


@each("static", [False, True])
def test_proportional_attention_is_declared_by_its_base(static):
    told = f"attribute base_seqlen = 256 (proportional attention: sqrt(log_256({LENGTH})))"
    right = Proportional(base_seqlen=256, proportional_attn=True)
    _, judged, above = audited(right, static=static)
    assert (judged.verdict, judged.declared_by, above) == ("declared", told, [])
    dropped = Proportional(base_seqlen=256, proportional_attn=True, applied=1.0)
    assert audited(dropped, static=static)[2] == ["declared_vs_actual"]
    off = Proportional(base_seqlen=256, proportional_attn=False)
    assert audited(off, static=static)[2] == ["scale_ledger"]


def test_a_base_that_nobody_switched_on_lets_the_textbook_stand():
    assert audited(Proportional(base_seqlen=256))[1].verdict == "declared"
    assert audited(Proportional(base_seqlen=256, applied=1.0))[1].verdict == "exact"
    assert audited(Proportional(base_seqlen=256, applied=1.1))[2] == ["declared_vs_actual"]
    assert audited(Proportional(config={"base_sequence_length": 256}, base_seqlen=256))[1].verdict == "declared"


class Held(Projected):
    """Its processor gets a base that no argument of the module shows."""

    def forward(self, x):
        return self.processor(self, x, base_sequence_length=self.base)


def told_of_base(base):
    return f"argument base_sequence_length = {base} (proportional attention: sqrt(log_{base}({LENGTH})))"


@each("static", [False, True])
@each("base", [2, 4, 9, 12, 64, 256, 4096])
def test_a_base_that_is_an_argument_is_read_as_it_was_passed(base, static):
    x = torch.randn(2, LENGTH, HEADS * WIDTH)  # 24 = 12 sqrt(4): below 16 the scale alone reads as a mistake's
    report = check(Processed(processor=Processor()), {"x": x, "base_sequence_length": base}, static=static)
    assert [judged.declared_by for judged in report.calls] == [told_of_base(base)]
    assert found(report) == []


@each("base", [64, 256, 1024, 4096])
def test_a_base_that_was_not_passed_to_the_module_is_read_back_from_the_scale(base):
    _, judged, above = audited(Held(processor=Processor(), base=base))
    assert (judged.declared_by, above) == (told_of_base(base), [])


@each("wrong", [0.9, 1.1, 4.0, 0.25, 0.5, 2.0])
def test_a_constant_gives_back_no_whole_base(wrong):
    x = torch.randn(2, LENGTH, HEADS * WIDTH)
    report = check(Processed(processor=Processor()), {"x": x, "wrong": wrong})
    assert found(report) == ["scale_ledger"]
    both = check(Processed(processor=Processor()), {"x": x, "wrong": wrong, "base_sequence_length": 256})
    assert found(both) == ["declared_vs_actual"]


@each("base", [4, 256])
@each("applied", [None, 64])
def test_a_base_other_than_the_argument_is_found(base, applied):
    """64 is a whole number as well: what was passed says that it is the wrong one."""

    class Deaf(Projected):
        def forward(self, x, base_sequence_length=None):
            return Processor()(self, x, applied)

    x = torch.randn(2, LENGTH, HEADS * WIDTH)
    report = check(Deaf(), {"x": x, "base_sequence_length": base})
    assert found(report) == ["declared_vs_actual"]
    assert told_of_base(base) in str(report.findings[0].message)
    assert found(check(Deaf(), {"x": x})) == ([] if applied is None else ["scale_ledger"])


def test_a_base_of_cross_attention_lets_the_textbook_stand(make_call):
    """Lumina passes it to the attention on the text as well, which does not apply it."""
    module, passed = Processed(processor=Processor()), {"base_sequence_length": (4.0,)}
    textbook, own = {"query_len": 16, "key_len": 16, "effective": 0.25}, {"self_attention": True}
    assert judge_scale(make_call(**textbook, self_attention=False), module, arguments=passed).verdict == "exact"
    assert judge_scale(make_call(**textbook, **own), module, arguments=passed).verdict == "unexplained"


class Shared(nn.Module):
    """One attention, called once with each of these bases."""

    def __init__(self, *bases):
        super().__init__()
        self.attn, self.bases = Processed(processor=Processor()), bases

    def forward(self, x):
        named = [{} if base is None else {"base_sequence_length": base} for base in self.bases]
        return torch.stack([self.attn(x, **passed) for passed in named])


@pytest.mark.parametrize("bases", [(64, None), (None, 64), (64, 100), (torch.tensor(64),)])
def test_each_call_of_a_module_has_the_base_that_it_got(bases):
    report = check(Shared(*bases), torch.randn(2, LENGTH, HEADS * WIDTH))
    said = [told_of_base(int(base)) if base is not None else None for base in bases]
    assert [call.declared_by for call in report.calls] == said
    assert [call.verdict for call in report.calls] == ["exact" if base is None else "declared" for base in bases]


def test_a_mistake_that_gives_back_a_whole_base_by_chance_is_one(make_call):
    module = Processed(processor=Processor())
    chance = {"query_len": 256, "key_len": 256, "effective": 8**-0.5}  # r^2 = 2 = log_16(256)
    assert judge_scale(make_call(**chance), module).declared_by.startswith("argument base_sequence_length = 16 (")
    assert judge_scale(make_call(**chance, heads=8, kv_heads=8), module).mistake == "head_count"
    assert judge_scale(make_call(**chance)).mistake == "unknown"


@each("changes", [{"query_len": 1}, {"factors": ()}, {"factors": (None,)}, {"effective": None}])
def test_a_scale_that_was_not_read_gives_back_no_base(make_call, changes):
    call = make_call(**{"query_len": 256, "key_len": 256, "effective": 8**-0.5, "factors": (8**-0.5,)} | changes)
    assert judge_scale(call, Processed(processor=Processor())).verdict in ("unexplained", "unmeasured")


class DeStationary(Projected):
    """Non-stationary Transformers: (tau q.k + delta) / sqrt(d), tau and delta computed from the series' statistics."""

    def __init__(self, scale=WIDTH**-0.5, **attributes):
        super().__init__(**attributes)
        self.applied = scale
        self.tau = nn.Sequential(nn.Linear(HEADS * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
        self.delta = nn.Linear(HEADS * WIDTH, LENGTH)

    def forward(self, x, tau=None):
        q, k, v = self.projected(x)
        tau = self.tau(x.std(1)).exp() if tau is None else tau
        scores = torch.einsum("bhle,bhse->bhls", q, k) * tau[:, None, None] + self.delta(x.mean(1))[:, None, None]
        return (self.applied * scores).softmax(-1) @ v


class DSAttention(DeStationary):
    """By the name that it has in released code."""


@each("static", [False, True])
@each("batch", [1, 3])
def test_a_factor_of_the_data_is_no_mistake(batch, static):
    _, judged, above = audited(DeStationary(), batch=batch, static=static)
    told = "a factor computed from the data, beside 1/sqrt(head_dim)"
    assert (judged.verdict, judged.mistake, judged.declared_by, above) == ("declared", None, told, [])
    assert "data * q.k" in judged.call.formula


@each("scale, mistake", [(1.0, "missing"), (1 / WIDTH, "twice"), (WIDTH**0.5, "inverted"), (0.3, "unknown")])
@each("batch", [1, 3])
def test_what_stands_beside_a_factor_of_the_data_is_judged(scale, mistake, batch):
    report, judged, above = audited(DeStationary(scale), batch=batch)
    assert (judged.verdict, judged.mistake) == ("unexplained", mistake)
    assert "scale_ledger" in above
    assert f"scale {scale:.6g} instead of" in next(f.message for f in report.findings if f.rule == "scale_ledger")


def test_what_stands_beside_a_factor_of_the_data_is_held_against_the_config():
    config = {"attention_multiplier": 0.3}
    _, judged, above = audited(DeStationary(0.3, config=config))
    assert (judged.verdict, above) == ("declared", [])
    assert "beside config.attention_multiplier = 0.3" in judged.declared_by
    assert audited(DeStationary(config=config))[2] == ["declared_vs_actual"]


@each("static", [False, True])
def test_a_learned_gain_beside_a_factor_of_the_data_is_declared(static):
    class Gained(DeStationary):
        def heads(self, x):
            return super().heads(x) * self.gain

    gain = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
    _, judged, above = audited(Gained(gain=gain), static=static)
    assert (judged.verdict, above) == ("declared", [])
    assert "beside parameter gain (learned)" in judged.declared_by


def test_a_factor_that_is_given_is_of_the_data():
    x = torch.randn(3, LENGTH, HEADS * WIDTH)
    assert audited(DeStationary(), x, torch.rand(3, 1) + 0.5)[1].verdict == "declared"
    one = (x[:1], torch.rand(1, 1) + 0.5)  # a lone number: known by the name of the class
    assert audited(DSAttention(), *one)[1].verdict == "declared"
    assert audited(DSAttention(1.0), *one)[1].mistake == "missing"


@each("batch", [1, 3])
def test_no_mistake_is_named_where_the_rest_was_not_read(batch):
    class Lost(DeStationary):
        def heads(self, x):
            return super().heads(x).tanh()

    _, judged, _ = audited(Lost(), batch=batch)
    assert (judged.verdict, judged.mistake) == ("unmeasured", None)
    assert "beside a factor computed from the data could not be read" in judged.reason


def test_a_constant_of_the_code_is_no_factor_of_the_data():
    class Constant(Projected):
        def forward(self, x):
            q, k, v = self.projected(x)
            return (q @ k.mT * torch.full((2, 1, 1, 1), 1.3) * WIDTH**-0.5).softmax(-1) @ v

    _, judged, above = audited(Constant())
    assert (judged.verdict, above) == ("unexplained", ["scale_ledger"])


def test_a_gate_on_keys_or_from_the_logits_is_no_factor_of_the_data():
    class Gated(Projected):
        def forward(self, x):
            q, k, v = self.projected(x)
            scores = q @ k.mT * WIDTH**-0.5
            gate = x.mean(-1)[:, None, None] if self.by == "key" else scores.std(dim=(-1, -2, -3), keepdim=True)
            return (scores * gate).softmax(-1) @ v

    for by in ("key", "logits"):
        assert "computed from the data" not in (audited(Gated(by=by))[1].declared_by or "")


def test_a_bias_is_scaled_on_purpose_only_beside_a_factor_of_the_data():
    class Biased(DeStationary):
        def forward(self, x):
            q, k, v = self.projected(x)
            return ((q @ k.mT + self.delta(x.mean(1))[:, None, None]) * WIDTH**-0.5).softmax(-1) @ v

    assert audited(DeStationary())[2] == []
    assert audited(Biased())[2] == ["mask_audit"]

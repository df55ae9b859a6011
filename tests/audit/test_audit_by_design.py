"""Scales and masks that a model has by design, and the mistake that stands beside each.

Switches that say False, and the hidden diagonal of shared q and k.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk._check import check
from tests.attentions.each import each
from tests.audit.by_design_models import HEADS, LENGTH, WIDTH, Projected, audited, found

# --- switches ---


class Switched(Projected):
    """Scales where its switch says so, as Keras, GPT-2 and the temporal fusion transformer do."""

    switch = "use_scale"

    def forward(self, x):
        q, k, v = self.projected(x)
        on = getattr(self, self.switch)
        return (q @ k.mT * (WIDTH**-0.5 if on else 1.0)).softmax(-1) @ v


class Deaf(Projected):
    """Never scales, whatever a switch says."""

    def forward(self, x):
        q, k, v = self.projected(x)
        return (q @ k.mT).softmax(-1) @ v


@each("name", ["use_scale", "scaling", "scale", "scale_attn", "scale_attn_weights"])
def test_a_switch_that_says_false_is_a_warning(name):
    class Named(Switched):
        switch = name

    model = Named(**{name: False})
    report, judged, above = audited(model)
    assert (judged.verdict, judged.mistake, above) == ("unexplained", "missing", ["scale_ledger"])
    (warning,) = (f for f in report.findings if f.rule == "scale_ledger")
    assert (warning.severity, report.exit_code) == ("warn", 0)
    assert f"nothing but attribute {name} = False" in warning.message
    assert getattr(model, name) is False
    assert audited(Named(**{name: True}))[1].verdict == "exact"


def test_a_switch_that_says_true_is_no_excuse():
    assert audited(Deaf(use_scale=True))[1].mistake == "missing"
    assert audited(Deaf(lora=nn.ModuleDict({"scaling": nn.Linear(1, 1)})))[1].mistake == "missing"


def test_a_scale_that_is_only_built_where_it_is_used():
    class Learned(Projected):  # Keras: a learned scale is only built where it is used
        def forward(self, x):
            q, k, v = self.projected(x)
            scores = q @ k.mT
            return (scores * self.learned_scale if self.use_scale else scores).softmax(-1) @ v

    assert audited(Learned(use_scale=False))[1].mistake == "missing"
    gain = nn.Parameter(torch.tensor(0.7))
    assert "(learned)" in audited(Learned(use_scale=True, learned_scale=gain))[1].declared_by


def test_a_switch_excuses_no_other_value():
    class Halved(Projected):
        def forward(self, x):
            q, k, v = self.projected(x)
            return (q @ k.mT * (0.25 if self.use_scale else HEADS**-0.5)).softmax(-1) @ v

    _, judged, above = audited(Halved(use_scale=False))
    assert (judged.verdict, judged.mistake, above) == ("unexplained", "head_count", ["scale_ledger"])


def test_one_layer_that_is_switched_off_is_missing_its_scale():
    layers = nn.ModuleList(nn.ModuleDict({"attn": Switched(use_scale=on)}) for on in (True, False, True))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:
                x = layer["attn"](x).transpose(1, 2).flatten(2)
            return x

    report = check(Model(), (torch.randn(2, LENGTH, HEADS * WIDTH),))
    assert [judged.mistake for judged in report.calls] == [None, "missing", None]


@each("name", ["use_scale", "scale_attn_weights"])
def test_a_switch_in_the_config_is_strong(name):
    config = {name: False}
    assert audited(Deaf(config=config))[1].declared_by.startswith(f"config.{name} = False")
    assert audited(Deaf(config=config))[2] == []
    assert audited(Switched(use_scale=True, config=config))[2] == ["declared_vs_actual"]


def test_scaling_in_the_config_explains_and_does_not_promise():
    _, judged, above = audited(Deaf(config={"scaling": False}))
    assert (judged.declared_by, above) == ("config.scaling = False (no scale)", [])
    assert audited(Switched(use_scale=True, config={"scaling": False}))[1].verdict == "exact"
    assert audited(Deaf(config={"scaling": True}))[1].mistake == "missing"


# --- shared q and k ---


class Masked(Projected):
    """Causal attention without its diagonal, which the first row alone sees; `shared` takes q for k."""

    def __init__(self, shared, diagonal=-1, own=-5e4):
        super().__init__(shared=shared, diagonal=diagonal, own=own)
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)

    def forward(self, x):
        q, k, v = self.projected(x)
        if self.shared == "fused":
            q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, -1))
        if self.shared is True:
            k = functional.normalize(q, dim=-1)
        scores = q @ k.mT * WIDTH**-0.5
        size = x.shape[1]
        eye = torch.eye(size, dtype=torch.bool, device=x.device)
        later = torch.ones(size, size, dtype=torch.bool, device=x.device).tril(self.diagonal).logical_not()
        scores = scores.masked_fill(later, torch.finfo(x.dtype).min).masked_fill(eye, self.own)
        return scores.softmax(-1) @ v


def test_the_hidden_diagonal_of_shared_q_and_k_is_by_design():
    report, judged, above = audited(Masked(shared=True))
    assert judged.call.shared_qk
    assert above == []
    (told,) = [finding.message for finding in report.findings if finding.rule == "mask_audit"]
    assert told == "8 of 192 rows see no key but their own, which is hidden: q and k are one projection"


@each("shared", [False, "fused"])
def test_the_hidden_diagonal_of_two_projections_is_a_mask_off_by_one(shared):
    report, judged, above = audited(Masked(shared=shared))
    assert not judged.call.shared_qk
    assert "mask_audit" in above
    assert any("off by one: no row sees its own key" in finding.message for finding in report.findings)


def test_shared_q_and_k_excuse_no_other_shift():
    report, judged, above = audited(Masked(shared=True, diagonal=-3))
    assert judged.call.shared_qk
    assert "mask_audit" in above
    assert any("off by 3" in finding.message for finding in report.findings)


def test_reformer_is_right():
    hf = pytest.importorskip("transformers")
    config = hf.ReformerConfig(
        attention_head_size=WIDTH, attn_layers=["lsh", "local"], num_attention_heads=HEADS, hidden_size=64,
        axial_pos_embds=False, max_position_embeddings=64, is_decoder=True, num_buckets=4, lsh_attn_chunk_length=8,
        local_attn_chunk_length=8, vocab_size=96, feed_forward_size=64, num_hashes=1,
    )  # fmt: skip
    report = check(hf.ReformerModel(config), (torch.randint(0, 96, (2, 8)),))
    assert [judged.verdict for judged in report.calls] == ["exact", "exact"]
    assert [judged.call.shared_qk for judged in report.calls] == [True, False]
    assert found(report) == []


@each("train", [False, True])
def test_a_fused_projection_is_not_shared(train):
    layer = nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True).train(train)
    x = torch.randn(2, LENGTH, HEADS * WIDTH)
    assert not audited(layer, x, x, x)[1].call.shared_qk

"""Masks as models apply them: those that leak the future, are inverted or hide nothing, and those that are right."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from sqrtdk._check import check
from tests.attentions.each import each
from tests.attentions.plain import Plain


@pytest.fixture
def x():
    return torch.randn(1, 24, 64)


@each("way", ["sdpa", "eager"])
@each(
    "visible, severity, word",
    [
        (lambda ones: ones.triu(1), "critical", "inverted"),
        (lambda ones: ones.triu(), "critical", "inverted"),
        (lambda ones: ones.tril(1), "critical", "off by one"),
        (lambda ones: ones.tril(-1), "warn", "off by one"),
        (lambda ones: ones.tril(), None, ""),
        (lambda ones: ones.tril() & ones.triu(-4), None, ""),
        (lambda ones: ones.tril(4) & ones.triu(-4), None, ""),
        (lambda ones: ones & ~torch.eye(24, dtype=torch.bool), None, ""),
        (lambda ones: ones.tril() | (torch.arange(24) < 5), None, ""),  # a prefix
        (lambda ones: ones[:22, :22].tril() | (torch.arange(22) < 7), None, ""),  # one with as many pairs as tril(1)
        (lambda ones: ones.tril() | torch.block_diag(*[ones[:2, :2]] * 12), None, ""),  # blocks of two
        (lambda ones: ones & (torch.arange(24) < 20), None, ""),  # padding
    ],
)
def test_masks_that_nobody_wants(x, visible, severity, word, way):
    mask = visible(torch.ones(24, 24, dtype=torch.bool))
    report = check(Plain(0.25, mask, way), x[:, : len(mask)])
    told = [f for f in report.findings if f.severity != "note"]
    assert [f.severity for f in told] == ([severity] if severity else [])
    assert all(f.rule == "mask_audit" and word in f.message for f in told)


class Stored(nn.Module):
    """Its causal mask is a buffer or a plain attribute, as in nanoGPT: float or bool, longer than the inputs."""

    def __init__(self, ahead, kind, place):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        ones = torch.ones(1, 1, 32, 32).tril(ahead)
        made = {
            "float": ones,
            "bool": ones.bool(),
            "added": torch.zeros(32, 32).masked_fill(ones[0, 0] == 0, -torch.inf),
        }
        if place == "buffer":
            self.register_buffer("bias", made[kind], persistent=False)
        else:
            self.bias = made[kind]
        self.kind = kind

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        logits, bias = q @ k.mT * 0.25, self.bias[..., : x.shape[1], : x.shape[1]]
        if self.kind == "added":
            logits = logits + bias
        else:
            logits = logits.masked_fill(bias == 0 if self.kind == "float" else ~bias, float("-inf"))
        return logits.softmax(-1) @ v


@each("place", ["buffer", "attribute"])
@each("kind", ["float", "bool", "added"])
@each("ahead, expected", [(0, []), (1, ["critical"]), (-1, ["warn"])])
def test_a_stored_mask_is_known_without_weights(x, ahead, kind, place, expected):
    model = Stored(ahead, kind, place)
    report = check(model, x, static=True)
    assert [f.severity for f in report.findings if f.rule == "mask_audit" and f.severity != "note"] == expected
    assert report.calls[0].call.mask.least == -ahead
    assert not model.bias.is_meta
    if place == "buffer":  # without values it is unread, and no alarm
        unread = check(model.to("meta"), x)
        assert (unread.calls[0].call.mask.least, unread.exit_code) == (None, 0)


def test_weights_that_are_masked_and_divided_by_their_sum_are_masked(x):
    def divided(weights):
        return weights / (weights.sum(-1, keepdim=True) + 1e-13)

    for normalise in (divided, lambda weights: F.normalize(weights, p=1, dim=-1)):
        report = check(Plain(0.25, torch.ones(24, 24).tril(), "after", normalise=normalise), x)
        assert [f for f in report.findings if f.rule == "mask_audit"] == []
    report = check(Plain(0.25, torch.ones(24, 24).tril(), "after", normalise=lambda w: F.normalize(w, p=2, dim=-1)), x)
    assert [f.severity for f in report.findings if f.rule == "mask_audit"] == ["fail"]


@each("way, word", [("sdpa", "0 and 1"), ("added", "0 and 1"), ("after", "masked after the softmax")])
def test_masks_that_are_none(x, way, word):
    (finding,) = check(Plain(0.25, torch.ones(24, 24).tril(), way), x).findings
    assert (finding.rule, finding.severity) == ("mask_audit", "fail")
    assert word in finding.message


def test_images_of_gemma_3_see_one_another():
    """Its module says that it is causal; its config declares images, the tokens of which form a block."""
    tower = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = tower | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160}
    config = hf.Gemma3Config(
        text_config=text,
        vision_config=tower | {"image_size": 16, "patch_size": 8},
        image_token_index=159,
        mm_tokens_per_image=4,
    )
    ids = torch.arange(24)[None].index_fill(1, torch.arange(2, 6), 159)
    inputs = {"input_ids": ids, "token_type_ids": (ids == 159).long(), "pixel_values": torch.randn(1, 3, 16, 16)}
    report = check(hf.Gemma3ForConditionalGeneration(config), inputs)
    (ahead,) = [judged.call.future_weight for judged in report.calls if "vision" not in judged.call.site]
    assert ahead > 0.001
    assert [f for f in report.findings if f.severity != "note"] == []


class Made(nn.Module):
    """Adds to its logits what `make` makes of their number of positions and of the module."""

    def __init__(self, make):
        super().__init__()
        self.qkv, self.make = nn.Linear(64, 192), make
        self.edges = nn.Parameter((torch.arange(24)[:, None] >= torch.arange(24)).float())

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return (q @ k.mT * 0.25 + self.make(torch.ones(24, 24, device=x.device), self)).softmax(-1) @ v


@each("fill", [-3.0, -10.0, -40.0])
@each("pattern", [lambda ones: ones.triu(1), lambda ones: ones * (torch.arange(24) > 19)])
def test_a_mask_that_hides_too_little_is_measured(x, pattern, fill):
    report = check(Made(lambda ones, module: fill * pattern(ones)), x)
    (judged,) = report.calls
    assert (judged.call.mask.fill, judged.call.bias) == (fill, None)
    leaks = judged.call.mask.masked_weight > 1e-4
    assert leaks or fill < -3
    told = [f.severity for f in report.findings if "masked keys" in f.message]
    assert told == (["fail"] if leaks else [])


def _alibi(ones, module):
    return -0.5 * (torch.arange(24)[:, None] - torch.arange(24)).abs() * ones


@each(
    "make",
    [
        _alibi,
        lambda ones, module: -3 * module.edges,  # a learned bias, wherever its numbers lie
        lambda ones, module: -3 * (torch.arange(24)[:, None] // 5 != torch.arange(24) // 5).float(),
    ],
)
def test_a_bias_below_zero_stays_a_bias(x, make):
    report = check(Made(make), x)
    (judged,) = report.calls
    assert (judged.call.mask, report.findings) == (None, ())
    assert judged.call.bias in ("alibi", "bias", "relative")


@each(
    "make, expected",
    [
        (lambda ones, module: ones.tril(), ["fail"]),
        (lambda ones, module: ones.tril() * ones.triu(-4), ["fail"]),
        (lambda ones, module: ones * (torch.arange(24) < 20), ["fail"]),
        (lambda ones, module: module.edges, []),
        (lambda ones, module: (torch.arange(24)[:, None] // 5 == torch.arange(24) // 5).float(), []),
    ],
)
def test_numbers_0_and_1_are_a_mask_where_they_lie_like_one(x, make, expected):
    report = check(Made(make), x)
    assert [f.severity for f in report.findings if "0 and 1" in f.message] == expected
    assert report.exit_code == int(bool(expected))

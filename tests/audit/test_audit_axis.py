"""A softmax over the rows, the heads or the batch in place of the keys, and models that mean it."""

import torch
from torch import nn

from sqrtdk import check
from sqrtdk.report.check.consequences import consequences
from tests.attentions.each import each


class Attends(nn.Module):
    """Self-attention with 4 heads of 8, whose weights `soften` makes of (B, H, L, S) logits."""

    def __init__(self, soften):
        super().__init__()
        self.qkv, self.soften = nn.Linear(32, 96), soften

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.soften(q @ k.mT / 8**0.5) @ v


class SlotAttention(Attends):
    """Its slots compete, and take a weighted sum."""


def by_hand(z):
    weights = z.exp()
    return weights / weights.sum(-2, keepdim=True)


def renormalised(z):
    weights = z.softmax(-2)
    return weights / weights.sum(-1, keepdim=True)


@each(
    "soften, text",
    [
        (lambda z: z.softmax(-2), "over the rows"),
        (lambda z: nn.functional.dropout(z.softmax(2), 0.1, False), "over the rows"),
        (by_hand, "over the rows"),
        (lambda z: z.softmax(1), "as the heads'"),
        (lambda z: z.softmax(0), "as the heads'"),
    ],
)
def test_a_softmax_over_another_axis_than_the_keys_fails(soften, text):
    report = check(Attends(soften), torch.randn(3, 9, 32))
    finding = report.findings[0]
    assert (finding.rule, finding.severity) == ("softmax_axis", "fail")
    (caused,) = consequences(report.findings)
    assert [one.first.rule for one in caused.consequences] == ["unmeasured"]
    assert text in finding.message
    assert finding.fix.startswith("softmax(dim=-1)")
    assert report.exit_code == 1


@each("model", [Attends(renormalised), SlotAttention(lambda z: z.softmax(-2)), Attends(lambda z: z.softmax(-1))])
def test_slot_attention_stays_quiet(model):
    report = check(model, torch.randn(3, 9, 32))
    assert "softmax_axis" not in {finding.rule for finding in report.findings}
    assert report.exit_code == 0


@each(
    "name",
    ["Attention", "GroupedQueryAttention", "MemoryEfficientAttention", "WriterAttention", "BiLevelRoutingAttention",
     "UnderwritingEncoder"],
)  # fmt: skip
def test_a_name_that_only_resembles_those_of_slot_attention_silences_nothing(name):
    model = type(name, (Attends,), {})(lambda z: z.softmax(-2))
    assert [one.severity for one in check(model, torch.randn(3, 9, 32)).findings if one.rule == "softmax_axis"] == [
        "fail"
    ]


@each(
    "name",
    ["SlotAttention", "GroupingBlock", "GroupViTAssignAttention", "kmeans_cluster", "MemoryWriter", "CapsuleLayer",
     "DynamicRouting", "CompetitiveAttention"],
)  # fmt: skip
def test_a_module_named_for_rows_that_compete_stays_quiet(name):
    model = type(name, (Attends,), {})(lambda z: z.softmax(-2))
    assert "softmax_axis" not in {one.rule for one in check(model, torch.randn(3, 9, 32)).findings}

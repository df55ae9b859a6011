"""Blocks of keys under one softmax: a scale that one of them has alone is a failure that names the block."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from sqrtdk._check import check
from sqrtdk.audit.records import CheckReport
from sqrtdk.report.json import to_json
from sqrtdk.report.terminal import to_text
from tests.attentions.blocks import BLOCK, WAYS
from tests.attentions.each import each

E, H, L = 16, 2, 12
ROOT = E**-0.5


class Attention(nn.Module):
    """Self-attention whose middle is a function of q, k and v."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(32, 3 * H * E), nn.Linear(H * E, 32), attend
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(self, q, k, v).transpose(1, 2).flatten(2))


def together(*scales: float):
    """The logits of three blocks of keys side by side."""

    def attend(model, q, k, v):
        parts = zip(k.split(BLOCK, -2), scales, strict=True)
        blocks = [q @ part.mT if scale == 1 else q @ part.mT * scale for part, scale in parts]
        return torch.cat(blocks, -1).softmax(-1) @ v

    return attend


def learned(model, q, k, v):
    """Memories whose logits have a gain of their own."""
    blocks = [q @ k[:, :, :BLOCK].mT * ROOT * model.gain, q @ k[:, :, BLOCK:].mT * ROOT]
    return torch.cat(blocks, -1).softmax(-1) @ v


def report(attend, **options) -> CheckReport:
    return check(Attention(attend), torch.randn(2, L, 32), **options)


def told(report: CheckReport) -> list[tuple[str, str]]:
    return [(finding.rule, finding.severity) for finding in report.findings]


def online(name: str):
    """A running sum, one way or another."""
    return lambda *scales: lambda model, q, k, v: WAYS[name].way(q, k, v, scales, (None, None))


BY_SUMS = ("running", "in_pieces_of_buffers", "ring")
WRITTEN = {"together": together} | {name: online(name) for name in BY_SUMS}


@each("static", [False, True])
@pytest.mark.parametrize("written", WRITTEN)
def test_blocks_of_the_textbook_scale_are_exact(written: str, static: bool) -> None:
    audit = report(WRITTEN[written](ROOT, ROOT, ROOT), static=static)
    assert [call.verdict for call in audit.calls] == ["exact"]
    merged = [("unmeasured", "note")] if written == "ring" and not static else []  # its logits lie in several softmaxes
    assert (told(audit), audit.exit_code) == (merged, 0)


@each("static", [False, True])
@each("written", WRITTEN)
@each("scale, mistake", [(1.0, "missing"), (ROOT**2, "twice")])
def test_a_mistake_that_all_blocks_share_is_named(written: str, static: bool, scale: float, mistake: str) -> None:
    audit = report(WRITTEN[written](scale, scale, scale), static=static)
    assert [(call.verdict, call.mistake) for call in audit.calls] == [("unexplained", mistake)]
    assert audit.exit_code == 1
    assert ("scale_ledger", "fail") in told(audit)


@each("static", [False, True])
@pytest.mark.parametrize("written", WRITTEN)
@each(
    "scales, text",
    [
        ((1.0, ROOT, ROOT), "keys 0 to 3 are scaled by 1, keys 4 to 11 by 0.25"),
        ((ROOT, ROOT, ROOT**2), "keys 0 to 7 are scaled by 0.25, keys 8 to 11 by 0.0625"),
        ((ROOT, 2 * ROOT, ROOT), "keys 0 to 3 are scaled by 0.25, keys 4 to 7 by 0.5, keys 8 to 11 by 0.25"),
    ],
)
def test_unlike_scales_are_a_failure_that_names_the_blocks(written: str, static: bool, scales, text: str) -> None:
    audit = report(WRITTEN[written](*scales), static=static)
    (call,) = audit.calls
    assert (call.verdict, call.call.formula) == ("unexplained", "softmax(scale[block] * q.k)")
    (finding,) = [finding for finding in audit.findings if finding.rule == "blocks"]
    assert (finding.severity, finding.site, audit.exit_code) == ("fail", "", 1)
    assert text in finding.message
    assert "scale_ledger" not in [rule for rule, _ in told(audit)]
    assert text in " ".join(to_text(audit, width=200).split())
    assert [block["first"] for block in json.loads(to_json(audit))["calls"][0]["blocks"]] == [0, 4, 8]


def test_a_learned_gain_of_one_block_may_be_meant() -> None:
    assert ("blocks", "warn") in told(report(learned))


class Causal(Attention):
    """It says that it is causal."""

    is_causal = True


def causal_by(name: str, hide: bool, ahead: int = 0):
    """A running sum with a causal mask, or with one that shows keys after a row's own."""

    def attend(model, q, k, v):
        hidden = torch.arange(L) > torch.arange(L)[:, None] + ahead
        return WAYS[name].way(q, k, v, (ROOT,) * 3, (hidden if hide else None, None))

    return attend


@each("name", ["running", "by_blocks_of_queries", "in_pieces_of_buffers", "ring"])
def test_masks_of_blocks_are_judged(name: str) -> None:
    x = torch.randn(2, L, 32)
    assert check(Causal(causal_by(name, hide=True)), x).exit_code == 0
    leaks = [check(Causal(causal_by(name, hide=False)), x), check(Causal(causal_by(name, hide=True, ahead=1)), x)]
    assert [("mask_audit", "critical") in told(leak) for leak in leaks] == [True, True]


def test_what_does_not_add_up_is_not_passed() -> None:
    def attend(model, q, k, v):
        power = (q @ k.mT * ROOT).exp()
        return 2 * (power @ v) / power.sum(-1, keepdim=True)

    audit = report(attend, fail_on="unmeasured")
    assert ([call.verdict for call in audit.calls], audit.exit_code) == (["unmeasured"], 1)
    assert "do not add up" in audit.findings[0].message


@each("static", [False, True])
def test_the_finding_names_the_lines_of_the_factors(static: bool) -> None:
    def attend(model, q, k, v):
        first = q @ k[:, :, :BLOCK].mT * ROOT  # one
        second = q @ k[:, :, BLOCK:].mT * 0.01  # other
        return torch.cat([first, second], -1).softmax(-1) @ v

    (finding,) = [f for f in report(attend, static=static).findings if f.rule == "blocks"]
    line = attend.__code__.co_firstlineno
    assert finding.at is not None
    assert [int(at.rpartition(":")[2]) for at in finding.at.split(", ")] == [line + 1, line + 2]


@each("name", BY_SUMS)
def test_a_running_sum_has_the_lines_of_its_product_and_its_exp(name: str) -> None:
    for judged in report(online(name)(ROOT, ROOT, ROOT)).calls:
        assert "attentions/blocks.py:" in (judged.call.product_at or "")
        assert "attentions/blocks.py:" in (judged.call.softmax_at or "")

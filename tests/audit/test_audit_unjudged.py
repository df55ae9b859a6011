"""What could not be judged never looks fine: it is a finding, the headline counts it, and it fails on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sqrtdk._check import check
from sqrtdk.audit.records import CheckReport
from sqrtdk.errors import ModelError
from sqrtdk.report.check.json import to_document
from sqrtdk.report.html import to_html
from sqrtdk.report.terminal import summary_line, to_text
from tests.attentions.each import each
from tests.support.program import called


class Attention(nn.Module):
    """Self-attention whose middle is a function of q, k, v and the mask of tril."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(32, 96), nn.Linear(32, 32), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


def right(q, k, v, mask):
    return (q @ k.mT * 8**-0.5).masked_fill(mask == 0, -torch.inf).softmax(-1) @ v


def times_mask(q, k, v, mask):
    """The mask is multiplied with the logits: hidden keys have logit 0, not minus infinity."""
    return (q @ k.mT * 8**-0.5 * mask).softmax(-1) @ v


def changed(q, k, v, mask):
    """Weights that do not sum to 1 any more, and are of another scale."""
    return ((q @ k.mT * 8**-0.5).softmax(-1) ** 2) @ v


def over_heads(q, k, v, mask):
    """The softmax runs over another axis than the keys."""
    return (q @ k.mT * 8**-0.5).softmax(1) @ v


def linear(q, k, v, mask):
    """No softmax at all."""
    return q @ (k.mT @ v) / k.shape[-2]


def sinkhorn(q, k, v, mask):
    """Rows and columns are normalised in turn."""
    w = (q @ k.mT).softmax(-1)
    for _ in range(3):
        w = w / w.sum(-2, keepdim=True)
        w = w / w.sum(-1, keepdim=True)
    return w @ v


def sigmoid(q, k, v, mask):
    """A sigmoid in the place of the softmax."""
    return (q @ k.mT).sigmoid() @ v


def gated(q, k, v, mask):
    """No softmax, and nothing between positions."""
    return v * (q * k).sigmoid()


def discarded(q, k, v, mask):
    """A softmax whose weights reach no value."""
    return v + (q @ k.mT).softmax(-1).amax(-1, keepdim=True)


def pooling(q, k, v, mask):
    """Weights that one projection gives: known to be no attention between positions."""
    return (q[..., :1].mT.softmax(-1) @ v).expand_as(v)


def x() -> Tensor:
    return torch.randn(2, 12, 32)


def beside(attend) -> nn.Module:
    """One layer that is read, and one with this attention."""
    return nn.Sequential(Attention(right), Attention(attend))


def unjudged(report: CheckReport) -> list[tuple[str, str]]:
    return [(finding.site, finding.severity) for finding in report.unjudged]


CASES = {  # verdicts of the calls, and a word of the finding
    times_mask: (["exact", "unmeasured"], "mul by a 0/1 mask"),
    changed: (["exact", "unmeasured"], "pow on the weights"),
    over_heads: (["exact", "unmeasured"], "another axis"),
    sinkhorn: (["exact", "unmeasured"], "Sinkhorn"),
    sigmoid: (["exact"], "seen up to there: sigmoid(q.k)"),
    linear: (["exact"], "linear attention"),
    gated: (["exact"], "no attention was found in it"),
    discarded: (["exact"], "no attention was found in it"),
}


@pytest.mark.parametrize("attend", CASES)
def test_what_could_not_be_judged_is_a_finding(attend) -> None:
    verdicts, word = CASES[attend]
    report = check(beside(attend), x(), fail_on="unmeasured")
    assert [call.verdict for call in report.calls] == verdicts
    assert unjudged(report) == [("1", "warn")]
    assert word in report.unjudged[0].message
    assert report.exit_code == 1
    assert "1 attention not judged" in summary_line(report)
    assert check(beside(attend), x()).exit_code == int(attend is over_heads)
    page = to_html(report)
    assert "Everything that ran was measured" not in page
    assert "Passed" not in page
    assert ("Failed" if attend is over_heads else "Incomplete") in to_html(check(beside(attend), x()))


def test_it_says_what_was_seen_up_to_there() -> None:
    (finding,) = check(beside(times_mask), x()).unjudged
    assert "seen up to there: softmax(unknown(mul by a 0/1 mask)(0.3536 * q.k))" in finding.message


class Similarity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.core = Attention(right), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.core(self.first(x)).chunk(2, -1)
        return (q @ k.mT).softmax(-1)


def test_a_softmax_that_may_be_one_is_a_note() -> None:
    report = check(Similarity(), x(), fail_on="unmeasured")
    assert (unjudged(report), report.exit_code) == ([("", "note")], 1)
    assert [entry.site for entry in report.not_attention] == [""]
    assert to_text(report, width=160).count("not seen to reach values") == 1


@each("attend", [right, pooling])
def test_what_was_judged_is_not_accused(attend) -> None:
    report = check(beside(attend), x(), fail_on="unmeasured")
    assert (report.findings, report.exit_code) == ((), 0)
    assert "not judged" not in summary_line(report)
    assert "Passed" in to_html(report)
    assert "Everything that ran was measured" in to_html(report)


def test_nothing_else_to_judge_is_an_error() -> None:
    with pytest.raises(ModelError, match="no attention could be read"):
        check(Attention(linear), x())


def test_health_is_apart_from_the_verdict() -> None:
    report = check(beside(times_mask), x())
    assert [(call.verdict, call.health) for call in report.calls] == [("exact", "ok"), ("unmeasured", "unmeasured")]
    assert [call["health"] for call in to_document(report)["calls"]] == ["ok", "unmeasured"]


def test_a_static_audit_passes_scales_alone() -> None:
    report = check(beside(right), x(), static=True)
    assert [(call.verdict, call.health) for call in report.calls] == [("exact", "unmeasured")] * 2
    assert (report.findings, report.outcome) == ((), "scales")
    page = to_html(report)
    assert "Scales passed" in page
    assert "told good" not in page
    assert "Everything that ran was measured" not in page


class Again(Attention):
    """Attends three times, and can't be read twice."""

    def forward(self, x: Tensor) -> Tensor:
        for attend in (times_mask, right, times_mask):
            self.attend = attend
            x = super().forward(x)
        return x


def test_each_call_of_one_module_counts() -> None:
    report = check(Again(right), x(), fail_on="unmeasured")
    assert [call.verdict for call in report.calls] == ["unmeasured", "exact", "unmeasured"]
    assert [finding.message[-18:] for finding in report.unjudged] == ["(call 1 of 3 here)", "(call 3 of 3 here)"]
    assert "2 attentions not judged" in summary_line(report)


class Beside(nn.Module):
    """Attends itself, and has a child that does so out of sight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.cross = nn.Linear(32, 96), Attention(gated)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.cross(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_call_of_the_parent_hides_no_child() -> None:
    assert unjudged(check(Beside(), x())) == [("cross", "warn")]


class Half(nn.Module):
    """Runs one of its two attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(right), Attention(right)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def test_an_attention_that_did_not_run_is_a_note_that_fails_on_request() -> None:
    report = check(Half(), x(), fail_on="unmeasured")
    assert (unjudged(report), report.exit_code) == ([("second", "note")], 1)
    assert check(Half(), x(), fail_on="fail").exit_code == 0
    assert to_text(report).count("did not run with these inputs") == 1


def test_an_implementation_that_was_asked_for_and_is_not_there() -> None:
    report = check(Half(), x(), attn="sdpa", fail_on="unmeasured")
    assert ("", "warn") in unjudged(report)
    assert ("", "warn") not in unjudged(check(Half(), x(), attn="both"))  # there is one, and it was audited
    assert "attention sdpa was asked for: Half offers no choice of attention" in to_text(report)


@each("fail_on, code", [("unmeasured", 1), ("fail", 0), ("warn", 1), ("never", 0)])
def test_a_failure_fails_on_unmeasured_as_on_fail(fail_on: str, code: int) -> None:
    report = check(beside(times_mask), x(), fail_on=fail_on)
    assert report.exit_code == code
    wrong = check(Attention(lambda q, k, v, mask: (q @ k.mT * 8**0.5).softmax(-1) @ v), x(), fail_on=fail_on)
    assert wrong.exit_code == int(fail_on != "never")
    assert not wrong.unjudged


def test_the_command_line_takes_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.qkv = nn.Linear(32, 96)\n"
        "    def forward(self, x):\n"
        "        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)\n"
        "        return (q @ k.mT * 8**-0.5 * torch.ones(12, 12).tril()).softmax(-1) @ v\n"
        "def net():\n    return Net(), (torch.randn(2, 12, 32),)\n"
    )
    strict = called("check", "mine:net", "--json", "--fail-on", "unmeasured", cwd=tmp_path)
    assert strict.returncode == 1, strict.stderr
    document = json.loads(strict.stdout)
    assert (document["fail_on"], document["exit_code"]) == ("unmeasured", 1)
    assert [finding["rule"] for finding in document["findings"]] == ["unmeasured"]
    assert "1 attention not judged" in strict.stderr


@torch.library.custom_op("sqrtdk_tests::times", mutates_args=())
def times(x: Tensor, factor: float) -> Tensor:
    """An opaque operation that is nearly a factor."""
    return x * factor + 1e-4 * x.sin()


@each("factor", [1.0, 8**0.5, 8**-0.5])
def test_a_slope_over_an_unknown_operation_is_no_verdict(factor: float) -> None:
    """Neither the textbook's slope nor a mistake's is believed alone."""

    def attend(q, k, v, mask):
        return times(q @ k.mT * 8**-0.5, factor).softmax(-1) @ v

    with torch.no_grad():
        report = check(Attention(attend), (torch.randn(2, 12, 32),))
    (call,) = report.calls
    assert (call.verdict, call.mistake) == ("unmeasured", None)
    assert call.call.scale.numeric == pytest.approx(factor * 8**-0.5, rel=1e-3)
    assert call.call.formula == "softmax(unknown(times)(0.3536 * q.k))"
    assert [f.severity for f in report.findings if f.rule == "unmeasured"] == ["warn"]
    assert report.exit_code == 0


def angles(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2])[:, None] * 100.0 ** -torch.linspace(0, 0.75, 4)


def turned(x: Tensor, of_channels: Tensor | None = None, sign: float = -1.0) -> Tensor:
    """As rotate_half does it, cos and sin of each channel given."""
    of_channels = torch.cat([angles(x), angles(x)], -1) if of_channels is None else of_channels
    first, second = x.chunk(2, -1)
    return x * of_channels.cos() + torch.cat([sign * second, first], -1) * of_channels.sin()


NO_ROTATION = {
    "of neighbours": lambda x: turned(x, angles(x).repeat_interleave(2, -1)),
    "without a sign": lambda x: turned(x, sign=1.0),
}


@each("turn", NO_ROTATION)
def test_cos_and_sin_that_do_not_rotate_are_a_reason(turn) -> None:
    def attend(q, k, v, mask):
        return right(NO_ROTATION[turn](q), NO_ROTATION[turn](k), v, mask)

    report = check(Attention(attend), (torch.randn(2, 12, 32),))
    (finding,) = (f for f in report.findings if f.rule == "unmeasured")
    assert finding.severity == "warn"
    assert finding.message.startswith("the scale could not be judged: q and k are not rotated (their norms change); ")
    assert "cat((angles, angles), -1) for halves" in finding.fix


def test_q_that_is_rotated_twice_is_a_reason() -> None:
    def attend(q, k, v, mask):
        return right(turned(turned(q)), turned(k), v, mask)

    report = check(Attention(attend), (torch.randn(2, 12, 32),))
    (finding,) = (f for f in report.findings if f.rule == "unmeasured")
    assert "q is rotated twice and k once: the two readings disagree" in finding.message
    assert finding.fix.endswith("once")
    both = check(Attention(lambda q, k, v, mask: right(turned(q), turned(k), v, mask)), (torch.randn(2, 12, 32),))
    assert [f for f in both.findings if f.rule == "unmeasured"] == []

"""`diff --backward`: gradients of two models, the cause of a difference, and the module where it enters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn

from sqrtdk.compare.backward.records import BackwardDiff, FirstModule
from sqrtdk.compare.diff import diff
from sqrtdk.compare.records import DiffReport
from sqrtdk.messages import Message, said
from sqrtdk.report.diff.html import to_html
from sqrtdk.report.diff.json import to_json
from sqrtdk.report.diff.terminal import to_text
from tests.hf.small import build, inputs_of, small_config
from tests.laws.backward_models import FAULTS, model
from tests.support.program import called

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "diff.schema.json").read_text())
WIDTH = 32


def compared(a: nn.Module, b: nn.Module, inputs: Any) -> BackwardDiff:
    report = diff(a, b, inputs, backward=True)
    jsonschema.validate(json.loads(to_json(report)), SCHEMA)
    assert report.backward is not None
    return report.backward


def code(text: str) -> str:
    assert isinstance(text, Message)
    return str((text.values["what"] if text.id.endswith(".at") else text).id.rpartition(".")[2])


NAMED = [name for name in FAULTS if not name.startswith(("rounded", "recomputed")) and "dropout" not in name]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMED)
def test_a_wrong_backward_pass_is_found_and_named(name: str) -> None:
    right, inputs = model(name, False)
    found = compared(right, model(name, True)[0], inputs)
    assert found.same is False
    assert {(one.side, one.site, code(one.text)) for one in found.faults} == {("b", "attn", FAULTS[name].code)}
    if FAULTS[name].operands[0] in "qkv":
        assert found.first_module == FirstModule("attn", "attn")
        wrong = {one.name for one in found.gradients if one.same is False and one.name != "parameter"}
        assert wrong == set(FAULTS[name].operands.split(", "))


class Attend(torch.autograd.Function):
    """Attention whose gradient of k lacks the scale."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = (q @ k.mT / 8**0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, w)
        return w @ v

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, w = ctx.saved_tensors
        by_weight = given @ v.mT
        z = w * (by_weight - (by_weight * w).sum(-1, keepdim=True))
        return z @ k / 8**0.5, z.mT @ q, w.mT @ given


def test_the_operand_whose_gradient_differs_first_is_blamed_alone() -> None:
    ids = torch.arange(12).view(2, 6)
    report = diff(Stack(), Stack("attend"), {"input_ids": ids}, backward=True)
    assert report.backward is not None
    assert {(fault.site, fault.side) for fault in report.backward.faults} == {("blocks.1", "b")}
    text = " ".join(report.paragraphs)
    assert "Gradients of k differ in blocks.1, by at most" in text
    assert "Gradients in blocks.0 differ as well: the backward pass comes there later." in text
    line = Attend.backward.__code__.co_firstlineno
    assert f"It is computed in Attend.backward (test_backward.py:{line})." in text


@pytest.mark.parametrize("name", ["scale_dk", pytest.param("sinks", marks=pytest.mark.full)])
def test_equal_backward_passes_agree(name: str) -> None:
    right, inputs = model(name, False)
    report = diff(right, model(name, False)[0], inputs, backward=True)
    assert report.backward is not None
    assert report.same is report.backward.same is True
    assert {one.name for one in report.backward.gradients} == {"q", "k", "v", "parameter"}


class Half(torch.autograd.Function):
    """x, with half of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:
        return given / 2


class Feed(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.up, self.down = fault, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = Half.apply(y) if self.fault == "feed" else y
        return self.down(y.relu())


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.norm, self.feed = nn.LayerNorm(WIDTH), Feed(fault)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        heads = Attend.apply(q, k, v) if self.fault == "attend" else (q @ k.mT * 8**-0.5).softmax(-1) @ v
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        y = self.norm(x)
        y = y.detach() if self.fault == "detached" else y
        return x + self.feed(y)


class Stack(nn.Module):
    """Three blocks; the middle one has the fault."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)
        self.blocks = nn.ModuleList(Block(fault if number == 1 else "") for number in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = {"input_ids": torch.arange(26).view(2, 13)}


def test_the_first_module_of_the_backward_pass_is_named() -> None:
    found = compared(Stack(), Stack("feed"), IDS)
    assert found.first_module == FirstModule("blocks.1.feed", "blocks.1.feed")
    wrong = {one.a for one in found.gradients if one.same is False}
    assert "blocks.1.feed.down.weight" not in wrong
    assert {"blocks.1.feed.up.weight", "blocks.0.qkv.weight", "embed.weight"} <= wrong
    assert not found.faults


def test_a_parameter_that_one_backward_pass_does_not_reach_is_listed() -> None:
    found = compared(Stack(), Stack("detached"), IDS)
    assert found.only_a == ("blocks.1.norm.weight", "blocks.1.norm.bias")
    assert found.only_b == ()
    assert compared(Stack("detached"), Stack(), IDS).only_b == found.only_a


def test_forward_passes_that_differ_are_mended_first() -> None:
    other = Stack()
    with torch.no_grad():
        other.blocks[1].feed.up.weight.mul_(1.5)
    report = diff(Stack(), other, IDS, backward=True)
    assert report.backward is not None
    assert report.backward.first_module is None
    assert "compare.backward.forward" in {getattr(text, "id", "") for text in report.paragraphs}


def test_a_side_without_a_gradient_is_not_judged() -> None:
    report = diff(Stack(), Stack().requires_grad_(False), IDS, backward=True)
    assert report.backward is not None
    assert report.same is None
    assert isinstance(report.backward.reason, Message)
    assert report.backward.reason.values["reason"].id == "compare.backward.no_gradient"


class Repeated(nn.Module):
    """An attention that repeats the heads of k and v before it reads them, side by side or all heads again, or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.q, self.kv = nn.Linear(WIDTH, 6 * 8), nn.Linear(WIDTH, 2 * 2 * 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (6, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        if self.how == "none":
            return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        k, v = (torch.cat([y[:, :1]] * 3 + [y[:, 1:]] * 3, 1) for y in (k, v))
        k, v = (Half.apply(y) if self.how == "half" else y for y in (k, v))
        return (q @ k.mT * 8**-0.5).softmax(-1) @ v


@pytest.mark.parametrize("how", ["copies", "half"])
def test_the_gradients_of_repeated_heads_are_summed(how: str) -> None:
    found = compared(Repeated("none"), Repeated(how), (torch.randn(2, 11, WIDTH),))
    same = {one.name: one.same for one in found.gradients if one.name != "parameter"}
    assert same == {"q": True, "k": True, "v": True}
    assert found.same is (how == "copies")  # what lies behind the repeated heads shows at their projection
    assert {one.a for one in found.gradients if one.same is False} <= {"kv.weight", "kv.bias"}


class SharedKeys(nn.Module):
    """Two layers that share k and v, and repeat their heads or not."""

    def __init__(self, repeat: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.repeat, self.q = repeat, nn.ModuleList(nn.Linear(WIDTH, 4 * 8) for _ in range(2))
        self.kv, self.out = nn.Linear(WIDTH, 2 * 2 * 8), nn.ModuleList(nn.Linear(4 * 8, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        for q_proj, out in zip(self.q, self.out, strict=True):
            q = q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
            if self.repeat:
                y = (q @ k.repeat_interleave(2, 1).mT * 8**-0.5).softmax(-1) @ v.repeat_interleave(2, 1)
            else:
                y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            x = x + out(y.transpose(1, 2).flatten(2))
        return x


def test_the_gradient_of_k_is_that_of_its_own_attention() -> None:
    found = compared(SharedKeys(True), SharedKeys(False), (torch.randn(2, 11, WIDTH),))
    assert found.same is True, [one for one in found.gradients if one.same is not True]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bert"])
def test_eager_and_sdpa_of_transformers_agree(kind: str, dtype: torch.dtype) -> None:
    sides = [build(small_config(kind), attn, dtype) for attn in ("eager", "sdpa")]
    sides[1].load_state_dict(sides[0].state_dict())
    found = compared(*sides, inputs_of(sides[0]))
    assert found.same is True, [one for one in found.gradients if one.same is not True]


def test_reports_say_it_in_both_languages() -> None:
    report: DiffReport = diff(Stack(), Stack("feed"), IDS, backward=True)
    assert "gradients differ first in `blocks.1.feed`" in " ".join(to_text(report, width=200).split())
    assert "梯度最先在" in to_text(report, width=200, language="zh")
    page = to_html(report)
    assert '<section id="gradients">' in page
    assert "blocks.1.feed.up.weight" in page
    assert [said(text, "zh") for text in report.paragraphs] != [*report.paragraphs]


def test_the_page_counts_a_wrong_backward_pass_among_the_causes() -> None:
    right, inputs = model("scale_dk", False)
    pages = [to_html(diff(right, model("scale_dk", wrong)[0], inputs, backward=True)) for wrong in (False, True)]
    counts = [re.findall(r'class="big">(\d+)</p>', page)[1] for page in pages]  # pairs, causes, what has no partner
    assert counts == ["0", "1"]


def test_the_command_compares_gradients() -> None:
    done = called("diff", "demo", "demo", "--backward", "--json", "--seq-len", "12")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backward"]["same"] is True


@pytest.mark.full
def test_a_side_that_only_answers_has_no_gradients() -> None:
    done = called("diff", "demo", "http://localhost:1", "--backward")
    assert done.returncode == 2
    assert "--backward" in done.stderr
    assert "only answers" in done.stderr


@pytest.mark.full
def test_the_command_ends_with_1_where_a_gradient_differs(tmp_path: Path) -> None:
    (tmp_path / "sides.py").write_text(
        "from tests.compare.test_backward import IDS, Stack\n"
        "right = lambda: (Stack(), IDS)\n"
        "wrong = lambda: (Stack('feed'), IDS)\n"
    )
    done = called("diff", "sides:right", "sides:wrong", "--backward", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "gradients differ first in `blocks.1.feed`" in " ".join(done.stdout.split())
    assert called("diff", "sides:right", "sides:wrong", cwd=tmp_path).returncode == 0

"""What a watch says of NaN that a mask, a product or the loss makes, of a layer unlike others, of lost records.

The advice is that of `sqrtdk watch show`: it may name a lower learning rate only where training was at work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sqrtdk
from sqrtdk.messages import Message, joined, mentions
from sqrtdk.monitor.reading import read_run
from sqrtdk.monitor.samples import Alarm
from sqrtdk.report.watch.fix import root_alarms
from sqrtdk.report.watch.headline import Headline, run_headline
from sqrtdk.report.watch.html import shown_alarms
from sqrtdk.report.watch.summary import Summary, summarise

LENGTH, WIDTH = 12, 16
INF = float("inf")
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
UNSEEN = CAUSAL & (torch.arange(LENGTH) >= 3)  # rows 0 to 2 see no key, as behind three tokens of left padding


class Eager(nn.Module):
    """Softmax attention written out; `logits` makes them of q and k."""

    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.logits = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), logits

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out((self.logits(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Multi(nn.Module):
    """torch's own module, whose first sample is padding throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0] = True
        return self.inner(x, x, x, key_padding_mask=padding, need_weights=True)[0]


class Net(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], last: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.h, self.norm = nn.ModuleList(attention() for _ in range(3)), nn.LayerNorm(WIDTH)
        self.head, self.last = nn.Linear(WIDTH, 20), last

    def forward(self, x: Tensor) -> Tensor:
        for attention in self.h:
            x = x + attention(self.norm(x))
        return self.last(self.head(x))


def plain(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / 8**0.5).masked_fill(~CAUSAL, -INF)


def finite_loss(y: Tensor) -> Tensor:
    return y.square().mean()


def run_of(net: nn.Module, folder: Path, steps: int = 1, loss: Callable[[Tensor], Tensor] = finite_loss) -> Summary:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with sqrtdk.watch(net, every=1, to=folder, on_alarm=lambda _: None) as watch:
        for _ in range(steps):
            value = loss(net(torch.randn(2, LENGTH, WIDTH)))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(value)
    return summarise(read_run(folder))


def headline_of(run: Summary) -> Headline:
    head = run_headline(run)
    assert head.wrong
    assert run.exit_code("fail") == 1
    return head


def unlearned(head: Headline) -> bool:
    return not any(word in head.fix for word in ("learning rate", "clip_grad_norm_", "qk_clip_"))


@pytest.mark.parametrize(
    "attention",
    [
        lambda: Eager(lambda q, k: (q @ k.mT / 8**0.5).masked_fill(~UNSEEN, -INF)),
        lambda: Eager(lambda q, k: q @ k.mT / 8**0.5 + torch.zeros(LENGTH, LENGTH).masked_fill(~UNSEEN, -INF)),
        Multi,
    ],
    ids=["filled", "added", "padding"],
)
def test_rows_without_a_key_are_named_at_the_first_module_with_the_fix_of_check(
    attention: Callable[[], nn.Module], tmp_path: Path
) -> None:
    head = headline_of(run_of(Net(attention), tmp_path))
    site = "h.0.inner" if attention is Multi else "h.0"
    assert "rows of " + site + " see no key" in head.text.en
    fix = Message("rules.nonfinite.fix_blind")
    assert head.fix == joined([fix, Message("runs.fix.check_batch", step=1)])
    assert unlearned(head)
    net = Net(attention).train()
    with torch.no_grad():
        fixes = {str(finding.fix) for finding in sqrtdk.check(net, torch.randn(2, LENGTH, WIDTH)).findings}
    assert attention is Multi or fix in fixes, "check says the same"


def test_rows_without_a_key_are_no_cause_where_a_kernel_gives_zero_for_them(tmp_path: Path) -> None:
    """The fused kernel gives 0; NaN of the head behind it has another cause."""

    class Fused(Eager):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=UNSEEN)
            return self.out(y.transpose(1, 2).flatten(2))

    run = run_of(Net(lambda: Fused(plain), last=lambda y: (y - y) / (y - y)), tmp_path)
    head = headline_of(run)
    assert "see no key" not in head.text.en
    assert unlearned(head)


def test_rows_without_a_key_that_the_code_mends_are_not_said_to_be_nan(tmp_path: Path) -> None:
    """Such rows are 0, and something else divides by 0 behind them: what is said of them stays true."""

    class Mended(Eager):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT).masked_fill(~UNSEEN, -INF).softmax(-1).masked_fill(~UNSEEN, 0.0)
            y = (weights @ v).transpose(1, 2).flatten(2)
            return self.out(y / (y - y))

    head = headline_of(run_of(Net(lambda: Mended(plain)), tmp_path))
    assert "their softmax is NaN" not in head.text.en
    assert "rows of h.0 see no key, where a softmax gives NaN; the first output that is not finite is" in head.text.en
    assert mentions(head.fix, "runs.fix.check_batch")


@pytest.mark.parametrize(
    ("logits", "fix"),
    [
        (lambda q, k: q @ k.mT + (1.0 - CAUSAL.float()) * -INF, "runs.fix.check_batch"),
        (lambda q, k: ((300 * q).half() @ (300 * k).half().mT).float(), "runs.fix.product_float16"),
        (lambda q, k: (q @ k.mT).masked_fill(~CAUSAL, -INF) * torch.eye(LENGTH), "runs.fix.check_batch"),
    ],
    ids=["mask times infinity", "product of float16", "zero times infinity"],
)
def test_masks_and_products_are_no_matter_of_the_learning_rate(
    logits: Callable[[Tensor, Tensor], Tensor], fix: str, tmp_path: Path
) -> None:
    for steps in (1, 3):
        head = headline_of(run_of(Net(lambda: Eager(logits)), tmp_path / str(steps), steps))
        assert mentions(head.fix, fix)
        assert unlearned(head)
        assert "sqrtdk.check(model, batch)" in head.fix


@pytest.mark.parametrize(
    ("last", "loss", "fix"),
    [
        (lambda y: (1e3 * y).softmax(-1).log(), lambda y: -y.mean(), "runs.fix.returned_minus"),
        (lambda y: y, lambda y: y.square().mean() * INF, "runs.fix.loss"),
        (lambda y: y, lambda y: (y - y).norm() / 0.0, "runs.fix.loss"),
    ],
    ids=["log of zero", "loss times infinity", "loss over zero"],
)
def test_a_loss_that_makes_it_is_looked_at(
    last: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor], fix: str, tmp_path: Path
) -> None:
    head = headline_of(run_of(Net(lambda: Eager(plain), last), tmp_path, loss=loss))
    assert mentions(head.fix, fix)
    assert unlearned(head)


def test_a_backward_pass_that_makes_it_is_run_with_anomaly_detection(tmp_path: Path) -> None:
    def logits(q: Tensor, k: Tensor) -> Tensor:
        return plain(q, k) + (q - q).square().sum(-1, keepdim=True).sqrt()  # the root has no gradient at 0

    head = headline_of(run_of(Net(lambda: Eager(logits)), tmp_path))
    assert mentions(head.fix, "runs.fix.backward")
    assert unlearned(head)


@pytest.mark.parametrize(
    ("id", "values", "trained"),
    [
        ("alarms.nonfinite.where.attentions", {}, False),
        ("alarms.nonfinite.where.nothing", {}, False),
        ("alarms.nonfinite.blame.unknown", {}, False),
        ("alarms.nonfinite.first.from_minus", {}, False),
        ("alarms.nonfinite.first.unknown", {}, False),
        ("alarms.nonfinite.first.between", {"module": "h.0"}, False),
        ("alarms.nonfinite.first.weight", {"weight": "parameter bias"}, True),
    ],
)
def test_only_a_weight_that_is_not_finite_is_a_matter_of_the_learning_rate(
    id: str, values: dict[str, str], trained: bool, tmp_path: Path
) -> None:
    run = run_of(Net(lambda: Eager(plain)), tmp_path, 3)
    text = Message("alarms.nonfinite.loss", loss="nan", step=3, where=Message(id, **values))
    head = headline_of(dataclasses.replace(run, alarms=[Alarm("nonfinite", "critical", 3, text, "")]))
    assert unlearned(head) != trained
    assert ("sqrtdk.check(model, batch)" in head.fix) != trained


# -- a layer that was made unlike its neighbours -----------------------------------------------------------------------


def test_a_layer_whose_logits_are_a_hundred_times_its_neighbours_is_a_sentence(tmp_path: Path) -> None:
    net = Net(lambda: Eager(plain))
    with torch.no_grad():
        for attention in net.h:
            assert isinstance(attention, Eager)
            attention.qkv.weight.normal_(std=0.5 if attention is net.h[1] else 0.02)
    run = run_of(net, tmp_path, steps=3)
    (alarm,) = (one for one in run.alarms if one.name == "layer_logits")
    assert (alarm.site, alarm.step, alarm.severity) == ("h.1", 1, "warn")
    assert alarm.value is not None
    assert 100 < alarm.value < 5000
    head = run_headline(run)
    assert head.text.en.startswith("The logits of h.1 are ")
    assert mentions(head.fix, "runs.fix.layer_logits")
    assert root_alarms(run) == (alarm,)
    assert shown_alarms(run)[0][1][0][1] is alarm


def test_layers_that_were_made_alike_are_none(tmp_path: Path) -> None:
    run = run_of(Net(lambda: Eager(plain)), tmp_path, steps=2)
    assert [one.name for one in run.alarms if one.name == "layer_logits"] == []


# -- records that are lost ---------------------------------------------------------------------------------------------


def test_a_run_with_a_lost_part_is_not_said_to_be_fine(tmp_path: Path) -> None:
    net = Net(lambda: Eager(plain))
    assert not run_headline(run_of(net, tmp_path, steps=2)).wrong
    next(iter(sorted((tmp_path / "parts").iterdir()))).unlink()
    run = summarise(read_run(tmp_path))
    head = run_headline(run)
    assert head.wrong
    assert head.text.en.startswith(
        "Parts of the records that are lost: 1, first part attempt-1.part-000000-000000 can't be"
    )
    assert [run.exit_code(bar) for bar in ("note", "fail", "critical", "never")] == [1, 1, 1, 0]

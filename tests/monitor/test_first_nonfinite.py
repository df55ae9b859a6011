"""Where numbers that are not finite begin in a watched step: planted in models, found by the module and the cause."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sqrtdk._language import Language
from sqrtdk.messages import Message, said
from sqrtdk.monitor import first_nonfinite as law
from sqrtdk.monitor.samples import Alarm
from sqrtdk.monitor.watch import Watch
from tests.monitor.nonfinite_models import (
    BRAIN,
    HALF,
    SINGLE,
    Decoder,
    Hurt,
    LogNorm,
    Summed,
    filled,
    first_of,
    ones,
    squares,
    watched,
)
from tests.monitor.watched_models import Attend, gpt2


def normed(model: Decoder) -> None:
    model.blocks[1].between = LogNorm()
    filled(("blocks.1.attention.out.weight", 0.0), ("blocks.1.attention.out.bias", 0.0))(model)
    filled(("blocks.0.mlp.2.weight", 0.0), ("blocks.0.mlp.2.bias", 0.0))(model)
    filled(("blocks.0.attention.out.weight", 0.0), ("blocks.0.attention.out.bias", 0.0))(model)


MLP = "blocks.0.mlp.2"
PLANTED: dict[str, tuple[Hurt, torch.dtype, float, tuple[str, str, str]]] = {
    "overflow": (filled((f"{MLP}.weight", 6e4)), HALF, 1.0, (MLP, law.FROM_FINITE, "")),
    "overflow in bfloat16": (filled((f"{MLP}.weight", 3e38)), BRAIN, 1.0, (MLP, law.FROM_FINITE, "")),
    "logarithm of 0": (normed, SINGLE, 0.0, ("blocks.1.between", law.FROM_FINITE, "")),
    "weight": (
        filled(("blocks.1.mlp.0.bias", math.nan)),
        SINGLE,
        1.0,
        ("blocks.1.mlp.0", law.CAUSE_WEIGHT, "parameter bias"),
    ),
    "weight of q": (
        filled(("blocks.1.attention.qkv.weight", math.inf)),
        BRAIN,
        1.0,
        ("blocks.1.attention.qkv", law.CAUSE_WEIGHT, "parameter weight"),
    ),
    "sum in a block": (
        filled(("blocks.0.attention.out.bias", 5e4)),
        HALF,
        4e4,
        ("blocks.0.between", law.CAUSE_BETWEEN, "blocks.0.attention"),
    ),
    "sum at its end": (
        filled((f"{MLP}.bias", 5e4), ("blocks.0.attention.out.bias", 4e4)),
        HALF,
        1.0,
        ("blocks.0", law.CAUSE_WITHIN, "blocks.0.mlp"),
    ),
    "inputs": (lambda model: None, SINGLE, math.nan, ("blocks.0.before", law.CAUSE_INPUTS, "")),
}


@pytest.mark.parametrize("case", PLANTED)
def test_the_module_and_the_cause_are_named(case: str) -> None:
    hurt, dtype, fill, expected = PLANTED[case]
    model = Decoder()
    hurt(model)
    assert first_of(model.to(dtype), ones(fill).to(dtype)) == expected


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_shows_what_an_alarm_says(language: Language) -> None:
    page = (Path(__file__).parents[2] / "docs" / language / "numbers.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shown = " ".join(shown.split())
    where = re.split("; |；", shown, maxsplit=1)[1]
    assert shown == Message("alarms.nonfinite.loss", loss="nan", step=300, where=where).said(language)
    model = Decoder()
    PLANTED["overflow"][0](model)
    assert said(watched(model.half(), ones().half())[1], language).endswith(where)


def test_a_sum_between_blocks_lies_between_their_modules() -> None:
    model = Summed()
    filled(("blocks.0.mlp.2.bias", 5e4))(model)
    assert first_of(model.half(), ones(4e4).half()) == ("blocks.1.before", law.CAUSE_BETWEEN, "blocks.0.mlp")


def test_health_is_silent_and_a_loss_of_its_own_is_said() -> None:
    sample, text = watched(Decoder(), ones())
    assert (sample.first, text, sample.modules) == (None, "", 22)
    sample, text = watched(Decoder(), ones(), loss=lambda y: squares(y) / 0.0)
    assert sample.first is None
    assert text.startswith("the loss is inf at step 1; the outputs of all 22 modules and q, k and logits of every")
    assert text.endswith("are finite, the loss is the first tensor that is not")
    assert said(text, "zh") != text


class Classes(nn.Module):
    """Rules classes out, by a module of its own or in the model's forward; `Softmax` may meet rows of nothing else."""

    def __init__(self, softmax: bool = False) -> None:
        super().__init__()
        self.attend, self.softmax = Attend(), nn.Softmax(-1) if softmax else None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.attend(x).flatten(2).masked_fill(torch.arange(12) < (12 if self.softmax else 6), -math.inf)
        return logits if self.softmax is None else self.softmax(logits)


def test_a_loss_of_an_unsampled_step_is_said_once_and_the_next_sample_says_where() -> None:
    model = Decoder()
    told: list[Alarm] = []
    with Watch(model, every=4, on_alarm=told.append) as health:
        for step in range(1, 9):
            if step == 3:
                model.blocks[1].attention.out.weight.data.fill_(math.nan)
            with torch.no_grad():
                health.step(squares(model(ones())))
    found = [alarm for alarm in told if alarm.name == "nonfinite"]
    assert [(alarm.severity, alarm.step) for alarm in found] == [("fail", 3), ("critical", 4)]
    assert "blocks.1.attention.out" in found[1].text


def test_minus_infinity_is_let_pass_and_named_where_it_matters() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8)
    _, text = watched(Classes(), x, loss=lambda y: y[..., 6:].square().sum())
    assert text == ""
    _, text = watched(Classes(), x, loss=lambda y: F.cross_entropy(y.flatten(0, 1), torch.tensor([0, 8])))
    assert "no output of 3 modules holds NaN or plus infinity, what the model returns holds minus infinity" in text
    assert "infinity" not in said(text, "zh")
    assert first_of(Classes(softmax=True), x) == ("softmax", law.FROM_MINUS, "")


def test_the_first_of_several_passes() -> None:
    sample, text = watched(Decoder(), ones(), ones(math.inf), ones(math.nan))
    assert sample.first is not None
    assert sample.first.order[0] == 1
    assert "blocks.0.before" in text


class Later(nn.Module):
    """Gives NaN from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1.0 if self.calls == 1 else math.nan)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_backward_pass_computes_again_does_not_count(reentrant: bool) -> None:
    model = Decoder()
    model.blocks[1].again = reentrant
    model.blocks[1].mlp = later = Later()
    sample, _ = watched(model, ones())
    assert (later.calls, sample.first, sample.modules) == (2, None, 20)
    model = Decoder()
    model.blocks[1].again = reentrant
    filled(("blocks.1.mlp.0.bias", math.nan))(model)
    assert first_of(model, ones()) == ("blocks.1.mlp.0", law.CAUSE_WEIGHT, "parameter bias")


def test_a_compiled_model() -> None:
    model = Decoder()
    filled(("blocks.1.mlp.0.bias", math.nan))(model)
    compiled = torch.compile(model, backend="eager")
    assert first_of(compiled, ones()) == ("blocks.1.mlp.0", law.CAUSE_WEIGHT, "parameter bias")


def test_a_model_that_computes_its_own_loss() -> None:
    ids = torch.arange(12).reshape(2, 6)
    model = gpt2()
    assert watched(model, ids, loss=lambda out: out.loss, called=_Labelled(model, ids))[1] == ""
    nothing = _Labelled(model, torch.full_like(ids, -100))  # a mean over no token
    sample, text = watched(model, ids, loss=lambda out: out.loss, called=nothing)
    assert (sample.first and sample.first.tensor) == "loss"
    assert "first output that is not finite is loss of the model (GPT2LMHeadModel); what the modules within it" in text
    assert "lm_head is the last of them" in text
    nn.init.constant_(model.transformer.h[1].mlp.c_fc.bias, 100.0)
    nn.init.constant_(model.transformer.h[1].mlp.c_proj.weight, 3e38)
    found = first_of(model, ids, loss=lambda out: out.loss, called=_Labelled(model, ids))
    assert found == ("transformer.h.1.mlp.c_proj", law.FROM_FINITE, "")


class _Labelled(nn.Module):
    """Hands labels on; it is not watched itself."""

    def __init__(self, model: transformers.PreTrainedModel, labels: Tensor) -> None:
        super().__init__()
        self.model, self.labels = model, labels

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids, labels=self.labels)


class ByHand(Attend):
    """The logits overflow float16, and q and k do not."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (100.0 * y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out((q @ k.mT).softmax(-1) @ v)


def test_what_comes_after_an_attention_is_not_its_beginning() -> None:
    torch.manual_seed(0)
    sample, text = watched(ByHand().half(), 10.0 * torch.randn(1, 3, 8).half())
    assert sample.first is not None
    assert sample.first.site == "out"
    assert "q and k are finite, the logits, in float16, are the first tensor that is not" in text
    assert "first output" not in text


class Cleaned(nn.Module):
    """Takes NaN for missing values."""

    def __init__(self) -> None:
        super().__init__()
        self.logs, self.attend = LogNorm(), Attend()

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.logs(x).nan_to_num())


def test_what_the_model_takes_away_is_said_to_be_away() -> None:
    _, text = watched(Cleaned(), torch.zeros(1, 3, 8), loss=lambda y: squares(y) * math.nan)
    assert "is that of logs (LogNorm); what goes into it is finite; what the model returns is finite all" in text


@dataclass
class Parts:
    kept: Tensor
    more: dict[str, Any]


class Odd(nn.Module):
    """Takes keywords, and returns structures."""

    def forward(self, *, x: Tensor) -> Parts:
        return Parts(x.detach(), {"ids": torch.arange(3), "logs": [x.abs(), x.log(), None]})


class Odds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.odd = Attend(), Odd()

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(x=self.attend(x)).more["logs"][1]


def test_structures_and_keywords() -> None:
    sample, text = watched(Odds(), torch.randn(1, 3, 8))
    assert sample.first is not None
    assert (sample.first.site, sample.first.cause, sample.first.tensor) == ("odd", law.CAUSE_UNKNOWN, "more.logs.1")
    assert "is more.logs.1 of odd (Odd); whether what goes into it is finite is not known" in text
    assert "finite" not in said(text, "zh")


class Experts(nn.Module):
    """Owns what its operations multiply, and calls an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Parameter(torch.randn(8, 8)), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x @ self.up)


def test_a_parameter_of_a_module_around() -> None:
    model = Decoder()
    model.blocks[1].mlp = Experts()
    nn.init.constant_(model.blocks[1].mlp.up, math.nan)
    assert first_of(model, ones()) == ("blocks.1.mlp.act", law.CAUSE_WEIGHT_AROUND, "parameter blocks.1.mlp.up")


def test_a_buffer() -> None:
    model = Decoder()
    model.blocks[1].mlp = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8).eval(), nn.Unflatten(0, (2, 5)))
    nn.init.constant_(model.blocks[1].mlp[1].running_var, math.nan)
    assert first_of(model, ones()) == ("blocks.1.mlp.1", law.CAUSE_WEIGHT, "buffer running_var")


class InPlace(nn.Module):
    """Writes NaN into what it was called with, which was finite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(math.nan)


def test_what_is_written_over_was_finite_before() -> None:
    model = Decoder()
    model.blocks[1].mlp[2] = nn.Sequential(nn.Linear(16, 8), InPlace())
    assert first_of(model, ones()) == ("blocks.1.mlp.2.1", law.FROM_FINITE, "")


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


class Tried(nn.Module):
    """A module that raises, and one that is called for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.failing, self.each, self.last = Attend(), Failing(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.failing(x)
        except ValueError:
            x = torch.vmap(self.each)(self.attend(x).flatten(0, 2))
        return self.last(x)


def test_a_module_that_raises_and_one_that_runs_within_vmap() -> None:
    model = Tried()
    assert watched(model, torch.randn(1, 3, 8))[0].modules == 4  # the model, attend, qkv and last
    nn.init.constant_(model.each.bias, math.nan)
    assert first_of(model, torch.randn(1, 3, 8)) == ("last", law.CAUSE_BETWEEN, "each")


class Operations(TorchDispatchMode):
    """Those that the caller's own mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_mode_of_the_caller_sees_what_is_looked_at() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(3, 8)
    with Operations() as plain:
        model(x)
    with Watch(model, every=1, on_alarm=lambda alarm: None) as health:
        with Operations() as seen:
            model(x)
        health.step()
    assert not any("aminmax" in name for name in seen.names)
    named = [[name for name in names if "detach" not in name] for names in (plain.names, seen.names)]
    assert named[0] == named[1]  # the trace detaches
    assert health.samples[0].modules == 3

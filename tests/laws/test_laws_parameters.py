"""Law `parameters`: a sink that does not arrive, or is added to every logit, is found; what has a part is let pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk import check
from sqrtdk.audit.records import LawAnswer
from sqrtdk.laws import ask as ask_laws
from tests.hf.small import build, inputs_of, needs, small_config

HEADS, WIDTH = 4, 32
Weigh = Callable[[nn.Module, Tensor], Tensor]


class Attention(nn.Module):
    """Self-attention whose module holds parameters of its own, and makes weights of logits as it is told."""

    def __init__(self, weigh: Weigh, **held: Tensor) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.weigh = weigh
        for name, value in held.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = self.weigh(self, q @ k.mT * q.shape[-1] ** -0.5)
        result: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return result


def plain(m: nn.Module, z: Tensor) -> Tensor:
    return z.softmax(-1)


def of_heads(m: Any, z: Tensor) -> Tensor:
    column: Tensor = m.sinks.view(1, -1, 1, 1)
    return column


def added(m: nn.Module, z: Tensor) -> Tensor:
    return (z + of_heads(m, z)).softmax(-1)


def computed_and_dropped(m: nn.Module, z: Tensor) -> Tensor:
    of_heads(m, z)
    return z.softmax(-1)


def appended(m: nn.Module, z: Tensor) -> Tensor:
    return torch.cat((z, of_heads(m, z).expand(*z.shape[:3], 1)), -1).softmax(-1)[..., :-1]


def multiplied(m: nn.Module, z: Tensor) -> Tensor:
    return (z * of_heads(m, z)).softmax(-1)


def sinks() -> Tensor:
    return torch.tensor([1.0, 0.5, 2.0, -0.5])


def answers(model: nn.Module, inputs: Any = None) -> list[LawAnswer]:
    inputs = torch.randn(2, 9, WIDTH) if inputs is None else inputs
    return [answer for answer in check(model.eval(), inputs, laws="parameters").laws if answer.law == "parameters"]


@pytest.mark.parametrize(
    ("weigh", "why"),
    [
        (plain, "nothing reads it"),
        (computed_and_dropped, "its numbers do not reach the output"),
        (added, "a bias that is one number a head does nothing"),
    ],
)
def test_a_sink_without_a_part_is_found(weigh: Weigh, why: str) -> None:
    model = Attention(weigh, sinks=sinks())
    (answer,) = answers(model)
    assert answer.finding is not None
    assert answer.finding.severity == "warn"
    assert answer.reason == f"parameter sinks has no part in the attention: {why}"
    assert torch.equal(model.sinks.detach(), sinks())


@pytest.mark.parametrize("weigh", [appended, multiplied])
def test_a_sink_or_a_gain_with_a_part_is_let_pass(weigh: Weigh) -> None:
    (answer,) = answers(Attention(weigh, sinks=sinks()))
    assert (answer.state, answer.about) == ("kept", "sinks")


def test_layers_of_one_class_that_differ_in_a_model() -> None:
    """The first of each class and set of parameters is asked: the second class is the wrong one."""

    class Second(Attention):
        """Another class."""

    model = nn.Sequential(Attention(appended, sinks=sinks()), Second(added, sinks=sinks()))
    told = [(answer.state, answer.site) for answer in answers(model)]
    assert told == [("broken", "1")]


def test_biases_of_projections_are_no_matter() -> None:
    """A bias of k adds q . b to a row: it moves nothing, by the same formula, and nobody means it to."""
    assert [answer.state for answer in answers(Attention(plain))] == ["not asked"]
    torch_own = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
    assert [answer.state for answer in answers(torch_own)] == ["not asked"]


def test_an_output_that_is_zero_tells_nothing() -> None:
    model = Attention(plain, sinks=sinks())
    for parameter in model.o.parameters():
        parameter.data.zero_()
    assert [answer.state for answer in answers(model)] == ["not asked"]


def computed_once(m: Any, z: Tensor) -> Tensor:
    m.kept = {"cpu": of_heads(m, z) * torch.arange(z.shape[-1])} if not hasattr(m, "kept") else m.kept
    return (z + m.kept["cpu"]).softmax(-1)


def test_a_bias_that_was_computed_once_and_kept_is_not_asked() -> None:
    """LeViT reads its biases in the first forward alone."""
    assert [answer.state for answer in answers(Attention(computed_once, sinks=sinks()))] == ["not asked"]


def test_a_parameter_that_is_shared_is_as_it_was_and_outputs_too() -> None:
    first, second = Attention(added, sinks=sinks()), Attention(appended, sinks=sinks())
    second.sinks = first.sinks
    model, x = nn.Sequential(first, second).eval(), torch.randn(1, 9, WIDTH)
    before, version = model(x), first.sinks._version
    answers(model, x)
    assert torch.equal(model(x), before)
    assert first.sinks._version == version


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["gpt_oss", "swinv2", "llama", "openai_privacy_filter", "beit", "levit"])
def test_released_architectures_keep_it(model_type: str) -> None:
    needs(model_type)
    model = build(small_config(model_type), "eager", torch.float32)
    assert "broken" not in {answer.state for answer in answers(model, inputs_of(model))}


class Gated(nn.Module):
    """A self-attention whose output gate is used, computed and dropped, or not called."""

    def __init__(self, gate: str, name: str = "g_proj", part: nn.Module | None = None) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.name = gate, name
        self.add_module(name, nn.Linear(WIDTH, WIDTH) if part is None else part)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        gate = None if self.gate == "not called" else getattr(self, self.name)(x)
        if self.gate == "used":
            y = y * gate.sigmoid()
        if self.gate == "chooses":
            y = y[:, gate]
        result: Tensor = self.o_proj(y)
        return result


class Layers(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Gated(*args)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["attn"](x)  # type: ignore[index]
        return x


class Indexer(nn.Linear):
    """Picks the rows to keep: no gradient reaches its weights, and it has a part."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum((0, 2)).argsort()


@pytest.mark.parametrize(
    ("gate", "part", "found"),
    [
        ("used", None, False),
        ("computed", None, True),
        ("not called", None, True),
        ("chooses", Indexer(WIDTH, WIDTH), False),
        ("not called", nn.ModuleDict({"de": nn.Linear(4, 4), "fr": nn.Linear(4, 4)}), False),  # one for each language
        ("not called", nn.Sequential(nn.Linear(4, 4)), False),  # a compressor, where the inputs are short
        ("not called", nn.Dropout(), False),
    ],
)
def test_a_submodule_whose_result_is_not_used_is_found(gate: str, part: nn.Module | None, found: bool) -> None:
    model = Layers(gate, "g_proj", part)
    model.layers[0]["attn"].q_proj.weight.requires_grad_(False)  # type: ignore[index,union-attr]
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    report = check(model, torch.randn(2, 9, WIDTH), laws="parameters")
    told = [(f.severity, f.site) for f in report.findings if f.rule == "law_parameters"]
    assert told == ([("warn", "layers.0.attn")] if found else [])
    assert not found or "submodule g_proj has no part" in report.findings[0].message
    assert torch.is_grad_enabled()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0])
        assert (p.requires_grad, p.grad) == (before[name][1], None)


def test_a_part_whose_numbers_leave_by_an_attribute_is_not_idle() -> None:
    """The output of the module does not depend on the router, but the output of the model does."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o, self.router = (nn.Linear(16, 16) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
            self.balance = self.router(x).mean()
            heads = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            out: Tensor = self.o(heads.transpose(1, 2).flatten(2))
            return out

    class Model(nn.Module):
        def __init__(self, returns: bool) -> None:
            super().__init__()
            self.attend, self.returns = Attend(), returns

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x + self.attend(x)
            return (y, self.attend.balance) if self.returns else (y,)

    torch.manual_seed(0)
    x = torch.randn(2, 9, 16)
    assert not ask_laws(Model(True).eval(), (x,), "parameters").findings
    assert len(ask_laws(Model(False).eval(), (x,), "parameters").findings) == 1

"""`diff` on real modules: what it says of them, and that it leaves them as they were."""

from __future__ import annotations

import copy
import inspect
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM

import sqrtdk
from sqrtdk.compare.diff import diff, sides_diff
from sqrtdk.compare.records import DiffReport
from sqrtdk.compare.sides import load_side, run_side
from sqrtdk.messages import word
from sqrtdk.models.options import LoadOptions
from tests.compare.chinese import paragraphs as chinese
from tests.compare.ports.built import build, inputs


class Stack(nn.Module):
    """Attentions one after the other, with what stands between them."""

    def __init__(self, *, scales: tuple[float, ...] = (), between: float = 1.0) -> None:
        super().__init__()
        layers, width = 3, 16
        draw = torch.Generator().manual_seed(0)
        self.heads, self.scales = 2, scales or (8**-0.5,) * layers
        self.between = between
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        for layer in self.qkv:
            with torch.no_grad():
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=draw) * width**-0.5 * 2)
                layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.qkv, self.scales, strict=True):
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            x = x + ((q @ k.mT * scale).softmax(-1) @ v).transpose(1, 2).flatten(-2) * self.between
        return x


X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
RIGHT = 8**-0.5


def said(report: DiffReport) -> list[tuple[bool | None, list[str], str | None]]:
    return [(pair.same, [cause.name for cause in pair.causes], pair.follows_from) for pair in report.pairs]


def test_a_model_is_the_same_as_its_copy() -> None:
    report = diff(Stack(), Stack(), X)
    assert report.same is True
    assert report.exit_code == 0
    assert said(report) == [(True, [], None)] * 3


class WithRelu(nn.Module):
    """An attention, and relu(q . k) v, which has no softmax to be read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.known, self.relu = Stack(), nn.Module()
        self.relu.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.relu.qkv(x).chunk(3, -1))
        return self.known(x) + ((q @ k.mT).relu() @ v).transpose(1, 2).flatten(-2)


def test_what_neither_side_lets_be_read_is_not_judged_and_no_difference() -> None:
    report = diff(WithRelu(), WithRelu(), X)
    assert report.same is None
    assert (report.exit_code, report.unpaired_a, report.unpaired_b) == (0, (), ())
    *known, unread = report.pairs
    assert [pair.same for pair in known] == [True] * 3
    assert unread.reason is not None
    assert unread.reason.startswith("neither could be read: ReLU attention")
    assert "1 of 4 attentions could not be compared" in report.paragraphs[0]
    assert diff(WithRelu(), WithRelu(), X, fail_on="unmeasured").exit_code == 1


@pytest.mark.full
def test_a_stage_that_differs_by_a_number_is_off_by_more_than_rounding() -> None:
    stages = [stage for pair in diff("demo", "demo:unscaled", seq_len=16).pairs for stage in pair.stages]
    values = [stage for stage in stages if stage.stage == "value" and stage.same is False]
    assert len(values) == 3  # the training gave v other weights as well
    assert [stage for stage in values if not (stage.largest or 0) > (stage.allowed or 0)] == []


_OF_A = "does not apply the scale that A declares, config.attention_multiplier = "
_OF_B = "applies its declared scale, config.attention_multiplier = "
DECLARED = (
    (1 / 16, 1 / 4, f"{_OF_A}0.0625", f"{_OF_B}0.0625"),
    (1.0, 1 / 4, f"{_OF_A}1", f"{_OF_B}1"),
    (1 / 16, 1 / 256, "applies the scale twice", "applies once the scale that A applies twice"),
)


@pytest.mark.parametrize(("scale", "ported", "to_port", "from_port"), DECLARED)
def test_a_declared_scale_is_no_mistake(scale: float, ported: float, to_port: str, from_port: str) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    config = GraniteConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, attention_multiplier=scale)
    granite = GraniteForCausalLM(config).eval()
    port = copy.deepcopy(granite)
    port.model.layers[0].self_attn.scaling = ported
    ids = {"input_ids": torch.arange(12).reshape(2, 6)}
    (pair,) = diff(granite, port, ids).pairs
    assert [cause.text for cause in pair.causes] == [f"{to_port} ({ported:.4g} in place of {scale:.4g})"]
    (pair,) = diff(port, granite, ids).pairs
    assert [cause.text for cause in pair.causes] == [f"{from_port} ({scale:.4g} in place of {ported:.4g})"]


def test_channels_of_q_and_k_that_lie_otherwise_cancel() -> None:
    permuted = Stack()
    for layer in permuted.qkv:
        parts = layer.weight.data.view(3, 2, 8, 16)
        parts[:2] = parts[:2].flip(2)
    report = diff(Stack(), permuted, X)
    assert said(report) == [(True, [], None)] * 3
    assert [pair.cancelling for pair in report.pairs] == [("query", "key")] * 3
    assert "The stages query and key differ from (root) on and make no difference" in report.paragraphs[1]


def test_rows_that_see_no_key_are_counted() -> None:
    config = GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=1, n_head=2, attn_implementation="sdpa")
    model = GPT2LMHeadModel(config).eval()
    padded = torch.ones(2, 8, dtype=torch.long)
    padded[0, :3] = 0
    report = diff(model, model, {"input_ids": torch.arange(16).view(2, 8), "attention_mask": padded})
    (only,) = report.pairs
    assert (only.same, only.rows, only.rows_left_out) == (True, 16, 3)
    assert only.stages[-1].reason == "3 of 16 rows, which see no key, are left out"
    assert report.paragraphs[1] == "3 of 16 rows, which see no key, are left out at transformer.h.0.attn."


def test_what_differs_downstream_follows() -> None:
    report = diff(Stack(), Stack(scales=(RIGHT, 1.0, RIGHT)), X)
    assert [names for _, names, _ in said(report)] == [[], ["scale"], []]
    assert [pair.same for pair in report.pairs] == [True, False, False]
    assert [pair.first_stage for pair in report.pairs] == [None, "scale", "input"]
    assert [pair.follows_from for pair in report.pairs] == [None, None, "#1"]
    assert report.exit_code == 1


def test_a_second_difference_downstream_is_found_beside_the_first() -> None:
    report = diff(Stack(), Stack(scales=(1.0, RIGHT, 0.1)), X)
    assert [names for _, names, _ in said(report)] == [["scale"], [], ["scale"]]
    assert [pair.causes[0].b for pair in report.pairs if pair.causes] == pytest.approx([1.0, 0.1])


def test_what_differs_outside_of_attention_is_an_input() -> None:
    report = diff(Stack(), Stack(between=1.01), X)
    assert said(report)[0] == (True, [], None)
    assert said(report)[1] == (False, ["input"], None)
    assert report.pairs[1].first_stage == "input"


def test_a_difference_of_rounding_outside_of_attention_is_none() -> None:
    """The factor in float64 and back: some last digits differ, as another order of operations makes them."""

    class Elsewhere(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x.double() * 3.0).float() / 3.0)

    one, other = Stack(), Elsewhere()
    assert not torch.equal(one(X), other(X))
    assert diff(one, other, X).same is True


def test_each_side_runs_twice_and_a_once_more_for_a_proof() -> None:
    counts = {"a": 0, "b": 0}

    def counted(name: str) -> Stack:
        model = Stack(between=1.0 if name == "a" else 1.01)
        model.register_forward_pre_hook(lambda *_: counts.__setitem__(name, counts[name] + 1))
        return model

    report = diff(counted("a"), counted("b"), X)
    assert report.forwards == (3, 2)
    assert max(counts.values()) <= 4


def test_both_models_are_left_as_they_were() -> None:
    a, b = build("rope").train(), build("rope").train()
    before = [copy.deepcopy(model.state_dict()) for model in (a, b)]
    random.seed(3)
    torch.manual_seed(3)
    state, python = torch.get_rng_state(), random.getstate()
    diff(a, b, inputs("rope"))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    for model, old in zip((a, b), before, strict=True):
        assert model.training
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert all(torch.equal(tensor, old[name]) for name, tensor in model.state_dict().items())


def test_a_side_that_has_run_serves_again() -> None:
    options = LoadOptions()
    opened = [run_side(load_side(Stack(), name, (X,), options), name, (X,), options) for name in "AB"]
    first, second = (sides_diff(*opened) for _ in range(2))
    assert first.same is second.same is True
    assert second.forwards == first.forwards


def test_names_and_modules_go_together(tmp_path: Path) -> None:
    path = tmp_path / "demo.safetensors"
    sqrtdk.record("demo", path=path, seq_len=16)
    report = diff("demo", path, seq_len=16)
    assert report.b.kind == "trace file"
    assert report.same is True


def test_padded_and_other_dtypes_of_one_model_are_the_same_within_rounding() -> None:
    model = Stack()
    half = copy.deepcopy(model).to(torch.bfloat16)
    report = diff(model, half, (X,), inputs_b=(X.bfloat16(),))
    assert report.same is True
    assert report.pairs[0].allowed is not None
    assert report.pairs[0].allowed > 1e-3


class Capped(Stack):
    """Its logits go through a softcap."""

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.qkv, self.scales, strict=True):
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            z = q @ k.mT
            z = z * scale
            z = torch.tanh(z / 0.5) * 0.5
            x = x + (z.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return x


def line_of(module: type[nn.Module], code: str) -> int:
    lines, first = inspect.getsourcelines(module.forward)
    return first + next(number for number, line in enumerate(lines) if code in line)


@pytest.mark.parametrize(
    ("a", "b", "in_a", "in_b"),
    [
        (Capped(), Capped(scales=(1.0,) * 3), "z * scale", "z * scale"),
        (Capped(), Stack(), "0.5) * 0.5", "q @ k.mT"),  # missing in B: the line of its product
    ],
    ids=["another", "missing"],
)
def test_the_lines_to_look_at_are_said(a: nn.Module, b: nn.Module, in_a: str, in_b: str) -> None:
    report = diff(a, b, X)
    (cause,) = report.pairs[0].causes
    lines = line_of(type(a), in_a), line_of(type(b), in_b)
    assert [at and int(at.rsplit(":", 1)[1]) for at in (cause.at_a, cause.at_b)] == list(lines)
    assert cause.at_b is not None
    assert cause.at_b.startswith(Path(__file__).name) or f"/{Path(__file__).name}:" in cause.at_b
    places = f"{cause.at_b} in both" if cause.at_a == cause.at_b else f"{cause.at_b} in B, {cause.at_a} in A"
    assert f" See {places} ({cause.name})." in report.paragraphs[0]
    assert f"{cause.at_b}" in chinese(report)[0]
    assert f"（{word(f'causes.{cause.name}.title', 'zh')}）。" in chinese(report)[0]


def test_what_calls_a_comparison_is_no_line_of_the_model() -> None:
    """The embedded models are files of sqrtdk itself, as is all that runs them."""
    report = diff("demo", "demo:unscaled", seq_len=8)
    (cause,) = (cause for cause in report.pairs[-1].causes if cause.name == "scale")
    assert [str(at).rpartition(":")[0] for at in (cause.at_a, cause.at_b)] == ["sqrtdk/models/demo.py"] * 2

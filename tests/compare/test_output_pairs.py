"""`diff` on what the models return: which outputs belong together, and what no rounding explains."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.compare.diff import diff
from sqrtdk.compare.rounding.tensors import seeing_entries
from sqrtdk.report.diff.json import to_json
from tests.compare.chinese import paragraphs
from tests.compare.decoders import (
    IDS,
    VOCABULARY,
    WIDTH,
    Attend,
    Decoder,
    changed,
    decoder,
    doubled_head,
    first,
    unscaled,
)


class Noisy(nn.Module):
    """A model that adds noise in evaluation mode: float64 draws other numbers."""

    def __init__(self, model: Decoder, before: float = 0.0, behind: float = 0.0) -> None:
        super().__init__()
        self.model, self.before, self.behind = model, before, behind
        model.embed.register_forward_hook(lambda _, __, y: y + self.before * torch.randn_like(y))

    def forward(self, ids: Tensor) -> Tensor:
        y = self.model(ids)
        return y + self.behind * torch.randn_like(y)


@pytest.mark.parametrize("noise", [{"behind": 1.0}, {"before": 1.0}])
def test_noise_hides_no_difference(noise: dict[str, float]) -> None:
    assert diff(Noisy(decoder(), **noise), Noisy(decoder(), **noise), IDS).same is True
    report = diff(Noisy(decoder(), **noise), Noisy(changed(doubled_head), **noise), IDS)
    assert report.same is not True
    (logits,) = report.outputs
    if logits.same is None:
        assert logits.reason == "the float64 run of A and B is another computation"
        assert "was not judged: the float64 run of A and B is another computation." in " ".join(report.paragraphs)
        assert "A 和 B 以 float64 运行时是另一种计算" in "".join(paragraphs(report))


def with_width(width: int) -> Decoder:
    return decoder(returned=lambda logits, hidden: {"logits": logits[..., :width], "hidden": hidden})


def test_one_name_and_two_shapes_is_a_difference() -> None:
    report = diff(with_width(10), with_width(11), IDS)
    assert {one.name: one.same for one in report.outputs} == {"hidden": True, "logits": False}
    assert report.same is False
    said = "The output `logits` has another shape: A returns (2, 7, 10), B (2, 7, 11)."
    assert report.paragraphs[0] == said
    assert paragraphs(report)[0] == "输出 `logits` 的形状不同：A 返回 (2, 7, 10)，B 返回 (2, 7, 11)。"
    document = json.loads(to_json(report))
    schema = json.loads((Path(__file__).parents[2] / "docs" / "diff.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.parametrize("name", ["logits", "0"])
def test_the_only_output_has_two_shapes(name: str) -> None:
    def with_columns(count: int) -> Decoder:
        wrap: Callable[[Tensor], Any] = (lambda x: {name: x}) if name == "logits" else (lambda x: x)
        return decoder(returned=lambda logits, _: wrap(logits[..., :count]))

    report = diff(with_columns(10), with_columns(11), IDS)
    assert [(one.name, one.same) for one in report.outputs] == [(name, False)]
    assert (report.same, report.outputs_missing) == (False, None)
    assert report.paragraphs[0] == f"The output `{name}` has another shape: A returns (2, 7, 10), B (2, 7, 11)."


def test_an_output_of_one_side_alone_is_named() -> None:
    both = decoder(returned=lambda logits, hidden: {"logits": logits, "hidden": hidden})
    report = diff(both, decoder(returned=lambda logits, _: {"logits": logits}), IDS)
    assert report.same is True
    assert "A alone returns `hidden`: not compared" in report.environment["notes"]


@torch.no_grad()
def not_a_number(model: Decoder) -> None:
    model.head.weight[2] = float("nan")


def test_nan_on_both_sides_hides_no_difference_elsewhere() -> None:
    report = diff(changed(not_a_number), changed(not_a_number, doubled_head), IDS)
    assert report.same is False


class Held(nn.Module):
    """An attention that puts what it returns into a structure."""

    def __init__(self, attend: Attend, how: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.qkv, self.out, self.how = attend.qkv, attend.out, how
        self.scale, self.transposed = attend.scale, True

    def forward(self, x: Tensor) -> Any:
        return self.how(Attend.forward(self, x))  # type: ignore[arg-type]


class Taken(nn.Module):
    """And who takes it out."""

    def __init__(self, held: Held, taken: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.held, self.taken = held, taken

    def forward(self, x: Tensor) -> Tensor:
        return self.taken(self.held(x)).view(x.shape)


@dataclasses.dataclass(frozen=True)
class Gave:
    out: Tensor


def held(model: Decoder, how: Callable[[Tensor], Any], taken: Callable[[Any], Tensor]) -> Decoder:
    for layer in model.layers:
        layer.attend = Taken(Held(layer.attend, how), taken)  # type: ignore[arg-type]
    return model


STRUCTURES = [(lambda y: {"out": y}, lambda y: y["out"]), (Gave, lambda y: y.out)]


@pytest.mark.parametrize("ways", STRUCTURES)
def test_an_attention_that_returns_a_structure_is_replaced(ways: Any) -> None:
    report = diff(held(decoder(), *ways), held(changed(unscaled), *ways), IDS)
    assert (report.outputs_follow, report.first_module) == (True, None)
    report = diff(held(decoder(), *ways), held(changed(unscaled, doubled_head), *ways), IDS)
    assert first(report) == ("head", "head")


def test_a_replacement_that_does_not_fit_explains_nothing() -> None:
    a = held(decoder(), lambda y: y.flatten(0, 1), lambda y: y)
    report = diff(a, held(changed(unscaled), lambda y: y, lambda y: y), IDS)
    assert [cause.name for pair in report.pairs for cause in pair.causes] == ["scale"]
    assert (report.outputs_from, report.first_module) == ("", None)


class Block(nn.Module):
    """A block with its attention in its own forward; where `out` is zero, nothing of the attention leaves it."""

    def __init__(self, scale: float | None, out: float) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.qkv, self.out, self.scale = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), scale
        with torch.no_grad():
            for parameter in self.out.parameters():
                parameter.mul_(out)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT * (WIDTH**-0.5 if self.scale is None else self.scale)).softmax(-1)
        return x + self.out(weights @ v)


def test_an_output_that_ignores_the_attention_hides_no_scale() -> None:
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(6))
    for model in (nn.Sequential, lambda *blocks: blocks[0]):
        report = diff(model(*(Block(None, 0.0) for _ in range(2))), model(*(Block(1.0, 0.0) for _ in range(2))), x)
        assert {cause.name for pair in report.pairs for cause in pair.causes} == {"scale"}
        assert [pair.same for pair in report.pairs] == [False] * len(report.pairs)


class Padded(nn.Module):
    """Attention over tokens that are no padding; what it returns of padding is zero, or is not."""

    def __init__(self, zeroes: bool, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head, self.zeroes, self.factor = nn.Linear(WIDTH, 5), zeroes, factor

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, seen = self.embed(input_ids), attention_mask.bool()
        for _ in range(2):
            q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
            heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
            x = x + heads.squeeze(1) * (seen.unsqueeze(-1) if self.zeroes else 1)
        return self.factor * self.head(x) * (seen.unsqueeze(-1) if self.zeroes else 1)


def test_what_a_model_returns_of_padding_is_left_out() -> None:
    mask = torch.ones_like(IDS)
    mask[1, 4:] = 0
    inputs = {"input_ids": IDS, "attention_mask": mask}
    report = diff(Padded(False), Padded(True), inputs)
    assert report.same is True
    assert "rows of padding are left out of what the models return: 3 of 14" in report.environment["notes"]
    assert diff(Padded(False), Padded(True, 1.01), inputs).same is False
    assert diff(Padded(False), Padded(True), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}).same is True


class TwoInOne(nn.Module):
    """Two attentions in each of two calls of one module: the second of the four ran in the first call."""

    def __init__(self, scales: tuple[float | None, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attend, self.head = nn.Embedding(VOCABULARY, WIDTH), Attend(), nn.Linear(WIDTH, VOCABULARY)
        self.scales = scales
        self.attend.forward = self._both  # type: ignore[method-assign]

    def _both(self, x: Tensor, scales: tuple[float | None, ...]) -> Tensor:
        for scale in scales:
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.attend.qkv(x).chunk(3, -1))
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            x = x + heads.transpose(1, 2).flatten(2)
        return self.attend.out(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.attend(self.embed(ids), self.scales[:2])
        return self.head(self.attend(x, self.scales[2:]))


def test_calls_that_cannot_be_told_apart_explain_nothing() -> None:
    report = diff(TwoInOne((None, None, None, None)), TwoInOne((None, 1.0, None, None)), IDS)
    assert [pair.index_a for pair in report.pairs if any(cause.name == "scale" for cause in pair.causes)] == [1]
    assert (report.same, report.outputs_from, report.first_module) == (False, "", None)


def test_of_several_states_the_one_that_belongs_is_compared() -> None:
    """A port that returns a buffer without numbers and the state behind every layer, the last of them last."""
    a = decoder(returned=lambda logits, _: {"logits": logits})
    a_hidden = decoder(returned=lambda _, hidden: {"last_hidden_state": hidden})
    port = decoder(returned=lambda _, hidden: {"states": [hidden * torch.nan, hidden / 2, hidden]})
    report = diff(a_hidden, port, IDS)
    assert [(one.name, one.same) for one in report.outputs] == [("last_hidden_state", True)]
    assert report.same is True
    assert diff(a, port, IDS).outputs == ()  # of another shape


def test_a_cache_of_a_window_holds_the_last_rows() -> None:
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    hidden[1, 5:] = True
    rows = seeing_entries(torch.Size((2, 3, 4, 8)), {(2, 7): hidden}, cache=True)
    assert rows is not None
    assert rows[:, 0, :, 0].tolist() == [[True] * 4, [True, True, False, False]]
    assert seeing_entries(torch.Size((2, 3, 4, 8)), {(2, 7): hidden}) is None

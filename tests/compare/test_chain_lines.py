"""`diff` on differences outside of attentions: the lines of B's code that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn

from sqrtdk.compare.diff import diff
from sqrtdk.report.diff.json import to_json
from tests.compare.chinese import paragraphs
from tests.compare.decoders import (
    IDS,
    WIDTH,
    Attend,
    Decoder,
    adapted,
    changed,
    decoder,
    doubled_head,
    lost_residual,
    other_activation,
    other_norm,
    untransposed,
)


def lines(*parts: str, file: str = "decoders.py") -> str:
    """Where code that holds some text begins, and where it ends."""
    code = Path(__file__).with_name(file).read_text().splitlines()
    numbers = [next(number for number, line in enumerate(code, 1) if part in line) for part in parts]
    return f"tests/compare/{file}:{'-'.join(map(str, numbers))}"


CALLS = "x = self.kept * x + self.attend(self.norm1(x))", "return x + self.mlp(self.norm2(x))"
MERGES = "in self.qkv(x).chunk(3, -1))", "return self.out("
NAMED: list[tuple[Callable[[Decoder], None], str | None]] = [
    (doubled_head, None),  # no code tells of a weight
    (other_activation, lines(CALLS[1])),  # what torch's own modules do is not written in the model: what calls them is
    (other_norm, lines("self.returned(self.head(self.norm(x)), x)")),
    (lost_residual, lines(*CALLS)),
    (untransposed, lines(*MERGES)),
]


@pytest.mark.parametrize(("change", "place"), NAMED)
def test_the_lines_of_b_are_named(change: Callable[[Decoder], None], place: str | None) -> None:
    report = diff(decoder(), changed(change), IDS)
    assert report.first_module is not None
    assert report.first_module.place == place
    assert place is None or f" ({place}): " in report.paragraphs[0]
    assert place is None or f"（{place}）：" in paragraphs(report)[0]
    document = json.loads(to_json(report))
    schema = json.loads((Path(__file__).parents[2] / "docs" / "diff.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    del document["first_module"]["place"]  # as earlier versions wrote it
    jsonschema.Draft202012Validator(schema).validate(document)


def test_a_class_of_the_model_is_named_by_its_forward() -> None:
    place = (diff(decoder(), changed(adapted), IDS).first_module or pytest.fail("no module")).place
    number = int(str(place).rpartition(":")[2])
    code = Path(__file__).with_name("decoders.py").read_text().splitlines()
    assert code[number - 1 : number + 1] == [
        "    def forward(self, x: Tensor) -> Tensor:",
        "        return self.base_layer(x) + self.up(self.down(x))",
    ]


class Shifted(nn.Module):
    """A layer that adds something behind its MLP, in a function of its own."""

    def __init__(self, layer: Any, by: float) -> None:
        super().__init__()
        self.norm1, self.attend, self.norm2, self.mlp = layer.norm1, layer.attend, layer.norm2, layer.mlp
        self._by = by

    def forward(self, x: Tensor) -> Tensor:
        x = self.attended(x)
        y = x + self.mlp(self.norm2(x))
        return y + self._by * y.cumsum(1)  # the end

    def attended(self, x: Tensor) -> Tensor:
        return x + self.attend(self.norm1(x)) + self._by * x.cumsum(1).roll(1, -1) * (self._by > 1)


def shifted(by: float) -> Callable[[Decoder], None]:
    def change(model: Decoder) -> None:
        for number, layer in enumerate(model.layers):
            model.layers[number] = Shifted(layer, by if number else 0.0)

    return change


def test_behind_the_last_call_it_is_up_to_the_end_of_the_forward() -> None:
    report = diff(changed(shifted(0.0)), changed(shifted(0.5)), IDS)
    assert "between `layers.1.mlp` and the output of `layers.1` (" in report.outputs_from
    assert report.first_module is not None
    assert report.first_module.place == lines("y = x + self.mlp", "# the end", file=Path(__file__).name)


def test_calls_in_two_functions_are_told_by_the_later() -> None:
    report = diff(changed(shifted(0.0)), changed(shifted(2.0)), IDS)
    assert "between `layers.1.attend` and `layers.1.norm2` (" in report.outputs_from
    assert report.first_module is not None
    assert report.first_module.place == lines("y = x + self.mlp", file=Path(__file__).name)


def test_what_torch_alone_calls_has_no_line() -> None:
    a, b = (nn.Sequential(Attend(), act) for act in (nn.GELU(), nn.ReLU()))
    b[0] = a[0]
    report = diff(a, b, torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(3)))
    assert report.outputs_from == "the first difference is in `1`: GELU in A, ReLU in B; nothing else differs"
    assert report.first_module is not None
    assert report.first_module.place is None

"""What `diff` is given and can't compare: each is one clear error, with the side, the numbers and a hint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.compare.diff import diff
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError, SqrtdkError, TraceFileError, UnsupportedError
from tests.compare.ports.built import build, inputs

BASE = "rope_gqa"


class NoAttention(nn.Module):
    """A model with nothing to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids)


class TakesMore(nn.Module):
    """Needs what no other model gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(BASE)

    def forward(self, input_ids: Tensor, amplitudes: Tensor) -> Any:
        return self.inner(input_ids) * amplitudes


def other_vocabulary() -> nn.Module:
    model: Any = build(BASE)
    model.embed = nn.Embedding(20, model.embed.embedding_dim)
    return model


def not_a_number() -> nn.Module:
    model: Any = build(BASE)
    layer = list(model.blocks())[1]
    for parameter in layer.parameters():
        parameter.data.fill_(float("nan"))
    return model


def message(kind: type[SqrtdkError], *arguments: Any, **options: Any) -> str:
    """What the error says, hint included; it has one."""
    with pytest.raises(kind) as caught:
        diff(*arguments, **options)
    assert caught.value.hint
    return f"{caught.value} | {caught.value.hint}"


@pytest.mark.parametrize(
    ("kind", "other", "words"),
    [
        (InvalidValueError, lambda: build(BASE, common={"layers": 2}), "A runs 3 attentions, B 2"),
        (InvalidValueError, lambda: build(BASE, common={"heads": 8, "head_dim": 6}), "24 keys, B's batch 2, 8 heads"),
        (InvalidValueError, lambda: build(BASE, common={"head_dim": 16}), "heads of A are 12 wide, those of B 16"),
        (InvalidValueError, lambda: build(BASE, common={"kv_heads": 4}), "key of A has 2 heads, of B 4"),
        (ModelError, other_vocabulary, "B, Model, knows 0 to 19"),
        (ModelError, NoAttention, "no attention ran in B, NoAttention"),
        (ModelError, TakesMore, "B: TakesMore raised TypeError"),
        (ModelError, lambda: build(BASE).to("meta"), "B, Model, has no values: it is on the meta device"),
        (InvalidTypeError, lambda: 3, "B is a int"),
        (InvalidValueError, not_a_number, "B has NaN, first in the"),
    ],
)  # fmt: skip
def test_a_side_that_can_not_be_compared(kind: type[SqrtdkError], other: Callable[[], Any], words: str) -> None:
    assert words in message(kind, build(BASE), other(), inputs(BASE))


def test_nan_is_named_with_its_site_and_tensor() -> None:
    said = message(InvalidValueError, not_a_number(), build(BASE), inputs(BASE))
    assert said.startswith("A has NaN, first in the query at ")
    assert "numbers), and B has none" in said


def test_nan_on_both_sides_is_judged_nowhere() -> None:
    report = diff(not_a_number(), not_a_number(), inputs(BASE))
    assert [pair.same for pair in report.pairs] == [True, None, None]
    assert report.same is None
    assert "both sides have NaN" in str(report.pairs[1].reason)


@pytest.mark.parametrize("side", ["A", pytest.param("B", marks=pytest.mark.full)])
def test_an_error_says_whose_it_is(side: str) -> None:
    models = (TakesMore(), build(BASE)) if side == "A" else (build(BASE), TakesMore())
    assert message(ModelError, *models, inputs(BASE)).startswith(f"{side}: TakesMore raised TypeError")


def test_empty_inputs() -> None:
    empty = {"input_ids": torch.zeros(0, 3, dtype=torch.long)}
    assert "the inputs are empty, input_ids (0, 3)" in message(ModelError, build(BASE), build(BASE), empty)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ('["a"]', "is no object of names"),
        ('{"a": 1}', "is no object of names"),
        ('{"nowhere": "x"}', "the map names 'nowhere', and A has no such attention"),
        ('{SITE: "nowhere"}', "the map names 'nowhere', and B has no such attention"),
        ("{SITE: OTHER, OTHER: OTHER}", " of B twice"),
        ("{SITE: OTHER, SITE: SITE}", " twice"),
        (" " * (2**20 + 1), "has more than 1048576 bytes"),
    ],
    ids=["cut", "deep", "list", "number", "not in A", "not in B", "B twice", "A twice", "large"],
)
def test_a_map_that_is_none(text: str, words: str, tmp_path: Path) -> None:
    model, path = build(BASE), tmp_path / "map.json"
    path.write_text(text.replace("SITE", '"layers.0.attn"').replace("OTHER", '"layers.1.attn"'))
    assert words in message(InvalidValueError, model, model, inputs(BASE), mapping=path)


@pytest.mark.parametrize("name", ["nowhere.json", "."])
def test_a_map_that_is_not_there(name: str, tmp_path: Path) -> None:
    assert "can't be read" in message(InvalidValueError, "demo", "demo", mapping=tmp_path / name)


@pytest.mark.parametrize(
    ("kind", "name", "content", "words"),
    [
        (TraceFileError, "x.safetensors", None, "No such file"),
        (TraceFileError, "x.safetensors", b"x" * 100, "can't be read as a trace file: a header of"),
        (TraceFileError, "x.safetensors", (2**60).to_bytes(8, "little") + b"{}", "a header of 1152921504606846976"),
        (ModelError, "x.pt2", b"x" * 100, "is not a file of torch.export.save"),
        (ModelError, "x.pt2", None, "can't read the program"),
        (ModelError, "directory", None, "there is no directory"),
        (ModelError, ".", None, "no readable config.json"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
def test_a_file_that_is_no_side(
    kind: type[SqrtdkError], name: str, content: bytes | None, words: str, first: bool, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    sides = (str(path), "demo") if first else ("demo", str(path))
    assert words in message(kind, *sides, seq_len=8)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (ModelError, {"attn_b": "flash"}, "B: there is no attention implementation 'flash'"),
        (ModelError, {"attn": "flash"}, "A: there is no attention implementation 'flash'"),
        (ModelError, {"dtype_b": "int8"}, "B: there is no dtype 'int8'"),
        (ModelError, {"device_a": "abacus"}, "A: there is no device 'abacus'"),
        (InvalidValueError, {"fail_on": "sometimes"}, "fail_on is 'sometimes'"),
        (InvalidValueError, {"seq_len": 0}, "seq_len 0 must be at least 1"),
        (ModelError, {"text": "/nowhere.txt"}, "can't read the text"),
        (ModelError, {"input_file": "/nowhere.safetensors"}, "'/nowhere.safetensors'"),
    ],
)
def test_options(kind: type[SqrtdkError], options: dict[str, Any], words: str) -> None:
    assert words in message(kind, "demo", "demo", **options)


def test_a_module_lets_nobody_choose() -> None:
    said = message(UnsupportedError, build(BASE), build(BASE), inputs(BASE), attn_b="sdpa")
    assert "B: Model offers no choice of attention, sdpa was asked for" in said
    assert "dtype given with a module" in message(
        InvalidValueError, build(BASE), build(BASE), inputs(BASE), dtype="bfloat16"
    )

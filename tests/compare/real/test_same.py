"""Hugging Face's models against themselves, by another implementation, in another dtype, with padding: the same.

And with one thing changed, in each dtype, so that `same` is no word for a comparison that is blind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compare.real.small import LENGTH, randomised
from tests.hf import families

diff = importlib.import_module("sqrtdk.compare.diff").diff

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIX = ("llama", "gpt2", "bert", "t5", "gemma2", "qwen3")
FLEX = ("llama", "bert", "gemma2", "qwen3")
NO_TEXT = ("vit", "clip", "swinv2", "detr", "whisper")
OTHERS = {
    name: (
        "eager",
        *(("sdpa",) if name not in families.EAGER_ONLY else ()),
        *(("flex_attention",) if name in FLEX else ()),
    )
    for name in families.FAMILIES
}
WAYS = [(name, other) for name in SIX for other in OTHERS[name]]


def model(family: str, attn: str = "eager", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A family's model with weights that matter, the same at every call."""
    torch.manual_seed(0)
    built = families.build(families.FAMILIES[family](), attn)
    return randomised(built, offset_norms=not family.startswith("gemma")).to(dtype)


def inputs(family: str, rows: int, padding: str | None = None) -> dict[str, Tensor]:
    """Tokens; with padding each row has three fewer than the one before."""
    tokens = torch.randint(3, 160, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": tokens}
    if padding is not None:
        places = torch.arange(LENGTH) if padding == "left" else torch.arange(LENGTH).flip(0)
        kept = places[None] >= 3 * torch.arange(rows)[:, None]
        given = {"input_ids": tokens * kept, "attention_mask": kept.long()}
    if family in ("t5", "bart"):
        given["decoder_input_ids"] = tokens[:, : LENGTH // 2]
    return given


def assert_same(a: nn.Module, b: nn.Module, given: Any, other: Any = None) -> None:
    """All of their attentions are judged, and the same."""
    report = diff(a, b, given, inputs_b=other)
    assert not report.unpaired_a
    assert not report.unpaired_b
    assert [(pair.site_a, pair.same, pair.causes) for pair in report.pairs if pair.same is not True] == []
    assert report.same is True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "other"), WAYS)
def test_implementations_agree(family: str, other: str, dtype: torch.dtype):
    """Eager and the other one, by rows, padding and cache."""
    a, b = model(family, dtype=dtype), model(family, other, dtype)
    assert_same(a, b, inputs(family, 1))
    if (family, other) == ("t5", "flex_attention"):
        return
    assert_same(a, b, inputs(family, 3))
    for padding in ("right", "left"):
        assert_same(a, b, inputs(family, 4, padding))
    if family != "bert":
        given = inputs(family, 2)
        assert_same(a, b, given | {"use_cache": False}, given | {"use_cache": True})


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("family", SIX)
def test_half_precision_is_the_same_as_float32(family: str, dtype: torch.dtype):
    """Within the rounding of the half: of the weights as well, or of what is computed alone."""
    half, given = model(family, dtype=dtype), inputs(family, 2)
    rounded = model(family, dtype=dtype).float()
    assert_same(model(family), half, given)
    assert_same(rounded, half, given)
    assert_same(half, rounded, given)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_agrees_with_itself(family: str, dtype: torch.dtype):
    """Eager and SDPA, where it has that; all attentions of a forward."""
    a, b = model(family, dtype=dtype), model(family, OTHERS[family][1 if "sdpa" in OTHERS[family] else 0], dtype)
    report = diff(a, b)
    assert len(report.pairs) == families.ATTENTION_CALLS[family]
    assert not report.unpaired_a
    assert not report.unpaired_b
    assert [(pair.site_a, pair.same, pair.causes) for pair in report.pairs if pair.same is not True] == []


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name not in NO_TEXT])
def test_every_family_agrees_with_itself_where_there_is_padding(family: str, padding: str):
    """What a row of padding holds is no tokens', whatever an implementation does there."""
    a, b = model(family), model(family, OTHERS[family][1 if "sdpa" in OTHERS[family] else 0])
    assert_same(a, b, inputs(family, 4, padding))


def scaled(by: float) -> Callable[[nn.Module], None]:
    """Every attention's scale times a number."""

    def change(of: nn.Module) -> None:
        for part in of.modules():
            if hasattr(part, "scaling"):
                part.scaling *= by

    return change


def based(of: nn.Module) -> None:
    """Another base of the rotation: 10000 to the power of 0.9."""
    for part in of.modules():
        if hasattr(part, "inv_freq"):
            part.inv_freq = part.inv_freq**0.9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("family", "name", "change"),
    [
        ("llama", "scale", scaled(4.0)),
        ("qwen3", "scale", scaled(4.0)),
        ("bert", "scale", scaled(4.0)),
        ("llama", "scale", scaled(1.2)),
        ("llama", "rope_base", based),
        ("qwen3", "rope_base", based),
    ],
)
def test_a_change_is_seen_in_every_dtype(family: str, name: str, change: Callable, dtype: torch.dtype):
    """The attentions differ by it, each by itself."""
    a, b = model(family, dtype=dtype), model(family, dtype=dtype)
    change(b)
    report = diff(a, b, inputs(family, 2))
    for pair in report.pairs:
        assert pair.same is False
        assert {cause.name for cause in pair.causes if cause.name != "input"} == {name}

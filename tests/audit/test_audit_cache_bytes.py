"""The bytes of KV cache per token, in a report and in what shows it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.report.check.html import to_html
from sqrtdk.report.terminal import to_text


class Grouped(nn.Module):
    """Four query heads of 8 that share two key heads of 8 with values of 4; `hide` says which keys a row misses."""

    def __init__(self, hide: str = "causal") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 8)
        self.hide = hide

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = x if other is None else other
        q, k, v = (
            project(z).unflatten(-1, (heads, -1)).transpose(1, 2)
            for project, z, heads in ((self.q, x, 4), (self.k, y, 2), (self.v, y, 2))
        )
        k, v = (z.repeat_interleave(2, 1) for z in (k, v))
        z = q @ k.mT * 8**-0.5
        past = torch.ones(z.shape[-2:], dtype=torch.bool).tril()
        seen = {"causal": past, "window": past.triu(-2), "ahead": torch.ones_like(past).tril(1)}.get(self.hide)
        return (z if seen is None else z.masked_fill(~seen, -torch.inf)).softmax(-1) @ v


X = torch.randn(2, 6, 32)
BYTES = 2 * (8 + 4) * 4  # key heads, features of k and v, float32


@pytest.mark.parametrize(("hide", "wanted"), [("causal", BYTES), ("window", BYTES), ("none", None), ("ahead", None)])
def test_rows_that_see_no_later_keys_have_a_cache(hide: str, wanted: int | None) -> None:
    report = sqrtdk.check(Grouped(hide), inputs=(X,), laws="none")
    assert report.kv_bytes_per_token == wanted
    assert json.loads(report.to_json())["kv_bytes_per_token"] == wanted


def test_layers_add_up_and_the_dtype_counts() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.between, self.two = Grouped(), nn.Linear(16, 32), Grouped()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.between(self.one(x).transpose(1, 2).flatten(2)))

    assert sqrtdk.check(Twice(), inputs=(X,), laws="none").kv_bytes_per_token == 2 * BYTES
    half = sqrtdk.check(Twice().to(torch.bfloat16), inputs=(X.to(torch.bfloat16),), laws="none")
    assert half.kv_bytes_per_token == BYTES


def test_a_cross_attention_has_none_and_a_static_check_has_one() -> None:
    cross = sqrtdk.check(Grouped(), inputs=(X, torch.randn(2, 6, 32)), laws="none")
    assert cross.kv_bytes_per_token is None
    static = sqrtdk.check(Grouped().to("meta"), inputs=(X.to("meta"),), laws="none")
    assert static.mode == "static"
    assert static.kv_bytes_per_token == BYTES


def test_it_is_shown_in_both_languages() -> None:
    report = sqrtdk.check(Grouped(), inputs=(X,), laws="none")
    assert f"{BYTES} bytes of KV cache per token" in to_text(report, width=200)
    assert f"每个词元占 KV 缓存 {BYTES} 字节" in to_text(report, width=200, language="zh")
    assert f"{BYTES} bytes of KV cache per token" in to_html(report)
    without = dataclasses.replace(report, kv_bytes_per_token=None)
    assert "KV cache" not in to_text(without, width=200)

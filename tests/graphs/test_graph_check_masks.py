"""Masks of exported graphs: the rules of a module, with the same severities, from the graph alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from tests.graphs.files import onnx, write
from tests.graphs.modules import exported

helper = onnx.helper
D, H = 32, 2


class _Attention(nn.Module):
    """Heads of a projection; what masks them is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return q, k, v


class Inverted(_Attention):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        mask = ~attention_mask.bool()[:, None, None]
        return functional.scaled_dot_product_attention(*self.heads(x), attn_mask=mask)


class Right(_Attention):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.bool()[:, None, None]
        return functional.scaled_dot_product_attention(*self.heads(x), attn_mask=mask)


class CapAfterMask(_Attention):
    cap = 4.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        z = (q @ k.mT * 0.25).masked_fill(hidden, -1e9)
        return (self.cap * torch.tanh(z / self.cap)).softmax(-1) @ v


class LargeCapAfterMask(CapAfterMask):
    cap = 30.0  # hidden keys get e^-30 of a weight


class Cached(_Attention):
    def forward(self, x: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class CachedByMask(Cached):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class CachedRight(Cached):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Slots(_Attention):
    """A static cache: the first rows are written into its first slots, and see no others."""

    def forward(self, x: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        room = 12 - k.shape[2]
        k, v = functional.pad(k, (0, 0, 0, room)), functional.pad(v, (0, 0, 0, room))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


X, MASK = torch.randn(2, 5, D), torch.ones(2, 5, dtype=torch.long)
PAST = torch.randn(2, H, 7, D // H)
CORNER = "the causal mask is aligned with the first key (upper left): rows do not see their own key, and 7 of 12"
CASES: dict[str, tuple[type[nn.Module], tuple[Tensor, ...], str | None, str]] = {
    "an inverted mask": (Inverted, (X, MASK), "fail", "all 20 rows see no key: the mask hides everything"),
    "a right mask": (Right, (X, MASK), None, ""),
    "a cap after the mask": (CapAfterMask, (X,), "fail", "the softcap of 4 comes after the mask"),
    "a large cap after the mask": (LargeCapAfterMask, (X,), None, ""),
    "a flag behind a cache": (Cached, (X, PAST, PAST), "critical", CORNER),
    "a triangle behind a cache": (CachedByMask, (X, PAST, PAST), "critical", CORNER),
    "the right triangle": (CachedRight, (X, PAST, PAST), None, ""),
    "slots of a static cache": (Slots, (X, PAST, PAST), None, ""),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [".pt2", ".onnx"])
@pytest.mark.parametrize("case", CASES)
def test_a_mask_of_an_exported_graph(case: str, kind: str, tmp_path: Path) -> None:
    make, inputs, severity, message = CASES[case]
    torch.manual_seed(0)
    if kind == ".onnx" and case == "an inverted mask":
        message = "20 of 20 rows have every key at"  # exported with finfo.min: rows average what is hidden
    report = sqrtdk.check(str(exported(make().eval(), inputs, tmp_path / f"m{kind}")))
    masks = [finding for finding in report.findings if finding.rule == "mask_audit"]
    assert [(f.severity, f.message.startswith(message)) for f in masks] == ([(severity, True)] if severity else [])


@pytest.mark.parametrize("case", ["a flag behind a cache", "a triangle behind a cache", "the right triangle"])
def test_the_same_of_the_module_itself(case: str) -> None:
    make, inputs, severity, message = CASES[case]
    report = sqrtdk.check(make().eval(), inputs)
    masks = [finding for finding in report.findings if finding.rule == "mask_audit"]
    assert [(f.severity, f.message.startswith(message)) for f in masks] == ([(severity, True)] if severity else [])


@pytest.mark.parametrize(
    ("rows", "keys", "attributes", "severity"),
    [(1, 16, {}, "critical"), (4, 16, {}, "critical"), (1, 16, {"softcap": 20.0}, "critical"), (4, 4, {}, None)],
)
def test_the_causal_attribute_of_an_operator(
    rows: int, keys: int, attributes: dict[str, Any], severity: str | None, tmp_path: Path
) -> None:
    """ONNX aligns it with the first key: of 16 keys one row sees the first alone."""
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], "/attn/Attention", is_causal=1, **attributes)
    given = [
        helper.make_tensor_value_info(name, 1, [1, H, n, 8]) for name, n in zip("qkv", (rows, keys, keys), strict=True)
    ]
    graph = helper.make_graph([node], "graph", given, [helper.make_tensor_value_info("y", 1, None)])
    opsets = [helper.make_opsetid("", 23)]
    path = write(helper.make_model(graph, opset_imports=opsets, ir_version=11), tmp_path / "m.onnx")
    report = sqrtdk.check(str(path))
    masks = [finding for finding in report.findings if finding.rule == "mask_audit"]
    assert [finding.severity for finding in masks] == ([severity] if severity else [])
    if severity:
        assert masks[0].value == keys - rows
        assert f"{keys - rows} of {keys} keys are seen by no row" in masks[0].message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [".pt2", ".onnx"])
@pytest.mark.parametrize("several", [False, True])
def test_weights_that_are_not_finite(several: bool, kind: str, tmp_path: Path) -> None:
    """Of a graph as of a module: critical, with the first of them."""
    model = Cached().eval()
    with torch.no_grad():
        model.k.weight[1, 2] = float("nan")
        model.v.weight[0, 0] = float("inf") if several else 0.0
    inputs = (X, PAST, PAST)
    found = []
    for source in (str(exported(model, inputs, tmp_path / f"m{kind}")), model):
        report = sqrtdk.check(source, None if isinstance(source, str) else inputs)
        findings = [finding for finding in report.findings if finding.rule == "nonfinite"]
        found.append([(f.severity, f.message, f.site) for f in findings if "parameter" in f.message])
        assert report.exit_code == 1
    assert found[0] == found[1] != []

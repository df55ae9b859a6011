"""Graphs without a config.json, of families whose scale only their config declares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from tests.graphs.files import model_of, onnx, write
from tests.graphs.modules import exported, family

make, TensorProto = onnx.helper.make_node, onnx.TensorProto
B, L, H, E = 2, 6, 2, 16
D = H * E
T5_SITE = "encoder.block.0.layer.0.SelfAttention"


def graph(path: Path, site: str, scale: float, bias: str = "") -> Path:
    """One attention under the names that an exporter keeps; with an added bias, of a tensor of that name."""
    rng = np.random.default_rng(0)
    constants: dict[str, Any] = {f"{site}.{n}.weight": rng.standard_normal((D, D)).astype(np.float32) for n in "qkv"}
    constants |= {"heads": np.array([0, 0, H, E]), "scale": np.float32(scale)}
    constants |= {bias: rng.standard_normal((1, H, L, L)).astype(np.float32)} if bias else {}
    above = "/" + site.replace(".", "/")
    nodes = []
    for n in "qkv":
        nodes += [make("MatMul", ["x", f"{site}.{n}.weight"], [f"{n}0"], f"{above}/{n}/MatMul")]
        nodes += [make("Reshape", [f"{n}0", "heads"], [f"{n}1"])]
        nodes += [make("Transpose", [f"{n}1"], [f"{n}2"], perm=[0, 2, 3, 1] if n == "k" else [0, 2, 1, 3])]
    nodes += [make("MatMul", ["q2", "k2"], ["product"], f"{above}/MatMul")]
    nodes += [make("Mul", ["product", "scale"], ["scaled"], f"{above}/Mul")]
    nodes += [make("Add", ["scaled", bias], ["z"])] if bias else [make("Identity", ["scaled"], ["z"])]
    nodes += [make("Softmax", ["z"], ["p"], f"{above}/Softmax", axis=-1), make("MatMul", ["p", "v2"], ["y"])]
    return write(model_of(nodes, [("x", TensorProto.FLOAT, [B, L, D])], constants), path)


CASES = {
    "T5": (T5_SITE, 1.0, f"{T5_SITE}.relative_attention_bias.weight", "t5"),
    "T5 whose bias was worked out": (T5_SITE, 1.0, "onnx::Add_12", "t5"),
    "GPT-Neo": ("transformer.h.0.attn.attention", 1.0, "", "gpt_neo"),
    "T5 of a wrong scale": (T5_SITE, 0.5, "onnx::Add_12", None),
    "names of no family": ("model.layers.0.self_attn", 1.0, "onnx::Add_12", None),
    "T5's names without a bias": (T5_SITE, 1.0, "", None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_config_is_asked_for_where_names_tell_the_family(case: str, tmp_path: Path) -> None:
    site, scale, bias, name = CASES[case]
    report = sqrtdk.check(str(graph(tmp_path / "m.onnx", site, scale, bias)))
    (judged,) = report.calls
    assert judged.call.scale.effective == pytest.approx(scale)
    if name is None:
        odd = judged.mistake == "unknown"  # a number without a mistake's signature may be meant
        assert (judged.verdict, report.exit_code) == ("unexplained", 0 if odd else 1)
        assert [(one.rule, one.severity) for one in report.findings] == [("scale_ledger", "warn" if odd else "fail")]
        return
    assert (judged.verdict, report.exit_code) == ("unmeasured", 0)
    (finding,) = report.findings
    assert (finding.rule, finding.severity) == ("unmeasured", "warn")
    assert f"looks like {name}" in finding.message
    assert "config.json" in finding.fix


def test_with_its_config_it_is_judged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    (judged,) = sqrtdk.check(str(graph(tmp_path / "m.onnx", T5_SITE, 1.0, "onnx::Add_12"))).calls
    assert judged.verdict == "declared"


class T5Attention(nn.Module):
    """Without a scale, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (H, E)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return (q @ k.mT).softmax(-1) @ v


class T5Like(T5Attention):
    """A class that only begins like one of the family."""


@pytest.mark.parametrize(("kind", "verdict"), [(T5Attention, "unmeasured"), (T5Like, "unexplained")])
def test_the_class_that_an_exporter_notes_tells_the_family(kind: type[nn.Module], verdict: str, tmp_path: Path) -> None:
    path = exported(kind().eval(), (torch.randn(B, L, D),), tmp_path / "m.pt2")
    assert [judged.verdict for judged in sqrtdk.check(str(path)).calls] == [verdict]


@pytest.mark.full
@pytest.mark.parametrize("name", ["t5", "gpt_neo", "gemma2", "granite", "deberta_v2"])
def test_a_family_without_its_config_is_no_failure(name: str, tmp_path: Path) -> None:
    model, inputs = family(name, tmp_path)
    (tmp_path / "config.json").unlink()
    report = sqrtdk.check(str(exported(model, inputs, tmp_path / "m.pt2", name)))
    assert {judged.verdict for judged in report.calls} == {"unmeasured"}
    assert report.exit_code == 0

"""`check` of exported graphs: every attention found, its scale read and judged, without running the graph."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.audit.records import CheckReport
from sqrtdk.errors import InvalidValueError, ModelError
from tests.attentions.planted import planted
from tests.graphs.files import model_of, onnx, write

helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
make = helper.make_node
B, L, H, E = 2, 6, 4, 24
D = H * E
RIGHT = E**-0.5


def checked(path: Path, **options: Any) -> CheckReport:
    return sqrtdk.check(str(path), **options)


def only(report: CheckReport) -> Any:
    (judged,) = report.calls
    return judged


# -- ONNX, products of several operations ------------------------------------------------------------------------------


def several(
    path: Path,
    q: list[tuple[str, float]] | None = None,
    k: list[tuple[str, float]] | None = None,
    logits: list[tuple[str, float]] | None = None,
    *,
    computed: bool = False,
    lengths: Any = L,
    folded: float = 1.0,
) -> Path:
    """An attention of H heads whose factors stand where they are said to; `computed` makes them by Sqrt."""
    rng = np.random.default_rng(0)
    constants: dict[str, Any] = {f"w{n}": rng.standard_normal((D, D)).astype(np.float32) / 10 for n in "qkv"}
    constants["wq"] = constants["wq"] * np.float32(folded)
    constants["split"] = np.array([0, 0, H, E], np.int64)
    constants["merged"] = np.array([0, 0, D], np.int64)
    nodes: list[Any] = []

    def factors(name: str, wanted: list[tuple[str, float]] | None) -> str:
        for number, (op, value) in enumerate(wanted or []):
            other = f"{name}_f{number}"
            if computed:
                constants[f"{other}_2"] = np.float32(value**2)
                nodes.append(make("Sqrt", [f"{other}_2"], [other]))
            else:
                constants[other] = np.float32(value)
            nodes.append(make(op, [name, other], [f"{name}_s{number}"]))
            name = f"{name}_s{number}"
        return name

    for n in "qkv":
        nodes.append(make("MatMul", ["x", f"w{n}"], [f"{n}0"], f"/attn/{n}_proj/MatMul"))
        nodes.append(make("Reshape", [f"{n}0", "split"], [f"{n}1"]))
        nodes.append(make("Transpose", [f"{n}1"], [f"{n}2"], perm=[0, 2, 1, 3]))
    query, key = factors("q2", q), factors("k2", k)
    nodes.append(make("Transpose", [key], ["kt"], perm=[0, 1, 3, 2]))
    nodes.append(make("MatMul", [query, "kt"], ["z"], "/attn/MatMul"))
    nodes.append(make("Softmax", [factors("z", logits)], ["weights"], "/attn/Softmax", axis=-1))
    nodes.append(make("MatMul", ["weights", "v2"], ["o"], "/attn/MatMul_1"))
    nodes.append(make("Transpose", ["o"], ["o2"], perm=[0, 2, 1, 3]))
    nodes.append(make("Reshape", ["o2", "merged"], ["y"]))
    return write(model_of(nodes, [("x", TensorProto.FLOAT, ["batch", lengths, D])], constants), path)


ROOT = E**0.25
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "Mul on logits": ({"logits": [("Mul", RIGHT)]}, 1.0),
    "Div on logits": ({"logits": [("Div", E**0.5)]}, 1.0),
    "Mul on q": ({"q": [("Mul", RIGHT)]}, 1.0),
    "Div on k": ({"k": [("Div", E**0.5)]}, 1.0),
    "half on each": ({"q": [("Mul", 1 / ROOT)], "k": [("Div", ROOT)]}, 1.0),
    "in two constants": ({"q": [("Mul", 0.5)], "logits": [("Div", 0.5 * E**0.5)]}, 1.0),
    "computed in the graph": ({"logits": [("Mul", RIGHT)], "computed": True}, 1.0),
    "on q and on the logits": ({"q": [("Mul", RIGHT)], "logits": [("Mul", RIGHT)]}, RIGHT),
    "nowhere": ({}, E**0.5),
    "of the width": ({"logits": [("Mul", D**-0.5)]}, (E / D) ** 0.5),
    "upside down": ({"logits": [("Mul", E**0.5)]}, E),
}
MISTAKES = {
    "on q and on the logits": "twice",
    "nowhere": "missing",
    "of the width": "model_dim",
    "upside down": "inverted",
}


@pytest.mark.parametrize("way", WAYS)
def test_every_spelling_of_a_scale(way: str, tmp_path: Path) -> None:
    options, ratio = WAYS[way]
    judged = only(checked(several(tmp_path / "m.onnx", **options)))
    assert judged.call.scale.ratio == pytest.approx(ratio, rel=1e-5)
    assert (judged.call.heads, judged.call.head_dim) == (H, E)
    assert judged.mistake == MISTAKES.get(way)
    assert judged.verdict == ("unexplained" if way in MISTAKES else "exact")


def test_a_scale_in_a_weight_can_not_be_told_from_training(tmp_path: Path) -> None:
    """The ledger says what it sees, and that it may be so."""
    report = checked(several(tmp_path / "m.onnx", folded=RIGHT))
    assert only(report).mistake == "missing"
    assert any("folded into a weight" in note for note in report.environment["notes"])


def test_free_sizes_stay_symbols(tmp_path: Path) -> None:
    report = checked(several(tmp_path / "m.onnx", logits=[("Mul", RIGHT)], lengths="tokens"))
    assert any("batch, tokens" in note for note in report.environment["notes"])
    assert only(report).verdict == "exact"


def test_a_scale_of_a_free_size_is_not_judged(tmp_path: Path) -> None:
    rows = [
        make("Shape", ["z"], ["shape"]),
        make("Gather", ["shape", "last"], ["length"]),
        make("Cast", ["length"], ["float"], to=TensorProto.FLOAT),
        make("Sqrt", ["float"], ["root"]),
        make("Div", ["z", "root"], ["scaled"]),
    ]
    model = onnx.load(several(tmp_path / "m.onnx", lengths="tokens"))
    place = next(i for i, node in enumerate(model.graph.node) if node.op_type == "Softmax")
    nodes = [*model.graph.node]
    nodes[place].input[0] = "scaled"
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], *rows, *nodes[place:]])
    model.graph.initializer.append(numpy_helper.from_array(np.array(3, np.int64), "last"))
    report = checked(write(model, tmp_path / "n.onnx"), fail_on="unmeasured")
    assert only(report).verdict == "unmeasured"
    assert "follows a size" in (only(report).reason or "")
    assert report.exit_code == 1


# -- what is declared --------------------------------------------------------------------------------------------------


def test_a_config_beside_the_file_declares(tmp_path: Path) -> None:
    path = several(tmp_path / "m.onnx", logits=[("Mul", 0.3)])
    assert only(checked(path)).verdict == "unexplained"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granite", "attention_multiplier": 0.3}))
    judged = only(checked(path))
    assert (judged.verdict, judged.mistake) == ("declared", None)
    assert "attention_multiplier = 0.3" in (judged.declared_by or "")


def test_a_config_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "config.json").write_text("{}")
    path = several(tmp_path / "in" / "m.onnx")
    (tmp_path / "in" / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(ModelError, match="link out of its folder"):
        checked(path)


# -- programs of torch.export ------------------------------------------------------------------------------------------


def saved(
    model: nn.Module, inputs: tuple[Tensor, ...], path: Path, *, decomposed: bool = False, **options: Any
) -> Path:
    program = torch.export.export(model.eval(), inputs, strict=False, **options)
    torch.export.save(program.run_decompositions() if decomposed else program, path)
    return path


@pytest.mark.parametrize(
    ("style", "mistake", "decomposed"),
    [
        ("prescaled_q", "missing", False),
        pytest.param("sdpa_scale", "twice", True, marks=pytest.mark.full),
        pytest.param("rope", None, False, marks=pytest.mark.full),
    ],
)
def test_a_program(style: str, mistake: str | None, decomposed: bool, tmp_path: Path) -> None:
    model, inputs = planted(style, mistake)
    sizes = {0: torch.export.Dim("rows", min=2, max=8), 1: torch.export.Dim("tokens", min=2, max=64)}
    path = saved(model, inputs, tmp_path / "m.pt2", decomposed=decomposed, dynamic_shapes={"x": sizes})
    own, report = sqrtdk.check(model, inputs), checked(path)
    assert [(c.call.site, c.verdict, c.mistake) for c in report.calls] == [
        (c.call.site, c.verdict, c.mistake) for c in own.calls
    ]
    assert [c.call.module_class for c in report.calls] == ["Attention"] * 3
    assert all("planted.py" in (c.call.product_at or "") for c in report.calls)


class _Shared(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)


def test_a_program_without_projections(tmp_path: Path) -> None:
    q, k = torch.randn(2, 4, 6, E), torch.randn(2, 2, 6, E)
    call = only(checked(saved(_Shared(), (q, k, k), tmp_path / "m.pt2"))).call
    assert (call.heads, call.kv_heads, call.head_dim) == (4, 2, E)
    assert call.scale.effective == pytest.approx(0.3)


# -- no graph is run ---------------------------------------------------------------------------------------------------


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither onnxruntime nor a kernel on values: all that a walk multiplies is on the meta device."""
    import onnxruntime

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the graph was run")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    assert only(checked(several(tmp_path / "m.onnx", logits=[("Mul", RIGHT)]))).verdict == "exact"
    seen: list[str] = []
    product = torch.Tensor.matmul

    def noted(left: Tensor, right: Tensor) -> Tensor:
        seen.append(left.device.type)
        return product(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", noted)
    checked(several(tmp_path / "n.onnx", logits=[("Mul", RIGHT)]))
    assert set(seen) == {"meta"}


def test_options_that_a_graph_has_settled(tmp_path: Path) -> None:
    path = several(tmp_path / "m.onnx")
    with pytest.raises(InvalidValueError, match="--seq-len, --dtype"):
        checked(path, seq_len=8, dtype="bf16")


def test_the_ratio_is_of_the_head(tmp_path: Path) -> None:
    judged = only(checked(several(tmp_path / "m.onnx", logits=[("Mul", 0.1)])))
    assert judged.call.scale.ratio == pytest.approx(0.1 * math.sqrt(E), rel=1e-6)

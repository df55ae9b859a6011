"""ONNX's recurrent layers against onnxruntime's, and Luong's attention behind them as its module is judged."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs import read_onnx
from tests.graphs.computed import Array, model, normal, ours, same
from tests.graphs.files import model_of, onnx, write
from tests.tolerances import complaint

make = onnx.helper.make_node
L, B, IN, H = 5, 3, 4, 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
LANES = {"forward": 1, "reverse": 1, "bidirectional": 2}
LENGTHS = np.array([5, 2, 0], np.int32)
Layer = tuple[Any, dict[str, Array], dict[str, Array], tuple[str, ...]]


def layer(op: str, direction: str, inputs: str, **attributes: Any) -> Layer:
    """A node with the inputs named, its inputs, its constants and its outputs."""
    lanes, rows = LANES[direction], GATES[op] * H
    constants = {"w": normal(lanes, rows, IN) / 2, "r": normal(lanes, rows, H, seed=1) / 2}
    constants |= {"b": normal(lanes, 2 * rows, seed=2)} if "bias" in inputs else {}
    given: dict[str, Array] = {"x": normal(L, B, IN)}
    given |= {"lengths": LENGTHS} if "lengths" in inputs else {}
    states = ("h", "c") if op == "LSTM" else ("h",)
    given |= {name: normal(lanes, B, H, seed=3 + i) for i, name in enumerate(states)} if "states" in inputs else {}
    names = [name if name in given or name in constants else "" for name in ("x", "w", "r", "b", "lengths", *states)]
    outputs = ("y", "yh", "yc")[: 1 + len(states)]
    node = make(op, names, [*outputs], hidden_size=H, direction=direction, **attributes)
    return node, given, constants, outputs


@pytest.mark.parametrize("inputs", ["", "bias", "bias, lengths", "bias, lengths, states", "states"])
@pytest.mark.parametrize("direction", LANES)
@pytest.mark.parametrize(("op", "attributes"), [
    ("RNN", {}), ("GRU", {}), ("GRU", {"linear_before_reset": 1}), ("LSTM", {}),
], ids=["rnn", "gru", "gru, product first", "lstm"])  # fmt: skip
def test_a_recurrent_layer(op: str, attributes: dict[str, Any], direction: str, inputs: str) -> None:
    node, given, constants, outputs = layer(op, direction, inputs, **attributes)
    same([node], given, constants, outputs=outputs)


@pytest.mark.parametrize(("op", "names"), [
    ("RNN", ["Relu"]), ("GRU", ["tanh", "Sigmoid"]), ("LSTM", ["Sigmoid", "Relu", "Tanh"]),
])  # fmt: skip
def test_activations_without_numbers_of_their_own(op: str, names: list[str]) -> None:
    node, given, constants, outputs = layer(op, "bidirectional", "bias", activations=[*names, *names[::-1]])
    same([node], given, constants, outputs=outputs)


@pytest.mark.parametrize("op", GATES)
def test_a_batch_that_comes_first(op: str) -> None:
    """A layout that onnxruntime refuses: the same numbers as in the other one, moved."""
    node, given, constants, outputs = layer(op, "bidirectional", "bias, lengths, states")
    plain = ours(model([node], given, constants, 22, [*outputs]), given)
    node.attribute.append(onnx.helper.make_attribute("layout", 1))
    moved = {name: array if array.ndim == 1 else array.swapaxes(0, 1).copy() for name, array in given.items()}
    made = ours(model([node], moved, constants, 22, [*outputs]), moved)
    for name in outputs:
        right = plain[name].permute(2, 0, 1, 3) if name == "y" else plain[name].transpose(0, 1)
        assert complaint(made[name], right.double(), right.dtype, length=64, logit=8.0) is None


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "clip": ("GRU", {"clip": 3.0}, "GRU with clip"),
    "input_forget": ("LSTM", {"input_forget": 1}, "LSTM with input_forget"),
    "an activation": ("RNN", {"activations": ["Affine"]}, "RNN with the activations Affine"),
    "numbers of an activation": ("RNN", {"activation_alpha": [0.5]}, "RNN with activation_alpha"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_by_name(case: str) -> None:
    op, attributes, reason = REFUSED[case]
    node, given, constants, outputs = layer(op, "forward", "", **attributes)
    with pytest.raises(UnsupportedError, match=reason):
        ours(model([node], given, constants, 22, [*outputs]), given)


class Luong(nn.Module):
    """Luong, Pham & Manning 2015, section 3.1: dot or general, without a scale."""

    def __init__(self, kind: type[nn.RNNBase], general: bool) -> None:
        super().__init__()
        self.enc, self.dec = kind(8, 16, batch_first=True), kind(8, 16, batch_first=True)
        self.attn = nn.Linear(16, 16, bias=False) if general else nn.Identity()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.enc(source)
        rows, _ = self.dec(target, state)
        weights = (rows @ self.attn(memory).transpose(1, 2)).softmax(-1)
        return torch.cat([rows, weights @ memory], -1)


@pytest.mark.parametrize(("kind", "general", "dynamo"), [
    (nn.GRU, False, False), (nn.LSTM, True, False), (nn.RNN, False, False),
    pytest.param(nn.GRU, True, True, marks=pytest.mark.full),
    pytest.param(nn.LSTM, False, True, marks=pytest.mark.full),
])  # fmt: skip
def test_luong_behind_recurrent_layers_is_a_note(
    kind: type[nn.RNNBase], general: bool, dynamo: bool, tmp_path: Path
) -> None:
    given, path = {"source": torch.randn(2, 6, 8), "target": torch.randn(2, 4, 8)}, tmp_path / "luong.onnx"
    made = Luong(kind, general).eval()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(made, tuple(given.values()), path, input_names=[*given], dynamo=dynamo)
    of_graph, of_module = sqrtdk.check(str(path)), sqrtdk.check(made, given)
    for report in (of_graph, of_module):
        (judged,) = report.calls
        assert (judged.verdict, judged.call.formula) == ("declared", "softmax(q.k)")
        assert [(finding.rule, finding.severity) for finding in report.findings] == [("scale_ledger", "note")]
        assert "recurrent states" in str(judged.declared_by)
    run = read_onnx(path, given)
    assert not run.missing
    assert len(run.calls) == 1


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_luong_by_hand(direction: str, tmp_path: Path) -> None:
    node, given, constants, _ = layer("GRU", direction, "bias")
    width = LANES[direction] * H
    nodes = [
        node,
        make("Transpose", ["y"], ["states"], perm=[2, 0, 1, 3]),
        make("Reshape", ["states", "sizes"], ["m"]),
        make("Transpose", ["m"], ["mt"], perm=[0, 2, 1]),
        make("MatMul", ["m", "mt"], ["z"]),
        make("Softmax", ["z"], ["weights"], axis=-1),
        make("MatMul", ["weights", "m"], ["out"]),
    ]
    constants["sizes"] = np.array([B, L, width])
    graph = model_of(nodes, [("x", onnx.TensorProto.FLOAT, [L, B, IN])], constants)
    del graph.graph.output[:]
    graph.graph.output.append(onnx.ValueInfoProto(name="out"))
    path = write(graph, tmp_path / "g.onnx")
    (judged,) = sqrtdk.check(str(path)).calls
    assert (judged.verdict, judged.call.head_dim) == ("declared", width)
    run = read_onnx(path, {"x": torch.from_numpy(given["x"])})
    assert not run.missing

"""Sides that answer: what a function may return, an ONNX model, and one clear sentence for what can't be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqrtdk.answers.opening import open_side
from sqrtdk.answers.rows import answers_of_rows, residue, squares
from sqrtdk.answers.sides import Function
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError

TABLE = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
PROMPT = (3, 1, 4)


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: TABLE[ids],
        lambda ids: TABLE[ids][None],
        lambda ids: TABLE[ids].numpy(),
        lambda ids: TABLE[ids].tolist(),
        lambda ids: TABLE[ids].log_softmax(-1),
        lambda ids: [dict(enumerate(row)) for row in TABLE[ids].double().log_softmax(-1).tolist()],
    ],
    ids=["logits", "batch of one", "numpy", "lists", "log-probabilities", "mappings"],
)
def test_a_function_may_return(form: Any) -> None:
    answers = Function(form).ask([PROMPT])
    expected = TABLE[list(PROMPT)].double().log_softmax(-1)
    torch.testing.assert_close(answers.values, expected.gather(-1, answers.ids), atol=1e-6, rtol=0)
    assert answers.position.tolist() == [0, 1, 2]


def test_the_last_place_alone_and_the_largest_only() -> None:
    answers = Function(lambda ids: TABLE[ids[-1]], top=2).ask([PROMPT, PROMPT[:2]])
    assert (answers.prompt.tolist(), answers.position.tolist()) == ([0, 1], [2, 1])
    assert answers.ids.shape == (2, 2)


@pytest.mark.parametrize(
    ("form", "error", "says"),
    [
        (lambda ids: TABLE[ids[:2]], InvalidValueError, r"returned \(2, 7\) for 3 token ids"),
        (lambda ids: TABLE[ids] * torch.nan, InvalidValueError, "returned NaN"),
        (lambda ids: [{1: -0.1}], InvalidValueError, "1 rows for 3 token ids"),
        (lambda ids: 1 / 0, ModelError, "raised: division by zero"),
    ],
)
def test_what_can_not_be_used_is_said(form: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Function(form, "port:logits").ask([PROMPT])


def test_names_of_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_port.py").write_text(
        "import torch\nlayer = torch.nn.Linear(2, 2)\nnumber = 3\ndef f(ids): return torch.eye(9)[ids]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert open_side("a_port:f").ask([PROMPT]).ids[:, 0].tolist() == list(PROMPT)
    assert open_side(len).name == "len"
    with pytest.raises(InvalidTypeError, match="is a int, not a function"):
        open_side("a_port:number")
    with pytest.raises(InvalidValueError, match="names nothing that answers"):
        open_side("gpt2")
    with pytest.raises(ModelError, match="has no 'g'"):
        open_side("a_port:g")


def test_a_session_of_onnxruntime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    node = helper.make_node("Gather", ["table", "input_ids"], ["logits"])
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "L"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "L", 7])
    table = numpy_helper.from_array(np.asarray(TABLE), "table")
    graph = helper.make_graph([node], "g", [ids], [logits], [table])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "table.onnx")
    answers = open_side(str(tmp_path / "table.onnx")).ask([PROMPT])
    expected = Function(lambda ids: TABLE[ids]).ask([PROMPT])
    torch.testing.assert_close(answers.values, expected.values)


def test_the_residue_is_the_weighted_root_mean_square() -> None:
    answers = answers_of_rows([(0, 0, {1: -0.1, 2: -3.0}), (0, 1, {5: -0.2})])
    own = torch.tensor([[-0.1, -2.0], [-0.7, 0.0]], dtype=torch.float64)
    rows = torch.tensor([np.exp(-3.0) * 1.0, np.exp(-0.2) * 0.25])
    torch.testing.assert_close(squares(answers, own), rows)
    assert residue(squares(answers, own)) == pytest.approx(float(rows.mean().sqrt()))
    impossible = answers_of_rows([(0, 0, {1: -0.1, 2: float("-inf")})])
    assert squares(impossible, torch.tensor([[-0.1, float("-inf")]], dtype=torch.float64)).item() == 0

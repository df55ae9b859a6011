"""Graphs that onnxruntime's optimiser wrote with blocked layouts, against onnxruntime and against the plain graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sqrtdk
from sqrtdk.graphs import onnx_blocked, read_onnx
from sqrtdk.graphs.graph import read_graph
from sqrtdk.graphs.onnx_blocked import BLOCKED_DOMAIN, without_blocks
from tests.graphs.computed import normal, ours, theirs
from tests.graphs.files import model_of, onnx
from tests.support.optional import optional

helper, make = onnx.helper, onnx.helper.make_node
Array = np.ndarray[Any, Any]
IMAGE = (2, 3, 16, 16)


def optimised(model: Any, path: Path) -> Any:
    """Return a model as onnxruntime's optimiser writes it, with the layouts of this machine."""
    runtime = optional("onnxruntime")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath, options.intra_op_num_threads, options.log_severity_level = str(path), 1, 4
    runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    made = onnx.load(path)
    if not any(node.domain == BLOCKED_DOMAIN for node in made.graph.node):
        pytest.skip("onnxruntime has no blocked layouts on this machine")
    return made


def conv(
    name: str, source: str, made: str, shape: tuple[int, ...], **attributes: Any
) -> tuple[list[Any], dict[str, Array]]:
    names = [source, f"{name}.weight", f"{name}.bias"]
    constants = {names[1]: normal(*shape) / np.float32(np.prod(shape[1:])) ** 0.5, names[2]: normal(shape[0])}
    return [make("Conv", names, [made], **attributes)], constants


def chain(channels: int, behind: list[Any], last: str, constants: dict[str, Array] | None = None, **stem: Any) -> Any:
    """A convolution of an image to a number of channels, and the nodes behind it."""
    nodes, weights = conv("stem", "x", "s", (channels, 3, 3, 3), pads=[1, 1, 1, 1], **stem)
    nodes = [*nodes, *behind, make("Identity", [last], ["y"])]
    return model_of(nodes, [("x", 1, [*IMAGE])], weights | (constants or {}))


def _second(shape: tuple[int, ...], between: str = "Relu", **attributes: Any) -> tuple[list[Any], dict[str, Array]]:
    nodes, weights = conv("second", "r", "t", shape, **attributes)
    return [make(between, ["s"], ["r"]), *nodes], weights


SAME = {"pads": [1, 1, 1, 1]}
# By name: channels of the first convolution; nodes behind it and their constants.
CASES: dict[str, tuple[int, list[Any], dict[str, Array]]] = {
    "whole blocks": (32, *_second((32, 32, 3, 3), **SAME)),
    "strides and dilations": (32, *_second((16, 32, 3, 3), strides=[2, 2], dilations=[2, 2])),
    "channels that are filled up": (20, *_second((12, 20, 3, 3), **SAME)),
    "behind a plain operator": (32, *_second((16, 32, 3, 3), "Cos", **SAME)),
    "channels that are filled up twice": (20, *_second((12, 20, 3, 3), "Cos", **SAME)),
    "rows of channels, twice": (
        32,
        [make("Transpose", ["s"], ["rows"], perm=[0, 2, 3, 1]), make("Cos", ["rows"], ["c"]),
         make("Transpose", ["c"], ["r"], perm=[0, 3, 1, 2]), *conv("second", "r", "t", (16, 32, 3, 3), **SAME)[0]],
        conv("second", "r", "t", (16, 32, 3, 3), **SAME)[1],
    ),
    "depthwise": (32, *_second((32, 1, 3, 3), group=32, **SAME)),
    "groups": (32, *_second((64, 16, 3, 3), group=2, **SAME)),
    "max pool": (32, [make("MaxPool", ["s"], ["t"], kernel_shape=[2, 2], strides=[2, 2])], {}),
    "average pool": (32, [make("AveragePool", ["s"], ["t"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])], {}),
    "global average": (32, [make("GlobalAveragePool", ["s"], ["t"])], {}),
    "global max": (32, [make("GlobalMaxPool", ["s"], ["t"])], {}),
    "nearest": (
        32,
        [make("Resize", ["s", "", "f"], ["t"], mode="nearest", nearest_mode="floor",
              coordinate_transformation_mode="asymmetric")],
        {"f": np.float32([1, 1, 2, 2])},
    ),
    "linear": (
        32,
        [make("Resize", ["s", "", "f"], ["t"], mode="linear", coordinate_transformation_mode="half_pixel")],
        {"f": np.float32([1, 1, 2, 2])},
    ),
    "rows of channels": (32, [make("Transpose", ["s"], ["t"], perm=[0, 2, 3, 1])], {}),
    "a sum": (32, [*_second((32, 32, 1, 1))[0], make("Add", ["s", "t"], ["u"]), make("Sigmoid", ["u"], ["t2"]),
                   make("Identity", ["t2"], ["z"])], _second((32, 32, 1, 1))[1]),
    "joined": (32, [*_second((16, 32, 1, 1))[0], make("Concat", ["s", "t"], ["z"], axis=1)],
               _second((16, 32, 1, 1))[1]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_blocked_graph_gives_onnxruntimes_numbers(case: str, tmp_path: Path) -> None:
    channels, behind, constants = CASES[case]
    plain = chain(channels, behind, behind[-1].output[0], constants)
    made, given = optimised(plain, tmp_path / "o.onnx"), {"x": normal(*IMAGE)}
    own, right = ours(made, given)["y"], theirs(made, given)["y"]
    assert own.shape == right.shape
    allowed = 1024 * torch.finfo(torch.float32).eps * float(right.abs().max())
    assert float((own - right).abs().max()) <= allowed
    assert float((own - theirs(plain, given)["y"]).abs().max()) <= allowed


HEADS, CHANNELS = 4, 32
HEAD_DIM = CHANNELS // HEADS


def vision(scale: float) -> Any:
    """A convolution of patches and a block of convolutions, one attention over positions, and a convolution."""
    nodes, constants = conv("patch", "x", "p", (CHANNELS, 3, 4, 4), strides=[4, 4])
    for at, (shape, more) in enumerate(
        (((CHANNELS, 1, 3, 3), SAME | {"group": CHANNELS}), ((CHANNELS, CHANNELS, 1, 1), {}))
    ):
        made = conv(f"block.{at}", "p" if at == 0 else "b0", f"b{at}", shape, **more)
        nodes, constants = nodes + made[0], constants | made[1]
    flat, split = np.array([0, CHANNELS, -1]), np.array([0, 0, HEADS, HEAD_DIM])
    constants |= {"flat": flat, "split": split, "merged": np.array([0, 0, CHANNELS]), "scale": np.float32(scale)}
    constants |= {"image": np.array([0, CHANNELS, 4, 4])}
    nodes += [make("Add", ["p", "b1"], ["residual"]), make("Reshape", ["residual", "flat"], ["f"]),
              make("Transpose", ["f"], ["t"], perm=[0, 2, 1])]  # fmt: skip
    for side in "qkv":
        constants[f"attn.{side}.weight"] = normal(CHANNELS, CHANNELS, seed=ord(side)) / np.float32(CHANNELS**0.5)
        perm = [0, 2, 3, 1] if side == "k" else [0, 2, 1, 3]
        nodes += [make("MatMul", ["t", f"attn.{side}.weight"], [side]), make("Reshape", [side, "split"], [f"{side}h"]),
                  make("Transpose", [f"{side}h"], [f"{side}t"], perm=perm)]  # fmt: skip
    nodes += [
        make("MatMul", ["qt", "kt"], ["product"]), make("Mul", ["product", "scale"], ["z"]),
        make("Softmax", ["z"], ["w"], "/attn/Softmax", axis=-1), make("MatMul", ["w", "vt"], ["o"]),
        make("Transpose", ["o"], ["o1"], perm=[0, 2, 1, 3]), make("Reshape", ["o1", "merged"], ["o2"]),
        make("Transpose", ["o2"], ["o3"], perm=[0, 2, 1]), make("Reshape", ["o3", "image"], ["o4"]),
    ]  # fmt: skip
    last, weights = conv("last", "o4", "y", (16, CHANNELS, 3, 3), **SAME)
    return model_of(nodes + last, [("x", 1, [*IMAGE])], constants | weights)


@pytest.mark.parametrize(("scale", "mistake"), [(HEAD_DIM**-0.5, None), (1.0, "missing"), (1 / HEAD_DIM, "twice")])
def test_an_attention_between_blocked_convolutions_is_judged(scale: float, mistake: str | None, tmp_path: Path) -> None:
    """Its scale is judged, its run is onnxruntime's, and its weights have the names and values of the plain graph."""
    path = tmp_path / "o.onnx"
    made = optimised(vision(scale), path)
    assert {"Conv", "ReorderInput", "ReorderOutput"} <= {
        n.op_type for n in made.graph.node if n.domain == BLOCKED_DOMAIN
    }
    (judged,) = sqrtdk.check(str(path)).calls
    assert (judged.mistake, judged.call.heads, judged.call.head_dim) == (mistake, HEADS, HEAD_DIM)
    run = read_onnx(path, {"x": torch.from_numpy(normal(*IMAGE))})
    assert run.missing == ()
    assert len(run.calls) == 1
    plain, graph = read_graph(vision(scale), Path()), without_blocks(read_graph(made, Path()))
    for name in ("patch.weight", "block.0.weight", "block.1.weight", "last.weight"):
        np.testing.assert_array_equal(graph.tensor(name).numpy(), plain.tensor(name).numpy())


def test_a_graph_of_another_machine_says_its_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """24 channels are three blocks of 8, on a machine whose blocks are of 16 as well."""
    monkeypatch.setattr(onnx_blocked, "_block_size_here", lambda: 16)
    weight = normal(24, 8, 1, 1)
    blocks = weight.reshape(3, 8, 1, 8, 1, 1).transpose(0, 2, 4, 5, 3, 1)  # O/8, I/8, H, W, 8 of I, 8 of O
    nodes = [make("ReorderInput", ["x"], ["r"], domain=BLOCKED_DOMAIN),
             make("Conv", ["r", "w"], ["c"], domain=BLOCKED_DOMAIN),
             make("ReorderOutput", ["c"], ["y"], domain=BLOCKED_DOMAIN, channels=20)]  # fmt: skip
    model = model_of(nodes, [("x", 1, [1, 8, 2, 2])], {"w": blocks.reshape(24, 8, 1, 1)})
    made, x = ours(model, {"x": normal(1, 8, 2, 2)})["y"], torch.from_numpy(normal(1, 8, 2, 2))
    torch.testing.assert_close(made, torch.nn.functional.conv2d(x, torch.from_numpy(weight[:20])))

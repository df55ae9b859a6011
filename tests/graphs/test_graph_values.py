"""Our own operators against onnxruntime's, on numbers: windows with every padding, and what its optimiser fuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sqrtdk.errors import UnsupportedError
from tests.graphs.computed import Array, model, normal, ours, same, theirs
from tests.graphs.files import MICROSOFT, onnx
from tests.tolerances import complaint

helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto
make = helper.make_node


# -- windows -----------------------------------------------------------------------------------------------------------

AUTO = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
MOVES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one axis": ((9,), {"kernel_shape": [3], "strides": [2]}),
    "two axes": ((8, 7), {"kernel_shape": [3, 2], "strides": [2, 3]}),
    "an even window": ((8, 8), {"kernel_shape": [2, 2]}),
    "three axes": ((5, 6, 7), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 3]}),
    "a stride over the window": ((11, 10), {"kernel_shape": [2, 2], "strides": [3, 4]}),
}
PADS = {
    "unlike ends": ((8, 7), {"kernel_shape": [3, 3], "pads": [1, 0, 2, 1]}),
    "unlike ends, strides": ((8, 7), {"kernel_shape": [3, 3], "pads": [0, 2, 1, 0], "strides": [2, 2]}),
    "dilations": ((9, 10), {"kernel_shape": [2, 3], "dilations": [3, 2], "pads": [1, 1, 0, 2]}),
    "one axis, unlike ends": ((9,), {"kernel_shape": [4], "pads": [3, 1]}),
}
CASES = {
    f"{name}, {auto}": (shape, {**move, "auto_pad": auto}) for name, (shape, move) in MOVES.items() for auto in AUTO
}
CASES |= PADS


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", [1, 2])
def test_a_convolution(case: str, group: int) -> None:
    shape, attributes = CASES[case]
    x, w = normal(2, 4, *shape), normal(6, 4 // group, *attributes["kernel_shape"], seed=1)
    same([make("Conv", ["x", "w", "b"], ["y"], group=group, **attributes)], {"x": x}, {"w": w, "b": normal(6)})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rounding", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_the_largest_of_a_window(case: str, rounding: int) -> None:
    shape, attributes = CASES[case]
    same([make("MaxPool", ["x"], ["y"], ceil_mode=rounding, **attributes)], {"x": normal(2, 3, *shape)})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("rounding", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_the_average_of_a_window(case: str, rounding: int, padding: int) -> None:
    shape, attributes = CASES[case]
    node = make("AveragePool", ["x"], ["y"], ceil_mode=rounding, count_include_pad=padding, **attributes)
    same([node], {"x": normal(2, 3, *shape)})


SPREAD = {
    "output_padding": ((4, 5), {"strides": [2, 3], "output_padding": [1, 2]}),
    "unlike ends": ((4, 5), {"strides": [2, 2], "pads": [1, 0, 0, 2]}),
    "output_shape": ((4, 5), {"strides": [3, 3], "output_shape": [10, 12]}),
    "output_shape, SAME_UPPER": ((4, 5), {"strides": [3, 3], "output_shape": [11, 14], "auto_pad": "SAME_UPPER"}),
    "SAME_UPPER": ((4, 5), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "SAME_LOWER": ((4, 5), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    "VALID": ((4, 5), {"strides": [2, 2], "auto_pad": "VALID"}),
    "dilations": ((4, 5), {"dilations": [2, 1], "pads": [0, 1, 1, 0]}),
    "one axis": ((5,), {"strides": [2], "output_padding": [1], "pads": [1, 0]}),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", SPREAD)
@pytest.mark.parametrize("group", [1, 2])
def test_a_transposed_convolution(case: str, group: int) -> None:
    shape, attributes = SPREAD[case]
    w = normal(4, 3, *[3] * len(shape), seed=1)
    given, constants = {"x": normal(2, 4, *shape)}, {"w": w, "b": normal(3 * group)}
    same([make("ConvTranspose", ["x", "w", "b"], ["y"], group=group, **attributes)], given, constants)


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
def test_a_dilated_window_of_the_same_size(auto: str) -> None:
    """As ONNX has it, for the whole span of the window; onnxruntime counts its elements alone."""
    x, w = normal(2, 4, 9, 10), normal(6, 4, 2, 3, seed=1)
    window = {"kernel_shape": [2, 3], "dilations": [3, 2], "strides": [1, 2]}
    pads = [1, 1, 2, 2] if auto == "SAME_UPPER" else [2, 2, 1, 1]  # spans of 4 and 5: 3 and 3 beyond what there is
    by_name, by_pads = ({"auto_pad": auto}, {"pads": [*pads]})
    given, constants = {"x": x}, {"w": w}
    made = ours(model([make("Conv", ["x", "w"], ["y"], **window, **by_name)], given, constants, 22, ["y"]), given)
    right = theirs(model([make("Conv", ["x", "w"], ["y"], **window, **by_pads)], given, constants, 22, ["y"]), given)
    assert made["y"].shape == right["y"].shape == (2, 6, 9, 5)
    assert complaint(made["y"], right["y"].double(), torch.float32, length=64, logit=8.0) is None


# -- what onnxruntime's optimiser fuses --------------------------------------------------------------------------------

IDS, SEGMENTS = np.array([[1, 2, 3, 0], [4, 5, 0, 0]], np.int32), np.array([[0, 0, 1, 1], [0, 1, 1, 1]], np.int32)
TABLES = {
    "word": normal(7, 8),
    "place": normal(6, 8),
    "kind": normal(2, 8),
    "gain": normal(8),
    "shift": normal(8, seed=1),
}
SEEN = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)


@pytest.mark.parametrize("given", [(), ("mask",), ("mask", "places")])
@pytest.mark.parametrize("segments", [True, False])
def test_embeddings_of_three_tables(given: tuple[str, ...], segments: bool) -> None:
    values = {"mask": SEEN, "places": np.array([[3, 2, 1, 0], [5, 4, 0, 1]], np.int32)}
    names = ["ids", "segments" if segments else "", "word", "place", "kind" if segments else "", "gain", "shift"]
    names += [name if name in given else "" for name in values]
    node = make("EmbedLayerNormalization", names, ["y", "lengths"], domain=MICROSOFT, epsilon=1e-3)
    told = {"ids": IDS} | ({"segments": SEGMENTS} if segments else {}) | {name: values[name] for name in given}
    same([node], told, {name: array for name, array in TABLES.items() if name in names}, outputs=("y", "lengths"))


X, Y = normal(2, 4, 8), normal(2, 4, 8, seed=1)
ONE: dict[str, tuple[Any, dict[str, Array], dict[str, Array]]] = {
    "SkipLayerNormalization": (
        make("SkipLayerNormalization", ["x", "y0", "g", "b", "more"], ["y"], domain=MICROSOFT, epsilon=1e-2),
        {"x": X, "y0": Y}, {"g": normal(8), "b": normal(8, seed=1), "more": normal(8, seed=2)},
    ),
    "SkipSimplifiedLayerNormalization": (
        make("SkipSimplifiedLayerNormalization", ["x", "y0", "g", "more"], ["y"], domain=MICROSOFT, epsilon=1e-2),
        {"x": X, "y0": Y}, {"g": normal(8), "more": normal(8, seed=2)},
    ),
    "FastGelu": (make("FastGelu", ["x", "b"], ["y"], domain=MICROSOFT), {"x": X}, {"b": normal(8)}),
    "BiasGelu": (make("BiasGelu", ["x", "b"], ["y"], domain=MICROSOFT), {"x": X}, {"b": normal(8)}),
    "QuickGelu": (make("QuickGelu", ["x"], ["y"], domain=MICROSOFT, alpha=1.3), {"x": X}, {}),
    "FusedMatMul": (
        make("FusedMatMul", ["x", "y0"], ["y"], domain=MICROSOFT, transB=1, alpha=0.3), {"x": X, "y0": Y}, {}
    ),
    "FusedMatMul, batches": (
        make("FusedMatMul", ["x", "y0"], ["y"], domain=MICROSOFT, transBatchA=1, transBatchB=1, transB=1),
        {"x": normal(3, 2, 5), "y0": normal(4, 2, 5)}, {},
    ),
    "FusedConv": (
        make("FusedConv", ["x", "w", "b", "z"], ["y"], domain=MICROSOFT, activation="LeakyRelu",
             activation_params=[0.2], auto_pad="SAME_UPPER", kernel_shape=[3]),
        {"x": X, "z": normal(2, 6, 8)}, {"w": normal(6, 4, 3), "b": normal(6)},
    ),
    "FusedGemm": (
        make("FusedGemm", ["x", "w", "b"], ["y"], domain=MICROSOFT, activation="Relu", alpha=0.5, beta=2.0, transB=1),
        {"x": normal(3, 8)}, {"w": normal(5, 8), "b": normal(5)},
    ),
}  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", ONE)
def test_an_operator_of_onnxruntime(case: str) -> None:
    node, given, constants = ONE[case]
    same([node], given, constants)


PLAIN: dict[str, tuple[Any, dict[str, Array], dict[str, Array]]] = {
    "HardSigmoid": (make("HardSigmoid", ["x"], ["y"], alpha=0.3, beta=0.4), {"x": X}, {}),
    "Elu": (make("Elu", ["x"], ["y"], alpha=0.7), {"x": X}, {}),
    "LeakyRelu": (make("LeakyRelu", ["x"], ["y"], alpha=0.3), {"x": X}, {}),
    "Selu": (make("Selu", ["x"], ["y"], alpha=1.2, gamma=0.9), {"x": X}, {}),
    "Celu": (make("Celu", ["x"], ["y"], alpha=0.6), {"x": X}, {}),
    "ThresholdedRelu": (make("ThresholdedRelu", ["x"], ["y"], alpha=0.4), {"x": X}, {}),
    "PRelu": (make("PRelu", ["x", "s"], ["y"]), {"x": X}, {"s": normal(8)}),
    "Mod, fmod": (make("Mod", ["x", "m"], ["y"], fmod=1), {"x": X}, {"m": np.float32(0.7)}),
    "Mean": (make("Mean", ["x", "y0"], ["y"]), {"x": X, "y0": Y}, {}),
    "CumSum": (make("CumSum", ["x", "a"], ["y"], reverse=1, exclusive=1), {"x": X}, {"a": np.array(1)}),
    "ReduceL1": (make("ReduceL1", ["x", "a"], ["y"], keepdims=0), {"x": X}, {"a": np.array([1, -1])}),
    "ReduceProd": (make("ReduceProd", ["x", "a"], ["y"]), {"x": X}, {"a": np.array([0, 2])}),
    "ReduceLogSumExp": (make("ReduceLogSumExp", ["x", "a"], ["y"]), {"x": X}, {"a": np.array([1])}),
    "ScatterElements": (
        make("ScatterElements", ["x", "i", "u"], ["y"], axis=1, reduction="add"),
        {"x": X}, {"i": np.array([[[0], [-1], [0]]] * 2), "u": normal(2, 3, 1)},
    ),
    "ScatterND": (
        make("ScatterND", ["x", "i", "u"], ["y"], reduction="add"),
        {"x": X}, {"i": np.array([[0, 1], [1, 2], [0, 1]]), "u": normal(3, 8)},
    ),
    "OneHot": (
        make("OneHot", ["i", "d", "v"], ["y"], axis=1),
        {"i": np.array([[0, 2, -1], [1, 1, 0]])}, {"d": np.array(4), "v": np.float32([-1.0, 3.0])},
    ),
    "Pad, reflect": (make("Pad", ["x", "p"], ["y"], mode="reflect"), {"x": X}, {"p": np.array([0, 1, 2, 0, 2, 1])}),
    "Pad, edge": (make("Pad", ["x", "p"], ["y"], mode="edge"), {"x": X}, {"p": np.array([1, 0, 2, 0, 2, 1])}),
    "Pad, wrap": (make("Pad", ["x", "p"], ["y"], mode="wrap"), {"x": X}, {"p": np.array([0, 1, 2, 0, 2, 1])}),
    "InstanceNormalization": (
        make("InstanceNormalization", ["x", "g", "b"], ["y"], epsilon=1e-2), {"x": X}, {"g": normal(4), "b": normal(4)}
    ),
    "GroupNormalization": (
        make("GroupNormalization", ["x", "g", "b"], ["y"], num_groups=2, epsilon=1e-2),
        {"x": X}, {"g": normal(4), "b": normal(4)},
    ),
    "DepthToSpace": (make("DepthToSpace", ["x"], ["y"], blocksize=2), {"x": normal(2, 8, 3, 4)}, {}),
    "DepthToSpace, CRD": (make("DepthToSpace", ["x"], ["y"], blocksize=2, mode="CRD"), {"x": normal(2, 8, 3, 4)}, {}),
    "SpaceToDepth": (make("SpaceToDepth", ["x"], ["y"], blocksize=2), {"x": normal(2, 3, 4, 6)}, {}),
    "LpPool": (make("LpPool", ["x"], ["y"], kernel_shape=[3], strides=[2], pads=[1, 0], p=2), {"x": X}, {}),
    "GlobalMaxPool": (make("GlobalMaxPool", ["x"], ["y"]), {"x": X}, {}),
    "Resize, nearest": (
        make("Resize", ["p", "", "r"], ["y"], mode="nearest", coordinate_transformation_mode="asymmetric",
             nearest_mode="floor"),
        {"p": normal(2, 3, 4, 5)}, {"r": np.float32([1, 1, 2, 3])},
    ),
    "Resize, linear": (
        make("Resize", ["p", "", "", "to"], ["y"], mode="linear"), {"p": normal(2, 3, 4, 5)},
        {"to": np.array([2, 3, 7, 9])},
    ),
    "Resize, cubic": (
        make("Resize", ["p", "", "", "to"], ["y"], mode="cubic", coordinate_transformation_mode="align_corners"),
        {"p": normal(2, 3, 4, 5)}, {"to": np.array([2, 3, 7, 9])},
    ),
    "IsInf": (make("IsInf", ["x"], ["y"], detect_negative=0), {"x": np.float32([np.inf, -np.inf, 1.0])}, {}),
    "LayerNormalization": (
        make("LayerNormalization", ["x", "g", "b"], ["y"], axis=1, epsilon=1e-2),
        {"x": X}, {"g": normal(4, 8), "b": normal(4, 8)},
    ),
    "Gemm": (make("Gemm", ["x", "w", "b"], ["y"], alpha=0.5, beta=2.0, transA=1),
             {"x": normal(8, 3)}, {"w": normal(8, 5), "b": normal(5)}),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", PLAIN)
def test_an_operator_with_its_attributes(case: str) -> None:
    """None of an operator's numbers is left out in silence."""
    node, given, constants = PLAIN[case]
    same([node], given, constants)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_an_old_softmax_is_over_all_axes_from_one_on(op: str) -> None:
    same([make(op, ["x"], ["y"], axis=1)], {"x": X}, opset=11)


PLACES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "strange")
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
FACTORS = {"larger": [1, 1, 2, 3], "not whole": [1, 1, 0.5, 0.7], "whole": [1, 1, 0.5, 2]}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("rounding", NEAREST)
@pytest.mark.parametrize("place", PLACES[:-1])
def test_the_nearest_of_a_resize(place: str, rounding: str, factors: str) -> None:
    node = make(
        "Resize", ["x", "", "r"], ["y"], mode="nearest", coordinate_transformation_mode=place, nearest_mode=rounding
    )
    same([node], {"x": normal(2, 3, 4, 5)}, {"r": np.float32(FACTORS[factors])})


@pytest.mark.sampled(8)
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("mode", ["linear", "cubic", "strange"])
@pytest.mark.parametrize("place", PLACES)
def test_a_resize_is_right_or_refused(place: str, mode: str, factors: str) -> None:
    """A way that torch has not is no uninitialised memory."""
    node = make("Resize", ["x", "", "r"], ["y"], mode=mode, coordinate_transformation_mode=place)
    given, constants = {"x": normal(2, 3, 4, 5)}, {"r": np.float32(FACTORS[factors])}
    if "strange" in (mode, place) or place == "asymmetric" or factors == "not whole":
        with pytest.raises(UnsupportedError, match=rf"'y' of the mode {mode}, {place}.*nearest is computed"):
            ours(model([node], given, constants, 22, ["y"]), given)
    else:
        same([node], given, constants)

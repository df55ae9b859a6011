"""Runs an ONNX graph in onnxruntime, the judge of our own walk, so that it gives the same on every CPU.

Of a product of unsigned activations and signed weights in eight bits, the sum of two products does not fit the 16 bits
that a CPU without VNNI or AMX has for it: onnxruntime's numbers are cut there, by as much as they are large. The same
weights as unsigned numbers, with a zero point 128 higher, are multiplied exactly on all CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sqrtdk import _extras
from sqrtdk.errors import INTERRUPTS, MissingExtraError, ModelError, kind_and_text
from sqrtdk.graphs.graph import Graph
from sqrtdk.graphs.model_file import ONNX_EXTRA

Arrays = dict[str, np.ndarray[Any, Any]]
_FOLDER = "session.model_external_initializers_file_folder_path"
# Inputs of an operator on integers: the zero point of the activations, the weights, their zero point.
_INTEGER_PRODUCTS: dict[str, tuple[int | None, int, int]] = {
    "ConvInteger": (2, 1, 3),
    "DynamicQuantizeMatMul": (None, 1, 3),
    "MatMulInteger": (2, 1, 3),
    "MatMulIntegerToFloat": (4, 1, 5),
    "QAttention": (6, 1, 7),
    "QGemm": (2, 3, 5),
    "QLinearConv": (2, 3, 5),
    "QLinearMatMul": (2, 3, 5),
}


def run_exposed(graph: Graph, given: Arrays, names: list[str]) -> Arrays:
    """Run a graph with onnxruntime on the CPU, without graph optimisations, and return tensors by name.

    An optimisation may fuse an attention into one operator, and the tensors inside it would not exist.

    Args:
        graph: The graph; it is as before after the call.
        given: Its inputs as arrays, by name.
        names: The graph's own outputs in their order, followed by the tensors inside it to return.

    Raises:
        MissingExtraError: onnx or onnxruntime is not installed.
        ModelError: onnxruntime does not run the graph.
    """
    proto, runtime = _extras.load_extra("onnx", ONNX_EXTRA), _extras.load_extra("onnxruntime", ONNX_EXTRA)
    outputs = graph.model.graph.output
    count = len(outputs)
    try:
        outputs.extend(proto.ValueInfoProto(name=name) for name in names[count:])
        with unsigned_weights(graph):
            whole = graph.model.SerializeToString()
        return dict(zip(names, opened_session(whole, graph.folder).run(names, given), strict=True))
    except (*INTERRUPTS, MissingExtraError):
        raise
    except Exception as error:  # onnxruntime and protobuf have their own error types
        raise ModelError(
            f"onnxruntime {runtime.__version__} does not run the graph: {kind_and_text(error)}",
            hint="Check it with onnx.checker, and that this version of onnxruntime has its opset and operators.",
        ) from error
    finally:
        del outputs[count:]


def opened_session(model: bytes, folder: Path | None = None) -> Any:
    """Return a session of onnxruntime on the CPU, without graph optimisations.

    Args:
        model: The model's bytes.
        folder: Folder of its external tensors.
    """
    runtime = _extras.load_extra("onnxruntime", ONNX_EXTRA)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # fatal messages only: errors are raised in any case
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if folder is not None:
        options.add_session_config_entry(_FOLDER, str(folder))
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@contextmanager
def unsigned_weights(graph: Graph) -> Iterator[None]:
    """Return a context in which the signed constant weights of integer products are unsigned.

    onnxruntime's products of signed weights saturate on some CPUs. Afterwards the graph is as before.
    """
    model = graph.model.graph
    count, before = len(model.initializer), []
    try:
        for node in model.node:
            if node.op_type in _INTEGER_PRODUCTS and (made := _unsigned(graph, node)) is not None:
                before.append((node, list(node.input)))
                _replace(graph, node, made)
        yield
    finally:
        for node, inputs in before:
            node.input[:] = inputs
        del model.initializer[count:]


def _unsigned(graph: Graph, node: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return the weights and their zero point as unsigned numbers; None if they are that, or no constants.

    Also None if the activations are not known to be unsigned: onnxruntime has no product of signed and unsigned.
    """
    of_activations, at, of_weights = _INTEGER_PRODUCTS[node.op_type]
    names = dict(enumerate(node.input))
    weights, zero = (graph.array(name) if name else None for name in (names[at], names.get(of_weights, "")))
    if weights is None or weights.dtype != np.int8:
        return None
    if of_activations is not None and not _is_unsigned(graph, names[0], names.get(of_activations, "")):
        return None
    if names.get(of_weights) and zero is None:  # computed by the graph
        return None
    zero = np.zeros((), np.int8) if zero is None else zero
    higher, of_it = ((array.astype(np.int16) + 128).astype(np.uint8) for array in (weights, zero))
    return higher, of_it


def _is_unsigned(graph: Graph, activations: str, zero: str) -> bool:
    constant = graph.array(zero) if zero else None
    if constant is not None:
        return bool(constant.dtype == np.uint8)
    made = (graph.made_by.get(name) for name in (activations, zero))
    return any(node is not None and node.op == "DynamicQuantizeLinear" for node in made)


def _replace(graph: Graph, node: Any, made: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> None:
    numpy_helper = _extras.load_extra("onnx", ONNX_EXTRA).numpy_helper
    _, at, of_weights = _INTEGER_PRODUCTS[node.op_type]
    node.input.extend("" for _ in range(of_weights + 1 - len(node.input)))
    for place, array in zip((at, of_weights), made, strict=True):
        name = f"{node.name}.{node.output[0]}.{place}.unsigned"
        graph.model.graph.initializer.append(numpy_helper.from_array(array, name))
        node.input[place] = name

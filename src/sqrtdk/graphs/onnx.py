"""Runs an ONNX graph as torch operations under a trace, and checks the result against onnxruntime.

No conclusion is drawn from a graph whose walk gives other outputs than onnxruntime. Only rounding may differ, and its
size is measured: the graph is walked in float64 as well, and onnxruntime may differ from our outputs by a small factor
times the difference between our walk in the file's dtypes and the walk in float64.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text
from sqrtdk.frontends.judge import beyond_rounding
from sqrtdk.frontends.regions import class_of
from sqrtdk.graphs.graph import Graph, UnreadAttention, load_graph, to_tensor
from sqrtdk.graphs.inputs import feeds
from sqrtdk.graphs.model_file import ONNX_EXTRA
from sqrtdk.graphs.onnx_judge import Arrays, run_exposed
from sqrtdk.graphs.onnx_walk import Walk, attends, walkable
from sqrtdk.graphs.places import GraphRoot
from sqrtdk.messages import Message
from sqrtdk.tracing.tensors import CallTensors
from sqrtdk.tracing.trace import Trace

_ONNX_PRODUCTS = ("MatMul", "Einsum", "FusedMatMul")
_MOST_LINKS = 48  # tensors between a softmax and the product with values


@dataclass(frozen=True, slots=True, eq=False)
class GraphRun:
    """One run of an exported graph: its attentions, its outputs, and what could not be read."""

    calls: tuple[CallTensors, ...]  # the attentions, in the order of the graph
    outputs: Mapping[str, Tensor]  # outputs of the graph by name, as onnxruntime computed them
    missing: tuple[UnreadAttention, ...] = ()  # attentions that could not be read
    producer: str = ""  # program that wrote the file, such as "pytorch 2.13.0"
    # version of each operator set by domain; ONNX's own is "ai.onnx"
    opset: Mapping[str, int] = field(default_factory=dict)
    ir_version: int = 0  # version of the file format
    versions: Mapping[str, str] = field(default_factory=dict)  # versions of onnxruntime and onnx
    forwards: int = 1  # number of runs of the graph


def read_onnx(path: str | os.PathLike[str], inputs: Mapping[str, Any] | tuple[Any, ...]) -> GraphRun:
    """Return the tensors of all attentions of an ONNX graph, from one run on the given inputs.

    The graph runs three times on the CPU: once in onnxruntime, with the results of the attentions as extra outputs;
    once as torch operations in float64; and once as torch operations in the file's dtypes, under a trace. Graph
    optimisations of onnxruntime are off, so its usual results may differ from these by rounding.

    Args:
        path: The file. Its external tensors are read from the same folder.
        inputs: Tensors by the names of the graph's inputs, or in their order.

    Raises:
        MissingExtraError: onnx or onnxruntime is not installed.
        ModelError: The file can't be read, needs custom operators, or names a file outside its folder; the inputs do
            not match those of the graph; or onnxruntime fails.
    """
    file = load_graph(path)
    model = file.model
    given = feeds(file.inputs, inputs)
    graph = walkable(file)
    ends = _ends(graph)
    own = [value.name for value in model.graph.output]
    ran = run_exposed(file, given, [*dict.fromkeys((*own, *(name for name in ends if name in file.made_by)))])
    walk = Walk(graph, values={name: to_tensor(array) for name, array in given.items()}, wanted={*own, *ends})
    trace = _traced(walk)
    missing = [*walk.missing, *(UnreadAttention(entry.site, entry.reason) for entry in trace.not_measured)]
    calls = tuple(_named(call, graph) for call in trace.tensors)
    off = _difference(walk, ran, (*ends, *own))
    if off is not None:
        sites = [call.site for call in calls] or ([] if walk.missing else [""])
        missing = [*(UnreadAttention(site, off) for site in sites), *missing]
        calls = ()
    return GraphRun(
        calls=calls,
        outputs={name: to_tensor(ran[name]) for name in own if isinstance(ran[name], np.ndarray)},
        missing=tuple(missing),
        producer=f"{model.producer_name} {model.producer_version}".strip()[:100],
        opset={entry.domain or "ai.onnx": int(entry.version) for entry in model.opset_import},
        ir_version=int(model.ir_version),
        versions={name: str(_extras.load_extra(name, ONNX_EXTRA).__version__) for name in ("onnxruntime", "onnx")},
        forwards=3,
    )


def _traced(walk: Walk) -> Trace:
    """Walks a graph on values in float64 and then in its own dtypes. Returns the trace of the second walk."""
    try:
        with torch.no_grad():
            walk.first()
            root = class_of(walk.graph.root_class, GraphRoot)(walk.again, None)
            walk.place(root)
            with Trace(root, keep=True) as trace:
                root(*walk.inputs.values())
    except (*INTERRUPTS, SqrtdkError):
        raise
    except Exception as error:  # torch raises many types for values that an operation does not accept
        raise ModelError(
            f"the graph can't be walked on values: {kind_and_text(error)}",
            hint="Leave the inputs out: sqrtdk check reads a graph without values.",
        ) from error
    return trace


def _named(call: CallTensors, graph: Graph) -> CallTensors:
    """Return the call, with the name of its node as the site if the graph names no module."""
    # `run_inside` writes "<node>:12" as the source line of the 12th node, counted from 1.
    file, _, line = ((call.call and call.call.softmax_at) or "").rpartition(":")
    if call.site or file != "<node>":
        return call
    node = next((node for node in graph.nodes if node.number + 1 == int(line)), None)
    return call if node is None else replace(call, site=node.site)


def _ends(graph: Graph) -> tuple[str, ...]:
    """Return the names of the attentions' results: the product of weights and values, or the operator's output."""
    found: list[str] = []
    for node in graph.nodes:
        if attends(node.domain, node.op):
            found += _product_after(graph, node.outputs[0]) if node.op.endswith("Softmax") else node.outputs[:1]
    return tuple(dict.fromkeys(found))


def _product_after(graph: Graph, name: str) -> list[str]:
    pending, seen = [name], {name}
    while pending and len(seen) < _MOST_LINKS:
        for node in graph.taken_by.get(pending.pop(0), ()):
            if node.op in _ONNX_PRODUCTS:
                return [node.outputs[0]]
            pending += [made for made in node.outputs if made and made not in seen]
            seen.update(node.outputs)
    return []


# -- the judgement -----------------------------------------------------------------------------------------------------


def _difference(walk: Walk, ran: Arrays, names: tuple[str, ...]) -> str | None:
    """Return the reason to discard the walk, or None if its outputs agree with onnxruntime's."""
    both = {name: ran[name] for name in names if name in walk.made and isinstance(ran.get(name), np.ndarray)}
    rights = {name: right for name, array in both.items() if (right := to_tensor(array)).is_floating_point()}
    for name, right in rights.items():
        off = beyond_rounding(right, walk.made[name], walk.exact[name])
        if off is not None:
            return Message("graphs.other_outputs", gap=f"{off:.3g}", name=name[:60])
    return None if rights else Message("graphs.no_output")

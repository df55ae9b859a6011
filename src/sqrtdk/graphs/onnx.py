"""Runs an ONNX graph as torch operations under a trace, and checks the result against onnxruntime.

No conclusion is drawn from a graph whose walk gives other outputs than onnxruntime. Only rounding may differ, and its
size is measured: the graph is walked in float64 as well, and onnxruntime may differ from our outputs by a small factor
times the difference between our walk in the file's dtypes and the walk in float64.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text
from sqrtdk.frontends.judge import beyond_rounding
from sqrtdk.frontends.module import Bound, ForeignModule, foreign_module
from sqrtdk.frontends.program import RunDtypes, held_tensor
from sqrtdk.graphs.control_flow import Known, without_control_flow
from sqrtdk.graphs.counts import count_of_graph
from sqrtdk.graphs.graph import Graph, UnreadAttention, load_graph, to_tensor
from sqrtdk.graphs.inputs import feeds, shown_sizes
from sqrtdk.graphs.model_file import ONNX_EXTRA
from sqrtdk.graphs.onnx_judge import Arrays, run_exposed
from sqrtdk.graphs.onnx_source import OnnxSource, walkable
from sqrtdk.graphs.onnx_walk import attends
from sqrtdk.graphs.places import GraphModel, is_looked_at, note_on_unread
from sqrtdk.graphs.quantised import note_on_dialects
from sqrtdk.messages import Message
from sqrtdk.models.records import LoadedModel
from sqrtdk.models.run import call
from sqrtdk.tracing.tensors import CallTensors
from sqrtdk.tracing.trace import Trace

ROOT_CLASS = "GraphRoot"  # class of the root module if the exporter names none
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


def walk_onnx(path: str | os.PathLike[str], config: Any, larger: bool) -> GraphModel:
    """Return an ONNX graph as a model whose forward pass walks the graph on the device "meta".

    Nothing is computed there: the walk gives shapes and operations.

    Args:
        path: The file.
        config: Config of the model that was exported, or None.
        larger: As for `number_for`.
    """
    file = without_control_flow(load_graph(path), partial(_known_by_shapes, larger=larger), counts=False)
    source = OnnxSource(walkable(file), on_meta=True, larger=larger)
    inputs = source.example()
    root, traced = foreign_module(source, source.bind(inputs, {}), source.graph.root_class or ROOT_CLASS)
    if config is not None:
        root.config = config
    walk, paths = source.last, dict(root.named_modules(remove_duplicate=False))
    values = {
        root.held(label): source.values_of(name)
        for label, (name, _) in traced.origins.items()
        if name not in file.initializers or name in walk.known or is_looked_at(held_tensor(paths, root.held(label)))
    }
    notes: tuple[str, ...] = (shown_sizes(source.sizes),) if source.sizes else ()
    notes += tuple(Message("graphs.mask_of_ones", name=name) for name in source.masks)
    notes += (*note_on_dialects(file), *note_on_unread(walk.unread))
    if source.constants.queries:
        notes += (Message("graphs.folded", count=len(source.constants.queries)),)
    loaded = LoadedModel(root, inputs, str(path), "onnx", config, notes=notes, masks=values)
    missing, numbers, unread = tuple(walk.missing), count_of_graph(file), tuple(sorted(walk.unread))
    return GraphModel(loaded, numbers, missing, source.sizes, source.operators(paths), unread, source.sick)


@dataclass(frozen=True, slots=True, eq=False)
class OnnxModel:
    """An ONNX graph as a module that runs, after its outputs were compared with onnxruntime's.

    Attributes:
        loaded: The module and its inputs.
        file: The graph.
        outputs: Its outputs by name, as onnxruntime computed them.
        missing: Attentions that are not read.
        off: Why no conclusion is drawn from the module; None if its outputs are onnxruntime's.
    """

    loaded: LoadedModel
    file: Graph
    outputs: Mapping[str, Tensor]
    missing: tuple[UnreadAttention, ...]
    off: str | None

    @property
    def producer(self) -> str:
        """Program that wrote the file, such as "pytorch 2.13.0"."""
        return f"{self.file.model.producer_name} {self.file.model.producer_version}".strip()[:100]


def open_onnx(path: str | os.PathLike[str], inputs: Mapping[str, Any] | tuple[Any, ...]) -> OnnxModel:
    """Return an ONNX graph as a module, judged by onnxruntime on the given inputs.

    The graph runs three times on the CPU: in onnxruntime, with the results of the attentions as extra outputs; as torch
    operations in the file's dtypes; and as torch operations in float64. Graph optimisations of onnxruntime are off, so
    its usual results may differ from these by rounding.

    Args:
        path: The file. Its external tensors are read from the same folder.
        inputs: Tensors by the names of the graph's inputs, or in their order.

    Raises:
        MissingExtraError: onnx or onnxruntime is not installed.
        ModelError: The file can't be read, needs custom operators, or names a file outside its folder; the inputs do
            not match those of the graph; or onnxruntime fails.
    """
    whole = load_graph(path)
    given = feeds(whole.inputs, inputs)
    file = without_control_flow(whole, partial(_known_by_a_run, given), counts=True)
    graph = walkable(file)
    ends = _ends(graph)
    own = [value.name for value in file.model.graph.output]
    ran = run_exposed(file, given, [*dict.fromkeys((*own, *(name for name in ends if name in file.made_by)))])
    if file is not whole:
        ran |= run_exposed(whole, given, own)
    source = OnnxSource(graph, on_meta=False, wanted={*own, *ends})
    arguments = {name: to_tensor(given[of]) for name, of in zip(source.signature.parameters, given, strict=False)}
    try:
        bound = source.bind((), arguments)
        root, _ = foreign_module(source, bound, graph.root_class or ROOT_CLASS)
        off = _difference(root, source, bound, ran, (*ends, *own))
    except (*INTERRUPTS, SqrtdkError):
        raise
    except Exception as error:  # torch raises many types for values that an operation does not accept
        raise ModelError(
            f"the graph can't be walked on values: {kind_and_text(error)}",
            hint="Leave the inputs out: sqrtdk check reads a graph without values.",
        ) from error
    loaded = LoadedModel(
        root, arguments, str(path), "onnx", notes=(*note_on_dialects(file), *note_on_unread(source.last.unread))
    )
    outputs = {name: to_tensor(ran[name]) for name in own if isinstance(ran[name], np.ndarray)}
    return OnnxModel(loaded, file, outputs, tuple(source.last.missing), off)


def read_onnx(path: str | os.PathLike[str], inputs: Mapping[str, Any] | tuple[Any, ...]) -> GraphRun:
    """Return the tensors of all attentions of an ONNX graph, from one run on the given inputs under a trace.

    Args:
        path: The file.
        inputs: Tensors by the names of the graph's inputs, or in their order.

    Raises:
        MissingExtraError: As `open_onnx`.
        ModelError: As `open_onnx`.
    """
    opened = open_onnx(path, inputs)
    with torch.no_grad(), Trace(opened.loaded.module, keep=True) as trace:
        call(opened.loaded.module, opened.loaded.inputs)
    missing = [*opened.missing, *(UnreadAttention(entry.site, entry.reason) for entry in trace.not_measured)]
    calls = tuple(_named(call, opened.file) for call in trace.tensors)
    if opened.off is not None:
        sites = [call.site for call in calls] or ([] if opened.missing else [""])
        missing, calls = [*(UnreadAttention(site, opened.off) for site in sites), *missing], ()
    model = opened.file.model
    return GraphRun(
        calls=calls,
        outputs=opened.outputs,
        missing=tuple(missing),
        producer=opened.producer,
        opset={entry.domain or "ai.onnx": int(entry.version) for entry in model.opset_import},
        ir_version=int(model.ir_version),
        versions=versions(),
        forwards=4,
    )


def _known_by_a_run(given: Arrays, graph: Graph, names: Sequence[str]) -> Known:
    """Return the values and shapes of tensors by a run of onnxruntime."""
    own = [value.name for value in graph.model.graph.output]
    made = [name for name in names if name in graph.made_by and name not in own]
    ran = given | run_exposed(graph, given, [*own, *made])
    known = {name: x for name in names if isinstance(x := ran.get(name, graph.array(name)), np.ndarray)}
    return Known(known, {name: x.shape for name, x in known.items()})


def _known_by_shapes(graph: Graph, names: Sequence[str], *, larger: bool) -> Known:
    """Return the values of tensors that follow from constants and shapes, and the shapes of all."""
    source = OnnxSource(walkable(graph), on_meta=True, larger=larger, wanted=names)
    source.trace(source.bind(source.example(), {}), {})
    walk = source.last
    shapes = {name: tuple(x.shape) for name, x in walk.made.items()}
    shapes |= {name: tuple(shape) for name, (shape, _) in source.constants.shapes.items() if name in names}
    return Known({name: walk.known[name].numpy() for name in names if name in walk.known}, shapes)


def versions() -> dict[str, str]:
    """Return the versions of onnxruntime and onnx."""
    return {name: str(_extras.load_extra(name, ONNX_EXTRA).__version__) for name in ("onnxruntime", "onnx")}


def _named(call: CallTensors, graph: Graph) -> CallTensors:
    """Return the call, with the name of its node as the site if the graph names no module."""
    # `code_line` says "<node>:12" of the 12th node, counted from 1.
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


def _difference(
    root: ForeignModule, source: OnnxSource, bound: Bound, ran: Arrays, names: tuple[str, ...]
) -> str | None:
    """Return the reason to draw no conclusion, or None if these tensors agree with onnxruntime's."""
    walk = source.last
    known = [name for name in names if name in walk.made and isinstance(ran.get(name), np.ndarray)]
    rights = {name: right for name in known if (right := to_tensor(ran[name])).is_floating_point()}
    # What is folded is a constant in every dtype.
    refs = {name: walk.refs[name] for name in rights if name in walk.refs}
    exact = dict(zip(refs, root.inside(bound, [*refs.values()], RunDtypes(torch.float64)), strict=True))
    for name, right in rights.items():
        off = beyond_rounding(right, walk.made[name], exact.get(name, walk.made[name].double()))
        if off is not None:
            return Message("graphs.other_outputs", gap=f"{off:.3g}", name=name[:60])
    return None if rights else Message("graphs.no_output")

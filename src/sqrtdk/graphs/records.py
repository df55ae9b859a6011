"""What the reading of a graph yields, run or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from sqrtdk.models.records import LoadedModel
from sqrtdk.tracing.tensors import CallTensors


@dataclass(frozen=True, slots=True)
class Missing:
    """A softmax, or an operator, that is an attention and could not be read.

    Attributes:
        site: module path, or name of the node.
        reason: half a sentence, with what could not be followed.
    """

    site: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class GraphRun:
    """One run of a graph.

    Attributes:
        calls: the attentions, in the order in which the graph lists them.
        outputs: of the graph itself, by name; what onnxruntime gave.
        missing: attentions that could not be read.
        producer: what wrote the file, "pytorch 2.13.0".
        opset: version of each operator set by its domain; ONNX's own is "ai.onnx".
        ir_version: of the file format.
        versions: of onnxruntime and onnx.
        forwards: how often the graph ran.
    """

    calls: tuple[CallTensors, ...]
    outputs: Mapping[str, Tensor]
    missing: tuple[Missing, ...] = ()
    producer: str = ""
    opset: Mapping[str, int] = field(default_factory=dict)
    ir_version: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    forwards: int = 1


@dataclass(frozen=True, slots=True)
class Walked:
    """A graph as a model whose forward walks it on the meta device.

    Attributes:
        loaded: the model, its inputs without values, and values of its constants.
        missing: attentions that are not read.
        sizes: numbers that stand for the sizes which the graph leaves free.
        operators: of ONNX by site, in order: "Softmax", or one that is an attention by itself.
        unread: operators, and attributes of operators, that are not read.
        sick: names of weights that hold NaN or infinity.
    """

    loaded: LoadedModel
    missing: tuple[Missing, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    operators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    sick: tuple[str, ...] = ()

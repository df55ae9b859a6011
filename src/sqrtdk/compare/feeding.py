"""Which side runs first, and on what: files tell less of the inputs that they take than models do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from sqrtdk.compare.sides import Given, Side, open_side
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import Inputs


def both_sides(
    a: Given, b: Given, inputs: Inputs | None, inputs_b: Inputs | None, options_a: LoadOptions, options_b: LoadOptions
) -> tuple[Side, Side]:
    """Both sides, run on the same inputs unless B was given its own.

    Inputs are made up for a model: for B where A is an ONNX graph. An exported program holds the inputs that it was
    exported with; a model beside it gets those where no size was asked for. A graph that was exported for one size
    makes the model's inputs that size; what it takes beyond them, positions and types of tokens, both sides get.
    """
    kinds = kind_of(a), kind_of(b)
    if inputs is None and options_a.input_file is None:
        graph = next((side for side, kind in zip((a, b), kinds, strict=True) if kind == ".onnx"), None)
        if graph is not None:
            options_a, options_b = (_sized(options, str(graph)) for options in (options_a, options_b))
        if _b_first(kinds, options_a):
            options_b = replace(options_b, text=options_b.text or options_a.text)
            side_b = _model_first(b, a, "B", inputs_b, options_b, kinds[0])
            return open_side(a, "A", None, options_a, other=side_b.inputs), side_b
        side_a = _model_first(a, b, "A", None, options_a, kinds[1] if inputs_b is None else "")
    else:
        side_a = open_side(a, "A", inputs, options_a, other=None)
    return side_a, open_side(b, "B", inputs_b, options_b, other=side_a.inputs)


def kind_of(given: Given) -> str:
    """The suffix of a file that is no model; "" of a model."""
    suffix = "" if isinstance(given, nn.Module) else Path(str(given)).suffix.lower()
    return suffix if suffix in (".onnx", ".pt2", ".safetensors") else ""


def _b_first(kinds: tuple[str, str], options: LoadOptions) -> bool:
    if kinds[0] == ".onnx":
        return kinds[1] in ("", ".pt2")
    asked = options.text is not None or options.batch is not None or options.seq_len is not None
    return kinds == ("", ".pt2") and not asked


def _sized(options: LoadOptions, graph: str) -> LoadOptions:
    """With the sizes that a graph was exported for, where none were asked for."""
    from sqrtdk.graphs.onnx import fixed_sizes

    if options.batch is not None or options.seq_len is not None:
        return options
    batch, length = fixed_sizes(graph)
    return replace(options, batch=batch, seq_len=length)


def _model_first(
    given: Given, other: Given, label: str, inputs: Inputs | None, options: LoadOptions, kind: str
) -> Side:
    """The side that inputs are made for; it runs once more where the graph beside it takes inputs beyond them."""
    side = open_side(given, label, inputs, options, other=None)
    if kind != ".onnx" or not isinstance(side.inputs, dict):
        return side
    from sqrtdk.graphs.onnx import usual_inputs

    more = usual_inputs(str(other), side.inputs)
    if not more:
        return side
    again = open_side(given, label, {**side.inputs, **more}, options, other=None)
    again.forwards += side.forwards
    return again

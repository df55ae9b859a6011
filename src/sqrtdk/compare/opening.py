"""Runs both sides on the same inputs: given ones, those of a trace file, or generated ones.

Sides that have run are refused if only one has NaN, or if they are not one model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._progress import report_progress
from sqrtdk._sites import ROOT_NAME
from sqrtdk.compare.align import Alignment, align, cut_alike, name_of, other_shapes, sizes_of
from sqrtdk.compare.inside.pair import JudgedPair
from sqrtdk.compare.rounding.precision import dtype_of_values
from sqrtdk.compare.sides import EXPORTED, ONNX, TRACE, ModelSide, ModelSource, load_side, run_side, side_of_file
from sqrtdk.errors import InvalidValueError, ModelError, SqrtdkError
from sqrtdk.graphs.inputs import fixed_sizes, usual_inputs
from sqrtdk.messages import Message
from sqrtdk.models.demo import DemoModel
from sqrtdk.models.input_file import read_inputs
from sqrtdk.models.makers import vocabulary
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import Inputs, LoadedModel
from sqrtdk.tracing.tensors import CallTensors

_ID_INPUTS = ("input_ids", "decoder_input_ids")
Loaded = LoadedModel | Path


def open_sides(
    a: ModelSource,
    b: ModelSource,
    inputs: Inputs | None,
    inputs_b: Inputs | None,
    options_a: LoadOptions,
    options_b: LoadOptions,
    mapping: Mapping[str, str],
) -> tuple[ModelSide, ModelSide]:
    """Load and run both sides, and return them.

    Without given inputs and other requests, those of a trace file or of an exported program as B are used. Otherwise
    inputs are generated from the text, file and sizes in A's options. B runs on A's inputs unless it has its own.

    Args:
        a: module, name or path of A.
        b: module, name or path of B.
        inputs: inputs of both sides; None to find or generate them.
        inputs_b: inputs of B alone; None for A's.
        options_a: loading options of A.
        options_b: loading options of B.
        mapping: names of A's attentions to those of B, as for `align`.

    Raises:
        ModelError: a side can't be built or run, or given ids are beyond a vocabulary.
        InvalidValueError: no inputs can be made, or the shapes of the sides have nothing in common.
    """
    files = {}
    for label, one in (("A", a), ("B", b)):
        if not isinstance(one, nn.Module) and _has_suffix(one, TRACE):
            files[label] = side_of_file(Path(one), shapes=True)
    asked = (options_a.text, options_a.input_file, options_a.batch, options_a.seq_len)
    start = inputs
    if start is None and all(value is None for value in asked):
        start = next((side.inputs for side in files.values() if side.inputs is not None), None)
    if start is None and options_a.input_file is not None and (_has_suffix(a, ONNX) or _has_suffix(a, EXPORTED)):
        start = dict(read_inputs(options_a.input_file, _AnyNames()))
    others = any(_has_suffix(a, suffix) for suffix in (ONNX, EXPORTED, TRACE))
    nothing_asked = start is None and inputs_b is None and all(value is None for value in asked)
    if nothing_asked and _has_suffix(b, EXPORTED) and not others:
        program = load_side(b, "B", None, options_b)  # most accept no other sizes, and a model as A accepts any
        start = program.inputs if isinstance(program, LoadedModel) else None
    graph = next((str(one) for one in (a, b) if _has_suffix(one, ONNX)), None)
    if graph is not None and start is None:
        options_a, options_b = (_sized(options, graph) for options in (options_a, options_b))
    report_progress(Message("progress.loading"))
    loaded_a, loaded_b, chosen = _load(a, b, start, inputs_b, options_a, options_b)
    if graph is not None and inputs is None and isinstance(chosen, dict):
        more = usual_inputs(graph, chosen)
        loaded_a, loaded_b = (_with_inputs(loaded, more) for loaded in (loaded_a, loaded_b))
        chosen = {**chosen, **more}
    if start is None and inputs_b is None:
        own = options_a.text is not None or options_a.input_file is not None
        loaded_a, loaded_b, chosen = _below_both(loaded_a, loaded_b, chosen, made=not own)
    side_a = files.get("A") or _run(loaded_a, "A", chosen, options_a)
    side_b = files.get("B") or _run(loaded_b, "B", inputs_b or chosen, options_b)
    if not files:
        return side_a, side_b
    _refuse_shapes(side_a, side_b, mapping)
    # Only now are the values of a file read: two files of other shapes may have gigabytes of them.
    given = {"A": (a, side_a, options_a), "B": (b, side_b, options_b)}
    sides = [
        run_side(Path(str(one)), label, None, options) if label in files else side
        for label, (one, side, options) in given.items()
    ]
    return sides[0], sides[1]


def _run(loaded: Loaded, label: str, inputs: Inputs | None, options: LoadOptions) -> ModelSide:
    """Runs a side; an index error from ids beyond the table of embeddings is reported as such."""
    report_progress(Message("progress.running_side", side=label))
    try:
        return run_side(loaded, label, inputs, options)
    except ModelError as error:
        # A ModelError of the run may wrap a ModelError of the forward, which wraps the IndexError of nn.Embedding.
        cause = error.__cause__
        cause = cause.__cause__ if isinstance(cause, ModelError) else cause
        if not isinstance(cause, IndexError) or not isinstance(loaded, LoadedModel):
            raise
        size = _vocabulary(loaded, tables=True)
        values = loaded.inputs.values() if isinstance(loaded.inputs, dict) else loaded.inputs
        ids = [x for x in values if isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64) and x.numel()]
        largest = max((int(x.max()) for x in ids), default=0)
        if size is None or largest < size:
            raise
        raise ModelError(
            f"the inputs hold ids up to {largest}; {label}, {loaded.id}, knows 0 to {size - 1}",
            hint="Give ids that both sides know, or two models of one vocabulary.",
        ) from error


def _sized(options: LoadOptions, graph: str) -> LoadOptions:
    """Return the options with the sizes for which a graph was exported, unless sizes were requested."""
    if options.batch is not None or options.seq_len is not None:
        return options
    batch, length = fixed_sizes(graph)
    return replace(options, batch=batch, seq_len=length)


def _with_inputs(loaded: Loaded, more: dict[str, Tensor]) -> Loaded:
    """Return the side with the inputs that the graph on the other side needs in addition."""
    if not isinstance(loaded, LoadedModel) or not isinstance(loaded.inputs, dict):
        return loaded
    return replace(loaded, inputs={**loaded.inputs, **more})


def _has_suffix(given: ModelSource, suffix: str) -> bool:
    return isinstance(given, str | Path) and Path(given).suffix.lower() == suffix


class _AnyNames(nn.Module):
    """Stands in for a graph, whose reader checks the names of its inputs itself."""

    def forward(self, **inputs: Tensor) -> None:
        """Takes any inputs."""


def _load(
    a: ModelSource,
    b: ModelSource,
    start: Inputs | None,
    inputs_b: Inputs | None,
    options_a: LoadOptions,
    options_b: LoadOptions,
) -> tuple[Loaded, Loaded, Inputs | None]:
    """Return both sides loaded, and the inputs; B generates them if A can't."""
    # A bare module may not tell what inputs it takes; then B's inputs serve both sides.
    lost: InvalidValueError | None = None
    try:
        one: Loaded | None = load_side(a, "A", start, options_a)
    except InvalidValueError as error:
        if start is not None:
            raise
        one, lost = None, error
    chosen = one.inputs if isinstance(one, LoadedModel) else start
    if chosen is not None or inputs_b is not None:
        if one is None:
            raise lost or AssertionError
        return one, load_side(b, "B", inputs_b or chosen, options_b), chosen
    if not isinstance(b, nn.Module):  # B generates the inputs, from A's text and file
        options_b = replace(options_b, text=options_a.text, input_file=options_a.input_file)
    try:
        other = load_side(b, "B", None, options_b)
    except SqrtdkError:
        if lost is not None:
            raise lost from None
        raise
    chosen = other.inputs if isinstance(other, LoadedModel) else None
    return (load_side(a, "A", chosen, options_a) if one is None else one), other, chosen


def _below_both(
    one: Loaded, other: Loaded, chosen: Inputs | None, *, made: bool
) -> tuple[Loaded, Loaded, Inputs | None]:
    """Return the sides with ids that both know: generated ids are reduced modulo the smaller vocabulary.

    Raises:
        ModelError: given ids are beyond the vocabulary of a side.
    """
    known = {
        label: _vocabulary(x, tables=made) for label, x in (("A", one), ("B", other)) if isinstance(x, LoadedModel)
    }
    sizes = {label: size for label, size in known.items() if size is not None}
    if not sizes or not isinstance(chosen, dict):
        return one, other, chosen
    label, size = min(sizes.items(), key=lambda item: item[1])
    beyond = {
        name: int(chosen[name].max()) for name in _ID_INPUTS if _has_ids(chosen, name) and chosen[name].max() >= size
    }
    if not beyond:
        return one, other, chosen
    if not made:
        name, largest = next(iter(beyond.items()))
        raise ModelError(
            f"{name} holds the id {largest}; {label} knows 0 to {size - 1}",
            hint="Give inputs that both sides know with --input FILE.safetensors, or two models of one vocabulary.",
        )
    # Made-up ids have no meaning to lose: taken modulo the vocabulary they run on both sides.
    folded = {name: value % size if name in beyond else value for name, value in chosen.items()}
    note = Message("compare.note.vocabulary", size=size, model=label)

    def refit(side: Loaded) -> Loaded:
        if not isinstance(side, LoadedModel):
            return side
        fitted: Inputs = tuple(folded.values())[: len(side.inputs)]
        if isinstance(side.inputs, dict):
            fitted = {name: folded.get(name, value) for name, value in side.inputs.items()}
        return replace(side, inputs=fitted, notes=(*side.notes, note))

    return refit(one), refit(other), folded


def _has_ids(inputs: dict[str, Any], name: str) -> bool:
    value = inputs.get(name)
    return isinstance(value, Tensor) and bool(value.numel()) and not value.is_floating_point()


def _vocabulary(loaded: LoadedModel, *, tables: bool) -> int | None:
    """Return the number of ids that a model knows, by its config or, with `tables`, its largest embedding."""
    if isinstance(loaded.module, DemoModel):
        return None  # the demo reads bytes of any text
    if loaded.config is not None:
        try:
            return vocabulary(loaded.config)
        except ModelError:
            return None
    if not tables:
        return None
    return max(
        (part.num_embeddings for part in loaded.module.modules() if isinstance(part, nn.Embedding)), default=None
    )


# -- what sides that have run are refused for --------------------------------------------------------------------------


def refuse_nan(a: ModelSide, b: ModelSide) -> None:
    """Raise an error if one side alone has NaN: no rounding explains it, and it hides every other difference.

    Raises:
        InvalidValueError: one side has NaN in q, k, v or an output, and the other has none.
    """
    first = [first_nan(side.calls) for side in (a, b)]
    if (first[0] is None) == (first[1] is None):
        return
    label, other = ("A", "B") if first[0] is not None else ("B", "A")
    call, name, count = first[0] or first[1]  # type: ignore[misc]
    raise InvalidValueError(
        f"{label} has NaN, first in the {name} at {name_of(call) or ROOT_NAME} ({count} numbers), and {other} has none",
        hint=f"Find out what makes NaN in {label} first: `sqrtdk check` names the site and the tensor.",
    )


def first_nan(calls: Sequence[CallTensors]) -> tuple[CallTensors, str, int] | None:
    """Return the first call with NaN in a compared tensor; None if no call has any.

    Returns:
        The call; "query", "key", "value" or "output"; the number of NaNs in that tensor.
    """
    for call in calls:
        for name, tensor in (
            ("query", call.query.values),
            ("key", call.key.values),
            ("value", call.value.values),
            ("output", call.output),
        ):
            if tensor.is_floating_point() and not math.isfinite(float(tensor.sum())):  # one pass: a sum shows any NaN
                count = int(tensor.isnan().sum())
                if count:
                    return call, name, count
    return None


def refuse_strangers(a: ModelSide, b: ModelSide, alignment: Alignment, mapping: Mapping[str, str]) -> None:
    """Raise an error if the calls of two models can't be paired at all, or not completely.

    Args:
        a: side A.
        b: side B.
        alignment: pairs of their calls.
        mapping: the user's map; with one, the numbers of layers may differ.

    Raises:
        InvalidValueError: no call of A has a partner in B, the heads have other widths, or the models have different
            numbers of attentions.
    """
    counts = [len(side.calls) for side in (a, b)]
    if not alignment.pairs:
        sizes = "batch {}, {} heads, {} rows, {} keys"
        shapes = [sizes.format(*sizes_of(side.calls[0])) for side in (a, b)]
        raise InvalidValueError(
            f"no attention of A belongs to one of B: A's first is {shapes[0]}, B's {shapes[1]}",
            hint="Give two implementations of one model, and the same inputs; or pair sites with --map FILE.",
        )
    widths = [{call.output.shape[-1] for call in side.calls if call.missing is None} for side in (a, b)]
    # Heads of 64 and heads of 128 have no stage in common: the first product already sums other numbers.
    if all(widths) and not widths[0] & widths[1]:
        listed = [" or ".join(map(str, sorted(every)[:4])) for every in widths]
        raise InvalidValueError(
            f"heads of A are {listed[0]} wide, those of B {listed[1]}",
            hint="Give two implementations of one model: what heads of other widths give can't be compared.",
        )
    models = all(side.info.kind == "model" for side in (a, b))
    if models and not mapping and counts[0] != counts[1] and (alignment.alone_a or alignment.alone_b):
        raise InvalidValueError(
            f"A runs {counts[0]} attentions, B {counts[1]}",
            hint="Give two models of as many layers; to compare a part of them, pair sites with --map FILE.",
        )


def cut_sites(a: ModelSide, b: ModelSide) -> dict[str, str]:
    """Return names of calls that both sides have and of which a trace file holds only a part, each mapped to itself.

    Their shapes can't pair them, so these entries are added to the map for `align`.
    """
    cut = {name_of(call) for side in (a, b) for call, part in zip(side.calls, side.cuts, strict=False) if part}
    return {name: name for name in cut & {name_of(call) for call in a.calls} & {name_of(call) for call in b.calls}}


def _refuse_shapes(a: ModelSide, b: ModelSide, mapping: Mapping[str, str]) -> None:
    """Refuses two sides whose shapes alone show that they can't be compared; the values need not be there yet.

    Raises:
        InvalidValueError: no call of one side has the shapes of a call of the other.
    """
    alignment = align(a.calls, b.calls, cut_sites(a, b) | dict(mapping))
    refuse_strangers(a, b, alignment, mapping)
    cuts = [side.cuts or (None,) * len(side.calls) for side in (a, b)]
    pairs = [cut_alike(a.calls[i], b.calls[j], cuts[0][i], cuts[1][j]) for i, j in alignment.pairs]
    reasons = [None if one.missing or other.missing else other_shapes(one, other) for one, other in pairs]
    known = [{(call.query.values.shape, call.output.shape) for call in side.calls} for side in (a, b)]
    if known[0].isdisjoint(known[1]):  # else other values may pair the calls otherwise
        refuse_unlike([JudgedPair(None, reason=reason, strangers=reason is not None) for reason in reasons])


def refuse_unlike(judged: Sequence[JudgedPair]) -> None:
    """Raise an error if there are pairs, and none has shapes that fit one attention.

    Raises:
        InvalidValueError: no pair fits, for example because of other numbers of key heads.
    """
    if judged and all(pair.strangers for pair in judged):
        raise InvalidValueError(
            f"no attention of A has the shapes of its partner in B: {judged[0].reason}",
            hint="Give two implementations of one model, or pair other sites with --map FILE.",
        )


def as_computed(side: ModelSide) -> ModelSide:
    """Return a file's side with the dtype that its numbers show, if that is coarser than the one that it names.

    A note is added then. The side itself is returned if it is a module, or if its calls don't all show one dtype.
    """
    if side.module is not None or side.again is not None:
        return side
    calls = tuple(replace(call, dtype=dtype_of_values(call)) for call in side.calls)
    dtypes = {call.dtype for call in calls}
    if len(dtypes) != 1 or all(one.dtype == other.dtype for one, other in zip(calls, side.calls, strict=True)):
        return side
    dtype = dtypes.pop()
    note = Message("compare.pair.stored", dtype=dtype, named=side.calls[0].dtype)
    return replace(side, calls=calls, info=replace(side.info, dtype=dtype), notes=(*side.notes, note))


def notes_of_sides(a: ModelSide, b: ModelSide) -> list[str]:
    """Return the notes of both sides, each once; notes that only one side has begin with "A" or "B"."""
    of_both = set(a.notes) & set(b.notes)
    notes = [
        note if note in of_both else Message("compare.pair.of_side", side=label, reason=note)
        for label, side in (("A", a), ("B", b))
        for note in side.notes
    ]
    return list(dict.fromkeys(notes))

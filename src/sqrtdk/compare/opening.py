"""Runs both sides on the same inputs: given ones, those of a trace file, or generated ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from sqrtdk._progress import report_progress
from sqrtdk.compare.inputs import ID_NAMES, named_inputs
from sqrtdk.compare.records import PairDiff, Unpaired
from sqrtdk.compare.refusals import refuse_shapes
from sqrtdk.compare.rounding.precision import dtype_of_values
from sqrtdk.compare.rounding.stored import rounded_alike, without_own_rounding
from sqrtdk.compare.sides import (
    DUMP,
    EXPORTED,
    ONNX,
    TRACE,
    ModelSide,
    ModelSource,
    load_side,
    run_module,
    run_side,
    side_of_file,
)
from sqrtdk.compare.weights.known import with_known_changes
from sqrtdk.compare.weights.records import KnownChanges
from sqrtdk.errors import InvalidValueError, ModelError, SqrtdkError
from sqrtdk.frontends.module import ForeignModule
from sqrtdk.graphs.inputs import fixed_sizes, usual_inputs
from sqrtdk.messages import Message
from sqrtdk.models.adapters import base_of, is_adapter
from sqrtdk.models.demo import DemoModel
from sqrtdk.models.ggml import dump_ids
from sqrtdk.models.input_file import read_inputs
from sqrtdk.models.makers import vocabulary
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import Inputs, LoadedModel

_ID_INPUTS = (*ID_NAMES, "decoder_input_ids")
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
    if start is None and inputs_b is None and all(value is None for value in asked):
        start = next((dump_ids(str(one)) for one in (a, b) if _has_suffix(one, DUMP)), None)
    others = any(_has_suffix(a, suffix) for suffix in (ONNX, EXPORTED, TRACE))
    nothing_asked = start is None and inputs_b is None and all(value is None for value in asked)
    if nothing_asked and _has_suffix(b, EXPORTED) and not others:
        program = load_side(b, "B", None, options_b)  # most accept no other sizes, and a model as A accepts any
        start = program.inputs if isinstance(program, LoadedModel) else None
    graph = next((str(one) for one in (a, b) if _has_suffix(one, ONNX)), None)
    if graph is not None and start is None:
        options_a, options_b = (_sized(options, graph) for options in (options_a, options_b))
    report_progress(Message("progress.loading"))
    known: KnownChanges | None = None
    loaded_a, loaded_b, chosen = _load(a, b, start, inputs_b, options_a, options_b)
    if graph is not None and inputs is None and isinstance(chosen, dict):
        more = usual_inputs(graph, chosen)
        loaded_a, loaded_b = (_with_inputs(loaded, more) for loaded in (loaded_a, loaded_b))
        chosen = {**chosen, **more}
    if isinstance(loaded_a, LoadedModel) and isinstance(loaded_b, LoadedModel):
        loaded_a, loaded_b = rounded_alike(without_own_rounding(loaded_a), without_own_rounding(loaded_b))
        loaded_a, loaded_b, known = with_known_changes(loaded_a, loaded_b)
    if start is None and inputs_b is None:
        own = options_a.text is not None or options_a.input_file is not None
        loaded_a, loaded_b, chosen = _below_both(loaded_a, loaded_b, chosen, made=not own)
    side_a = files.get("A") or _run(loaded_a, "A", chosen, options_a)
    side_b = files.get("B") or _run(loaded_b, "B", inputs_b or chosen, options_b)
    if not files:
        if known is None and graph is not None:
            side_a, known = _with_rounding_of_graph(loaded_a, side_a, side_b, options_a)
        return replace(side_a, known=known), side_b
    refuse_shapes(side_a, side_b, mapping)
    # Only now are the values of a file read: two files of other shapes may have gigabytes of them.
    given = {"A": (a, side_a, options_a), "B": (b, side_b, options_b)}
    sides = [
        run_side(Path(str(one)), label, None, options) if label in files else side
        for label, (one, side, options) in given.items()
    ]
    return sides[0], sides[1]


def with_bases(
    sides: tuple[ModelSource, ModelSource], options: tuple[LoadOptions, LoadOptions]
) -> tuple[LoadOptions, LoadOptions]:
    """Return the options, with the other side as the base of an adapter's directory that finds none by itself."""
    found = list(options)
    for at, (own, other) in enumerate((sides, sides[::-1])):
        if not isinstance(own, (str, Path)) or found[at].base is not None or not is_adapter(own):
            continue
        if isinstance(other, (str, Path)) and Path(other).is_dir() and not is_adapter(other):
            try:
                base_of(Path(os.path.expanduser(own)))
            except ModelError:
                found[at] = replace(found[at], base=other)
    return found[0], found[1]


def _with_rounding_of_graph(
    loaded: Loaded, side_a: ModelSide, side_b: ModelSide, options: LoadOptions
) -> tuple[ModelSide, KnownChanges | None]:
    """Return side A with the rounding of B's weights where a side is a graph, whose weights are read as it runs."""
    if side_a.module is None or side_b.module is None or side_a.inputs is None or side_b.inputs is None:
        return side_a, None
    one, other = (LoadedModel(cast(nn.Module, side.module), cast(Inputs, side.inputs), side.info.name, side.info.kind)
                  for side in (side_a, side_b))  # fmt: skip
    changed, _, known = with_known_changes(loaded if isinstance(loaded, LoadedModel) else one, other)
    if known is None:
        return side_a, None
    attn = options.attn if changed.kind == "module" else None
    again = run_module(changed, attn, options.seed, "A", side_a.info.kind)
    forwards = side_a.forwards + again.forwards
    return replace(again, info=side_a.info, missed=side_a.missed, notes=side_a.notes, forwards=forwards), known


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
    chosen = named_inputs(one.module, one.inputs) if isinstance(one, LoadedModel) else start
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
    chosen = named_inputs(other.module, other.inputs) if isinstance(other, LoadedModel) else None
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

    def fold(value: Any) -> Any:
        is_ids = isinstance(value, Tensor) and any(torch.equal(value.cpu(), chosen[name].cpu()) for name in beyond)
        return value % size if is_ids else value

    def refit(side: Loaded) -> Loaded:
        if not isinstance(side, LoadedModel):
            return side
        named = side.inputs
        fitted: Inputs = (
            {name: fold(x) for name, x in named.items()} if isinstance(named, dict) else tuple(map(fold, named))
        )
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
    if isinstance(loaded.module, ForeignModule):
        return max(loaded.module.vocabularies, default=None)
    return max(
        (part.num_embeddings for part in loaded.module.modules() if isinstance(part, nn.Embedding)), default=None
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


def unread_by_both(a: ModelSide, b: ModelSide) -> dict[str, PairDiff]:
    """Return attentions that neither side could read, at one site and for one reason; their behaviour is unknown."""
    seen = {(entry.site, entry.reason): entry for entry in a.missed}
    both = [entry for entry in b.missed if (entry.site, entry.reason) in seen]
    return {
        entry.site: PairDiff(
            entry.site, entry.site, entry.index, entry.index, None, None, None, (), None, None,
            formula_a=seen[entry.site, entry.reason].formula, formula_b=entry.formula,
            reason=Message("compare.pair.unread", reason=entry.reason),
        )
        for entry in both
    }  # fmt: skip


def unpaired_of(
    side: ModelSide, places: Sequence[int], other: str, unread: Mapping[str, PairDiff]
) -> tuple[Unpaired, ...]:
    """Return the attentions of a side that have no partner, except those that neither side could read.

    Args:
        side: the side.
        places: its calls without a partner, by their places.
        other: name of the other side, "A" or "B".
        unread: by site, what neither side could read.
    """
    calls = [side.calls[place] for place in places]
    formulas = [None if call.call is None else call.call.formula for call in calls]
    alone = [
        Unpaired(call.site, call.index, formula, Message("compare.pair.alone", side=other))
        for call, formula in zip(calls, formulas, strict=True)
    ]
    return (*alone, *(entry for entry in side.missed if entry.site not in unread))

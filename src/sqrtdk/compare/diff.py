"""`diff`: runs two implementations of one model on the same inputs and explains their differences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sqrtdk._environment import environment
from sqrtdk._guesses import with_leads
from sqrtdk._progress import progress_shown, report_progress
from sqrtdk.audit.own_module import as_inputs
from sqrtdk.compare.align import Alignment, align, cut_alike, name_of, read_map
from sqrtdk.compare.backward.words import with_gradients
from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.fixes import worded, written_as
from sqrtdk.compare.infer.evidence import SEARCH_NUMBERS, SearchWork
from sqrtdk.compare.inputs import inputs_sentence
from sqrtdk.compare.inside.explain import first_stage, share_gone
from sqrtdk.compare.inside.pair import JudgedPair, first_difference, judge_pair
from sqrtdk.compare.inside.picked import with_picked_masks
from sqrtdk.compare.inside.stages import ordered, picture_of, scatter_of, with_cut_off, with_lines
from sqrtdk.compare.inside.suspect import Sides
from sqrtdk.compare.opening import as_computed, notes_of_sides, open_sides, unpaired_of, unread_by_both, with_bases
from sqrtdk.compare.outside.chain import first_module_apart, follow_differences
from sqrtdk.compare.outside.gaps import judged_as_they_leave
from sqrtdk.compare.outside.holders import held_weights
from sqrtdk.compare.outside.outputs import (
    OutputComparison,
    compare_outputs,
    of_outputs,
    pair_outputs,
    since_of,
    unwritten,
)
from sqrtdk.compare.paragraphs import paragraphs
from sqrtdk.compare.rank_rows import notes_of_ranks
from sqrtdk.compare.records import DIFF_FAIL_ON, UNKNOWN_CAUSE, DiffReport, PairDiff, stage_word
from sqrtdk.compare.refusals import cut_sites, first_nan, refuse_nan, refuse_strangers, refuse_unlike
from sqrtdk.compare.rounding.tensors import (
    UNMEASURED_ROUNDINGS,
    Entering,
    compare_inputs,
    exact_of,
    rows_left_out,
)
from sqrtdk.compare.sides import ModelSide, ModelSource, options_of_sides
from sqrtdk.compare.weights.changes import HeldWeights
from sqrtdk.compare.weights.known_words import known_sentences
from sqrtdk.compare.weights.words import hold_weights, weight_sentences, weights_report
from sqrtdk.compare.words import is_reached, one_paragraph
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message
from sqrtdk.models.limits import check_seed, check_sizes
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.run import on_cpu_by_default
from sqrtdk.models.unchanged import unchanged
from sqrtdk.tracing.tensors import CallTensors


@with_leads
def diff(
    a: ModelSource,
    b: ModelSource,
    inputs: Any = None,
    *,
    inputs_b: Any = None,
    mapping: Mapping[str, str] | str | Path | None = None,
    attn: str | None = None,
    attn_a: str | None = None,
    attn_b: str | None = None,
    dtype: str | torch.dtype | None = None,
    dtype_a: str | torch.dtype | None = None,
    dtype_b: str | torch.dtype | None = None,
    device: str | None = None,
    device_a: str | None = None,
    device_b: str | None = None,
    revision: str | None = None,
    revision_a: str | None = None,
    revision_b: str | None = None,
    text: str | Path | None = None,
    input_file: str | Path | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    base: str | Path | None = None,
    kv_scale: float | None = None,
    backward: bool = False,
    fail_on: str = "different",
    command: str = "",
) -> DiffReport:
    """Compares two implementations of one model, attention by attention, and names the causes of every difference.

    Both run on the same inputs. Every attention of A is paired with one of B. A's formula is computed in float64 from
    B's values at every stage. If the result differs from B's by more than the rounding of both, causes are tried: each
    stands for a change of A, and is reported if that change makes the difference go away.

    Args:
        a: A module, or what `check` takes, a trace file (.safetensors), an ONNX graph (.onnx), an exported program
            (.pt2).
        b: The other side.
        inputs: A dict or tuple for forward, or one tensor; None makes inputs that suit A.
        inputs_b: The same for B, if its forward takes other inputs; None gives it A's.
        mapping: From a site of A to the matching site of B ("site#index" for calls after the first), or a JSON file
            with that. Needed only if names, order and shapes don't pair the sites.
        attn: Attention implementation of both sides, "eager" or "sdpa"; None is their own.
        attn_a: The same for A alone. Like all options of one side, it overrides that of both.
        attn_b: The same for B alone.
        dtype: Dtype to run in, for sides given by name.
        dtype_a: The same for A alone.
        dtype_b: The same for B alone.
        device: Device to run on, for sides given by name.
        device_a: The same for A alone.
        device_b: The same for B alone.
        revision: Branch, tag or commit of a Hugging Face id.
        revision_a: The same for A alone.
        revision_b: The same for B alone.
        text: UTF-8 file for the tokenizer of A.
        input_file: Safetensors file with the inputs.
        batch: Rows of generated inputs, default 1.
        seq_len: Tokens in each row of generated inputs.
        seed: Seed for weights, inputs and the runs.
        trust_remote_code: Let a model's own Python files run.
        base: Base model of a side that is an adapter's directory; None takes the directory that the adapter names, its
            neighbour of that name, or the other side.
        kv_scale: The fixed scale of a side's quantised cache of k and v, such as 1 in an engine without calibrated
            scales. None tries 1 and the scales that follow from the numbers.
        backward: Whether to compare the gradients too.
        fail_on: When `exit_code` is 1: "different"; "unmeasured", also if something could not be judged; "never".
        command: The user's command line, for the report.

    Returns:
        The report.

    Raises:
        ModelError: A side can't be built, its forward raises, or no attention runs in it.
        InvalidValueError: The sides have no call in common, only one side has NaN, or an option or the map is wrong.

    Example:
        >>> report = diff("demo", "demo:unscaled", seq_len=16)
        >>> report.same
        False
    """
    both = LoadOptions(
        attn=attn, text=text, input_file=input_file, batch=batch, seq_len=seq_len, device=device, dtype=dtype,
        seed=seed, revision=revision, trust_remote_code=trust_remote_code, base=base,
    )  # fmt: skip
    options_a, options_b = options_of_sides(
        both, attn=(attn_a, attn_b), dtype=(dtype_a, dtype_b), device=(device_a, device_b),
        revision=(revision_a, revision_b),
    )  # fmt: skip
    with progress_shown("diff"):
        return diff_with(
            a, b, inputs, options_a, options_b, inputs_b=inputs_b, mapping=mapping, kv_scale=kv_scale,
            backward=backward, fail_on=fail_on, command=command,
        )  # fmt: skip


def diff_with(
    a: ModelSource,
    b: ModelSource,
    inputs: Any,
    options_a: LoadOptions,
    options_b: LoadOptions,
    *,
    inputs_b: Any = None,
    mapping: Mapping[str, str] | str | Path | None = None,
    kv_scale: float | None = None,
    backward: bool = False,
    fail_on: str = "different",
    command: str = "",
) -> DiffReport:
    """Return the report of `diff`, with the loading options of each side in one object; other arguments as there."""
    if fail_on not in DIFF_FAIL_ON:
        raise InvalidValueError(f"fail_on is {fail_on!r}", hint=f"Use one of: {', '.join(DIFF_FAIL_ON)}.")
    if kv_scale is not None and not 0 < kv_scale < math.inf:
        raise InvalidValueError(f"kv_scale is {kv_scale}", hint="A fixed scale is above 0, and finite.")
    for options in (options_a, options_b):
        check_seed(options.seed)
        check_sizes(options.rows, options.seq_len)
    options_a, options_b = with_bases((a, b), (options_a, options_b))
    named = read_map(mapping)
    given = None if inputs is None else as_inputs(inputs)
    given_b = None if inputs_b is None else as_inputs(inputs_b)
    with unchanged(a, given) as before_a, unchanged(b, given_b) as before_b:
        side_a, side_b = open_sides(a, b, given, given_b, options_a, options_b, named)
        with on_cpu_by_default():
            report = sides_diff(
                side_a, side_b, named, seed=options_a.seed, kv_scale=kv_scale, backward=backward, fail_on=fail_on,
                command=command,
            )  # fmt: skip
    stayed = [
        Message("compare.pair.of_side", side=label, reason=note)
        for label, notes in (("A", before_a.stayed), ("B", before_b.stayed))
        for note in notes
    ]
    notes = [*report.environment["notes"], *stayed]
    return replace(report, environment=report.environment | {"notes": notes}) if stayed else report


def sides_diff(
    side_a: ModelSide,
    side_b: ModelSide,
    named: Mapping[str, str] | None = None,
    *,
    seed: int = 0,
    kv_scale: float | None = None,
    backward: bool = False,
    fail_on: str = "different",
    command: str = "",
) -> DiffReport:
    """Return the report of `diff` for two sides that have already run (`sides.run_side`), any number of times.

    `named` is the map of sites; the other options are those of `diff`.
    """
    side_a, side_b = as_computed(side_a), as_computed(side_b)
    named, sides = named or {}, (side_a, side_b)
    refuse_nan(*sides)
    alignment = align(side_a.calls, side_b.calls, cut_sites(*sides) | dict(named))
    held = hold_weights(*sides)
    try:
        refuse_strangers(*sides, alignment, named)
        pairs, ends = _compared(*sides, alignment, kv_scale, held)
    except InvalidValueError as error:
        place = first_module_apart(*sides)
        if place is None:
            raise
        hint = one_paragraph([Message("outputs.sentence.first", place=place), error.hint or ""])
        raise InvalidValueError(error.message, hint=hint) from error
    places = list(zip(alignment.pairs, pairs, strict=True))
    for side in sides:  # module inputs and outputs are large and serve only this pair of sides
        if side.exact is not None and side.exact.listened:
            side.exact = replace(side.exact, steps=(), listened=False)
    pairs = (*pairs, *(unread := unread_by_both(*sides)).values())
    written = written_as(side_b.info.framework, side_b.info.module_class)
    pairs = tuple(replace(one, causes=tuple(replace(cause, written=written) for cause in one.causes)) for one in pairs)
    weights = weights_report(held, *sides)
    of_weights = weight_sentences(weights, " ".join(map(str, ends.more)))
    ends = replace(ends, more=(*ends.more, *unwritten(pairs, *sides), *of_weights))
    unpaired_a = unpaired_of(side_a, alignment.alone_a, "B", unread)
    unpaired_b = unpaired_of(side_b, alignment.alone_b, "A", unread)
    infos = side_a.info, side_b.info
    report = DiffReport(
        *infos,
        pairs=pairs,
        unpaired_a=unpaired_a,
        unpaired_b=unpaired_b,
        paragraphs=(
            *known_sentences(side_a.known),
            *paragraphs(pairs, unpaired_a, unpaired_b, *infos, of_outputs(pairs, ends)),
        ),
        forwards=(side_a.forwards, side_b.forwards),
        seed=seed,
        command=command,
        environment=environment() | {"notes": [*notes_of_sides(*sides), *ends.notes, *notes_of_ranks(*sides, places)]},
        fail_on=fail_on,
        outputs=ends.outputs,
        first_module=ends.chain.entries[0].module if ends.chain.entries else None,
        outputs_from=since_of(ends.chain),
        outputs_follow=ends.follow,
        outputs_missing=ends.missing,
        module_causes=tuple(
            replace(cause, fix=worded(cause.fix, cause.name, written)) if isinstance(cause.fix, Message) else cause
            for cause in ends.causes
        ),
        weights=weights,
    )
    if report.same and (sentence := inputs_sentence(side_a.inputs, side_b.inputs)) is not None:
        report = replace(report, paragraphs=(*report.paragraphs, sentence))
    return with_gradients(report, side_a, side_b) if backward else report


# -- the pairs ---------------------------------------------------------------------------------------------------------


def _compared(
    a: ModelSide, b: ModelSide, alignment: Alignment, kv_scale: float | None, held: HeldWeights | None
) -> tuple[tuple[PairDiff, ...], OutputComparison]:
    """Return every pair judged, and the outputs; each pair has a difference of its own or follows from another."""
    cuts = [side.cuts or (None,) * len(side.calls) for side in (a, b)]
    calls = [cut_alike(a.calls[i], b.calls[j], cuts[0][i], cuts[1][j]) for i, j in alignment.pairs]
    judged: list[JudgedPair] = []
    work = SearchWork(SEARCH_NUMBERS)
    for done, (one, other) in enumerate(calls):
        report_progress(Message("progress.attentions"), done, len(calls))
        # Layers mostly share a formula: that of the latest judged pair is tried first.
        earlier = next((known.sides for known in reversed(judged) if known.sides), None)
        declared = (a.declared.get(name_of(one), ""), b.declared.get(name_of(other), ""))
        judged.append(_judged(one, other, earlier, declared, kv_scale, work))
    refuse_unlike(judged)
    blind = rows_left_out(a, b, judged)
    returned, ends = pair_outputs(a, b, blind)
    # Modules are recorded only if the outputs differ clearly: it costs memory, and only `follow_differences` needs it.
    far = any(both.is_apart(UNMEASURED_ROUNDINGS * math.sqrt(len(calls) + 1)) for both in returned)
    entering = compare_inputs(a, b, calls, blind, listen=far)
    judged = judged_as_they_leave(a, b, calls, judged, entering, blind)
    judged = with_picked_masks(a, b, calls, judged, entering, kv_scale)
    pairs: list[PairDiff] = []
    origin: str | None = None
    for (one, other), own, comes in zip(calls, judged, entering, strict=True):
        pair = _pair(one, other, own, comes, origin)
        if origin is None and pair.same is False:
            origin = name_of(one)
        pairs.append(pair)
    exact = [exact_of(side, far) for side in (a, b)] if any(both.is_apart() for both in returned) else None
    outputs = compare_outputs(returned, exact, len(a.calls))
    ends = replace(ends, outputs=(*outputs, *ends.outputs))
    differ = [one.difference or 0.0 for one in outputs if one.same is False]
    other_shapes = any(one.same is False for one in ends.outputs) or (not returned and bool(a.outputs and b.outputs))
    if not differ and not other_shapes and not any(is_reached(pair) for pair in pairs):
        return tuple(pairs), ends
    ends = replace(ends, more=tuple(held_weights(a, pairs, [own.sides for own in judged])))
    chain = follow_differences(a, b, pairs, blind, max(differ, default=0.0), held)
    if chain.entries and not chain.beside:
        where = chain.entries[0].where
        pairs = [_placed(pair, comes, where) for pair, comes in zip(pairs, entering, strict=True)]
    return tuple(pairs), replace(ends, chain=chain)


def _placed(pair: PairDiff, entering: Entering, where: str) -> PairDiff:
    """Return the pair with the place where the difference of its input enters."""
    causes = (entering.cause(where) if cause.name == "input" else cause for cause in pair.causes)
    return replace(pair, causes=tuple(filter(None, causes)))


def _judged(
    a: CallTensors,
    b: CallTensors,
    earlier: Sides | None,
    declared: tuple[str, str],
    kv_scale: float | None,
    work: SearchWork,
) -> JudgedPair:
    """Return `judge_pair` of the pair, unless both sides have NaN."""
    lost = [first_nan((call,)) for call in (a, b)]
    if lost[0] is not None and lost[1] is not None:
        stages = {"stage": stage_word(lost[0][1]), "other": stage_word(lost[1][1])}
        return JudgedPair(None, reason=Message("compare.pair.nan", **stages))
    return judge_pair(a, b, CAUSES, earlier, declared, kv_scale, work)


def _pair(a: CallTensors, b: CallTensors, judged: JudgedPair, entering: Entering, origin: str | None) -> PairDiff:
    causes = [cause for _, explained in judged.parts for cause in explained.causes]
    causes = [with_lines(with_cut_off(cause, judged.sides, judged.seen), a, b) for cause in causes]
    after, before, own = judged.after, judged.before, judged.same
    if after is not None and after.within and any(cause.name != UNKNOWN_CAUSE for cause in causes):
        causes = [
            cause for cause in causes if cause.name != UNKNOWN_CAUSE
        ]  # a rest in one part is rounding over the whole
    if entering.by_v and own is False and entering.stage.same is False:
        # the input was inferred from v, and v may differ for a cause of its own
        entering = replace(entering, stage=replace(entering.stage, same=None))
    comes_in, follows = entering.cause(), None
    if comes_in is not None and origin is None and own is not None:
        causes.insert(0, comes_in)
        own = False
    elif comes_in is not None and own is True:
        follows, own = origin, False
    first = None
    if own is False:
        first = first_stage([cause.stage for cause in causes] + list(filter(None, [first_difference(judged)])))
        first = "input" if comes_in is not None and (follows is not None or origin is None) else first
    rows, left_out = (0, 0) if judged.rows is None else (judged.rows.numel(), int((~judged.rows).sum()))
    share = None
    if before is not None and after is not None and not before.within:
        share = share_gone(before, after) if before.size else None
    shown = (judged.sides, judged.seen) if own is False and judged.sides and judged.seen else None
    return PairDiff(
        site_a=a.site,
        site_b=b.site,
        index_a=a.index,
        index_b=b.index,
        same=own,
        first_stage=first,
        follows_from=follows,
        causes=tuple(causes),
        residue=None if after is None else after.largest,
        allowed=None if after is None else after.allowed,
        difference=None if before is None else before.largest,
        explained=share,
        stages=ordered((entering.stage, *judged.stages), {cause.stage for cause in causes}, rows, left_out),
        formula_a=None if a.call is None else a.call.formula,
        formula_b=None if b.call is None else b.call.formula,
        reason=judged.reason,
        scatter=() if shown is None else scatter_of(*shown),
        picture=None if shown is None else picture_of(*shown),
        rows=rows,
        rows_left_out=left_out,
    )

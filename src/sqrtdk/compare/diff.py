"""`diff`: run two implementations of one model on the same inputs, and say why they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sqrtdk._environment import environment
from sqrtdk.audit.own_module import as_inputs
from sqrtdk.compare.align import Alignment, align, name_of
from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.cutting import cut_alike
from sqrtdk.compare.entering import Entering, compare_inputs
from sqrtdk.compare.pair import Judged, first_difference, judge
from sqrtdk.compare.picture import picture_of, scatter_of
from sqrtdk.compare.records import FAIL_ON, Cause, DiffReport, PairDiff, StageDiff, Unpaired
from sqrtdk.compare.sides import Given, Side, open_side
from sqrtdk.compare.suspect import STAGES
from sqrtdk.compare.words import paragraphs
from sqrtdk.errors import InvalidValueError
from sqrtdk.models.limits import check_seed, check_sizes
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import Inputs
from sqrtdk.tracing.tensors import CallTensors

_LARGEST_MAP = 2**20  # bytes


def diff(
    a: Given,
    b: Given,
    inputs: Any = None,
    *,
    inputs_b: Any = None,
    mapping: Mapping[str, str] | str | Path | None = None,
    attn_a: str | None = None,
    attn_b: str | None = None,
    dtype_a: str | torch.dtype | None = None,
    dtype_b: str | torch.dtype | None = None,
    device_a: str | None = None,
    device_b: str | None = None,
    text: str | Path | None = None,
    input_file: str | Path | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    fail_on: str = "different",
    command: str = "",
) -> DiffReport:
    """Compare two implementations of one model, attention by attention, and name the causes of every difference.

    Both run on the same inputs. Every attention of A is paired with one of B; A's formula is computed in float64 on
    what B had at every stage, and where that is not B's result within the rounding of both, the causes are asked: one
    is reported where the change that it stands for, applied to A, makes the difference go away.

    Args:
        a: A module, or what `check` takes, a trace file (.safetensors), an ONNX graph (.onnx), an exported program
            (.pt2).
        b: The other side.
        inputs: A dict or tuple for forward, or one tensor; None makes inputs of the right kind for A.
        inputs_b: The same for B, where its forward takes others; None gives it A's.
        mapping: From a site of A to the site of B that belongs to it, "site#index" for others than the first, or a
            JSON file with that; for what can't be told from names, order and shapes.
        attn_a: Attention implementation of A, "eager" or "sdpa"; None is its own.
        attn_b: Of B.
        dtype_a: Of A, where it is given by name.
        dtype_b: Of B.
        device_a: Of A, where it is given by name.
        device_b: Of B.
        text: UTF-8 file for the tokenizer of A.
        input_file: Safetensors with the inputs.
        batch: Rows of made-up inputs, default 1.
        seq_len: Tokens a row of made-up inputs.
        seed: For weights, inputs and the runs.
        trust_remote_code: Let a model's own Python files run.
        fail_on: What makes `exit_code` 1: "different"; "unmeasured", which is also what could not be judged; "never".
        command: What the user typed, for the report.

    Returns:
        The report.

    Raises:
        ModelError: A side can't be built, its forward raises, or no attention runs in it.
        InvalidValueError: The sides have no call in common, NaN stands on one side alone, or an option or the map is
            wrong.

    Example:
        >>> report = diff("demo", "demo:unscaled", seq_len=16)
        >>> report.same
        False
    """
    common: dict[str, Any] = {"batch": batch, "seq_len": seq_len, "seed": seed, "trust_remote_code": trust_remote_code}
    options_a = LoadOptions(attn=attn_a, dtype=dtype_a, device=device_a, text=text, input_file=input_file, **common)
    options_b = LoadOptions(attn=attn_b, dtype=dtype_b, device=device_b, **common)
    return diff_with(
        a, b, inputs, options_a, options_b, inputs_b=inputs_b, mapping=mapping, fail_on=fail_on, command=command
    )


def diff_with(
    a: Given,
    b: Given,
    inputs: Any,
    options_a: LoadOptions,
    options_b: LoadOptions,
    *,
    inputs_b: Any = None,
    mapping: Mapping[str, str] | str | Path | None = None,
    fail_on: str = "different",
    command: str = "",
) -> DiffReport:
    """`diff`, with the options of loading each side in one; it says what they are."""
    if fail_on not in FAIL_ON:
        raise InvalidValueError(f"fail_on is {fail_on!r}", hint=f"Use one of: {', '.join(FAIL_ON)}.")
    for options in (options_a, options_b):
        check_seed(options.seed)
        check_sizes(options.rows, options.seq_len)
    named = read_map(mapping)
    given = None if inputs is None else as_inputs(inputs)
    given_b = None if inputs_b is None else as_inputs(inputs_b)
    side_a, side_b = _both(a, b, given, given_b, options_a, options_b)
    _refuse_nan(side_a, side_b)
    alignment = align(side_a.calls, side_b.calls, named)
    _refuse_strangers(side_a, side_b, alignment, named)
    pairs = _pairs(side_a, side_b, alignment)
    unpaired_a = _alone(side_a, alignment.alone_a, "B")
    unpaired_b = _alone(side_b, alignment.alone_b, "A")
    return DiffReport(
        a=side_a.info,
        b=side_b.info,
        pairs=pairs,
        unpaired_a=unpaired_a,
        unpaired_b=unpaired_b,
        paragraphs=paragraphs(pairs, unpaired_a, unpaired_b, side_a.info, side_b.info),
        forwards=(side_a.forwards, side_b.forwards),
        seed=options_a.seed,
        command=command,
        environment=environment(),
        fail_on=fail_on,
    )


def read_map(mapping: Mapping[str, str] | str | Path | None) -> dict[str, str]:
    """The map of sites, from a mapping or a JSON file.

    Raises:
        InvalidValueError: it is no JSON object of names to names.
    """
    if mapping is None:
        return {}
    hint = 'Write an object of names: {"layers.0.attn": "h.0.attn"}.'
    if isinstance(mapping, str | Path):
        path = Path(mapping)
        try:
            if path.stat().st_size > _LARGEST_MAP:
                raise InvalidValueError(f"the map {path} has more than {_LARGEST_MAP} bytes", hint=hint)
            mapping = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidValueError(f"the map {path} can't be read: {error.strerror}", hint=hint) from error
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise InvalidValueError(f"the map {path} is no JSON", hint=hint) from error
    if not isinstance(mapping, Mapping) or not all(isinstance(x, str) for pair in mapping.items() for x in pair):
        raise InvalidValueError("the map is no object of names", hint=hint)
    return dict(mapping)


def _both(
    a: Given, b: Given, inputs: Inputs | None, inputs_b: Inputs | None, options_a: LoadOptions, options_b: LoadOptions
) -> tuple[Side, Side]:
    """Both sides, run; the one without a forward of its own gets no inputs, and gives none."""
    side_a = open_side(a, "A", inputs, options_a, other=None)
    side_b = open_side(b, "B", inputs_b, options_b, other=side_a.inputs)
    return side_a, side_b


def _refuse_nan(a: Side, b: Side) -> None:
    """Refuse numbers that are none on one side alone: they are no difference of rounding, and hide every other.

    Raises:
        InvalidValueError: one side has NaN and the other none.
    """
    first = [_first_nan(side.calls) for side in (a, b)]
    if (first[0] is None) == (first[1] is None):
        return
    label, other = ("A", "B") if first[0] is not None else ("B", "A")
    call, name, count = first[0] or first[1]  # type: ignore[misc]
    raise InvalidValueError(
        f"{label} has NaN, first in the {name} at {name_of(call)} ({count} numbers), and {other} has none",
        hint=f"Find out what makes NaN in {label} first: `sqrtdk check` names the site and the tensor.",
    )


def _first_nan(calls: Sequence[CallTensors]) -> tuple[CallTensors, str, int] | None:
    for call in calls:
        for name, tensor in (
            ("query", call.query.values),
            ("key", call.key.values),
            ("value", call.value.values),
            ("output", call.output),
        ):
            count = int(tensor.isnan().sum()) if tensor.is_floating_point() else 0
            if count:
                return call, name, count
    return None


def _refuse_strangers(a: Side, b: Side, alignment: Alignment, mapping: Mapping[str, str]) -> None:
    """Refuse two models of which no call, or not every call, can belong together.

    Raises:
        InvalidValueError: no call of A has a partner in B; or models with other numbers of layers.
    """
    counts = [len(side.calls) for side in (a, b)]
    if not alignment.pairs:
        shapes = [_sizes(side.calls[0]) for side in (a, b)]
        raise InvalidValueError(
            f"no attention of A belongs to one of B: A's first is {shapes[0]}, B's {shapes[1]}",
            hint="Give two implementations of one model, and the same inputs; or pair sites with --map FILE.",
        )
    models = all(side.info.kind == "model" for side in (a, b))
    if models and not mapping and counts[0] != counts[1] and (alignment.alone_a or alignment.alone_b):
        raise InvalidValueError(
            f"A runs {counts[0]} attentions, B {counts[1]}",
            hint="Give two models of as many layers; to compare a part of them, pair sites with --map FILE.",
        )


def _sizes(call: CallTensors) -> str:
    record = call.call
    if record is None:
        batch, heads, rows = call.query.values.shape[:3]
        return f"batch {batch}, {heads} heads, {rows} rows, {call.key.values.shape[-2]} keys"
    return f"batch {record.batch}, {record.heads} heads, {record.query_len} rows, {record.key_len} keys"


def _alone(side: Side, places: Sequence[int], other: str) -> tuple[Unpaired, ...]:
    calls = [side.calls[place] for place in places]
    formulas = [None if call.call is None else call.call.formula for call in calls]
    alone = [
        Unpaired(call.site, call.index, formula, f"no attention of {other} belongs to it")
        for call, formula in zip(calls, formulas, strict=True)
    ]
    return (*alone, *side.missed)


# -- the pairs ---------------------------------------------------------------------------------------------------------


def _pairs(a: Side, b: Side, alignment: Alignment) -> tuple[PairDiff, ...]:
    """Every pair judged; what comes into a pair differs by itself, or follows from an earlier one."""
    cuts = [side.cuts or (None,) * len(side.calls) for side in (a, b)]
    calls = [cut_alike(a.calls[i], b.calls[j], cuts[0][i], cuts[1][j]) for i, j in alignment.pairs]
    judged = [judge(one, other, CAUSES) for one, other in calls]
    entering = compare_inputs(a, b, calls, judged)
    pairs: list[PairDiff] = []
    origin: str | None = None
    for (one, other), own, comes in zip(calls, judged, entering, strict=True):
        pair = _pair(one, other, own, comes, origin)
        if origin is None and pair.same is False:
            origin = name_of(one)
        pairs.append(pair)
    return tuple(pairs)


def _pair(a: CallTensors, b: CallTensors, judged: Judged, entering: Entering, origin: str | None) -> PairDiff:
    causes = [cause for _, explained in judged.parts for cause in explained.causes]
    own = judged.same
    follows = None
    if entering.same is False and origin is None and own is not None:
        causes.insert(0, Cause("input", entering.a, entering.b, 1.0, entering.text, "input"))
        own = False
    elif entering.same is False and own is True:
        follows, own = origin, False
    first = first_difference(judged)
    if entering.same is False and (follows is not None or origin is None):
        first = "input"
    after, before = judged.after, judged.before
    share = None
    if before is not None and after is not None and not before.within:
        share = 1 - after.size / before.size if before.size else None
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
        stages=_ordered((entering.stage, *judged.stages)),
        formula_a=None if a.call is None else a.call.formula,
        formula_b=None if b.call is None else b.call.formula,
        reason=judged.reason,
        scatter=() if own is not False or judged.sides is None else scatter_of(judged),
        picture=None if own is not False or judged.sides is None else picture_of(judged),
    )


def _ordered(stages: Sequence[StageDiff]) -> tuple[StageDiff, ...]:
    known = {stage.stage: stage for stage in stages}
    return tuple(known[name] if name in known else StageDiff(name, None, reason="not recorded") for name in STAGES)

"""The display of a pair: each side's formula in short words, the stages in order, sample logits, both masks.

It also completes causes for display: the share of k or v that overflows a dtype (as in a quantised cache), and the
lines of code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.inside.call_numbers import ObservedVector
from sqrtdk.compare.inside.compute import MOST_STORED, apply_step, compute_logits, parts_of, repeat_heads
from sqrtdk.compare.inside.program import Formula, OpaqueStep, RoundingStep
from sqrtdk.compare.inside.suspect import NO_VALUE, QKV_LETTERS, STAGES, Sides, path_of
from sqrtdk.compare.numbers import span
from sqrtdk.compare.records import Cause, MaskPicture, Scatter, StageDiff
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.tensors import CallTensors

SOFTCAP_PLACES = {"product": "stages.what.before_scale", "masked": "stages.what.after_mask"}  # of a softcap
TERM_WORDS = {  # of biases and masks that have a word of their own
    "bias": "stages.bias",
    "alibi": "stages.what.alibi",
    "relative": "stages.what.relative",
    "mask": "stages.mask",
    "causal": "stages.what.causal",
    "causal_lower_right": "stages.what.causal_lower_right",
    "padding": "causes.padding.title",
    "window": "causes.window.title",
}
CODE_NAMES = {  # stages of a record, best first: where the stage is computed, or behind which it is missing
    "query": (("q", "projection"),),
    "key": (("k", "projection"),),
    "query norm": (("q", "norm"), ("q", "projection")),
    "key norm": (("k", "norm"), ("k", "projection")),
    "query rotation": (("q", "rope"), ("q", "norm"), ("q", "projection")),
    "key rotation": (("k", "rope"), ("k", "norm"), ("k", "projection")),
    "scale": (("logits", "scale"), ("q", "scale"), ("k", "scale"), ("logits", "product")),
    "softcap": (("logits", "softcap"), ("logits", "product")),
    "bias": (("logits", "bias"), ("logits", "product")),
    "mask": (("logits", "mask"), ("logits", "product")),
    "sinks": (("logits", "sinks"), ("logits", "product")),
    "value": (("v", "projection"),),
    "weights": (("weights", "softmax"),),
}
# by the code of `head_order`: what is written there in the wrong way, see `Vector.lines`
ORDER_LINES = {
    "qkv_mixed": "split",
    "parts_mixed": "split",
    "heads_mixed": "split",
    "channel_first": "split",
    "view": "split",
    "heads": "order",
    "channels": "order",
}
DATA_CAUSES = ("weights", "input")  # causes that come from tensors, not from a line of an attention's code
# a scale maps its own maximum to the largest stored number; rounding may push that slightly beyond
ROUNDED_MAXIMUM = 1 + 2.0**-20
MOST_HEADS_SHOWN = 4  # heads whose logits are shown
MOST_POINTS = 200  # points shown for each head
PICTURE_SIDE = 48  # rows and keys of a mask picture


def stage_text(stage: str, sides: Sides) -> StageDiff:
    """Return a stage with what both formulas have for it, as short text; `same` is None.

    Args:
        stage: a stage of the formula: "scale", "softcap", "bias", "mask", "sinks", "weights".
        sides: both programs; if a formula is unknown, the stage has a reason and no text.
    """
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None:
        return StageDiff(stage, None, reason=Message("compare.formula.unknown"))
    old, new = _STAGE_TEXTS[stage](a), _STAGE_TEXTS[stage](b)
    # how many (row, key) entries of the masks differ
    if stage == "mask" and (count := int((_visible(a) ^ _visible(b)).sum())):
        new = Message("stages.what.keys_differ", mask=new, count=count)
    return StageDiff(stage, None, a=old, b=new)


def _visible(formula: Formula) -> Tensor:
    """Return the visible keys with four axes; all axes have size 1 without a mask."""
    if formula.visible is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return formula.visible.bool()[(None,) * (4 - formula.visible.dim())]


def factor_text(value: Tensor | float) -> str:
    """Return a factor as short text.

    Example:
        >>> factor_text(0.125), factor_text(torch.tensor([1.0, 2.0]))
        ('0.125', '1 to 2')
    """
    if not isinstance(value, Tensor):
        return f"{value:.4g}"
    least, most = float(value.min()), float(value.max())
    return f"{least:.4g}" if least == most else span(f"{least:.4g}", f"{most:.4g}")


def _softcap(formula: Formula) -> str:
    if formula.softcap is None:
        return Message(NO_VALUE)
    cap = f"{formula.softcap:.4g}"
    cap = f"z * tanh(z / {cap})" if formula.softcap_by_logits else cap
    return Message(SOFTCAP_PLACES[formula.softcap_at], cap=cap) if formula.softcap_at in SOFTCAP_PLACES else cap


def _bias(formula: Formula) -> str:
    if formula.bias is None:
        return Message(NO_VALUE)
    words = {"bias": _term_word(formula.bias_name), "number": factor_text(formula.bias)}
    if formula.bias_by == 1:
        return Message("stages.what.bias", **words)
    return Message("stages.what.bias_times", factor=f"{formula.bias_by:.4g}", **words)


def _mask(formula: Formula) -> str:
    if formula.visible is None:
        return Message(NO_VALUE)
    share = float(formula.visible.double().mean())
    fill = formula.fill * formula.fill_by
    shown = "-inf" if fill == float("-inf") else f"{fill:.4g}"
    return Message("stages.what.mask", mask=_term_word(formula.mask or "mask"), share=f"{share:.1%}", fill=shown)


def _weights(formula: Formula) -> str:
    kinds: list[str] = []
    if formula.logits_dtype is not None:
        kinds.append(Message("stages.what.logits_in", dtype=formula.logits_dtype))
    if formula.weights_dtype is not None:
        kinds.append(Message("stages.what.weights_in", dtype=formula.weights_dtype))
    if formula.kept is not None:
        kinds.append(f"dropout {formula.dropout:g}")
    return joined(kinds, "clause") if kinds else "softmax"


def _term_word(name: str) -> str:
    """Return the name of a bias or mask in words, if it has any."""
    return Message(TERM_WORDS[name]) if name in TERM_WORDS else name


_STAGE_TEXTS: dict[str, Callable[[Formula], str]] = {
    "scale": lambda formula: factor_text(formula.scale * formula.after),
    "softcap": _softcap,
    "bias": _bias,
    "mask": _mask,
    "sinks": lambda formula: Message(NO_VALUE) if formula.sinks is None else factor_text(formula.sinks),
    "weights": _weights,
}


def hidden_rows(formula: Formula | None, batch: int, rows: int) -> Tensor:
    """Return booleans (B, L), True where the row of some head sees no key.

    Implementations may output anything there.

    Args:
        formula: formula whose mask counts; None for no mask.
        batch: B.
        rows: L.
    """
    visible = _visible(Formula() if formula is None else formula)
    return (~visible.any(-1)).any(1).expand(batch, rows)


def _off(stage: StageDiff) -> tuple[bool, float]:
    """Return whether a stage differs, and by how many times the allowed rounding."""
    return stage.same is False, stage.largest / stage.allowed if stage.largest and stage.allowed else 0.0


def ordered(stages: Sequence[StageDiff], caused: Collection[str], rows: int, left_out: int) -> tuple[StageDiff, ...]:
    """Return one entry for each of `STAGES`, in this order; stages that are not known have `same` None and a reason.

    Args:
        stages: known stages. Of two with one name, the one that differs counts, or the larger difference.
        caused: names of stages with a cause; these differ.
        rows: number of all rows.
        left_out: number of rows that were not compared; the output's reason names it.
    """
    known: dict[str, StageDiff] = {}
    for stage in stages:  # v has two stages of one name, as projected and as used: the larger difference counts
        if stage.stage not in known or _off(stage) >= _off(known[stage.stage]):
            known[stage.stage] = replace(stage, same=False) if stage.stage in caused else stage
    if left_out and "output" in known:
        first = known["output"].reason
        lost = Message("compare.stage.rows_left_out", count=f"{left_out:,}", rows=f"{rows:,}")
        known["output"] = replace(known["output"], reason=joined([first, lost]) if first else lost)
    lost = Message("compare.stage.not_recorded")
    return tuple(known[name] if name in known else StageDiff(name, None, reason=lost) for name in STAGES)


def with_cut_off(cause: Cause, sides: Sides | None, seen: Mapping[str, ObservedVector] | None) -> Cause:
    """Return the cause with the share of numbers beyond the range of the dtype, if it is a rounding of k or v.

    The share is added to the text, and "cut_off" to the codes. Other causes are returned unchanged, and so is one
    without such numbers.

    Args:
        cause: any cause.
        sides: both programs; None if unknown.
        seen: q, k and v of B; None if unknown.
    """
    if cause.name != "rounding" or cause.stage not in QKV_LETTERS or sides is None or seen is None:
        return cause
    paths = [path_of(program, cause.stage) for program in (sides.b, sides.a)]
    path = next((path for path in paths if any(isinstance(step, RoundingStep) for step in path.steps)), None)
    values = seen[cause.stage].projected
    if path is None or values is None:
        return cause
    for step in path.steps:
        # The first cast that overflows decides: later steps see what it has already cut off.
        if isinstance(step, OpaqueStep):
            break
        most = MOST_STORED.get(step.dtype) if isinstance(step, RoundingStep) else None
        if isinstance(step, RoundingStep) and most is not None:
            share = float(((values * step.by).abs() > most * ROUNDED_MAXIMUM).double().mean())
            limit = most / step.by * path.scaled
            if not share:
                return cause
            by_scale = Message("causes.rounding.times_a_scale", most=f"{most:g}")
            beyond = by_scale if isinstance(limit, Tensor) else f"{limit:.6g}"
            words = {"share": f"{100 * share:.2g}", "parts": QKV_LETTERS[cause.stage], "limit": beyond}
            text = Message("causes.rounding.cut_off", rounding=cause.text, **words)
            return replace(cause, text=text, codes=("cut_off", *cause.codes))
        values = apply_step(step, values)
    return cause


def with_lines(cause: Cause, a: CallTensors, b: CallTensors) -> Cause:
    """Return the cause with the lines of code of both sides that compute its stage: `at_a` and `at_b`.

    If a side lacks the step, its line is that of a step before it; None if unknown. Causes in the data have no lines.

    Args:
        cause: any cause.
        a: A's call.
        b: B's call.
    """
    if cause.name in DATA_CAUSES:
        return cause
    return replace(cause, at_a=_line(cause, a, cause.a), at_b=_line(cause, b, cause.b))


def _line(cause: Cause, tensors: CallTensors, value: str | float | None) -> str | None:
    if cause.name in ("group_order", "head_order") and (at := _line_of_heads(cause, tensors, value)) is not None:
        return at
    call = tensors.call
    if call is None:
        return None
    lines = {(x.where, x.name): x.at for x in reversed(call.stages)} | {("weights", "softmax"): call.softmax_at}
    lines |= {("v", name): at for name, at in tensors.value.lines.items()}
    places = CODE_NAMES.get(cause.stage, ())
    if cause.name == "length_factor" and places[:1] == CODE_NAMES["query rotation"][:1] and ("k", "scale") in lines:
        places = (("q", "scale"), *places)  # rope(q) * m, rope(k) * m: where the amplitude is multiplied
    return next((at for place in places if (at := lines.get(place)) is not None), None)


def _line_of_heads(cause: Cause, tensors: CallTensors, value: str | float | None) -> str | None:
    """Return where a side splits, orders or repeats the heads, or else projects them; None if unknown."""
    lines = {"query": tensors.query, "key": tensors.key, "value": tensors.value}[cause.stage].lines
    if cause.name == "head_order":
        names = [ORDER_LINES[code] for code in cause.codes if code in ORDER_LINES]
        return next((lines[name] for name in (*names, "projection") if name in lines), None)
    first = [int(head) for head in dict.fromkeys(str(value).split()) if head.isdecimal()]
    if first == sorted(first):  # 0 1 0 1; 1 1 0 0 is an order
        grouped = tensors.query.lines.get("grouped")
        if grouped is not None and "repeat" not in lines:
            return grouped
        return lines.get("repeat", lines.get("projection"))
    return next((lines[name] for name in ("order", "repeat", "projection") if name in lines), None)


# -- for the eyes: logits of both sides beside one another, and the keys that one mask alone shows ---------------------


def scatter_of(sides: Sides, seen: Mapping[str, ObservedVector]) -> tuple[Scatter, ...]:
    """Return logits of both sides at visible keys, both formulas applied to B's q and k.

    They are at most 200 entries for each of the first 4 heads, within the first sequence and its first 48 rows and
    keys.

    Args:
        sides: both programs; () is returned if a formula is unknown.
        seen: q, k and v of B.
    """
    if sides.a.formula is None or sides.b.formula is None:
        return ()
    query = seen["query"].used[:1, :, :PICTURE_SIDE]
    z = []
    for program, formula in ((sides.a, sides.a.formula), (sides.b, sides.b.formula)):
        key = repeat_heads(seen["key"].used[:1], query.shape[1], program.key.heads)[:, :, :PICTURE_SIDE]
        z.append(compute_logits(query, key, parts_of(formula, _first))[0])
    found = []
    for head, (a, b) in enumerate(zip(*(both[:MOST_HEADS_SHOWN] for both in z), strict=True)):
        # Hidden keys have -inf, or a fill of -1e4 and below; no logit of a visible key is that low.
        rows, keys = torch.nonzero((a > -1e4) & (b > -1e4), as_tuple=True)
        if not len(rows):
            continue
        pick = torch.linspace(0, len(rows) - 1, min(MOST_POINTS, len(rows))).long()
        rows, keys = rows[pick], keys[pick]
        points = [tuple(float(f"{value:.6g}") for value in x[rows, keys].tolist()) for x in (a, b)]
        found.append(Scatter(head, tuple(rows.tolist()), tuple(keys.tolist()), points[0], points[1]))
    return tuple(found)


def _first(value: Tensor) -> Tensor:
    """Return the part for the first sequence and the first `PICTURE_SIDE` rows and keys."""
    return value[(None,) * (4 - value.dim())][:1, :, :PICTURE_SIDE, :PICTURE_SIDE]


def picture_of(sides: Sides, seen: Mapping[str, ObservedVector]) -> MaskPicture | None:
    """Return a picture of at most 48 rows and keys of the first sequence and head whose masks differ.

    Args:
        sides: both programs.
        seen: q, k and v of B.

    Returns:
        The picture; None if all masks are equal, or if a formula is unknown.
    """
    if sides.a.formula is None or sides.b.formula is None:
        return None
    shape = (*seen["query"].used.shape[:3], seen["key"].used.shape[2])
    a, b = (_visible(formula).expand(shape) for formula in (sides.a.formula, sides.b.formula))
    unlike = (a != b).nonzero()
    if not len(unlike):
        return None
    batch, head, row, key = (int(at) for at in unlike[0])
    first_row, first_key = max(0, min(row - 2, shape[2] - PICTURE_SIDE)), max(0, min(key - 2, shape[3] - PICTURE_SIDE))
    cut = slice(first_row, first_row + PICTURE_SIDE), slice(first_key, first_key + PICTURE_SIDE)
    shown = [x[batch, head][cut].tolist() for x in (a, b)]
    marks = {(True, True): "+", (True, False): "a", (False, True): "b", (False, False): "."}
    rows = ["".join(marks[both] for both in zip(*lines, strict=True)) for lines in zip(*shown, strict=True)]
    return MaskPicture(first_row, first_key, tuple(rows))

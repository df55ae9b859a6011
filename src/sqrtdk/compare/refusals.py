"""What two sides are refused for once they have run: one has NaN, or they are not one model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sqrtdk._sites import ROOT_NAME
from sqrtdk.compare.align import Alignment, align, cut_alike, name_of, other_shapes, sizes_of
from sqrtdk.compare.inside.pair import JudgedPair
from sqrtdk.compare.sides import ModelSide
from sqrtdk.errors import InvalidValueError
from sqrtdk.tracing.tensors import CallTensors


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


def refuse_shapes(a: ModelSide, b: ModelSide, mapping: Mapping[str, str]) -> None:
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

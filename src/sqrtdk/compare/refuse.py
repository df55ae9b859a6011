"""What two sides are refused for once they have run: numbers that are none, and models that are not one model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sqrtdk._sites import ROOT
from sqrtdk.compare.align import Alignment, name_of
from sqrtdk.compare.pair import Judged
from sqrtdk.compare.sides import Side
from sqrtdk.errors import InvalidValueError
from sqrtdk.tracing.tensors import CallTensors


def refuse_nan(a: Side, b: Side) -> None:
    """Refuse numbers that are none on one side alone: they are no difference of rounding, and hide every other.

    Raises:
        InvalidValueError: one side has NaN and the other none.
    """
    first = [first_nan(side.calls) for side in (a, b)]
    if (first[0] is None) == (first[1] is None):
        return
    label, other = ("A", "B") if first[0] is not None else ("B", "A")
    call, name, count = first[0] or first[1]  # type: ignore[misc]
    raise InvalidValueError(
        f"{label} has NaN, first in the {name} at {name_of(call) or ROOT} ({count} numbers), and {other} has none",
        hint=f"Find out what makes NaN in {label} first: `sqrtdk check` names the site and the tensor.",
    )


def first_nan(calls: Sequence[CallTensors]) -> tuple[CallTensors, str, int] | None:
    """The first call with NaN in what is compared, the name of that tensor, and how many of its numbers are NaN."""
    for call in calls:
        for name, tensor in (
            ("query", call.query.values),
            ("key", call.key.values),
            ("value", call.value.values),
            ("output", call.output),
        ):
            if tensor.is_floating_point() and not math.isfinite(float(tensor.sum())):  # one pass, where none is NaN
                count = int(tensor.isnan().sum())
                if count:
                    return call, name, count
    return None


def refuse_strangers(a: Side, b: Side, alignment: Alignment, mapping: Mapping[str, str]) -> None:
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
    widths = [{call.output.shape[-1] for call in side.calls if call.missing is None} for side in (a, b)]
    if all(widths) and not widths[0] & widths[1]:
        raise InvalidValueError(
            f"heads of A are {_listed(widths[0])} wide, those of B {_listed(widths[1])}",
            hint="Give two implementations of one model: what heads of other widths give can't be compared.",
        )
    models = all(side.info.kind == "model" for side in (a, b))
    if models and not mapping and counts[0] != counts[1] and (alignment.alone_a or alignment.alone_b):
        raise InvalidValueError(
            f"A runs {counts[0]} attentions, B {counts[1]}",
            hint="Give two models of as many layers; to compare a part of them, pair sites with --map FILE.",
        )


def refuse_unlike(judged: Sequence[Judged]) -> None:
    """Refuse sides of which no pair has the shapes of one attention, as where keys have other numbers of heads.

    Raises:
        InvalidValueError: no pair has.
    """
    if judged and all(pair.strangers for pair in judged):
        raise InvalidValueError(
            f"no attention of A has the shapes of its partner in B: {judged[0].reason}",
            hint="Give two implementations of one model, or pair other sites with --map FILE.",
        )


def _listed(widths: set[int]) -> str:
    return " or ".join(map(str, sorted(widths)[:4]))


def _sizes(call: CallTensors) -> str:
    record = call.call
    if record is None:
        batch, heads, rows = call.query.values.shape[:3]
        return f"batch {batch}, {heads} heads, {rows} rows, {call.key.values.shape[-2]} keys"
    return f"batch {record.batch}, {record.heads} heads, {record.query_len} rows, {record.key_len} keys"

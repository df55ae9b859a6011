"""Cuts a call to its first rows and some of its heads, so that the rest can still be computed by itself.

A row needs every key that it sees, so all keys stay. A query head needs the key head that it reads. If all key heads
that stay keep the same number of query heads, they stay grouped; otherwise each query head gets a copy of its key head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message
from sqrtdk.recording.encode import is_empty
from sqrtdk.recording.records import Cut
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector

Take = Callable[[Tensor], Tensor]


def cut_call(
    call: CallTensors, rows: int | None = None, heads: Sequence[int] | None = None
) -> tuple[CallTensors, Cut | None]:
    """Return a call with its first rows and some of its query heads.

    Args:
        call: the whole call.
        rows: number of rows to keep, from the first on. None or too many keeps all.
        heads: numbers of the query heads to keep; None keeps all.

    Returns:
        The call, and a description of the cut, or None if nothing was cut.

    Raises:
        InvalidValueError: `rows` is below 1, or the call lacks a head.
    """
    if is_empty(call):
        return call, None
    of_heads, of_rows = call.query.values.shape[1:3]
    if rows is not None and rows < 1:
        raise InvalidValueError(
            Message("errors.options.rows", rows=rows, total=of_rows), hint=Message("errors.hint.keep_one")
        )
    rows = None if rows is None or rows >= of_rows else rows
    wanted = None if heads is None else sorted(set(heads))
    if wanted is not None and (not wanted or wanted[0] < 0 or wanted[-1] >= of_heads):
        raise InvalidValueError(
            Message(
                "errors.options.heads",
                names=", ".join(map(str, wanted)) or "none",
                site=repr(call.site),
                heads=of_heads,
            ),
            hint=Message("errors.hint.heads", last=of_heads - 1),
        )
    # All heads are no cut, and the file should not say that it is one.
    wanted = None if wanted == list(range(of_heads)) else wanted
    if rows is not None:
        call = _first_rows(call, rows, of_rows)
    if wanted is not None:
        call = _some_heads(call, wanted)
    if rows is None and wanted is None:
        return call, None
    return call, Cut(
        rows,
        None if rows is None else of_rows,
        None if wanted is None else tuple(wanted),
        None if wanted is None else of_heads,
    )


def _first_rows(call: CallTensors, rows: int, of: int) -> CallTensors:
    def take(tensor: Tensor) -> Tensor:
        # a tensor that broadcasts over rows, as a padding mask (B, 1, 1, S), has none to cut
        return tensor[..., :rows, :] if tensor.dim() >= 2 and tensor.shape[-2] == of else tensor

    query = _mapped(call.query, take)
    if query.projection is not None:
        # Rows of q alone: every row may see every key, so that k and v stay whole.
        query = replace(query, projection=replace(query.projection, input=query.projection.input[:, :rows]))
    return _with(call, query, take, call.lse if call.lse is None else call.lse[..., :rows])


def _some_heads(call: CallTensors, heads: list[int]) -> CallTensors:
    """Return a call with some of its query heads, and the key heads that these read."""
    of, kv = call.query.values.shape[1], call.key.values.shape[1]
    groups = [head // (of // kv) for head in heads]
    sizes = Counter(groups)
    # heads 0, 1, 4, 5 of groups (0, 1), (4, 5): key heads 0 and 2 stay shared; heads 0, 1, 4: key heads 0, 0, 2
    key_heads = list(sizes) if len(set(sizes.values())) == 1 else groups

    def of_query(tensor: Tensor) -> Tensor:
        # a tensor that broadcasts over heads stays whole
        return tensor[..., heads, :, :] if tensor.dim() >= 3 and tensor.shape[-3] == of else tensor

    def of_key(tensor: Tensor) -> Tensor:
        return tensor[..., key_heads, :, :] if tensor.dim() >= 3 and tensor.shape[-3] == kv else tensor

    query = _projected(_mapped(call.query, of_query), heads, of)
    key, value = (_projected(_mapped(part, of_key), key_heads, kv) for part in (call.key, call.value))
    less = _with(call, query, of_query, None if call.lse is None else call.lse[:, heads])
    terms = less.terms
    if terms is not None:
        terms = tuple(
            replace(term, value=term.value[heads]) if term.name == "sinks" and isinstance(term.value, Tensor) else term
            for term in terms
        )
    return replace(less, key=key, value=value, terms=terms)


def _projected(vector: Vector, heads: list[int], of: int) -> Vector:
    """Return the vector with only these heads in its projection's weight, bias and features."""
    projection = vector.projection
    # One head's projection may serve all heads (multi-query); then there is nothing to choose.
    if projection is None or projection.features.shape[0] != of:
        return vector
    some: Projection = replace(
        projection,
        weight=None if projection.weight is None else projection.weight[heads],
        bias=None if projection.bias is None else projection.bias[heads],
        features=projection.features[heads],
    )
    return replace(vector, projection=some)


def _mapped(vector: Vector, take: Take) -> Vector:
    return replace(
        vector,
        values=take(vector.values),
        factor=take(vector.factor) if isinstance(vector.factor, Tensor) else vector.factor,
        projected=None if vector.projected is None else take(vector.projected),
        steps=tuple(step if step.values is None else replace(step, values=take(step.values)) for step in vector.steps),
    )


def _with(call: CallTensors, query: Vector, take: Take, lse: Tensor | None) -> CallTensors:
    return replace(
        call,
        query=query,
        output=take(call.output),
        terms=None if call.terms is None else tuple(_term(term, take) for term in call.terms),
        kept=None if call.kept is None else take(call.kept),
        lse=lse,
    )


def _term(term: Term, take: Take) -> Term:
    return replace(term, value=take(term.value)) if isinstance(term.value, Tensor) and term.name != "sinks" else term


def parse_heads(text: str) -> list[int]:
    """Parse the command line's notation for heads.

    Raises:
        InvalidValueError: The text is not a list of numbers and ranges.

    Example:
        >>> parse_heads("0,4-6")
        [0, 4, 5, 6]
    """
    heads: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not all(end.isdecimal() and end.isascii() for end in ((first, last) if dash else (first,))):
            raise InvalidValueError(
                Message("errors.options.heads_numbers", text=repr(text[:100])), hint=Message("errors.hint.heads_list")
            )
        # nine digits exceed every head number and keep int() cheap; 0-999999999 must not fill the memory
        ends = int(first[:9]), int((last or first)[:9])
        if ends[1] - ends[0] > 2**16 or ends[1] < ends[0]:
            raise InvalidValueError(
                Message("errors.options.heads_range", text=repr(text[:100])), hint=Message("errors.hint.heads_range")
            )
        heads += range(ends[0], ends[1] + 1)
    return heads

"""Which rows of an attention are on which rank: tokens are recognised by the bits of their q and k.

A block of keys that goes round a ring, or comes out of a collective, is bit-equal to that of the rank that owns it.
Tokens may be alike (one word twice, without positions), so blocks are found as runs of tokens, never one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing import CallTensors
from sqrtdk.tracing.records import AttentionCall

Digests = tuple[bytes, ...]  # one for each token
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class BlockPrint:
    """The tokens of one call.

    Attributes:
        call: Place of the call among the calls of its rank.
        rows: Place of its first row among the rows of the attention, and the number of its rows.
        keys: Digests of its keys.
    """

    call: int
    rows: tuple[int, int]
    keys: Digests


@dataclass(frozen=True, slots=True)
class AttentionPrint:
    """What a rank tells of one attention before tensors are exchanged.

    Attributes:
        site: Module path.
        number: 0-based number among the attentions of this rank at the site. A ring's blocks are one attention.
        rows: Digests of q.
        blocks: The calls: one, or a call for each block of keys.
        sizes: Batch, heads, head dimension and dtype.
        split: Whether q, k or v travelled between ranks.
        inputs: Digest of what the projection of q takes; "" if that is unknown.
        weights: Digest of that projection's weights; "" if they are unknown.
    """

    site: str
    number: int
    rows: Digests
    blocks: tuple[BlockPrint, ...]
    sizes: tuple[int, int, int, str]
    split: bool
    inputs: str
    weights: str

    @property
    def key(self) -> tuple[str, int]:
        """Site and number."""
        return self.site, self.number

    @property
    def most_keys(self) -> Digests:
        """Digests of the longest block of keys."""
        return max((block.keys for block in self.blocks), key=len)


def digests(values: Tensor) -> Digests:
    """Return a digest of each token of q or k, over batch and heads.

    Args:
        values: (B, H, L, E).
    """
    rows = values.detach().cpu().permute(2, 0, 1, 3).flatten(1).contiguous()
    if not rows.numel():
        return ()
    data = rows.view(torch.uint8).numpy()
    return tuple(hashlib.blake2b(row.tobytes(), digest_size=_DIGEST_BYTES).digest() for row in data)


def run_start(run: Sequence[bytes], whole: Sequence[bytes]) -> int | None:
    """Return where the tokens of a run begin among those of a whole, or None if they are not in it in a row.

    Example:
        >>> run_start([b"b", b"c"], [b"a", b"b", b"c"]), run_start([b"c", b"b"], [b"a", b"b", b"c"])
        (1, None)
    """
    short, long = tuple(run), tuple(whole)
    starts = range(len(long) - len(short) + 1)
    return next((start for start in starts if long[start : start + len(short)] == short), None) if short else None


def prints_of(calls: Sequence[AttentionCall], tensors: Sequence[CallTensors]) -> list[AttentionPrint]:
    """Return the attentions of this rank; calls of one q with several blocks of keys are one attention.

    Args:
        calls: The calls of a trace, in order.
        tensors: Their tensors. A call whose tensors are missing is left out.
    """
    groups: dict[str, list[list[tuple[int, Digests]]]] = {}
    for at, (call, kept) in enumerate(zip(calls, tensors, strict=True)):
        if kept.missing is not None or kept.terms is None or kept.query.values.dim() != 4:
            continue
        rows, here = digests(kept.query.values), groups.setdefault(call.site, [])
        if here and call.part_of_row and _same_queries(rows, here[-1]):
            here[-1].append((at, rows))
        else:
            here.append([(at, rows)])
    return [_print_of(number, group, calls, tensors) for site in groups.values() for number, group in enumerate(site)]


def _same_queries(rows: Digests, group: list[tuple[int, Digests]]) -> bool:
    """Return whether a call's rows are among those of a group, or the other way round: zigzag rings use halves of q."""
    longest = max((own for _, own in group), key=len)
    return run_start(rows, longest) is not None or run_start(longest, rows) is not None


def _print_of(
    number: int, group: list[tuple[int, Digests]], calls: Sequence[AttentionCall], tensors: Sequence[CallTensors]
) -> AttentionPrint:
    rows = max((own for _, own in group), key=len)
    first = calls[group[0][0]]
    projection = tensors[group[0][0]].query.projection
    blocks = tuple(
        BlockPrint(at, (run_start(own, rows) or 0, len(own)), digests(tensors[at].key.values)) for at, own in group
    )
    return AttentionPrint(
        site=first.site,
        number=number,
        rows=rows,
        blocks=blocks,
        sizes=(first.batch, first.heads, first.head_dim, first.dtype),
        split=first.part_of_row is not None,
        inputs="" if projection is None else _digest(projection.input),
        weights="" if projection is None or projection.weight is None else _digest(projection.weight),
    )


def _digest(values: Tensor) -> str:
    """Return a digest of what this rank holds: to gather a DTensor is a collective, which the others may not enter."""
    local = getattr(values, "to_local", lambda: values)()
    data = local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=2 * _DIGEST_BYTES).hexdigest()

"""What several ranks may do otherwise than one process at an attention, each with the output that it would give.

An attention whose tokens lie on N ranks works with places, documents, windows, and blocks of keys. Let i, j be places
in the sequence, r(i) the rank that holds token i and l(i) its row there. Of a causal attention with documents d and a
window w the right mask is i >= j, d(i) = d(j), i - j < w. Faults that people make:

    causal by local rows       l(i) >= l(j)                      the mask of one shard is used for every block
    order of shards            p(i) >= p(j)                      p: places of another order, as zigzag taken as plain
    direction of the ring      the block of rank r + n is taken for that of rank r - n
    documents across shards    d(i) = d(j) is left out
    documents numbered anew    d counts from 0 on every rank
    window dropped             i - j < w is left out
    causal dropped             i >= j is left out
    padding                    padded keys are seen
    towards other ranks        one of these only where r(i) is not r(j): a ring masks its own block rightly
    keys left out, twice       r(j) is not s; e^z counts twice for r(j) = s
    scale of the sum           N o, or o / N
    positions from 0           q and k are rotated by l(i) in place of i

How blocks are joined wrongly is in `sqrtdk.laws.processes.merges`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.laws.processes.formula import RanksChange, RanksFormula, ranks_formula
from sqrtdk.laws.processes.merges import merge_changes
from sqrtdk.laws.processes.shards import TokenPlaces, token_orders
from sqrtdk.tracing.tensors import CallTensors

# What a mask may lack, and the name of that; () is a mask that lacks nothing.
_LACKS: dict[tuple[str, ...], str] = {
    ("documents",): "documents",
    ("window",): "window",
    ("window", "documents"): "window_and_documents",
    ("padding",): "padding",
    ("window", "padding"): "plain",
    ("documents", "padding"): "plain",
    ("window", "documents", "padding"): "plain",
}


def forward_changes(formula: RanksFormula, places: TokenPlaces) -> Iterator[RanksChange]:
    """Yield the changes of an attention's mask, its blocks of keys, and its sum, without those that change nothing.

    Args:
        formula: The attention; as many keys as rows.
        places: Where the tokens of each rank stand.
    """
    right = formula.output()
    for changes in (_mask_changes(formula, places), merge_changes(formula, places), _scale_changes(right, places)):
        for change in changes:
            if not torch.allclose(change.output, right, rtol=1e-6, atol=1e-6 * float(right.abs().max())):
                yield change


def _scale_changes(right: Tensor, places: TokenPlaces) -> Iterator[RanksChange]:
    count = len(places.pieces())
    yield RanksChange("scale", right * count, (("factor", str(count)),))
    yield RanksChange("scale", right / count, (("factor", f"1/{count}"),))


def _mask_changes(formula: RanksFormula, places: TokenPlaces) -> Iterator[RanksChange]:
    visible = formula.visible
    masks = _Masks(_Bounds.of(visible), places)
    for name, mask in masks.changed():
        yield RanksChange(name, formula.output(mask.expand_as(visible)))
    piece, count = masks.piece, len(places.pieces())
    yield RanksChange("own_keys", formula.output(visible & (piece[:, None] == piece[None])))
    for shard in range(count):
        yield RanksChange("keys_left_out", formula.output(visible & (piece != shard)), (("shard", str(shard)),))
    for shard in range(count):
        twice = (piece == shard) * math.log(2)
        yield RanksChange("keys_twice", formula.output(added=twice), (("shard", str(shard)),))
    if count > 2:  # of two ranks, each step of a ring is one of the above
        for step in range(1, count):
            far = piece[None] == (piece[:, None] + step) % count
            yield RanksChange("keys_left_out_step", formula.output(visible & ~far), (("shard", str(step)),))
            added = far * math.log(2)
            yield RanksChange("keys_twice_step", formula.output(added=added), (("shard", str(step)),))
    own_twice = (piece[None] == piece[:, None]) * math.log(2)
    yield RanksChange("keys_twice_step", formula.output(added=own_twice), (("shard", "0"),))


@dataclass(frozen=True, slots=True, eq=False)
class _Bounds:
    """What a mask is made of.

    Attributes:
        causal: Whether no row sees a later key.
        window: Number of keys back that a row sees at most, itself included; None if that is all of its document.
        document: (B, 1, L), number of the document of each token.
        padded: (B, 1, L), which keys no row sees.
    """

    causal: bool
    window: int | None
    document: Tensor
    padded: Tensor

    @classmethod
    def of(cls, visible: Tensor) -> _Bounds:
        """Return the bounds of a mask (B, H, L, L)."""
        length = visible.shape[-1]
        i = torch.arange(length)
        mask = visible.any(1)
        causal = not bool((mask & (i[None] > i[:, None])).any())
        padded = ~mask.any(1)
        # A token that does not see the one before it begins a document; padding goes with the tokens before it.
        before = torch.where(padded, -1, i).cummax(-1).values.roll(1, -1)
        before[:, 0] = -1
        sees = mask.gather(2, before.clamp(min=0)[..., None])[..., 0]
        document = (~(sees | padded | (before < 0))).long().cumsum(-1)
        whole = document[:, :, None] == document[:, None]
        whole = whole & (i[:, None] >= i[None]) if causal else whole
        whole = whole & ~padded[:, None] & mask.any(2)[:, :, None]
        far = (i[:, None] - i[None])[None].expand_as(mask)
        window = int(far[mask].max()) + 1 if bool((whole & ~mask).any()) and bool(mask.any()) else None
        return cls(causal, window, document[:, None], padded[:, None])

    @property
    def parts(self) -> tuple[str, ...]:
        """What the mask has beside the order of tokens."""
        has = {
            "window": self.window is not None,
            "documents": bool((self.document.amax(-1) > self.document.amin(-1)).any()),
            "padding": bool(self.padded.any()),
        }
        return tuple(name for name, holds in has.items() if holds)


class _Masks:
    """The masks (B, 1, L, L) that an attention may have on ranks in place of its own.

    Args:
        bounds: What its mask is made of.
        places: Where the tokens of each rank stand.
    """

    def __init__(self, bounds: _Bounds, places: TokenPlaces) -> None:
        self.bounds, self.places = bounds, places
        self.i = torch.arange(places.total)
        self.piece, self.row = places.owner()
        self.own = self.piece[:, None] == self.piece[None]

    def mask(
        self, rows: Tensor, keys: Tensor, *, lacks: tuple[str, ...] = (), causal: bool = True,
        documents: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mask of rows and keys that stand at these places, without some of its parts."""
        bounds = self.bounds
        number = bounds.document if documents is None else documents
        same = number[..., :, None] == number[..., None, :]
        seen = torch.ones_like(same) if "documents" in lacks else same
        if "padding" not in lacks:
            seen = seen & ~bounds.padded[..., None, :]
        gap = rows[:, None] - keys[None]
        causal = causal and bounds.causal
        if causal:
            seen = seen & (gap >= 0)
        if "window" not in lacks and bounds.window is not None:
            seen = seen & (gap < bounds.window)
            seen = seen if causal else seen & (gap > -bounds.window)
        return seen

    def changed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the mask of each change."""
        i, right, parts = self.i, self.mask(self.i, self.i), self.bounds.parts
        lacking = [lacks for lacks in ((), *_LACKS) if set(lacks) <= set(parts)]
        for lacks in lacking[1:]:
            for number in self._numbers(lacks):
                mask = self.mask(i, i, lacks=lacks, documents=number)
                yield _LACKS[lacks], mask
                yield from self._remote(f"remote_{_LACKS[lacks]}", mask, right)
        if "documents" in parts:
            for number in self._numbered():
                if torch.equal(self.mask(i, i, documents=number), right):
                    continue  # each rank's own numbers serve as well here
                for lacks in ((), ("window",)) if "window" in parts else ((),):
                    mask = self.mask(i, i, lacks=lacks, documents=number)
                    yield "documents_numbered", mask
                    yield from self._remote("documents_numbered", mask, right)
        if not self.bounds.causal and self.bounds.window is None:
            return
        if self.bounds.causal:
            for lacks in lacking:
                mask = self.mask(i, i, lacks=lacks, causal=False)
                yield "causal", mask
                yield from self._remote("remote_causal", mask, right)
        yield from self._by_other_places([lacks for lacks in lacking if "padding" not in lacks])

    def _remote(self, name: str, mask: Tensor, right: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the change where rows meet keys of other ranks, unless the mask is changed nowhere else."""
        remote = torch.where(self.own, right, mask)
        if not torch.equal(remote, mask):
            yield name, remote

    def _numbers(self, lacks: tuple[str, ...]) -> Iterator[Tensor]:
        """Yield the numbers of documents: where padding is seen, it may as well be a document of its own."""
        yield self.bounds.document
        if "padding" in lacks and "documents" not in lacks:
            yield torch.where(self.bounds.padded, -1 - self.i, self.bounds.document)

    def _numbered(self) -> Iterator[Tensor]:
        """Yield the numbers (B, 1, L) of documents that every rank counts by itself, in each way to count."""
        document = self.bounds.document
        begins = torch.zeros_like(document)
        begins[..., 1:] = (document[..., 1:] != document[..., :-1]).long()
        first = torch.where(begins.bool(), self.i, 0).cummax(-1).values  # where the document of each token begins
        begins[..., 0] = 1
        counts, starts = torch.zeros_like(document), self.row - (self.i - first)
        for piece in self.places.pieces():
            at = piece[piece >= 0]
            counts[..., at] = begins[..., at].cumsum(-1)  # positions that are 0, up to each token
        fresh = counts.clone()
        for piece in self.places.pieces():
            at = piece[piece >= 0]
            fresh[..., at] -= counts[..., at[:1]]  # each rank's first token is in document 0
        yield from (fresh, counts, starts)

    def _by_other_places(self, lacking: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, Tensor]]:
        i, piece, row = self.i, self.piece, self.row
        size, count = max(map(len, self.places.pieces())), len(self.places.pieces())
        for lacks in lacking:
            for keys in (row, i, piece * size + row):
                yield "local_rows", self.mask(row, keys, lacks=lacks)
        for assumed in token_orders(self.places.total, [len(one) for one in self.places.pieces()]):
            at = torch.stack([assumed.of_ranks[int(p)][int(r)] for p, r in zip(piece, row, strict=True)])
            if torch.equal(at, i):
                continue
            for lacks in lacking:
                for rows, keys in ((at, at), (i, at), (at, i)):
                    yield "order", self.mask(rows, keys, lacks=lacks)
        if count > 2 and len({len(one) for one in self.places.pieces()}) == 1:
            table = torch.stack(self.places.pieces())
            for lacks in lacking:
                seen = torch.zeros(len(i), len(i), dtype=torch.bool)
                for mine in range(count):  # rank r takes the keys of rank s for those of rank 2 r - s
                    keys = table[(2 * mine - piece) % count, row]
                    seen = torch.where((piece == mine)[:, None], self.mask(i, keys, lacks=lacks), seen)
                yield "ring_direction", seen


def position_change(call: CallTensors, shards: Sequence[CallTensors], places: TokenPlaces) -> RanksChange | None:
    """Return the change that every shard counts its positions from 0; None if the formula is unknown.

    Args:
        call: The attention of the whole sequence.
        shards: The same attention, run alone on the tokens of each piece.
        places: Where the tokens of each piece stand.
    """
    vectors = []
    for name in ("query", "key"):
        whole = getattr(call, name).values.clone()
        for piece, shard in zip(places.pieces(), shards, strict=True):
            real = piece != -1
            whole[:, :, piece[real]] = getattr(shard, name).values[:, :, torch.arange(len(piece))[real]]
        vectors.append(whole)
    formula = ranks_formula(call, query=vectors[0], key=vectors[1])
    return None if formula is None else RanksChange("positions", formula.output())

"""Which ranks differ: the rows and heads of a pair's outputs that each rank computed, compared one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sqrtdk.compare.records import PairDiff
from sqrtdk.compare.sides import ModelSide
from sqrtdk.messages import Message, joined
from sqrtdk.recording.records import RankRows

Place = tuple[int, int]  # of a call of A, and of its partner in B


def notes_of_ranks(a: ModelSide, b: ModelSide, pairs: Sequence[tuple[Place, PairDiff]]) -> list[str]:
    """Return a sentence for each pair with a difference of its own that some ranks of a side have and others have not.

    Args:
        a: side A.
        b: side B; a side that was put together from the files of ranks knows which rows and heads are whose.
        pairs: the places of the calls of each pair, and what was found.
    """
    notes: list[str] = []
    for (i, j), pair in pairs:
        if pair.same is not False or pair.follows_from is not None:
            continue
        outputs = a.calls[i].output, b.calls[j].output
        for label, side, at in (("A", a, i), ("B", b, j)):
            ranks = side.ranks[at] if side.ranks else ()
            differ = ranks_apart(outputs, ranks, pair.allowed or 0.0)
            if differ and len(differ) < len(ranks):
                names, site = joined([rank.name for rank in differ], "and"), (pair.site_a, pair.site_b)[label == "B"]
                notes.append(
                    Message(
                        "compare.note.of_ranks", side=label, site=site, names=names, all=len(ranks), count=len(differ)
                    )
                )
    return notes


def ranks_apart(outputs: tuple[Tensor, Tensor], ranks: Sequence[RankRows], allowed: float) -> list[RankRows]:
    """Return the ranks in whose rows and heads two outputs differ by more than rounding.

    Args:
        outputs: (B, Hq, L, Ev) of A and B.
        ranks: the rows and heads of each rank.
        allowed: largest difference that rounding explains.
    """
    if outputs[0].shape != outputs[1].shape:
        return []
    apart = (outputs[0].double() - outputs[1].double()).abs().nan_to_num(torch.inf).amax((0, 3))
    return [rank for rank in ranks if float(apart[list(rank.heads)][:, list(rank.rows)].max()) > allowed]

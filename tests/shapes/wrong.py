"""What the check of shapes has to refuse: calls with wrong shapes, and right calls of functions annotated wrongly."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import reload
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sqrtdk import positions, scores, stats
from sqrtdk.impl.call import Call
from sqrtdk.nn import MultiHeadAttention
from tests.shapes.checked import PLANTED


def heads(batch: int = 2, count: int = 4, length: int = 5, width: int = 8) -> Tensor:
    return torch.randn(batch, count, length, width)


def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Call:
    return Call(query, key, value, 1.0, **options)


CALLS: dict[str, Callable[[], Any]] = {
    "keys of another batch": lambda: call(heads(2), heads(3), heads(3)),
    "keys of another width": lambda: call(heads(), heads(width=6), heads()),
    "values of another length": lambda: call(heads(), heads(length=6), heads(length=7)),
    "a mask of another length": lambda: call(heads(), heads(), heads(), visible=torch.ones(5, 6).bool()),
    "a mask of numbers": lambda: call(heads(), heads(), heads(), visible=torch.ones(5, 5)),
    "a bias of other heads": lambda: call(heads(), heads(), heads(), bias=torch.ones(3, 5, 5)),
    "one sink too many": lambda: call(heads(), heads(), heads(), sinks=torch.ones(5)),
    "integers for logits": lambda: stats.row_stats(torch.ones(4, 5).long()),
    "statistics of unlike shapes": lambda: stats.RowStats(*[torch.ones(4)] * 8, torch.ones(5)),
    "results of unlike rows": lambda: stats.AuxOutput(lse=torch.ones(2, 4, 5), peak=torch.ones(2, 4, 6)),
    "a term for other heads": lambda: positions.alibi(4).term(
        heads(count=3), heads(), torch.arange(5), torch.arange(5)
    ),
    "positions of other rows": lambda: positions.rope(heads(), heads(), positions=torch.arange(4.0).bool()),
    "a score of unlike widths": lambda: scores.distance().pairs(heads(), heads(width=6)),
    "keys and values of two lengths": lambda: MultiHeadAttention(8, 2)(heads()[0], heads()[0], heads(length=6)[0]),
}


@dataclass(frozen=True)
class Plant:
    """A wrong annotation of an argument or the result ("return") of a function, and a right call of it."""

    function: str
    part: str
    annotation: str
    call: Callable[[ModuleType], Any]

    def run(self) -> None:
        module = sys.modules[self.function.rpartition(".")[0]]
        PLANTED[self.function] = (self.part, self.annotation)
        try:
            self.call(reload(module))
        finally:
            PLANTED.clear()
            reload(module)


PLANTS = [
    Plant(
        "sqrtdk.impl.rows.row_logits",
        "return",
        'Float[Tensor, "*B H S L"] | Float[Tensor, "S L"]',
        lambda module: module.attend_rows(call(heads(), heads(length=6), heads(length=6)), 0, 5),
    ),
    Plant(
        "sqrtdk.stats.tiles.product_source",
        "key",
        'Float[Tensor, "*B Hq S E"]',
        lambda module: module.attention_row_stats(heads(), heads(count=2), scale=1.0),
    ),
    Plant(
        "sqrtdk.positions._rope.apply_rope",
        "cos",
        'Float[Tensor, "*BHL pairs"]',
        lambda module: module.rope(heads(), heads()),
    ),
    Plant(
        "sqrtdk.positions._rope.rope_tables",
        "frequencies",
        'Floats[Tensor, " pairs"]',
        lambda module: module.rope(heads(), heads()),
    ),
]

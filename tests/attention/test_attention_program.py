"""Functions of one pair as operations that run over many pairs: they give what `torch.vmap` gives, or are not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk.impl import block_call, block_mask, choice, mods, rows, simplify
from sqrtdk.impl.dependence import read_mask, read_score
from tests.attention.test_attention_dependence import ADDED, LEARNED, OF_GRADIENTS, SHOWN, SLOPES
from tests.attention.test_attention_pairs import BY_BLOCKS, Functions, inputs, tables
from tests.support.kernel_here import unable
from tests.tolerances import complaint

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 5, 5, 5, 5, 2, 2, 2, 2, 2, 9, 9, 9, 9, 9, 9, 9, 9, 9])  # in no order
SCORES: dict[str, Callable[..., Tensor]] = {
    **{name: function for name, (function, _, _) in ADDED.items() if name != "data"},  # which vmap refuses
    "gate": lambda s, b, h, i, j: s * torch.sigmoid(s - SLOPES[h]),
    "power": lambda s, b, h, i, j: torch.pow(s.abs(), 1.5) / (1 + (i - j).abs()),
    "clamp": lambda s, b, h, i, j: s.clamp(-1.0, 1.0) * SLOPES[h].exp(),
    "learned": lambda s, b, h, i, j: s * torch.tanh(LEARNED[h] * s),
    "wide slopes": lambda s, b, h, i, j: (s + SLOPES.double()[h] * (i // 2)).float(),
    "a wide number": lambda s, b, h, i, j: (s * SLOPES.double()[0]).float() + 0 * s,
    "one index after the other": lambda s, b, h, i, j: s * SLOPES.view(2, 4)[h // 4][h % 4],
}
# those that have no program: they do nothing, read values, change in place, draw, or take tensors with dimensions
WITHOUT = {"nothing", "by its value", "by a number", "bits", "in place", "random", "a row", "no tensor"}
WITHOUT |= {"one index after the other"}
MASKS: dict[str, Callable[..., Tensor]] = {
    **{name: function for name, (function, places) in SHOWN.items() if places is not None and "b" not in places},
    "documents, causal": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j),
    "other documents": lambda b, h, i, j: (DOCUMENTS[i] != DOCUMENTS[j]) | (j < 2),
    "not": lambda b, h, i, j: ~((DOCUMENTS[i] > DOCUMENTS[j]) | torch.logical_not(i - j < 3)),
    "prefix": lambda b, h, i, j: (j <= 6) | (i >= j),
    "far": lambda b, h, i, j: (i - j).abs() > 9,
    "by a product": lambda b, h, i, j: (i * j) % 7 != 3,
    "bits": lambda b, h, i, j: ((i ^ j) & 1) == 0,
    "integers and bools": lambda b, h, i, j: torch.logical_and(~((i >= j) & (i ^ j)), i > 2),
    "narrow integers": lambda b, h, i, j: (DOCUMENTS[i] * 30).to(torch.int8) + DOCUMENTS.to(torch.int8)[j] > 100,
    "floating documents": lambda b, h, i, j: (DOCUMENTS[i] / (DOCUMENTS[j] - 5)) > 0.5,
    "large": lambda b, h, i, j: (i + 2**62) + (j + 2**62) > 0,
    "none": lambda b, h, i, j: (i < 0) & (j > 3),
    "all": lambda b, h, i, j: (i >= 0) & (j + i >= 0),
}


def places(length: int) -> Tensor:
    return torch.arange(length)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_a_program_is_the_function(name: str, learns: bool) -> None:
    function = SCORES[name]
    scores = torch.randn(2, 8, 5, 7, requires_grad=learns)
    with torch.set_grad_enabled(learns):
        found = read_score(function, torch.float32)
        if found.program is None:
            assert name in WITHOUT or name in OF_GRADIENTS
            return
        assert name not in WITHOUT
        results = [mods.map_scores(way, scores, places(5), 3) for way in (function, found)]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)
    assert results[1].dtype == torch.float32
    if learns:
        leaves = [scores, LEARNED]
        gradients = [torch.autograd.grad(r.nan_to_num(0, 0, 0).sum(), leaves, allow_unused=True) for r in results]
        for mine, wanted in zip(*gradients, strict=True):
            assert (mine is None) == (wanted is None)
            torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("side", [1, 4, 64])
@pytest.mark.parametrize("sizes", [(16, 16), (11, 16), (16, 9)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_blocks_of_a_mask_are_those_of_its_pairs(
    name: str, sizes: tuple[int, int], side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_mask, "SIDE", side)
    length, keys = sizes
    function = MASKS[name]
    wanted = mods.map_mask(function, 1, 3, places(length), keys).expand(1, -1, length, keys)
    read = read_mask(function)
    assert read.program is not None
    torch.testing.assert_close(mods.map_mask(read, 1, 3, places(length), keys).expand(wanted.shape), wanted)
    if read.places is not None and "h" in read.places:
        return
    blocks = block_mask.block_mask([read.program], length, keys)
    for start, stop in ((0, length), (3, 8), (length - 1, length)):
        first, last = blocks.reach(start, stop)
        seen = wanted[0, 0, start:stop]
        assert not seen[:, :first].any()
        assert not seen[:, last:].any()
        if first < last:
            shown = blocks.of(start, stop, first, last)
            assert torch.equal(seen[:, first:last], torch.ones_like(seen[:, first:last]) if shown is None else shown)
            torch.testing.assert_close(blocks.of(start, stop, first, last), shown)


def test_blocks_tell_what_is_hidden_and_what_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_mask, "SIDE", 4)
    document = places(16) // 8
    program = read_mask(lambda b, h, i, j: (document[i] == document[j]) & (i >= j)).program
    assert program is not None
    found = block_mask.block_mask([program], 16, 16)
    assert found.some.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert found.all.int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    ran: list[int] = []

    def shown(self: block_mask.BlockMask, i: Tensor, j: Tensor) -> Tensor:
        ran.append(i.shape[0])
        return torch.ones(1, 1, 1, dtype=torch.bool)

    monkeypatch.setattr(block_mask.BlockMask, "_shown", shown)
    found.of(0, 16, 0, 16)
    assert ran == [4]  # the four blocks on the diagonal


@pytest.mark.skipif(bool(unable()), reason="there is no compiled kernel")
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"is_causal": True, "window": 6}], ids=str)
@pytest.mark.parametrize("name", BY_BLOCKS)
def test_without_gradients_logits_are_made_part_by_part(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BLOCK_PAIRS", 2**7)
    monkeypatch.setattr(block_call, "MOST_AT_ONCE", 0)
    monkeypatch.setattr(block_call, "PART_PAIRS", 2**5)
    monkeypatch.setattr(block_mask, "SIDE", 4)
    for module in (simplify, choice):
        monkeypatch.setattr(module, "SMALLEST_READ", 1)
    make: Functions = BY_BLOCKS[name]
    made = {key: tensor.float().double() for key, tensor in (inputs() | tables()).items()}
    narrow = {key: tensor.float() for key, tensor in made.items()}
    with torch.no_grad():
        wanted, stats = _attend(make, made, impl="dense", **options)
        found, aux = _attend(make, narrow, impl="cpu", **options)
    assert complaint(found, wanted, torch.float32, length=15, logit=12.0, magnitude=1.0) is None
    assert torch.equal(aux.keys.double(), stats.keys.double())
    assert complaint(aux.lse, stats.lse, torch.float32, length=15, logit=12.0, magnitude=12.0) is None


def _attend(make: Functions, leaves: dict[str, Tensor], **options: Any) -> Any:
    qkv = (leaves[name] for name in "qkv")
    return sqrtdk.attention(*qkv, **make(leaves), enable_gqa=True, return_aux=True, **options)

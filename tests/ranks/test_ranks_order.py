"""The order of tokens over ranks, and which attentions of ranks belong together: from masks and digests alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sqrtdk.ranks.order import order_of, positions_in
from sqrtdk.ranks.split import whole_attentions
from sqrtdk.ranks.tokens import AttentionPrint, BlockPrint, Digests, digests, run_start
from tests.ranks.split_models import LENGTH, order

HALF = LENGTH // 2


def _mask(name: str, window: int | None = None) -> torch.Tensor:
    at = torch.cat(order(name, 2))
    behind = at[:, None] - at
    return ((behind >= 0) & (behind < (window or LENGTH)))[None, None]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["plain", "zigzag", "striped"])
def test_a_mask_shows_the_order_of_its_tokens(name: str, window: int | None) -> None:
    found = order_of([HALF, HALF], LENGTH, [None, None], own=True, visible=_mask(name, window))
    assert found.name == name
    assert torch.equal(found.rows, torch.cat(order(name, 2)))
    assert torch.equal(found.sorted(_mask(name, window)), _mask("plain", window))


def test_positions_of_the_inputs_outweigh_the_mask() -> None:
    at = order("zigzag", 2)
    told = [positions_in({"position_ids": each.expand(3, HALF)}, HALF) for each in at]
    found = order_of([HALF, HALF], LENGTH, told, own=True, visible=_mask("plain"))
    assert found.name == "given"
    assert torch.equal(found.rows, torch.cat(at))


@pytest.mark.parametrize("inputs", [{}, (torch.arange(HALF),), {"position_ids": torch.rand(HALF)}])
def test_inputs_without_positions_say_nothing(inputs: object) -> None:
    assert positions_in(inputs, HALF) is None


def test_positions_that_restart_are_no_order() -> None:
    restart = list(range(HALF))
    found = order_of([HALF, HALF], LENGTH, [restart, restart], own=True, visible=_mask("zigzag"))
    assert found.name == "zigzag"


def test_keys_out_of_a_collective_may_lie_in_the_order_of_the_sequence() -> None:
    at = torch.cat(order("zigzag", 2))
    visible = (at[:, None] >= torch.arange(LENGTH))[None, None]
    found = order_of([HALF, HALF], LENGTH, [None, None], own=False, visible=visible)
    assert found.name == "zigzag"
    assert torch.equal(found.keys, torch.arange(LENGTH))


def test_a_mask_that_is_causal_in_no_order_is_judged_in_that_of_the_ranks() -> None:
    mutual = torch.ones(HALF, HALF, dtype=torch.bool).tril().repeat(2, 2)[None, None]
    assert order_of([HALF, HALF], LENGTH, [None, None], own=True, visible=mutual).name == "plain"


def test_an_unknown_order_is_said() -> None:
    at = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    visible = (at[:, None] >= at)[None, None]
    assert order_of([HALF, HALF], LENGTH, [None, None], own=True, visible=visible).name == "unknown"


def test_tokens_are_found_as_runs() -> None:
    k = torch.randn(2, 3, 6, 4)
    k[:, :, 4] = k[:, :, 1]  # two like tokens
    every = digests(k)
    assert every[1] == every[4]
    assert run_start(digests(k[:, :, 3:5]), every) == 3
    assert run_start(digests(k[:, :, [0, 5]]), every) is None


def _print(rows: str, *blocks: str, inputs: str = "x", weights: str = "w", split: bool = False) -> AttentionPrint:
    def tokens(text: str) -> Digests:
        return tuple(letter.encode() for letter in text)

    made = tuple(BlockPrint(at, (0, len(rows)), tokens(keys)) for at, keys in enumerate(blocks))
    return AttentionPrint("attn", 0, tokens(rows), made, (1, 2, 8, "float32"), split, inputs, weights)


RING = [[_print("AB", "ab", split=True)], [_print("CD", "cd", "ab", inputs="y", split=True)]]


@pytest.mark.parametrize(
    ("prints", "ways"),
    [
        (RING, [("rows",)]),
        ([[_print("AB", "abcd", split=True)], [_print("CD", "abcd", inputs="y", split=True)]], [("rows",)]),
        ([[_print("AB", "ab")], [_print("CD", "cd", weights="v")]], [("heads",)]),
        ([[_print("AB", "ab", inputs="", split=True)], [_print("CD", "cd", inputs="", split=True)]], [("heads",)]),
        ([[_print("AB", "ab")], [_print("CD", "cd", inputs="y")]], [("batch",)]),
        ([[_print("AB", "ab")], [_print("AB", "ab")]], [("same",)]),
        ([[_print("AB", "ab")], [_print("CD", "cd", inputs="y", weights="v")]], [(), ()]),
        ([[_print("AB", "ab", inputs="", weights="")], [_print("CD", "cd", inputs="", weights="")]], [(), ()]),
    ],
)
def test_what_ranks_have_of_one_name(prints: list[list[AttentionPrint]], ways: list[tuple[str, ...]]) -> None:
    found = whole_attentions(prints)
    assert [one.ways for one in found] == ways
    assert [one.stage for one in found] == [len(found) > 1] * len(found)


def test_a_ring_has_the_keys_of_all_ranks_in_their_order() -> None:
    (whole,) = whole_attentions(RING)
    ((group,),) = whole.batches
    assert group.keys == (b"a", b"b", b"c", b"d")
    assert group.own


def test_keys_that_no_rank_owns_are_not_joined() -> None:
    stray = replace(RING[1][0], blocks=(*RING[1][0].blocks, BlockPrint(2, (0, 2), (b"x", b"y"))))
    (whole,) = whole_attentions([RING[0], [stray]])
    assert whole.batches[0][0].keys == ()

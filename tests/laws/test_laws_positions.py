"""Padding on the left, and positions that are shifted: planted errors are seen, what is meant is left in peace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk import check
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from sqrtdk.laws.causal import tokens_of_decoder
from sqrtdk.laws.moved import MOVED_ROUNDINGS
from sqrtdk.laws.padded import pad_both_sides
from sqrtdk.laws.shift import LAYER_ENLARGEMENT, SHIFT
from sqrtdk.laws.subject import subject_of
from tests.laws.caching_models import Decoder, Layer, ids, lower_right, turned

MASK = torch.ones(2, 12, dtype=torch.long)
PADDED = torch.cat((torch.ones(2, 9, dtype=torch.long), torch.tensor([[1] * 3, [0] * 3])), 1)


def answer_of(model: torch.nn.Module, inputs: Any, law: str) -> LawAnswer:
    (answer,) = check(model, inputs, laws=law).laws
    return answer


@pytest.mark.parametrize("mask", [MASK, PADDED, PADDED.flip(1)])
@pytest.mark.parametrize("learned", [False, True])
def test_padding_on_either_side_is_the_same_to_the_right_model(mask: torch.Tensor, learned: bool) -> None:
    inputs = {"input_ids": ids(), "attention_mask": mask}
    answer = answer_of(Decoder(learned=learned), inputs, "left_padding")
    assert (answer.state, answer.about) == (KEPT, "attention_mask")


def test_padding_of_the_last_sample_alone() -> None:
    subject = subject_of(Decoder(), {"input_ids": ids(), "attention_mask": MASK})
    content = tokens_of_decoder(subject)
    both = pad_both_sides(subject, content, last_sample=True)
    assert both.hidden_left.tolist() == [[False] * 12, [True] * 3 + [False] * 9]
    assert torch.equal(both.left.inputs["input_ids"][1, 3:], both.right.inputs["input_ids"][1, :9])
    assert both.left.inputs["position_ids"].tolist() == [[*range(12)], [0, 0, 0, *range(9)]]
    assert pad_both_sides(subject, content).hidden_right.tolist() == [[False] * 9 + [True] * 3] * 2


@pytest.mark.parametrize("mask", [MASK, PADDED, PADDED.flip(1)])
def test_a_mask_that_is_read_as_lengths(mask: torch.Tensor) -> None:
    answer = answer_of(Decoder("lengths"), {"input_ids": ids(), "attention_mask": mask}, "left_padding")
    assert answer.state == BROKEN
    assert answer.finding is not None
    assert answer.finding.severity == "fail"
    assert answer.site == "layers.0"
    assert answer.reason == "padding on the left gives other outputs than on the right, at 9 positions of 9"


def test_given_positions_that_are_not_used() -> None:
    inputs = {"input_ids": ids(), "attention_mask": MASK}
    answer = answer_of(Decoder("counted", learned=True), inputs, "left_padding")
    assert answer.state == BROKEN
    assert answer_of(Decoder("counted"), inputs, "left_padding").state == KEPT  # rotations are relative


def test_a_convolution_that_reads_the_padding_before_it() -> None:
    class Convolved(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(self.embed, Before())

    class Before(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)

    answer = answer_of(Convolved(), {"input_ids": ids(), "attention_mask": MASK}, "left_padding")
    assert (answer.state, answer.site) == (BROKEN, "embed.1")
    assert answer.finding is not None
    assert answer.finding.fix.startswith("set what enters it to 0 where attention_mask hides")


def test_learned_positions_that_can_not_be_given() -> None:
    class Absolute(Decoder):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return super().forward(input_ids, attention_mask)

    inputs = {"input_ids": ids(), "attention_mask": MASK}
    answer = answer_of(Absolute(learned=True), inputs, "left_padding")
    assert (answer.state, answer.reason) == (
        NOT_ASKED,
        "positions are absolute, and forward takes none: tokens move with the padding before them",
    )
    assert answer_of(Absolute(), inputs, "left_padding").state == KEPT
    assert answer_of(Absolute("lengths"), inputs, "left_padding").state == BROKEN


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("wrong", "words"), [("q alone", "q is, k is not"), ("q twice", "not turned alike"), (None, "")]
)
def test_rotations_of_q_and_k_go_together(wrong: str | None, words: str, given: bool) -> None:
    inputs: dict[str, Any] = {"input_ids": ids()}
    if given:
        inputs["position_ids"] = torch.arange(12).expand(2, 12) + 3
    answer = answer_of(Decoder(wrong), inputs, "shift")
    assert answer.state == (BROKEN if wrong else KEPT)
    assert words in answer.reason
    if wrong:
        assert answer.finding is not None
        assert (answer.finding.severity, answer.site) == ("fail", "layers.0")


def test_positions_that_are_added_are_not_shifted() -> None:
    answer = answer_of(Decoder(learned=True), {"input_ids": ids()}, "shift")
    assert (answer.state, answer.reason) == (NOT_ASKED, "positions are learned, or added, before the first attention")


def test_a_scale_of_log_n_is_not_shifted() -> None:
    class Scaled(Layer):
        def forward(self, x: torch.Tensor, positions: torch.Tensor, shown: Any, past: Any) -> Any:
            q, k, v = self.heads(x)
            q, k = turned(q, positions), turned(k, positions)
            q = q * (positions + 2.0).log()[:, None, :, None]
            return self.back(functional.scaled_dot_product_attention(q, k, v, is_causal=True)), (k, v)

    model = Decoder()
    model.layers = nn.ModuleList([Scaled(None)])
    positions = torch.arange(12).expand(2, 12)
    answer = answer_of(model, {"input_ids": ids(), "position_ids": positions}, "shift")
    assert (answer.state, answer.reason) == (NOT_ASKED, "its scale differs from row to row, as one of log n does")


def test_blocks_of_positions_are_not_shifted() -> None:
    class Blocked(Layer):
        def forward(self, x: torch.Tensor, positions: torch.Tensor, shown: Any, past: Any) -> Any:
            q, k, v = self.heads(x)
            q, k = turned(q, positions), turned(k, positions)
            same = positions[:, None, :, None] // 4 == positions[:, None, None, :] // 4
            visible = lower_right(12, 12) & same
            return self.back(functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)), (k, v)

    model = Decoder()
    model.layers = nn.ModuleList([Blocked(None)])
    inputs = {"input_ids": ids(), "position_ids": torch.arange(12).expand(2, 12), "attention_mask": MASK}
    assert answer_of(model, inputs, "shift").state == NOT_ASKED
    assert "not plainly causal" in answer_of(model, inputs, "left_padding").reason


def test_positions_that_are_not_used_say_nothing() -> None:
    answer = answer_of(Decoder("counted"), {"input_ids": ids()}, "shift")
    assert (answer.state, answer.reason) == (NOT_ASKED, "position_ids changes nothing")


def test_documents_are_not_shifted() -> None:
    positions = torch.cat((torch.arange(5), torch.arange(7))).expand(2, 12)
    answer = answer_of(Decoder(), {"input_ids": ids(), "position_ids": positions}, "shift")
    assert (answer.state, answer.reason) == (NOT_ASKED, "positions restart")


@pytest.mark.parametrize("first", [0, 1_000, 30_000])
def test_the_bar_holds_what_rounded_angles_move(first: int) -> None:
    """Products of rotated vectors in float32, shifted, against the bar that is derived for one layer."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 64, 16, generator=generator) for _ in range(2))
    places = torch.arange(first, first + 64)
    one = turned(q, places) @ turned(k, places).mT
    other = turned(q, places + SHIFT) @ turned(k, places + SHIFT).mT
    gap = float((one - other).abs().max() / one.abs().max()) / torch.finfo(torch.float32).eps
    last = first + 63 + SHIFT
    assert gap < last  # of the same size as half a position for q and for k
    assert gap < MOVED_ROUNDINGS + LAYER_ENLARGEMENT * last / 2


class Heads(nn.Module):
    """An attention that is given its heads, (B, H, n, E)."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Absolute(nn.Module):
    """Learned positions that count columns, and that can't be given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place, self.qkv = nn.Embedding(50, 32), nn.Embedding(12, 32), nn.Linear(32, 96)
        self.attend = Heads()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        seen = attention_mask[:, None, None].bool() & torch.ones(length, length, dtype=torch.bool).tril()
        x = self.embed(input_ids) + self.place(torch.arange(length))
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v, seen | torch.eye(length, dtype=torch.bool)).transpose(1, 2).flatten(2)


def test_absolute_positions_are_seen_where_an_attention_takes_heads() -> None:
    answer = answer_of(Absolute().eval(), {"input_ids": ids(), "attention_mask": MASK}, "left_padding")
    assert (answer.state, answer.reason) == (
        NOT_ASKED,
        "positions are absolute, and forward takes none: tokens move with the padding before them",
    )

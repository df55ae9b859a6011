"""Later tokens that are seen by design or by mistake: blocks of tokens, groups of samples, ring buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED
from tests.laws.masked_models import Masked, answers, only
from tests.laws.models import HEADS, VOCABULARY, WIDTH, ids
from tests.laws.test_laws_packages import noise


def blocks(size: int, first: int) -> Any:
    """Tokens see the tokens of their own block and of those before; a block begins at `first`."""

    def seen(length: int, _: Tensor | None) -> Tensor:
        block = (torch.arange(length) - first + size) // size
        return block[:, None] >= block

    return seen


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("size", "first"), [(2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (6, 0), (6, 1), (7, 0), (12, 0)])
def test_blocks_of_tokens_that_see_themselves(size: int, first: int, batch: int) -> None:
    inputs = {"input_ids": ids(batch, 12)["input_ids"]}
    assert only(Masked(blocks(size, first)), inputs, "causal").state == BROKEN
    assert only(Masked(blocks(1, 0)), inputs, "causal").state == KEPT


def behind_padding(size: int) -> Any:
    """Blocks begin at the first token, so that neighbouring cuts of two samples may both be where one begins."""

    def seen(_: int, mask: Tensor | None) -> Tensor:
        assert mask is not None
        block = (mask.cumsum(1) - 1).clamp_min(0) // size
        return (block[:, None, :, None] >= block[:, None, None]) & mask[:, None, None].bool()

    return seen


@pytest.mark.parametrize("padding", [1, 2, 3])
def test_blocks_behind_padding(padding: int) -> None:
    inputs = ids(2, 12)
    inputs["attention_mask"][1, :padding] = 0
    for size in (1, 2, 3, 4, 6):
        assert only(Masked(behind_padding(size)), inputs, "causal").state == (KEPT if size == 1 else BROKEN)


def test_special_tokens_at_the_cut_do_not_hide_blocks() -> None:
    inputs = ids(2, 12)
    inputs["input_ids"][:, 5:7] = VOCABULARY - 1  # the largest id is never changed
    assert only(Masked(blocks(4, 0)), inputs, "causal").state == BROKEN
    assert only(Masked(blocks(1, 0)), inputs, "causal").state == KEPT


@pytest.mark.parametrize("batch", [1, 2])
def test_the_two_cuts_of_a_batch_share_a_run(batch: int) -> None:
    counts = []
    for laws in ("finite", "causal"):
        model, count = Masked(blocks(1, 0)), [0]
        model.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        answers(model, {"input_ids": ids(batch)["input_ids"]}, laws)
        counts.append(count[0])
    assert counts[1] - counts[0] == (2 if batch == 1 else 1)


class Grouped(nn.Module):
    """Attention over time, then over the series of a group; `leak` also sees the others."""

    def __init__(self, leak: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time, self.group = (nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.leak = leak

    def forward(self, context: Tensor, group_ids: Tensor) -> Tensor:
        x = context + self.attend(self.time, context, None)
        group_ids = group_ids.flatten()
        seen = None if self.leak == "no mask" else group_ids[:, None] == group_ids
        x = x + self.attend(self.group, x.transpose(0, 1), seen).transpose(0, 1)
        return x + 0.1 * x.mean(0) if self.leak == "mean" else x

    def attend(self, qkv: nn.Module, x: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return sdpa(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("groups", [[0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 4, 5], [4, 4, 4, 4, 4, 4]])
@pytest.mark.parametrize("column", [False, True])
def test_samples_of_a_group_may_see_one_another(groups: list[int], column: bool) -> None:
    inputs = {"context": noise(6, 10, WIDTH), "group_ids": torch.tensor(groups).reshape(6, *[1] * column)}
    found = {(a.law, a.about): (a.state, a.reason) for a in answers(Grouped(), inputs, "samples,modes")}
    alone = len(set(groups)) == 6
    said = "" if alone else "samples with the same group_ids see one another, others do not"
    assert found["samples", ""] == (KEPT, said)
    assert found["modes", "batch of one"][0] == (KEPT if alone else NOT_ASKED)
    assert BROKEN not in {state for state, _ in answers_of_modes(inputs)}
    for leak in ("no mask", "mean"):
        assert {a.state for a in answers(Grouped(leak), inputs, "samples")} == {BROKEN}


def answers_of_modes(inputs: Any) -> list[tuple[str, str]]:
    """Return what the law `modes` says where the law `samples` was not asked before it."""
    return [(answer.state, answer.reason) for answer in answers(Grouped(), inputs, "modes")]


class Ring(Masked):
    """Its last 8 keys alone are kept, as in a ring buffer, so that 12 rows meet 8 keys."""

    def __init__(self, wrong: bool) -> None:
        super().__init__(None)
        self.wrong = wrong

    def forward(self, input_ids: Tensor) -> Tensor:
        x, places = self.embed(input_ids), torch.arange(input_ids.shape[1])
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        at = places[-8:].roll(4)  # slots of positions 8 to 11 begin, as position % 8 puts them
        seen = None if self.wrong else torch.cat((torch.ones(12, 1, dtype=torch.bool), at <= places[:, None]), 1)
        k, v = k[:, :, at], v[:, :, at]
        if seen is not None:
            k, v = (torch.cat((torch.zeros_like(one[:, :, :1]), one), 2) for one in (k, v))
        return self.head(x + sdpa(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))


class Holding(nn.Module):
    """Says nothing itself."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.part(input_ids)


def test_a_ring_buffer_with_more_rows_than_keys_is_judged_as_causal() -> None:
    inputs = {"input_ids": ids(2, 12)["input_ids"]}
    answer = only(Holding(Ring(wrong=True)), inputs, "causal")
    assert answer.finding is not None
    assert (answer.state, answer.finding.severity) == (BROKEN, "critical")
    assert only(Holding(Ring(wrong=False)), inputs, "causal").state == KEPT


def test_a_model_that_sees_later_tokens_and_declares_nothing_keeps_no_law() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    answer = only(Features(), {"x": noise(2, 12, WIDTH)}, "causal")
    assert (answer.state, answer.reason) == (NOT_ASKED, "every position sees later ones, and nothing says otherwise")

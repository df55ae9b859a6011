"""What a law takes for moved, which positions and samples it compares, and what it says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED
from sqrtdk.laws.moved import LARGEST, MOVED_ROUNDINGS, moved_entries
from tests.laws.masked_models import Masked, answers, only
from tests.laws.models import VOCABULARY, WIDTH, Decoder, ids

NOTHING = "no output moves with the inputs"
LEAST = torch.finfo(torch.float32).min


class Outlying(Decoder):
    """A decoder whose logits have other numbers beside them."""

    def __init__(self, change: Any, *, causal: bool) -> None:
        super().__init__(causal=causal)
        self.change = change

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.change(super().forward(input_ids, attention_mask))


def beside(number: float, count: int) -> Any:
    return lambda y: torch.cat((y, torch.full_like(y[..., :1], number).expand(*y.shape[:-1], count)), -1)


def scaled(y: Tensor, at: Any, factor: float, offset: float = 0.0) -> Tensor:
    y = y.clone()
    y[at] = y[at] * factor + offset
    return y


OUTLIERS = {
    "a padded vocabulary": beside(-1e4, 2),
    "more padding than vocabulary": beside(-1e9, 3 * VOCABULARY),
    "finfo.min": beside(LEAST, 2),
    "-inf": beside(-torch.inf, 2),
    "a feature": lambda y: scaled(y, (..., 3), 1.0, 1e4),
    "a feature that varies": lambda y: scaled(y, (..., 3), 1e4),
    "a padding that varies": lambda y: torch.cat((y, y.repeat(1, 1, 3) * 0.1 - 1e4), -1),
    "a row": lambda y: scaled(y, (slice(None), 0), 1e5),
    "a channel of a map": lambda y: torch.stack((y, torch.full_like(y, 1e4)), -1),
}


@pytest.mark.parametrize("kind", OUTLIERS)
def test_an_outlier_hides_no_leak(kind: str) -> None:
    assert only(Outlying(OUTLIERS[kind], causal=False), ids(), "causal").state == BROKEN
    right = answers(Outlying(OUTLIERS[kind], causal=True), ids(), "samples,causal,padding,modes")
    assert {answer.state for answer in right} == {KEPT}


def test_the_bar_is_above_rounding_where_channels_cancel() -> None:
    """Sums of 4,096 terms in float32 against float64; channels cancel to a thousandth, gains are 1e-3 to 1e3."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(24, 4096, generator=generator)
    weight = torch.randn(300, 4096, generator=generator)
    weight *= torch.logspace(-3, 3, 300)[:, None]
    weight[:100, 2048:] = weight[:100, :2048] * (1 - 1e-3)
    hidden[:, 2048:] = -hidden[:, :2048]
    exact = hidden.double() @ weight.double().T
    order = torch.randperm(4096, generator=generator)
    for rounded in (hidden @ weight.T, hidden[:, order] @ weight[:, order].T):
        assert not moved_entries(exact.float(), rounded).any()
    leak = torch.zeros_like(exact)
    leak[7, 150:] = 0.01 * exact[7, 150:].abs()
    found = moved_entries(exact.float(), (exact + leak).float())
    assert found[7, 150:].float().mean() > 0.9
    assert not found[:7].any()


def test_the_bar_of_one_row_and_of_one_channel() -> None:
    bar = LARGEST * MOVED_ROUNDINGS * torch.finfo(torch.float32).eps
    for values in (torch.tensor([[1.0, 1e-6, 0.5]]), torch.tensor([[1.0], [1e-6], [0.5]])):
        assert not moved_entries(values, values + 0.4 * bar).any()
        assert moved_entries(values, values + 2.1 * bar).all()


def test_a_constant_hides_nothing_in_a_single_row() -> None:
    before = torch.tensor([[0.5, -0.3, *[-1e9] * 7]])
    after = before + torch.tensor([0.0, 0.01, *[0.0] * 7])
    assert moved_entries(before, after).tolist() == [[False, True, *[False] * 7]]


class Silent(Decoder):
    """A decoder whose head is zero, as that of a fresh model."""

    def __init__(self) -> None:
        super().__init__(causal=False)
        nn.init.zeros_(self.head.weight)


def test_what_moves_nothing_keeps_no_law() -> None:
    found = answers(Silent(), ids(), "samples,causal,padding,left_padding,documents,cache,shift,modes")
    assert KEPT not in {answer.state for answer in found}
    reasons = {(answer.law, answer.about): answer.reason for answer in found if answer.state == NOT_ASKED}
    for place in (("samples", ""), ("causal", ""), ("modes", "batch of one"), ("modes", "train mode")):
        assert reasons[place] == NOTHING


def padded_mask(low: float, dtype: torch.dtype) -> Any:
    """An additive causal mask that also hides padding, with one number for hidden keys."""

    def seen(length: int, mask: Tensor | None) -> Tensor:
        shown = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        shown = shown if mask is None else shown & mask[:, None, None].bool()
        return torch.where(shown, 0.0, low).to(dtype)

    return seen


def test_a_mask_beyond_float16_is_asked_of_the_model_itself() -> None:
    """Its rows of padding see no key, or all of them, whose outputs do not matter."""
    inputs = ids()
    inputs["attention_mask"][1, :5] = 0
    for low, state in ((LEAST, BROKEN), (torch.finfo(torch.float16).min, KEPT)):
        found = {a.law: a for a in answers(Masked(padded_mask(low, torch.float16)).half(), inputs, "finite,causal")}
        assert found["finite"].state == state
        assert found["causal"].state == KEPT
    leaking = Masked(lambda length, mask: torch.where(mask[:, None, None].bool(), 0.0, -65504.0).half()).half()
    assert only(leaking, inputs, "causal").state == BROKEN


def test_what_can_not_be_copied_is_asked_itself() -> None:
    class Single(Masked):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("there is one")

    inputs = ids()
    inputs["attention_mask"][1, :5] = 0
    for low, state in ((LEAST, BROKEN), (torch.finfo(torch.float16).min, KEPT)):
        found = answers(Single(padded_mask(low, torch.float16)).half(), inputs, "finite,causal")
        assert [answer.state for answer in found] == [state, NOT_ASKED]


class Mixed(nn.Module):
    """Attention in half precision, a norm and a head in float32, with casts between them as mixed models write them."""

    def __init__(self, dtype: torch.dtype, cast: str, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH).to(dtype)
        self.dtype, self.cast, self.is_causal = dtype, cast, causal
        self.sizes = (torch.ones(WIDTH, dtype=dtype),)  # held in a tuple, where `Module.float` does not reach it

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = getattr(x, self.cast)() if self.cast in ("half", "bfloat16") else x.to(self.dtype)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal).transpose(1, 2).flatten(2)
        out = out @ self.sizes[0].diag() if self.cast == "held" else out
        made: Tensor = self.head(out.float())
        return made


@pytest.mark.parametrize(("dtype", "cast"), [
    (torch.float16, "half"), (torch.bfloat16, "bfloat16"), (torch.bfloat16, "to"),
])  # fmt: skip
def test_a_model_of_two_dtypes_is_asked(dtype: torch.dtype, cast: str) -> None:
    found = {a.law: a for a in answers(Mixed(dtype, cast, True), (torch.randn(2, 6, WIDTH),), "finite,samples,causal")}
    assert {law: answer.state for law, answer in found.items()} == dict.fromkeys(found, KEPT)


def test_a_float32_copy_that_raises_is_named() -> None:
    found = {
        a.law: a for a in answers(Mixed(torch.bfloat16, "held", True), (torch.randn(2, 6, WIDTH),), "finite,causal")
    }
    assert (found["finite"].state, found["causal"].state) == (KEPT, NOT_ASKED)
    assert str(found["causal"].reason).startswith("a float32 copy of Mixed raised RuntimeError: ")


class Sums(nn.Module):
    """The simplest recurrence: the sum of all tokens up to each, or from each on."""

    def __init__(self, *, backwards: bool) -> None:
        super().__init__()
        self.backwards = backwards

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1).cumsum(1).flip(1) if self.backwards else x.cumsum(1)


class Packed(nn.Module):
    """Causal attention, which sees all documents, or sums of tokens beside an attention that sees its own."""

    is_causal = True

    def __init__(self, *, sums: bool = False, backwards: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.sums = Masked(None), Sums(backwards=backwards) if sums else None

    def forward(
        self, input_ids: Tensor, cu_seqlens: Any = None, position_ids: Any = None, attention_mask: Any = None
    ) -> Tensor:
        length = input_ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if self.sums is None:
            return self.attention.attend(input_ids, seen)
        if position_ids is not None:
            document = (position_ids == 0).cumsum(1)
            seen = seen & (document[:, None, :, None] == document[:, None, None, :])
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None].bool() | torch.eye(length, dtype=torch.bool)
        y = self.attention.attend(input_ids, seen)
        return y + self.attention.head(self.sums(self.attention.embed(input_ids)))


RESTARTING = torch.tensor([[*range(5), *range(7)]])


@pytest.mark.parametrize("offsets", [False, True])
def test_the_documents_are_told_by_the_input_that_was_given(offsets: bool) -> None:
    drawn = ids(1, 12)["input_ids"]
    inputs = {"input_ids": drawn, "position_ids": RESTARTING}
    if offsets:
        inputs = {"input_ids": drawn, "cu_seqlens": torch.tensor([0, 5, 12])}
    answer = only(Packed(), inputs, "documents")
    assert (answer.state, answer.about) == (BROKEN, "cu_seqlens" if offsets else "position_ids")
    assert ("position_ids restart" in answer.reason) is not offsets
    if offsets:
        assert answer.reason.startswith("tokens see another document: cu_seqlens tells the documents")
        inputs["cu_seqlens"] = torch.tensor([0, 12])
        assert only(Packed(), inputs, "documents").reason == "cu_seqlens tells one document"


def test_the_fix_of_a_recurrence_is_no_mask() -> None:
    padded = ids(1)
    padded["attention_mask"][0, :4] = 0
    cases = (
        ("documents", Packed(sums=True), {"input_ids": padded["input_ids"], "position_ids": RESTARTING}, "reset a"),
        ("padding", Packed(sums=True), padded, "set what enters it to 0 where attention_mask hides"),
        ("causal", Packed(sums=True, backwards=True), {"input_ids": padded["input_ids"]}, "run a recurrence forwards"),
    )
    for law, model, inputs, words in cases:
        finding = only(model, inputs, law).finding
        assert finding is not None
        assert finding.site == "sums"
        assert words in finding.fix
        assert "hide keys" not in finding.fix

"""What a law takes for moved, which positions and samples it compares, and what it says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sqrtdk import check
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from sqrtdk.laws.moved import LARGEST, MOVED_ROUNDINGS, moved_entries
from tests.laws.models import HEADS, VOCABULARY, WIDTH, Decoder, ids
from tests.laws.test_laws_packages import noise

NOTHING = "no output moves with the inputs"
LEAST = torch.finfo(torch.float32).min


def answers(model: nn.Module, inputs: Any, laws: str) -> list[LawAnswer]:
    return list(check(model.eval(), inputs, laws=laws).laws)


def only(model: nn.Module, inputs: Any, law: str) -> LawAnswer:
    (answer,) = answers(model, inputs, law)
    return answer


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


class Masked(nn.Module):
    """Ids to logits through one attention that says it is causal, with a mask made of the ids' shape."""

    is_causal = True

    def __init__(self, seen: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen = seen
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def attend(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if mask.dtype is torch.bool:
            out = sdpa(q, k, v, attn_mask=mask)
        else:
            out = (q @ k.mT * q.shape[-1] ** -0.5 + mask.to(q.dtype)).softmax(-1) @ v
        return self.head(x + out.transpose(1, 2).flatten(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.attend(input_ids, self.seen(input_ids.shape[1], attention_mask))


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

"""Masks that differ by their structure: each kind is named, both ways round, and only if it makes the other's mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.compare.diff import diff
from sqrtdk.compare.fixes import fix_of
from sqrtdk.compare.inside.program import Formula
from sqrtdk.messages import said as said_in
from tests.compare.formula_cases import HEADS, names_found, tokens, trial, visible

N = 16
AT = torch.arange(N)
CAUSAL = visible(N, N, 0)
FOUR = torch.arange(13, 17)[:, None, None, None] > AT  # 13, 14, 15 and 16 keys
LEFT, RIGHT = tokens(N, True), tokens(N, False)  # 0, 2 and 3 keys of padding


def documents(*starts: int) -> Tensor:
    numbers = sum((start <= AT).long() for start in starts)
    assert isinstance(numbers, Tensor)
    return (numbers[:, None] == numbers)[None, None]


def spans(*ranges: tuple[int, int]) -> Tensor:
    inside = torch.zeros(1, 1, N, N, dtype=torch.bool)
    for first, last in ranges:
        inside[..., first : last + 1, first : last + 1] = True
    return inside


def windows(*sizes: int) -> Tensor:
    return torch.cat([visible(N, N, 0, size - 1) for size in sizes], 1)


def tiled(mask: Tensor) -> Tensor:
    """What `mask.repeat(heads, 1, 1)` makes of masks that `repeat_interleave(heads, 0)` should spread over heads."""
    return mask[:, 0].repeat(HEADS, 1, 1).unflatten(0, (-1, HEADS))


def along(mask: Tensor) -> Tensor:
    return mask.expand(-1, HEADS, N, N)


def for_heads(mask: Tensor) -> Tensor:
    """What a mask (B, 1, L, S) gives logits (B, B, groups, L, S), flattened to heads."""
    logits = torch.ones(len(mask), len(mask), HEADS // len(mask), N, N, dtype=torch.bool)
    return (logits & mask).flatten(1, 2)


OWN = torch.cat([documents(5, 12), documents(7), documents(3, 9)])
PREFIXES = torch.cat([spans((0, 4)), spans((0, 2)), spans((0, 6))])
IMAGES = CAUSAL | spans((4, 7), (10, 13))
ONE = CAUSAL.clone()
ONE[..., 9, 3] = False
SOME = CAUSAL.repeat(3, 1, 1, 1)
SOME[2, :, 5:8, 10:13] = True
KINDS: dict[str, tuple[Tensor, Tensor | None, str]] = {  # A's mask, B's, what B does
    "documents": (CAUSAL & documents(5, 12), CAUSAL, "ignores the document boundaries at 5, 12, so rows see"),
    "documents of each sample": (CAUSAL & OWN, CAUSAL, "at 5, 12 in sample 0 (others in other samples)"),
    "other documents": (
        CAUSAL & documents(5, 12), CAUSAL & documents(4, 12), "has document boundaries at 4, 12 in place of 5, 12"
    ),
    "documents, both ways": (documents(5, 12), None, "ignores the document boundaries at 5, 12"),
    "documents, padded": (CAUSAL & documents(9) & RIGHT, CAUSAL & RIGHT, "ignores the document boundaries at 9,"),
    "documents, a window": (windows(4) & documents(5), windows(4), "ignores the document boundaries at 5,"),
    "documents, cached": (
        (CAUSAL & documents(5, 14))[..., -6:, :], CAUSAL[..., -6:, :], "ignores the document boundaries at 5, 14"
    ),
    "chunks": (CAUSAL & documents(4, 8, 12), CAUSAL, "ignores the chunks of 4 keys, so rows see earlier chunks"),
    "other chunks": (
        CAUSAL & documents(4, 8, 12), CAUSAL & documents(5, 10, 15), "has chunks of 5 keys in place of 4"
    ),
    "images": (IMAGES, CAUSAL, "hides on rows 4 to 7, 10 to 13 later keys of their block that A shows"),
    "images, padded": (IMAGES & LEFT, CAUSAL & LEFT, "hides on rows 4 to 7, 10 to 13 later keys"),
    "images, a window": (windows(4) | spans((4, 9)), windows(4), "hides on rows 4 to 9 later keys"),
    "another image": (IMAGES, CAUSAL | spans((4, 7), (10, 14)), "on rows 4 to 7, 10 to 14, not on rows 4"),
    "causal by blocks": ((AT[:, None] // 8 >= AT // 8)[None, None], CAUSAL, "on rows 0 to 7, 8 to 15 later"),
    "images and documents": (
        IMAGES & documents(9), CAUSAL,
        "at 9, so rows see other documents; hides on rows 4 to 7, 10 to 13 later keys",
    ),
    "prefix": (CAUSAL | (AT < 5), CAUSAL, "makes a prefix of 5 keys causal, which A does not"),
    "another prefix": (CAUSAL | (AT < 5), CAUSAL | (AT < 6), "has a prefix of 6 keys in place of 5"),
    "prefixes": (CAUSAL | PREFIXES, CAUSAL, "makes a prefix of 3 to 7 keys causal"),
    "prefixes, padded": ((CAUSAL | spans((0, 6))) & LEFT, CAUSAL & LEFT, "makes a prefix of 4 to 7 keys causal"),
    "transposed": (CAUSAL & RIGHT, CAUSAL.mT & RIGHT, "has the mask transposed, rows for keys"),
    "a window transposed": (windows(4), windows(4).mT, "has the mask transposed, rows for keys"),
    "documents transposed": (CAUSAL & documents(5), (CAUSAL & documents(5)).mT, "has the mask transposed"),
    "inverted": (CAUSAL, ~CAUSAL, "inverts the mask (hides what A shows"),
    "inverted, padded": (CAUSAL & RIGHT, ~CAUSAL & RIGHT, "inverts the mask (hides what A shows"),
    "padding inverted": (RIGHT, ~RIGHT, "inverts the padding mask (hides what A shows"),
    "padding inverted, causal": (CAUSAL & LEFT, CAUSAL & ~LEFT, "inverts the padding mask"),
    "padding on the rows": (RIGHT, RIGHT.mT.expand(3, 1, N, N), "lays the padding mask on the rows (mask[:, :, None])"),
    "padding on the rows, causal": (CAUSAL & LEFT, CAUSAL & LEFT.mT, "lays the padding mask on the rows"),
    "padding of others": (
        CAUSAL & RIGHT, CAUSAL & RIGHT.roll(1, 0),
        "gives samples 0, 1, 2 the padding mask of samples 2, 0, 1",
    ),
    "padding lost": (CAUSAL & RIGHT, CAUSAL, "leaves out the padding mask (the last 2 to 3 keys)"),
    "padding of one": (LEFT[[2, 1, 0]], LEFT[[2]], "gives samples 1, 2 the padding mask of sample 0"),
    "documents of others": (CAUSAL & OWN, CAUSAL & OWN.flip(0), "gives samples 0, 2 the mask of samples 2, 0"),
    "padding of cross attention": (
        tokens(9, False).expand(3, 1, 5, 9), ~tokens(9, False).expand(3, 1, 5, 9), "inverts the padding mask"
    ),
    "tiled": ((CAUSAL & RIGHT).expand(3, HEADS, N, N), tiled(CAUSAL & RIGHT), "repeat, not repeat_interleave"),
    "samples for heads": (
        along(CAUSAL & RIGHT[:2]), for_heads(CAUSAL & RIGHT[:2]),
        "gives heads 2 to 3 the mask of sample 1 in every sample, as if the heads were samples",
    ),
    "samples for heads, one each": (
        along(CAUSAL & FOUR), for_heads(CAUSAL & FOUR),
        "gives heads 1 to 3 the mask of samples 1 to 3 in every sample",
    ),
    "other heads": (windows(2, 4, 6, 8), windows(2, 6, 4, 8), "gives heads 1, 2 the mask of heads 2, 1"),
    "groups of heads": (windows(2, 2, 8, 8), windows(2, 8, 2, 8), "gives heads 1, 2 the mask of heads 2, 0"),
    "one key": (CAUSAL, ONE, "hides key 3 on row 9, which A shows"),
    "keys of a sample": (CAUSAL, SOME, "shows keys 10 to 12 on rows 5 to 7, which A hides (in sample 2)"),
    "keys before a window": (windows(4) | (CAUSAL & (AT < 1)), windows(4), "hides key 0 on rows 4 to 15"),
    "every second key": (CAUSAL & ((AT[:, None] - AT) % 2 == 0), CAUSAL, "some of the keys 0 to 14"),
}  # fmt: skip


def proven(a: Tensor | None, b: Tensor | None) -> list[tuple[str, str]]:
    rows, keys = next(mask for mask in (a, b) if mask is not None).shape[-2:]
    rows = keys if rows == 1 else rows
    samples = max(1 if mask is None else len(mask) for mask in (a, b))
    start = trial(Formula(0.25, visible=a), Formula(0.25, visible=b), rows, keys, batch=samples if samples > 1 else 3)
    return [(one.name, one.text) for one in start.proven()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_structure_is_named(kind: str) -> None:
    a, b, text = KINDS[kind]
    cause = "padding" if "padding mask" in text else "mask"
    ((name, said),) = proven(a, b)
    assert name == cause
    assert text in said
    ((back, other),) = proven(b, a)
    assert back == cause
    for sentence in (said, other):
        assert said_in(sentence, "zh") != sentence


TWO = {  # A's mask, B's, what is found
    "documents and padding": (CAUSAL & documents(5) & RIGHT, CAUSAL, ["mask", "padding"]),
    "documents and a window": (windows(4) & documents(5), CAUSAL, ["mask", "window"]),
    "documents of another window": (windows(4) & documents(7), windows(3) & documents(7), ["window"]),
    "documents, off by one": (CAUSAL & documents(7), visible(N, N, -1), ["mask", "mask_offset"]),
    "documents of an encoder": (CAUSAL & documents(5), None, ["mask", "mask_offset"]),
    "padding of some documents": (CAUSAL & documents(5), CAUSAL & documents(5) & RIGHT, ["padding"]),
    "images and padding": (IMAGES & LEFT, CAUSAL, ["mask", "padding"]),
    "padding of documents that stay": (CAUSAL & documents(5) & LEFT, CAUSAL & documents(5), ["padding"]),
}


@pytest.mark.parametrize("name", TWO)
def test_a_structure_is_told_from_what_differs_beside_it(name: str) -> None:
    *masks, expected = TWO[name]
    for a, b in (masks, masks[::-1]):
        assert sorted(names_found(trial(Formula(0.25, visible=a), Formula(0.25, visible=b), N, N))) == expected


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (CAUSAL & documents(5, 12), CAUSAL & ~((AT[:, None] == 7) & (AT == 6))),
        (IMAGES, CAUSAL & ~((AT[:, None] == 2) & (AT == 1))),
        (RIGHT, RIGHT.mT & ~((AT[:, None] == 2) & (AT == 1))),
        (CAUSAL, ~CAUSAL | ((AT[:, None] == 2) & (AT == 1))),
        (CAUSAL & RIGHT, (CAUSAL & RIGHT).flip(0) & ~((AT[:, None] == 9) & (AT == 1))),
    ],
)
def test_one_key_beside_a_structure_is_none(a: Tensor, b: Tensor) -> None:
    ((name, text),) = proven(a, b)
    assert name == "mask"
    assert "some of the keys" in text


# -- in modules --------------------------------------------------------------------------------------------------------


class Attend(nn.Module):
    """Eager attention with flattened heads, as `torch.bmm` takes them, under a mask (B * H, L, S) of the lengths."""

    def __init__(self, spread: Callable[[Tensor], Tensor], groups: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 8 * groups), nn.Linear(32, 8 * groups)
        self.spread = spread

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(4 // part.shape[1], 1) for part in (k, v))
        q, k, v = (part.flatten(0, 1) for part in (2 * q, 2 * k, v))
        tokens = torch.arange(x.shape[1]) < lengths[:, None]
        mask = self.spread(tokens[:, None].expand(-1, x.shape[1], -1))
        logits = torch.bmm(q, k.mT) / 8**0.5
        return torch.bmm(logits.masked_fill(~mask, float("-inf")).softmax(-1), v)


def test_masks_that_are_tiled_over_flattened_heads() -> None:
    x = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(1))
    inputs = {"x": x, "lengths": torch.tensor([12, 9, 5])}
    right, wrong = (lambda mask: mask.repeat_interleave(4, 0)), (lambda mask: mask.repeat(4, 1, 1))
    report = diff(Attend(right), Attend(wrong), inputs)
    ((cause,),) = (pair.causes for pair in report.pairs)
    assert (cause.name, cause.a, cause.b) == ("mask", "repeat_interleave", "repeat")
    assert diff(Attend(right), Attend(right), inputs).same


class Packed(nn.Module):
    """Two documents in a row, which SDPA's `is_causal` does not tell apart."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv, self.apart = nn.Linear(32, 96), apart

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        document = (position_ids == 0).cumsum(-1)
        same = (document[:, None, :, None] == document[:, None, None]).tril()
        mask = {"attn_mask": same} if self.apart else {"is_causal": True}
        return functional.scaled_dot_product_attention(q, k, v, **mask)  # type: ignore[arg-type]


def test_packed_documents_of_an_sdpa() -> None:
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(1))
    positions = torch.stack(
        [torch.cat([torch.arange(8), torch.arange(12)]), torch.cat([torch.arange(13), torch.arange(7)])]
    )
    report = diff(Packed(apart=True), Packed(apart=False), {"x": x, "position_ids": positions})
    ((cause,),) = (pair.causes for pair in report.pairs)
    assert (cause.name, cause.b) == ("mask", "none")
    assert cause.a == "boundaries at 8 in sample 0 (others in other samples)"
    assert report.paragraphs[0].startswith("B ignores the document boundaries at 8 in sample 0")


def test_a_layout_is_tried_on_a_mask_before_it_is_named() -> None:
    """A's masks are those of `repeat_interleave`; what B has is no `repeat` of them, and is not called one."""
    right = CAUSAL & RIGHT[:2]
    for a, b in ((along(right), for_heads(right)), (for_heads(right), along(right))):
        ((_, said),) = proven(a, b)
        assert "repeat" not in said


class Grouped(nn.Module):
    """Logits (B, kv heads, groups, L, S) under a mask (B, 1, L, S)."""

    def __init__(self, lay: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.q, self.k, self.v = (nn.Linear(32, 8 * heads) for heads in (4, 2, 2))
        self.lay = lay

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 2, 8)).permute(0, 2, 3, 1, 4)
        k, v = (part(x).unflatten(-1, (2, 1, 8)).permute(0, 2, 3, 1, 4) for part in (self.k, self.v))
        visible = (torch.arange(x.shape[1]) < lengths[:, None])[:, None, None]
        logits = 2 * q @ k.mT / 8**0.5
        y = logits.masked_fill(~self.lay(visible), float("-inf")).softmax(-1) @ v
        return y.permute(0, 3, 1, 2, 4).flatten(2)


def test_the_fix_of_a_mask_of_other_samples_is_the_one_that_helps() -> None:
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    inputs = {"x": x, "lengths": torch.tensor([12, 5])}
    right, wrong = Grouped(lambda mask: mask[:, :, None]), Grouped(lambda mask: mask)
    report = diff(right, wrong, inputs)
    ((cause,),) = (pair.causes for pair in report.pairs)
    assert cause.name == "mask"
    fix = fix_of(cause)
    assert fix is not None
    assert "mask[:, :, None]" in fix
    assert "repeat" not in fix
    assert diff(right, Grouped(lambda mask: mask[:, :, None]), inputs).same

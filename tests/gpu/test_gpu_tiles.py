"""Many tiles and blocks, split keys, packed heads, odd widths and strides, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sqrtdk import AuxRequest
from sqrtdk._resolve import resolve_arguments
from sqrtdk.impl.triton import row_statistics
from sqrtdk.stats import RowStats
from sqrtdk.stats.request import aux_output
from tests.gpu.judged import Leaves, attention, expected, qkv, randn, wrong_with
from tests.support.triton_here import DEVICE, needs_triton
from tests.tolerances import complaint

launch = pytest.importorskip("sqrtdk.impl.gpu.launch", reason="Triton is not installed")
pytestmark = [needs_triton, pytest.mark.usefixtures("small_tiles")]
Sizes = dict[str, Any]


def shown(length: int, keys: int, share: float = 0.6) -> Tensor:
    visible = torch.rand(length, keys, generator=torch.Generator().manual_seed(length + keys)) < share
    visible[:, 0] = True
    return visible


def factors(*sizes: int) -> Tensor:
    """Scales near that of the default."""
    return 0.1 + 0.4 * torch.rand(sizes).double()


# Tiles of 16 rows and 16 keys: three tiles and four blocks, the last of each ragged.
SELF: Sizes = {"length": 39, "keys": 53, "heads": (1, 1)}
HEADS: Sizes = {"length": 18, "keys": 37}
# More tiles than processors (four in the interpreter), so that keys are not split.
WHOLE: Sizes = {"length": 70, "keys": 41, "heads": (1, 1)}
FEW: Sizes = {"length": 3, "keys": 150, "heads": (4, 2), "value_width": 5}  # packed, and split into parts
PACKED: Sizes = {"length": 9, "keys": 37, "heads": (4, 1)}  # 36 rows, three tiles in which heads meet
GROUPS: Sizes = {"length": 21, "keys": 20, "heads": (4, 2)}  # too long to be packed

CALLS: dict[str, tuple[Sizes, Callable[[Leaves], Leaves], dict[str, Any]]] = {
    "all keys": (SELF, lambda t: {}, {}),
    "causal": (SELF, lambda t: {}, {"is_causal": True}),
    "causal, more rows": (WHOLE, lambda t: {}, {"is_causal": True}),
    "lower right": (SELF, lambda t: {}, {"causal_lower_right": True}),
    "lower right, more rows than keys": (WHOLE, lambda t: {}, {"causal_lower_right": True}),
    "window in the middle": (SELF, lambda t: {}, {"window": (18, 3), "causal_lower_right": True}),
    "window": (WHOLE, lambda t: {}, {"window": (17, 20)}),
    "window of one": (WHOLE, lambda t: {}, {"window": (0, 0)}),
    "window that leaves rows blind": (WHOLE, lambda t: {}, {"window": (4, None)}),
    "mask": (SELF, lambda t: {}, {"attn_mask": shown(39, 53)}),
    "mask, causal": (SELF, lambda t: {}, {"attn_mask": shown(39, 53, 0.3), "is_causal": True}),
    "mask of keys": (SELF, lambda t: {}, {"attn_mask": shown(1, 53)}),
    "whole blocks hidden": (SELF, lambda t: {}, {"attn_mask": torch.arange(53) // 16 % 2 == 0}),
    "rows hidden": (SELF, lambda t: {}, {"attn_mask": (torch.arange(39) % 3 > 0).unsqueeze(-1)}),
    "bias": (SELF, lambda t: {"bias": randn(1, 1, 39, 53)}, {}),
    "bias of heads and rows": (HEADS, lambda t: {"bias": randn(1, 2, 18, 37)}, {"window": (9, 9)}),
    "bias of heads": (HEADS, lambda t: {"bias": randn(2, 1, 37)}, {"is_causal": True}),
    "bias of pairs": (HEADS, lambda t: {"bias": randn(18, 37)}, {"is_causal": True}),
    "bias of keys": (HEADS, lambda t: {"bias": randn(37)}, {}),
    "bias of rows": (SELF, lambda t: {"bias": randn(39, 1)}, {"window": (20, 4)}),
    "softcap": (SELF, lambda t: {}, {"softcap": 1.5}),
    "softcap, causal, sink": (HEADS, lambda t: {"sinks": randn(2)}, {"softcap": 30.0, "is_causal": True}),
    "sinks of rows": (HEADS, lambda t: {"sinks": randn(1, 2, 18, 1)}, {}),
    "negative scale": (SELF, lambda t: {}, {"scale": -0.3, "is_causal": True}),
    "scale of nothing": (SELF, lambda t: {}, {"scale": 0.0, "window": (9, 9)}),
    "scale of heads": (HEADS, lambda t: {"scale": factors(2, 1, 1)}, {"is_causal": True}),
    "scale of rows": (SELF, lambda t: {"scale": factors(39, 1)}, {"softcap": 3.0}),
    "few rows": (FEW, lambda t: {}, {}),
    "few rows, causal": (FEW, lambda t: {}, {"causal_lower_right": True}),
    "few rows, window": (FEW, lambda t: {}, {"causal_lower_right": True, "window": (70, None)}),
    "few rows, window of the first parts": (FEW, lambda t: {}, {"window": (2, 30)}),
    "few rows, mask": (FEW, lambda t: {}, {"attn_mask": shown(3, 150)}),
    "few rows, a part hidden": (FEW, lambda t: {}, {"attn_mask": torch.arange(150) // 32 % 2 == 1}),
    "few rows, everything": (
        FEW,
        lambda t: {"bias": randn(4, 3, 150), "sinks": randn(4), "scale": factors(3, 1)},
        {"attn_mask": shown(3, 150), "softcap": 4.0},
    ),
    "one row": ({"length": 1, "keys": 200, "heads": (1, 1)}, lambda t: {"sinks": randn(1)}, {}),
    "packed": (PACKED, lambda t: {}, {}),
    "packed, causal": (PACKED, lambda t: {}, {"is_causal": True}),
    "packed, window": (PACKED, lambda t: {}, {"window": (3, 12), "causal_lower_right": True}),
    "packed, everything": (
        PACKED,
        lambda t: {"bias": randn(4, 9, 37), "sinks": randn(4), "scale": factors(4, 1, 1)},
        {"attn_mask": shown(9, 37)},
    ),
    "groups": (GROUPS, lambda t: {}, {"is_causal": True}),
    "groups, bias": (GROUPS, lambda t: {"bias": randn(4, 21, 20)}, {}),
}
# every time: each kind of mask, bias, scale and sink, packed heads, groups, and keys in parts
EVERY_TIME = {
    "all keys", "causal, more rows", "window in the middle", "window of one", "mask, causal", "bias of pairs",
    "bias of heads", "softcap", "scale of rows", "few rows, everything", "packed, causal", "groups",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.sampled(3)) for name in CALLS]
)
def test_many_tiles_agree_with_the_oracle(name: str) -> None:
    sizes, more, options = CALLS[name]
    leaves = qkv(**sizes)
    wrong = wrong_with(leaves | more(leaves), **options)
    assert not wrong, "\n".join(wrong)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("width", "value_width"), [(1, 1), (3, 17), (17, 3), (32, 16), (80, 96), (96, 80), (192, 128), (256, 256)]
)
def test_widths(width: int, value_width: int) -> None:
    wrong = wrong_with(qkv(18, 21, width, value_width, (1, 1)), is_causal=True)
    assert not wrong, "\n".join(wrong)


def strided(tensor: Tensor, kind: str) -> Tensor:
    """The same numbers elsewhere in memory."""
    if kind == "heads after positions":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "columns far apart":
        return tensor.mT.contiguous().mT
    if kind == "every second column":
        return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]
    assert kind == "off the start"
    return torch.cat([tensor.new_zeros(3), tensor.flatten()])[3:].view(tensor.shape)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["heads after positions", "columns far apart", "every second column", "off the start"])
@pytest.mark.parametrize("length", [3, 18])
def test_where_numbers_lie_does_not_matter(kind: str, length: int) -> None:
    leaves = qkv(length, 37, 12, 7) | {"bias": randn(1, 2, length, 37), "attn_mask": randn(1, 2, length, 37)}
    elsewhere = {name: strided(leaf, kind) for name, leaf in leaves.items()}
    assert all(not leaf.is_contiguous() or leaf.storage_offset() for leaf in elsewhere.values())
    request = AuxRequest.all()

    def run(leaves: Leaves) -> list[Tensor]:
        given = {name: leaf.to(DEVICE, torch.float32).requires_grad_() for name, leaf in leaves.items()}
        given = {name: strided(leaf.detach(), kind) if leaves is elsewhere else leaf for name, leaf in given.items()}
        for leaf in given.values():
            leaf.requires_grad_()
        output, aux = attention(given, {}, request)
        return [
            output,
            *aux,
            *torch.autograd.grad(output.square().sum() + aux.entropy_nats.sum(), list(given.values())),
        ]

    assert all(map(torch.equal, run(elsewhere), run(leaves)))


def test_keys_expanded_over_the_batch_are_read_in_place() -> None:
    """A tensor of stride 0, which no copy of the batch's size is made of."""
    leaves = qkv(5, 40)
    query = randn(3, 2, 5, 16)
    output = attention({"query": query.float(), "key": leaves["key"].float().expand(3, -1, -1, -1),
                        "value": leaves["value"].float().expand(3, -1, -1, -1)}, {})  # fmt: skip
    wanted = expected(leaves | {"query": query}, {}).output
    assert complaint(output.cpu(), wanted, torch.float32, length=40, logit=10.0) is None


# splitting


def parts_of(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Into how many parts each launch of a call split its keys."""
    seen: list[int] = []
    split = launch.split_keys

    def watched(*args: Any) -> tuple[int, int]:
        found = split(*args)
        seen.append(found[0])
        return found

    monkeypatch.setattr(launch, "split_keys", watched)
    attention({name: leaf.float() for name, leaf in qkv(**sizes).items()}, {})
    return seen


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU with more processors other calls are split")
def test_the_calls_above_are_split_and_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts_of(FEW, monkeypatch) == [4]


@pytest.mark.parametrize("parts", [7, *(pytest.param(parts, marks=pytest.mark.full) for parts in (1, 2, 10))])
def test_parts_give_what_the_whole_gives(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where whole parts lie outside of what a row sees."""
    monkeypatch.setattr(launch, "split_keys", lambda programs, keys, *rest: (parts, -(-keys // parts // 16) * 16))
    leaves = qkv(3, 150, 8, 8, (2, 1)) | {"sinks": randn(2)}
    wrong = wrong_with(leaves, is_causal=True, gradients=False)
    wrong += wrong_with(leaves, window=(30, 2), causal_lower_right=True, gradients=False)
    assert not wrong, "\n".join(wrong)


# sampled rows


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["all keys", "causal", "lower right", "window in the middle", "mask", "bias",
                                  "scale of rows", "softcap", "packed, causal", "few rows, causal"])  # fmt: skip
@pytest.mark.parametrize("rows", ["some", "all"])
def test_measured_rows_are_those_of_the_whole(name: str, rows: str) -> None:
    sizes, more, options = CALLS[name]
    leaves = qkv(**sizes)
    leaves |= more(leaves)
    at = torch.tensor([sizes["length"] - 1, 0, 2]) if rows == "some" else None
    found = measured(leaves, options, at)
    answer = expected(leaves, options)
    for field, value in aux_output(AuxRequest.all(), found)._asdict().items():
        wanted = answer.statistics[field] if at is None else answer.statistics[field][..., at]
        text = complaint(
            value.cpu(), wanted, torch.float32, length=sizes["keys"], logit=answer.size, magnitude=1.0 + answer.size
        )
        assert text is None, f"{field}: {text}"


def measured(leaves: Leaves, options: dict[str, Any], rows: Tensor | None) -> RowStats:
    """What `measure` would return, by the kernel, which it takes on a GPU alone."""
    given = {name: leaf.to(DEVICE, torch.float32) for name, leaf in leaves.items()}
    given |= {name: value.to(DEVICE) for name, value in options.items() if isinstance(value, Tensor)}
    given["value"] = given["key"][..., :0]
    call = resolve_arguments(**{**options, **given}, enable_gqa=True)
    return row_statistics(call if rows is None else call.sample(rows.to(DEVICE)))

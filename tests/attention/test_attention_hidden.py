"""What no row sees does not count: NaN, infinity and numbers that overflow at hidden keys change nothing.

Every pair of mask, heads, softcap, sinks, scale, place, number, keys and dtype meets in a case; each case is called
with zeros at its hidden keys and with bad numbers there, and output, statistics and gradients have to agree. Torch's
kernels and the compiled one refuse a call that holds such numbers, where these would count.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import AuxRequest
from sqrtdk.errors import UnsupportedError
from tests.attention.calls import IMPLEMENTATIONS, close, qkv
from tests.attention.covering import Row, covering
from tests.attention.oracle import visible_keys
from tests.tolerances import complaint

LENGTH, DIM, HEADS = 7, 8, 4
MASKS: dict[str, dict[str, Any]] = {
    "bool": {"mask": "bool"},
    "float": {"mask": "float"},
    "blind": {"mask": "blind"},
    "causal": {"is_causal": True},
    "lower_right": {"causal_lower_right": True},
    "window": {"window": (2, 1)},
    "bool_causal": {"mask": "bool", "is_causal": True},
    "bool_window": {"mask": "bool", "window": (5, 2)},
    "float_causal": {"mask": "float", "is_causal": True},
    "float_window": {"mask": "float", "window": (5, 2)},
    "float_lower_right": {"mask": "float", "causal_lower_right": True},
    "window_lower_right": {"window": (2, 0), "causal_lower_right": True},
    "all_of_them": {"mask": "blind", "window": (5, 1), "is_causal": True, "causal_lower_right": True},
}
FACTORS = {
    "mask": list(MASKS),
    "heads": ["4", "2", "1"],  # of keys and values
    "keys": ["9", "40"],
    "softcap": ["none", "2"],
    "sinks": ["none", "heads"],
    "scale": ["default", "negative", "tensor"],
    "place": ["key", "value", "key and value", "bias", "query and key"],
    "bad": ["nan", "inf", "-inf", "large"],
    "dtype": ["float64", "float32", "bfloat16", "float16"],
    "only": ["hidden from all", "hidden from some"],
}
CASES = covering(FACTORS, lambda row: True)


@dataclass(frozen=True)
class Hidden:
    """One case: arguments, and where its bad numbers go."""

    leaves: dict[str, Tensor]
    options: dict[str, Any]
    visible: Tensor  # (B, H, L, S)
    columns: Tensor  # (B, Hkv, S): keys that take the bad number
    number: float

    @property
    def spared(self) -> Tensor:
        """(B, H, L): rows that see none of these keys."""
        group = HEADS // self.columns.shape[1]
        return ~(self.visible & self.columns.repeat_interleave(group, 1).unsqueeze(-2)).any(-1)

    def leaves_with(self, place: str, number: float) -> dict[str, Tensor]:
        """Fresh leaves; `number` stands at the places, and where queries are large, rows that see nothing hold it."""
        found = {name: leaf.clone() for name, leaf in self.leaves.items()}
        for name in ("key", "value"):
            if name in place:
                found[name][self.columns] = number
        if "query" in place:  # times a large key: no finite number
            found["query"][~self.visible.any(-1)] = number
        if place == "bias":
            found["bias"][~self.visible] = number
        return {name: leaf.requires_grad_() for name, leaf in found.items()}


def made(row: Row) -> Hidden:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(sorted(row.items())).encode()))
    dtype, keys, heads = getattr(torch, row["dtype"]), int(row["keys"]), int(row["heads"])

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    options = dict(MASKS[row["mask"]])
    kind = options.pop("mask", None)
    mask = None
    if kind is not None:
        shown = torch.rand(2, HEADS, LENGTH, keys, generator=generator) > 0.3
        shown[..., 0], shown[..., -2:] = True, False
        if kind == "blind":
            shown[..., ::3, :] = False
        mask = shown if kind != "float" else random(*shown.shape).to(dtype).masked_fill(~shown, -math.inf)
        options["attn_mask"] = mask
    visible = visible_keys(
        (2, HEADS, LENGTH, keys),
        mask,
        options.get("is_causal", False),
        options.get("causal_lower_right", False),
        options.get("window"),
    )
    group = HEADS // heads
    by_key_head = visible.view(2, heads, group * LENGTH, keys)
    unseen, half_seen = ~by_key_head.any(-2), ~by_key_head.all(-2)
    columns = half_seen if row["only"] == "hidden from some" or not unseen.any() else unseen
    if row["only"] == "hidden from some":
        columns = columns & (torch.arange(keys) % 3 == 1)
    leaves = {
        "query": random(2, HEADS, LENGTH, DIM),
        "key": random(2, heads, keys, DIM),
        "value": random(2, heads, keys, DIM),
    }
    if row["place"] == "bias":
        leaves["bias"] = random(2, HEADS, LENGTH, keys)
    if row["sinks"] != "none":
        leaves["sinks"] = random(HEADS)
    if row["scale"] == "tensor":
        leaves["scale"] = random(HEADS, 1, 1).abs()
    elif row["scale"] == "negative":
        options["scale"] = -0.4
    if row["softcap"] != "none":
        options["softcap"] = float(row["softcap"])
    options["enable_gqa"] = heads != HEADS
    number = float(row["bad"]) if row["bad"] != "large" else 0.9 * torch.finfo(dtype).max
    return Hidden({name: leaf.to(dtype) for name, leaf in leaves.items()}, options, visible, columns, number)


def differences(case: Hidden, place: str, impl: str, dtype: torch.dtype, keys: int) -> list[str]:
    """What bad numbers at hidden places change."""
    wrong = []

    def compare(name: str, actual: Tensor, expected: Tensor, spared: Tensor | None = None) -> None:
        if spared is not None:
            actual, expected = actual[spared], expected[spared]
        told = complaint(
            actual.detach(), expected.detach().double(), dtype, length=max(keys, LENGTH), logit=20.0, magnitude=1.0
        )
        if told is not None:
            wrong.append(f"{name}: {told}")

    clean, dirty = case.leaves_with(place, 0.0), case.leaves_with(place, case.number)
    with torch.no_grad():
        expected, statistics = sqrtdk.attention(**clean, **case.options, return_aux=AuxRequest.all(), impl="dense")
        alone = sqrtdk.attention(**dirty, **case.options, impl=impl)
        output, found = sqrtdk.attention(**dirty, **case.options, return_aux=AuxRequest.all(), impl=impl)
        compare("output", output, expected, case.spared)
        compare("output without statistics", alone, expected, case.spared)
        for name, one, other in zip(found._fields, found, statistics, strict=True):
            compare(name, one, other, case.spared)
    if not case.spared.all():
        return wrong
    one, other = gradients(dirty, case.options, impl), gradients(clean, case.options, "dense")
    for name, gradient in other.items():
        compare(f"gradient of {name}", one[name], gradient)
    return wrong


def gradients(leaves: dict[str, Tensor], options: dict[str, Any], impl: str) -> dict[str, Tensor]:
    output, aux = sqrtdk.attention(**leaves, **options, return_aux=AuxRequest(lse=True, entropy_nats=True), impl=impl)
    total = output.square().sum() + aux.entropy_nats.sum() + aux.lse.masked_fill(aux.lse == -math.inf, 0.0).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {name: torch.zeros(()) if g is None else g for name, g in zip(leaves, found, strict=True)}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("impl", ["auto", "dense", "tiled"])
@pytest.mark.parametrize("row", CASES, ids=lambda row: "-".join(row.values()).replace(" ", "_"))
def test_what_is_hidden_changes_nothing(impl: str, row: Row) -> None:
    case = made(row)
    assert row["place"] in ("bias", "query and key") or case.columns.any()
    wrong = differences(case, row["place"], impl, getattr(torch, row["dtype"]), int(row["keys"]))
    assert not wrong, "\n".join(wrong)


def test_every_pair_of_values_meets_in_a_case() -> None:
    pairs = {
        frozenset(((a, x), (b, y))) for a, b in combinations(FACTORS, 2) for x, y in product(FACTORS[a], FACTORS[b])
    }
    assert {frozenset(pair) for row in CASES for pair in combinations(row.items(), 2)} == pairs


@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name in ("cpu", "fused")])
@pytest.mark.parametrize("place", ["key", "value", "bias"])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_kernel_refuses_what_would_count_in_it(impl: str, place: str, bad: str, dtype: torch.dtype) -> None:
    """A large number counts times another one; the largest of float16 stays within float32, in which both compute."""
    number = float(bad) if bad != "large" else 0.9 * torch.finfo(dtype).max
    query, key, value = (tensor.detach() for tensor in qkv(keys=40, dtype=dtype))
    clean = {"query": query, "key": key, "value": value, "bias": torch.zeros(7, 40, dtype=dtype)}
    hidden = torch.arange(40) == 5
    dirty = clean | {place: clean[place].masked_fill(hidden if place == "bias" else hidden.unsqueeze(-1), number)}
    if bad == "large" and (place == "bias" or dtype == torch.float16):
        close(
            sqrtdk.attention(**dirty, attn_mask=~hidden, impl=impl),
            sqrtdk.attention(**clean, attn_mask=~hidden, impl="dense"),
        )
        return
    with pytest.raises(UnsupportedError, match="can't run this call: NaN or infinity stands at a hidden key"):
        sqrtdk.attention(**dirty, attn_mask=~hidden, impl=impl)

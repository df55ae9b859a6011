"""Weights of two sides are paired by their numbers, whatever their names and layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sqrtdk.compare.weights.changes import HeldWeights
from sqrtdk.compare.weights.layouts import match_of, rows_match
from sqrtdk.compare.weights.pairing import WeightPair, WeightPairs, pair_weights

H, E, D = 4, 6, 20


def _only(found: WeightPairs) -> WeightPair:
    (pair,) = found.pairs
    assert not found.alone_a
    assert not found.alone_b
    return pair


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape)


LAYOUTS = {
    "same": (lambda w: w, "same"),
    "transposed": (lambda w: w.mT, "transposed"),
    "heads": (lambda w: w.mT.reshape(D, H, E), "transposed"),
    "heads_first": (lambda w: w.mT.reshape(D, H, E).transpose(0, 1), "axes"),
    "heads_last": (lambda w: w.reshape(H, E, D), "reshaped"),
    "flat": (lambda w: w.reshape(-1), "reshaped"),
    "padded": (lambda w: w[None, :, None], "same"),
    "gguf": (lambda w: w.reshape(H, 2, E // 2, D).swapaxes(1, 2).reshape(H * E, D), "permuted"),
    "gguf_transposed": (lambda w: w.reshape(H, 2, E // 2, D).swapaxes(1, 2).reshape(H * E, D).mT, "permuted"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_recognised_and_undone(name: str) -> None:
    change, kind = LAYOUTS[name]
    w, other = _draw(H * E, D), _draw(H * E, D)
    found = pair_weights({"q_proj.weight": w, "k_proj.weight": other}, {"x": change(other), "y": change(w)})
    pairs = {pair.a: pair for pair in found.pairs}
    assert (pairs["q_proj.weight"].b, pairs["k_proj.weight"].b) == ("y", "x")
    layout = pairs["q_proj.weight"].layout
    assert layout.kind == kind
    torch.testing.assert_close(layout.as_a(w, change(w)), w, rtol=0, atol=0)
    torch.testing.assert_close(layout.as_a(w, change(w + 1)), w + 1, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3 * D, D), (3, D, D), (D, 3, D), (D, 3 * D)])
def test_parts_of_a_fused_weight_are_found(shape: tuple[int, ...]) -> None:
    q, k, v = (_draw(D, D) for _ in range(3))
    stacked = torch.stack([q, k, v])  # (3, out, in)
    fused = {
        (3 * D, D): stacked.reshape(3 * D, D),
        (3, D, D): stacked.mT,
        (D, 3, D): stacked.permute(2, 0, 1),
        (D, 3 * D): stacked.permute(2, 0, 1).reshape(D, 3 * D),
    }[shape]
    whole, parts = {"wqkv": fused}, {"q": q, "k": k, "v": v}
    for a, b in ((parts, whole), (whole, parts)):
        found = pair_weights(a, b)
        assert {(pair.a, pair.b) for pair in found.pairs} == {(x, y) for x in a for y in b}
        assert {pair.layout.kind for pair in found.pairs} == {"part"}
        assert not found.alone_a + found.alone_b
    match = rows_match(k, fused)
    assert match is not None
    torch.testing.assert_close(match.layout.as_a(torch.zeros(D, D), fused), k, rtol=0, atol=0)
    back = rows_match(fused, k)
    assert back is not None
    torch.testing.assert_close(back.layout.as_a(torch.where(fused == fused, fused, 0), k), fused, rtol=0, atol=0)


def test_a_bias_is_a_part_of_a_fused_one() -> None:
    b = _draw(3 * H * E)
    q, k, v = b.reshape(3, H, E)
    found = pair_weights({"c_attn.bias": b}, {"bq": q, "bk": k, "bv": v})
    assert [(pair.a, pair.b, pair.layout.kind) for pair in found.pairs] == [
        ("c_attn.bias", name, "part") for name in ("bq", "bk", "bv")
    ]


def test_numbers_that_are_changed_as_a_whole() -> None:
    w, g = _draw(8, 12), _draw(12)
    assert _only(pair_weights({"w": w}, {"v": w.mT.bfloat16()})).numbers == "rounded"
    scaled = _only(pair_weights({"w": w}, {"v": w.mT * 0.25}))
    assert (scaled.numbers, scaled.factor) == ("scaled", 0.25)
    offset = _only(pair_weights({"norm.weight": g}, {"g": g + 1}))
    assert (offset.numbers, offset.factor) == ("offset", 1.0)


def test_a_tied_weight_belongs_to_both() -> None:
    w = _draw(16, 8)
    found = pair_weights({"wte.weight": w}, {"embed": w, "head": w.mT})
    assert [(pair.a, pair.b, pair.tied) for pair in found.pairs] == [
        ("wte.weight", "embed", False),
        ("wte.weight", "head", True),
    ]


def _layers(count: int = 3) -> dict[str, Tensor]:
    shapes = {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24), "o_proj": (16, 16)}
    return {f"layers.{n}.{name}.weight": _draw(*shape) for n in range(count) for name, shape in shapes.items()}


def _port(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_proj.weight", "").replace("layers", "blocks"): w.mT for name, w in weights.items()}


def test_a_weight_that_was_not_loaded_is_paired_by_its_role() -> None:
    a = _layers()
    b = _port(a)
    b["blocks.1.down"] = _draw(24, 16)
    found = pair_weights(a, b)
    (pair,) = found.suspects
    assert (pair.a, pair.b, pair.numbers) == ("layers.1.down_proj.weight", "blocks.1.down", "other")
    assert pair.layout.kind == "transposed"


def test_constants_are_paired_by_place() -> None:
    a = {f"h.{n}.{name}": torch.zeros(6) for n in range(2) for name in ("ln_1.bias", "ln_2.bias")}
    b = {f"blocks.{n}.{name}": torch.zeros(6) for n in range(2) for name in ("ln1.bias", "ln2.bias")}
    found = pair_weights(a, b)
    assert {(pair.a, pair.b) for pair in found.pairs} == {
        (f"h.{n}.ln_{m}.bias", f"blocks.{n}.ln{m}.bias") for n in range(2) for m in (1, 2)
    }


@pytest.mark.parametrize("trained", [False, True])
def test_norms_of_ones_do_not_tell_which_module_is_which(trained: bool) -> None:
    """`post_attention_layernorm` is less like `ffn_norm` than like `attn_norm`, and they hold the same ones."""
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.up_proj": "ffn_up"}
    a = {f"layers.{n}.{name}.weight": torch.ones(6) for n in range(2) for name in names}
    a |= {name: _draw(6) for name in a if trained}
    a |= {f"layers.{n}.mlp.up_proj.weight": _draw(8, 6) for n in range(2)}
    b = {f"blk.{n}.{other}.weight": a[f"layers.{n}.{name}.weight"] for n in range(2) for name, other in names.items()}
    told = names if trained else {"mlp.up_proj": "ffn_up"}
    homes = HeldWeights(pair_weights(a, b), a, b).homes()
    assert homes == {f"layers.{n}.{name}": f"blk.{n}.{other}" for n in range(2) for name, other in told.items()}


def test_a_square_matrix_in_the_other_convention_is_told() -> None:
    a = _layers()
    b = _port(a)
    assert not pair_weights(a, b).suspects
    b["blocks.0.o"] = a["layers.0.o_proj.weight"]
    (pair,) = pair_weights(a, b).suspects
    assert (pair.a, pair.turned, pair.layout.kind) == ("layers.0.o_proj.weight", True, "transposed")


def test_exchanged_layers_and_names_are_told() -> None:
    a = _layers()
    b = _port(a)
    b["blocks.0.up"], b["blocks.1.up"] = b["blocks.1.up"], b["blocks.0.up"]
    assert {(pair.a, pair.b) for pair in pair_weights(a, b).suspects} == {
        ("layers.0.up_proj.weight", "blocks.0.up"),
        ("layers.1.up_proj.weight", "blocks.1.up"),
    }
    b = _port(a)
    for n in range(3):
        b[f"blocks.{n}.up"], b[f"blocks.{n}.gate"] = b[f"blocks.{n}.gate"], b[f"blocks.{n}.up"]
    assert {(pair.a.split(".")[2], pair.b.split(".")[2]) for pair in pair_weights(a, b).suspects} == {
        ("up_proj", "up"),
        ("gate_proj", "gate"),
    }


def test_layers_that_are_counted_from_one_are_not_exchanged() -> None:
    a = _layers()
    b = {f"h.{int(name.split('.')[1]) + 1}.{name.split('.')[2]}": w for name, w in _port(a).items()}
    found = pair_weights(a, b)
    assert not found.suspects
    assert len(found.pairs) == len(a)


def test_what_has_no_partner_is_listed() -> None:
    w = _draw(8, 12)
    found = pair_weights({"w": w, "old": _draw(5)}, {"v": w.mT, "new": _draw(3, 3)})
    assert (found.alone_a, found.alone_b) == (("old",), ("new",))
    assert match_of(w, _draw(8, 12)) is None

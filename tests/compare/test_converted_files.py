"""Files of converted checkpoints: channels in the order of the other rotary layout, k and v in float16, unsaid.

llama.cpp's converter reorders the rows of the q and k projections for its own rotary layout, and its cache rounds k
and v to float16; a hook in it writes both as float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.compare.rounding.precision import stored_in
from tests.compare.engine_files import write_trace

BATCH, ROWS, WIDTH, HEADS, GROUPS, CHANNELS = 1, 12, 32, 4, 2, 8
BASE = 1e4
SHUFFLE = torch.tensor([3, 0, 6, 1, 7, 5, 2, 4])
ORDER = torch.arange(CHANNELS).view(2, -1).T.flatten()  # (c, c + E / 2) side by side


def turned(x: Tensor, base: float = BASE, *, neighbours: bool = False) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(0, CHANNELS, 2).double() / CHANNELS)
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
    pair = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    return (torch.stack(pair, -1).flatten(-2) if neighbours else torch.cat(pair, -1)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, GROUPS * CHANNELS, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (y.unflatten(-1, (-1, CHANNELS)).transpose(1, 2) for y in parts)
        k, v = (y.repeat_interleave(HEADS // GROUPS, 1) for y in (turned(k), v))
        y = torch.nn.functional.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Engine:
    """How an engine that runs the same checkpoint differs, and what it writes.

    Attributes:
        reordered: q and k have their channels in the order of neighbours.
        neighbours: neighbouring channels are turned together.
        half: what it holds in float16, of "qkvo".
        base: base of the rotation.
        scale: factor on q . k.
        projected: q and k before the rotation are written.
        weights: and so are their projections.
        other_input: its tokens are not A's.
        shuffled: q and k have their channels in an order of no layout when they meet.
    """

    reordered: bool = False
    neighbours: bool = False
    half: str = ""
    base: float = BASE
    scale: float = CHANNELS**-0.5
    projected: bool = False
    weights: bool = False
    other_input: bool = False
    shuffled: bool = False


def engine_file(engine: Engine, model: Attention, x: Tensor, path: Path) -> Path:
    given = x.flip(1) if engine.other_input else x
    order, found = ORDER if engine.reordered else torch.arange(CHANNELS), {}
    for letter, linear in (("q", model.q_proj), ("k", model.k_proj), ("v", model.v_proj)):
        weight = linear.weight.detach().unflatten(0, (-1, CHANNELS))
        weight = weight if letter == "v" else weight[:, order]
        projected = torch.einsum("bld,hed->bhle", given, weight)
        values = projected if letter == "v" else turned(projected, engine.base, neighbours=engine.neighbours)
        values = values[..., SHUFFLE] if engine.shuffled and letter != "v" else values
        entry = {"values": values.half().float() if letter in engine.half else values}
        if letter != "v" and engine.projected:
            entry["projected"] = projected
        if letter != "v" and engine.weights:
            features = torch.arange(weight.shape[0] * CHANNELS).view(-1, CHANNELS)
            entry |= {"input": given, "weight": weight, "features": features}
        found[letter] = entry
    q, k, v = (found[letter]["values"] for letter in "qkv")
    k, v = (y.repeat_interleave(HEADS // GROUPS, 1) for y in (k, v))
    hidden = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
    logits = (q @ k.mT * engine.scale).masked_fill(hidden, float("-inf"))
    output = logits.softmax(-1) @ v
    output = output.half().float() if "o" in engine.half else output
    call = {name: {key: x.numpy() for key, x in entry.items()} for name, entry in found.items()}
    for letter in "qk" if engine.weights else "":
        call[letter]["projection"] = f"{letter}_proj.weight"
    terms = [{"name": "scale", "value": engine.scale}, {"name": "mask", "detail": "causal", "least": 0}]
    write_trace(path, [{"site": "", "output": output.numpy(), "terms": terms, **call}])
    return path


def compared(engine: Engine, path: Path) -> sqrtdk.DiffReport:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(BATCH, ROWS, WIDTH)
    for linear in (model.q_proj, model.k_proj):
        nn.init.normal_(linear.weight, std=0.5)
    return sqrtdk.diff(model, engine_file(engine, model, x, path / "b.safetensors"), (x,))


GGUF = Engine(reordered=True, neighbours=True)
HELD = ("rounding", "holds k and v in float16 while it calls itself float32")
LAYOUT = ("rope_layout", "pairs the channels of q and k interleaved instead of half-split")
OTHER_BASE = ("rope_base", "turns q and k with base 500000 instead of base 10000")
NO_CAUSE: list[tuple[str, str]] = []
FILES = {
    "as A": (Engine(), True, NO_CAUSE),
    "reordered": (GGUF, True, NO_CAUSE),
    "reordered, before the rotation": (replace(GGUF, projected=True), True, NO_CAUSE),
    "reordered, with weights": (replace(GGUF, projected=True, weights=True), True, NO_CAUSE),
    "reordered, of another input": (replace(GGUF, projected=True, other_input=True), None, NO_CAUSE),
    "shuffled alike": (Engine(shuffled=True), True, NO_CAUSE),
    "shuffled alike, another scale": (
        Engine(shuffled=True, scale=1.0), False, [("scale", "leaves the scale out (1 in place of 0.3536)")]
    ),
    "the wrong layout": (Engine(neighbours=True), False, [LAYOUT]),
    "the wrong layout, before the rotation": (Engine(neighbours=True, projected=True), False, [LAYOUT]),
    "k and v in float16": (Engine(half="kv"), False, [HELD]),
    "reordered, k and v in float16": (replace(GGUF, half="kv"), False, [HELD]),
    "and before the rotation": (replace(GGUF, half="kv", projected=True), False, [HELD]),
    "and with weights": (replace(GGUF, half="kv", projected=True, weights=True), False, [HELD]),
    "all in float16": (Engine(half="qkvo"), True, NO_CAUSE),
    "another base": (replace(GGUF, base=5e5), False, [OTHER_BASE]),
    "another base, in float16": (Engine(half="kv", base=5e5), False, [HELD, OTHER_BASE]),
    "another base, reordered, in float16": (replace(GGUF, half="kv", base=5e5), False, [HELD, OTHER_BASE]),
    "the wrong layout, in float16": (Engine(neighbours=True, half="kv"), False, [HELD, LAYOUT]),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FILES)
def test_what_a_converted_file_is_told_of(name: str, tmp_path: Path) -> None:
    engine, same, causes = FILES[name]
    report = compared(engine, tmp_path)
    pair = report.pairs[0]
    assert (pair.same, sorted((cause.name, cause.text) for cause in pair.causes)) == (same, sorted(causes))
    assert all(0 <= share <= 1 for share in (pair.explained or 0.0, *(cause.explained for cause in pair.causes)))
    assert pair.residue is None or pair.difference is None or pair.residue <= pair.difference
    # no stage with a cause of its own is said to make no difference
    assert not {cause.stage for cause in pair.causes} & set(pair.cancelling)


def test_the_tensors_that_tell_are_named(tmp_path: Path) -> None:
    report = compared(replace(GGUF, projected=True, other_input=True), tmp_path)
    assert "`q.weight`" in (report.pairs[0].reason or "")


def test_a_side_whose_numbers_are_all_of_float16_is_told_as_that(tmp_path: Path) -> None:
    report = compared(Engine(half="qkvo"), tmp_path)
    assert report.b.dtype == "float16"
    assert any("calls itself float32" in note for note in report.environment["notes"])


def test_numbers_with_few_digits_are_not_taken_for_rounded() -> None:
    assert stored_in(torch.randn(64).bfloat16().float(), torch.float32) is torch.bfloat16
    assert stored_in(torch.zeros(64), torch.float32) is None
    assert stored_in(torch.randn(64).half().float(), torch.float16) is None
    assert stored_in(torch.from_numpy(numpy.full(64, numpy.inf)), torch.float32) is None

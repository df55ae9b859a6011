"""What looks like a cause and is none, and causes at the edges: one row, laws that are no base, rows of images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.inside.compute import follow_path, project_input
from sqrtdk.compare.inside.program import Affine, Program, Rotation, layout_order
from sqrtdk.compare.inside.suspect import Sides, Suspicion
from sqrtdk.positions import rope_tables, yarn_frequencies
from sqrtdk.tracing.probe.tables import take_apart
from tests.compare.causes.vector_programs import (
    CHANNELS,
    EXACT,
    HEADS,
    ROWS,
    STYLES,
    differ,
    entering,
    normed,
    on,
    outputs_differ,
    program,
    projected,
    sides,
    table,
    turned,
)


def suspicions(both: Sides) -> list[Suspicion]:
    return [suspicion for suspect in CAUSES.values() for suspicion in suspect(both)]


def _relaid(old: Affine, style: str) -> Affine:
    """Rows of each head as the other rotary layout wants them."""
    turn = next(s for s in program(STYLES[style]).query.steps if isinstance(s, Rotation))
    order = layout_order(torch.arange(CHANNELS), turn)
    return replace(old, weight=old.weight[:, order], bias=None if old.bias is None else old.bias[:, order])


@pytest.mark.parametrize("style", ["llama", "gpt-j"])
def test_a_checkpoint_that_was_converted_for_the_other_layout(style: str) -> None:
    a, entered = program(STYLES[style]), entering()
    other = {"half": "interleaved", "interleaved": "half"}
    b = projected("qk", lambda x: _relaid(x, style))(turned("qk", lambda r: replace(r, layout=other[r.layout]))(a))
    assert not outputs_differ(a, b, entered)
    assert suspicions(sides(a, b)) == []
    half_done = projected("qk", lambda x: _relaid(x, style))(a)
    assert outputs_differ(a, half_done, entered)
    (suspicion,) = suspicions(sides(a, half_done))
    assert (suspicion.name, suspicion.b) == (
        "head_order",
        "channels of each head in the order of the other rotary layout",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_that_were_rounded_are_named_as_that_where_the_run_is_finer(dtype: torch.dtype) -> None:
    a = program(STYLES["gpt-j"])

    def rounded(old: Affine) -> Affine:
        bias = None if old.bias is None else old.bias.to(dtype).double()
        return replace(old, weight=old.weight.to(dtype).double(), bias=bias)

    b = projected("qkv", rounded)(a)
    named = [] if dtype is torch.float32 else ["weights"]
    assert [one.name for one in suspicions(sides(a, b))] == [one.name for one in suspicions(sides(b, a))] == named
    moved = projected("q", lambda x: replace(x, weight=x.weight[[1, 0, 2, 3]], bias=x.bias[[1, 0, 2, 3]]))(b)
    assert ("head_order", "heads 1 0 2 3") in {(one.name, one.b) for one in suspicions(sides(a, moved))}


def test_heads_that_a_side_repeats_in_its_weights() -> None:
    """A key for each query head, with the rows of the heads that A has: the same; in another order: group_order."""
    a, entered = program(STYLES["llama"]), entering()

    def repeated(order: list[int]) -> Program:
        def edit(way):
            affine = way.affine
            rows = replace(affine, weight=affine.weight[order], features=affine.features[order])
            return replace(way, affine=rows, heads=torch.arange(HEADS))

        return on("kv", edit)(a)

    assert differ(a, repeated([0, 0, 1, 1]), entered) < EXACT
    assert suspicions(sides(a, repeated([0, 0, 1, 1]))) == []
    tiled = repeated([0, 1, 0, 1])
    (suspicion,) = suspicions(sides(a, tiled))
    assert (suspicion.name, suspicion.a, suspicion.b) == ("group_order", "0 0 1 1", "0 1 0 1")
    assert differ(suspicion.change(a), tiled, entered) < EXACT


def test_rows_of_another_input_are_not_looked_at() -> None:
    """In cross attention q has an input of its own: rows of k in its place are other weights, no order."""
    a = program(STYLES["bert"])
    assert a.key.affine is not None
    rows = a.key.affine.weight
    b = projected("q", lambda x: replace(x, weight=rows))(
        projected("k", lambda x: replace(x, weight=x.weight.flip(0)))(a)
    )
    across = replace(sides(a, b), self_attention=False)
    assert {s.name for s in CAUSES["head_order"](across)} == {"head_order"}
    assert [s.stage for s in CAUSES["head_order"](across)] == ["key"]


@pytest.mark.parametrize("position", [ROWS, 0, 3.5])
def test_one_row_of_the_query_takes_the_frequencies_of_the_keys(position: float) -> None:
    a = turned("q", lambda r: replace(r, table=table(torch.tensor([ROWS - 1.0]))))(program(STYLES["llama"]))
    b = turned("q", lambda r: replace(r, table=table(torch.tensor([float(position)]))))(a)
    (suspicion,) = suspicions(sides(a, b))
    assert (suspicion.name, suspicion.a, suspicion.b) == ("positions", f"from {ROWS - 1}", f"from {position:g}")
    changed = suspicion.change(a)
    x = project_input(a.query.affine, entering()[:, :1])
    assert torch.allclose(follow_path(changed.query, x)[-1], follow_path(b.query, x)[-1], rtol=0, atol=1e-9)
    assert suspicions(sides(a, a)) == []


def test_yarn_is_another_law_and_an_amplitude() -> None:
    a, entered = program(STYLES["llama"]), entering()
    frequencies = yarn_frequencies(CHANNELS, factor=4.0, original_length=64, dtype=torch.float64)
    cos, sin = rope_tables(torch.arange(ROWS), frequencies, amplitude=1.1386)
    b = turned("qk", lambda r: replace(r, table=torch.complex(cos, sin)[None]))(a)
    found = suspicions(sides(a, b))
    assert [s.name for s in found] == ["rope_base", "length_factor"]
    assert isinstance(found[0].b, str)
    assert found[0].b.startswith("frequencies of another law")
    assert found[0].text.endswith("instead of base 10000")
    assert differ(found[1].change(found[0].change(a)), b, entered) < EXACT
    assert differ(found[0].change(found[1].change(a)), b, entered) < EXACT
    # each changes its own part alone
    rotations = [s.change(a).query.steps[0] for s in found]
    assert all(isinstance(r, Rotation) for r in rotations)
    assert torch.allclose(rotations[0].table.abs(), torch.ones(1).double(), rtol=0, atol=1e-12)
    assert torch.allclose(rotations[1].table.angle(), a.query.steps[0].table.angle(), rtol=0, atol=1e-9)


def test_angles_that_are_of_no_one_position_a_row() -> None:
    """Rows of an image: half the pairs turn by the row of a patch, half by its column."""
    a, entered = program(STYLES["llama"]), entering()
    rows, columns = torch.arange(ROWS) // 4, torch.arange(ROWS) % 4
    half = CHANNELS // 2
    image = torch.cat([table(rows, width=half), table(columns, width=half)], -1)
    b = turned("qk", lambda r: replace(r, table=image))(a)
    assert take_apart(image) is None
    found = suspicions(sides(a, b))
    assert {s.name for s in found} == {"positions"}
    changed = a
    for suspicion in found:
        changed = suspicion.change(changed)
    assert differ(changed, b, entered) < EXACT
    assert suspicions(sides(b, b)) == []


def test_a_gain_that_is_stored_as_its_distance_from_one() -> None:
    a = program(STYLES["qwen3"])
    b = normed("qk", lambda n: replace(n, gain=n.gain - 1))(a)
    (suspicion,) = suspicions(sides(a, b))
    assert suspicion.name == "weights"
    assert suspicion.text == "has another gain in the norm of q and k: A's - 1"


def test_a_norm_without_gain_commutes_with_a_rotation() -> None:
    plain = normed("qk", lambda n: replace(n, gain=torch.ones_like(n.gain)))(program(STYLES["qwen3"]))
    after = on("qk", lambda way: replace(way, steps=way.steps[::-1]))(plain)
    assert differ(plain, after, entering()) < EXACT
    assert suspicions(sides(plain, after)) == []


def test_l2_with_the_gain_of_rms_is_rms() -> None:
    a = program(STYLES["qwen3"])
    b = normed("qk", lambda n: replace(n, kind="l2", gain=n.gain * CHANNELS**0.5, eps=0.0))(a)
    assert suspicions(sides(a, b)) == []


def test_a_weight_that_is_a_multiple_and_a_fused_one_are_told_so() -> None:
    a = program(STYLES["bert"])
    twice = projected("k", lambda x: replace(x, weight=2 * x.weight))(a)
    (suspicion,) = suspicions(sides(a, twice))
    assert suspicion.text == "has another weight for k, k_proj.weight: 2 times A's"
    fused = projected("qkv", lambda x: replace(x, name="c_attn.weight"))(a)
    other = projected("qv", lambda x: replace(x, weight=x.weight + torch.randn_like(x.weight)))(fused)
    (suspicion,) = suspicions(sides(fused, other))
    assert suspicion.text.startswith("has another weight for q and v, c_attn.weight: 64 of 64 rows differ")


TABLES = {
    "from 0": (torch.arange(24.0), 1e4, 8),
    "from 5000": (torch.arange(300.0) + 5000, 1e6, 64),
    "reset": (torch.cat([torch.arange(10.0), torch.arange(14.0)]), 5e5, 32),
    "of padding": ((torch.arange(24.0) - 7).clamp(min=0), 1e4, 4),
    "two pairs": (torch.arange(5.0), 1e4, 2),
}


@pytest.mark.parametrize("noise", [0.0, 1e-7, 4e-3])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_taken_apart(name: str, noise: float) -> None:
    positions, base, pairs = TABLES[name]
    exact: Tensor = table(positions, base=base, width=2 * pairs, amplitude=1.2)
    turn = take_apart(exact + noise * torch.randn_like(exact))
    assert turn is not None
    frequencies = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    assert float((turn.positions - positions).abs().max()) < (1e-9 if noise == 0 else 0.02)
    # an angle is off by its noise at most, at the farthest position
    assert float((turn.frequencies - frequencies).abs().max()) * float(positions.max()) < 10 * noise + 1e-9
    assert float((turn.table() - exact).abs().max()) < 10 * noise + 1e-9

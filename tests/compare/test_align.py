"""Which call of one side belongs to which of the other."""

from __future__ import annotations

import pytest
import torch

from sqrtdk.compare.align import align
from sqrtdk.errors import InvalidValueError
from sqrtdk.tracing.tensors import CallTensors, Vector


def call(
    site: str, *, index: int = 0, heads: int = 2, rows: int = 3, keys: int = 3, seed: int | None = None
) -> CallTensors:
    draw = torch.Generator().manual_seed(hash(site) % 1000 if seed is None else seed)
    query = torch.randn(1, heads, rows, 4, generator=draw)
    key, value = (torch.randn(1, heads, keys, 4, generator=draw) for _ in range(2))
    return CallTensors(site, index, Vector(query), Vector(key), Vector(value), query, ())


def pairs(a: list[CallTensors], b: list[CallTensors], mapping: dict[str, str] | None = None) -> list[tuple[str, str]]:
    found = align(a, b, mapping or {})
    return [(a[i].site, b[j].site) for i, j in found.pairs]


def test_one_site_on_both_sides_is_a_pair_whatever_the_order() -> None:
    a, b = [call("x.0"), call("x.1")], [call("x.1"), call("x.0")]
    assert pairs(a, b) == [("x.0", "x.0"), ("x.1", "x.1")]


def test_the_count_at_a_site_is_part_of_its_name() -> None:
    a = [call("x", index=0, seed=1), call("x", index=1, seed=2)]
    b = [call("x", index=0, seed=3), call("x", index=1, seed=4)]
    assert align(a, b, {}).pairs == ((0, 0), (1, 1))


def test_other_names_pair_by_their_numbers_and_their_order() -> None:
    a = [call(f"model.layers.{i}.self_attn") for i in range(3)]
    b = [call(f"transformer.h.{i}.attn") for i in range(3)]
    assert pairs(a, b) == [(one.site, other.site) for one, other in zip(a, b, strict=True)]


def test_a_call_that_one_side_alone_has_stays_alone() -> None:
    a = [call(f"layers.{i}") for i in range(4)]
    b = [call(f"h.{i}") for i in (0, 1, 3)]
    found = align(a, b, {})
    assert found.pairs == ((0, 0), (1, 1), (3, 2))
    assert found.alone_a == (2,)
    assert found.alone_b == ()


def test_shapes_that_do_not_fit_are_no_pair() -> None:
    found = align([call("x", heads=2)], [call("x", heads=4)], {})
    assert found.pairs == ()
    assert (found.alone_a, found.alone_b) == ((0,), (0,))


def test_the_same_vectors_outweigh_numbers() -> None:
    """Two encoders without numbers that agree: v tells which belongs to which."""
    a = [call("first", seed=1), call("second", seed=2)]
    b = [call("other", seed=3), call("left", seed=1), call("right", seed=2)]
    assert pairs(a, b) == [("first", "left"), ("second", "right")]


def test_self_and_cross_attention_pair_by_their_lengths() -> None:
    a = [call("d.0.self", keys=3), call("d.0.cross", keys=5)]
    b = [call("dec.0.a", keys=3), call("dec.0.b", keys=5)]
    assert pairs(a, b) == [("d.0.self", "dec.0.a"), ("d.0.cross", "dec.0.b")]


def test_a_map_wins_over_names() -> None:
    a, b = [call("x.0"), call("x.1")], [call("x.0"), call("x.1")]
    assert pairs(a, b, {"x.0": "x.1"}) == [("x.0", "x.1"), ("x.1", "x.0")]


def test_a_map_names_calls_by_site_and_count() -> None:
    a = [call("x", index=0, seed=1), call("x", index=1, seed=2)]
    b = [call("y", index=0, seed=3), call("y", index=1, seed=4)]
    assert align(a, b, {"x": "y#1", "x#1": "y"}).pairs == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"z": "x.0"}, "A has no such attention"),
        ({"x.0": "z"}, "B has no such attention"),
        ({"x.0": "x.1", "x.1": "x.1"}, "names 'x.1' of B twice"),
    ],
)
def test_a_map_of_what_is_not_there_is_refused(mapping: dict[str, str], words: str) -> None:
    calls = [call("x.0"), call("x.1")]
    with pytest.raises(InvalidValueError, match=words):
        align(calls, calls, mapping)

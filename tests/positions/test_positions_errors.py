"""What is refused, by its message."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sqrtdk import positions
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.positions import alibi, deberta, rope, rope_tables, shaw, t5_bias, transformer_xl, yarn
from tests.positions.positions_cases import CASES, block, made

LINEAR = torch.nn.Linear(8, 8)
X = torch.zeros(2, 3, 4)
HALVES = torch.ones(3, 2)
YARN = {"factor": 4.0, "original_length": 64}

VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "no slopes": (lambda: alibi(), "either heads or slopes; got heads=None and slopes=None"),
    "both": (lambda: alibi(2, slopes=[1.0, 2.0]), "either heads or slopes"),
    "no heads": (lambda: alibi(0), "heads is at least 1; got 0"),
    "an infinite slope": (lambda: alibi(slopes=[1.0, math.inf]), r"slopes are finite; got \[1.0, inf\]"),
    "no slope": (lambda: alibi(slopes=[]), r"slopes have shape \(H,\).*got \(0,\)"),
    "a matrix of slopes": (lambda: alibi(slopes=torch.ones(2, 2)), r"slopes have shape \(H,\).*got \(2, 2\)"),
    "few buckets": (lambda: t5_bias(2, num_buckets=3), "num_buckets is at least 4; got 3"),
    "no bucket": (lambda: t5_bias(2, num_buckets=1, bidirectional=False), "num_buckets is at least 2; got 1"),
    "no logarithm": (lambda: t5_bias(2, num_buckets=32, max_distance=8), "above the 8 distances.*got 8"),
    "t5 without heads": (lambda: t5_bias(0), "heads is at least 1; got 0"),
    "no distance": (lambda: shaw(4, max_distance=0), "max_distance is at least 1; got 0"),
    "no channels": (lambda: shaw(0, max_distance=2), "head_dim is at least 1; got 0"),
    "shaw without heads": (lambda: shaw(4, max_distance=2, heads=0), "heads is at least 1; got 0"),
    "odd sinusoids": (lambda: transformer_xl(2, 4, model_dim=7), "model_dim is even.*got 7"),
    "odd default": (lambda: transformer_xl(1, 3), "model_dim is even.*got 3"),
    "a negative base": (lambda: transformer_xl(2, 4, base=-1.0), "base is above 0; got -1.0"),
    "an infinite base": (lambda: transformer_xl(2, 4, base=math.inf), "base is a finite number; got inf"),
    "one bucket": (lambda: deberta(2, 4, buckets=1), "buckets is at least 2; got 1"),
    "short of buckets": (lambda: deberta(2, 4, buckets=16, max_distance=9), "above buckets // 2 . 1 = 9; got 9"),
    "no terms": (lambda: deberta(2, 4, terms=[]), r"terms are c2p, p2c or both; got \[\]"),
    "a term twice": (lambda: deberta(2, 4, terms=["c2p", "c2p"]), "got .'c2p', 'c2p'."),
    "another term": (lambda: deberta(2, 4, terms=["p2p"]), "got .'p2p'."),
    "a projection too many": (
        lambda: deberta(2, 4, terms=["c2p"], query_proj=LINEAR),
        "a projection for p2c needs that term; terms are .'c2p'.",
    ),
    "an odd head": (lambda: rope(X[..., :3], X[..., :3]), "rotary_dim is even.*got 3"),
    "more than there is": (lambda: rope(X, X, rotary_dim=6), "at most the head dimension 4; got 6"),
    "nothing turns": (lambda: rope(X, X, rotary_dim=0), "rotary_dim is at least 2; got 0"),
    "layout": (lambda: rope(X, X, layout="gptj"), "layout is half or interleaved; got 'gptj'"),
    "layout of one": (lambda: positions.apply_rope(X, HALVES, HALVES, "x"), "layout is half or interleaved; got 'x'"),
    "two head dimensions": (lambda: rope(X, X[..., :2]), "share the head dimension; got 4 and 2"),
    "a vector": (lambda: rope(X[0, 0], X), r"the query has shape \(..., length, E\); got \(4,\)"),
    "positions of others": (
        lambda: rope(X, X, positions=torch.arange(4)),
        r"positions have shape \(..., 3\), one for each row; got \(4,\)",
    ),
    "key positions": (
        lambda: rope(X, X, key_positions=torch.arange(2)),
        r"key_positions have shape \(..., 3\).*got \(2,\)",
    ),
    "a position": (lambda: rope(X, X, positions=torch.tensor(3)), r"one for each row; got \(\)"),
    "too many batches": (
        lambda: rope(X, X, positions=torch.zeros(5, 3)),
        r"broadcastable to .* got \(5, 1, 3, 2\) and \(5, 1, 3, 2\) for x \(2, 3, 4\)",
    ),
    "rope's base": (lambda: rope(X, X, base=0.0), "base is above 0; got 0.0"),
    "different tables": (
        lambda: positions.apply_rope(X, HALVES, HALVES[:2]),
        r"got \(3, 2\) and \(2, 2\) for x \(2, 3, 4\)",
    ),
    "wide tables": (lambda: positions.apply_rope(X[..., :3], HALVES, HALVES), r"got \(3, 2\) and \(3, 2\) for x"),
    "a table for nothing": (
        lambda: positions.apply_rope(X, HALVES[:, :0], HALVES[:, :0]),
        r"D at most E; got \(3, 0\)",
    ),
    "tables of numbers": (lambda: rope_tables(torch.tensor(1), torch.ones(2)), r"got \(\) and \(2,\)"),
    "frequencies": (lambda: rope_tables(torch.arange(2), torch.ones(2, 2)), r"got \(2,\) and \(2, 2\)"),
    "amplitude": (lambda: rope_tables(torch.arange(2), torch.ones(2), amplitude=0.0), "amplitude is above 0; got 0.0"),
    "yarn's factor": (lambda: yarn(X, X, factor=-4.0, original_length=64), "factor is above 0; got -4.0"),
    "yarn's length": (lambda: yarn(X, X, factor=4.0, original_length=0), "original_length is at least 1; got 0"),
    "yarn's base": (lambda: yarn(X, X, **YARN, base=1.0), "base is above 1 for YaRN; got 1.0"),
    "betas": (lambda: yarn(X, X, **YARN, beta_fast=1.0), "beta_slow is less than beta_fast; got 1.0 and 1.0"),
    "beta": (lambda: yarn(X, X, **YARN, beta_fast=math.nan), "beta_fast is a finite number; got nan"),
    "attention factor": (lambda: yarn(X, X, **YARN, attention_factor=0.0), "amplitude is above 0; got 0.0"),
}
TYPES: dict[str, tuple[Callable[[], Any], str]] = {
    "heads": (lambda: alibi(2.0), "heads is a whole number; got 2.0"),  # type: ignore[arg-type]
    "boolean heads": (lambda: t5_bias(True), "heads is a whole number; got True"),
    "a slope": (lambda: alibi(slopes=["1"]), r"slopes are numbers; got \['1'\]"),  # type: ignore[list-item]
    "whole slopes": (lambda: alibi(slopes=torch.ones(2).int()), "slopes are a floating point tensor; got torch.int32"),
    "a projection": (
        lambda: deberta(2, 4, key_proj=torch.ones(8, 8)),  # type: ignore[arg-type]
        "the projection of c2p is an nn.Module; got Tensor",
    ),
    "a base": (lambda: rope(X, X, base="1"), "base is a real number; got '1'"),  # type: ignore[arg-type]
    "whole query": (lambda: rope(X.int(), X), "the query is a floating point tensor; got torch.int32"),
    "complex key": (lambda: rope(X, X.cfloat()), "the key is a floating point tensor; got torch.complex64"),
    "boolean positions": (lambda: rope(X, X, positions=torch.ones(3).bool()), "real numbers; got torch.bool"),
    "whole frequencies": (lambda: rope_tables(torch.arange(2), torch.arange(2)), "frequencies are floating point"),
    "complex x": (lambda: positions.apply_rope(X.cfloat(), HALVES, HALVES), "x is a floating point tensor"),
    "whole table": (lambda: positions.apply_rope(X, HALVES, HALVES.int()), "sin is a floating point tensor"),
}


@pytest.mark.parametrize(("call", "message"), VALUES.values(), ids=VALUES)
def test_values(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message) as caught:
        call()
    assert caught.value.hint


@pytest.mark.parametrize(("call", "message"), TYPES.values(), ids=TYPES)
def test_types(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidTypeError, match=message) as caught:
        call()
    assert caught.value.hint


@pytest.mark.parametrize("name", CASES)
def test_blocks_that_do_not_fit(name: str) -> None:
    term, (q, k, rows, columns) = made(name), block()
    with pytest.raises(InvalidTypeError, match=r"the query is a floating point tensor; got torch\.int64"):
        term.term(q.long(), k, rows, columns)
    with pytest.raises(InvalidTypeError, match=r"positions are int64; those of the key are torch\.float32"):
        term.term(q, k, rows, columns.float())
    with pytest.raises(InvalidValueError, match=r"the key has 7 rows and positions of shape \(6,\)"):
        term.term(q, k, rows, columns[1:])
    with pytest.raises(InvalidValueError, match=r"the query has 5 rows and positions of shape \(5, 1\)"):
        term.term(q, k, rows[:, None], columns)
    with pytest.raises(InvalidValueError, match=r"the query has shape \(..., .*length, E\); got \(4,\)"):
        term.term(q[0, 0, 0], k, rows, columns)


@pytest.mark.parametrize("name", [name for name in CASES if name != "shaw"])
def test_heads_that_do_not_fit(name: str) -> None:
    term, (q, k, rows, columns) = made(name), block()
    with pytest.raises(InvalidValueError, match=r"is made for 3 heads; query \(2, 2, 5, 4\) has 2"):
        term.term(q[:, :2], k, rows, columns)
    with pytest.raises(InvalidValueError, match=r"has 1 and key \(2, 1, 7, 4\) 1"):
        term.term(q[:, :1], k[:, :1], rows, columns)
    with pytest.raises(InvalidValueError, match=r"shape \(..., heads, length, E\); got \(5, 4\)"):
        term.term(q[0, 0], k, rows, columns)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].content])
def test_head_dimensions_that_do_not_fit(name: str) -> None:
    term, (q, k, rows, columns) = made(name), block()
    with pytest.raises(InvalidValueError, match=r"a head dimension of 4; the key \(2, 3, 7, 3\) has 3"):
        term.term(q, k[..., :3], rows, columns)

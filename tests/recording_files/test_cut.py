"""What is left of a call that was cut is still an attention, with the same result."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sqrtdk.errors import InvalidValueError
from sqrtdk.recording.cut import cut_call, parse_heads
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector
from tests.recording_files.sample_calls import computed, mask

B, HQ, H, L, S, E = 2, 8, 4, 7, 9, 3


@pytest.fixture
def call() -> CallTensors:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    visible = mask("left padding", generator, B, HQ, L, S) | mask("random", generator, B, HQ, L, S)
    terms = (
        Term("scale", random(HQ, 1, 1)),
        Term("bias", random(1, HQ, L, S), "alibi"),
        Term("bias", random(B, 1, L, 1)),
        Term("mask", visible),
        Term("sinks", random(HQ)),
    )
    vectors = []
    for heads, length in ((HQ, L), (H, S), (H, S)):
        given, weight, bias = random(B, length, 5), random(heads, E, 5), random(heads, E)
        values = torch.einsum("bld,hed->bhle", given, weight) + bias[:, None]
        features = torch.arange(heads * E).reshape(heads, E)
        projection = Projection("w", given, weight, bias, features)
        vectors.append(Vector(values * 2, random(heads, 1, 1), values, (), projection))
    whole = CallTensors("a", 0, *vectors, output=random(B, HQ, L, E), terms=terms)  # type: ignore[misc]
    output, lse = computed(whole)
    kept = torch.rand(B, HQ, L, S, generator=generator) > 0.5
    return dataclasses.replace(whole, output=output, lse=lse, kept=kept)


@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("heads", [None, [5], [0, 1], [0, 1, 6, 7], [0, 2, 5], [1, 2, 3]])
def test_what_is_left_computes_the_same(call: CallTensors, rows: int | None, heads: list[int] | None) -> None:
    less, _ = cut_call(call, rows, heads)
    output, lse = computed(less)
    of = list(range(HQ)) if heads is None else heads
    torch.testing.assert_close(output, call.output[:, of, :rows])
    torch.testing.assert_close(lse, call.lse[:, of, :rows])  # type: ignore[index]
    assert torch.equal(less.output, call.output[:, of, :rows])
    assert torch.equal(less.lse, call.lse[:, of, :rows])  # type: ignore[index, arg-type]
    assert torch.equal(less.kept, call.kept[:, of, :rows])  # type: ignore[index, arg-type]
    for vector in (less.query, less.key, less.value):
        part = vector.projection
        assert part is not None
        assert part.weight is not None
        made = torch.einsum("bld,hed->bhle", part.input, part.weight) + part.bias[:, None]  # type: ignore[index]
        torch.testing.assert_close(made, vector.projected)
        torch.testing.assert_close(2 * made, vector.values)
        assert part.features.shape == part.bias.shape  # type: ignore[union-attr]
        assert vector.factor.shape == (vector.values.shape[1], 1, 1)  # type: ignore[union-attr]


def test_groups_stay_where_they_can(call: CallTensors) -> None:
    shapes = {tuple(heads): cut_call(call, None, heads)[0].key.values.shape[1] for heads in ([0, 1], [0, 2], [0, 1, 6])}
    assert shapes == {(0, 1): 1, (0, 2): 2, (0, 1, 6): 3}


@pytest.mark.parametrize(
    ("rows", "heads", "text"), [(0, None, "0 rows of 7"), (None, [8], "has 8"), (None, [], "none")]
)
def test_what_is_not_there_is_an_error(call: CallTensors, rows: int | None, heads: list[int] | None, text: str) -> None:
    with pytest.raises(InvalidValueError, match=text) as caught:
        cut_call(call, rows, heads)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "0-99999999", "1,,2", "²"])
def test_heads_that_are_no_list(text: str) -> None:
    with pytest.raises(InvalidValueError, match="heads"):
        parse_heads(text)

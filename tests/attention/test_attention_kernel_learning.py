"""The compiled kernel in training: dropout and its replay, and the gradient of a bias, summed where it repeats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import positions
from sqrtdk.errors import InvalidValueError
from sqrtdk.impl.kernel.load import load_if_built
from tests.attention.training import (
    BIASES,
    LAID,
    RATE,
    SHAPES,
    drawn,
    judge_bias,
    judge_dropout,
    judge_table,
    philox,
    replay,
)
from tests.support.kernel_here import needs_kernel
from tests.tolerances import gradient_complaints

pytestmark = needs_kernel


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


# dropout


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_replay_has_the_published_words(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    found = philox(np.array(counter).reshape(4, 1), key)
    assert " ".join(f"{word:08x}" for word in found[:, 0].tolist()) == words


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 2])
def test_the_kernel_draws_what_the_replay_draws(seed: int) -> None:
    load_if_built()
    kept = torch.ops.sqrtdk_cpu.kept(torch.tensor(seed), RATE, (2, 3, 130, 77))
    assert torch.equal(kept, replay(seed, RATE, 2, 3, 130, 77))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_dropout_equals_its_own_replay(name: str, dtype: torch.dtype, threads: None) -> None:
    wrong = judge_dropout(name, dtype)
    assert not wrong, wrong


def test_a_seed_decides_and_every_call_draws_anew() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))

    def dropped(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [sqrtdk.attention(q, k, v, dropout_p=0.5, impl="cpu") for _ in range(2)]

    first, again, other = dropped(1), dropped(1), dropped(2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_a_compiled_program_draws_anew_in_every_call() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    sqrtdk.attention(q, k, v, impl="cpu")  # loads the kernel
    compiled = torch.compile(lambda: sqrtdk.attention(q, k, v, dropout_p=0.5, impl="cpu"), backend="aot_eager")
    torch.manual_seed(0)
    first, second = compiled(), compiled()
    assert not torch.equal(first, second)


def test_second_derivatives_have_the_same_dropout_and_reach_the_bias() -> None:
    given = [torch.randn(1, 2, 9, 4).requires_grad_() for _ in range(3)] + [torch.randn(9).requires_grad_()]
    kept = drawn(1, 2, 9, 9)

    def penalty(output: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), leaves)

    q, k, v, bias = given
    found = penalty(sqrtdk.attention(q, k, v, bias=bias, dropout_p=RATE, impl="cpu"), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    weights = torch.softmax(wide[0] @ wide[1].mT / 2 + wide[3], -1) * kept / (1 - RATE)
    wanted = penalty(weights @ wide[2], wide)
    named = [dict(zip("qkvb", g, strict=True)) for g in (found, wanted)]
    wrong = gradient_complaints(*named, torch.float32, length=9, logit=10.0, rows=18)
    assert not wrong, wrong


def test_the_seed_is_the_cpu_s_whatever_torch_s_default_device() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    torch.manual_seed(0)
    wanted = sqrtdk.attention(q, k, v, dropout_p=0.5, impl="cpu")
    torch.manual_seed(0)
    with torch.device("meta"):
        found = sqrtdk.attention(q, k, v, dropout_p=0.5, impl="cpu")
    assert torch.equal(found, wanted)


# the gradient of a bias


@pytest.mark.parametrize("sizes", BIASES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_the_gradient_of_a_bias_is_summed_where_it_repeats(sizes: tuple[int, ...], threads: None) -> None:
    wrong = judge_bias(sizes)
    assert not wrong, wrong


@pytest.mark.parametrize("rows", [150, 3], ids=["many rows", "few rows"])
@pytest.mark.parametrize("laid", LAID)
def test_a_bias_is_read_as_it_lies(laid: str, rows: int) -> None:
    wrong = judge_bias((2, 1, rows, 601), laid, rows)
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["bfloat16", "turned", "turned bfloat16"])
def test_no_copy_of_a_bias_is_made(name: str) -> None:
    """It takes 8 MiB or more; the largest of what the call takes, of numbers of its own, is read from torch's
    profiler."""
    dtype, view = LAID[name]
    q, k, v = (torch.randn(1, 2, 2048, 8) for _ in range(3))
    bias = view(torch.randn(2048, 2048).to(dtype))
    with torch.profiler.profile(profile_memory=True) as seen:
        sqrtdk.attention(q, k, v, bias=bias, impl="cpu", return_aux=True)
    largest = max(event.self_cpu_memory_usage for event in seen.key_averages())
    assert largest < 2**21


def test_a_bias_of_one_number_learns() -> None:
    """Softmax does not see it: its gradient is 0."""
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    bias = torch.tensor(0.5, requires_grad=True)
    (found,) = torch.autograd.grad(sqrtdk.attention(q, k, v, bias=bias, impl="cpu").sum(), bias)
    assert found.shape == ()
    assert abs(found.item()) < 1e-3


# a table of distances


@pytest.mark.parametrize("sizes", [None, (2, 4, 150, 601), (2, 1, 1, 601)], ids=["alone", "and pairs", "and keys"])
@pytest.mark.parametrize("heads", [1, 4])
def test_the_gradient_of_a_table_is_summed_along_the_diagonals(
    heads: int, sizes: tuple[int, ...] | None, threads: None
) -> None:
    wrong = judge_table(heads, sizes)
    assert not wrong, wrong


def test_second_derivatives_reach_the_slopes_of_alibi_beside_a_float_mask() -> None:
    shapes = ((1, 2, 9, 4), (1, 2, 12, 4), (1, 2, 12, 4), (1, 1, 1, 12), (2,))
    given = [torch.randn(shape).requires_grad_() for shape in shapes]
    distance = (torch.arange(9).unsqueeze(-1) - torch.arange(12)).abs()

    def penalty(output: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), leaves)

    q, k, v, mask, slopes = given
    term = positions.alibi(slopes=slopes, symmetric=True)
    found = penalty(sqrtdk.attention(q, k, v, mask, bias=term, impl="cpu"), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    logits = wide[0] @ wide[1].mT / 2 + wide[3] - wide[4][:, None, None] * distance
    wanted = penalty(torch.softmax(logits, -1) @ wide[2], wide)
    named = [dict(zip("qkvms", g, strict=True)) for g in (found, wanted)]
    wrong = gradient_complaints(*named, torch.float32, length=12, logit=20.0, rows=18)
    assert not wrong, wrong


def test_alibi_and_t5_run_in_the_kernel_at_every_length_without_a_bias_of_pairs() -> None:
    q = torch.zeros(1, 1, 1, 1).expand(1, 8, 2**17, 64)
    for term in (positions.alibi(8), positions.t5_bias(8)):
        assert sqrtdk.explain(q, q, q, bias=term, is_causal=True).impl == "cpu"


def test_the_gradient_of_alibi_at_8192_keys_takes_memory_that_grows_with_the_length() -> None:
    """One bias of pairs, 2 x 8192 x 8192 numbers, is 512 MiB; what the call takes is read from torch's profiler."""
    q, k, v = (torch.randn(1, 2, 8192, 8).requires_grad_() for _ in range(3))
    slopes = torch.rand(2).requires_grad_()
    with torch.profiler.profile(profile_memory=True) as seen:
        sqrtdk.attention(q, k, v, bias=positions.alibi(slopes=slopes), is_causal=True, impl="cpu").sum().backward()
    largest = max(event.self_cpu_memory_usage for event in seen.key_averages())
    assert largest < 64 * 2**20


def test_a_table_is_taken_from_the_class_that_defines_the_term() -> None:
    class Steeper(positions.Alibi):
        def term(self, query: Tensor, key: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
            return 3 * positions.Alibi.term(self, query, key, rows, columns)

    q, k, v = (torch.randn(1, 4, 40, 8) for _ in range(3))
    term = Steeper(torch.rand(4), True)
    found, wanted = (sqrtdk.attention(q, k, v, bias=term, impl=impl) for impl in ("cpu", "dense"))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("term", [positions.alibi(1), positions.t5_bias(1)], ids=["ALiBi", "T5"])
def test_a_term_of_other_heads_is_refused_as_elsewhere(term: Any) -> None:
    q, k, v = (torch.randn(1, 4, 40, 8) for _ in range(3))
    for given in ((q, k, v), (q[0, 0], k[0, 0], v[0, 0])):
        said = []
        for impl in ("cpu", "dense"):
            with pytest.raises(InvalidValueError) as raised:
                sqrtdk.attention(*given, bias=term, impl=impl)
            said.append(str(raised.value))
        assert said[0] == said[1]


@pytest.mark.parametrize("shape", [(4, 1), (4, 78), (2, 79), (79,)], ids=str)
def test_a_table_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    class Odd(positions.Alibi):
        def term(self, query: Tensor, key: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
            return torch.zeros(1, len(rows), len(columns))

        def of_distance(self, distance: Tensor, query: Tensor) -> Tensor:
            return torch.zeros(shape)

    q, k, v = (torch.randn(1, 4, 40, 8) for _ in range(3))
    with pytest.raises(InvalidValueError, match=r"of_distance of 79 distances returns \(4, 79\)"):
        sqrtdk.attention(q, k, v, bias=Odd(torch.rand(4), True), impl="cpu")


def test_a_compiled_program_has_the_table_in_one_graph() -> None:
    q, k, v = (torch.randn(1, 4, 40, 8) for _ in range(3))
    term = positions.alibi(4)
    compiled = torch.compile(
        lambda: sqrtdk.attention(q, k, v, bias=term, is_causal=True, impl="cpu"), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(), sqrtdk.attention(q, k, v, bias=term, is_causal=True, impl="dense"))

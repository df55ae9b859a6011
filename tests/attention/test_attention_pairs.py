"""Functions of a pair in the compiled kernel: which way each goes, and the same results and gradients every way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk._resolve import resolve_arguments
from sqrtdk.errors import SqrtdkError
from sqrtdk.impl import block_call, choice, rows, simplify
from tests.support.kernel_here import unable
from tests.tolerances import complaint, gradient_complaints

pytestmark = pytest.mark.skipif(bool(unable()), reason="there is no compiled kernel")

B, H, L, S, E = 2, 2, 12, 15, 8
LOGIT = 12.0


@pytest.fixture(autouse=True)
def _of_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the functions of a call of any size read, and its rows taken in several blocks."""
    monkeypatch.setattr(rows, "BLOCK_PAIRS", 2**6)
    monkeypatch.setattr(block_call, "MOST_AT_ONCE", 0)
    for module in (simplify, choice):
        monkeypatch.setattr(module, "SMALLEST_READ", 1)


def tables() -> dict[str, Tensor]:
    shapes = {"slopes": (H,), "relative": (H, L + S), "bias": (H, L, S + 3), "sample": (B, H)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def documents(t: dict[str, Tensor]) -> dict[str, Any]:
    document = torch.arange(S) // 4
    return {"mask_mod": lambda b, h, i, j: document[i] == document[j]}


CAUSAL = {"mask_mod": lambda b, h, i, j: i >= j}
KEYS = {"attn_mask": torch.arange(S) % 7 > 0}  # for all rows and heads
Functions = Callable[[dict[str, Tensor]], dict[str, Any]]
# functions that are read, and fields of the call that has what they are read as
READ: dict[str, tuple[Functions, dict[str, Any]]] = {
    "causal": (lambda t: CAUSAL, {"diagonal": 0, "window": (None, None), "mask_mods": ()}),
    "window": (
        lambda t: {"mask_mod": lambda b, h, i, j: (i - j).abs() <= 5},
        {"diagonal": 5, "window": (5, None), "mask_mods": ()},
    ),
    "alibi": (
        lambda t: {"score_mod": lambda s, b, h, i, j: s - t["slopes"][h] * (i - j).abs() / 9, **CAUSAL},
        {"diagonal": 0, "score_mod": None, "mask_mods": ()},
    ),
    "relative, causal by -inf": (
        lambda t: {"score_mod": lambda s, b, h, i, j: torch.where(i >= j, s + t["relative"][h, i - j + S], -math.inf)},
        {"diagonal": 0, "score_mod": None},
    ),
    "bias": (lambda t: {"score_mod": lambda s, b, h, i, j: s + t["bias"][h, i, j]}, {"score_mod": None, "term": None}),
    "cap": (
        lambda t: {"score_mod": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0), **CAUSAL},
        {"softcap": 2.0, "term": None, "score_mod": None, "diagonal": 0},
    ),
    "cap, then alibi": (
        lambda t: {"score_mod": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0) + t["slopes"][h] * (i - j) / 9},
        {"softcap": 2.0, "score_mod": None},
    ),
}
READ |= {
    "gain": (lambda t: {"score_mod": lambda s, b, h, i, j: s * t["slopes"][h], **CAUSAL}, {"score_mod": None}),
    "gain of the sample": (lambda t: {"score_mod": lambda s, b, h, i, j: t["sample"][b, h] * s}, {"score_mod": None}),
    "over a length": (lambda t: {"score_mod": lambda s, b, h, i, j: s / (1.0 + i).sqrt()}, {"score_mod": None}),
    "half": (lambda t: {"score_mod": lambda s, b, h, i, j: s / 2}, {"score_mod": None}),
}
BY_BLOCKS: dict[str, Functions] = {
    "of the sample": lambda t: {"score_mod": lambda s, b, h, i, j: s + t["sample"][b, h] * (i - j) / 9},
    "bias, some hidden": lambda t: {
        "score_mod": lambda s, b, h, i, j: torch.where((i + j) % 5 > 0, s + t["bias"][h, i, j], -math.inf)
    },
    "gain of a key": lambda t: {"score_mod": lambda s, b, h, i, j: s * t["bias"][h, 0, j]},
    "gain after a sum": lambda t: {"score_mod": lambda s, b, h, i, j: (s + 1.0) * t["slopes"][h]},
    "square": lambda t: {"score_mod": lambda s, b, h, i, j: s * s - 1.0, **CAUSAL},
    "documents": documents,
    "documents, a sum": lambda t: {"score_mod": lambda s, b, h, i, j: s + 2.0 * t["bias"][h, i, j], **documents(t)},
    "documents, a product": lambda t: {"score_mod": lambda s, b, h, i, j: s * t["bias"][h, i, j], **documents(t)},
    "documents with a cap": lambda t: {"score_mod": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0), **documents(t)},
    "dilated": lambda t: {"mask_mod": lambda b, h, i, j: (i - j) % 3 == 0},
    "blind rows": lambda t: {"mask_mod": lambda b, h, i, j: (i // 3 % 2 == 0) & (j > 3)},
    "keys ahead alone": lambda t: {"mask_mod": lambda b, h, i, j: j > i + 2},
    "another score": lambda t: {"score": lambda q, k: -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1), **CAUSAL},
}


def inputs() -> dict[str, Tensor]:
    return {n: torch.randn(B, H // g, m, E, dtype=torch.float64) for n, m, g in (("q", L, 1), ("k", S, 2), ("v", S, 2))}


def attend(make: Functions, leaves: dict[str, Tensor], **options: Any) -> tuple[Tensor, Any]:
    qkv = (leaves[name] for name in "qkv")
    return sqrtdk.attention(*qkv, **make(leaves), enable_gqa=True, return_aux=True, **options)


def learned(made: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in made.items()}


def gradients(output: Tensor, aux: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    total = (output.double() * torch.linspace(-1.0, 1.0, E, dtype=torch.float64)).sum()
    total = total + (torch.where(aux.keys > 0, aux.lse, 0.0) + aux.entropy_nats).double().sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("options", [{}, KEYS, {"softcap": 5.0}, {"sinks": 0.5}, {"bias": "alibi"}], ids=str)
@pytest.mark.parametrize("name", [*READ, *BY_BLOCKS])
def test_output_statistics_and_gradients_are_those_in_float64(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if options:  # else the masks are computed block by block
        monkeypatch.setattr(block_call, "MOST_AT_ONCE", 2**22)
    make = READ[name][0] if name in READ else BY_BLOCKS[name]
    made = inputs() | tables()
    made = {key: tensor.float().double() for key, tensor in made.items()}
    exact, mine = learned(made, torch.float64), learned(made, torch.float32)
    wanted, stats = attend(make, exact, impl="dense", **options)
    found, aux = attend(make, mine, **options)
    places = B * H * L
    assert complaint(found, wanted, torch.float32, length=S, logit=LOGIT, magnitude=1.0) is None
    for field in (
        "keys",
        "max_logit",
        "min_logit",
        "lse",
        "entropy_nats",
        "mean",
        "variance",
        "entropy_nats",
        "collision",
        "peak",
    ):
        pair = getattr(aux, field), getattr(stats, field)
        wrong = complaint(*pair, torch.float32, length=S, logit=LOGIT, magnitude=LOGIT**2)
        assert wrong is None, f"{field}: {wrong}"
    pair = gradients(found, aux, mine), gradients(wanted, stats, exact)
    assert not gradient_complaints(*pair, torch.float32, length=S, logit=LOGIT, rows=places)


@pytest.mark.parametrize("name", READ)
def test_kernels_run_what_is_read(name: str) -> None:
    make, fields = READ[name]
    leaves = {key: tensor.float() for key, tensor in (inputs() | tables()).items()}
    qkv = [leaves[key] for key in "qkv"]
    call = simplify.simplified(resolve_arguments(*qkv, **make(leaves), enable_gqa=True))
    assert {field: getattr(call, field) for field in fields} == fields
    chosen = sqrtdk.explain(*qkv, **make(leaves), enable_gqa=True, return_aux=True)
    assert (chosen.impl, "blocks of rows" in chosen.reason) == ("cpu", False)
    assert chosen.reason.endswith("read as bias, scale, softcap or band")


@pytest.mark.parametrize("name", BY_BLOCKS)
def test_the_kernel_runs_others_by_blocks(name: str) -> None:
    leaves = {key: tensor.float() for key, tensor in (inputs() | tables()).items()}
    chosen = sqrtdk.explain(*(leaves[key] for key in "qkv"), **BY_BLOCKS[name](leaves), enable_gqa=True)
    assert chosen.impl == "cpu"
    assert "in blocks of" in chosen.reason


def test_a_small_call_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    calls = []

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        calls.append(b)
        return i >= j

    assert sqrtdk.explain(q, k, v, mask_mod=causal).impl == "dense"
    assert not calls


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_those_of_plain_torch(number: float) -> None:
    leaves = learned(inputs(), torch.float32)
    table = torch.zeros(L, S)
    table[3, 7], table[5, 1] = number, number  # row 5 sees key 1, row 3 does not see key 7
    table[6, 2] = -math.inf
    for score in (lambda s, b, h, i, j: s + table[i, j], lambda s, b, h, i, j: (s + 0.0 * s) + table[i, j]):

        def make(t: Any, score: Any = score) -> dict[str, Any]:
            return {"score_mod": score, **CAUSAL}

        output, aux = attend(make, leaves)
        wanted, stats = attend(make, leaves, impl="dense")
        torch.testing.assert_close(output, wanted, equal_nan=True)
        for name in ("lse", "max_logit", "min_logit", "keys", "entropy_nats", "peak"):
            torch.testing.assert_close(getattr(aux, name), getattr(stats, name), equal_nan=True, msg=name)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_hidden_logit_that_is_no_number_reaches_no_gradient(number: float) -> None:
    leaves = learned(inputs(), torch.float32)
    table = torch.zeros(L, S)
    table[3, 7] = number
    for score in (lambda s, b, h, i, j: s + table[i, j], lambda s, b, h, i, j: s * 2.0 + table[i, j]):
        made = [
            attend(lambda t, score=score: {"score_mod": score, **CAUSAL}, leaves, **o) for o in ({}, {"impl": "dense"})
        ]
        one, other = (list(gradients(*each, leaves).values()) for each in made)
        torch.testing.assert_close(one, other)
        assert all(gradient.isfinite().all() for gradient in one)


@pytest.mark.parametrize("name", ["alibi", "bias", "square", "another score"])
def test_gradients_can_be_differentiated_again(name: str) -> None:
    make = READ[name][0] if name in READ else BY_BLOCKS[name]
    made = inputs() | tables()
    found = []
    for dtype, options in ((torch.float64, {"impl": "dense"}), (torch.float32, {})):
        leaves = learned(made, dtype)
        output, _ = attend(make, leaves, **options)
        named = [leaves[key] for key in leaves if key in "qkv"]
        first = torch.autograd.grad(output.square().sum(), named, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), named)
        found.append(torch.cat([g.flatten() for g in second]).double())
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[0].abs().max()


def test_a_table_that_is_written_before_the_backward_pass_is_an_error() -> None:
    leaves = learned(inputs(), torch.float32)
    gain = torch.ones(L)
    output, _ = attend(lambda t: {"score_mod": lambda s, b, h, i, j: (s + 1.0) * gain[i]}, leaves)
    gain[2] = 2.0
    with pytest.raises(SqrtdkError, match="changed in place between forward and backward"):
        output.sum().backward()


def test_dropout_drops_the_same_weights_again_in_the_backward_pass() -> None:
    leaves = learned(inputs(), torch.float32)
    value = leaves["v"]
    output, _ = attend(BY_BLOCKS["square"], leaves, dropout_p=0.5)
    (gradient,) = torch.autograd.grad(output.sum(), value, retain_graph=True)
    # the output is linear in v: its gradient times v is the output
    assert (gradient * value).sum().item() == pytest.approx(output.sum().item(), rel=1e-4)


def test_functions_run_outside_of_autocast() -> None:
    q, k, v = (tensor.bfloat16() for tensor in inputs().values())
    layer = nn.Linear(1, 1)

    def far(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + layer((i - j).float().unsqueeze(-1)).squeeze(-1)

    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (
            sqrtdk.attention(q, k, v, score_mod=far, enable_gqa=True, return_aux=True, impl=impl)[1].max_logit
            for impl in ("auto", "dense")
        )
        measured = sqrtdk.measure(q, k, score_mod=far, enable_gqa=True).max_logit
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(measured, wanted)


class Layer(nn.Module):
    def __init__(self, functions: dict[str, Any]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return sqrtdk.attention(q, k, v, **self.functions).transpose(1, 2).flatten(2)


SEEN = {
    "softmax(0.5 * q.k + window)": {"mask_mod": lambda b, h, i, j: (i - j < 4) & (i >= j)},
    "softmax(0.5 * q.k + alibi + causal)": {"score_mod": lambda s, b, h, i, j: s - 0.1 * (i - j), **CAUSAL},
    "softmax(20 * tanh(0.5 * q.k / 20))": {"score_mod": lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0)},
    "softmax(0.5 * q.k + mask)": {"mask_mod": lambda b, h, i, j: i // 4 == j // 4},
}


@pytest.mark.parametrize("formula", SEEN)
def test_a_trace_reads_the_formula_and_changes_no_bit(formula: str) -> None:
    layer, x = Layer(SEEN[formula]), torch.randn(2, 12, 8)
    plain = layer(x)
    with sqrtdk.trace(layer) as run:
        traced = layer(x)
    assert torch.equal(plain, traced)
    assert [call.formula for call in run.calls] == [formula]
    assert run.not_measured == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{"score": "distance"}, {"mask_mod": lambda b, h, i, j: i >= j}], ids=["d", "m"])
def test_auto_keeps_second_derivatives(options: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(B, H, L, E, dtype=dtype).requires_grad_() for _ in range(3))
    seconds = []
    for impl in ("auto", "dense"):
        output = sqrtdk.attention(q, k, v, impl=impl, **options)
        (first,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), (q, k, v)))
    for mine, theirs in zip(*seconds, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("impl", ["auto", "fused", "cpu", "tiled"])
def test_a_bias_of_one_number_moves_no_weight(impl: str) -> None:
    q, k, v = (torch.randn(B, H, L, E) for _ in range(3))
    moved = sqrtdk.attention(q, k, v, bias=torch.tensor(0.5), impl=impl)
    torch.testing.assert_close(moved, sqrtdk.attention(q, k, v, impl="dense"))

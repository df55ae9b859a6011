"""score_mod and mask_mod against FlexAttention's own eager results, and against the formula in float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as flex

import sqrtdk
from sqrtdk.errors import SqrtdkError
from sqrtdk.impl import choice, rows, simplify
from sqrtdk.stats import AuxOutput
from tests.attention.mods_cases import CASES, SCORE_MODS, Case
from tests.attention.oracle import logit_statistics, weight_statistics
from tests.support.needs import needs
from tests.tolerances import HALF, complaint, gradient_complaints, half_complaint

LOGIT = 12.0  # larger than any logit of the grid
BLOCK = 60  # pairs of a block: several blocks for every case


def cast(case: Case, leaves: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: leaf.detach().to(dtype or case.dtype).requires_grad_() for name, leaf in leaves.items()}


def ours(case: Case, leaves: dict[str, Tensor], impl: str) -> tuple[Tensor, AuxOutput]:
    qkv = (leaves[name] for name in ("query", "key", "value"))
    return sqrtdk.attention(*qkv, **case.functions(leaves), enable_gqa=True, return_aux=True, impl=impl)


def flex_forward(case: Case, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Torch's public function, which has no backward pass on a CPU."""
    s, mods = case.sizes, case.functions(leaves)
    mask = mods.pop("mask_mod", None)
    if mask is not None:
        mods["block_mask"] = flex.create_block_mask(mask, s.batch, s.heads, s.length, s.keys, device="cpu")
    qkv = (leaves[name].detach() for name in ("query", "key", "value"))
    # it would have torch.compile trace the functions first, and then run them eagerly all the same
    with torch.no_grad(), patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the missing torch.compile
        output, aux = flex.flex_attention(*qkv, **mods, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
    return output, aux.lse


def learns(case: Case) -> bool:
    mod = SCORE_MODS[case.score]
    return mod is None or mod.flex_learns


def flex_math(case: Case, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What that function calls, which autograd can follow; lse in natural-log units."""
    tables = leaves if learns(case) else {name: leaf.detach() for name, leaf in leaves.items()}
    mods = {"score_mod": lambda score, *place: score, "mask_mod": flex.noop_mask} | case.functions(tables)
    qkv = (leaves[name] for name in ("query", "key", "value"))
    output, lse, _ = math_attention(*qkv, mods["score_mod"], (mods["mask_mod"],), case.sizes.dim**-0.5, {})
    return output, lse * math.log(2.0)


def formula(case: Case, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, logits and visible keys."""
    z, seen = case.logits(leaves)
    some = seen.any(-1, keepdim=True)
    p = torch.where(some, torch.where(some, z, 0.0).softmax(-1), 0.0)
    value = leaves["value"].repeat_interleave(case.sizes.heads // case.sizes.key_heads, 1)
    lse = torch.where(some, torch.where(some, z, 0.0).logsumexp(-1, keepdim=True), -math.inf).squeeze(-1)
    return p @ value, lse, z, seen


def gradients(output: Tensor, lse: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    total = (output.double() * torch.linspace(-1.0, 1.0, output.shape[-1], dtype=torch.float64)).sum()
    total = total + torch.where(lse.isinf(), 0.0, lse).double().sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def of_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the functions of a call of any size read, and its rows taken in several blocks."""
    monkeypatch.setattr(rows, "BLOCK_PAIRS", BLOCK)
    for module in (simplify, choice):
        monkeypatch.setattr(module, "SMALLEST_READ", 1)


@needs("AuxRequest", torch="2.9")
@pytest.mark.sampled(30)
@pytest.mark.parametrize("impl", ["tiled", "auto"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_as_flex_attention_and_as_the_formula(case: Case, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_small_calls(monkeypatch)
    exact = case.leaves()
    output, lse, z, seen = formula(case, exact)
    wanted = gradients(output, lse, exact)
    mine, theirs = cast(case, exact), cast(case, exact)
    found, aux = ours(case, mine, impl)
    assert aux.lse is not None
    flex_output, flex_lse = flex_forward(case, theirs)
    flex_gradients = gradients(*flex_math(case, theirs), theirs)
    judged = list(exact) if learns(case) else ["query", "key", "value"]
    assert torch.equal(aux.lse.isneginf(), flex_lse.isneginf())
    if case.dtype in HALF:
        assert half_complaint(found, output, [flex_output], case.dtype) is None
        # lse is float32, but the products that a function makes of tables are of the half dtype
        assert half_complaint(aux.lse, lse, [flex_lse], torch.float32, floor=LOGIT) is None
        size = max(g.abs().max().item() for g in wanted.values())
        own = gradients(found, aux.lse, mine)
        for name in judged if impl == "tiled" else ():  # the kernel's are judged where its errors are
            wrong = half_complaint(own[name], wanted[name], [flex_gradients[name]], case.dtype, floor=size)
            assert wrong is None, f"gradient of {name}: {wrong}"
        return
    length = max(case.sizes.keys, case.sizes.dim)
    for judge, (an_output, an_lse) in {"formula": (output, lse), "flex": (flex_output, flex_lse)}.items():
        for actual, expected in ((found, an_output), (aux.lse, an_lse)):
            wrong = complaint(actual, expected, case.dtype, length=length, logit=LOGIT, magnitude=1.0)
            assert wrong is None, f"{judge}: {wrong}"
    places = case.sizes.batch * case.sizes.heads * case.sizes.length
    own = gradients(found, aux.lse, mine)
    for expected, names in ((wanted, list(exact)), (flex_gradients, judged)):
        pair = ({name: each[name] for name in names} for each in (own, expected))
        assert not gradient_complaints(*pair, case.dtype, length=length, logit=LOGIT, rows=places)
    p = torch.where(seen, (z - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1)).exp(), 0.0)
    statistics = logit_statistics(torch.where(seen, z, 0.0), seen) | weight_statistics(p.detach())
    qk = (mine[name] for name in ("query", "key"))
    measured = sqrtdk.measure(*qk, **case.functions(mine), enable_gqa=True)
    shown = seen.any(-1)
    for name, value in statistics.items():
        for actual in (getattr(aux, name), getattr(measured, name)[shown]):
            expected = value if actual.shape == value.shape else value[shown]
            wrong = complaint(actual, expected, case.dtype, length=length, logit=LOGIT, magnitude=LOGIT**2)
            assert wrong is None, f"{name}: {wrong}"


def qkv(*lead: int, length: int = 6, keys: int = 5) -> list[Tensor]:
    return [torch.randn(*lead, n, 8) for n in (length, keys, keys)]


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_b_counts_through_the_leading_dimensions(lead: tuple[int, ...]) -> None:
    q, k, v = qkv(*lead)
    heads, batch = (lead or (1,))[-1], math.prod(lead[:-1])
    table = torch.randn(batch, heads, 6, 5)
    found = sqrtdk.attention(
        q,
        k,
        v,
        score_mod=lambda s, b, h, i, j: s + table[b, h, i, j],
        mask_mod=lambda b, h, i, j: table[b, h, i, j] < 1,
    )
    mask = torch.where(table < 1, table, -math.inf).view(*lead, 6, 5)
    torch.testing.assert_close(found, sqrtdk.attention(q, k, v, mask))


def test_the_order_is_scale_softcap_score_mod_bias_mask() -> None:
    q, k, v = qkv(1, 2)
    bias = torch.randn(6, 5)
    found = sqrtdk.attention(
        q,
        k,
        v,
        scale=2.0,
        softcap=3.0,
        score_mod=lambda s, *place: s * s,
        bias=bias,
        mask_mod=lambda b, h, i, j: i >= j,
    )
    z = (3.0 * torch.tanh(2.0 * q @ k.mT / 3.0)) ** 2 + bias
    torch.testing.assert_close(found, z.masked_fill(~torch.ones(6, 5).tril().bool(), -math.inf).softmax(-1) @ v)


def test_positions_are_those_of_the_rows_that_are_measured() -> None:
    q, k, _ = qkv(2, 2)
    mods: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s + i * j, "mask_mod": lambda b, h, i, j: i >= j}
    some = sqrtdk.measure(q, k, rows=torch.tensor([1, 4]), **mods)
    whole = sqrtdk.measure(q, k, **mods)
    assert torch.equal(some.keys, whole.keys[..., [1, 4]])
    torch.testing.assert_close(some.lse, whole.lse[..., [1, 4]])


def test_every_mask_must_be_passed() -> None:
    q, k, v = qkv(1, 2, length=5)
    causal, even = (lambda b, h, i, j: i >= j), (lambda b, h, i, j: j % 2 == 0)
    blocks = flex.create_block_mask(causal, None, None, 5, 5, device="cpu")
    both = torch.ones(5, 5).tril().bool() & (torch.arange(5) % 2 == 0)
    wanted = sqrtdk.attention(q, k, v, both)
    for options in (
        {"attn_mask": blocks, "mask_mod": even},
        {"block_mask": blocks, "mask_mod": even},
        {"is_causal": True, "mask_mod": even},
        {"attn_mask": torch.arange(5) % 2 == 0, "block_mask": blocks},
    ):
        torch.testing.assert_close(sqrtdk.attention(q, k, v, **options), wanted)


def test_nan_at_a_key_that_a_mask_mod_hides_reaches_nothing() -> None:
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, length=5))
    with torch.no_grad():
        k[..., -1, :], v[..., -1, :] = math.nan, math.inf
    for mods in (
        {"mask_mod": lambda b, h, i, j: j < 4},
        {"score_mod": lambda s, b, h, i, j: torch.where(j < 4, s, -math.inf)},
    ):
        found = sqrtdk.attention(q, k, v, **mods)
        torch.testing.assert_close(found, sqrtdk.attention(q, k[..., :4, :], v[..., :4, :]))
        assert torch.autograd.grad(found.sum(), q)[0].isfinite().all()


def test_transforms_of_torch_follow_the_functions() -> None:
    q, k, v = qkv(3, 2, 2)
    slopes = torch.rand(2)

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slopes[h] * j

        return sqrtdk.attention(q, k, v, score_mod=alibi, mask_mod=lambda b, h, i, j: i >= j)

    whole = attend(q, k, v, slopes)
    torch.testing.assert_close(torch.func.vmap(attend, (0, 0, 0, None))(q, k, v, slopes), whole)
    found = torch.func.grad(lambda slopes: attend(q, k, v, slopes).square().sum())(slopes)
    learned = slopes.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(attend(q, k, v, learned).square().sum(), learned)[0])


def blocks_of(length: int, keys: int, batch: int | None = None) -> Any:
    return flex.create_block_mask(lambda b, h, i, j: i >= j, batch, None, length, keys, device="cpu")


BAD: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "mask_mod of logits": (
        lambda: {"mask_mod": lambda b, h, i, j: i - 0.5},
        TypeError,
        "one bool; got torch.f",
    ),
    "score_mod of bools": (
        lambda: {"score_mod": lambda s, b, h, i, j: i >= j},
        TypeError,
        "floating logit; got torch.bool",
    ),
    "mask_mod of True": (lambda: {"mask_mod": lambda b, h, i, j: True}, TypeError, "mask_mod returns a tensor.*True"),
    "score_mod of a row": (
        lambda: {"score_mod": lambda s, b, h, i, j: s + torch.zeros(6, 5)[i]},
        ValueError,
        r"one floating logit for one pair; got \(5,\)",
    ),
    "score_mod that decides by a value": (
        lambda: {"score_mod": lambda s, b, h, i, j: s if i >= j else s - 1},
        NotImplementedError,
        "decides by the value of a tensor",
    ),
    "mask_mod that is a tensor": (lambda: {"mask_mod": torch.ones(6, 5)}, TypeError, "mask_mod is a function.*Tensor"),
    "blocks of other sizes": (
        lambda: {"block_mask": blocks_of(6, 6)},
        ValueError,
        r"got \(1, 1, 6, 6\)",
    ),
    "blocks of another batch": (lambda: {"attn_mask": blocks_of(6, 5, 3)}, ValueError, r"got \(3, 1, 6, 5\)"),
    "blocks that are a function": (
        lambda: {"block_mask": lambda b, h, i, j: i >= j},
        TypeError,
        "block_mask is a Block",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_such_function_is_refused(name: str) -> None:
    options, kind, message = BAD[name]
    q, k, v = qkv(2, 3)
    with pytest.raises(kind, match=message) as raised:
        sqrtdk.attention(q, k, v, **options())
    assert isinstance(raised.value, SqrtdkError)
    assert raised.value.hint


def test_a_block_mask_of_any_callable_or_of_none_is_read() -> None:
    q, k, v = qkv(2, 3)

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *, n: int) -> Tensor:
        return (i - j).abs() < n

    mods = {
        mod: flex.create_block_mask(mod, None, None, 6, 5, device="cpu") for mod in (partial(near, n=2), flex.noop_mask)
    }
    for mod, mask in mods.items():
        assert torch.equal(sqrtdk.attention(q, k, v, block_mask=mask), sqrtdk.attention(q, k, v, mask_mod=mod))


def test_a_score_mod_hides_what_it_makes_infinite_and_nothing_else() -> None:
    """A bias of -inf lowers a logit; a key that it lowers to -inf counts as visible, as without the function."""
    q, k, v = qkv(2, 3)
    bias = torch.zeros(5).index_fill(0, torch.tensor([3]), -math.inf)
    plain, same, hidden = (
        sqrtdk.attention(q, k, v, bias=bias, return_aux=True, **mods)[1]
        for mods in (
            {},
            {"score_mod": lambda s, *_: s},
            {"score_mod": lambda s, b, h, i, j: s.where(j != 1, -math.inf)},
        )
    )
    assert torch.equal(plain.keys, same.keys)
    assert torch.equal(plain.min_logit, same.min_logit)
    assert (hidden.keys == plain.keys - 1).all()


def test_a_table_that_is_written_before_the_backward_pass_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "block_rows", lambda call: 2)
    q, k, v = (tensor.requires_grad_() for tensor in qkv(2, 3))
    document = torch.zeros(6, dtype=torch.long)
    output = sqrtdk.attention(q, k, v, mask_mod=lambda b, h, i, j: document[i] == document[j], impl="tiled")
    document[2] = 1
    with pytest.raises(SqrtdkError, match="changed in place between forward and backward"):
        output.sum().backward()

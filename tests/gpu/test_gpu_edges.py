"""Edges of the Triton kernel: rows that see nothing, NaN and infinity, the ends of float32, empty calls."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import AuxRequest
from sqrtdk._resolve import resolve_arguments
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.triton import triton
from sqrtdk.stats.request import AuxOutput
from tests.gpu.judged import Leaves, attention, expected, qkv, wrong_with
from tests.support.triton_here import DEVICE, needs_triton, overflows
from tests.tolerances import allowed, complaint

pytestmark = [needs_triton, overflows, pytest.mark.usefixtures("small_tiles")]
ALL = AuxRequest.all()
LOW = torch.finfo(torch.float32).min
INF = math.inf


def blind(length: int, keys: int) -> Tensor:
    """Every third row sees nothing, and rows 16 to 31, a tile, neither."""
    visible = torch.rand(length, keys, generator=torch.Generator().manual_seed(9)) < 0.6
    visible[:, 3] = True
    visible[::3] = False
    visible[16:32] = False
    return visible


# rows that see nothing


@pytest.mark.parametrize(
    ("kind", "sink"),
    [
        ("bool", None),
        ("causal", 0.5),
        *(pytest.param(*more, marks=pytest.mark.full) for more in [("float", None), ("float", 0.5), ("causal", None)]),
    ],
)
def test_blind_rows_are_those_of_the_oracle(kind: str, sink: float | None) -> None:
    leaves = qkv(40, 37)
    visible = blind(40, 37)
    options: dict[str, Any] = {} if sink is None else {"sinks": torch.tensor([sink, 0.0])}
    if kind == "causal":
        options["window"] = (1, None)  # rows 38 and 39 see nothing
    else:
        options["attn_mask"] = visible if kind == "bool" else torch.zeros(40, 37).masked_fill(~visible, -INF)
    wrong = wrong_with(leaves, **options)
    assert not wrong, "\n".join(wrong)
    if sink is None:
        answer = expected(leaves, options)
        gone = ~answer.visible.any(-1)
        output, aux = attention({name: leaf.float() for name, leaf in leaves.items()}, options, ALL)
        assert (output.cpu()[gone] == 0).all()
        assert (aux.lse.cpu()[gone] == -INF).all()
        assert (aux.entropy_nats.cpu()[gone] == 0).all()
        assert aux.mean.cpu()[gone].isnan().all()
        assert aux.keys.cpu()[~gone].gt(0).all()


@pytest.mark.parametrize("length", [3, pytest.param(20, marks=pytest.mark.full)])
def test_a_sink_of_no_weight_is_none(length: int) -> None:
    leaves = {name: leaf.float() for name, leaf in qkv(length, 70).items()}
    visible = torch.rand(length, 70, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[1] = False
    output, aux = attention(leaves, {"attn_mask": visible}, ALL)
    sunk, sunk_aux = attention(leaves, {"attn_mask": visible, "sinks": torch.tensor([-INF, -INF])}, ALL)
    for name, mine in {"output": sunk, **sunk_aux._asdict()}.items():
        wanted = output if name == "output" else getattr(aux, name)
        text = complaint(mine.cpu(), wanted.cpu(), torch.float32, length=70, logit=10.0, magnitude=1.0)
        assert text is None, f"{name}: {text}"


@pytest.mark.parametrize("length", [3, pytest.param(20, marks=pytest.mark.full)])
def test_calls_of_blind_rows_alone(length: int) -> None:
    leaves = qkv(length, 70)
    wrong = wrong_with(leaves, attn_mask=torch.zeros(length, 70, dtype=torch.bool), gradients=False)
    assert not wrong, "\n".join(wrong)
    given = {name: leaf.float().requires_grad_() for name, leaf in leaves.items()}
    output, aux = attention(given, {"window": (0, None), "causal_lower_right": False,
                                    "attn_mask": torch.zeros(length, 70, dtype=torch.bool)}, ALL)  # fmt: skip
    total = output.sum() + aux.entropy_nats.sum() + aux.lse.masked_fill(aux.lse == -INF, 0.0).sum()
    assert all(not gradient.any() for gradient in torch.autograd.grad(total, list(given.values())))


# empty calls


@pytest.mark.parametrize("sizes", [(0, 9), (7, 0), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"sinks": 0.3}, {"window": (2, 1)}], ids=str)
def test_calls_without_rows_or_keys(sizes: tuple[int, int], options: dict[str, Any]) -> None:
    leaves = {name: leaf.float().requires_grad_() for name, leaf in qkv(*sizes).items()}
    output, aux = attention(leaves, options, ALL)
    assert output.shape == (1, 2, sizes[0], 16)
    assert (output == 0).all()
    assert all(statistic.shape == (1, 2, sizes[0]) for statistic in aux)
    assert (aux.keys == 0).all()
    assert (aux.lse == (0.3 if "sinks" in options else -INF)).all()
    for gradient in torch.autograd.grad(output.sum() + aux.entropy_nats.sum(), list(leaves.values())):
        assert not gradient.any()


@pytest.mark.parametrize("lead", [(0, 2), (2, 0)])
def test_calls_without_a_batch_or_a_head(lead: tuple[int, int]) -> None:
    q, k, v = (torch.randn(*lead, n, 8, device=DEVICE, requires_grad=True) for n in (7, 9, 9))
    output, aux = sqrtdk.attention(q, k, v, impl="triton", return_aux=ALL)
    assert output.shape == (*lead, 7, 8)
    assert all(statistic.shape == (*lead, 7) for statistic in aux)
    assert all(g.numel() == 0 for g in torch.autograd.grad(output.sum(), (q, k, v)))


def test_values_of_no_width() -> None:
    leaves = {name: leaf.float() for name, leaf in qkv(7, 40, 8, 0).items()}
    output, aux = attention(leaves, {}, ALL)
    assert output.shape == (1, 2, 7, 0)
    wanted = expected({**leaves, "value": leaves["key"]}, {}).statistics["lse"]
    assert complaint(aux.lse.cpu(), wanted, torch.float32, length=40, logit=10.0) is None


# NaN and infinity


def bad_at(number: float, length: int = 20, keys: int = 37) -> Leaves:
    """Row 2 of the first head has a product that is no number, or is infinite; the other rows have none."""
    leaves = {name: leaf.float() for name, leaf in qkv(length, keys).items()}
    leaves["query"][0, 0, 2] = 0.0
    leaves["query"][0, 0, 2, 3] = number
    leaves["key"][..., 3] = leaves["key"][..., 3].abs() + 0.1
    return leaves


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 3.0}, {"sinks": 0.5}], ids=str)
@pytest.mark.parametrize("number", [math.nan, INF])
@pytest.mark.parametrize("length", [3, 20])
def test_a_row_of_a_logit_that_is_no_number_is_nan(length: int, number: float, options: dict[str, Any]) -> None:
    if number == INF and "softcap" in options:
        pytest.skip("a softcap makes a number of it")
    try:
        output, aux = attention(bad_at(number, length, 37), options, ALL)
    except UnsupportedError:
        assert options == {"is_causal": True}  # on a CPU it is looked for
        return
    row = torch.zeros(1, 2, length, dtype=torch.bool)
    row[0, 0, 2] = True
    for name, statistic in {"output": output.amax(-1), **aux._asdict()}.items():
        if name != "keys":
            assert statistic.cpu()[row].isnan().all(), name
        assert statistic.cpu()[~row].isfinite().all(), name
    assert aux.keys.cpu()[row] == 37


@pytest.mark.parametrize("length", [3, 20])
def test_a_row_of_minus_infinity_alone_is_counted_and_not_blind(length: int) -> None:
    output, aux = attention(bad_at(-INF, length), {}, ALL)
    assert output[0, 0, 2].isnan().all()
    assert aux.entropy_nats[0, 0, 2].isnan()
    assert aux.lse[0, 0, 2] == -INF
    assert aux.max_logit[0, 0, 2] == -INF
    assert aux.keys[0, 0, 2] == 37
    plain = attention(bad_at(-INF, length), {})
    assert plain[0, 0, 2].isnan().all()


def unseen(leaves: Leaves, **options: Any) -> tuple[Tensor, AuxOutput]:
    """Of a call whose numbers nobody looked at, as on a GPU, or while compiling."""
    given = {name: value.to(DEVICE) for name, value in {**leaves, **options}.items() if isinstance(value, Tensor)}
    return triton(replace(resolve_arguments(**{**options, **given}, return_aux=ALL), unclean=False))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keys", [(1,), (0, 1), (16, 17, 40), tuple(range(16)), tuple(range(16, 53))])
def test_some_logits_of_minus_infinity_are_counted(keys: tuple[int, ...]) -> None:
    """Also where a block holds no other, or all blocks but the first."""
    leaves = qkv(18, 53)
    bias = torch.zeros(18, 53).index_fill(1, torch.tensor(keys), -INF)
    output, aux = unseen({name: leaf.float() for name, leaf in leaves.items()}, bias=bias)
    answer = expected(leaves, {"attn_mask": bias == 0})
    assert complaint(output.cpu(), answer.output, torch.float32, length=53, logit=10.0) is None
    for name in ("lse", "max_logit", "entropy_nats", "collision", "peak", "jacobian_norm"):
        wanted = answer.statistics[name]
        text = complaint(getattr(aux, name).cpu(), wanted, torch.float32, length=53, logit=10.0, magnitude=1.0)
        assert text is None, f"{name}: {text}"
    assert (aux.keys == 53).all()
    assert (aux.min_logit == -INF).all()
    assert (aux.mean == -INF).all()


@pytest.mark.parametrize("hidden", [{"attn_mask": torch.arange(37) < 30}, {"window": (2, 3)}], ids=["mask", "window"])
@pytest.mark.parametrize("place", ["key", "value"])
def test_a_number_that_is_none_at_a_hidden_key_is_refused_on_a_cpu(place: str, hidden: dict[str, Any]) -> None:
    """There it is looked for, and a weight of 0 would be no help."""
    leaves = {name: leaf.float() for name, leaf in qkv(5, 37).items()}
    leaves[place][:, :, 35] = math.nan
    if DEVICE.type == "cpu":
        with pytest.raises(UnsupportedError, match="NaN or infinity stands at a hidden key"):
            attention(leaves, hidden)


# the ends of float32


def far_logits(keys: int = 40) -> dict[str, Tensor]:
    """Rows whose sum leaves float32; in the last two also the distance of two logits does."""
    z = torch.randn(6, keys, generator=torch.Generator().manual_seed(2))
    some = torch.arange(keys) % 3 == 0
    return {
        "a third of them lowest": z.masked_fill(some, LOW),
        "all but one lowest": z.masked_fill(torch.arange(keys) > 0, LOW),
        "all lowest": torch.full_like(z, LOW),
        "all highest": torch.full_like(z, -LOW),
        "a block of them lowest": z.masked_fill(torch.arange(keys) // 16 == 1, LOW),
        "lowest and highest": z.masked_fill(some, LOW).masked_fill(some.roll(1), -LOW),
        "lowest blocks and highest": torch.where(torch.arange(keys) // 16 == 1, LOW, -LOW).expand_as(z),
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", far_logits())
def test_the_mean_is_finite_where_it_is(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqrtdk.impl.gpu.launch.split_keys", lambda *rest: (parts, 40 if parts == 1 else 16))
    bias = far_logits()[name]
    leaves = {key: leaf.float() for key, leaf in qkv(6, 40, 8).items()}
    output, aux = attention(leaves, {"bias": bias}, ALL)
    logits = leaves["query"] @ leaves["key"].mT * 8**-0.5 + bias
    exact = [float(sum(map(Fraction, row)) / len(row)) for row in logits.double().flatten(0, 2).tolist()]
    error = (aux.mean.cpu().double().flatten() * 0.5 - torch.tensor(exact, dtype=torch.float64) * 0.5).abs().max()
    share = error.item() / logits.abs().max().item() * 2.0
    assert share <= allowed(torch.float32, length=40, logit=0.0, magnitude=1.0), share
    assert not aux.variance.isnan().any()
    assert torch.equal(aux.variance.cpu().isinf(), logits.amax(-1) > logits.amin(-1))
    wanted = expected(leaves, {"bias": bias}).output
    for result in (output, attention(leaves, {"bias": bias})):
        assert complaint(result.cpu(), wanted, torch.float32, length=40, logit=10.0) is None


@pytest.mark.parametrize("size", [1e18, 1e19])
def test_the_variance_is_infinite_only_where_its_sum_is(size: float) -> None:
    """Squares of 1e36, forty of which float32 holds, and of 1e38."""
    signs = torch.ones(1, 40).masked_fill(torch.arange(40) % 2 == 0, -1.0)
    leaves = {name: leaf.float() for name, leaf in qkv(1, 40).items()}
    leaves["query"] = torch.zeros_like(leaves["query"])
    _, aux = attention(leaves, {"bias": signs * size}, ALL)
    wanted = size**2 if size < 1e19 else INF
    assert aux.variance.flatten().tolist() == pytest.approx([wanted] * 2, rel=1e-5)


def test_logits_whose_sum_is_no_number_have_weights() -> None:
    q, k = (2.5e18 * torch.randn(1, 1, n, 4) for n in (20, 70))
    leaves = {"query": q, "key": k, "value": torch.randn(1, 1, 70, 4)}
    found = attention(leaves, {"scale": 1.0}).cpu()
    fits = (q.double() @ k.double().mT).abs().amax(-1) < torch.finfo(torch.float32).max
    assert fits.sum() > 5
    wanted = expected(leaves, {"scale": 1.0}).output
    assert complaint(found[fits], wanted[fits], torch.float32, length=70, logit=0.0) is None  # one key has all weight


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sink", [1e30, -1e30, 3e38, LOW])
def test_far_sinks(sink: float) -> None:
    wrong = wrong_with(qkv(18, 37), sinks=sink, gradients=False, logit=10.0)
    assert [text for text in wrong if not text.startswith("lse")] == []
    assert bool(wrong) <= (sink > 0)  # where the sink is the lse, which is as far


@pytest.mark.sampled(2)
@pytest.mark.parametrize("softcap", [1e-30, 1e-3, 1e6, 1e38])
def test_softcaps_of_any_size(softcap: float) -> None:
    wrong = wrong_with(qkv(18, 37), softcap=softcap)
    assert not wrong, "\n".join(wrong)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scale", [1e-20, 40.0, 3e4])
def test_scales_of_any_size(scale: float) -> None:
    leaves = {name: leaf * 64 // 8 for name, leaf in qkv(18, 37, 3).items()}  # products are exact
    wrong = wrong_with(leaves, scale=scale, gradients=False)
    assert not wrong, "\n".join(wrong)


def test_a_window_beyond_all_keys_bounds_nothing() -> None:
    leaves = {name: leaf.float() for name, leaf in qkv(18, 37).items()}
    plain = attention(leaves, {})
    for window in [(None, 2**63 - 2), (2**62, 2**62), (2**31 - 1, 2**31 - 1), (2**31, 2**31 + 7), (2**39, None)]:
        assert torch.equal(attention(leaves, {"window": window}), plain), window


def test_half_queries_that_a_scale_takes_out_of_their_range() -> None:
    q, k, v = (torch.randn(1, 2, length, 8).half() for length in (5, 40, 40))
    q[..., 0, :] = 6e4
    leaves = {"query": q, "key": k, "value": v, "scale": torch.full((5, 1), 2.0)}
    try:
        output = attention(leaves, {})
    except UnsupportedError:
        assert DEVICE.type == "cpu"
        return
    assert output.isfinite().all()


def test_hidden_positions_are_not_read() -> None:
    """NaN there would show, since a weight of 0 times NaN is NaN."""
    q, k, v = (torch.randn(1, 2, n, 8, device=DEVICE) for n in (1, 6000, 6000))
    v[:, :, :5000] = math.nan
    forward = torch.ops.sqrtdk_gpu.forward
    found = forward(q, k, v, 0.3, None, 0.0, None, None, None, None, 5999, 99 - 5999, None, 0)[0]
    assert found.isfinite().all()

"""The oracle itself: against torch's SDPA in float64, against formulas by hand, and numbers known beforehand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.attention.oracle import STATISTICS, attend
from tests.tolerances import complaint, gradient_complaints

F64 = torch.float64
LONGEST, LOGIT = 7, 20.0  # sum of a row; a product of normal numbers
SHAPES = {
    "2-D": ((5, 4), (7, 4), (7, 3)),
    "3-D": ((2, 5, 4), (2, 7, 4), (2, 7, 4)),
    "4-D": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    "5-D": ((2, 2, 3, 5, 4), (2, 2, 3, 5, 4), (2, 2, 3, 5, 4)),
    "gqa": ((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)),
    "one key": ((2, 3, 5, 4), (2, 3, 1, 4), (2, 3, 1, 4)),
}


def tensors(name: str) -> list[Tensor]:
    return [torch.randn(shape, dtype=F64, requires_grad=True) for shape in SHAPES[name]]


def same(actual: Tensor, expected: Tensor) -> None:
    found = complaint(actual, expected, F64, length=LONGEST, logit=LOGIT, magnitude=1.0)
    assert found is None, found


def same_gradients(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], rows: int) -> None:
    named = [dict(zip(("query", "key", "value"), gradients, strict=False)) for gradients in (actual, expected)]
    wrong = gradient_complaints(*named, F64, length=LONGEST, logit=LOGIT, rows=rows)
    assert not wrong, wrong


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("name", SHAPES)
def test_output_and_gradients_are_those_of_sdpa(name: str, mask: str) -> None:
    q, k, v = tensors(name)
    shape = (q.shape[-2], k.shape[-2])
    given = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(shape) > 0.4},
        "float": {"attn_mask": torch.randn(shape, dtype=F64).masked_fill(torch.rand(shape) > 0.7, -math.inf)},
    }[mask]
    ours = attend(q, k, v, scale=0.3, **given).output
    theirs = functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=name == "gqa", **given)
    same(ours, theirs)
    cotangent = torch.randn_like(theirs)
    gradients = (torch.autograd.grad(output, (q, k, v), cotangent) for output in (ours, theirs))
    same_gradients(*gradients, rows=math.prod(q.shape[:-1]))


@pytest.mark.parametrize("name", SHAPES)
def test_order_is_scale_softcap_bias_mask(name: str) -> None:
    q, k, v = tensors(name)
    if name == "gqa":
        k, v = k.repeat_interleave(2, -3), v.repeat_interleave(2, -3)
    bias = torch.randn(q.shape[-2], k.shape[-2], dtype=F64)
    shown = torch.rand(q.shape[-2], k.shape[-2]) > 0.3
    shown[:, 0] = True
    z = 2.0 * torch.tanh((q @ k.mT * 0.7) / 2.0) + bias
    expected = torch.softmax(z.masked_fill(~shown, -math.inf), -1) @ v
    answer = attend(q, k, v, scale=0.7, softcap=2.0, bias=bias, attn_mask=shown)
    same(answer.output, expected)
    same(answer.logits, z.masked_fill(~shown, -math.inf))


def test_a_sink_is_a_key_with_value_zero() -> None:
    q, k, v = tensors("4-D")
    sinks = torch.randn(3, dtype=F64)
    z = torch.cat([q @ k.mT * 0.5, sinks[:, None, None].expand(2, 3, 5, 1)], -1)
    expected = torch.softmax(z, -1) @ torch.cat([v, torch.zeros(2, 3, 1, 6, dtype=F64)], -2)
    answer = attend(q, k, v, scale=0.5, sinks=sinks)
    same(answer.output, expected)
    same(answer.statistics["lse"], z.logsumexp(-1))
    same(answer.statistics["entropy_nats"], torch.special.entr(torch.softmax(z, -1)).sum(-1))
    off_by_one = (q @ k.mT * 0.5).exp()
    same(attend(q, k, v, scale=0.5, sinks=0.0).output, off_by_one @ v / (1 + off_by_one.sum(-1, keepdim=True)))


def test_statistics_by_hand() -> None:
    q, k, v = tensors("4-D")
    z = (q @ k.mT * 0.5).detach()
    p = torch.softmax(z, -1)
    jacobian = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    expected = {
        "lse": z.logsumexp(-1),
        "max_logit": z.amax(-1),
        "min_logit": z.amin(-1),
        "mean": z.mean(-1),
        "variance": z.var(-1, correction=0),
        "entropy_nats": torch.special.entr(p).sum(-1),
        "collision": p.square().sum(-1),
        "peak": p.amax(-1),
        "jacobian_norm": torch.linalg.matrix_norm(jacobian),
        "keys": torch.full((2, 3, 5), 7.0, dtype=F64),
    }
    found = attend(q, k, v, scale=0.5).statistics
    assert set(found) == set(STATISTICS) == set(expected)
    for name, value in expected.items():
        same(found[name].detach(), value)


def test_lse_and_entropy_carry_the_right_gradients() -> None:
    q, k, v = tensors("4-D")
    z = q @ k.mT * 0.5
    expected = {"lse": z.logsumexp(-1), "entropy_nats": torch.special.entr(torch.softmax(z, -1)).sum(-1)}
    found = attend(q, k, v, scale=0.5).statistics
    for name, value in expected.items():
        gradients = (torch.autograd.grad(x.sum(), (q, k), retain_graph=True) for x in (found[name], value))
        same_gradients(*gradients, rows=math.prod(q.shape[:-1]))


def test_numbers_known_beforehand() -> None:
    # logits 0, log 2, log 5 of one row: weights 1/8, 2/8, 5/8
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([1.0, 2.0, 5.0], dtype=F64).log().view(1, 1, 3, 1)
    v = torch.tensor([8.0, 16.0, 24.0]).view(1, 1, 3, 1)
    answer = attend(q, k, v, scale=1.0)
    same(answer.output.flatten(), torch.tensor([(8 * 1 + 16 * 2 + 24 * 5) / 8.0], dtype=F64))
    for name, value in {"lse": math.log(8), "peak": 5 / 8, "collision": 30 / 64}.items():
        same(answer.statistics[name].flatten(), torch.tensor([value], dtype=F64))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"is_causal": True}, ["1000", "1100"]),
        ({"causal_lower_right": True}, ["1110", "1111"]),
        ({"window": (1, 0)}, ["1000", "1100"]),
        ({"window": (0, 1)}, ["1100", "0110"]),
        ({"window": (None, 0)}, ["1000", "1100"]),
        ({"window": (-1, 1)}, ["1100", "1110"]),
        ({"window": (0, -1)}, ["1111", "0111"]),
        ({"window": (1, 1), "is_causal": True}, ["1000", "1100"]),
        ({"window": (1, 1), "causal_lower_right": True}, ["0110", "0011"]),
        ({"is_causal": True, "attn_mask": torch.tensor([[True, True, False, True]])}, ["1000", "1100"]),
        ({"is_causal": True, "attn_mask": torch.tensor([[-math.inf, 0.0, 0.0, 0.0]])}, ["0000", "0100"]),
    ],
)
def test_masks_by_hand(given: dict, expected: list[str]) -> None:
    q, k = torch.randn(2, 3), torch.randn(4, 3)
    visible = attend(q, k, k, scale=1.0, **given).visible
    assert ["".join(str(int(x)) for x in row) for row in visible] == expected


def test_a_row_that_sees_nothing() -> None:
    q, k, v = tensors("4-D")
    shown = torch.ones(5, 7, dtype=torch.bool)
    shown[2] = False
    answer = attend(q, k, v, scale=0.5, attn_mask=shown)
    assert (answer.output[..., 2, :] == 0).all()
    assert (answer.statistics["lse"][..., 2] == -math.inf).all()
    assert (answer.statistics["keys"][..., 2] == 0).all()
    total = answer.output.sum() + answer.statistics["entropy_nats"].sum() + answer.statistics["lse"][..., :2].sum()
    grad = torch.autograd.grad(total, (q, k, v))
    assert (grad[0][..., 2, :] == 0).all()
    assert all(g.isfinite().all() for g in grad)


def test_what_is_hidden_does_not_leak() -> None:
    q, k, v = tensors("4-D")
    bad_k, bad_v = k.detach().clone(), v.detach().clone()
    bad_k[..., 3, :], bad_v[..., 3, :] = math.nan, math.inf
    bad_k.requires_grad_(), bad_v.requires_grad_()
    shown = torch.ones(5, 7, dtype=torch.bool)
    shown[:4, 3] = False
    clean, dirty = (attend(q, *kv, scale=0.5, attn_mask=shown) for kv in ((k, v), (bad_k, bad_v)))
    same(dirty.output[..., :4, :], clean.output[..., :4, :])
    assert dirty.output[..., 4, :].isnan().all()
    grads = [torch.autograd.grad(a.output[..., :4, :].sum(), q)[0][..., :4, :] for a in (clean, dirty)]
    same(*grads)
